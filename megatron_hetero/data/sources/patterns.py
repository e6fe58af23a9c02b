"""The files that a pattern names: braces as in a shell, `shard-{0000..0099}.tar` or `{a,b}.json`, then `*`, `?` and
`[...]`. Matches of a wildcard are in the order of their names.
"""

from __future__ import annotations

import glob
import os
import re

from megatron_hetero.base.contents import StoredFile, is_url, store
from megatron_hetero.base.errors import UserError, quoted

MOST_FILES = 1_000_000
"""Limit of the files of a data set."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def files_of(pattern: str, setting: str) -> tuple[StoredFile, ...]:
    """The files that the pattern of a `setting` names: absolute paths, or URLs. Those without wildcards need not exist.

    Raises:
        UserError: no file matches, one is named twice, or there are too many.
    """
    names: dict[str, None] = {}
    for name in _expanded(pattern, setting):
        found = _matches(name) if glob.has_magic(name) and not _exists(name) else [name]
        if not found:
            raise UserError.at(setting, problem=f"no file matches {quoted(name)}", fix="correct the pattern")
        for each in found:
            if each in names:
                fix = "name each file once"
                raise UserError.at(setting, problem=f"{quoted(each)} is named twice by {quoted(pattern)}", fix=fix)
            names[each] = None
    return tuple(map(StoredFile, names))


def require_matches(pattern: str, setting: str) -> None:
    """Check that all files of this machine that a pattern names exist. Raises `UserError`."""
    for file in files_of(pattern, setting):
        if not is_url(file.name) and not _exists(file.name):
            raise UserError.at(setting, problem=f"no such file: {file}", fix="correct the pattern")


def _exists(name: str) -> bool:
    """Whether a file has exactly this name, brackets included."""
    return not is_url(name) and os.path.exists(name)  # noqa: PTH110


def _matches(name: str) -> list[str]:
    if is_url(name):
        with store(name) as (system, path):
            return sorted(system.unstrip_protocol(each) for each in system.glob(path))
    return sorted(glob.glob(name))  # noqa: PTH207


def _expanded(pattern: str, setting: str) -> list[str]:
    """The pattern with each choice of its braces."""
    start = pattern.find("{")
    end = _closing(pattern, start)
    if end is None:
        return [pattern]
    choices = _choices(pattern[start + 1 : end], setting)
    heads = [each for choice in choices for each in _expanded(choice, setting)]
    tails = _expanded(pattern[end + 1 :], setting)
    if len(heads) * len(tails) > MOST_FILES:
        found, expected = f"more than {MOST_FILES:,} files", "fewer"
        raise UserError.at(setting, found=found, expected=expected, fix="pack the records into larger files")
    return [pattern[:start] + head + tail for head in heads for tail in tails]


def _closing(pattern: str, start: int) -> int | None:
    """Where the brace that opens at `start` is closed; None if there is none."""
    depth = 0
    for at in range(start, len(pattern)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(pattern[at], 0)
        if not depth:
            return at
    return None


def _choices(inside: str, setting: str) -> list[str]:
    """What braces with this text between them stand for."""
    if ends := _RANGE.fullmatch(inside):
        first, last = int(ends[1]), int(ends[2])
        if not 0 <= last - first < MOST_FILES:
            found, expected = f"{{{inside}}}", f"an ascending range of at most {MOST_FILES:,} numbers"
            raise UserError.at(setting, found=found, expected=expected, fix="correct the pattern")
        width = len(ends[1]) if ends[1].startswith("0") else 0
        return [f"{number:0{width}}" for number in range(first, last + 1)]
    choices, depth = [""], 0
    for sign in inside:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign == "," and not depth:
            choices.append("")
        else:
            choices[-1] += sign
    return choices
