"""Our launcher: what it says and with which status it ends, with ranks that do next to nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.groups.launch import STOPPED_FILE
from megatron_hetero.run import FAILED, main
from tests.support.matrix import thinned

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
GUARDED = """
import os, signal, sys, time
from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.launch import guarded, note_stop, rank
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


def test_an_exception_has_a_status_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([program(tmp_path, "raise MemoryError")]) == FAILED
    assert capfd.readouterr().err.startswith("rank 0 failed:\nTraceback")


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


WRONG: dict[str, tuple[str, str]] = {
    "nodes": ("--nnodes two", "two"),
    "no ranks": ("--nproc-per-node 0", "--nproc-per-node: found 0"),
    "a time-out": ("--nnodes 2 --rdzv-conf timeout=abc", "float: 'abc'"),
    "no name": ("--master-addr a..b --rdzv-conf timeout=0", "no store at a..b:29500 ("),
    "no host 0": (
        "--nnodes 2 --node-rank 1 --master-port 9 --rdzv-conf timeout=0",
        "no store at 127.0.0.1:9 after 0 s",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_options_are_refused_in_a_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG[name]
    assert main([*arguments.split(), __file__]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("flag", ["--master-port {}", "--rdzv-endpoint 127.0.0.1:{}"])
def test_a_port_that_is_taken_is_named_at_once(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert main([*flag.format(port := mute.getsockname()[1]).split(), __file__]) == 1
    err = capsys.readouterr().err
    assert f"127.0.0.1:{port}: found" in err and "address already in use" in err


LISTENING = """import psutil
print(*{f"{place.laddr.ip}" for process in (psutil.Process(), psutil.Process().parent())
        for place in process.net_connections() if place.status == "LISTEN"})"""


def test_a_run_on_one_host_listens_on_its_loopback_interface_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The store, and what gloo opens."""
    body = "from megatron_hetero.groups.launch import process_group\nwith process_group():\n"
    assert main(["--nproc-per-node", "1", program(tmp_path, body + f"    exec({LISTENING!r})")]) == 0
    assert capfd.readouterr().out == "127.0.0.1\n"


def hosts(number: int, *flags: str) -> list[str]:
    return ["--nnodes", "2", "--node-rank", str(number), *flags]


def test_a_missing_host_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*hosts(0, "--master-port", str(free_port()), "--rdzv-conf", "timeout=1"), __file__]) == 1
    waiting, *_, last = capfd.readouterr().err.splitlines()
    assert waiting.startswith("waiting for host 1 since") and "found no host 1 after 1 s" in last


EVENTS = {
    "user error": "raise UserError('found X')",
    "exception": "raise MemoryError",
    "death": "os.kill(os.getpid(), signal.SIGKILL)",
    "launcher killed": "os.kill(os.getppid(), signal.SIGKILL)\n        time.sleep(60)",
    "Ctrl-C": "os.kill(os.getppid(), signal.SIGINT)\n        time.sleep(60)",
}
ON_BOTH = [
    # The event; on which of two hosts; their statuses; what each says first.
    ("death", "1", (70, 137), ("rank 0 lost another rank", "rank 1 of ")),
    ("exception", "1", (70, 70), ("rank 0 lost another rank", "rank 1 failed:\n")),
    ("user error", "01", (1, 1), ("error: found X\n", "error: found X\n")),
    ("death", "0", (137, 70), ("rank 0 of ", "rank 1 lost another rank")),
    ("user error", "0", (1, 70), ("error: found X\n", "rank 1 lost another rank")),
    ("user error", "1", (70, 1), ("rank 0 lost another rank", "error: found X\n")),
    ("launcher killed", "0", (-9, 70), ("", "rank 1 lost another rank")),
    ("exception", "0", (70, 70), ("rank 0 failed:\n", "rank 1 lost another rank")),
    ("launcher killed", "1", (70, -9), ("rank 0 lost another rank", "")),
    ("Ctrl-C", "0", (130, 70), ("interrupted; ", "rank 1 lost another rank")),
]


@pytest.mark.parametrize("event, where, statuses, told", thinned(ON_BOTH, 10))
def test_what_ends_one_host_ends_both(
    event: str, where: str, statuses: tuple[int, int], told: tuple[str, str], tmp_path: Path
) -> None:
    """With the status of its own on the host that is the cause, and 70 on the other (docs/checkpoints.md)."""
    body = f"""import torch.distributed as dist
from megatron_hetero.groups.launch import process_group
with process_group():
    dist.barrier()
    if str(rank()) in "{where}":
        {EVENTS[event]}
    dist.barrier()"""
    command = [sys.executable, "-m", "megatron_hetero.run"]
    text, port = program(tmp_path, body), str(free_port())
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    launched = [
        subprocess.Popen([*command, *hosts(number, "--master-port", port), text], env=environment, **pipes)
        for number in range(2)
    ]
    outputs = [host.communicate(timeout=240)[0] for host in launched]
    assert tuple(host.returncode for host in launched) == statuses, outputs
    assert all(out.startswith(s) and bool(s) == bool(out) for out, s in zip(outputs, told, strict=True)), outputs
    assert all(out.count("\n") <= 1 for out in outputs if "Traceback" not in out), outputs
