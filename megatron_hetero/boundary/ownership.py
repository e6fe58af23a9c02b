"""Ownerships: which ranks hold which rows, and in which form they have the gradient of a row. Pure.

A row is one embedding that crosses a boundary; row ids start at 0. Ranks that replicate the same rows (over `tp`
without sequence-parallel activations) form a replica group.

The gradient of a replicated row has one of two forms, which define the inner product ⟨x, y⟩ over all ranks:

    invariant   each holder has the whole gradient; a row counts once, however many ranks hold it
    partial     each holder has a partial sum; the gradient is the sum over the holders

As text, an ownership lists its groups and their rows in stored order. `Ownership.parse(str(x))` equals `x`:

    0: 0-3,8; 1: 4-7           rank 0 holds five rows, rank 1 four
    0,1: 0-8                   both ranks hold all nine rows, invariant
    0,1: 0-8 partial           the same rows, with gradients to be summed
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.grammar import format_ranks

Gradient = Literal["invariant", "partial"]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Members:
    """The ranks of replica groups as int64 arrays.

    `ranks`: ranks of all groups, concatenated; `starts`, [groups + 1]: the index in `ranks` where each group begins,
    then the end. `sorted_ranks`, `sorted_groups`: all ranks, ascending, and the group of each.
    """

    ranks: np.ndarray
    starts: np.ndarray
    sorted_ranks: np.ndarray
    sorted_groups: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Number of ranks in each group."""
        return np.diff(self.starts)

    def group_of(self, rank: int) -> int:
        """Return the index of the group that contains `rank`; -1 if no group does."""
        return int(self.groups_of(np.array([rank]))[0])

    def groups_of(self, ranks: np.ndarray) -> np.ndarray:
        """Return the index of the group of each of `ranks`, int64; -1 for ranks in no group."""
        if not len(self.sorted_ranks):
            return np.full(len(ranks), -1, np.int64)
        at = np.minimum(np.searchsorted(self.sorted_ranks, ranks), len(self.sorted_ranks) - 1)
        return np.where(self.sorted_ranks[at] == ranks, self.sorted_groups[at], -1)


@lru_cache(maxsize=64)
def members_of(groups: Groups) -> Members:
    """Return `groups` as arrays. Raises `ValueError` if a group is empty or a rank is in two groups."""
    sizes = np.fromiter(map(len, groups), np.int64, len(groups))
    ranks = np.fromiter((rank for group in groups for rank in group), np.int64, int(sizes.sum()))
    order = np.argsort(ranks, kind="stable")
    if np.any(np.diff(ranks[order]) == 0) or np.any(sizes == 0):
        raise ValueError(f"replica groups: found {groups}, expected groups of one rank or more, each rank in one group")
    group_of_rank = np.repeat(np.arange(len(groups)), sizes)
    return Members(ranks, np.concatenate([[0], np.cumsum(sizes)]), ranks[order], group_of_rank[order])


@dataclass(frozen=True, eq=False)
class Ownership:
    """The ownership of rows on one side of a boundary.

    `groups`: disjoint replica groups of ranks, of one rank each if nothing is replicated. `ids`: int64, the rows that
    the ranks of each group hold, in stored order, concatenated; `starts`: int64 [groups + 1], where each group's rows
    begin in `ids`, then the end. No two groups hold the same row. `gradient`: see the module docstring.

    Raises:
        ValueError: a rank is in two groups, `starts` do not partition `ids`, or a row id is negative or occurs twice.
    """

    groups: Groups
    ids: np.ndarray
    starts: np.ndarray
    gradient: Gradient = "invariant"

    def __post_init__(self) -> None:
        members_of(self.groups)
        groups, rows, starts = len(self.groups), len(self.ids), self.starts
        if len(starts) != groups + 1 or (starts[0], starts[-1]) != (0, rows) or np.any(np.diff(starts) < 0):
            raise ValueError(
                f"ownership: found starts {_some(starts)} of {groups} groups, expected {groups + 1} that ascend from 0 "
                f"to {rows}, the number of rows"
            )
        if not len(self.ids):
            return
        if self.ids.min() < 0:
            raise ValueError(f"ownership: found rows {_some(self.ids[self.ids < 0])}, expected ids from 0")
        holders = np.bincount(self.ids)
        if holders.max() > 1:
            twice = _some(np.flatnonzero(holders > 1))
            raise ValueError(f"ownership: found rows {twice} in two groups, or twice in one, expected each row once")

    @classmethod
    def of(
        cls, holders: Mapping[tuple[int, ...], Sequence[int] | np.ndarray], gradient: Gradient = "invariant"
    ) -> Ownership:
        """Build an ownership from a mapping of replica group to the row ids that each of its ranks holds, in stored
        order. Raises `UserError` if a key is not a tuple of ranks, or `gradient` is unknown.
        """
        if wrong := [ranks for ranks in holders if isinstance(ranks, int)]:
            found, expected = f"{wrong[0]!r} as a group of ranks", "tuples of ranks"
            raise UserError.at("Ownership.of", found=found, expected=expected, fix=f"write `({wrong[0]},): rows`")
        if gradient not in get_args(Gradient):
            expected = " or ".join(map(repr, get_args(Gradient)))
            raise UserError.at("Ownership.of: gradient", found=repr(gradient), expected=expected, fix="correct it")
        rows = [np.asarray(ids, dtype=np.int64) for ids in holders.values()]
        return cls._concatenated(tuple(holders), rows, gradient)

    @classmethod
    def _concatenated(cls, groups: Groups, rows: Sequence[np.ndarray], gradient: Gradient) -> Ownership:
        ends = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return cls(groups, np.concatenate([np.zeros(0, np.int64), *rows]), ends, gradient)

    @classmethod
    def from_assignment(cls, groups: Groups, group_of_row: np.ndarray, gradient: Gradient = "invariant") -> Ownership:
        """Build an ownership from the group of each row, int64 [rows]; groups store their rows in ascending order."""
        counts = np.bincount(group_of_row, minlength=len(groups))
        small = group_of_row.astype(np.uint16) if len(groups) <= 1 << 16 else group_of_row  # sorts ten times faster
        return cls(groups, np.argsort(small, kind="stable"), np.concatenate([[0], np.cumsum(counts)]), gradient)

    def of_groups(self, first: int, last: int) -> Ownership:
        """Return the ownership of the groups [first, last) with their rows."""
        low, high = self.starts[first], self.starts[last]
        return Ownership(
            self.groups[first:last], self.ids[low:high], self.starts[first : last + 1] - low, self.gradient
        )

    def cut(self, ends: Sequence[int]) -> list[Ownership]:
        """Cut the rows at `ends`, which ascend, and return the ownership of the rows between each two consecutive ends,
        numbered from 0, with the same groups and order.
        """
        if len(ends) == 2 and (ends[0], ends[1]) == (0, len(self.ids)):
            return [self]
        return [self._between(first, last) for first, last in pairwise(ends)]

    def _between(self, first: int, last: int) -> Ownership:
        inside = (self.ids >= first) & (self.ids < last)
        starts = np.concatenate([[0], np.cumsum(inside)])[self.starts]
        return Ownership(self.groups, self.ids[inside] - first, starts, self.gradient)

    @classmethod
    def joined(cls, ownerships: Sequence[Ownership]) -> Ownership:
        """Return the ownership of all rows of `ownerships`, which have the same groups and form of gradient."""
        first, ids = ownerships[0], np.concatenate([each.ids for each in ownerships])
        order = np.argsort(np.concatenate([each.group_of_entry for each in ownerships]), kind="stable")
        return cls(first.groups, ids[order], np.sum([each.starts for each in ownerships], axis=0), first.gradient)

    @classmethod
    def parse(cls, text: str) -> Ownership:
        """Parse the text of an ownership, see the module docstring. Raises `UserError` if it is malformed."""
        body = text.strip().removesuffix("partial")
        gradient: Gradient = "invariant" if body == text.strip() else "partial"
        try:
            groups = [_read_group(number, group) for number, group in enumerate(filter(str.strip, body.split(";")))]
            return cls._concatenated(tuple(ranks for ranks, _ in groups), [rows for _, rows in groups], gradient)
        except ValueError as error:
            where, expected = f"ownership `{text}`", "`RANK[,RANK…]: ROWS[; …][ partial]`, such as `0: 0-3,8; 1,2: 4-7`"
            raise UserError.at(where, found=str(error), expected=expected, fix="correct the text") from None

    def __str__(self) -> str:
        holders = (
            f"{','.join(map(str, ranks))}: {format_ranks(rows.tolist())}".rstrip()
            for ranks, rows in zip(self.groups, self.rows, strict=True)
        )
        return "; ".join(holders) + (" partial" if self.gradient == "partial" else "")

    def __repr__(self) -> str:
        return f"Ownership.parse({str(self)!r})"

    @cached_property
    def members(self) -> Members:
        """The ranks of the groups as arrays."""
        return members_of(self.groups)

    @property
    def rows(self) -> tuple[np.ndarray, ...]:
        """The row ids that each group holds, in stored order."""
        return tuple(np.split(self.ids, self.starts[1:-1])) if self.groups else ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks on this side, ascending."""
        return tuple(self.members.sorted_ranks.tolist())

    def held_by(self, rank: int) -> np.ndarray:
        """Return the row ids that `rank` holds, in stored order; empty for a rank that is not on this side."""
        group = self.members.group_of(rank)
        return self.ids[:0] if group < 0 else self.ids[self.starts[group] : self.starts[group + 1]]

    def peers_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same rows as `rank`, including `rank`; empty for a rank not on this side."""
        group = self.members.group_of(rank)
        return () if group < 0 else self.groups[group]

    def num_rows(self, rank: int) -> int:
        """Return the number of rows that `rank` holds."""
        return len(self.held_by(rank))

    @cached_property
    def group_of_entry(self) -> np.ndarray:
        """The group of each entry of `ids`, int64."""
        return np.repeat(np.arange(len(self.groups)), np.diff(self.starts))

    @property
    def index_of_entry(self) -> np.ndarray:
        """The index of each entry of `ids` in its group's stored order, int64."""
        return np.arange(len(self.ids)) - self.starts[self.group_of_entry]

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each of `ids`, the group that holds the row (-1 if no group does), and the row's index in the
        stored order of that group.
        """
        size = 1 + int(max(self.ids.max(initial=-1), ids.max(initial=-1)))
        group, index = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        group[self.ids], index[self.ids] = self.group_of_entry, self.index_of_entry
        return group[ids], index[ids]


_GROUP = re.compile(r"[0-9]+(,[0-9]+)*:([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?")


def _read_group(number: int, text: str) -> tuple[tuple[int, ...], np.ndarray]:
    """Read the ranks and rows of a group, such as ``0,1: 0-3,8``. Raises `ValueError` with what was found."""
    dense = re.sub(r"\s*([,:-])\s*", r"\1", text.strip())
    if not _GROUP.fullmatch(dense):
        raise ValueError(f"`{text.strip()}` as group {number}")
    ranks, rows = dense.split(":")
    runs = [[int(row) for row in run.split("-")] for run in rows.split(",") if run]
    if any(run[-1] < run[0] for run in runs):
        raise ValueError(f"`{text.strip()}` as group {number}, with rows that descend")
    ids = [row for run in runs for row in range(run[0], run[-1] + 1)]
    return tuple(int(rank) for rank in ranks.split(",")), np.array(ids, np.int64)


def _some(ids: np.ndarray) -> str:
    more = f" and {len(ids) - 5} more" if len(ids) > 5 else ""
    return ", ".join(map(str, ids[:5].tolist())) + more
