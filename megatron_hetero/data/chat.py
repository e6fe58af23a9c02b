"""Renders a record as chat text, split where supervision begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from megatron_hetero.base.errors import UserError, in_short
from megatron_hetero.data.item_fields import ItemField
from megatron_hetero.data.records import Record
from megatron_hetero.data.turns import Content
from megatron_hetero.data.validation import IMAGES

END_OF_TURN = "<|im_end|>"
END_OF_THOUGHT = "</think>"
Entries = Mapping[ItemField, dict[str, str]]
"""The entry of a chat message that stands for an item, by field."""
NEAR_TURNS, MAX_TURNS = 32, 512
"""Number of first turns whose prompts are rendered from the beginning, like the prompt of the last turn; and maximum
number of turns if the template renders a turn differently after other turns.
"""
_OPENING = [{"role": "user", "content": "Shall we begin?"}, {"role": "assistant", "content": "Yes, do go on."}]
_UNKNOWN = "otherwise the supervised tokens cannot be located"
PICTURES: Entries = {field: {"type": "image"} for field in IMAGES}


@dataclass(frozen=True)
class RenderedText:
    """A run of rendered text that is either supervised as a whole or not at all."""

    text: str
    supervised: bool


def to_messages(record: Record, shown: Entries = PICTURES) -> list[dict[str, Any]]:
    """Return the record as messages for a chat template, with items replaced by the entries `shown`."""
    return [{"role": turn.role, "content": _content(turn.content, shown), **turn.further} for turn in record.turns]


def _content(content: Content, shown: Entries) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": entry} if isinstance(entry, str) else shown[entry] for entry in content]


def render(tokenizer: Any, record: Record, shown: Entries = PICTURES, *, last_only: bool = False) -> list[RenderedText]:
    """Render the record with the tokenizer's chat template. Returns the rendered text as consecutive runs. `shown`: see
    `Entries`.

    An answer begins where the template's generation prompt ends, so that training matches generation, and ends with
    ``<|im_end|>`` or the tokenizer's end-of-text token; it includes thoughts and tool calls. An earlier answer that the
    template does not render after its generation prompt, for example because it drops the thought, begins after the
    header that the template writes for earlier answers. Answers of turns with `Turn.supervised` are supervised, with
    `last_only` only the last answer.

    Prompts of the first turns and of the last turn are rendered from the beginning. Turns in between are rendered
    alone, after another short conversation, so that the cost is linear in the number of turns. If one way does not
    reproduce the rendered text, the other is tried.

    Raises:
        UserError: the template fails, leaves out contents of a turn or the record's tools, or alters an answer; or it
            renders turns differently after other turns, and there are more than `MAX_TURNS`.
    """
    messages = to_messages(record, shown)
    full = _apply(tokenizer, messages, record)
    answers = [k for k, turn in enumerate(record.turns) if turn.role == "assistant"]
    trained = [k for k in answers[-1 if last_only else 0 :] if record.turns[k].supervised]
    _require_rendered(tokenizer, record, messages, full, [k for k in answers[-1:] if k in trained])
    ends = [token for token in dict.fromkeys((END_OF_TURN, tokenizer.eos_token)) if token]
    runs, position, next_turn = [], 0, 0
    for k in answers:
        is_last = k == answers[-1] and k in trained
        start = _begin(tokenizer, record, messages, range(next_turn, k), full, position, is_last=is_last)
        stops = [at + len(token) for token in ends if (at := full.find(token, start)) >= 0]
        answer = full[start : min(stops, default=start)]
        entries = [
            (turn, entry, full[position:start]) for turn in range(next_turn, k) for entry in record.turns[turn].entries
        ]
        entries.append((k, record.turns[k].text.rpartition(END_OF_THOUGHT)[2], answer))
        for turn, entry, rendered in entries:
            if isinstance(entry, str) and entry.strip() not in rendered:
                problem = f"does not render the text of turn {turn + 1} as it is"
                problem += f", followed by {' or '.join(ends)}" if turn == k else ""
                raise _template_error(record, problem, "use a template that renders all turns, as published ones do")
        if full[position:start].rstrip().endswith("<think>") and "<think>" in answer:
            problem = f"opens a thought before that of turn {k + 1}"
            raise _template_error(record, problem, "write the thought into the turn's `reasoning_content`")
        runs += [RenderedText(full[position:start], False), RenderedText(answer, k in trained)]
        position, next_turn = start + len(answer), k + 1
    return [run for run in [*runs, RenderedText(full[position:], False)] if run.text]


def _require_rendered(
    tokenizer: Any, record: Record, messages: list[dict[str, Any]], full: str, last: Sequence[int]
) -> None:
    """Check that the rendered text `full` depends on the tools, tool calls and thoughts of a record. Templates may drop
    thoughts of answers other than `last`. Raises `UserError`.
    """

    def is_same(change: Callable[[dict[str, Any]], dict[str, Any]], only: Sequence[int] = range(len(messages))) -> bool:
        changed = [change(message) if k in only else message for k, message in enumerate(messages)]
        return changed != messages and _apply(tokenizer, changed, record) == full

    lost = ""
    if record.tools and _apply(tokenizer, messages, replace(record, tools=())) == full:
        lost = "`tools`"
    elif any(turn.further for turn in record.turns) and (is_same(_without_calls) or is_same(_without_arguments)):
        lost = "`tool_calls`"
    elif is_same(_without_thought, last) or (is_same(_without_thought) and not drops_thoughts(tokenizer)):
        lost = "a thought"
    if lost:
        because, fix = "it would not be trained on", "remove it, or use the template of a model that supports it"
        raise _template_error(record, f"does not render {lost}", fix, because)


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _without_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"function": call["function"] | {"arguments": {}}} for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


def _without_thought(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] != "assistant" or "reasoning_content" in message:
        return {name: value for name, value in message.items() if name != "reasoning_content"}
    thought, end, answer = content.rpartition(END_OF_THOUGHT)
    return (
        message | {"content": "<think>" + end + answer} if thought.strip().removeprefix("<think>").strip() else message
    )


def _begin(
    tokenizer: Any,
    record: Record,
    messages: list[dict[str, Any]],
    turns: range,
    full: str,
    position: int,
    *,
    is_last: bool,
) -> int:
    """Return where the answer to `turns` begins in the rendered text `full`, in which earlier turns end at `position`.
    `is_last`: whether the answer must follow the generation prompt. Raises `UserError`.
    """
    ways = 1 if is_last else 2

    def after_all_turns() -> int:
        prompts = islice(_prompts(tokenizer, messages[: turns.stop], record), ways)
        return next((len(prompt) for prompt in prompts if full.startswith(prompt)), -1)

    def after_another_opening() -> int:
        with suppress(UserError):
            prompts = _prompts(tokenizer, [*_OPENING, *messages[turns.start : turns.stop]], record)
            for prompt in islice(prompts, ways):
                tail = prompt.partition(_OPENING[1]["content"] + END_OF_TURN)[2]
                if tail and full.startswith(tail, position):
                    return position + len(tail)
        return -1

    is_between = NEAR_TURNS <= turns.stop < len(messages) - 1
    if (start := after_another_opening() if is_between else after_all_turns()) >= position:
        return start
    if is_between and turns.stop >= MAX_TURNS:
        because = "the chat template of model.hf_path does not render each turn by itself, so that to find each answer "
        because += "takes a rendering of all turns before it"
        found, expected = f"{len(messages)} turns", f"at most {MAX_TURNS}"
        raise UserError.at(record.where, found=found, expected=expected, because=because, fix="split the conversation")
    if (start := after_all_turns() if is_between else after_another_opening()) >= position:
        return start
    fix = "let the template write before answers all that it writes with add_generation_prompt"
    raise _template_error(record, f"does not render turn {turns.stop + 1} after its generation prompt", fix)


def _prompts(tokenizer: Any, messages: list[dict[str, Any]], record: Record) -> Iterator[str]:
    """Yield the texts that may precede an answer to `messages`: `messages` with the generation prompt, and `messages`
    with the header of an earlier answer.
    """
    yield _apply(tokenizer, messages, record, prompt=True)
    question, mark = _OPENING[0], _OPENING[1]["content"]
    short, long = (_apply(tokenizer, each, record) for each in ([question], [*_OPENING, question]))
    if long.startswith(short) and mark in long:
        yield _apply(tokenizer, messages, record) + long[len(short) : long.index(mark)]


def drops_thoughts(tokenizer: Any) -> bool:
    """Return whether the chat template drops thoughts of earlier answers, as templates of reasoning models do."""
    question, thought = _OPENING[0], _OPENING[1]["content"]
    inside = {"role": "assistant", "content": f"<think>\n{thought}\n{END_OF_THOUGHT}\n\nYes."}
    beside = {"role": "assistant", "content": "Yes.", "reasoning_content": thought}
    try:
        texts = [tokenizer.apply_chat_template([question, answer] * 2, tokenize=False) for answer in (inside, beside)]
        return any(text.count(thought) == 1 for text in texts)
    except Exception:  # A problem of the template is reported when a record is rendered.
        return False


def _apply(tokenizer: Any, messages: list[dict[str, Any]], record: Record, *, prompt: bool = False) -> str:
    options = {"tools": [*record.tools] or None, "tokenize": False, "add_generation_prompt": prompt}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # A template is a program, and may raise anything.
        fix = "use the chat template of the published model"
        raise _template_error(record, f"fails ({in_short(error)})", fix) from error


def _template_error(record: Record, problem: str, fix: str, because: str = _UNKNOWN) -> UserError:
    where = f"{record.where}: chat template of model.hf_path"
    return UserError.at(where, problem=problem, because=because, fix=fix)
