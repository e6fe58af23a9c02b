"""Code that a file brings along ends in time: chat templates are programs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_hetero.data import chat
from megatron_hetero.data.records import Record, Turn
from megatron_hetero.data.time_limit import time_limit
from megatron_hetero.errors import UserError
from megatron_hetero.processor.processor import Processor
from tests.support.folders import ModelChoice, write_model

RECORD = Record("d", 0, "d.jsonl:1", (Turn("user", "what?"), Turn("assistant", "red")))


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_what_ends_in_time_is_left_alone() -> None:
    before = threading.active_count()
    for _ in range(200):
        with time_limit(60):
            spin(0.0001)
    assert threading.active_count() <= before + 1, "one thread watches them all"


@pytest.mark.parametrize("main", [True, False])
def test_what_takes_longer_is_ended(main: bool) -> None:
    ended = []

    def work() -> None:
        try:
            with time_limit(0.1):
                spin(20)
        except TimeoutError:
            ended.append(True)
        spin(0.3)  # nothing comes later

    start = time.monotonic()
    thread = threading.Thread(target=work)
    work() if main else thread.start()
    if not main:
        thread.join()
    assert ended == [True] and time.monotonic() - start < 10


def test_what_ends_just_in_time_raises_inside_or_not_at_all() -> None:
    outside = 0
    for _ in range(50):
        try:
            with time_limit(0.002):
                spin(0.002)
        except TimeoutError:
            outside += 1
        spin(0.0005)
    assert outside <= 50


TRACED = """
import sys, time
from megatron_hetero.data.time_limit import time_limit
def call():
    return 1
for late in (False, True):
    try:
        with time_limit(0.01 if late else 60):
            while late:
                pass
    except TimeoutError:
        print("late")
    sys.settrace(lambda *_: None)
    call()
    sys.settrace(None)
print("traced")
"""


def test_a_program_can_be_traced_after_it() -> None:
    """By a debugger, or for coverage: Python 3.11 looked for a pending exception forever."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "late\ntraced\n", done.stderr


@pytest.mark.parametrize("late", [0.0, 0.002, 0.02])
def test_no_exception_comes_after_the_end(late: float) -> None:
    for _ in range(20):
        with suppress(TimeoutError), time_limit(0.002):
            spin(late)
        spin(0.003)


def test_an_exception_that_the_code_inside_takes_does_not_come_again() -> None:
    with time_limit(0.05):
        try:
            spin(20)
        except TimeoutError:
            spin(0.2)
    spin(0.2)


@pytest.mark.parametrize("body", ["", "x"])
def test_a_template_with_nested_loops(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "RENDERED_S", 0.3)
    processor = Processor.from_folder(write_model(tmp_path / "model", ModelChoice(vision_layers=1, text_layers=1)))
    loops = "".join(f"{{% for {name} in range(90000) %}}" for name in "abc") + body + "{% endfor %}" * 3
    processor.tokenizer.chat_template = loops
    start = time.monotonic()
    with pytest.raises(UserError, match=r"d\.jsonl:1: chat template of model\.hf_path: not finished after 0\.3 s"):
        processor.tokenize(RECORD)
    assert time.monotonic() - start < 10
