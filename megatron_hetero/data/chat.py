"""A record as chat text, cut where supervision begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hetero.data import template
from megatron_hetero.data.records import Record
from megatron_hetero.data.time_limit import time_limit
from megatron_hetero.data.validation import marks_of, split_at_marks
from megatron_hetero.errors import UserError, in_short
from megatron_hetero.names import VISION

END_OF_TURN = "<|im_end|>"
RENDERED_S = 5.0
"""Seconds in which a template, a program that a file brings along, renders one conversation; one needs milliseconds."""
NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text that is trained on as a whole or not at all."""

    text: str
    supervised: bool


def to_messages(record: Record, shown: Mapping[str, str] = NONE) -> list[dict[str, Any]]:
    """The record in the form that chat templates take; a placeholder of the vision encoder becomes a part of type
    image. `shown`: of every other encoder, the text that stands for one of its images; templates do not know them.
    """
    return [{"role": turn.role, "content": _content(turn.role, turn.text, shown)} for turn in record.turns]


def _content(role: str, text: str, shown: Mapping[str, str]) -> str | list[dict[str, str]]:
    stretches, between = split_at_marks(text, marks_of([VISION, *shown]))
    if role != "user" or not between:
        return text
    images = [
        {"type": "image"} if mark.encoder == VISION else {"type": "text", "text": shown[mark.encoder]}
        for mark in between
    ]
    parts: list[dict[str, str]] = []
    for k, stretch in enumerate(stretches):
        parts += [images[k - 1]] if k else []
        parts += [{"type": "text", "text": stretch}] if stretch else []
    return parts


def render(tokenizer: Any, record: Record, shown: Mapping[str, str] = NONE) -> list[Piece]:
    """Renders the record with the tokenizer's chat template. `shown`: see `to_messages`.

    The pieces joined are the rendered text. Supervised are each assistant turn's text and its ``<|im_end|>``, nothing
    else. A turn begins where the template's own generation prompt ends, so training sees what generation will see.

    Raises:
        UserError: the template fails or takes too long, or rewrites earlier turns, or alters the assistant's text.
    """
    messages = to_messages(record, shown)
    full = _apply(tokenizer, messages, record, prompt=False)
    pieces, position = [], 0
    for k, turn in enumerate(record.turns):
        if turn.role != "assistant":
            continue
        prompt = _apply(tokenizer, messages[:k], record, prompt=True)
        answer = turn.text + END_OF_TURN
        if not full.startswith(prompt + answer):
            raise _template_error(
                record,
                found=f"a chat template that does not render turn {k + 1} as its generation prompt, the text, "
                f"and {END_OF_TURN}",
                expected="a template in which every turn extends the text before it",
            )
        pieces += [Piece(full[position : len(prompt)], False), Piece(answer, True)]
        position = len(prompt) + len(answer)
    return [piece for piece in [*pieces, Piece(full[position:], False)] if piece.text]


def render_prompt(tokenizer: Any, record: Record, turns: int) -> str:
    """The first `turns` of the record, and what the answer of a model follows. Raises `UserError`."""
    return _apply(tokenizer, to_messages(record)[:turns], record, prompt=True)


def _apply(tokenizer: Any, messages: list[dict[str, Any]], record: Record, *, prompt: bool) -> str:
    try:
        with time_limit(RENDERED_S):
            values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompt}
            return template.render(tokenizer.get_chat_template(), tokenizer.special_tokens_map | values)
    except TimeoutError:
        raise _template_error(
            record,
            found=f"a chat template that is not done after {RENDERED_S:g} s",
            expected="one that goes through the turns once",
        ) from None
    except Exception as error:  # templates are programs: they raise anything
        raise _template_error(
            record,
            found=f"a chat template that fails ({in_short(error)})",
            expected="a template for system, user and assistant turns with images",
        ) from error


def _template_error(record: Record, *, found: str, expected: str) -> UserError:
    return UserError.at(
        f"{record.where}: chat template of model.hf_path",
        found=found,
        expected=expected,
        because="otherwise the supervised tokens cannot be told",
        fix="use the chat template of Qwen2.5-VL",
    )
