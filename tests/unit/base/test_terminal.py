"""Messages of the argument parser."""

from __future__ import annotations

import pytest

from megatron_hetero.base.terminal import Parser


def test_what_a_command_line_quotes_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Parser(prog="p").parse_args(["--\x1b[2J"])
    assert capsys.readouterr().err.endswith("p: error: unrecognized arguments: --\\x1b[2J\n")
