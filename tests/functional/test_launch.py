"""How processes start and end: one message on one rank, the right status, and nobody left waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.functional.programs import program
from tests.support.matrix import thinned

TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "localhost:0",
]


def start(body: str, *argv: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program(body), *argv], env=clean | (environment or {}), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_hear_ctrl_c,
    )  # fmt: skip


def _hear_ctrl_c() -> None:
    """A process that a shell started in the background ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def test_threads_that_still_work_do_not_abort_the_process_as_it_ends() -> None:
    """As those of gloo do, which drop the tensors of the last collective. Exit handlers run, and output is flushed."""
    body = """import atexit, torch
atexit.register(print, "handled")
def work():
    tensor = torch.ones(100)
    while True:
        tensor + tensor
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""
    assert list(map(outcome, [start(body), start(body)])) == [(0, "handled\n", "")] * 2


def test_a_process_alone_needs_no_launcher() -> None:
    body = """import torch, torch.distributed as dist
with process_group() as platform:
    total = torch.ones(1, device=platform.device)
    dist.all_reduce(total)
    print(rank(), world_size(), dist.get_world_size(), total.item(), argv)
print(dist.is_initialized())"""
    assert outcome(start(body, "--x"))[:2] == (0, "0 1 1 1.0 ['--x']\nFalse\n")


@pytest.mark.parametrize("wanted, level", [({}, "ERROR"), ({"TORCH_CPP_LOG_LEVEL": "INFO"}, "INFO")])
def test_torch_is_told_to_print_no_stack_traces_before_it_is_imported(wanted: dict[str, str], level: str) -> None:
    """It reads the variable then."""
    body = "print('torch' in sys.modules, os.environ['TORCH_CPP_LOG_LEVEL'])"
    clean = {k: v for k, v in os.environ.items() if k != "TORCH_CPP_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", program(body)], env=clean | wanted, capture_output=True, text=True)
    assert done.stdout == f"False {level}\n", done.stderr


def test_users_errors_are_reported_in_one_line() -> None:
    assert outcome(start("raise UserError('found X, expected Y')")) == (1, "", "error: found X, expected Y\n")


def test_our_errors_come_with_their_trace() -> None:
    status, _, err = outcome(start("raise RuntimeError('a bug')"))
    assert status == 70 and err.startswith("rank 0 failed:\nTraceback") and err.endswith("RuntimeError: a bug\n\n")


def test_exits_pass_through() -> None:
    assert outcome(start("print('help'); raise SystemExit(3)")) == (3, "help\n", "")


def test_ctrl_c_ends_at_once_with_130() -> None:
    process = start("print('ready', flush=True)\ntime.sleep(60)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    status, out, err = outcome(process)
    assert (status, out) == (130, "") and err.startswith("interrupted; ") and err.count("\n") == 1


def test_threads_keep_nobody_alive() -> None:
    start_s = time.monotonic()
    status, _, err = outcome(start("threading.Thread(target=time.sleep, args=(80,)).start()\nraise UserError('no')"))
    assert (status, err) == (1, "error: no\n") and time.monotonic() - start_s < 70


def test_other_ranks_let_the_first_one_tell() -> None:
    begin = time.monotonic()
    status, _, err = outcome(start("raise UserError('no')", environment={"RANK": "3", "WORLD_SIZE": "4"}))
    assert (status, err) == (1, "error: no\n") and time.monotonic() - begin > 3.5


def test_ranks_end_with_torchrun(tmp_path: Path) -> None:
    """It is killed, and can tell them nothing."""
    path = tmp_path / "program.py"
    path.write_text(
        program("os.write(1, f'{os.getpid()}\\n'.encode())  # in one piece, beside the other rank\ntime.sleep(60)")
    )
    agent = subprocess.Popen(
        [sys.executable, "-W", "ignore", *TORCHRUN, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    with agent:
        assert agent.stdout is not None
        ranks = [psutil.Process(int(agent.stdout.readline())) for _ in range(2)]
        agent.kill()
    _, alive = psutil.wait_procs(ranks, timeout=10.0)
    # Nobody may be left who waits for processes without a parent.
    left = [rank for rank in alive if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
    for rank in left:
        rank.kill()
    assert not left


@pytest.mark.parametrize("failing", thinned([1, 0], 2))
def test_one_rank_that_fails_ends_the_other_that_waits(failing: int, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    body = f"""import torch.distributed as dist
with process_group():
    if rank() == {failing}:
        raise UserError('only rank {failing} found this')
    dist.barrier()"""
    path.write_text(program(body))
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *TORCHRUN, path], capture_output=True, text=True, timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == 1 and time.monotonic() - begin < 60
    assert done.stderr.count(f"error: only rank {failing} found this") == 1
    assert f"rank {1 - failing} failed" not in done.stderr, "the other rank spoke of a lost peer"
