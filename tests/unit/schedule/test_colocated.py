"""What the colocated schedule does around the models; whole steps are tested with the trainer and for parity."""

from __future__ import annotations

import time

import torch

from megatron_hetero.platform import CPU, Platform
from megatron_hetero.schedule.colocated import Stopwatch, _with_padding


def test_the_stopwatch_adds_up_and_starts_again() -> None:
    watch = Stopwatch(Platform(CPU, "gloo"))
    for _ in range(2):
        with watch.part("boundary"):
            time.sleep(0.02)
    with watch.part("text"):
        pass
    seconds = watch.read()
    assert seconds["boundary"] >= 0.04 and 0 <= seconds["text"] < seconds["boundary"] and len(seconds) == 2
    assert watch.read() == {}


def test_the_stopwatch_counts_a_part_that_fails() -> None:
    watch = Stopwatch(Platform(CPU, "gloo"))
    try:
        with watch.part("vision"):
            raise ValueError
    except ValueError:
        assert "vision" in watch.read()


def test_rows_that_pad_get_a_gradient_of_zero() -> None:
    encoded, grads = torch.zeros(5, 2), torch.ones(3, 2)
    assert _with_padding(grads, encoded).tolist() == [[1, 1]] * 3 + [[0, 0]] * 2
    assert _with_padding(torch.zeros(0, 2), encoded).tolist() == [[0, 0]] * 5
