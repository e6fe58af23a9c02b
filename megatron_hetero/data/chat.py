"""Renders a record as chat text, split where supervision begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hetero.base.errors import UserError, in_short
from megatron_hetero.data.records import Record
from megatron_hetero.data.validation import IMAGES, ItemField, split_at_placeholders

END_OF_TURN = "<|im_end|>"
Parts = Mapping[ItemField, dict[str, str]]
"""The part of a chat message that stands for an item, by field."""
PICTURES: Parts = {field: {"type": "image"} for field in IMAGES}


@dataclass(frozen=True)
class RenderedText:
    """A run of rendered text, trained on entirely or not at all."""

    text: str
    supervised: bool


def to_messages(record: Record, shown: Parts = PICTURES) -> list[dict[str, Any]]:
    """The record as messages for a chat template; `shown` replaces placeholders."""
    return [{"role": turn.role, "content": _content(turn.role, turn.text, shown)} for turn in record.turns]


def _content(role: str, text: str, shown: Parts) -> str | list[dict[str, str]]:
    stretches, between = split_at_placeholders(text, list(shown))
    if role != "user" or not between:
        return text
    parts: list[dict[str, str]] = []
    for k, stretch in enumerate(stretches):
        parts += [shown[between[k - 1]]] if k else []
        parts += [{"type": "text", "text": stretch}] if stretch else []
    return parts


def render(tokenizer: Any, record: Record, shown: Parts = PICTURES) -> list[RenderedText]:
    """Renders the record with the tokenizer's chat template. `shown`: see `Parts`.

    The runs joined are the rendered text. Each assistant turn's text and its ``<|im_end|>`` are supervised, nothing
    else. A turn begins where the template's own generation prompt ends, so training matches generation.

    Raises:
        UserError: the template fails, or rewrites earlier turns, or alters the assistant's text.
    """
    messages = to_messages(record, shown)
    full = _apply(tokenizer, messages, record, prompt=False)
    runs, position = [], 0
    for k, turn in enumerate(record.turns):
        if turn.role != "assistant":
            continue
        prompt, answer = _apply(tokenizer, messages[:k], record, prompt=True), turn.text + END_OF_TURN
        start = len(prompt)
        if start < position or not full.startswith(prompt + answer):
            problem = f"does not render turn {k + 1} as its generation prompt, the text and {END_OF_TURN}"
            raise _template_error(record, problem)
        runs += [RenderedText(full[position:start], False), RenderedText(answer, True)]
        position = start + len(answer)
    return [run for run in [*runs, RenderedText(full[position:], False)] if run.text]


def _apply(tokenizer: Any, messages: list[dict[str, Any]], record: Record, *, prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # templates are programs: they raise anything
        raise _template_error(record, f"fails ({in_short(error)})") from error


def _template_error(record: Record, problem: str) -> UserError:
    return UserError.at(
        f"{record.where}: chat template of model.hf_path",
        problem=problem,
        because="otherwise the supervised tokens cannot be located",
        fix="use the chat template of the published model",
    )
