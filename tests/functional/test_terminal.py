"""Programs with standard outputs that are closed or no terminal, or whose locale lacks characters, and Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.programs import program

TABLE = """
from rich.table import Table
from megatron_hetero.base.terminal import console
table = Table("one", "two")
table.add_row("a" * 90, "b" * 90)
console().print(table)"""


def run(
    body: str, *, out: int | Path = subprocess.PIPE, unbuffered: bool = False, **environ: str
) -> tuple[int, str, str]:
    """Status, output and errors of a program."""
    flags = ["-u"] if unbuffered else []
    with open(out, "w") if isinstance(out, Path) else open(os.devnull) as file:
        done = subprocess.run(
            [sys.executable, *flags, "-c", program(body)],
            stdout=file if isinstance(out, Path) else out,
            stderr=subprocess.PIPE,
            timeout=60,
            env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "COLUMNS")} | environ,
        )
    return done.returncode, (done.stdout or b"").decode(), done.stderr.decode()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_an_output_that_is_closed_is_as_one_that_leads_nowhere(closed: str) -> None:
    def status(body: str) -> tuple[int, str]:
        shell = ["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program(body)]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    said = "" if "2>" in closed else "error: found X\n"
    assert status("raise UserError('found X')") == (1, said)
    assert status("print('something')") == (0, "")


def test_a_start_outside_the_environment_is_an_error_in_one_line() -> None:
    """Without any package; an interpreter that is too old fails at the same place."""
    command = [sys.executable, "-S", "-E", "pretrain_vlm.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: No module named ") and "make venv" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_does_not_cut_tables() -> None:
    assert "a" * 90 + " │ " + "b" * 90 in run(TABLE.strip())[1]


def test_a_locale_that_lacks_characters_has_them_escaped() -> None:
    status, out, err = run(r"print('\u27e6\u2192')", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (status, out, err) == (0, "\\u27e6\\u2192\n", "")


@pytest.mark.parametrize(
    "command",
    [
        "examples.make_demo {folder}/demo",
        "megatron_hetero.cli.export {folder}/checkpoint {folder}/out",
        "megatron_hetero.cli.import {folder}/model {folder}/checkpoint",
        "megatron_hetero.cli.inspect_data --x",
    ],
)
def test_ctrl_c_ends_a_command_in_one_line(command: str, tmp_path: Path) -> None:
    """As soon as it can be: what takes long is imported inside."""
    module, *arguments = command.format(folder=tmp_path).split()
    wait = (
        "import os, signal, sys; from importlib import import_module\n"
        f"module = import_module('{module}')\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys(), 'slow imports before Ctrl-C is heeded'\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001)\n"
        f"raise SystemExit(module.main({arguments}))"
    )
    done = subprocess.run([sys.executable, "-c", wait], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr.startswith("interrupted; ") and done.stderr.count("\n") == 1
