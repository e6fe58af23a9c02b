"""Shards of an encoder: which rank decodes, embeds and encodes which units, as pure functions on integers
(docs/boundaries.md, "Ownership").

A piece is decoded by one rank of the replica that encodes it, and its patches cross to the ranks that embed them. Units
are numbered in the order of rows. An encoder works on them in the piece's own order, in which they form *windows* that
no cut divides. A shard is a contiguous run of whole windows over the pieces of a replica, so that no window attention
crosses ranks. Shards are numbered with `sp` varying faster than `cp`.

    piece 0: windows 0 1 2 3 | piece 1: windows 4 5        sp = 2: rank 0 has 0 1 2, rank 1 has 3 4 5

With a limit on the patches of a rank, an encoder works on the pieces in several *chunks*, one after the other, each
with separate shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.data.balance import assign
from megatron_hetero.data.token_shards import SequenceShard, holding_groups, local_tokens, tp_share
from megatron_hetero.layout.axes import axes_of
from megatron_hetero.layout.context import contiguous_segments
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.items.types import ItemOrder, ItemShape, Size


@dataclass(frozen=True, eq=False)
class EncoderShards:
    """The pieces of an encoder call, distributed over the ranks of the encoder's `layout` in each pipeline stage.

    `sizes`: sizes of the pieces. `assigned`: numbers of the pieces of each replica. `sharded`: whether activations are
    sharded over tp. `limit`: maximum patches in a chunk per cp * sp shard of a replica, on average; None: no limit. A
    larger piece is a chunk by itself. Rows are numbered piece by piece, in raster order of their units.
    """

    shape: ItemShape
    layout: Layout
    sharded: bool
    sizes: tuple[Size, ...]
    assigned: tuple[tuple[int, ...], ...]
    limit: int | None = None

    @cached_property
    def chunks(self) -> tuple[EncoderShards, ...]:
        """Shards of each chunk. Replicas with fewer chunks than others have empty chunks at the end."""
        if self.limit is None:
            return (self,)
        maximum = self.limit * self.layout.cp * self.layout.sp
        runs = [self._runs(pieces, maximum) for pieces in self.assigned]
        number = max(1, *map(len, runs))
        padded = [[*runs_of_replica, *[()] * (number - len(runs_of_replica))] for runs_of_replica in runs]
        return tuple(replace(self, assigned=assigned, limit=None) for assigned in zip(*padded, strict=True))

    def _runs(self, pieces: tuple[int, ...], maximum: int) -> list[tuple[int, ...]]:
        """Cut pieces into runs of at most `maximum` patches, or of one piece."""
        runs, free = list[list[int]](), 0
        for piece in pieces:
            patches = self.shape.rows(self.sizes[piece]) * self.shape.unit
            if not runs or patches > free:
                runs.append([])
                free = maximum
            runs[-1].append(piece)
            free -= patches
        return [tuple(run) for run in runs]

    def replica(self, number: int) -> ReplicaShards:
        """Return the shards of all members of one replica."""
        sizes = [self.sizes[i] for i in self.assigned[number]]
        return ReplicaShards(self.shape, sizes, self.layout.sp, self.layout.cp)

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Predicted forward flops of each replica."""
        return tuple(sum(self.shape.cost(self.sizes[i]) for i in pieces) for pieces in self.assigned)

    @cached_property
    def _first_row(self) -> np.ndarray:
        """First row of each piece, then the number of all rows, int64 [pieces + 1]."""
        return np.cumsum([0, *map(self.shape.rows, self.sizes)])

    def ownership(self, stage: int = 0) -> Ownership:
        """Return the units in the shard of each rank of a stage, in the order in which the rank encodes them."""
        first = self._ownership
        return first if stage == 0 else replace(first, groups=holding_groups(self.layout, self.sharded, stage))

    @cached_property
    def _ownership(self) -> Ownership:
        if len(self.chunks) > 1:
            return Ownership.joined([chunk.ownership() for chunk in self.chunks])
        in_order = [
            self.shape.order(self.sizes[i]).units + self._first_row[i] for pieces in self.assigned for i in pieces
        ]
        ids = np.concatenate([np.zeros(0, np.int64), *in_order])
        tp = self.layout.tp if self.sharded else 1
        # Number of units in each member's shard, int64 [replicas * members]; the tp ranks share a shard.
        units = np.concatenate([self.replica(number).units for number in range(len(self.assigned))])
        within = np.minimum(units[:, None], tp_share(units, tp)[:, None] * np.arange(tp))
        starts = (np.cumsum(units) - units)[:, None] + within
        return Ownership(holding_groups(self.layout, self.sharded), ids, np.append(starts, len(ids)))

    def replica_ownership(self, replica: int) -> Ownership:
        """Return the `ownership` of the ranks of one replica."""
        whole = self.ownership()
        size = len(whole.groups) // self.layout.dp
        return whole.of_groups(replica * size, (replica + 1) * size)

    def decoded(self, replica: int, turn: int) -> Ownership:
        """Return the units that each rank of a replica decodes, see `decoders`: whole pieces, in raster order."""
        first, units_by_rank = self._first_row, dict[tuple[int, ...], np.ndarray]()
        for rank, pieces in self.decoders(replica, turn).items():
            units: list[np.ndarray] = [np.arange(first[i], first[i + 1]) for i in pieces]
            units_by_rank[rank,] = np.concatenate([np.zeros(0, np.int64), *units])
        return Ownership.of(units_by_rank)

    def decoders(self, replica: int, turn: int) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the pieces that each rank of a replica decodes, assigned so that patches are even.

        `turn`: number of the micro-batch, which rotates the ranks so that few pieces do not always go to the same ones.
        """
        pieces = self.assigned[replica]
        ranks = self.layout.group_of(self.layout.rank_at(dp=replica), *axes_of("weights", "tokens"))
        assigned = assign([float(self.shape.rows(self.sizes[i]) * self.shape.unit) for i in pieces], len(ranks))
        return {rank: tuple(pieces[i] for i in assigned[(at - turn) % len(ranks)]) for at, rank in enumerate(ranks)}

    def shards(self, rank: int) -> tuple[SequenceShard, ...]:
        """Return the shard that `rank` encodes in each chunk."""
        return tuple(chunk._shard(rank) for chunk in self.chunks)

    def _shard(self, rank: int) -> SequenceShard:
        at, layout, unit = self.layout.coordinate(rank), self.layout, self.shape.unit
        member, replica = at.cp * layout.sp + at.sp, self.replica(at.dp)
        lengths = unit * replica.units.reshape(layout.cp, layout.sp)
        cp_lengths, units = tuple(lengths.sum(axis=1).tolist()), int(replica.units[member])
        tp, tp_rank = (layout.tp, at.tp) if self.sharded else (1, 0)
        share = int(tp_share(np.array(units), tp))
        return SequenceShard(
            tokens=units * unit,
            local=share * unit,
            ranks=tp,
            sp_lengths=tuple(lengths[at.cp].tolist()),
            cp_lengths=cp_lengths,
            segments=contiguous_segments(replica.sequences, cp_lengths, at.cp),
            windows=replica.windows(member),
            padding=(share - local_tokens(units, share, tp_rank)) * unit,
            positions=replica.positions(member),
        )


@dataclass(frozen=True, eq=False)
class ReplicaShards:
    """Pieces of one encoder replica, cut into cp * sp contiguous shards of whole windows. Shards are numbered by
    member, cp_rank * sp + sp_rank. `pieces`: sizes of the pieces. Lengths are in patches.

    The runs of the `cp` members are as even in predicted flops as whole windows allow: each member computes the
    attention of its queries to all keys of a sequence. Each run is cut over its `sp` members evenly in patches: in full
    attention these members exchange heads, which is even for any cut. Shards may be empty.
    """

    shape: ItemShape
    pieces: Sequence[Size]
    sp: int
    cp: int

    @cached_property
    def _orders(self) -> list[ItemOrder]:
        return [self.shape.order(size) for size in self.pieces]

    @cached_property
    def _window_units(self) -> np.ndarray:
        """Number of units of each window, int64 [windows]."""
        return np.concatenate([np.zeros(0, np.int64), *(order.windows for order in self._orders)])

    @cached_property
    def _first_windows(self) -> np.ndarray:
        """First window of each shard, then the number of windows, int64 [members + 1]."""
        units, counts = self._window_units, [len(order.windows) for order in self._orders]
        costs = np.repeat([self.shape.cost_per_patch(size) for size in self.pieces], counts)
        by_work = _even_cuts(_totals(units * costs), np.array([0, len(units)]), self.cp)
        return _even_cuts(_totals(units), by_work, self.sp)

    @cached_property
    def units(self) -> np.ndarray:
        """Number of units of each shard, int64 [members]."""
        if self.sp * self.cp == 1:
            return np.array([sum(map(self.shape.rows, self.pieces))], np.int64)
        return np.diff(_totals(self._window_units)[self._first_windows])

    def windows(self, member: int) -> tuple[int, ...]:
        """Return the lengths of the windows in a member's shard."""
        first, last = self._first_windows[member : member + 2]
        return tuple((self._window_units[first:last] * self.shape.unit).tolist())

    @property
    def sequences(self) -> tuple[int, ...]:
        """Lengths of the segments of full attention over all members."""
        return tuple(length for size in self.pieces for length in self.shape.sequences(size))

    def positions(self, member: int) -> np.ndarray:
        """Return the coordinates of the patches in a member's shard, int64 [dims, patches]."""
        positions = [self.shape.positions(self.pieces[piece], units) for piece, units in self.runs(member)]
        return np.concatenate([np.zeros((self.shape.position_dims, 0), np.int64), *positions], axis=1)

    def runs(self, member: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the index in `pieces` of each piece in a member's shard, and the numbers of its units there, int32."""
        first, last = _totals(self.units)[member : member + 2].tolist()
        before = 0
        for piece, (units, _) in enumerate(self._orders):
            start, stop = max(0, first - before), min(len(units), last - before)
            if start < stop:
                yield piece, units[start:stop]
            before += len(units)


def _totals(values: np.ndarray) -> np.ndarray:
    """Return cumulative sums of the values, starting with 0."""
    return np.concatenate([[0], np.cumsum(values)])


def _even_cuts(ends: np.ndarray, runs: np.ndarray, members: int) -> np.ndarray:
    """Cut each run of windows over `members`, at the windows nearest to even shares of the run's total.

    `ends`: totals before each window and after the last, [windows + 1]. `runs`: first window of each run, then the
    number of windows. Returns the first window of each member's run, int64 [runs * members + 1].
    """
    if members == 1:
        return runs
    totals = ends[runs]
    shares = np.diff(totals) / members
    targets = (totals[:-1, None] + shares[:, None] * np.arange(members)).ravel()
    right = np.searchsorted(ends, targets)
    left = np.maximum(right - 1, 0)
    nearest = np.where(targets - ends[left] < ends[right] - targets, left, right)
    return np.append(nearest, runs[-1])
