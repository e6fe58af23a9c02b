"""Validates the structure of a LLaVA-style record, once, when the annotations are loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_hetero.base.errors import VISION, UserError, quoted
from megatron_hetero.data.item_fields import kind, paths_of, videos_of
from megatron_hetero.models.items.types import Modality

# Names of LLaVA and of chat templates.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Turns = list[tuple[str, str]]


class ItemField(NamedTuple):
    """Field `name` of records, with the paths of items of one type for one encoder; `key` is its name in stored
    records.
    """

    encoder: str
    modality: Modality
    name: str
    key: str

    @property
    def placeholder(self) -> str:
        """Marks the place of an item in a human turn."""
        return f"<{self.name}>"


class ItemRef(NamedTuple):
    """An item of a record: its field, and its path as written. `frames`, `given`: see `Item`."""

    field: ItemField
    file: str
    frames: tuple[str, ...] = ()
    given: tuple[tuple[str, Any], ...] = ()


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
    value: Any, where: str, *, has_image_folder: bool, fields: Sequence[ItemField] = IMAGES
) -> tuple[Turns, list[ItemRef]]:
    """Checks one decoded record, whose items may be in `fields`, and reduces it to what training needs.

    Returns:
        The turns as (role, text) with role in system, user, assistant; and the items in the order of placeholders.

    Raises:
        UserError: naming ``where`` and the field.
    """
    if not isinstance(value, dict):
        raise UserError.at(
            where, found=kind(value), expected="a JSON object", fix='write {"image": ..., "conversations": [...]}'
        )
    items = {field: _items(value, field, where) for field in fields}
    turns = _turns(value, where)
    _check_order(turns, where)
    if not any(field.modality == "video" for field in fields):
        _refuse_videos(value, turns, where)
    for field in fields:
        _check_placeholders(turns, len(items[field]), field, where)
        if items[field] and not has_image_folder:
            raise UserError.at(
                f"{where}: field '{field.name}'",
                problem=f"{quoted(items[field][0].file)} given, but the data set has no image folder",
                fix="set `images` of the data set in data.registry",
            )
    coming = {field: iter(its_items) for field, its_items in items.items()}
    shown = [field for _, text in turns for field in split_at_placeholders(text, fields)[1]]
    return turns, [next(coming[field]) for field in shown]


def split_at_placeholders(text: str, fields: Sequence[ItemField]) -> tuple[list[str], list[ItemField]]:
    """The parts of a text between placeholders, and the fields of these."""
    by_placeholder = {field.placeholder: field for field in fields}
    parts = re.split("(" + "|".join(map(re.escape, by_placeholder)) + ")", text)
    return parts[::2], [by_placeholder[placeholder] for placeholder in parts[1::2]]


def _refuse_videos(value: dict[str, Any], turns: Turns, where: str) -> None:
    fields = [f"field '{name}'" for name in ("video", "videos") if value.get(name)]
    fields += [f"field 'conversations[{k}]'" for k, (_, text) in enumerate(turns) if "<video>" in text]
    if fields:
        raise UserError.at(
            f"{where}: {fields[0]}",
            problem="a video or <video>, but the model does not support videos",
            fix="remove the record, or extract frames and list them in 'image'",
        )


def _items(value: dict[str, Any], field: ItemField, where: str) -> list[ItemRef]:
    """The items in a field of a record."""
    if field.modality == "video":
        return [ItemRef(field, *video) for video in videos_of(value, field.name, where)]
    return [ItemRef(field, path) for path in paths_of(value, field.name, where)]


def _turns(value: dict[str, Any], where: str) -> Turns:
    conversations = value.get("conversations")
    if not isinstance(conversations, list) or not conversations:
        found = "no such field" if "conversations" not in value else kind(conversations)
        raise UserError.at(
            f"{where}: field 'conversations'",
            found="an empty list" if conversations == [] else found,
            expected="a list of turns",
            fix='write [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]',
        )
    return [_turn(turn, f"{where}: field 'conversations[{k}]'") for k, turn in enumerate(conversations)]


def _turn(turn: Any, where: str) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise UserError.at(
            where, found=kind(turn), expected="an object with 'from' and 'value'", fix="correct or remove the record"
        )
    speaker, text = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in ROLES:
        found = quoted(speaker) if isinstance(speaker, str) else f"{kind(speaker)} for 'from'"
        raise UserError.at(
            where, found=found, expected="'from' to be human, gpt or system", fix="rename the speaker of this turn"
        )
    if not isinstance(text, str):
        raise UserError.at(
            where, found=f"{kind(text)} for 'value'", expected="a string", fix="write the turn's text in 'value'"
        )
    if ROLES[speaker] == "assistant" and not text.strip():
        raise UserError.at(
            where,
            problem="empty answer",
            because="the model would be trained to say nothing",
            fix="write the answer, or remove the record",
        )
    return ROLES[speaker], text


def _check_order(turns: Turns, where: str) -> None:
    """An optional leading system turn, then user and assistant in turn, ending with the assistant."""
    roles = [role for role, _ in turns]
    start = 1 if roles[0] == "system" else 0
    for k, role in enumerate(roles[start:], start=start):
        wanted = "assistant" if (k - start) % 2 else "user"
        if role != wanted:
            raise UserError.at(
                f"{where}: field 'conversations[{k}]'",
                found=f"a turn of {_speaker(role)}",
                expected=f"a turn of {_speaker(wanted)}",
                because="turns alternate after an optional leading system turn",
                fix="merge consecutive turns of one speaker, or remove the extra turn",
            )
    if roles[-1] != "assistant":
        raise UserError.at(
            f"{where}: field 'conversations[{len(roles) - 1}]'",
            found=f"a conversation that ends with {_speaker(roles[-1])}",
            expected="one that ends with gpt",
            because="only gpt turns are trained on",
            fix="add the answer, or remove the last turn",
        )


def _speaker(role: str) -> str:
    return {"user": "human", "assistant": "gpt"}.get(role, role)


def _check_placeholders(turns: Turns, items: int, field: ItemField, where: str) -> None:
    for k, (role, text) in enumerate(turns):
        if role != "user" and field.placeholder in text:
            raise UserError.at(
                f"{where}: field 'conversations[{k}]'",
                found=f"{field.placeholder} in a turn of {_speaker(role)}",
                expected="placeholders in human turns only",
                fix="move the placeholder to the human turn that shows the item",
            )
    placeholders = sum(text.count(field.placeholder) for _, text in turns)
    if placeholders != items:
        raise UserError.at(
            f"{where}: fields '{field.name}' and 'conversations'",
            found=f"{placeholders} {field.placeholder} placeholders for {items} {field.modality}s",
            expected=f"one placeholder for each {field.modality}",
            because="a placeholder marks the position of an item's tokens",
            fix=f"add or remove placeholders or {field.modality}s",
        )
