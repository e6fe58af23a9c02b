"""The message of a user error."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

from megatron_hetero.base.errors import SharedError, UserError, in_short, printable, quoted


def test_the_message_has_the_whole_story_and_survives_pickling() -> None:
    error = UserError.at("train.jsonl:3", found="a", expected="b", because="c", fix="do d")
    assert str(error) == "train.jsonl:3: found a, expected b, because c. Do d."
    assert str(UserError.at("x", found="a", expected="b", fix="is it d?")) == "x: found a, expected b. Is it d?"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, ValueError)


def test_a_problem_takes_the_place_of_a_value() -> None:
    assert str(UserError.at("--lr", problem="given twice", fix="remove one")) == "--lr: given twice. Remove one."
    error = UserError.at("a", problem="p" * 3000, because="c", fix="do d")
    assert str(error) == f"a: {'p' * 2000}... and 1000 more characters, because c. Do d."
    assert type(SharedError.at("a", problem="b", fix="c")) is SharedError


@pytest.mark.parametrize("parts", [{}, {"problem": "a", "found": "b", "expected": "c"}], ids=["neither", "both"])
def test_an_error_quotes_a_value_or_states_a_problem(parts: dict[str, str]) -> None:
    with pytest.raises(AssertionError, match="value or .* problem"):
        UserError.at("a", fix="b", **parts)  # type: ignore[reportCallIssue]


@pytest.mark.parametrize("text", ["\x1b[2J", "\x07", "\r", "\u202e", "\u2028", "\x9b", "\ud83d", "\x00"])
def test_what_a_terminal_would_obey_is_escaped(text: str) -> None:
    escaped = text.encode("unicode_escape").decode()
    for error in (UserError(f"a{text}b"), UserError.at(f"a{text}b", found="x", expected="y", fix="z")):
        assert str(error).startswith(f"a{text.replace(text[0], escaped[: len(escaped) - len(text) + 1])}b")
        assert str(error).isprintable() and str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_message_of_parts_is_one_line() -> None:
    assert "\n" not in str(UserError.at("a\nerror: b", found="x\ny", expected="y", fix="z"))
    assert str(UserError("a\nb")) == "a\nb" and printable("日本\t🎨", but="\t") == "日本\t🎨"


def test_quoted_texts_are_cut() -> None:
    assert quoted("it's") == '"it\'s"' and quoted("\x1b") == "'\\x1b'"
    assert len(quoted("x" * 10**6)) < 250 and quoted("x" * 201).endswith("... and 1 more characters")


def test_advice_to_load_what_is_not_trusted_is_not_passed_on() -> None:
    """That of torch, and of transformers."""
    code, old = io.BytesIO(), pickle.dumps(print, protocol=2)
    torch.save(print, code)
    for content in (code.getvalue(), old, b"garbage"):
        with pytest.raises(pickle.UnpicklingError, match="weights_only") as error:
            torch.load(io.BytesIO(content), weights_only=True)
        said = in_short(error.value)
        assert said.startswith("UnpicklingError: WeightsUnpickler error: Unsupported ") and len(said) < 250
        for advice in ("weights_only", "trust", "False", "safe_globals", "\n", "\x1b"):
            assert advice not in said
    remote = ValueError("The folder contains code.\nPlease pass the argument `trust_remote_code=True` to allow it.")
    assert in_short(remote) == "ValueError: The folder contains code."
    assert in_short(EOFError()) == "EOFError" and len(in_short(OSError("x" * 10**6))) < 250
