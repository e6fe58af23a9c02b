"""A terminal that goes, and messages of the argument parser."""

from __future__ import annotations

import os
import sys

import pytest

from megatron_hetero.base.terminal import Parser, prepare_outputs


def test_a_terminal_that_goes_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of ssh: what has been trained is to be saved."""
    master, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        prepare_outputs()
        print("one", flush=True)
        assert os.read(master, 100) == b"one\r\n"
        os.close(master)
        print("two", flush=True)
        print("three")


def test_what_a_command_line_quotes_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Parser(prog="p").parse_args(["--\x1b[2J"])
    assert capsys.readouterr().err.endswith("p: error: unrecognized arguments: --\\x1b[2J\n")
