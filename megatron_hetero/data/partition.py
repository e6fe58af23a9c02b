"""What each rank decodes, encodes and reads in the micro-batches of a step, as pure functions of integers known to all
ranks.

A *pack* is the micro-batch of one replica of the text module. The pieces of items are numbered over the packs of all
replicas in turn; so are the rows, piece by piece in the order of their units. A *call* of an encoder takes one
micro-batch or more (`data.balance.cut_calls`); its pieces and rows are numbered one micro-batch after the other.

Shares depend on the shapes of packs only, so that those of micro-batches and calls of one shape are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Self

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import RankPlan, plan_boundary
from megatron_hetero.data.balance import assign, assign_in_order, cut_calls
from megatron_hetero.data.dealing import PackShape
from megatron_hetero.data.encoder_shards import EncoderShards, EncoderShare
from megatron_hetero.data.token_shards import TokenShards, TokenShare
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.items.types import ItemShape, Size


@dataclass(frozen=True, eq=False)
class PatchShare:
    """The patches that one rank of an encoder's first stage decodes and embeds.

    `decodes`: numbers of the pieces that this rank decodes. `exchange`: boundary plan by which the units of patches
    reach the ranks of the replica that embed them (forward direction).
    """

    decodes: tuple[int, ...]
    exchange: RankPlan


@dataclass(frozen=True, eq=False)
class MicroBatchShare:
    """One rank's share of one micro-batch.

    `text`: the tokens it reads, None outside the text module. By encoder, `patches`: what it decodes and embeds, on
    ranks of the encoder's first stage; `encoders`: what it encodes, part by part, on ranks of the encoder; `loads`:
    predicted forward flops of each replica. `boundaries`: by edge, how rows reach the text module, on ranks that take
    part.

    `calls`: by encoder, the micro-batches of a call that encodes several. `patches`, `encoders` and `loads` of its
    first micro-batch are then those of all, and the others have none. A rank holds the rows of the call one micro-batch
    after the other.

    An encoder for which no pack of the micro-batch, or of the call, has an item is in none of the mappings.
    """

    text: TokenShare | None
    patches: dict[str, PatchShare] = field(default_factory=dict)
    encoders: dict[str, tuple[EncoderShare, ...]] = field(default_factory=dict)
    boundaries: dict[Edge, RankPlan] = field(default_factory=dict)
    loads: dict[str, tuple[float, ...]] = field(default_factory=dict)
    calls: dict[str, range] = field(default_factory=dict)


Packs = tuple[PackShape, ...]
"""The packs of a micro-batch, one for each replica of the text module."""
_Call = tuple[EncoderShards, tuple[EncoderShare, ...] | None, Sequence[Mapping[Edge, RankPlan]]]
"""One call of an encoder: everybody's shards, this rank's share of each part, and how the rows of each micro-batch
cross.
"""
CallRuns = Callable[[int], Mapping[str, Sequence[range]]]
"""Returns, for a number of micro-batches, by encoder, all of them in runs that one call may encode."""


@dataclass(eq=False)
class StepPartitioner:
    """Computes the share of `rank`, a rank of any module, in micro-batches. `calls`, `token_shards` and
    `encoder_shards` are the same on all ranks; estimates are made of them too.

    Attributes:
        encoders: shapes by name.
        layouts: layouts of the encoders and of "text".
        sharded: for each module, whether activations are sharded over tp.
        row_bytes: bytes of a row of one output on the wire.
        edges: edges along which the rows of encoders reach the text module, with the outputs that cross there.
        balance: assignment of pieces to an encoder's replicas, in order (off), or so that predicted work is even.
        runs: which micro-batches of a step one call of an encoder may encode; None: each by itself.
        limits: by encoder, the limit of `EncoderShards`.
    """

    encoders: Mapping[str, ItemShape]
    layouts: Mapping[str, Layout]
    sharded: Mapping[str, bool]
    rank: int
    row_bytes: int
    edges: Mapping[Edge, Sequence[str]]
    balance: Literal["off", "replica"] = "replica"
    runs: CallRuns | None = None
    limits: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, job: JobSpec, rank: int) -> Self:
        """The partitioner of a rank of a job."""
        return cls(
            job.shapes.encoders,
            job.layouts,
            job.sequence_parallel,
            rank,
            job.row_bytes,
            job.edges,
            job.config.data.balance,
            job.encoder_calls,
            job.patch_limits,
        )

    def __post_init__(self) -> None:
        self.text = self.layouts[TEXT]
        self._numbers = {name: i for i, name in enumerate(self.encoders)}
        self._read = lru_cache(maxsize=32)(self._reading)  # The largest values.
        self._encode = lru_cache(maxsize=64)(self._call)
        self._decode = lru_cache(maxsize=64)(self._patch_share)

    def step_shares(self, packs: Sequence[Sequence[PackShape]]) -> list[MicroBatchShare]:
        """The shares in all micro-batches of a step. `packs`: for each micro-batch, one for each replica of the text
        module.
        """
        of_step = [tuple(of_one) for of_one in packs]
        shares = [MicroBatchShare(self._read(of_one)[1]) for of_one in of_step]
        for name, calls in self.calls(of_step).items():
            for call in calls:
                of_call = tuple(of_step[call.start : call.stop])
                if any(self._sizes(name, of_one) for of_one in of_call):
                    self._add_call(shares[call.start : call.stop], name, call, of_call)
        return shares

    def calls(self, packs: Sequence[Packs]) -> dict[str, tuple[range, ...]]:
        """All micro-batches of a step, by encoder in calls of one or more."""
        runs = {} if self.runs is None else self.runs(len(packs))
        alone = tuple(range(m, m + 1) for m in range(len(packs)))
        found = {}
        for i, (name, shape) in enumerate(self.encoders.items()):
            patches = [shape.unit * sum(pack.pieces[i].rows for pack in of_one) for of_one in packs]
            found[name] = cut_calls(patches, runs.get(name, alone), self.layouts[name], self.limits.get(name))
        return found

    def token_shards(self, packs: Packs) -> TokenShards:
        """The packs of a micro-batch, cut over the ranks of the text module."""
        for pack in packs:
            for shape, pieces in zip(self.encoders.values(), pack.pieces, strict=True):
                rows = sum(map(shape.rows, pieces.sizes))
                assert rows == pieces.rows, f"{rows} rows of items for {pieces.rows} tokens that stand for them"
        places = {name: tuple(p.pieces[i].positions for p in packs) for name, i in self._numbers.items()}
        return TokenShards(self.text, self.sharded[TEXT], tuple(p.lengths for p in packs), places)

    def encoder_shards(self, name: str, packs: Sequence[Packs]) -> EncoderShards:
        """The pieces in a call of an encoder, assigned to its replicas and cut over their ranks. `packs`: of the call's
        micro-batches.
        """
        shape, layout = self.encoders[name], self.layouts[name]
        sizes = tuple(size for of_one in packs for size in self._sizes(name, of_one))
        costs = {size: shape.cost(size) for size in set(sizes)}
        if self.balance == "replica":
            assigned = assign([costs[size] for size in sizes], layout.dp)
        else:
            assigned = assign_in_order(len(sizes), layout.dp)
        of_replicas = tuple(map(tuple, assigned))
        return EncoderShards(shape, layout, self.sharded[name], sizes, of_replicas, self.limits.get(name))

    def _sizes(self, name: str, packs: Packs) -> tuple[Size, ...]:
        """The sizes of all pieces of a micro-batch for an encoder."""
        return tuple(size for pack in packs for size in pack.pieces[self._numbers[name]].sizes)

    def _add_call(self, shares: list[MicroBatchShare], name: str, call: range, packs: tuple[Packs, ...]) -> None:
        """Add what one call encodes to the share in its first micro-batch, and what crosses to the share in each."""
        (shards, share, crossings), first, layout = self._encode(name, packs), shares[0], self.layouts[name]
        first.loads[name] = shards.loads
        if share is not None:
            first.encoders[name] = share
        if self.rank in layout.stage(0):
            first.patches[name] = self._decode(name, shards, call.start % (layout.stage_size // layout.dp))
        if len(call) > 1:
            first.calls[name] = call
        for of_one, boundaries in zip(shares, crossings, strict=True):
            of_one.boundaries.update(boundaries)

    def _reading(self, packs: Packs) -> tuple[TokenShards, TokenShare | None]:
        """What the text module reads in a micro-batch: everybody's, and this rank's share."""
        shards = self.token_shards(packs)
        return shards, shards.share(self.rank) if self.rank in self.text else None

    def _call(self, name: str, packs: tuple[Packs, ...]) -> _Call:
        layout, shards = self.layouts[name], self.encoder_shards(name, packs)
        read = [self._read(of_one)[0] for of_one in packs]
        boundaries: list[dict[Edge, RankPlan]] = [{} for _ in packs]
        for edge in self.edges:
            if edge.source == name and self.rank in edge.source_ranks(layout) + edge.target_ranks(self.text):
                row_bytes = self.row_bytes * len(self.edges[edge])
                for of_one, (held, needed) in zip(boundaries, sides(edge, shards, read), strict=True):
                    if len(needed.ids):
                        of_one[edge] = plan_boundary(held, needed, row_bytes).rank(self.rank)
        return shards, shards.shares(self.rank) if self.rank in layout else None, boundaries

    def _patch_share(self, name: str, shards: EncoderShards, turn: int) -> PatchShare:
        replica = shards.layout.replica_of(self.rank)
        unit_bytes = 4 * self.encoders[name].unit_width
        patches = plan_boundary(shards.decoded(replica, turn), shards.replica_ownership(replica), unit_bytes)
        return PatchShare(shards.decoders(replica, turn)[self.rank], patches.rank(self.rank, backward=False))


def sides(edge: Edge, call: EncoderShards, reading: Sequence[TokenShards]) -> list[tuple[Ownership, Ownership]]:
    """Which ranks hold the rows of an edge before and after they cross, for each micro-batch of a call. `reading`: what
    the text module reads in each.
    """
    stage = edge.target_coordinate(reading[0].layout)
    needed = {shards: shards.ownership(edge.source, stage) for shards in set(reading)}
    ends = np.cumsum([0, *(len(needed[shards].ids) for shards in reading)]).tolist()
    held = call.ownership(edge.source_coordinate(call.layout)).cut(ends)
    return [(rows, needed[shards]) for rows, shards in zip(held, reading, strict=True)]
