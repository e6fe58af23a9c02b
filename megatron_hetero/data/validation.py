"""Validates records when their files are indexed and again when they are read, and reduces them to turns, items and
tools.

The text of a record is in the first of these *forms* that is present:

  - `conversations`: turns with `from` and `value`, as in LLaVA;
  - `messages`: turns with `role` and `content`, a text or a list of entries as for chat templates;
  - `texts`: pairs of `user` and `assistant`;
  - `question` and `answer`; or `answer` alone, as for captions.

In all forms but the first, items without placeholders come before the first human text. Placeholders are recognised in
plain texts of users and tools only; in lists of entries the type of an entry tells whether it is an item.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_hetero.base.errors import UserError, quoted
from megatron_hetero.data.item_fields import (
    EMPTY,
    ITEM_TYPES,
    PLURALS,
    SETTINGS,
    ItemField,
    ItemRef,
    items_of,
    kind,
    with_settings,
    wrong,
)
from megatron_hetero.data.keys import FORMS, READ, THOUGHTS, WEIGHTS, unread
from megatron_hetero.data.turns import ChatRole, Content, Turn
from megatron_hetero.models.items.types import Modality

# Speaker names used by LLaVA and chat templates, and for tools by LLaMA-Factory and ms-swift.
ROLES: Mapping[str, ChatRole] = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "system": "system", "tool": "tool", "observation": "tool", "tool_response": "tool"}  # fmt: skip
_CALLS = ("function_call", "tool_call")
"""Speaker names of assistant turns whose text is the JSON of `tool_calls`, optionally after a thought."""
_THOUGHT_AND_CALLS = re.compile(r"(?:\s*<think>(.*?)</think>)?(.*)", re.DOTALL)
_NEXT = {None: ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
"""Roles that may follow a turn of each role. A tool call must be followed by `tool`."""
_SHOWING = ("user", "tool")
"""Roles whose turns may contain items."""
_TEXTS = {"conversations": ("value",), "messages": ("content",), "texts": ("user", "assistant"),
          **dict.fromkeys(FORMS[3:], ("question", "answer"))}  # fmt: skip
"""Keys of the texts of consecutive turns, by form."""
_EXAMPLES = {"conversations": '[{"from": "human", "value": ...}, ...]', "texts": '[{"user": ..., "assistant": ...}]',
             "messages": '[{"role": "user", "content": ...}, ...]'}  # fmt: skip


class Parsed(NamedTuple):
    """Contents of a validated record. `items`: the items in the order in which turns contain them. `unread`: names of
    keys that were not read, see `megatron_hetero.data.keys`.
    """

    turns: list[Turn]
    items: list[ItemRef]
    tools: tuple[dict[str, Any], ...] = ()
    unread: Sequence[str] = ()


def item_fields(
    own: Mapping[str, Sequence[Modality]], further: Mapping[str, Sequence[Modality]] = {}
) -> tuple[ItemField, ...]:
    """Return the item fields of encoders. `own`, `further`: modalities of the model's and of added encoders, by name.

    A field of a model's encoder is named after its modality. The first field of a further encoder is named after the
    encoder, its other fields are named `ENCODER_MODALITY`.
    """
    fields = []
    for encoder, modalities in {**own, **further}.items():
        for number, modality in enumerate(modalities):
            name = modality if encoder in own else f"{encoder}_{modality}" if number else encoder
            key = f"{encoder}:{modality}" if number else encoder
            fields.append(ItemField(encoder, modality, name, key))
    return tuple(fields)


IMAGES = item_fields({"vision": ("image",)})


def validate_record(
    value: Any,
    where: str,
    *,
    folder: Path | None,
    fields: Sequence[ItemField] = IMAGES,
    video_placeholder: str = "<video>",
) -> Parsed:
    """Check the record `value` and reduce it to the data for training. Raises `UserError`.

    `where`: name of the record in messages. `folder`: folder of items that are given by path. `fields`: item fields of
    the model. `video_placeholder`: placeholder of a video in records without pictures.
    """
    if not isinstance(value, dict):
        raise wrong(where, kind(value), "a JSON object", 'write {"image": ..., "conversations": [...]}')
    known, has_videos = _known(tuple(fields))
    ignored, form = unread(value, "record", known, where), _form_of(value, where)
    turns, numbers = _turns(value, form, where, ignored)

    def place(k: int) -> str:
        return _place(where, form, numbers[k])

    _check_order(turns, place)
    if not has_videos and (name := next((name for name in ("video", PLURALS["video"]) if value.get(name)), None)):
        raise _no_videos(f"{where}: field '{name}'")
    listed = {field: items_of(value, field, where, folder) for field in fields}
    mark = video_placeholder if value.get("video") and not value.get("image") else "<video>"
    shown: list[ItemRef] = []
    for k, turn in enumerate(turns):
        if isinstance(turn.content, str) and (turn.role == "assistant" or "<" not in turn.content):
            continue
        entries: Sequence[Any]
        if isinstance(turn.content, str):
            text = turn.content.replace(mark, "<video>")
            if not has_videos and "<video>" in text:
                raise _no_videos(place(k))
            entries = content = split_at_placeholders(text, fields)
            refs = [ItemRef(entry, "") for entry in entries if not isinstance(entry, str)]
        else:
            entries = [
                _entry(entry, listed, f"{place(k)} entry {j}", folder, ignored) for j, entry in enumerate(turn.content)
            ]
            content = _merged(entry.field if isinstance(entry, ItemRef) else entry for entry in entries)
            refs = [entry for entry in entries if isinstance(entry, ItemRef)]
        if refs and turn.role not in _SHOWING:
            found, expected = f"{refs[0].field.placeholder} in a turn of {turn.role}", "only text"
            fix = "move it to the human turn that shows the item; what is text is an entry of type text in `messages`"
            raise wrong(place(k), found, expected, fix)
        turns[k] = Turn(turn.role, content, turn.supervised, turn.further)
        shown += refs
    if form != FORMS[0]:
        shown = _before(turns, listed, shown)
    _check_answers(turns, place, f"{where}: field '{form}'")
    items = _placed(value, shown, listed, form, where)
    if not SETTINGS.keys().isdisjoint(value):
        used = {name for ref in items for name in ref.field.settings}
        ignored += [name for name in SETTINGS if name not in used and value.get(name) not in EMPTY]
    if folder is None and (paths := [ref for ref in items if isinstance(ref.file, str)]):
        problem = f"{quoted(str(paths[0].file))} given, but the data set has no image folder"
        fix = "set `images` of the data set in data.registry"
        raise UserError.at(f"{where}: field '{paths[0].field.name}'", problem=problem, fix=fix)
    return Parsed([*_system(value, turns, where), *turns], items, _tools(value, where), ignored)


def _form_of(value: dict[str, Any], where: str) -> str:
    """Return the form of a record's text: the first with a value, else the first one present. Raises `UserError`."""
    form = next((name for name in FORMS if value.get(name) not in EMPTY), "")
    if not form and not (form := next((name for name in FORMS if value.get(name) is not None), "")):
        found = f"no such field among {quoted(', '.join(value))}" if value else "an empty object"
        fix = "rename the fields, or map them to these with `fields` of the data set in data.registry"
        raise wrong(f"{where}: field 'conversations'", found, f"this or one of {', '.join(FORMS[1:])}", fix)
    return form


def _system(value: dict[str, Any], turns: Sequence[Turn], where: str) -> list[Turn]:
    """Return a list with the turn of the field `system`, or [] without it. No other system turn may exist."""
    if (system := value.get("system")) in EMPTY:
        return []
    if not isinstance(system, str) or turns[0].role == "system":
        found = kind(system) if not isinstance(system, str) else "this field and a system turn"
        raise wrong(f"{where}: field 'system'", found, "one text of the system", "remove the field or the turn")
    return [Turn("system", system)]


def _tools(value: dict[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of a record, without keys whose values are null."""
    if (given := value.get("tools")) in EMPTY:
        return ()
    tools = _objects(given, place := f"{where}: field 'tools'")
    return tuple([{k: v for k, v in tool.items() if v is not None} for tool in tools if _function(tool, place)])


@lru_cache
def _known(fields: tuple[ItemField, ...]) -> tuple[frozenset[str], bool]:
    """Return the record keys that are read, and whether the model takes videos."""
    known = frozenset([*READ["record"], *(field.name for field in fields)])
    return known, any(field.modality == "video" for field in fields)


def _no_videos(place: str) -> UserError:
    problem = "a video or <video>, but the model does not support videos"
    return UserError.at(place, problem=problem, fix="remove the record, or extract frames and list them in 'image'")


def split_at_placeholders(text: str, fields: Sequence[ItemField]) -> Content:
    """Split a text at item placeholders, replacing each by its field. Returns a text without placeholders unchanged."""
    pattern, by_placeholder = _placeholders(tuple(fields))
    pieces = pattern.split(text)
    return text if len(pieces) == 1 else tuple([by_placeholder.get(piece, piece) for piece in pieces if piece])


@lru_cache
def _placeholders(fields: tuple[ItemField, ...]) -> tuple[re.Pattern[str], dict[str, ItemField]]:
    by_placeholder = {field.placeholder: field for field in fields}
    return re.compile("(" + "|".join(map(re.escape, by_placeholder)) + ")"), by_placeholder


def _merged(entries: Iterable[str | ItemField]) -> Content:
    """Return the content of a turn with consecutive texts joined."""
    runs = groupby(entries, lambda entry: isinstance(entry, str))
    merged = [each for is_text, run in runs for each in (["".join(map(str, run))] if is_text else run) if each]
    return tuple(merged) if any(not isinstance(each, str) for each in merged) else "".join(map(str, merged))


# ------------------------------------------------------------------------------------------ items in their places


def _entry(
    entry: Any, listed: Mapping[ItemField, Sequence[ItemRef]], place: str, folder: Path | None, ignored: list[str]
) -> str | ItemRef:
    """Return an entry of a message as a text or an item. An item named by the record's field has no file here."""
    if isinstance(entry, str):
        return entry
    given, fields = entry if isinstance(entry, dict) else {}, {field.name: field for field in listed}
    name = given.get("type") or next((key for key in ("text", *fields, *ITEM_TYPES) if given.get(key) is not None), "")
    if name == "text":
        ignored += unread(given, "entry", ("type", "text"), place)
        if not isinstance(given.get("text"), str):
            raise wrong(f"{place}: field 'text'", kind(given.get("text")), "a text", "write it, or remove the entry")
        return given["text"]
    field = fields.get(ITEM_TYPES.get(name, name)) if isinstance(name, str) else None
    if field is None:
        found = f"an entry of type {quoted(name)}" if given and isinstance(name, str) else kind(entry)
        fix = "write it as one of these, or remove the entry"
        raise wrong(place, found, f"entries of type {', '.join(['text', *fields, *ITEM_TYPES])}", fix)
    if isinstance(given.get(name), dict):  # {"type": "image_url", "image_url": {"url": ...}}
        given = {**given, name: None, **given[name]}
    ignored += unread(given, "entry", (name, field.name, *READ["entry"], *field.settings), place)
    files = [given[key] for key in dict.fromkeys((name, field.name, "url", "path")) if given.get(key) not in EMPTY]
    if not files and not listed[field]:
        found, fix = f"no {field.modality}", f"write it into '{field.name}', 'url' or 'path' of the entry"
        raise wrong(place, found, f"one, here or in '{field.name}' of the record", fix)
    several = [ref for file in files for ref in items_of({field.name: file}, field, place, folder)]
    if len(several) > 1:
        raise wrong(place, f"{len(several)} items", "one item in an entry", "write an entry for each")
    return with_settings(given, several or [ItemRef(field, "")], place)[0]


def _before(turns: list[Turn], listed: Mapping[ItemField, Sequence[ItemRef]], shown: list[ItemRef]) -> list[ItemRef]:
    """Insert items of fields that no turn mentions before the first human text. Returns the items of all turns."""
    named = {ref.field for ref in shown}
    if not (more := [field for field, refs in listed.items() if field not in named for _ in refs]):
        return shown
    k = next(k for k, turn in enumerate(turns) if turn.role == "user")
    turns[k] = turns[k]._replace(content=_merged([*more, *turns[k].entries]))
    return [*(ItemRef(field, "") for field in more), *shown]


def _placed(
    value: dict[str, Any],
    shown: Sequence[ItemRef],
    listed: Mapping[ItemField, Sequence[ItemRef]],
    form: str,
    where: str,
) -> list[ItemRef]:
    """Return the items of all turns in order, with files from the record's fields and with their settings."""
    refs_in_order = [ref for refs in listed.values() for ref in refs]
    if shown == [ItemRef(ref.field, "") for ref in refs_in_order] and SETTINGS.keys().isdisjoint(value):
        return refs_in_order  # This is the usual case.
    fields = [ref.field for ref in shown]
    without = [ref.field for ref in shown if ref.file == ""]
    for field, refs in listed.items():
        marks = without.count(field)
        if refs and marks < fields.count(field):
            place, because = f"{where}: fields '{field.name}' and '{form}'", "their order is unknown"
            raise UserError.at(place, problem=f"{field.name}s in both", because=because, fix="name each in one of them")
        if marks != len(refs):
            place = f"{where}: fields '{field.name}' and '{form}'"
            found = f"{marks} {field.placeholder} placeholders for {len(refs)} {field.modality}s"
            fix, because = f"add or remove placeholders or {field.modality}s", "it marks the place of an item's tokens"
            raise wrong(place, found, f"one placeholder for each {field.modality}", fix, because)
    coming = {field: iter(refs) for field, refs in listed.items() if refs}
    items = [ref if ref.file != "" else next(coming[ref.field]) for ref in shown]
    items = [item._replace(given=ref.given) for item, ref in zip(items, shown, strict=True)]
    settled = {field: iter(with_settings(value, [i for i in items if i.field == field], where)) for field in listed}
    return [next(settled[item.field]) for item in items]


# --------------------------------------------------------------------------------------------- forms of text


def _turns(value: dict[str, Any], form: str, where: str, ignored: list[str]) -> tuple[list[Turn], Sequence[int]]:
    """Return the turns of a record, with lists of entries not yet parsed, and their numbers in the record. Tool calls
    without text are added to the assistant turn before them.
    """
    keys, listed = _TEXTS[form], value[form]
    if form in FORMS[3:]:
        answer = value.get("answer")
        # Some data sets have several right answers; the first one is trained on.
        answer = answer[0] if isinstance(answer, list) and answer else answer
        listed = [{"question": "" if value.get("question") is None else value["question"], "answer": answer}]
    if not isinstance(listed, list) or not listed:
        found = "an empty list" if listed == [] else kind(listed)
        raise wrong(f"{where}: field '{form}'", found, "a list of turns", f"write {_EXAMPLES[form]}")
    if form == FORMS[0]:
        try:  # Fast path: nearly all records have only these two keys.
            turns = [Turn(ROLES[t["from"]], t["value"]) for t in listed if len(t) == 2 and type(t["value"]) is str]
        except (KeyError, TypeError):
            turns = []
        if len(turns) == len(listed):
            return turns, range(len(turns))
    if len(keys) == 2:
        for k, pair in enumerate(listed):
            if not isinstance(pair, dict):
                raise wrong(_place(where, form, 2 * k), kind(pair), "a pair", f"write {_EXAMPLES[form]}")
        pairs = (({"role": "user", keys[0]: pair.get(keys[0])}, {**pair, "role": "assistant"}) for pair in listed)
        listed = [turn for pair in pairs for turn in pair]
    turns, numbers = [], []
    for k, each in enumerate(listed):
        turn = _turn(each, keys, k % len(keys), _place(where, form, k), ignored)
        last = turns[-1] if turns else None
        is_call = not turn.content and turn.further.keys() == {"tool_calls"}
        if is_call and last and (last.role, last.supervised) == ("assistant", turn.supervised):
            further = {**last.further, "tool_calls": [*last.further.get("tool_calls", ()), *turn.further["tool_calls"]]}
            turns[-1] = last._replace(further=further)
        else:
            turns.append(turn)
            numbers.append(k)
    return turns, numbers


# ------------------------------------------------------------------------------------------------------- turns


def _turn(turn: Any, keys: tuple[str, ...], k: int, place: str, ignored: list[str]) -> Turn:
    """Check a turn, whose text has the key `keys[k]`, and return it as a `Turn`. Raises `UserError`."""
    role_key, text_key = "from" if keys == ("value",) else "role", keys[k]
    if not isinstance(turn, dict):
        raise wrong(place, kind(turn), f"an object with '{role_key}' and '{text_key}'")
    ignored += unread(turn, "turn", (*READ["turn"], role_key, *keys), place)
    speaker: Any = turn.get(role_key)
    text: Any = turn.get(text_key)
    role = "assistant" if speaker in _CALLS else ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        found = quoted(speaker) if isinstance(speaker, str) else f"{kind(speaker)} for '{role_key}'"
        names = "human, gpt, system, observation or function_call"
        names = names if role_key == "from" else "user, assistant, system or tool"
        raise wrong(place, found, f"'{role_key}' to be {names}", "rename the speaker of this turn")
    further = _further(turn, role, place, ignored)
    if speaker in _CALLS:
        thought, calls = _THOUGHT_AND_CALLS.findall(text)[0] if isinstance(text, str) else ("", text)
        further |= _further({"thinking": thought.strip(), "tool_calls": calls}, role, place, ignored)
    if role == "assistant":
        is_number = isinstance(text, int | float) and not isinstance(text, bool) and abs(text) < math.inf
        is_silent = "tool_calls" in further and (text is None or speaker in _CALLS)
        text = "" if is_silent else json.dumps(text) if is_number else text
    if not isinstance(text, str) and (text_key != "content" or not isinstance(text, list)):
        found, fix = f"{kind(text)} for '{text_key}'", f"write the turn's text in '{text_key}'"
        raise wrong(place, found, "a string", fix)
    given = {name: turn[name] for name in WEIGHTS if turn.get(name) not in EMPTY}
    answers = [bool(each) for each in given.values() if each in (0, 1) and (role == "assistant" or not each)]
    if len(answers) < len(given) or len(set(answers)) > 1:
        found = ", ".join(f"{name} {each!r:.20}" for name, each in given.items())
        expected, fix = "true, false, 1 or 0, and for answers alone", "write `loss` of answers alone, true or false"
        raise wrong(place, f"{found} in a turn of {role}", expected, fix)
    content: Any = text
    return Turn(role, content, all(answers) or role != "assistant", further)


def _further(turn: dict[str, Any], role: ChatRole, place: str, ignored: list[str]) -> dict[str, Any]:
    """Return the fields of a chat message other than its content: thought, tool calls, name and call id."""
    further: dict[str, Any] = {}
    speakers = {**dict.fromkeys((*THOUGHTS, "tool_calls"), "assistant"), "name": role, "tool_call_id": "tool"}
    for name, speaker in speakers.items():
        if (given := turn.get(name)) in EMPTY:
            continue
        key, field_place = THOUGHTS[0] if name in THOUGHTS else name, f"{place}: field '{name}'"
        if name == "tool_calls":
            given = [_call(call, field_place, ignored) for call in _objects(given, field_place)]
        elif not isinstance(given, str):
            raise wrong(field_place, kind(given), "a text")
        if role != speaker:
            raise wrong(field_place, f"a turn of {role}", f"a turn of {speaker}", "move or remove the field")
        if further.setdefault(key, given) != given:
            raise wrong(field_place, f"another text than in '{key}'", "one thought", "remove one of the fields")
    return further


def _call(call: dict[str, Any], place: str, ignored: list[str]) -> dict[str, Any]:
    """Return a tool call in the form that chat templates take, with its arguments as an object."""
    function = _function(call, place)
    for each in (call,) if function is call else (call, function):
        ignored += unread(each, "call", READ["call"], place)
    arguments = function.get("arguments")
    given = _objects({} if arguments in EMPTY else arguments, f"{place}: field 'arguments'")
    if len(given) != 1:
        raise wrong(place, f"{len(given)} arguments", "one object with all arguments")
    number = {"id": call["id"]} if call.get("id") is not None else {}
    return {"type": "function", **number, "function": {"name": function["name"], "arguments": given[0]}}


def _function(given: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the object that names a tool or call: its field `function` if present, else the object itself."""
    function = given if given.get("function") is None else given["function"]
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        raise wrong(place, "no name of a function", 'objects such as {"function": {"name": ..., ...}}')
    return function


def _objects(given: Any, place: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects, given the list, one object, or either as JSON text. Raises `UserError`."""
    try:
        given = msgspec.json.decode(given) if isinstance(given, str) else given
        return msgspec.convert(given if isinstance(given, list) else [given], list[dict[str, Any]])
    except (ValueError, RecursionError) as error:
        fix = "write them in a list, or as JSON text"
        raise UserError.at(place, problem=f"no JSON objects ({error})", fix=fix) from None


def _check_answers(turns: Sequence[Turn], place: Callable[[int], str], whole: str) -> None:
    """Check that no answer is empty and that at least one answer is trained on. Raises `UserError`."""
    is_trained = False
    for k, turn in enumerate(turns):
        if turn.role == "assistant":
            is_trained |= turn.supervised
            if (not turn.content or turn.text.isspace()) and "tool_calls" not in turn.further:
                because, fix = "the model would be trained to say nothing", "write the answer, or remove the record"
                raise UserError.at(place(k), problem="empty answer", because=because, fix=fix)
    if not is_trained:
        fix = "remove the record, or train on one of its answers"
        raise UserError.at(whole, problem="no answer that is trained on", fix=fix)


def _check_order(turns: Sequence[Turn], place: Callable[[int], str]) -> None:
    """Check the order of turns: an optional system turn, then user and assistant alternately, the assistant last. Tool
    calls are answered by tools, after which the assistant continues. Raises `UserError`.
    """
    before, is_call = None, False
    for k, turn in enumerate(turns):
        wanted = ("tool",) if is_call else _NEXT[before]
        if turn.role not in wanted and (k or turn.role != "system"):
            because = "turns alternate after an optional leading system turn, and tools answer their calls"
            fix = "merge consecutive turns of one speaker, with the same `loss`, or remove the extra turn"
            fix = "add the tool's answer, or remove the call" if is_call else fix
            raise wrong(place(k), f"a turn of {turn.role}", f"a turn of {' or '.join(wanted)}", fix, because)
        before, is_call = turn.role if turn.role != "system" else None, "tool_calls" in turn.further
    if before != "assistant":
        fix, because = "add the answer, or remove the last turn", "only turns of assistant are trained on"
        found = f"a conversation that ends with {turns[-1].role}"
        raise wrong(place(len(turns) - 1), found, "one that ends with assistant", fix, because)


def _place(where: str, form: str, k: int) -> str:
    """Return the name of turn `k` of a form for error messages."""
    name = f"{form}[{k}]" if form in FORMS[:2] else f"texts[{k // 2}]" if form == "texts" else FORMS[3:][k]
    return f"{where}: field '{name}'"
