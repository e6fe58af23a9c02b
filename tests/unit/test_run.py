"""Our launcher: what it says and with which status it ends, with ranks that do next to nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.distributed.launch import STOPPED_FILE
from megatron_hetero.run import main

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
GUARDED = """
import os, signal, sys, time
from megatron_hetero.errors import UserError
from megatron_hetero.distributed.launch import guarded, note_stop, rank
def main(argv):
{body}
if __name__ == "__main__":
    guarded(main, sys.argv[1:])
"""


def program(folder: Path, body: str, *, ours: bool = True) -> str:
    path = folder / "program.py"
    path.write_text(GUARDED.format(body="".join(f"    {line}\n" for line in body.splitlines())) if ours else body)
    return str(path)


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The launcher runs in this process: what it sets is set back."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOGLEVEL", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    for name in (STOPPED_FILE, "OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


ENDS = {
    "done": ("print('x')", 0, ["x", "x"]),
    "an error that is told": ("raise UserError('found X')", 1, ["error: found X"]),
    "a status": ("if rank() == 1: sys.exit(7)\ntime.sleep(60)", 7, []),
    "killed": ("if rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)", 137, ["was killed by SIGKILL"]),
    "stopped": ("note_stop()", 75, []),
}


@pytest.mark.parametrize("name", ENDS)
def test_nothing_is_added_to_what_the_ranks_say(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body, status, parts = ENDS[name]
    assert main(["--nproc-per-node", "2", program(tmp_path, body)]) == status
    out, err = capfd.readouterr()
    lines = [*out.splitlines(), *err.splitlines()]
    assert len(lines) == len(parts) and all(part in line for part, line in zip(parts, lines, strict=True)), lines


AGAIN = {
    "an error of the user": ("raise UserError('found X')", 1),
    "a bad command line": ("print('usage', file=sys.stderr)\nsys.exit(2)", 1),
    "an exception": ("print('begins', file=sys.stderr)\nraise MemoryError", 2),
}


@pytest.mark.parametrize("name", AGAIN)
def test_ranks_are_started_again_where_that_may_help(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body, times = AGAIN[name]
    assert main(["--max-restarts", "1", program(tmp_path, body)]) > 0
    lines = capfd.readouterr().err.splitlines()
    assert sum(any(part in line for part in ("found X", "usage", "begins")) for line in lines) == times


WARNED = """def say(number, frame):
    print('noted', number)
    sys.exit()
signal.signal(signal.SIGUSR1, say)
os.kill(os.getppid(), signal.SIGUSR1)
while True:  # The signal may come just before a sleep, which then takes its time.
    time.sleep(0.05)"""


def test_a_schedulers_warning_is_passed_on_to_the_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([program(tmp_path, WARNED)]) == 128 + signal.SIGUSR1
    assert capfd.readouterr().out == f"noted {int(signal.SIGUSR1)}\n"


def test_nohup_protects_the_launcher_too(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert main([program(tmp_path, "os.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.5)")]) == 0


def test_a_program_that_is_not_ours_is_reported_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([program(tmp_path, "import sys; sys.exit(3)", ours=False)]) == 3
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "exited with status 3" in err


WRONG: dict[str, tuple[Sequence[str], str]] = {
    "no program": (["nowhere.py"], "nowhere.py: no such file"),
    "nodes": (["--nnodes", "two", __file__], "two"),
    "ranks": (["--nproc-per-node", "many", __file__], "many"),
    "GPUs": (["--nproc-per-node", "tpu", __file__], "tpu"),
    "no ranks": (["--nproc-per-node", "0", __file__], "--nproc-per-node: found 0"),
    "fewer than none": (["--nproc-per-node", "-1", __file__], "--nproc-per-node: found -1"),
    "alone and not": (["--standalone", "--nnodes", "2", __file__], "--standalone: found --nnodes 2, expected one host"),
    "no such host": (["--nnodes", "2", "--node-rank", "5", __file__], "--node-rank: found 5, expected 0 to 1"),
    "rendezvous": (["--rdzv-backend", "pigeons", "--rdzv-endpoint", "x:1", __file__], "pigeons"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_options_are_refused_in_a_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, told = WRONG[name]
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and told in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["LOGLEVEL", "TORCH_DISTRIBUTED_DEBUG"])
def test_what_torch_reads_is_refused_in_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "foo")
    assert main([__file__]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: environment variable {name}: found `foo`") and err.count("\n") == 1


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def meeting(port: int) -> list[str]:
    return ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]


def test_hosts_that_do_not_come_are_waited_for_with_a_word_and_an_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*meeting(free_port()), "--rdzv-conf", "join_timeout=1", program(tmp_path, "pass")]) == 1
    waiting, *_, last = capfd.readouterr().err.splitlines()
    assert waiting.startswith("waiting for other hosts since") and "--nnodes 2 at 127.0.0.1" in waiting
    assert last.startswith("error: rendezvous of the hosts") and "RendezvousTimeoutError" in last


def test_one_error_on_all_hosts_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_hetero.run", *meeting(free_port())]
    text = program(tmp_path, "raise UserError('found X')")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    hosts = [
        subprocess.Popen([*command, text], env=os.environ | {"PYTHONPATH": os.getcwd()}, **pipes) for _ in range(2)
    ]
    outputs = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [1, 1]
    assert "".join(outputs) == "error: found X\n"
