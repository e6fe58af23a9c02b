"""Validates records, once when their files are indexed and again when one is read, and reduces them to turns and items.

The text of a record is in one of these *forms*, the first that it has:

  - `conversations`: turns with `from` and `value`, as LLaVA has them;
  - `messages`: turns with `role` and `content`, a text or a list of parts as chat templates take them;
  - `texts`: pairs of `user` and `assistant`;
  - `question` and `answer`; or `answer` alone, as for captions.

In all but the first, items without placeholders come before the first human text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from megatron_hetero.base.errors import VISION, UserError, quoted
from megatron_hetero.data.item_fields import PLURALS, ItemField, ItemRef, items_of, kind
from megatron_hetero.models.items.types import Modality

# Names of LLaVA and of chat templates.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
FORMS = ("conversations", "messages", "texts", "question", "answer")
"""Fields with the text of a record."""
FURTHER = ("system", "fps", "times", "video_start", "video_end")
"""Fields that say more of text or videos."""

Turns = list[tuple[str, str]]


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
    has_image_folder: bool,
    fields: Sequence[ItemField] = IMAGES,
    video_placeholder: str = "<video>",
) -> tuple[Turns, list[ItemRef]]:
    """Checks one record, whose items may be in `fields`, and reduces it to what training needs.

    Args:
        where: the record in messages.
        has_image_folder: whether items may be given by paths.
        video_placeholder: what stands for a video in records without pictures.

    Returns:
        The turns as (role, text) with role in system, user, assistant; and the items in the order of placeholders.

    Raises:
        UserError: naming ``where`` and the field.
    """
    if not isinstance(value, dict):
        raise UserError.at(
            where, found=kind(value), expected="a JSON object", fix='write {"image": ..., "conversations": [...]}'
        )
    form = next((name for name in FORMS if value.get(name) is not None), FORMS[0])
    value, turns = _FORMS[form](value, where)
    _check_order(turns, form, where)
    items = {field: items_of(value, field, where) for field in fields}
    if video_placeholder != "<video>" and value.get("video") and not value.get("image"):
        turns = [(role, text.replace(video_placeholder, "<video>")) for role, text in turns]
    if form != FORMS[0]:
        turns = _with_placeholders(turns, items)
    everything = "\n".join([text for _, text in turns])
    if not any(field.modality == "video" for field in fields):
        _refuse_videos(value, turns, form, where)
    shown = split_at_placeholders(everything, fields)[1] if "<" in everything else []
    for field in fields:
        _check_placeholders(turns, len(items[field]), shown.count(field), field, form, where)
        if not has_image_folder and (paths := [ref.file for ref in items[field] if isinstance(ref.file, str)]):
            raise UserError.at(
                f"{where}: field '{field.name}'",
                problem=f"{quoted(paths[0])} given, but the data set has no image folder",
                fix="set `images` of the data set in data.registry",
            )
    if len(shown) < 2:
        return turns, [items[field][0] for field in shown]
    coming = {field: iter(its_items) for field, its_items in items.items()}
    return turns, [next(coming[field]) for field in shown]


def split_at_placeholders(text: str, fields: Sequence[ItemField]) -> tuple[list[str], list[ItemField]]:
    """The parts of a text between placeholders, and the fields of these."""
    pattern, by_placeholder = _placeholders(tuple(fields))
    parts = pattern.split(text)
    return parts[::2], [by_placeholder[placeholder] for placeholder in parts[1::2]]


@lru_cache
def _placeholders(fields: tuple[ItemField, ...]) -> tuple[re.Pattern[str], dict[str, ItemField]]:
    by_placeholder = {field.placeholder: field for field in fields}
    return re.compile("(" + "|".join(map(re.escape, by_placeholder)) + ")"), by_placeholder


def _refuse_videos(value: dict[str, Any], turns: Turns, form: str, where: str) -> None:
    fields = [f"field '{name}'" for name in ("video", "videos") if value.get(name)]
    fields += [f"field '{form}[{k}]'" for k, (_, text) in enumerate(turns) if "<video>" in text]
    if fields:
        raise UserError.at(
            f"{where}: {fields[0]}",
            problem="a video or <video>, but the model does not support videos",
            fix="remove the record, or extract frames and list them in 'image'",
        )


def _with_placeholders(turns: Turns, items: Mapping[ItemField, Sequence[ItemRef]]) -> Turns:
    """The turns, with the placeholders of fields that have none before the first human text."""
    first = next(k for k, (role, _) in enumerate(turns) if role == "user")
    for field in reversed(list(items)):
        if items[field] and not any(field.placeholder in text for _, text in turns):
            role, text = turns[first]
            turns[first] = role, field.placeholder * len(items[field]) + text
    return turns


# --------------------------------------------------------------------------------------------- forms of text


Form = Callable[[dict[str, Any], str], tuple[dict[str, Any], Turns]]
"""The record, to which a form may add items, and its turns."""


def _conversations(value: dict[str, Any], where: str) -> tuple[dict[str, Any], Turns]:
    fix = 'write [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]'
    listed = _listed(value, "conversations", where, fix)
    with contextlib.suppress(KeyError, TypeError, AttributeError):  # Nearly all records are as simple as they can be.
        turns = [(ROLES[turn["from"]], turn["value"]) for turn in listed]
        if all(text.strip() for _, text in turns):
            return value, turns
    place = f"{where}: field 'conversations"
    return value, [_turn(turn, "from", "value", f"{place}[{k}]'") for k, turn in enumerate(listed)]


def _messages(value: dict[str, Any], where: str) -> tuple[dict[str, Any], Turns]:
    fix = 'write [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]'
    listed, shown = _listed(value, "messages", where, fix), dict[str, list[Any]]()
    turns = []
    for k, message in enumerate(listed):
        place = f"{where}: field 'messages[{k}]'"
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message = {**message, "content": _joined(message["content"], shown, place)}
        turns.append(_turn(message, "role", "content", place))
    for name, items in shown.items():
        if any(value.get(other) for other in (name, PLURALS[name])):
            raise UserError.at(
                f"{where}: fields '{name}' and 'messages'",
                problem=f"{name}s in both",
                because="their order is unknown",
                fix="name each in one of them",
            )
        value = {**value, name: items}
    return value, turns


def _joined(parts: Sequence[Any], shown: dict[str, list[Any]], place: str) -> str:
    """The text of a message's parts, with placeholders. Items that parts name go into `shown`, by field."""
    texts = []
    for part in parts:
        name = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str) or (name == "text" and isinstance(part.get("text"), str)):
            texts.append(part if isinstance(part, str) else part["text"])
        elif name in PLURALS:
            texts.append(f"<{name}>")
            if part.get(name) is not None:
                shown.setdefault(name, []).append(part[name])
        else:
            raise UserError.at(
                place,
                found=f"a part of type {quoted(name)}" if isinstance(name, str) else kind(part),
                expected="parts of type text, image or video",
                fix="correct or remove the record",
            )
    return "".join(texts)


def _texts(value: dict[str, Any], where: str) -> tuple[dict[str, Any], Turns]:
    fix = 'write [{"user": ..., "assistant": ...}]'
    turns: Turns = []
    for k, pair in enumerate(_listed(value, "texts", where, fix)):
        place = f"{where}: field 'texts[{k}]'"
        both = (pair.get("user"), pair.get("assistant")) if isinstance(pair, dict) else (None, None)
        if not (isinstance(both[0], str) and isinstance(both[1], str)):
            found = kind(pair) if not isinstance(pair, dict) else " and ".join(map(kind, both))
            expected, fix = "texts in 'user' and 'assistant'", "correct or remove the record"
            raise UserError.at(place, found=found, expected=expected, fix=fix)
        _check_answer(both[1], place)
        turns += [("user", both[0]), ("assistant", both[1])]
    return value, _with_system(value, turns, where)


def _question(value: dict[str, Any], where: str) -> tuple[dict[str, Any], Turns]:
    question, answer = value.get("question"), value.get("answer")
    # Some data sets have several right answers, the first of which is trained on.
    answer = answer[0] if isinstance(answer, list) and answer else answer
    turns: Turns = []
    for name, role, text in (
        ("question", "user", "" if question is None else question),
        ("answer", "assistant", answer),
    ):
        if not isinstance(text, str):
            found = "no such field" if value.get(name) is None else kind(text)
            fix = "name the field that has it in `fields` of the data set, or correct the record"
            raise UserError.at(f"{where}: field '{name}'", found=found, expected="a text", fix=fix)
        turns.append((role, text))
    _check_answer(turns[1][1], f"{where}: field 'answer'")
    return value, _with_system(value, turns, where)


_FORMS: dict[str, Form] = {
    "conversations": _conversations,
    "messages": _messages,
    "texts": _texts,
    "question": _question,
    "answer": _question,
}


def _with_system(value: dict[str, Any], turns: Turns, where: str) -> Turns:
    system = value.get("system")
    if system is None:
        return turns
    if not isinstance(system, str):
        fix = "correct the record"
        raise UserError.at(f"{where}: field 'system'", found=kind(system), expected="a text", fix=fix)
    return [("system", system), *turns]


def _listed(value: dict[str, Any], form: str, where: str, fix: str) -> list[Any]:
    listed = value.get(form)
    if not isinstance(listed, list) or not listed:
        found = "no such field" if form not in value else "an empty list" if listed == [] else kind(listed)
        expected = "a list of turns" if form != "texts" else "a list of pairs"
        raise UserError.at(f"{where}: field '{form}'", found=found, expected=expected, fix=fix)
    return listed


def _turn(turn: Any, role_key: str, text_key: str, place: str) -> tuple[str, str]:
    if not isinstance(turn, dict):
        expected, fix = f"an object with '{role_key}' and '{text_key}'", "correct or remove the record"
        raise UserError.at(place, found=kind(turn), expected=expected, fix=fix)
    speaker, text = turn.get(role_key), turn.get(text_key)
    if not isinstance(speaker, str) or speaker not in ROLES:
        found = quoted(speaker) if isinstance(speaker, str) else f"{kind(speaker)} for '{role_key}'"
        names = "human, gpt or system" if role_key == "from" else "user, assistant or system"
        expected, fix = f"'{role_key}' to be {names}", "rename the speaker of this turn"
        raise UserError.at(place, found=found, expected=expected, fix=fix)
    if not isinstance(text, str):
        found, fix = f"{kind(text)} for '{text_key}'", f"write the turn's text in '{text_key}'"
        raise UserError.at(place, found=found, expected="a string", fix=fix)
    if ROLES[speaker] == "assistant":
        _check_answer(text, place)
    return ROLES[speaker], text


def _check_answer(text: str, place: str) -> None:
    if not text or text.isspace():
        because, fix = "the model would be trained to say nothing", "write the answer, or remove the record"
        raise UserError.at(place, problem="empty answer", because=because, fix=fix)


def _check_order(turns: Turns, form: str, where: str) -> None:
    """An optional leading system turn, then user and assistant in turn, ending with the assistant."""
    roles = [role for role, _ in turns]
    start = 1 if roles[0] == "system" else 0
    if len(roles) > start and roles[start:] == ["user", "assistant"] * ((len(roles) - start) // 2):
        return
    for k, role in enumerate(roles[start:], start=start):
        wanted = "assistant" if (k - start) % 2 else "user"
        if role != wanted:
            raise UserError.at(
                f"{where}: field '{form}[{k}]'",
                found=f"a turn of {_speaker(role, form)}",
                expected=f"a turn of {_speaker(wanted, form)}",
                because="turns alternate after an optional leading system turn",
                fix="merge consecutive turns of one speaker, or remove the extra turn",
            )
    if roles[-1] != "assistant":
        answering = _speaker("assistant", form)
        raise UserError.at(
            f"{where}: field '{form}[{len(roles) - 1}]'",
            found=f"a conversation that ends with {_speaker(roles[-1], form)}",
            expected=f"one that ends with {answering}",
            because=f"only {answering} turns are trained on",
            fix="add the answer, or remove the last turn",
        )


def _speaker(role: str, form: str) -> str:
    return {"user": "human", "assistant": "gpt"}.get(role, role) if form == FORMS[0] else role


def _check_placeholders(turns: Turns, items: int, placeholders: int, field: ItemField, form: str, where: str) -> None:
    if placeholders:
        for k, (role, text) in enumerate(turns):
            if role != "user" and field.placeholder in text:
                raise UserError.at(
                    f"{where}: field '{form}[{k}]'",
                    found=f"{field.placeholder} in a turn of {_speaker(role, form)}",
                    expected="placeholders in human turns only",
                    fix="move the placeholder to the human turn that shows the item",
                )
    if placeholders != items:
        raise UserError.at(
            f"{where}: fields '{field.name}' and '{form}'",
            found=f"{placeholders} {field.placeholder} placeholders for {items} {field.modality}s",
            expected=f"one placeholder for each {field.modality}",
            because="a placeholder marks the position of an item's tokens",
            fix=f"add or remove placeholders or {field.modality}s",
        )
