"""The exact moves that turn one ownership of rows into another. Pure data.

A direction has up to three stages, each one uneven all-to-all (or batched point-to-point, where the two sides have no
rank in common):

  1. *reduce* (only where the rows that move are parts of a sum): every holder of a row sends its part to the one that
     passes the row on, which adds them up;
  2. *scatter*: every row that no member of its destination group holds crosses once, to one member of that group. Where
     the source is replicated over n ranks, each sends about 1/n of the rows; where the destination is replicated over n
     ranks, each receives about 1/n of them;
  3. *gather* (only where some destination is replicated): inside each destination group, each member passes on its
     portion to the members that do not hold those rows.

Cases, for a row r with source group S and destination group D. Its *leaver* is the rank of S that passes it on, its
*lander* the rank of D that gets it first:

     S and D share ranks           the shared ranks keep r; one, its leaver and lander, passes it on to the rest of D
     they share none, |D| = 1      one member of S sends r to D
     they share none, |D| > 1      one member of S sends r to one member of D, which passes it on to the rest
     the parts in S are a sum      as above after stage 1, except that only the lander has the sum to begin with
     D needs r in one place only   only the lander gets it

The last two arise in the backward pass. It is the adjoint of the forward pass: gradients travel from D to S, as parts
of a sum where D holds them so (`Ownership.gradient` is partial), and to one holder only where S is partial. Rows that
nobody needs get a gradient of zero.

Nobody receives a row that it does not need or already holds, so that received rows are the minimum for the pair of
ownerships. Each rank computes its own part only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from megatron_hetero.boundary.ownership import Ownership

Stage = Literal["reduce", "scatter", "gather"]
STAGES: tuple[Stage, ...] = ("reduce", "scatter", "gather")


@dataclass(frozen=True, eq=False)
class Exchange:
    """One stage as one rank sees it, in row indices of its buffers.

    `send`: int64, the rows to send, ordered by receiver; `send_counts`: int64, rows for each of the plan's ranks.
    `receive`: int64, where the rows that arrive are put (or added, in a reduce), ordered by sender; `receive_counts`:
    int64, rows from each of the plan's ranks.
    """

    stage: Stage
    send: np.ndarray
    send_counts: np.ndarray
    receive: np.ndarray
    receive_counts: np.ndarray


@dataclass(frozen=True, eq=False)
class DirectionPlan:
    """One direction of a boundary for one rank.

    `held`, `rows`: sizes of the buffers that rows leave and arrive in. `kept_from`, `kept_to`: indices of rows that
    stay on the rank, from the first to the second. `exchanges`: the stages, the same ones on every rank. A reduce adds
    to a copy of the first buffer, from which the scatter then reads; a gather reads and writes the second.
    `complete`: whether every row of the second buffer is written; the others are zero.
    """

    held: int
    rows: int
    kept_from: np.ndarray
    kept_to: np.ndarray
    exchanges: tuple[Exchange, ...]
    complete: bool

    def exchange(self, stage: Stage) -> Exchange | None:
        """The exchange of that stage, if there is one."""
        return next((e for e in self.exchanges if e.stage == stage), None)

    @property
    def received_rows(self) -> int:
        """Rows that reach this rank from others."""
        return sum(int(e.receive_counts.sum()) for e in self.exchanges)

    @property
    def sent_rows(self) -> int:
        """Rows that this rank sends to others."""
        return sum(int(e.send_counts.sum()) for e in self.exchanges)

    @property
    def collectives(self) -> int:
        """Collectives that this direction takes: the same number on every rank."""
        return len(self.exchanges)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows on their way, a column per property, ordered by pair of groups and then by place at the destination.

    `held`, `needed`: the groups that hold and need the row; `from_place`, `to_place`: its places in their orders;
    `index`, `count`: which of the rows of its pair of groups it is, and how many there are.
    """

    held: np.ndarray
    needed: np.ndarray
    from_place: np.ndarray
    to_place: np.ndarray
    index: np.ndarray
    count: np.ndarray

    def repeated(self, times: np.ndarray) -> Rows:
        """Each row as often as `times` says."""
        return Rows(*(np.repeat(column, times) for column in self.__dict__.values()))


@dataclass(frozen=True, eq=False)
class Routes:
    """Single rows from rank to rank: int64 columns. Where sender and receiver are the same the row stays."""

    sender: np.ndarray
    receiver: np.ndarray
    from_place: np.ndarray
    to_place: np.ndarray

    def counted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Senders, receivers and numbers of rows of all pairs of different ranks, ordered by sender and receiver."""
        moved = self.sender != self.receiver
        ranks = 1 + int(self.receiver.max(initial=0))
        keys, rows = np.unique(self.sender[moved] * ranks + self.receiver[moved], return_counts=True)
        return keys // ranks, keys % ranks, rows

    def exchange(self, stage: Stage, rank: int, ranks: Sequence[int]) -> Exchange:
        """What `rank` sends and receives."""
        order = np.asarray(ranks)

        def side(own: np.ndarray, other: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            mine = np.flatnonzero((own == rank) & (other != rank))
            mine = mine[np.argsort(other[mine], kind="stable")]
            peers = np.searchsorted(order, other[mine])
            return places[mine], np.bincount(peers, minlength=len(order))

        send = side(self.sender, self.receiver, self.from_place)
        return Exchange(stage, *send, *side(self.receiver, self.sender, self.to_place))


@dataclass(frozen=True, eq=False)
class Direction:
    """Rows from one ownership to another. `summed`: the holders of a row hold parts of a sum. `once`: a row is needed
    by one member of its group only. `mirror`: the direction with the sides exchanged, where it is known.
    """

    held: Ownership
    needed: Ownership
    summed: bool
    once: bool
    mirror: Direction | None = None

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that move anything on any rank."""
        held, needed = self._pairs
        shared = self._shared.counts(held * len(self.needed.groups) + needed)
        sharers, readers = self.held.members.sizes[held], self.needed.members.sizes[needed]
        used = {
            "reduce": self.summed and bool(np.any(sharers > 1)),
            "scatter": bool(np.any(shared == 0)),
            "gather": not self.once and bool(np.any(readers > (1 if self.summed else np.maximum(shared, 1)))),
        }
        return tuple(stage for stage in STAGES if used[stage])

    def plan(self, rank: int, ranks: Sequence[int]) -> DirectionPlan:
        """The part of `rank`."""
        rows = self.rows_of(rank)
        # The scatter says which rows stay, also where it moves none.
        scatter = self.routes("scatter", rows)
        routes = {stage: scatter if stage == "scatter" else self.routes(stage, rows) for stage in self.stages}
        kept = np.flatnonzero((scatter.sender == rank) & (scatter.receiver == rank))
        exchanges = tuple(routes[stage].exchange(stage, rank, ranks) for stage in self.stages)
        arriving = sum(int(e.receive_counts.sum()) for e in exchanges if e.stage != "reduce")
        needed = self.needed.rows_of(rank)
        return DirectionPlan(
            held=self.held.rows_of(rank),
            rows=needed,
            kept_from=scatter.from_place[kept],
            kept_to=scatter.to_place[kept],
            exchanges=exchanges,
            complete=len(kept) + arriving == needed,
        )

    def minimum(self, rank: int) -> int | None:
        """The least rows that `rank` must receive: those it needs less those it holds."""
        return int(self.missing(np.array([rank]))[0]) if self.has_minima else None

    @property
    def has_minima(self) -> bool:
        """Whether each rank has a minimum of its own: no rows are added up, and all that need a row get it."""
        return not self.once and not (self.summed and self.held.members.sizes.max(initial=1) > 1)

    def missing(self, ranks: np.ndarray) -> np.ndarray:
        """The rows that each of `ranks` needs, less those that it holds."""
        keys, rows = self._rows_of_pairs
        held, needed = self.held.members.groups_of(ranks), self.needed.members.groups_of(ranks)
        groups = len(self.needed.groups)
        in_all = np.bincount(keys % max(1, groups), rows, groups + 1)[needed]  # 0 at -1, which is no group
        own = held * groups + needed
        at = np.searchsorted(keys, own)
        found = (held >= 0) & (needed >= 0) & (np.append(keys, -1)[at] == own)
        return (in_all - np.where(found, np.append(rows, 0)[at], 0)).astype(np.int64)

    @cached_property
    def minimum_total(self) -> int:
        """The least rows that all ranks together must receive.

        Adding up a row from n holders takes n - 1 messages, bringing it to another rank one, and telling m - 1 more
        ranks of a group m - 1.
        """
        rows = self.rows_of(None)
        shared = self._shared.counts(rows.held * len(self.needed.groups) + rows.needed)
        parts = self.held.members.sizes[rows.held] if self.summed else 1
        readers = 1 if self.once else self.needed.members.sizes[rows.needed]
        settled = 1 if self.summed or self.once else np.maximum(shared, 1)
        return int(np.sum((parts - 1) + (shared == 0) + (readers - settled)))

    # ----------------------------------------------------------------------------- rows and their ranks

    @cached_property
    def _columns(self) -> tuple[np.ndarray, ...]:
        """(held group, needed group, place there, place here) of all rows that are both held and needed."""
        held, from_place = self.held.locate(self.needed.ids)
        columns = held, self.needed.group_of_entry, from_place, self.needed.place_of_entry
        if np.all(held >= 0):
            return columns
        return tuple(column[held >= 0] for column in columns)

    @property
    def rows(self) -> int:
        """The number of rows that are both held and needed."""
        return len(self._columns[0])

    @cached_property
    def _pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of groups (held, needed) that have rows."""
        if self.mirror is not None:
            needed, held = self.mirror._pairs
            return held, needed
        keys, _ = self._rows_of_pairs
        return keys // len(self.needed.groups), keys % len(self.needed.groups)

    @cached_property
    def _rows_of_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of groups that have rows as keys, ascending, and the number of rows of each."""
        if self.mirror is None:
            held, needed, *_ = self._columns
            return np.unique(held * len(self.needed.groups) + needed, return_counts=True)
        held, needed = self._pairs
        keys = held * len(self.needed.groups) + needed
        order = np.argsort(keys)
        return keys[order], self.mirror._rows_of_pairs[1][order]

    def rows_of(self, rank: int | None) -> Rows:
        """The rows that a rank holds or needs, or all. A pair of groups is there with all of its rows or with none."""
        held, needed, from_place, to_place = self._columns
        if rank is not None:
            mine = (held == self.held.members.group_of(rank)) | (needed == self.needed.members.group_of(rank))
            held, needed, from_place, to_place = (column[mine] for column in self._columns)
        key = held * len(self.needed.groups) + needed
        order = np.lexsort((to_place, key))
        _, first, counts = np.unique(key[order], return_index=True, return_counts=True)
        return Rows(
            held[order], needed[order], from_place[order], to_place[order],
            np.arange(len(order)) - np.repeat(first, counts), np.repeat(counts, counts),
        )  # fmt: skip

    @cached_property
    def _shared(self) -> _SharedRanks:
        return _SharedRanks.of(self.held, self.needed)

    def routes(self, stage: Stage, rows: Rows) -> Routes:
        """How `rows` travel in a stage."""
        return {"reduce": self._reduce, "scatter": self._scatter, "gather": self._gather}[stage](rows)

    def _ends(self, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Leaver and lander of each row, and the number of ranks that its groups share."""
        holders, readers = self.held.members, self.needed.members
        key = rows.held * len(self.needed.groups) + rows.needed
        shared = self._shared.counts(key)
        # Portions are contiguous runs; they begin at another member for each group, so that remainders spread.
        portion = (rows.index * np.where(shared, shared, readers.sizes[rows.needed]) // rows.count) + rows.held
        sender = (rows.index + rows.needed) % holders.sizes[rows.held]
        leaver = holders.ranks[holders.starts[rows.held] + sender]
        lander = readers.ranks[readers.starts[rows.needed] + portion % readers.sizes[rows.needed]]
        both = shared > 0
        if np.any(both):
            meeting = self._shared.rank_at(key[both], portion[both] % shared[both])
            leaver[both], lander[both] = meeting, meeting
        return leaver, lander, shared

    def _reduce(self, rows: Rows) -> Routes:
        leaver, _, _ = self._ends(rows)
        sender, times = _all_members(self.held, rows.held)
        at = np.repeat(rows.from_place, times)
        return Routes(sender, np.repeat(leaver, times), at, at)

    def _scatter(self, rows: Rows) -> Routes:
        leaver, lander, shared = self._ends(rows)
        crossing = Routes(leaver, lander, rows.from_place, rows.to_place)
        if self.summed or self.once or not np.any(shared > 1):
            return crossing
        # All shared ranks keep their copies, not only the one that passes the row on.
        member, times = _all_members(self.needed, rows.needed)
        copies = rows.repeated(times)
        stays = (self.held.members.groups_of(member) == copies.held) & (member != np.repeat(leaver, times))
        return Routes(
            np.concatenate([crossing.sender, member[stays]]),
            np.concatenate([crossing.receiver, member[stays]]),
            np.concatenate([crossing.from_place, copies.from_place[stays]]),
            np.concatenate([crossing.to_place, copies.to_place[stays]]),
        )

    def _gather(self, rows: Rows) -> Routes:
        _, lander, _ = self._ends(rows)
        receiver, times = _all_members(self.needed, rows.needed)
        passer, at = np.repeat(lander, times), np.repeat(rows.to_place, times)
        lacking = receiver != passer
        if not self.summed:
            lacking &= self.held.members.groups_of(receiver) != np.repeat(rows.held, times)
        return Routes(passer[lacking], receiver[lacking], at[lacking], at[lacking])


@dataclass(frozen=True, eq=False)
class _SharedRanks:
    """The ranks that a group that holds and a group that needs have in common.

    `keys`: of the pairs of groups that share ranks, ascending; `ranks`: those of each pair, one pair after the other;
    `starts`: where each pair's begin, and the end.
    """

    keys: np.ndarray
    ranks: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, held: Ownership, needed: Ownership) -> _SharedRanks:
        a, b = held.members, needed.members
        ranks, at_a, at_b = np.intersect1d(a.sorted_ranks, b.sorted_ranks, assume_unique=True, return_indices=True)
        key = a.sorted_groups[at_a] * len(needed.groups) + b.sorted_groups[at_b]
        order = np.argsort(key, kind="stable")
        keys, counts = np.unique(key, return_counts=True)
        return cls(keys, ranks[order], np.concatenate([[0], np.cumsum(counts)]))

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        at = np.minimum(np.searchsorted(self.keys, keys), max(0, len(self.keys) - 1))
        return at, (self.keys[at] == keys) if len(self.keys) else np.zeros(len(keys), bool)

    def counts(self, keys: np.ndarray) -> np.ndarray:
        """How many ranks each of these pairs shares."""
        at, found = self._find(keys)
        return np.where(found, np.diff(self.starts)[at], 0) if len(self.keys) else np.zeros(len(keys), np.int64)

    def rank_at(self, keys: np.ndarray, index: np.ndarray) -> np.ndarray:
        """The shared rank of that index of each pair."""
        at, _ = self._find(keys)
        return self.ranks[self.starts[at] + index]


def _all_members(side: Ownership, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ranks of each of `groups`, one group after the other, and how many each has."""
    sizes = side.members.sizes[groups]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return side.members.ranks[np.repeat(side.members.starts[groups], sizes) + within], sizes
