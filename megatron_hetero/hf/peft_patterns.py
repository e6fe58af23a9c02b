"""Patterns of layers in `adapter_config.json`: regular expressions that strangers write, for which `re` may take hours.

Literals, `.`, classes, groups, `|`, anchors and quantifiers of single characters or classes are supported. They are
matched by the set of places that are reached, in time linear in the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import TypeAlias

MAX_PATTERNS, MAX_CHARACTERS = 4096, 256
"""Limits on the patterns of a key, such as `rank_pattern`, and on their length."""
_MAX_NOT_PLAIN = 256
"""Limit on those that are more than a name."""
EXPECTED = (
    f"at most {MAX_PATTERNS} regular expressions, of at most {MAX_CHARACTERS} characters, {_MAX_NOT_PLAIN} of them "
    "with more than letters and dots, none with quantified groups, lookaround, backreferences or flags"
)
"""What patterns may be, for messages."""
_PLAIN = re.compile(r"(?:[\w-]|\\?\.)*(?<![\w-])(?P<tail>[\w-]*)", re.ASCII)
_ESCAPED = r"\\[dDwW]|\\[^A-Za-z0-9]"
_TOKEN = re.compile(
    rf"""(?P<opens>\((?!\?)|\(\?:)
    | (?P<closes>\)(?![*+?{{]))
    | (?P<other>\|)
    | (?P<anchor>[\^$](?![*+?{{]))
    | (?P<one>{_ESCAPED} | \[\^?(?:[^][\\]|{_ESCAPED})+\] | [^][\\(){{}}*+?|^$])
      (?:(?P<sign>[*+?])\??|\{{(?P<least>\d{{1,3}})(?P<comma>,(?P<most>\d{{1,3}})?)?\}}\??)?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class _Some:
    """Between `least` and `most` characters, each of which `one` matches."""

    one: re.Pattern[str]
    least: int
    most: float

    def ends(self, text: str, at: set[int]) -> set[int]:
        reached = set[int]() if self.least else set(at)
        for count in range(1, int(min(self.most, len(text))) + 1):
            at = {place + 1 for place in at if place < len(text) and self.one.match(text[place])}
            if count >= self.least:
                at -= reached
                reached |= at
            if not at:
                break
        return reached


_Group: TypeAlias = "list[list[_Some | str | _Group]]"
"""Alternatives, each a sequence of characters, anchors and groups."""


class Pattern:
    """A pattern, which matches the end of a path, from its begin or behind a dot on. Raises `ValueError` if it is not
    supported.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS or not text.isascii() or not text.isprintable():
            raise ValueError
        plain = _PLAIN.fullmatch(text)
        self.is_plain, self._tail = plain is not None, plain["tail"] if plain else ""
        # A plain one has one length, so that `re` has nothing to try but where it begins.
        self._whole = re.compile(rf"(?:.*\.)?{text}") if plain else None
        self._group = _parsed(text)

    def matches(self, path: str) -> bool:
        """Return whether it matches up to the end of a path."""
        if not path.endswith(self._tail):
            return False
        if self._whole is not None:
            return self._whole.fullmatch(path) is not None
        return len(path) in _ends(self._group, path, set(_starts(path)))

    def layer(self, path: str) -> int | None:
        """Return the number that is the first name behind what it matches, if there is one."""
        for start in _starts(path):
            for end in sorted(_ends(self._group, path, {start}), reverse=True):
                if found := re.compile(r"\.(\d{1,9})\.", re.ASCII).match(path, end):
                    return int(found[1])
        return None


def patterns(texts: list[str]) -> list[Pattern]:
    """Return the patterns of a key. Raises `ValueError`, with the first that is not supported, or their number."""
    if len(texts) > MAX_PATTERNS:
        raise ValueError(f"{len(texts)} patterns")
    found = list[Pattern]()
    for text in texts:
        try:
            found.append(Pattern(text))
        except ValueError:
            raise ValueError(text) from None
    if (count := sum(not each.is_plain for each in found)) > _MAX_NOT_PLAIN:
        raise ValueError(f"{count} patterns that are not names")
    return found


def _starts(path: str) -> Iterator[int]:
    yield 0
    yield from (place + 1 for place, letter in enumerate(path) if letter == ".")


@lru_cache(maxsize=256)
def _one(text: str) -> re.Pattern[str]:
    return re.compile(text, re.ASCII)


def _parsed(text: str) -> _Group:
    """Return a pattern's alternatives. Raises `ValueError` if it is not supported."""
    open_groups: list[_Group] = [[[]]]
    at = 0
    while at < len(text):
        if (token := _TOKEN.match(text, at)) is None:
            raise ValueError
        at = token.end()
        if token["opens"]:
            open_groups.append([[]])
        elif token["closes"]:
            group = open_groups.pop()
            if not open_groups:
                raise ValueError
            open_groups[-1][-1].append(group)
        elif token["other"]:
            open_groups[-1].append([])
        else:
            open_groups[-1][-1].append(token["anchor"] or _some(token))
    if len(open_groups) > 1:
        raise ValueError
    return open_groups[0]


def _some(token: re.Match[str]) -> _Some:
    least, most = {"*": (0, inf), "+": (1, inf), "?": (0, 1.0), None: (1, 1.0)}[token["sign"]]
    if token["least"]:
        least = int(token["least"])
        most = float(token["most"] or inf) if token["comma"] else least
    if least > most:
        raise ValueError
    try:
        return _Some(_one(token["one"]), least, most)
    except re.error:
        raise ValueError from None


def _ends(group: _Group, text: str, starts: set[int]) -> set[int]:
    """Return where a group can end in `text` if it begins at one of these places."""
    found = set[int]()
    for sequence in group:
        at = starts
        for part in sequence:
            if isinstance(part, str):
                at = at & {0 if part == "^" else len(text)}
            else:
                at = part.ends(text, at) if isinstance(part, _Some) else _ends(part, text, at)
            if not at:
                break
        found |= at
    return found
