"""Fields of records that name items: paths of pictures and videos, and settings of each item."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import posixpath
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hetero.base.contents import Content, InMemory
from megatron_hetero.base.errors import UserError, quoted
from megatron_hetero.models.items.types import Modality


class Names(NamedTuple):
    """Names of a modality in data sets: plural of its field, type of a chat message entry with a URL, and suffixes of
    files.
    """

    plural: str
    url: str
    suffixes: tuple[str, ...]


FRAME_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
"""Suffixes of pictures. A list of files with these suffixes is one video."""
NAMES: Mapping[Modality, Names] = {
    "image": Names("images", "image_url", (*FRAME_SUFFIXES, ".gif")),
    "video": Names("videos", "video_url", (".mp4", ".webm", ".mkv", ".mov", ".avi", ".mpg", ".mpeg", ".m4v")),
}
"""Names of the modalities of the encoder `vision`. Record fields are named by the modality or its plural."""
PLURALS: Mapping[str, str] = {modality: names.plural for modality, names in NAMES.items()}
ITEM_TYPES: Mapping[str, str] = {names.url: modality for modality, names in NAMES.items()}
"""Item field for each type of a chat message entry, in addition to the names of the item fields themselves."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that count as missing: in files with columns, all records have all fields."""
_MAX_SECONDS, _RATES = 1e9, (1e-3, 1000)
"""Maximum number of seconds, and minimum and maximum frames per second."""
MAX_DATA_BYTES = 4 << 20
"""Maximum bytes of a picture in a data URI."""
_DATA = re.compile(r"data:(?:image(?:/([\w.+-]+))?)?(?:;[^,;]*)*;base64,", re.IGNORECASE)
_SCHEME = re.compile(r"\s*(data(?=:[^,]*,)|[a-z][a-z0-9+.-]*(?=://))", re.IGNORECASE)
_RAW = re.compile("/9j/|iVBORw0KGgo|UklGR|R0lGOD")
"""First characters of JPEG, PNG, WebP and GIF in base64."""
_MAX_NAME = 255
_VIDEOS = "the path of a video, a list of paths, or a list of frames"


class ItemField(NamedTuple):
    """A field of records, `name`, with the paths of items of one modality for one encoder. `key`: the field's name in
    the digest of a data set.
    """

    encoder: str
    modality: Modality
    name: str
    key: str

    @property
    def placeholder(self) -> str:
        """Text that marks the place of an item in a human turn."""
        return f"<{self.name}>"

    @property
    def settings(self) -> Collection[str]:
        """Names of the `SETTINGS` that apply to items of this field."""
        return SETTINGS if self.modality == "video" else SIZES


class ItemRef(NamedTuple):
    """An item of a record: its field, and its path as written, or its content if the data set's files contain it.
    `frames`, `given`: see `Item`.
    """

    field: ItemField
    file: str | Content
    frames: tuple[str | Content, ...] = ()
    given: tuple[tuple[str, Any], ...] = ()


def kind(value: Any) -> str:
    """Return the type of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def is_content(value: Any) -> bool:
    """Return whether a value is a `Content` stored in a data set's files, and not the path of another file."""
    return not isinstance(value, str | list | dict) and hasattr(value, "label")


def is_empty(value: Any, depth: int = 4) -> bool:
    """Return whether a value is missing (`EMPTY`), or a list or object of missing values only."""
    if not depth or not isinstance(value, dict | list):
        return value in EMPTY
    return all(is_empty(each, depth - 1) for each in (value.values() if isinstance(value, dict) else value))


def label_of(file: Any) -> Any:
    """Return the label of `file` if it is embedded content; return any other value, such as a path, unchanged."""
    return file.label if is_content(file) else file


def wrong(
    place: str, found: str, expected: str, fix: str = "correct or remove the record", because: str = ""
) -> UserError:
    """Return the error for a field of a record with a wrong value."""
    return UserError.at(place, found=found, expected=expected, fix=fix, because=because)


def items_of(value: Mapping[str, Any], field: ItemField, where: str, folder: Path | None) -> list[ItemRef]:
    """Return the items in a field of a record. A video is a file or a list of frames. Raises `UserError`.

    `folder`: the folder of images and videos; absolute paths become relative to it.
    """
    name, plural, is_video = field.name, PLURALS.get(field.name), field.modality == "video"
    given: Any = value.get(name)
    if plural and (several := value.get(plural)) not in EMPTY:
        if given not in EMPTY:
            place, because = f"{where}: fields '{name}' and '{plural}'", "they are names of one field"
            raise UserError.at(place, problem="given both", because=because, fix="remove one of them")
        name, given = plural, several
    if given in EMPTY:
        return []
    place = f"{where}: field '{name}'"
    listed = [given] if isinstance(given, str) or is_content(given) else given
    if not isinstance(listed, list):
        raise _no_paths(given, place, _VIDEOS if is_video else "a string, a list of strings, or null")
    files: list[Any] = []
    for k, each in enumerate(listed):
        entry_place, is_list = f"{place}[{k}]" if listed is given else place, is_video and isinstance(each, list)
        paths = [_file(path, entry_place, folder) for path in (each if is_list else [each])]
        files.append(paths if is_list else paths[0])
    files = _videos(files, place) if is_video and listed is given else files
    return [ItemRef(field, each[0], tuple(each)) if isinstance(each, list) else ItemRef(field, each) for each in files]


def _videos(given: list[Any], place: str) -> list[Any]:
    """Return the videos in a list, each a file or a list of frames. Raises `UserError`."""
    if any(isinstance(each, list) for each in given):
        for k, each in enumerate(given):
            if each == []:
                raise _no_paths(each, f"{place}[{k}]", _VIDEOS)
            if isinstance(each, list) and not all(map(_is_frame, each)):
                expected = f"the frames of one video, files such as {', '.join(FRAME_SUFFIXES[:4])}"
                raise wrong(f"{place}[{k}]", quoted(str(each)), expected, "list videos without an inner list")
        return given
    are_frames = list(map(_is_frame, given))
    if any(are_frames) and not all(are_frames):
        found = f"pictures and {quoted(str(given[are_frames.index(False)]))} in one list"
        fix = "put the frames of each video into a list of their own, [[...], ...]"
        raise wrong(place, found, "the frames of one video, or videos", fix)
    return [given] if any(are_frames) else given


def _is_frame(path: Any) -> bool:
    name = label_of(path)
    return isinstance(path, InMemory) or (isinstance(name, str) and name.lower().endswith(FRAME_SUFFIXES))


def with_settings(value: Mapping[str, Any], refs: list[ItemRef], where: str) -> list[ItemRef]:
    """Return items of one field with `SETTINGS` that they lack filled in from a record or entry. Raises `UserError`."""
    settings: list[dict[str, Any]] = [dict(ref.given) for ref in refs]
    for name in refs[0].field.settings if refs else ():
        given: Any = value.get(name)
        (expected, is_one, convert), place = SETTINGS[name], f"{where}: field '{name}'"
        if given in EMPTY:
            continue
        one = is_one(given)
        each = [given] * len(refs) if one and (name != "times" or len(refs) == 1) else given
        if not isinstance(each, list) or len(each) != len(refs) or not all(map(is_one, each)):
            several = f", or a list of {len(refs)} of these" if len(refs) > 1 else ""
            raise wrong(place, quoted(str(given)), expected + several, "correct the record")
        for ref, setting, values in zip(refs, each, settings, strict=True):
            is_unfit = len(setting) != len(ref.frames) if name == "times" else name == "sample_fps" and not ref.frames
            if is_unfit:
                what = f"{len(ref.frames)} frames" if ref.frames else f"the file {quoted(str(ref.file))}"
                several = f"{len(setting)} times" if name == "times" else "a rate"
                expected, because = "one for each frame of a list of frames", "a file has times of its own"
                raise wrong(place, f"{several} for {what}", expected, "correct or remove the field", because)
            values.setdefault(name, convert(setting))
    return [ref._replace(given=_checked(each, where)) for ref, each in zip(refs, settings, strict=True)]


def _checked(given: dict[str, Any], where: str) -> tuple[tuple[str, Any], ...]:
    """Check the settings of one item. Returns names and values. Raises `UserError` for contradicting settings."""
    fix, sides = "correct or remove one of these fields", {"resized_height", "resized_width"} & given.keys()
    for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
        if low in given and given[low] > given.get(high, given[low]):
            raise wrong(where, f"{low} {given[low]} above {high} {given[high]}", f"{low} up to {high}", fix)
    for other in {"nframes", "sample_fps"} & given.keys():
        if "fps" in given:
            raise wrong(where, f"both fps and {other}", "one of them", fix)
    if len(sides) == 1:
        raise wrong(where, f"{min(sides)} alone", "both resized_height and resized_width", fix)
    if "sample_fps" in given:
        given["fps"] = given.pop("sample_fps")
    return tuple(given.items())


def _is_number(value: Any, minimum: float = 0, maximum: float = _MAX_SECONDS) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum


def _is_ascending(value: Any) -> bool:
    """Return whether a value is a list of ascending times."""
    if not isinstance(value, list) or not all(map(_is_number, value)):
        return False
    return all(low < high for low, high in itertools.pairwise(value))


_RATE = "frames per second, {:g} to {}".format(*_RATES), lambda x: _is_number(x, *_RATES), float
_COUNT = "a whole number above 0", lambda x: _is_number(x, 1, 1e12) and x == int(x), int
SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
SETTINGS: Mapping[str, tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = {
    "fps": _RATE,
    "video_start": ("seconds, a number of at least 0", _is_number, float),
    "video_end": ("seconds, a number above 0", lambda x: _is_number(x) and x > 0, float),
    "times": (
        "the second at which each frame is shown, ascending", _is_ascending, lambda times: tuple(map(float, times))
    ),
    "sample_fps": _RATE,
    **dict.fromkeys(("nframes", "min_frames", "max_frames", "total_pixels", *SIZES), _COUNT),
}  # fmt: skip
"""Settings of items in a record or in an entry of a message: the expected value in words, a function that tests a
value, and a function that converts it. Pictures have only `SIZES`. All names but `times` are from qwen-vl-utils.
"""


def _no_paths(value: Any, place: str, expected: str) -> UserError:
    fix = "write the path relative to the folder of images and videos"
    return wrong(place, "an empty list" if value == [] else kind(value), expected, fix)


def _file(path: Any, where: str, folder: Path | None) -> str | Content:
    """Return a path relative to the image folder and inside it, or the picture in a data URI. Raises `UserError`."""
    if is_content(path):
        return path
    fix = "write a path relative to the image folder"
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise wrong(where, quoted(path) if isinstance(path, str) else kind(path), "the path of a file", fix)
    if ":" in path and (match := _SCHEME.match(path)):
        if match[1].lower() == "data":
            return _picture(path.strip(), where)
        because = "nothing is downloaded, and annotations must not reach other files"
        raise wrong(where, quoted(path), "the path of a file", f"copy the file there, and {fix}", because)
    if len(path) > 64 and (_RAW.match(path.strip()) or max(map(len, path.split("/"))) > _MAX_NAME):
        found = f"{quoted(path[:40])} and {len(path) - 40:,} more characters"
        raise wrong(where, found, "a path", f"{fix}, or data:image/png;base64,...")
    if path.startswith("/") and folder is not None:
        path = _relative(path, folder)
    if (folder is not None and path.startswith("/")) or (
        ".." in path and posixpath.normpath(path).split("/")[0] == ".."
    ):
        found, because = f"{quoted(path)}, which leaves the image folder", "annotations must not reach other files"
        fix = f"copy the file there, and {fix}, or set `images` in data.registry to a folder above it"
        raise wrong(where, found, f"a path inside {folder or 'the image folder'}", fix, because)
    return path


def _relative(path: str, folder: Path) -> str:
    """Return an absolute path relative to the folder, by names or with links resolved; unchanged if it is outside."""
    for resolve in (os.path.normpath, os.path.realpath):
        start = os.path.join(resolve(os.path.abspath(folder)), "")
        if (resolved := resolve(path)).startswith(start):
            return resolved[len(start) :]
    return path


def _picture(uri: str, where: str) -> InMemory:
    """Return the picture in a data URI. Raises `UserError`."""
    fix, found, match = "write it to a file in the image folder, and name that", quoted(uri[:40]), _DATA.match(uri)
    if match is None:
        raise wrong(where, f"the data URI {found}", "a picture such as data:image/png;base64,...", fix)
    try:
        data = base64.b64decode("".join(uri[match.end() :].split()), validate=True)
    except ValueError as error:
        raise wrong(where, f"the data URI {found} ({error})", "base64", fix) from None
    if not 0 < len(data) <= MAX_DATA_BYTES:
        raise wrong(where, f"a data URI of {len(data):,} bytes", f"1 to {MAX_DATA_BYTES:,}", fix)
    name = f"{hashlib.sha256(data).hexdigest()[:32]}.{(match[1] or 'img').lower()}"
    return InMemory(data, name, name, (name, len(data)))
