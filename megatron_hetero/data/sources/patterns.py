"""Finds files by a pattern: braces as in a shell, `shard-{0000..0099}.tar` or `{a,b}.json`, then `*`, `?` and `[...]`.
Matches of a wildcard are in the order of their names.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice

from megatron_hetero.base.contents import StoredFile, is_url, require_store, store
from megatron_hetero.base.errors import UserError, quoted

MAX_FILES = 1_000_000
"""Maximum number of files of a data set."""
MAX_NAME, MAX_CHARACTERS = 4096, 1 << 28
"""Maximum characters of a name (the limit of paths in Linux), and of all names together."""
MAX_BRACES = 16
"""Maximum number of opening braces in a pattern."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MARK = re.compile(r"[{},]")
_UNUSABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")  # The other surrogates encode bytes of a file's name.


def files_of(pattern: str, setting: str) -> tuple[StoredFile, ...]:
    """Return the files named by the pattern of a `setting`. Names without wildcards need not exist.

    Raises:
        UserError: no file matches, one is named twice, there are too many, or a URL is not of an object store.
    """
    expanded = with_braces_expanded([pattern], setting)
    if len({is_url(name) for name in expanded}) > 1:
        problem = f"{quoted(pattern)} names both URLs and files of this machine"
        raise UserError.at(setting, problem=problem, fix="write the scheme before all braces, such as s3://{a,b}.tar")
    names: dict[str, None] = {}
    for name in expanded:
        if is_url(name):
            require_store(name, setting)
        matches = _matches(name) if glob.has_magic(name) and not _exists(name) else [name]
        if not matches:
            raise UserError.at(setting, problem=f"no file matches {quoted(name)}", fix="correct the pattern")
        for each in matches:
            if each in names:
                fix = "name each file once"
                raise UserError.at(setting, problem=f"{quoted(each)} is named twice by {quoted(pattern)}", fix=fix)
            names[each] = None
    return tuple(map(StoredFile, names))


def require_matches(pattern: str, setting: str) -> None:
    """Check that all local files that a pattern names exist. Raises `UserError`."""
    for file in files_of(pattern, setting):
        if not is_url(file.name) and not _exists(file.name):
            raise UserError.at(setting, problem=f"no such file: {file}", fix="correct the pattern")


def _exists(name: str) -> bool:
    """Return whether a file with exactly this name exists, brackets included."""
    return not is_url(name) and os.path.exists(name)  # noqa: PTH110


def _matches(name: str) -> list[str]:
    if is_url(name):
        with store(name) as (system, path):
            return sorted(system.unstrip_protocol(each) for each in system.glob(path))
    return sorted(glob.glob(name))  # noqa: PTH207


def with_braces_expanded(patterns: Iterable[str], where: str) -> list[str]:
    """Return all names to which the braces of patterns expand; wildcards are not expanded. Raises `UserError`."""
    names, size = list[str](), 0
    for pattern in patterns:
        if _UNUSABLE.search(pattern) or pattern.count("{") > MAX_BRACES:
            expected = f"a pattern in UTF-8 without NUL and with at most {MAX_BRACES} braces"
            raise UserError.at(where, found=quoted(pattern), expected=expected, fix="correct it, or rename the files")
        for name in _expanded(pattern, where):
            names.append(name)
            size += len(name)
            if len(names) > MAX_FILES or len(name) > MAX_NAME or size > MAX_CHARACTERS:
                sizes = f"{MAX_NAME:,} characters of a name, or {MAX_CHARACTERS:,} of all"
                found, fix = f"more than {MAX_FILES:,} files, {sizes}", "pack the records into fewer files"
                raise UserError.at(where, found=found, expected="fewer", fix=fix)
    return names


def _expanded(pattern: str, where: str) -> Iterator[str]:
    """Yield the names to which the braces of a pattern expand."""
    start = pattern.find("{")
    end = next(_outer_marks(pattern, start), None) if start >= 0 else None
    if end is None:
        yield pattern
        return
    tails = list(islice(_expanded(pattern[end.end() :], where), MAX_FILES + 1))
    for choice in _choices(pattern[start + 1 : end.start()], where):
        for head in _expanded(choice, where):
            yield from (pattern[:start] + head + tail for tail in tails)


def _outer_marks(text: str, start: int = 0) -> Iterator[re.Match[str]]:
    """Yield the commas of a text that are outside braces, and the closing marks of outermost braces."""
    depth = 0
    for mark in _MARK.finditer(text, start):
        depth += {"{": 1, "}": -1, ",": 0}[mark[0]]
        if not depth:
            yield mark


def _choices(inside: str, where: str) -> Iterator[str]:
    """Yield the choices in a pair of braces, given the text between the braces. Raises `UserError`."""
    if ends := _RANGE.fullmatch(inside):
        # Python refuses to convert texts of thousands of digits.
        first, last = (int(end[:20]) for end in ends.groups())
        if not 0 <= last - first < MAX_FILES or len(inside) > 40:
            found, expected = f"{{{inside}}}", f"an ascending range of at most {MAX_FILES:,} numbers"
            raise UserError.at(where, found=found, expected=expected, fix="correct the pattern")
        width = len(ends[1]) if ends[1].startswith("0") else 0
        yield from (f"{number:0{width}}" for number in range(first, last + 1))
        return
    begin = 0
    for mark in _outer_marks(inside):
        if mark[0] == ",":
            yield inside[begin : mark.start()]
            begin = mark.end()
    yield inside[begin:]
