"""Parses the text of layouts, such as ``tp:4,dp:2@0-3,8-11``, into degrees and ranks.

The grammar, which ignores blanks and the order of axes:

    layout  = degrees [ "@" ranks ]
    degrees = axis ":" degree { "," axis ":" degree }       axis  = tp | sp | cp | dp | pp | axis of a further view
    ranks   = range { "," range }                           range = first "-" last | rank

Whether the degrees fit the ranks is checked in `megatron_hetero.layout.layout`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from megatron_hetero.layout.axes import AXES, EXPERTS, SPLIT_EXPERTS, WHOLE_EXPERTS, LayoutProblem

MAX_PLANNED = 20_000
"""Number of ranks in the largest world that is estimated or suggested."""
_MAX_RANKS = 1 << 20
"""Limit on rank numbers in a layout's text, so that a mistyped range does not exhaust memory."""


def read(text: str, axes: Sequence[str] = AXES) -> tuple[dict[str, int], tuple[int, ...] | None]:
    """Return the degrees in `text` by axis, and the ranks, or None if `text` has no ranks. `axes`: all known axes.

    Raises:
        LayoutProblem: the text breaks the grammar.
    """
    degrees_text, at, ranks_text = re.sub(r"\s", "", text).partition("@")
    degrees: dict[str, int] = {}
    for item in degrees_text.split(","):
        axis, degree = _read_degree(item, axes)
        if axis in degrees:
            why = "an axis has one degree"
            raise LayoutProblem(f"{axis} twice ({axis}:{degrees[axis]} and {item})", "each axis once", why, axis)
        degrees[axis] = degree
    return degrees, _read_ranks(ranks_text) if at else None


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ascending ranks as ranges: ``0-3,8`` for 0, 1, 2, 3, 8."""
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs_of(ranks))


def runs_of(ranks: Iterable[int]) -> list[list[int]]:
    """Return the first and last rank of each run of consecutive ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean `tp`?)`` if a known name resembles `name`, else an empty string."""
    close = get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean `{close[0]}`?)" if close else ""


def unknown_axis(axis: str, known: Sequence[str]) -> LayoutProblem:
    """Return the `LayoutProblem` for `axis`, which is not among the `known` axes."""
    why = ""
    if axis in (*EXPERTS.names, SPLIT_EXPERTS):
        why = WHOLE_EXPERTS if {*EXPERTS.names} <= {*known} else "the module has no experts"
    found = f"axis `{axis}`{'' if why else did_you_mean(axis, known)}"
    return LayoutProblem(found, f"one of {', '.join(known)}", why or "the module has no other axes", axis)


def _read_degree(item: str, axes: Sequence[str]) -> tuple[str, int]:
    axis, colon, degree = item.partition(":")
    if not colon:
        raise LayoutProblem(f"`{item}`", "axis:degree, such as tp:4", "a layout is a list of axes with their degrees")
    if axis not in axes:
        raise unknown_axis(axis, axes)
    if not re.fullmatch(r"[0-9]{1,7}", degree) or int(degree) < 1:
        why = "a degree is a number of ranks"
        raise LayoutProblem(f"degree `{degree}` for {axis}", "an integer of 1 or more", why, axis)
    return axis, int(degree)


def _read_ranks(text: str) -> tuple[int, ...]:
    ranks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        if match is None:
            expected = "first-last or one rank, such as 0-3 or 8"
            raise LayoutProblem(f"ranks `{item}`", expected, "ranks are integers from 0")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise LayoutProblem(f"ranks `{item}`", "the lower rank first", "ranges ascend")
        if last >= _MAX_RANKS:
            raise LayoutProblem(f"ranks `{item}`", f"ranks below {_MAX_RANKS}", "no world is that large")
        if ranks and first <= ranks[-1]:
            why = "process groups number their members in ascending order"
            raise LayoutProblem(f"ranks `{item}` after rank {ranks[-1]}", "each rank once, ascending", why)
        ranks.extend(range(first, last + 1))
    return tuple(ranks)
