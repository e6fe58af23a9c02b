"""The structure of one LLaVA-style record, checked once when the annotations are loaded."""

from __future__ import annotations

import posixpath
from typing import Any

from megatron_hetero.errors import UserError

IMAGE_PLACEHOLDER = "<image>"
VIDEO_PLACEHOLDER = "<video>"

# LLaVA's names and those of chat templates.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Turns = list[tuple[str, str]]


def validate_record(value: Any, where: str, *, has_image_folder: bool) -> tuple[Turns, list[str]]:
    """Checks one decoded record and reduces it to what training needs.

    Returns:
        The turns as (role, text) with role in system, user, assistant; and the image paths as written.

    Raises:
        UserError: naming ``where`` and the field.
    """
    if not isinstance(value, dict):
        raise UserError.at(
            where, found=_kind(value), expected="a JSON object", fix='write {"image": ..., "conversations": [...]}'
        )
    _refuse_videos(value, where)
    images = _images(value, where)
    turns = _turns(value, where)
    _check_order(turns, where)
    _check_placeholders(turns, images, where)
    if images and not has_image_folder:
        raise UserError.at(
            f"{where}: field 'image'",
            found=f"{images[0]!r}, but the data set has no image folder",
            expected="a folder that image paths are relative to",
            fix="set `images` of this data set in data.registry",
        )
    return turns, images


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def _refuse_videos(value: dict[str, Any], where: str) -> None:
    for field in ("video", "videos"):
        if value.get(field):
            raise UserError.at(
                f"{where}: field {field!r}",
                found="a video",
                expected="images or text only",
                because="videos are not supported",
                fix="remove the record, or extract frames and list them in 'image'",
            )


def _images(value: dict[str, Any], where: str) -> list[str]:
    if value.get("images"):
        # Read as if it were absent, the record would train without its pictures.
        raise UserError.at(
            f"{where}: field 'images'", found="'images'", expected="'image'", fix="rename the field to 'image'"
        )
    image = value.get("image")
    images = [] if image is None else [image] if isinstance(image, str) else image
    if not isinstance(images, list):
        raise UserError.at(
            f"{where}: field 'image'",
            found=_kind(images),
            expected="a string, a list of strings, or null",
            fix="write the path relative to the image folder",
        )
    for k, path in enumerate(images):
        _check_image_path(path, f"{where}: field 'image'" + (f"[{k}]" if isinstance(image, list) else ""))
    return images


def _check_image_path(path: Any, where: str) -> None:
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        found = repr(path) if isinstance(path, str) else _kind(path)
        raise UserError.at(
            where, found=found, expected="the path of a picture", fix="write a path relative to the image folder"
        )
    normal = posixpath.normpath(path)
    if posixpath.isabs(path) or normal == ".." or normal.startswith("../"):
        raise UserError.at(
            where,
            found=f"{path!r}, which leaves the image folder",
            expected="a path inside the image folder",
            because="annotations must not reach other files",
            fix="write it relative to the folder in `images` of data.registry, or set that folder higher up",
        )


def _turns(value: dict[str, Any], where: str) -> Turns:
    conversations = value.get("conversations")
    if not isinstance(conversations, list) or not conversations:
        found = "no such field" if "conversations" not in value else _kind(conversations)
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
            where, found=_kind(turn), expected="an object with 'from' and 'value'", fix="mend or remove the record"
        )
    speaker, text = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in ROLES:
        found = repr(speaker) if isinstance(speaker, str) else f"{_kind(speaker)} for 'from'"
        raise UserError.at(
            where, found=found, expected="'from' to be human, gpt or system", fix="rename the speaker of this turn"
        )
    if not isinstance(text, str):
        raise UserError.at(
            where, found=f"{_kind(text)} for 'value'", expected="a string", fix="write the turn's text in 'value'"
        )
    _refuse_lone_surrogates(text, where)
    return ROLES[speaker], text


def _refuse_lone_surrogates(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError.at(
            where,
            found=f"half a surrogate pair (\\u{ord(text[error.start]):04x}) in 'value'",
            expected="Unicode text",
            because="it has no UTF-8 form and no tokens",
            fix="mend the escape sequence",
        ) from error


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
                fix="join turns of one speaker, or remove the surplus turn",
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


def _check_placeholders(turns: Turns, images: list[str], where: str) -> None:
    for k, (role, text) in enumerate(turns):
        if VIDEO_PLACEHOLDER in text:
            raise UserError.at(
                f"{where}: field 'conversations[{k}]'",
                found=VIDEO_PLACEHOLDER,
                expected=f"{IMAGE_PLACEHOLDER} placeholders or text only",
                because="videos are not supported",
                fix="remove the record, or extract frames and list them in 'image'",
            )
        if role != "user" and IMAGE_PLACEHOLDER in text:
            raise UserError.at(
                f"{where}: field 'conversations[{k}]'",
                found=f"{IMAGE_PLACEHOLDER} in a turn of {_speaker(role)}",
                expected="placeholders in human turns only",
                fix="move the placeholder to the human turn that shows the picture",
            )
    placeholders = sum(text.count(IMAGE_PLACEHOLDER) for _, text in turns)
    if placeholders != len(images):
        raise UserError.at(
            f"{where}: fields 'image' and 'conversations'",
            found=f"{placeholders} {IMAGE_PLACEHOLDER} placeholders for {len(images)} images",
            expected="one placeholder for each image",
            because="each placeholder is where its image's tokens go",
            fix="add or remove placeholders or images",
        )
