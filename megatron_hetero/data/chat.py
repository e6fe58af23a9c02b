"""Renders a record as chat text, split where supervision begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_hetero.base.errors import UserError, in_short
from megatron_hetero.data.records import Record
from megatron_hetero.data.turns import Content
from megatron_hetero.data.validation import IMAGES, ItemField

END_OF_TURN = "<|im_end|>"
Parts = Mapping[ItemField, dict[str, str]]
"""The part of a chat message that stands for an item, by field."""
NEAR_TURNS, MOST_TURNS = 32, 512
"""Turns whose prompts are rendered from the beginning, as is the last one; and limit of all turns of a conversation if
the template renders turns by more than themselves.
"""
_OPENING = [{"role": "user", "content": "Shall we begin?"}, {"role": "assistant", "content": "Yes, do go on."}]
PICTURES: Parts = {field: {"type": "image"} for field in IMAGES}


@dataclass(frozen=True)
class RenderedText:
    """A run of rendered text, trained on entirely or not at all."""

    text: str
    supervised: bool


def to_messages(record: Record, shown: Parts = PICTURES) -> list[dict[str, Any]]:
    """The record as messages for a chat template; `shown` replaces placeholders."""
    return [{"role": turn.role, "content": _content(turn.content, shown), **turn.further} for turn in record.turns]


def _content(content: Content, shown: Parts) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else shown[part] for part in content]


def render(tokenizer: Any, record: Record, shown: Parts = PICTURES) -> list[RenderedText]:
    """Renders the record with the tokenizer's chat template. `shown`: see `Parts`.

    The runs joined are the rendered text. Each assistant turn's text and its ``<|im_end|>`` are supervised, nothing
    else. A turn begins where the template's own generation prompt ends, so training matches generation. The prompts of
    the first turns and the last one are rendered whole. Between them a turn is rendered by itself, which costs no more
    for many turns, and its prompt only if that is not in the text.

    Raises:
        UserError: the template fails, or rewrites earlier turns, or alters the assistant's text; or it does not render
            turns by themselves, and there are more than `MOST_TURNS`.
    """
    messages = to_messages(record, shown)
    full = _apply(tokenizer, messages, record, prompt=False)
    runs, position, next_turn = [], 0, 0
    for k, turn in enumerate(record.turns):
        if turn.role != "assistant":
            continue
        answer, between = turn.text + END_OF_TURN, ""
        is_between = NEAR_TURNS <= k < len(messages) - 1
        if is_between:  # The same text as after another short conversation, unless it depends on more.
            with suppress(UserError):
                alone = _apply(tokenizer, [*_OPENING, *messages[next_turn:k]], record, prompt=True)
                between = alone.partition(_OPENING[1]["content"] + END_OF_TURN)[2]
        start = position + len(between)
        if not between or not full.startswith(between + answer, position):
            prompt = _apply(tokenizer, messages[:k], record, prompt=True)
            start = len(prompt)
            if start < position or not full.startswith(prompt + answer):
                problem = f"does not render turn {k + 1} as its generation prompt, the text and {END_OF_TURN}"
                raise _template_error(record, problem)
            if is_between and k >= MOST_TURNS:
                found, expected = f"{len(messages)} turns", f"at most {MOST_TURNS}"
                because = (
                    "the chat template of model.hf_path does not render each turn by itself, so that to find each "
                )
                because += "answer takes a rendering of all turns before it"
                fix = "split the conversation"
                raise UserError.at(record.where, found=found, expected=expected, because=because, fix=fix)
        runs += [RenderedText(full[position:start], False), RenderedText(answer, True)]
        position, next_turn = start + len(answer), k + 1
    return [run for run in [*runs, RenderedText(full[position:], False)] if run.text]


def _apply(tokenizer: Any, messages: list[dict[str, Any]], record: Record, *, prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # templates are programs: they raise anything
        raise _template_error(record, f"fails ({in_short(error)})") from error


def _template_error(record: Record, problem: str) -> UserError:
    where, fix = f"{record.where}: chat template of model.hf_path", "use the chat template of the published model"
    because = "otherwise the supervised tokens cannot be located"
    return UserError.at(where, problem=problem, because=because, fix=fix)
