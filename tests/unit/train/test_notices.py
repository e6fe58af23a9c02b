"""Notices of the first rank at the start of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_hetero.base.errors import UserError
from megatron_hetero.train.start import _unread


class Data:
    """A data set that says `line`, or raises it."""

    def __init__(self, line: str | Exception) -> None:
        self.line = line

    @property
    def unread(self) -> str:
        if isinstance(self.line, Exception):
            raise self.line
        return self.line


def inputs(*lines: str | Exception) -> Any:
    mixtures = [SimpleNamespace(sampled=[(Data(line), 1.0)]) for line in lines]
    return SimpleNamespace(mixture=mixtures[0], held_out={"held out": mixtures[-1]})


def test_each_data_set_is_noted_once() -> None:
    assert _unread(inputs("b", "a")) == ["a", "b"] and _unread(inputs("a", "a")) == ["a"]


def test_a_file_that_is_gone_ends_no_run_on_the_first_rank_alone() -> None:
    for error in (UserError("gone"), OSError("gone")):
        assert _unread(inputs("a", error)) == []
