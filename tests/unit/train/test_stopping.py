"""Signals that ask to stop are noted; a second Ctrl-C ends the process, as does SIGTERM before the first step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest

from megatron_hetero.train import stopping
from megatron_hetero.train.stopping import SIGNALS, insists, stop_requests


def send(*numbers: int) -> None:
    """Signals to this process."""
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """SIGHUP, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_requests() as request:
        request.begin()
        assert not request
        send(number)
        assert request and request.seen is number
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_the_first_signal_is_answered_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "leave_interrupted", lambda: None)
    with stop_requests():
        send(SIGINT, SIGINT)
    said = capfd.readouterr().err
    assert said.startswith("SIGINT: ") and "Ctrl-C again" in said and said.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    with stop_requests():
        send(SIGUSR1)
    assert capfd.readouterr().err == ""


def test_nohup_keeps_a_run_from_stopping() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as request:
            send(signal.SIGHUP)
            assert not request
    finally:
        signal.signal(signal.SIGHUP, before)


def test_after_the_last_step_signals_do_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_requests() as request:
        request.end()
        assert [signal.getsignal(each) for each in SIGNALS] == before and not request


def test_the_program_can_be_asked_before_it_imports_what_takes_long(tmp_path: Path) -> None:
    """Only then does a signal that comes early ask it to stop."""
    code = """
import contextlib, os, signal, sys
import pretrain_vlm
@contextlib.contextmanager
def process_group(timeout_s):
    assert "torch" not in sys.modules
    os.kill(os.getpid(), signal.SIGUSR1)
    yield
def train(config, platform, request):
    assert request, "noted"
    print("lives")
    return True
pretrain_vlm.process_group, pretrain_vlm.train = process_group, train
pretrain_vlm.main(sys.argv[1:])
"""
    flags = f"--model.hf_path m --data.registry.d.annotations d --data.datasets d --checkpoint.dir {tmp_path}".split()
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


def test_without_checkpoints_nothing_changes() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_requests(wanted=False) as request:
        assert [signal.getsignal(each) for each in SIGNALS] == before and not request


@pytest.mark.parametrize("first, then, at_once", [
    (SIGINT, SIGINT, True),  # Ctrl-C twice, without torchrun
    (SIGINT, SIGTERM, True),  # the same, through torchrun
    (SIGUSR1, SIGINT, True),
    (SIGUSR1, SIGUSR1, False),  # from Slurm itself, and from torchrun
    (SIGTERM, SIGTERM, False),
    (SIGUSR1, SIGTERM, False),  # the warning, then the end of the time: there may be enough left to save
])  # fmt: skip
def test_a_second_signal(first: int, then: int, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert insists(first, then) == at_once
    left: list[bool] = []
    monkeypatch.setattr(stopping, "leave_interrupted", lambda: left.append(True))
    with stop_requests() as request:
        request.begin()
        send(first, then)
    assert request and left == [True] * at_once


@pytest.mark.parametrize("number, error, leaves", [
    (SIGTERM, RuntimeError("Connection closed by peer [127.0.0.1]:80"), True),
    (SIGTERM, RuntimeError("something else"), False),
    (SIGUSR1, RuntimeError("Connection closed by peer [127.0.0.1]:80"), False),
])  # fmt: skip
def test_nobody_waits_for_the_survivors(
    number: int, error: Exception, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's SIGTERM may come before a rank sees that another has gone: it does not stay to tell of it."""
    left: list[tuple[str, int]] = []
    monkeypatch.setattr(stopping, "leave", lambda message, status: left.append((message, status)))
    with pytest.raises(RuntimeError), stop_requests() as request:  # noqa: PT012 (the order matters)
        request.begin()
        send(number)
        raise error
    assert left == ([("", 70)] if leaves else [])


STARTING = """
import os, signal, threading
from megatron_hetero.train.stopping import stop_requests

with stop_requests() as request:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    threading.Event().wait(60)
"""


def test_sigterm_ends_a_rank_at_once_that_has_nothing_to_save() -> None:
    """A rank that waits in a store for one of another host may get no other notice that it has died."""
    done = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")
