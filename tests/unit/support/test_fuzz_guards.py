"""The guards of the fuzzer see what they are for. In processes of their own: an audit hook stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, socket, subprocess, sys
from pathlib import Path
from tests.fuzz.guards import Guards
os.chdir(sys.argv[1])
guards = Guards(Path.cwd())
with guards.watching():
    {work}
print(guards.seen)
"""
CASES = [
    ("open('x', 'w').close()", None),
    ("os.mkdir('a'); os.rename('a', 'b'); os.rmdir('b')", None),
    ("os.makedirs('../elsewhere', exist_ok=True)", None),
    ("open('/dev/null', 'w').close(); open('/etc/hosts').close()", None),
    ("os.rename('here', '../elsewhere/there')", "a file outside: os.rename '../elsewhere/there'"),
    ("open('../elsewhere/x', 'w').close()", "a file outside: open '../elsewhere/x'"),
    ("open('link/x', 'w').close()", "a file outside: open 'link/x'"),
    ("os.close(os.open('../elsewhere/y', os.O_CREAT | os.O_WRONLY))", "a file outside"),
    ("subprocess.run(['true'])", "a process: subprocess.Popen"),
    ("os.system('true')", "a process: os.system"),
    ("os.fork() or os._exit(0)", "a process: os.fork"),
    ("socket.socket().connect_ex(('127.0.0.1', 1))", "a connection: ('127.0.0.1', 1)"),
]


def seen(work: str, folder: Path) -> str:
    (folder / "own").mkdir()
    (folder / "elsewhere").mkdir()
    (folder / "own/here").touch()
    (folder / "own/link").symlink_to(folder / "elsewhere")
    script, root = SCRIPT.replace("{work}", work), Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(folder / "own")], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("work, expected", CASES)
def test_what_must_not_be_done_is_seen(work: str, expected: str | None, tmp_path: Path) -> None:
    found = seen(work, tmp_path)
    assert expected in found if expected else found == "[]"
