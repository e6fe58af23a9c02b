"""Renders a record as chat text, split where supervision begins and ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_hetero.base.errors import UserError, in_short
from megatron_hetero.data.item_fields import ItemField
from megatron_hetero.data.records import Record
from megatron_hetero.data.turns import Content, Turn
from megatron_hetero.data.validation import IMAGES

END_OF_TURN = "<|im_end|>"
END_OF_THOUGHT, THOUGHT = "</think>", "the thought"
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
    """The record as messages for a chat template; `shown` replaces items."""
    return [{"role": turn.role, "content": _content(turn.content, shown), **turn.further} for turn in record.turns]


def _content(content: Content, shown: Parts) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else shown[part] for part in content]


def render(tokenizer: Any, record: Record, shown: Parts = PICTURES, *, last_only: bool = False) -> list[RenderedText]:
    """Renders the record with the tokenizer's chat template. `shown`: see `Parts`.

    The runs joined are the rendered text. An answer begins where the template's own generation prompt ends, so training
    matches generation, and ends with ``<|im_end|>`` or the tokenizer's token for the end of texts; thoughts and tool
    calls are part of it. Where the template renders an answer otherwise than after its generation prompt, such as one
    whose thought it drops, the answer begins after the header that the template writes for earlier answers. Supervised
    are the answers of `Turn.supervised`, with `last_only` none but the last of these.

    Prompts of the first turns and the last one are rendered whole. Between them a turn is rendered after another short
    conversation, which costs no more for many turns. Each way is tried where the other does not lead to the text.

    Raises:
        UserError: the template fails, does not render what a turn has or the record's tools, or alters an answer; or it
            does not render turns by themselves, and there are more than `MOST_TURNS`.
    """
    messages = to_messages(record, shown)
    full = _apply(tokenizer, messages, record)
    answers = [k for k, turn in enumerate(record.turns) if turn.role == "assistant"]
    trained = [k for k in answers if record.turns[k].supervised][-1 if last_only else 0 :]
    ends = [token for token in (END_OF_TURN, tokenizer.eos_token) if token]
    runs, position, next_turn = [], 0, 0
    for k in answers:
        start = _begin(tokenizer, record, messages, range(next_turn, k), full, position)
        stops = [at + len(token) for token in ends if (at := full.find(token, start)) >= 0]
        answer = full[start : min(stops, default=start)]
        lost = _lost(record.turns[k], answer)
        if lost and not (lost == THOUGHT and k < answers[-1] and drops_thoughts(tokenizer)):
            fix = "remove it, or use a chat template that renders it unchanged, as those of published models do"
            raise _template_error(record, f"does not render {lost} of turn {k + 1}", fix)
        if full[position:start].rstrip().endswith("<think>") and "<think>" in answer:
            problem = f"opens a thought before that of turn {k + 1}"
            raise _template_error(record, problem, "write the thought into the turn's `reasoning_content`")
        runs += [RenderedText(full[position:start], False), RenderedText(answer, k in trained)]
        position, next_turn = start + len(answer), k + 1
    for tool in record.tools:
        if (name := str(tool.get("function", tool).get("name"))) not in full:
            fix = "use the template of a model that calls tools, or remove `tools` from the record"
            raise _template_error(record, f"does not render the tool {name!r}", fix)
    return [run for run in [*runs, RenderedText(full[position:], False)] if run.text]


def _begin(
    tokenizer: Any, record: Record, messages: list[dict[str, Any]], asked: range, full: str, position: int
) -> int:
    """Where the answer to the turns `asked` begins in the text `full`, of which all before `position` is rendered from
    earlier turns. Raises `UserError`.
    """

    def after_all_turns() -> int:
        prompts = _prompts(tokenizer, messages[: asked.stop], record)
        return next((len(prompt) for prompt in prompts if full.startswith(prompt)), -1)

    def after_another_opening() -> int:
        with suppress(UserError):
            for prompt in _prompts(tokenizer, [*_OPENING, *messages[asked.start : asked.stop]], record):
                tail = prompt.partition(_OPENING[1]["content"] + END_OF_TURN)[2]
                if tail and full.startswith(tail, position):
                    return position + len(tail)
        return -1

    is_between = NEAR_TURNS <= asked.stop < len(messages) - 1
    if (start := after_another_opening() if is_between else after_all_turns()) >= position:
        return start
    if is_between and asked.stop >= MOST_TURNS:
        because = "the chat template of model.hf_path does not render each turn by itself, so that to find each answer "
        because += "takes a rendering of all turns before it"
        found, expected = f"{len(messages)} turns", f"at most {MOST_TURNS}"
        raise UserError.at(record.where, found=found, expected=expected, because=because, fix="split the conversation")
    if (start := after_all_turns() if is_between else after_another_opening()) >= position:
        return start
    fix = "use a template that begins answers as it does with add_generation_prompt"
    raise _template_error(record, f"does not render turn {asked.stop + 1} after its generation prompt", fix)


def _prompts(tokenizer: Any, messages: list[dict[str, Any]], record: Record) -> Iterator[str]:
    """What may precede an answer to `messages`: the prompt for generation, and the header of an earlier answer."""
    yield _apply(tokenizer, messages, record, prompt=True)
    question, mark = _OPENING[0], _OPENING[1]["content"]
    asked, more = (_apply(tokenizer, each, record) for each in ([question], [*_OPENING, question]))
    if more.startswith(asked) and mark in more:
        yield _apply(tokenizer, messages, record) + more[len(asked) : more.index(mark)]


def _lost(turn: Turn, answer: str) -> str:
    """What of a turn the template left out of the answer, or ""."""
    thought, _, text = turn.text.rpartition(END_OF_THOUGHT)
    thought = turn.further.get("reasoning_content") or thought.strip().removeprefix("<think>")
    names = [str(call["function"]["name"]) for call in turn.further.get("tool_calls", ())]
    parts = {"the text": text, **{f"the call of {name!r}": name for name in names}, THOUGHT: thought}
    return next((what for what, part in parts.items() if part.strip() not in answer), "")


def drops_thoughts(tokenizer: Any) -> bool:
    """Whether the chat template drops the thoughts of earlier answers, as templates of reasoning models do."""
    thought = _OPENING[1]["content"]
    messages = [_OPENING[0], {"role": "assistant", "content": f"<think>\n{thought}\n{END_OF_THOUGHT}\n\nYes."}] * 2
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False).count(thought) == 1
    except Exception:  # Any record will report what is wrong with the template.
        return False


def _apply(tokenizer: Any, messages: list[dict[str, Any]], record: Record, *, prompt: bool = False) -> str:
    options = {"tools": [*record.tools] or None, "tokenize": False, "add_generation_prompt": prompt}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # templates are programs: they raise anything
        fix = "use the chat template of the published model"
        raise _template_error(record, f"fails ({in_short(error)})", fix) from error


def _template_error(record: Record, problem: str, fix: str) -> UserError:
    because = "otherwise the supervised tokens cannot be located"
    where = f"{record.where}: chat template of model.hf_path"
    return UserError.at(where, problem=problem, because=because, fix=fix)
