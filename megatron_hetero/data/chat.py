"""A record as chat text, cut where supervision begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_hetero.data.records import Record
from megatron_hetero.data.validation import IMAGE_PLACEHOLDER
from megatron_hetero.errors import UserError

END_OF_TURN = "<|im_end|>"


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text that is trained on as a whole or not at all."""

    text: str
    supervised: bool


def to_messages(record: Record) -> list[dict[str, Any]]:
    """The record in the form that chat templates take; each placeholder becomes a part of type image."""
    return [{"role": turn.role, "content": _content(turn.role, turn.text)} for turn in record.turns]


def _content(role: str, text: str) -> str | list[dict[str, str]]:
    if role != "user" or IMAGE_PLACEHOLDER not in text:
        return text
    parts: list[dict[str, str]] = []
    for k, stretch in enumerate(text.split(IMAGE_PLACEHOLDER)):
        parts += [{"type": "image"}] if k else []
        parts += [{"type": "text", "text": stretch}] if stretch else []
    return parts


def render(tokenizer: Any, record: Record) -> list[Piece]:
    """Renders the record with the tokenizer's chat template.

    The pieces joined are the rendered text. Supervised are each assistant turn's text and its ``<|im_end|>``, nothing
    else. A turn begins where the template's own generation prompt ends, so training sees what generation will see.

    Raises:
        UserError: the template fails, or rewrites earlier turns, or alters the assistant's text.
    """
    messages = to_messages(record)
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


def _apply(tokenizer: Any, messages: list[dict[str, Any]], record: Record, *, prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # templates are programs: they raise anything
        raise _template_error(
            record,
            found=f"a chat template that fails ({type(error).__name__}: {error})",
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
