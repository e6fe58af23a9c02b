"""The fields of a record that name items: paths of pictures, and videos with what is said of them."""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_hetero.base.contents import Content
from megatron_hetero.base.errors import UserError, quoted
from megatron_hetero.models.items.types import Modality

FRAME_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
"""A list of files with these suffixes is one video."""

PLURALS = {"image": "images", "video": "videos"}
"""Fields of the encoder `vision`, and their other names."""
_MOST, _RATES = 1e9, (1e-3, 1000)
"""Largest number of seconds, and smallest and largest number of frames per second."""
_VIDEOS = "the path of a video, a list of paths, or a list of frames"


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
    """An item of a record: its field, and its path as written, or its content where the data set's own files have it.
    `frames`, `given`: see `Item`.
    """

    field: ItemField
    file: str | Content
    frames: tuple[str | Content, ...] = ()
    given: tuple[tuple[str, Any], ...] = ()


def kind(value: Any) -> str:
    """A JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def is_content(value: Any) -> bool:
    """Whether it is a part of a data set's own files, rather than the path of another."""
    return not isinstance(value, str | list | dict) and hasattr(value, "label")


def label_of(file: Any) -> Any:
    """The name of a content, and any other value, such as a path, as it is."""
    return file.label if is_content(file) else file


def items_of(value: dict[str, Any], field: ItemField, where: str) -> list[ItemRef]:
    """The items in a field of a record. A video is a file or a list of frames. Raises `UserError`."""
    name, is_video = _named(value, field.name, where), field.modality == "video"
    place, given = f"{where}: field '{name}'", value.get(name)
    listed = [] if given is None else [given] if isinstance(given, str) or is_content(given) else given
    if not isinstance(listed, list):
        raise _no_paths(given, place, _VIDEOS if is_video else "a string, a list of strings, or null")
    if is_video and isinstance(given, list):
        listed = _videos(given, place)
    for k, each in enumerate(listed):
        for path in each if is_video and isinstance(each, list) else [each]:
            _check_path(path, f"{place}[{k}]" if isinstance(given, list) else place)
    if not is_video:
        return [ItemRef(field, path) for path in listed]
    videos = [
        ItemRef(field, each[0], tuple(each)) if isinstance(each, list) else ItemRef(field, each) for each in listed
    ]
    fields = _further(value, videos, where)
    return [video._replace(given=tuple(of_one)) for video, of_one in zip(videos, fields, strict=True)]


def _named(value: dict[str, Any], field: str, where: str) -> str:
    """The name that a record uses for a field. Raises `UserError` if it uses both."""
    plural = PLURALS.get(field, field)
    if not value.get(plural):
        return field
    if plural != field and value.get(field):
        raise UserError.at(
            f"{where}: fields '{field}' and '{plural}'",
            problem="given both",
            because="they are names of one field",
            fix="remove one of them",
        )
    return plural


def _videos(given: list[Any], place: str) -> list[Any]:
    """Each video of a list, as a file or as a list of frames."""
    if any(isinstance(each, list) for each in given):
        for k, each in enumerate(given):
            if each == [] or not (isinstance(each, str | list) or is_content(each)):
                raise _no_paths(each, f"{place}[{k}]", _VIDEOS)
            if isinstance(each, list) and not all(map(_is_frame, each)):
                raise UserError.at(
                    f"{place}[{k}]",
                    found=quoted(str(each)),
                    expected=f"the frames of one video, files such as {', '.join(FRAME_SUFFIXES[:4])}",
                    fix="list videos without an inner list",
                )
        return given
    are_frames = list(map(_is_frame, given))
    if any(are_frames) and not all(are_frames):
        raise UserError.at(
            place,
            found=f"pictures and {quoted(str(given[are_frames.index(False)]))} in one list",
            expected="the frames of one video, or videos",
            fix="put the frames of each video into a list of their own, [[...], ...]",
        )
    return [given] if any(are_frames) else given


def _is_frame(path: Any) -> bool:
    name = label_of(path)
    return isinstance(name, str) and name.lower().endswith(FRAME_SUFFIXES)


def _further(value: dict[str, Any], videos: Sequence[ItemRef], where: str) -> list[list[tuple[str, Any]]]:
    """The further fields of each video."""
    found: list[list[tuple[str, Any]]] = [[] for _ in videos]
    for name, expected, is_one in (
        ("fps", "frames per second, {:g} to {}".format(*_RATES), lambda x: _is_number(x, *_RATES)),
        ("video_start", "seconds, a number of at least 0", _is_number),
        ("video_end", "seconds, a number above 0", lambda x: _is_number(x) and x > 0),
        ("times", "the second at which each frame is shown, ascending", _is_ascending),
    ):
        given, place = value.get(name), f"{where}: field '{name}'"
        if given is None or not videos:
            continue
        one = is_one(given)
        each = [given] * len(videos) if one and (name != "times" or len(videos) == 1) else given
        if not isinstance(each, list) or len(each) != len(videos) or not all(map(is_one, each)):
            several = f", or a list of {len(videos)} of these" if len(videos) > 1 else ""
            raise UserError.at(place, found=quoted(str(given)), expected=expected + several, fix="correct the record")
        for video, of_one, values in zip(videos, each, found, strict=True):
            if name == "times" and len(of_one) != len(video.frames):
                what = f"{len(video.frames)} frames" if video.frames else f"the file {quoted(str(video.file))}"
                raise UserError.at(
                    place,
                    found=f"{len(of_one)} times for {what}",
                    expected="one for each frame of a list of frames",
                    because="a file has times of its own",
                    fix="correct or remove the field",
                )
            values.append((name, tuple(map(float, of_one)) if name == "times" else float(of_one)))
    return found


def _is_number(value: Any, least: float = 0, most: float = _MOST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_ascending(value: Any) -> bool:
    """Whether it is a list of times of which each is above the one before."""
    if not isinstance(value, list) or not all(map(_is_number, value)):
        return False
    return all(low < high for low, high in itertools.pairwise(value))


def _no_paths(value: Any, place: str, expected: str) -> UserError:
    fix = "write the path relative to the folder of images and videos"
    return UserError.at(place, found="an empty list" if value == [] else kind(value), expected=expected, fix=fix)


def _check_path(path: Any, where: str) -> None:
    if is_content(path):
        return
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        found = quoted(path) if isinstance(path, str) else kind(path)
        raise UserError.at(
            where, found=found, expected="the path of a file", fix="write a path relative to the image folder"
        )
    if path.startswith("/") or (".." in path and posixpath.normpath(path).split("/")[0] == ".."):
        raise UserError.at(
            where,
            found=f"{quoted(path)}, which leaves the image folder",
            expected="a path inside the image folder",
            because="annotations must not reach other files",
            fix="write it relative to the folder in `images` of data.registry, or set that folder higher up",
        )
