"""Renders a record as chat text, split where supervision begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hetero.base.errors import UserError, in_short
from megatron_hetero.data.records import Record
from megatron_hetero.data.validation import IMAGES, ItemField, split_at_placeholders

END_OF_TURN = "<|im_end|>"
_MARK = "\ufdd0answer\ufdd0"
"""Stands for each answer in a rendering that locates them; longer where a text has it."""
Parts = Mapping[ItemField, dict[str, str]]
"""By field the part of a message that stands for an item in it."""
PICTURES: Parts = {field: {"type": "image"} for field in IMAGES}


@dataclass(frozen=True)
class RenderedText:
    """A run of rendered text, trained on entirely or not at all."""

    text: str
    supervised: bool


def to_messages(record: Record, shown: Parts = PICTURES) -> list[dict[str, Any]]:
    """The record as messages for a chat template, with a part for each placeholder, see `Parts`."""
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
    else. A turn begins where the template's own generation prompt ends, so training matches generation. The template
    is rendered at most four times, however many turns there are.

    Raises:
        UserError: the template fails, or rewrites earlier turns, or alters the assistant's text.
    """
    messages = to_messages(record, shown)
    answers = [k for k, turn in enumerate(record.turns) if turn.role == "assistant"]
    full = _apply(tokenizer, messages, record, prompt=False)
    mark = _MARK
    while any(mark in turn.text for turn in record.turns):
        mark += _MARK[0]
    marked = [each | {"content": mark} if each["role"] == "assistant" else each for each in messages]
    between = _apply(tokenizer, marked, record, prompt=False).split(mark)
    runs, position = [], 0
    for before, k in zip(between, answers, strict=False):
        before, answer = before.removeprefix(END_OF_TURN) if runs else before, record.turns[k].text + END_OF_TURN
        start = position + len(before)
        if not full.startswith(before + answer, position) or (
            # Prompts in between are not rendered: each is as long as the conversation before it.
            k in (answers[0], answers[-1]) and _apply(tokenizer, messages[:k], record, prompt=True) != full[:start]
        ):
            raise _unfit(record, k)
        runs += [RenderedText(before, False), RenderedText(answer, True)]
        position = start + len(answer)
    if len(between) != len(answers) + 1:
        raise _unfit(record, answers[-1])
    return [run for run in [*runs, RenderedText(full[position:], False)] if run.text]


def render_prompt(tokenizer: Any, record: Record, turns: int, shown: Parts = PICTURES) -> str:
    """The first `turns` of the record with the generation prompt. Raises `UserError`."""
    return _apply(tokenizer, to_messages(record, shown)[:turns], record, prompt=True)


def _apply(tokenizer: Any, messages: list[dict[str, Any]], record: Record, *, prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # templates are programs: they raise anything
        raise _template_error(record, f"fails ({in_short(error)})") from error


def _unfit(record: Record, k: int) -> UserError:
    return _template_error(record, f"does not render turn {k + 1} as its generation prompt, the text and {END_OF_TURN}")


def _template_error(record: Record, problem: str) -> UserError:
    return UserError.at(
        f"{record.where}: chat template of model.hf_path",
        problem=problem,
        because="otherwise the supervised tokens cannot be located",
        fix="use the chat template of the published model",
    )
