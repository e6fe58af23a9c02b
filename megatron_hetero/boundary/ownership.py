"""Which rank holds which rows. Pure.

A row is one embedding that crosses a boundary; rows have global ids 0 .. rows - 1 in a micro-batch. Ranks that hold
the same rows for the same reason (replicated over `tp` without sequence-parallel activations) form a replica group.
Replicated rows are *invariant*: each holder has the whole gradient of the row, so that it counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Ownership:
    """One side of a boundary.

    `groups`: disjoint replica groups, each a tuple of ranks (a single rank where nothing is replicated). `rows`: for
    each group an int64 array of the ids that each of its ranks holds, in the order in which they are stored. No row
    may be held by two groups.
    """

    groups: tuple[tuple[int, ...], ...]
    rows: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, holders: Mapping[tuple[int, ...], Sequence[int] | np.ndarray]) -> Ownership:
        """From a mapping of replica group to the ids that it holds."""
        return cls(tuple(holders), tuple(np.asarray(rows, dtype=np.int64) for rows in holders.values()))

    def group_index(self, rank: int) -> int | None:
        """The replica group of `rank`, or None where it holds nothing."""
        return next((i for i, ranks in enumerate(self.groups) if rank in ranks), None)

    def held_by(self, rank: int) -> np.ndarray:
        """Ids that `rank` holds, in stored order; empty for a rank that is not on this side."""
        index = self.group_index(rank)
        return np.zeros(0, np.int64) if index is None else self.rows[index]

    def location(self, total: int) -> tuple[np.ndarray, np.ndarray]:
        """For each id below `total`: the group that holds it (-1 for none), and its place in that group's order."""
        group, place = np.full(total, -1, np.int64), np.zeros(total, np.int64)
        for index, rows in enumerate(self.rows):
            twice = rows[(group[rows] >= 0) | (np.bincount(rows, minlength=total)[rows] > 1)]
            if len(twice):
                raise ValueError(f"rows {np.unique(twice)[:5]} of group {self.groups[index]} are held twice")
            group[rows], place[rows] = index, np.arange(len(rows))
        return group, place

    @property
    def total(self) -> int:
        """One more than the largest id held."""
        return 1 + max((int(rows.max()) for rows in self.rows if len(rows)), default=-1)
