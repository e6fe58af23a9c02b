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
NEAR_TURNS = 32
"""Turns whose prompts are rendered from the beginning, as is the last one."""
MOST_TURNS = 512
"""Limit of the turns of a conversation if the template renders turns by more than themselves."""
_OPENING = [{"role": "user", "content": "Shall we begin?"}, {"role": "assistant", "content": "Yes, do go on."}]
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
        answer = turn.text + END_OF_TURN
        between = ""
        if NEAR_TURNS <= k < len(messages) - 1:
            between = _rendered_alone(tokenizer, messages[next_turn:k])
        start = position + len(between)
        if not between or not full.startswith(between + answer, position):
            prompt = _apply(tokenizer, messages[:k], record, prompt=True)
            start = len(prompt)
            if start < position or not full.startswith(prompt + answer):
                problem = f"does not render turn {k + 1} as its generation prompt, the text and {END_OF_TURN}"
                raise _template_error(record, problem)
            if MOST_TURNS <= k < len(messages) - 1:
                raise _too_many_turns(record)
        runs += [RenderedText(full[position:start], False), RenderedText(answer, True)]
        position, next_turn = start + len(answer), k + 1
    return [run for run in [*runs, RenderedText(full[position:], False)] if run.text]


def _rendered_alone(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """The text from the end of an answer to the next one, if it depends on the messages between them alone: that after
    another short conversation. Empty if the template fails.
    """
    try:
        text = tokenizer.apply_chat_template([*_OPENING, *messages], tokenize=False, add_generation_prompt=True)
    except Exception:  # as in `_apply`
        return ""
    return text.partition(_OPENING[1]["content"] + END_OF_TURN)[2]


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


def _too_many_turns(record: Record) -> UserError:
    return UserError.at(
        record.where,
        found=f"{len(record.turns)} turns",
        expected=f"at most {MOST_TURNS}",
        because="the chat template of model.hf_path does not render each turn by itself, so that to find each answer "
        "takes a rendering of all turns before it",
        fix="split the conversation",
    )
