"""Routes: the moves that turn one ownership of rows into another, computed for one rank or for all. Pure data.

A direction has up to three phases, each an uneven all-to-all, or a batch of point-to-point transfers if the two sides
share no rank: *reduce* sums partial gradients at the sender of a row, *scatter* sends a row to its first receiver in
each group that lacks the row, and *gather* copies the row to the rest of that group. docs/boundaries.md, "Routes" and
"Backward", lists the cases. Each rank computes only its local moves, and receives only rows that it needs and lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, TypeVar

import numpy as np

from megatron_hetero.boundary.ownership import Ownership

Phase = Literal["reduce", "scatter", "gather"]
PHASES: tuple[Phase, ...] = ("reduce", "scatter", "gather")
Index = TypeVar("Index")
"""Type of row indices: int64 arrays in plans; slices or tensors in plans loaded to a device (`loaded`)."""


@dataclass(frozen=True, eq=False)
class Exchange(Generic[Index]):
    """One phase of a crossing on one rank, as row indices in the rank's buffers.

    `send`: indices of rows to send, ordered by receiver; `send_counts`: number of rows for each rank of the plan.
    `receive`: indices to write received rows to (add, in a reduce), ordered by sender; `receive_counts`: number of rows
    from each rank of the plan.
    """

    phase: Phase
    send: Index
    send_counts: list[int]
    receive: Index
    receive_counts: list[int]


@dataclass(frozen=True, eq=False)
class DirectionPlan(Generic[Index]):
    """The plan of one direction of a boundary for one rank.

    `held`, `needed`: number of rows in the input and the output buffer. `local_from`, `local_to`: input and output
    indices of rows that stay on this rank. `exchanges`: one for each phase; all ranks have the same phases. A reduce
    adds to a copy of the input, from which the scatter reads; a gather reads and writes the output. `complete`: whether
    every output row is written; unwritten rows are zero.
    """

    held: int
    needed: int
    local_from: Index
    local_to: Index
    exchanges: tuple[Exchange[Index], ...]
    complete: bool

    def exchange(self, phase: Phase) -> Exchange[Index] | None:
        """Return the exchange of `phase`; None if the direction has no such phase."""
        return next((e for e in self.exchanges if e.phase == phase), None)


def is_identity(plan: DirectionPlan[np.ndarray]) -> bool:
    """Return whether the output equals the input: no rank exchanges rows, and every row keeps its index."""
    everything = np.arange(plan.held)
    in_place = np.array_equal(plan.local_from, everything) and np.array_equal(plan.local_to, everything)
    return in_place and plan.needed == plan.held and not plan.exchanges


@dataclass(frozen=True, eq=False)
class RowTable:
    """A table of rows to move: columns, int64 [rows], ordered by pair of groups and then by destination index.

    `held`, `needed`: the groups that hold and need the row; `source_index`, `target_index`: the row's indices in the
    stored orders of these groups; `ordinal`, `count`: its number in this pair of groups, and the pair's row count.
    """

    held: np.ndarray
    needed: np.ndarray
    source_index: np.ndarray
    target_index: np.ndarray
    ordinal: np.ndarray
    count: np.ndarray

    def repeated(self, times: np.ndarray) -> RowTable:
        """Return the table with row i repeated `times[i]` times."""
        return RowTable(*(np.repeat(column, times) for column in self.__dict__.values()))


@dataclass(frozen=True, eq=False)
class Routes:
    """Moves of single rows, as columns, int64 [moves]. A row stays on its rank if sender and receiver are equal."""

    sender: np.ndarray
    receiver: np.ndarray
    source_index: np.ndarray
    target_index: np.ndarray

    def row_counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sender, receiver and number of rows of each pair of different ranks, ordered by both ranks."""
        moved = self.sender != self.receiver
        ranks = 1 + int(self.receiver.max(initial=0))
        keys, rows = np.unique(self.sender[moved] * ranks + self.receiver[moved], return_counts=True)
        return keys // ranks, keys % ranks, rows

    def exchange(self, phase: Phase, rank: int, ranks: Sequence[int]) -> Exchange[np.ndarray]:
        """Return the rows that `rank` sends and receives in `phase`. `ranks`: all ranks of the plan, ascending."""
        order = np.asarray(ranks)

        def side(local: np.ndarray, peer: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, list[int]]:
            moves = np.flatnonzero((local == rank) & (peer != rank))
            moves = moves[np.argsort(peer[moves], kind="stable")]
            peers = np.searchsorted(order, peer[moves])
            return indices[moves], np.bincount(peers, minlength=len(order)).tolist()

        send = side(self.sender, self.receiver, self.source_index)
        return Exchange(phase, *send, *side(self.receiver, self.sender, self.target_index))


@dataclass(frozen=True, eq=False)
class Redistribution:
    """One direction of a boundary on all ranks, which moves rows from ownership `held` to ownership `needed`.

    `summed`: whether holders of a row have partial sums, which are added. `once`: whether only one member of each
    destination group needs the row. `mirror`: the redistribution in the opposite direction, if known, whose pairs of
    groups are reused.
    """

    held: Ownership
    needed: Ownership
    summed: bool
    once: bool
    mirror: Redistribution | None = None

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases in which any rank moves a row."""
        held, needed = self._pairs
        shared = self._shared.number(held * len(self.needed.groups) + needed)
        sharers, readers = self.held.members.sizes[held], self.needed.members.sizes[needed]
        used = {
            "reduce": self.summed and bool(np.any(sharers > 1)),
            "scatter": bool(np.any(shared == 0)),
            "gather": not self.once and bool(np.any(readers > (1 if self.summed else np.maximum(shared, 1)))),
        }
        return tuple(phase for phase in PHASES if used[phase])

    def plan(self, rank: int, ranks: Sequence[int]) -> DirectionPlan[np.ndarray]:
        """Return what `rank` sends and receives. `ranks`: all ranks of the boundary, ascending."""
        rows = self.row_table(rank)
        # The routes of the scatter include rows that stay on their rank, even if the scatter moves no row.
        scatter = self.routes("scatter", rows)
        routes = {phase: scatter if phase == "scatter" else self.routes(phase, rows) for phase in self.phases}
        local = np.flatnonzero((scatter.sender == rank) & (scatter.receiver == rank))
        exchanges = tuple(routes[phase].exchange(phase, rank, ranks) for phase in self.phases)
        arriving = sum(sum(e.receive_counts) for e in exchanges if e.phase != "reduce")
        needed = self.needed.num_rows(rank)
        return DirectionPlan(
            held=self.held.num_rows(rank),
            needed=needed,
            local_from=scatter.source_index[local],
            local_to=scatter.target_index[local],
            exchanges=exchanges,
            complete=len(local) + arriving == needed,
        )

    @cached_property
    def minimum_total(self) -> int:
        """The minimum number of rows that all ranks together must receive.

        Summing a row over n holders takes n - 1 messages, sending it to another rank one, and replicating it over a
        group of m ranks m - 1.
        """
        rows = self.row_table(None)
        shared = self._shared.number(rows.held * len(self.needed.groups) + rows.needed)
        summands = self.held.members.sizes[rows.held] if self.summed else 1
        readers = 1 if self.once else self.needed.members.sizes[rows.needed]
        settled = 1 if self.summed or self.once else np.maximum(shared, 1)
        return int(np.sum((summands - 1) + (shared == 0) + (readers - settled)))

    # ----------------------------------------------------------------------------- rows and their ranks

    @cached_property
    def _columns(self) -> tuple[np.ndarray, ...]:
        """Columns (held group, needed group, source index, target index) of all rows that are both held and needed."""
        held, source_index = self.held.locate(self.needed.ids)
        columns = held, self.needed.group_of_entry, source_index, self.needed.index_of_entry
        if np.all(held >= 0):
            return columns
        return tuple(column[held >= 0] for column in columns)

    @property
    def num_rows(self) -> int:
        """The number of rows that the source holds and the destination needs."""
        return len(self._columns[0])

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of groups (held, needed) with common rows, as two arrays."""
        if self.mirror is not None:
            needed, held = self.mirror._pairs
            return held, needed
        held, needed, *_ = self._columns
        keys = np.unique(held * len(self.needed.groups) + needed)
        return keys // len(self.needed.groups), keys % len(self.needed.groups)

    def row_table(self, rank: int | None) -> RowTable:
        """Return the rows of all pairs of groups that have `rank` in either group; all rows if `rank` is None."""
        held, needed, source_index, target_index = self._columns
        if rank is not None:
            mine = (held == self.held.members.group_of(rank)) | (needed == self.needed.members.group_of(rank))
            held, needed, source_index, target_index = (column[mine] for column in self._columns)
        key = held * len(self.needed.groups) + needed
        order = np.lexsort((target_index, key))
        _, first, counts = np.unique(key[order], return_index=True, return_counts=True)
        return RowTable(
            held[order], needed[order], source_index[order], target_index[order],
            np.arange(len(order)) - np.repeat(first, counts), np.repeat(counts, counts),
        )  # fmt: skip

    @cached_property
    def _shared(self) -> _SharedRanks:
        return _SharedRanks.of(self.held, self.needed)

    def routes(self, phase: Phase, rows: RowTable) -> Routes:
        """Return the moves of `rows` in `phase`."""
        return {"reduce": self._reduce, "scatter": self._scatter, "gather": self._gather}[phase](rows)

    def _endpoints(self, rows: RowTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sender and the first receiver of each row, and the number of ranks that its two groups share."""
        holders, readers = self.held.members, self.needed.members
        key = rows.held * len(self.needed.groups) + rows.needed
        shared = self._shared.number(key)
        # Portions are contiguous runs. Each group's first portion is at another member, which spreads the remainders.
        portion = (rows.ordinal * np.where(shared, shared, readers.sizes[rows.needed]) // rows.count) + rows.held
        member = (rows.ordinal + rows.needed) % holders.sizes[rows.held]
        sender = holders.ranks[holders.starts[rows.held] + member]
        first_receiver = readers.ranks[readers.starts[rows.needed] + portion % readers.sizes[rows.needed]]
        both = shared > 0
        if np.any(both):
            meeting = self._shared.rank_at(key[both], portion[both] % shared[both])
            sender[both], first_receiver[both] = meeting, meeting
        return sender, first_receiver, shared

    def _reduce(self, rows: RowTable) -> Routes:
        sender, _, _ = self._endpoints(rows)
        holder, times = _all_members(self.held, rows.held)
        index = np.repeat(rows.source_index, times)
        return Routes(holder, np.repeat(sender, times), index, index)

    def _scatter(self, rows: RowTable) -> Routes:
        sender, first_receiver, shared = self._endpoints(rows)
        crossing = Routes(sender, first_receiver, rows.source_index, rows.target_index)
        if self.summed or self.once or not np.any(shared > 1):
            return crossing
        # Each row stays on all shared ranks, not only on its sender.
        member, times = _all_members(self.needed, rows.needed)
        copies = rows.repeated(times)
        stays = (self.held.members.groups_of(member) == copies.held) & (member != np.repeat(sender, times))
        return Routes(
            np.concatenate([crossing.sender, member[stays]]),
            np.concatenate([crossing.receiver, member[stays]]),
            np.concatenate([crossing.source_index, copies.source_index[stays]]),
            np.concatenate([crossing.target_index, copies.target_index[stays]]),
        )

    def _gather(self, rows: RowTable) -> Routes:
        _, first_receiver, _ = self._endpoints(rows)
        receiver, times = _all_members(self.needed, rows.needed)
        source, index = np.repeat(first_receiver, times), np.repeat(rows.target_index, times)
        lacking = receiver != source
        if not self.summed:
            lacking &= self.held.members.groups_of(receiver) != np.repeat(rows.held, times)
        return Routes(source[lacking], receiver[lacking], index[lacking], index[lacking])


@dataclass(frozen=True, eq=False)
class _SharedRanks:
    """The ranks shared by each pair of a holding and a needing group.

    `keys`: ascending keys of the pairs that share ranks, then a sentinel; `counts`: number of shared ranks of each
    pair, then 0; `starts`: index in `ranks` of the first shared rank of each pair, then the length of `ranks`.
    """

    keys: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, held: Ownership, needed: Ownership) -> _SharedRanks:
        """Find the ranks that are members of a group on both sides."""
        a, b = held.members, needed.members
        ranks, at_a, at_b = np.intersect1d(a.sorted_ranks, b.sorted_ranks, assume_unique=True, return_indices=True)
        key = a.sorted_groups[at_a] * len(needed.groups) + b.sorted_groups[at_b]
        keys, counts = np.unique(key, return_counts=True)
        ranks = ranks[np.argsort(key, kind="stable")]
        largest = np.iinfo(np.int64).max
        return cls(np.append(keys, largest), np.append(counts, 0), np.append(0, np.cumsum(counts)), ranks)

    def number(self, keys: np.ndarray) -> np.ndarray:
        """Return the number of shared ranks of each pair of groups in `keys`."""
        at = np.searchsorted(self.keys, keys)
        return np.where(self.keys[at] == keys, self.counts[at], 0)

    def rank_at(self, keys: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Return, for each pair of groups in `keys`, the shared rank at `index` among the pair's shared ranks."""
        return self.ranks[self.starts[np.searchsorted(self.keys, keys)] + index]


def _all_members(side: Ownership, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranks of all `groups`, concatenated, and the number of ranks of each group."""
    sizes = side.members.sizes[groups]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return side.members.ranks[np.repeat(side.members.starts[groups], sizes) + within], sizes
