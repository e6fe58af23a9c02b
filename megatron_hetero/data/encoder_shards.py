"""Which rank of an encoder decodes, embeds and encodes what (docs/boundaries.md, "Ownership"). Pure, on NumPy integers.

A piece is decoded by one rank of the replica that encodes it, which hands the patches to those that embed them: again
rows that change hands, units of patches this time. Units are numbered in the order in which rows are placed, and worked
on in the piece's own order, in which they lie in *windows*, which no cut divides. A shard is a contiguous run of whole
windows, over the pieces of a replica, so that window attention stays on a rank. Shards are numbered with `sp` varying
faster than `cp`.

    piece 0: windows 0 1 2 3 | piece 1: windows 4 5        sp = 2: rank 0 has 0 1 2, rank 1 has 3 4 5
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.data.balance import assign
from megatron_hetero.data.token_shards import holding_groups, tp_share
from megatron_hetero.layout.axes import axes_of
from megatron_hetero.layout.context import AttentionSegments, contiguous_segments
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.items.types import ItemOrder, ItemShape, Size


@dataclass(frozen=True, eq=False)
class EncoderShare:
    """What one rank of the encoder encodes in one micro-batch. All lengths in patches.

    `padding`: patches of zeros after those that the rank embeds. `positions`: int64 [2, n] for the n real patches of
    the rank's shard (that its tp group shares). `windows`: lengths of the shard's windows. `sp_lengths`: patches of
    each sp member of this rank's cp member; `cp_lengths`: of each cp member. `segments`: what the cp member attends to
    in full attention.
    """

    padding: int
    positions: np.ndarray
    windows: tuple[int, ...]
    sp_lengths: tuple[int, ...]
    cp_lengths: tuple[int, ...]
    segments: AttentionSegments


@dataclass(frozen=True, eq=False)
class EncoderShards:
    """The pieces of a micro-batch, of `sizes`, `assigned` to the replicas (the numbers of each one's pieces).

    `layout` of the encoder; `sharded`: sequence-parallel activations over tp. Rows are numbered piece by piece,
    in raster order of their units.
    """

    shape: ItemShape
    layout: Layout
    sharded: bool
    sizes: tuple[Size, ...]
    assigned: tuple[tuple[int, ...], ...]

    def _sizes_of(self, replica: int) -> list[Size]:
        return [self.sizes[i] for i in self.assigned[replica]]

    @cached_property
    def _first_row(self) -> np.ndarray:
        """Where the rows of each piece begin, and where the last ones end."""
        return np.cumsum([0, *map(self.shape.rows, self.sizes)])

    # ------------------------------------------------------------------------------------------- who holds what

    def ownership(self) -> Ownership:
        """Which units each rank embeds, in this order, and of which it holds the rows once it has encoded."""
        in_order = [
            self.shape.order(self.sizes[i]).units + self._first_row[i] for pieces in self.assigned for i in pieces
        ]
        ids = np.concatenate([np.zeros(0, np.int64), *in_order])
        groups = holding_groups(self.layout, self.sharded)
        return Ownership(groups, ids, np.concatenate([self._starts.ravel(), [len(ids)]]))

    @cached_property
    def _units(self) -> np.ndarray:
        """Units of each member's shard, int64 [replicas * members]."""
        return np.concatenate(
            [
                shard_units(self.shape, self._sizes_of(r), self.layout.sp, self.layout.cp)
                for r in range(len(self.assigned))
            ]
        )

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where the units of each rank of each member begin, int64 [replicas * members, tp that share activations]."""
        tp = self.layout.tp if self.sharded else 1
        within = np.minimum(self._units[:, None], tp_share(self._units, tp)[:, None] * np.arange(tp))
        return (np.cumsum(self._units) - self._units)[:, None] + within

    def replica_ownership(self, replica: int) -> Ownership:
        """The part of `ownership` that is one replica's."""
        whole = self.ownership()
        size = len(whole.groups) // self.layout.dp
        return whole.of_groups(replica * size, (replica + 1) * size)

    def decoded(self, replica: int, turn: int) -> Ownership:
        """Which units each rank of a replica decodes: whole pieces, in raster order.

        `turn`: the number of the micro-batch. Where there are fewer pieces than ranks, others decode in each.
        """
        first, decoders = self._first_row, self._decoders(replica, turn)
        units: list[list[np.ndarray]] = [
            [np.arange(first[i], first[i + 1]) for i in pieces] for pieces in decoders.values()
        ]
        none = np.zeros(0, np.int64)
        return Ownership.of({(rank,): np.concatenate([none, *own]) for rank, own in zip(decoders, units, strict=True)})

    def decodes(self, rank: int, turn: int) -> tuple[int, ...]:
        """The numbers of the pieces that `rank` decodes, in the order in which `decoded` has their units."""
        return tuple(self._decoders(self.layout.replica_of(rank), turn)[rank])

    def _decoders(self, replica: int, turn: int) -> dict[int, list[int]]:
        """The pieces of a replica that each of its ranks decodes: assigned so that their patches are even."""
        pieces = self.assigned[replica]
        ranks = self.layout.group_of(self.layout.rank_at(dp=replica), *axes_of("weights", "tokens"))
        assigned = assign([float(self.shape.rows(self.sizes[i]) * self.shape.unit) for i in pieces], len(ranks))
        return {rank: [pieces[i] for i in assigned[(at - turn) % len(ranks)]] for at, rank in enumerate(ranks)}

    # ---------------------------------------------------------------------------------------------- one rank

    def share(self, rank: int) -> EncoderShare:
        """What `rank` encodes."""
        at, layout, unit = self.layout.coordinate(rank), self.layout, self.shape.unit
        member = at.cp * layout.sp + at.sp
        plan = plan_encoder(self.shape, self.assigned[at.dp], self._sizes_of(at.dp), layout.sp, layout.cp)
        lengths = np.array(plan.lengths).reshape(layout.cp, layout.sp)
        cp_lengths = tuple(lengths.sum(axis=1).tolist())
        tp = layout.tp if self.sharded else 1
        units = int(self._units[at.dp * len(plan.lengths) + member])
        share = int(tp_share(np.array(units), tp))
        held = max(0, min(units - share * at.tp, share)) if self.sharded else units
        return EncoderShare(
            padding=(share - held) * unit,
            positions=self._positions(plan, member),
            windows=plan.windows[member],
            sp_lengths=tuple(lengths[at.cp].tolist()),
            cp_lengths=cp_lengths,
            segments=contiguous_segments(plan.sequences, cp_lengths, at.cp),
        )

    def _positions(self, plan: EncoderPlan, member: int) -> np.ndarray:
        parts = [self.shape.order(self.sizes[p.item]).positions(p.start, p.stop) for p in plan.slices[member]]
        return np.concatenate([np.zeros((self.shape.position_dims, 0), np.int64), *parts], axis=1)


# ---------------------------------------------------------------------------------------------------------
# How the pieces of a replica are cut
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ItemSlice:
    """The units [start, stop) of one piece, in its own order."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True)
class EncoderPlan:
    """What each member of one encoder replica encodes: member cp_rank * sp + sp_rank. Lengths are patches.

    `slices`: per member, its parts of pieces. `windows`: per member, the lengths of its windows.
    `sequences`: the lengths of the segments of full attention over all members.
    """

    slices: tuple[tuple[ItemSlice, ...], ...]
    windows: tuple[tuple[int, ...], ...]
    sequences: tuple[int, ...]
    unit: int

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Patches of each member."""
        return tuple(sum(windows) for windows in self.windows)


def plan_encoder(shape: ItemShape, items: Sequence[int], sizes: Sequence[Size], sp: int, cp: int) -> EncoderPlan:
    """Cut the windows of a replica's pieces `items` (their numbers, with their `sizes`) into cp * sp contiguous shards.

    The runs of the `cp` members are as even in predicted flops as whole windows allow: queries are theirs, and meet all
    keys of a sequence. Each run is cut over its `sp` members evenly in patches: in full attention these exchange heads,
    evenly whatever the cut, so that it decides on the work per patch only. Shards may be empty.
    """
    orders, ends, cuts = _cut(shape, sizes, sp, cp)
    starts = [0, *accumulate(len(order.units) for order in orders)]
    patches = (np.diff(ends) * shape.unit).tolist()
    return EncoderPlan(
        slices=tuple(tuple(_parts(items, starts, first, last)) for first, last in pairwise(ends[cuts].tolist())),
        windows=tuple(tuple(patches[first:last]) for first, last in pairwise(cuts.tolist())),
        sequences=tuple(length for size in sizes for length in shape.sequences(size)),
        unit=shape.unit,
    )


def shard_units(shape: ItemShape, sizes: Sequence[Size], sp: int, cp: int) -> np.ndarray:
    """The units of each member's shard, int64 [cp * sp]: what `plan_encoder` comes to, for replicas of which no more
    is needed.
    """
    if not sizes:
        return np.zeros(cp * sp, np.int64)
    if cp * sp == 1:
        return np.array([sum(map(shape.rows, sizes))])
    _, ends, cuts = _cut(shape, sizes, sp, cp)
    return np.diff(ends[cuts])


def _cut(shape: ItemShape, sizes: Sequence[Size], sp: int, cp: int) -> tuple[list[ItemOrder], np.ndarray, np.ndarray]:
    """The orders of the pieces, the units before each window and in all, and the windows at which shards begin."""
    orders = [shape.order(size) for size in sizes]
    units = np.concatenate([np.zeros(0, np.int64), *(order.windows for order in orders)])
    costs = np.repeat([shape.cost_per_patch(size) for size in sizes], [len(order.windows) for order in orders])
    ends, flops = _running(units), _running(units * costs)
    return orders, ends, _even_cuts(ends, _even_cuts(flops, np.array([0, len(units)]), cp), sp)


def _running(lengths: np.ndarray) -> np.ndarray:
    """The totals before each of `lengths`, and after the last."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _even_cuts(ends: np.ndarray, runs: np.ndarray, parts: int) -> np.ndarray:
    """Cut each run of windows into `parts`, at the windows where running totals come nearest to even shares of it.

    `ends`: [windows + 1], the totals before each window and after the last. `runs`: window indices at which runs begin,
    and where the last ends. Returns window indices [runs * parts + 1].
    """
    if parts == 1:
        return runs
    totals = ends[runs]
    shares = np.diff(totals) / parts
    targets = (totals[:-1, None] + shares[:, None] * np.arange(parts)).ravel()
    right = np.searchsorted(ends, targets)
    left = np.maximum(right - 1, 0)
    nearest = np.where(targets - ends[left] < ends[right] - targets, left, right)
    return np.append(nearest, runs[-1])


def _parts(items: Sequence[int], starts: Sequence[int], first: int, last: int) -> Iterator[ItemSlice]:
    """The units [first, last), counted over `items`, as parts of each. `starts`: where items begin, and the end."""
    place = bisect_right(starts, first) - 1
    while first < last:
        stop = min(last, starts[place + 1])
        yield ItemSlice(items[place], first - starts[place], stop - starts[place])
        first, place = stop, place + 1
