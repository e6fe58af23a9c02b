"""The fields of a record that name items: paths of pictures, and videos with what is said of them."""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_hetero.base.contents import Content
from megatron_hetero.base.errors import UserError, quoted

FRAME_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif")
"""A list of files with these suffixes is one video."""

PLURALS = {"image": "images", "video": "videos"}
"""Fields of the encoder `vision`, and their other names."""
_MOST, _LEAST_RATE, _MOST_RATE = 1e9, 1e-3, 1000
"""Largest number of seconds, and smallest and largest number of frames per second."""


class Video(NamedTuple):
    """A video of a record, as `ItemRef` has it: its file or first frame, its frames, further fields and values."""

    file: str | Content
    frames: tuple[str | Content, ...]
    given: tuple[tuple[str, Any], ...]


def kind(value: Any) -> str:
    """A JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def is_content(value: Any) -> bool:
    """Whether it is a part of a data set's own files, rather than the path of another."""
    return not isinstance(value, str | list | dict) and hasattr(value, "label")


def paths_of(value: dict[str, Any], field: str, where: str) -> list[str | Content]:
    """The paths or contents in a field of a record. Raises `UserError`."""
    field = _named(value, field, where)
    given = value.get(field)
    paths = [] if given is None else [given] if isinstance(given, str) or is_content(given) else given
    if not isinstance(paths, list):
        raise _no_paths(paths, f"{where}: field '{field}'", "a string, a list of strings, or null")
    for k, path in enumerate(paths):
        if not _is_plain(path):
            _check_path(path, f"{where}: field '{field}'" + (f"[{k}]" if isinstance(given, list) else ""))
    return paths


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


def _is_plain(path: Any) -> bool:
    """Whether a path needs no closer look."""
    if not isinstance(path, str):
        return is_content(path)
    return path[:1] not in ("", "/") and ".." not in path and "\0" not in path and not path.isspace()


def videos_of(value: dict[str, Any], field: str, where: str) -> list[Video]:
    """The videos in a field of a record: a file, a list of frames, or a list of these. Raises `UserError`."""
    field = _named(value, field, where)
    place, given = f"{where}: field '{field}'", value.get(field)
    listed = _listed(given, place)
    for k, files in enumerate(listed):
        for path in files if isinstance(files, list) else [files]:
            if not _is_plain(path):
                _check_path(path, f"{place}[{k}]" if isinstance(given, list) else place)
    videos = [Video(each[0], tuple(each), ()) if isinstance(each, list) else Video(each, (), ()) for each in listed]
    fields = _further(value, videos, where)
    return [video._replace(given=tuple(of_one)) for video, of_one in zip(videos, fields, strict=True)]


def _listed(given: Any, place: str) -> list[Any]:
    """Each video of a field, as a file or as a list of frames."""
    if given is None:
        return []
    if isinstance(given, str) or is_content(given):
        return [given]
    expected = "the path of a video, a list of paths, or a list of frames"
    if not isinstance(given, list):
        raise _no_paths(given, place, expected)
    if any(isinstance(each, list) for each in given):
        for k, each in enumerate(given):
            if each == [] or not (isinstance(each, str | list) or is_content(each)):
                raise _no_paths(each, f"{place}[{k}]", expected)
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
    name = path.label if is_content(path) else path
    return isinstance(name, str) and name.lower().endswith(FRAME_SUFFIXES)


def _further(value: dict[str, Any], videos: Sequence[Video], where: str) -> list[list[tuple[str, Any]]]:
    """The further fields of each video."""
    found: list[list[tuple[str, Any]]] = [[] for _ in videos]
    for name, expected, is_one in (
        ("fps", f"frames per second, {_LEAST_RATE:g} to {_MOST_RATE}", _is_rate),
        ("video_start", "seconds, a number of at least 0", lambda x: _is_number(x) and x >= 0),
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
            if name == "times":
                _check_times(of_one, video, place)
            values.append((name, tuple(map(float, of_one)) if name == "times" else float(of_one)))
    return found


def _check_times(times: Sequence[float], video: Video, place: str) -> None:
    if len(times) != len(video.frames):
        what = f"{len(video.frames)} frames" if video.frames else f"the file {quoted(str(video.file))}"
        raise UserError.at(
            place,
            found=f"{len(times)} times for {what}",
            expected="one for each frame of a list of frames",
            because="a file has times of its own",
            fix="correct or remove the field",
        )


def _is_number(value: Any) -> bool:
    """Whether it is a number of seconds, or per second, that a video may have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST


def _is_rate(value: Any) -> bool:
    return _is_number(value) and _LEAST_RATE <= value <= _MOST_RATE


def _is_ascending(value: Any) -> bool:
    """Whether it is a list of times of which each is above the one before."""
    if not isinstance(value, list) or not all(map(_is_number, value)):
        return False
    return all(low < high for low, high in itertools.pairwise(value)) and (not value or value[0] >= 0)


def _no_paths(value: Any, place: str, expected: str) -> UserError:
    fix = "write the path relative to the folder of images and videos"
    return UserError.at(place, found="an empty list" if value == [] else kind(value), expected=expected, fix=fix)


def _check_path(path: Any, where: str) -> None:
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        found = quoted(path) if isinstance(path, str) else kind(path)
        raise UserError.at(
            where, found=found, expected="the path of a file", fix="write a path relative to the image folder"
        )
    normal = posixpath.normpath(path)
    if posixpath.isabs(path) or normal == ".." or normal.startswith("../"):
        raise UserError.at(
            where,
            found=f"{quoted(path)}, which leaves the image folder",
            expected="a path inside the image folder",
            because="annotations must not reach other files",
            fix="write it relative to the folder in `images` of data.registry, or set that folder higher up",
        )
