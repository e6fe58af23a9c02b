"""Validates records, once when their files are indexed and again when one is read, and reduces them to turns, items and
tools.

The text of a record is in one of these *forms*, the first that it has:

  - `conversations`: turns with `from` and `value`, as LLaVA has them;
  - `messages`: turns with `role` and `content`, a text or a list of parts as chat templates take them;
  - `texts`: pairs of `user` and `assistant`;
  - `question` and `answer`; or `answer` alone, as for captions.

In all but the first, items without placeholders come before the first human text. Placeholders are in plain texts of
users and tools; in parts of messages, types tell what is an item, and what the assistant says is text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_hetero.base.errors import VISION, UserError, in_short, quoted
from megatron_hetero.data.item_fields import SETTINGS, ItemField, ItemRef, items_of, kind, with_settings, wrong
from megatron_hetero.data.keys import FORMS, READ, THOUGHTS, WEIGHTS, unread
from megatron_hetero.data.turns import ChatRole, Turn
from megatron_hetero.models.items.types import Modality

# Names of LLaVA and of chat templates; of LLaMA-Factory and ms-swift for tools.
ROLES: Mapping[str, ChatRole] = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "system": "system", "tool": "tool", "observation": "tool", "tool_response": "tool"}  # fmt: skip
_CALLS = ("function_call", "tool_call")
"""Speakers, the assistant, whose text is the JSON of `tool_calls`."""
_NEXT = {None: ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
"""Roles that may follow a turn; only a tool follows its call."""
_SHOWING = ("user", "tool")
"""Roles whose turns show items."""
_TEXTS = {"conversations": ("value",), "messages": ("content",), "texts": ("user", "assistant"),
          **dict.fromkeys(FORMS[3:], ("question", "answer"))}  # fmt: skip
"""Keys of the texts of turns, in turn, by form."""
_EXAMPLES = {
    "conversations": '[{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]',
    "messages": '[{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]',
    "texts": '[{"user": ..., "assistant": ...}]',
}
_PARTS = {"image_url": "image", "video_url": "video"}
"""Fields of items by types of parts, besides their own."""


class Parsed(NamedTuple):
    """What a record says. `items`: in the order in which turns show them. `unread`: names of keys that were not read,
    see `megatron_hetero.data.keys`.
    """

    turns: list[Turn]
    items: list[ItemRef]
    tools: tuple[dict[str, Any], ...] = ()
    unread: Sequence[str] = ()


def item_fields(encoders: Mapping[str, Sequence[Modality]]) -> tuple[ItemField, ...]:
    """The fields of encoders that take items of these modalities.

    A field of the encoder `vision` is named after the modality; the first one of any other encoder after the encoder,
    further ones `ENCODER_MODALITY`.
    """
    fields = []
    for encoder, modalities in encoders.items():
        for number, modality in enumerate(modalities):
            name = modality if encoder == VISION else f"{encoder}_{modality}" if number else encoder
            key = f"{encoder}:{modality}" if number else encoder
            fields.append(ItemField(encoder, modality, name, key))
    return tuple(fields)


IMAGES = item_fields({VISION: ("image",)})


def validate_record(
    value: Any,
    where: str,
    *,
    folder: Path | None,
    fields: Sequence[ItemField] = IMAGES,
    video_placeholder: str = "<video>",
) -> Parsed:
    """Checks one record, whose items may be in `fields`, and reduces it to what training needs.

    Args:
        where: the record in messages.
        folder: of items that are given by paths.
        video_placeholder: what stands for a video in records without pictures.

    Raises:
        UserError: naming ``where`` and the field.
    """
    if not isinstance(value, dict):
        raise wrong(where, kind(value), "a JSON object", 'write {"image": ..., "conversations": [...]}')
    known, has_videos = _known(tuple(fields))
    ignored = unread(value, "record", known, where)
    form = next((name for name in FORMS if value.get(name) is not None), FORMS[0])
    turns = _turns(value, form, where, ignored)
    _check_order(turns, form, where)
    if not has_videos and (name := next((name for name in ("video", "videos") if value.get(name)), None)):
        raise _no_videos(f"{where}: field '{name}'")
    own = {field: items_of(value, field, where, folder) for field in fields}
    mark = video_placeholder if value.get("video") and not value.get("image") else "<video>"
    shown: list[ItemRef] = []
    for k, turn in enumerate(turns):
        if isinstance(turn.content, str) and (turn.role == "assistant" or "<" not in turn.content):
            continue
        if isinstance(turn.content, str):
            text = turn.content.replace(mark, "<video>")
            if not has_videos and "<video>" in text:
                raise _no_videos(_place(where, form, k))
            content, refs = text, [ItemRef(field, "") for field in split_at_placeholders(text, fields)[1]]
        else:
            names, place = {field.name: field for field in fields}, _place(where, form, k)
            parts = [_part(part, names, f"{place} part {j}", folder, ignored) for j, part in enumerate(turn.content)]
            content = tuple(part.field if isinstance(part, ItemRef) else part for part in parts)
            refs = [part for part in parts if isinstance(part, ItemRef)]
        if refs and turn.role not in _SHOWING:
            found, expected = f"{refs[0].field.placeholder} in a turn of {_speakers((turn.role,), form)}", "only text"
            fix = "move it to the human turn that shows the item; what is text is a part of type text in `messages`"
            raise wrong(_place(where, form, k), found, expected, fix)
        if content is not turn.content:
            turns[k] = turn._replace(content=content)
        shown += refs
    if form != FORMS[0]:
        shown = _before(turns, own, shown)
    _check_answers(turns, form, where)
    items = _placed(value, shown, own, form, where)
    if folder is None and (paths := [ref for ref in items if isinstance(ref.file, str)]):
        problem = f"{quoted(str(paths[0].file))} given, but the data set has no image folder"
        fix, place = "set `images` of the data set in data.registry", f"{where}: field '{paths[0].field.name}'"
        raise UserError.at(place, problem=problem, fix=fix)
    if (system := value.get("system")) is not None:
        if not isinstance(system, str) or turns[0].role == "system":
            found = kind(system) if not isinstance(system, str) else "it beside a turn of system"
            raise wrong(f"{where}: field 'system'", found, "one text of the system", "remove the field or the turn")
        turns = [Turn("system", system), *turns]
    tools = value.get("tools") or ()
    return Parsed(turns, items, tuple(_objects(tools, f"{where}: field 'tools'")) if tools else (), ignored)


@lru_cache
def _known(fields: tuple[ItemField, ...]) -> tuple[frozenset[str], bool]:
    """Keys of records that are read, and whether videos are."""
    known = frozenset([*READ["record"], *(field.name for field in fields)])
    return known, any(field.modality == "video" for field in fields)


def _no_videos(place: str) -> UserError:
    problem = "a video or <video>, but the model does not support videos"
    return UserError.at(place, problem=problem, fix="remove the record, or extract frames and list them in 'image'")


def with_items(turn: Turn, fields: Sequence[ItemField]) -> Turn:
    """A turn of `Parsed` with items in place of placeholders, and its texts joined between them."""
    parts: Sequence[str | ItemField] = turn.parts
    if isinstance(turn.content, str):
        if turn.role not in _SHOWING or "<" not in turn.content:
            return turn
        texts, shown = split_at_placeholders(turn.content, fields)
        parts = [part for pair in zip(texts, [*shown, ""], strict=True) for part in pair]
    runs = groupby(parts, lambda part: isinstance(part, str))
    merged = [each for is_text, run in runs for each in (["".join(map(str, run))] if is_text else run) if each != ""]
    is_text = all(isinstance(each, str) for each in merged)
    return turn._replace(content="".join(map(str, merged)) if is_text else tuple(merged))


def split_at_placeholders(text: str, fields: Sequence[ItemField]) -> tuple[list[str], list[ItemField]]:
    """The parts of a text between placeholders, and the fields of these."""
    pattern, by_placeholder = _placeholders(tuple(fields))
    parts = pattern.split(text)
    return parts[::2], [by_placeholder[placeholder] for placeholder in parts[1::2]]


@lru_cache
def _placeholders(fields: tuple[ItemField, ...]) -> tuple[re.Pattern[str], dict[str, ItemField]]:
    by_placeholder = {field.placeholder: field for field in fields}
    return re.compile("(" + "|".join(map(re.escape, by_placeholder)) + ")"), by_placeholder


# ------------------------------------------------------------------------------------------ items in their places


def _part(part: Any, fields: Mapping[str, ItemField], place: str, folder: Path | None, ignored: list[str]) -> Any:
    """A part of a message: a text or an item, without a file if that is in the record's field."""
    if isinstance(part, str):
        return part
    given = part if isinstance(part, dict) else {}
    name = given.get("type") or next((key for key in ("text", *fields, *_PARTS) if given.get(key) is not None), "")
    if name == "text":
        ignored += unread(given, "part", ("type", "text"), place)
        if not isinstance(given.get("text"), str):
            raise wrong(f"{place}: field 'text'", kind(given.get("text")), "a text", "write it, or remove the part")
        return given["text"]
    field = fields.get(_PARTS.get(name, name)) if isinstance(name, str) else None
    if field is None:
        found = f"a part of type {quoted(name)}" if given and isinstance(name, str) else kind(part)
        fix = "write it as one of these, or remove the part"
        raise wrong(place, found, f"parts of type {', '.join(['text', *fields, *_PARTS])}", fix)
    if isinstance(given.get(name), dict):  # {"type": "image_url", "image_url": {"url": ...}}
        given = {**given, name: None, **given[name]}
    ignored += unread(given, "part", (*READ["part"], name, field.name), place)
    files = [given[key] for key in dict.fromkeys((name, field.name, "url", "path")) if given.get(key) is not None]
    refs = items_of({field.name: files}, field, place, folder) if files else [ItemRef(field, "")]
    if len(refs) != 1:
        raise wrong(place, f"{len(refs)} items", "one item in a part", "write a part for each")
    return with_settings(given, refs, place)[0]


def _before(turns: list[Turn], own: Mapping[ItemField, Sequence[ItemRef]], shown: Sequence[ItemRef]) -> list[ItemRef]:
    """What turns show, with items of fields that none shows before the first human text."""
    more = [ref.field for field, refs in own.items() if not any(ref.field == field for ref in shown) for ref in refs]
    k = next(k for k, turn in enumerate(turns) if turn.role == "user")
    if isinstance(text := turns[k].content, str):
        turns[k] = turns[k]._replace(content="".join(field.placeholder for field in more) + text)
    else:
        turns[k] = turns[k]._replace(content=(*more, *text))
    return [*(ItemRef(field, "") for field in more), *shown]


def _placed(
    value: dict[str, Any], shown: Sequence[ItemRef], own: Mapping[ItemField, Sequence[ItemRef]], form: str, where: str
) -> list[ItemRef]:
    """The items that turns show, those of the record's fields in their order, with what it says of them."""
    fields = [ref.field for ref in shown]
    without = [ref.field for ref in shown if ref.file == ""]
    for field, refs in own.items():
        marks = without.count(field)
        if refs and marks < fields.count(field):
            place, because = f"{where}: fields '{field.name}' and '{form}'", "their order is unknown"
            raise UserError.at(place, problem=f"{field.name}s in both", because=because, fix="name each in one of them")
        if marks != len(refs):
            place = f"{where}: fields '{field.name}' and '{form}'"
            found = f"{marks} {field.placeholder} placeholders for {len(refs)} {field.modality}s"
            fix, because = f"add or remove placeholders or {field.modality}s", "it marks the place of an item's tokens"
            raise wrong(place, found, f"one placeholder for each {field.modality}", fix, because)
    coming = {field: iter(refs) for field, refs in own.items() if refs}
    items = [ref if ref.file != "" else next(coming[ref.field]) for ref in shown]
    if not items or (SETTINGS.keys().isdisjoint(value) and not any(ref.given for ref in shown)):
        return items
    items = [item._replace(given=ref.given) for item, ref in zip(items, shown, strict=True)]
    settled = {field: iter(with_settings(value, [i for i in items if i.field == field], where)) for field in own}
    return [next(settled[item.field]) for item in items]


# --------------------------------------------------------------------------------------------- forms of text


def _turns(value: dict[str, Any], form: str, where: str, ignored: list[str]) -> list[Turn]:
    """The turns of a record, whose content may be a list of parts as the record has it."""
    listed, keys = value.get(form), _TEXTS[form]
    if form in FORMS[3:]:
        answer = value.get("answer")
        # Some data sets have several right answers, the first of which is trained on.
        answer = answer[0] if isinstance(answer, list) and answer else answer
        listed = [{"role": "user", "question": value.get("question") or ""}, {"role": "assistant", "answer": answer}]
    elif not isinstance(listed, list) or not listed:
        found = "no such field" if form not in value else "an empty list" if listed == [] else kind(listed)
        raise wrong(f"{where}: field '{form}'", found, "a list of turns", f"write {_EXAMPLES[form]}")
    elif form == "texts":
        if (pair := next((pair for pair in listed if not isinstance(pair, dict)), listed)) is not listed:
            raise wrong(_place(where, form, 2 * listed.index(pair)), kind(pair), "a pair", f"write {_EXAMPLES[form]}")
        pairs = (({"role": "user", "user": pair.get("user")}, {**pair, "role": "assistant"}) for pair in listed)
        listed = [turn for pair in pairs for turn in pair]
    elif form == FORMS[0]:
        try:  # Nearly all records are as simple as they can be.
            turns = [Turn(ROLES[t["from"]], t["value"]) for t in listed if len(t) == 2 and type(t["value"]) is str]
        except (KeyError, TypeError):
            turns = []
        if len(turns) == len(listed):
            return turns
    return [_turn(turn, keys, k % len(keys), _place(where, form, k), ignored) for k, turn in enumerate(listed)]


# ------------------------------------------------------------------------------------------------------- turns


def _turn(turn: Any, keys: tuple[str, ...], k: int, place: str, ignored: list[str]) -> Turn:
    """A turn with its text in key `k` of `keys`."""
    role_key, text_key = "from" if keys == ("value",) else "role", keys[k]
    if not isinstance(turn, dict):
        raise wrong(place, kind(turn), f"an object with '{role_key}' and '{text_key}'")
    ignored += unread(turn, "turn", (*READ["turn"], role_key, *keys), place)
    speaker, text = turn.get(role_key), turn.get(text_key)
    role = "assistant" if speaker in _CALLS else ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        found = quoted(speaker) if isinstance(speaker, str) else f"{kind(speaker)} for '{role_key}'"
        names = "human, gpt, system, observation or function_call"
        names = names if role_key == "from" else "user, assistant, system or tool"
        raise wrong(place, found, f"'{role_key}' to be {names}", "rename the speaker of this turn")
    further = _further({**turn, "tool_calls": text} if speaker in _CALLS else turn, role, place)
    if role == "assistant":
        text = "" if "tool_calls" in further and (text is None or speaker in _CALLS) else _as_text(text)
    if not isinstance(text, str) and (text_key != "content" or not isinstance(text, list)):
        found, fix = f"{kind(text)} for '{text_key}'", f"write the turn's text in '{text_key}'"
        raise wrong(place, found, "a string", fix)
    given = {name: turn[name] for name in WEIGHTS if turn.get(name) is not None}
    answers = [bool(each) for each in given.values() if each in (0, 1) and (role == "assistant" or not each)]
    if len(answers) < len(given) or len(set(answers)) > 1:
        found = ", ".join(f"{name} {each!r:.20}" for name, each in given.items())
        expected, fix = "true, false, 1 or 0, and for answers alone", "write `loss` of answers alone, true or false"
        raise wrong(place, f"{found} in a turn of {role}", expected, fix)
    content: Any = text
    return Turn(role, content, all(answers) or role != "assistant", further)


def _as_text(value: Any) -> Any:
    """Numbers as their JSON text, and other values as they are."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return json.dumps(value) if is_number else value


def _further(turn: dict[str, Any], role: ChatRole, place: str) -> dict[str, Any]:
    """What a chat message has besides its content."""
    found: dict[str, Any] = {}
    speakers = {**dict.fromkeys((*THOUGHTS, "tool_calls"), "assistant"), "name": role, "tool_call_id": "tool"}
    for name, speaker in speakers.items():
        if (given := turn.get(name)) in (None, "", []):
            continue
        key, place_of_it = THOUGHTS[0] if name in THOUGHTS else name, f"{place}: field '{name}'"
        if name == "tool_calls":
            given = [_call(call, place_of_it) for call in _objects(given, place_of_it)]
        elif not isinstance(given, str):
            raise wrong(place_of_it, kind(given), "a text")
        if role != speaker or found.setdefault(key, given) != given:
            shown = f"it in a turn of {role}" if role != speaker else f"another text than in '{key}'"
            raise wrong(place_of_it, shown, f"it once, in a turn of {speaker}", "correct or remove the field")
    return found


def _call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """A call as chat templates take it, with its arguments as an object."""
    function = call.get("function") or call
    function = function if isinstance(function, dict) else {}
    name, arguments = function.get("name"), function.get("arguments") or {}
    given = _objects(arguments, place)
    if not isinstance(name, str) or not name or len(given) != 1:
        raise wrong(place, f"{kind(name)} for a function's name", '{"function": {"name": ..., "arguments": {...}}}')
    number = {"id": call["id"]} if call.get("id") is not None else {}
    return {"type": "function", **number, "function": {"name": name, "arguments": given[0]}}


def _objects(given: Any, place: str) -> list[dict[str, Any]]:
    """JSON objects, in a list or not, as they are or as JSON text. Raises `UserError`."""
    try:
        given = msgspec.json.decode(given) if isinstance(given, str) else given
        return msgspec.convert(given if isinstance(given, list) else [given], list[dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise wrong(place, in_short(error), "JSON objects in a list, or its JSON text") from None


def _check_answers(turns: Sequence[Turn], form: str, where: str) -> None:
    """Check that no answer is empty, and one is trained on."""
    is_trained = False
    for k, turn in enumerate(turns):
        if turn.role == "assistant":
            is_trained |= turn.supervised
            if (not turn.content or turn.text.isspace()) and "tool_calls" not in turn.further:
                because, fix = "the model would be trained to say nothing", "write the answer, or remove the record"
                raise UserError.at(_place(where, form, k), problem="empty answer", because=because, fix=fix)
    if not is_trained:
        fix = "remove the record, or train on one of its answers"
        raise UserError.at(f"{where}: field '{form}'", problem="no answer that is trained on", fix=fix)


def _check_order(turns: Sequence[Turn], form: str, where: str) -> None:
    """An optional leading system turn, then user and assistant in turn, ending with the assistant. Tools answer the
    assistant, who then continues.
    """
    before, is_call = None, False
    for k, turn in enumerate(turns):
        wanted = ("tool",) if is_call else _NEXT[before]
        if turn.role not in wanted and (k or turn.role != "system"):
            found, expected = (f"a turn of {_speakers(roles, form)}" for roles in ((turn.role,), wanted))
            because = "turns alternate after an optional leading system turn, and tools answer their calls"
            fix = "merge consecutive turns of one speaker, or remove the extra turn"
            fix = "add the tool's answer, or remove the call" if is_call else fix
            raise wrong(_place(where, form, k), found, expected, fix, because)
        before, is_call = turn.role if turn.role != "system" else None, "tool_calls" in turn.further
    if before != "assistant":
        last, answering = (_speakers((role,), form) for role in (turns[-1].role, "assistant"))
        fix, because = "add the answer, or remove the last turn", f"only {answering} turns are trained on"
        found, place = f"a conversation that ends with {last}", _place(where, form, len(turns) - 1)
        raise wrong(place, found, f"one that ends with {answering}", fix, because)


def _speakers(roles: Sequence[str], form: str) -> str:
    """Roles by the names of a form."""
    names = {"user": "human", "assistant": "gpt", "tool": "observation"} if form == FORMS[0] else {}
    return " or ".join(names.get(role, role) for role in roles)


def _place(where: str, form: str, k: int) -> str:
    """Turn `k` of a form in messages."""
    name = f"{form}[{k}]" if form in FORMS[:2] else f"texts[{k // 2}]" if form == "texts" else FORMS[3:][k]
    return f"{where}: field '{name}'"
