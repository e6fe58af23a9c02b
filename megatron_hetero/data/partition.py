"""What each rank decodes, encodes and reads in the micro-batches of a step, as pure functions of integers known to all
ranks.

A *pack* is the micro-batch of one replica of the text module. The pieces of items are numbered over the packs of all
replicas in turn; so are the rows, piece by piece in the order of their units. A *call* of an encoder takes one
micro-batch or more (`data.balance.cut_calls`); its pieces and rows are numbered one micro-batch after the other.

Shares depend on the shapes of packs only, so that those of micro-batches and calls of one shape are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, Self

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import RankPlan, plan_boundary
from megatron_hetero.data.balance import assign, assign_in_order, cut_calls, loads_of
from megatron_hetero.data.dealing import PackShape
from megatron_hetero.data.encoder_shards import EncoderShards, EncoderShare
from megatron_hetero.data.token_shards import TokenShards, TokenShare
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.items.types import ItemShape, Size

Balance = Literal["off", "replica"]
"""Assignment of pieces to the encoder's replicas: in order, or so that predicted work is even."""


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
    patches: Mapping[str, PatchShare] = field(default_factory=dict)
    encoders: Mapping[str, tuple[EncoderShare, ...]] = field(default_factory=dict)
    boundaries: Mapping[Edge, RankPlan] = field(default_factory=dict)
    loads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    calls: Mapping[str, range] = field(default_factory=dict)


Packs = tuple[PackShape, ...]
"""The packs of a micro-batch, one for each replica of the text module."""
CallRuns = Callable[[int], Mapping[str, Sequence[range]]]
"""Returns, for a number of micro-batches, by encoder, all of them in runs that one call may encode."""


@dataclass(frozen=True, eq=False)
class _Reading:
    """What the text module reads in a micro-batch: this rank's share, and everybody's by pipeline coordinate."""

    share: TokenShare | None
    wanted: Mapping[int, TokenShards]


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of an encoder: the shards of its first stage, this rank's share of each part, the predicted forward
    flops of each replica, and for each micro-batch by edge how its rows cross.
    """

    shards: EncoderShards
    share: tuple[EncoderShare, ...] | None
    loads: tuple[float, ...]
    boundaries: tuple[Mapping[Edge, RankPlan], ...]


@dataclass(eq=False)
class StepPartitioner:
    """Computes the share of `rank`, a rank of any module, in micro-batches.

    Attributes:
        encoders: shapes by name.
        layouts: layouts of the encoders and of "text".
        sharded: for each module, whether activations are sharded over tp.
        row_bytes: bytes of a row of one output on the wire.
        edges: edges along which the rows of encoders reach the text module, with the outputs that cross there.
        balance: how pieces are assigned to an encoder's replicas.
        runs: which micro-batches of a step one call of an encoder may encode; None: each by itself.
        limits: by encoder, the limit of `EncoderShards`.
    """

    encoders: Mapping[str, ItemShape]
    layouts: Mapping[str, Layout]
    sharded: Mapping[str, bool]
    rank: int
    row_bytes: int
    edges: Mapping[Edge, Sequence[str]]
    balance: Balance = "replica"
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
        runs, of_step = {} if self.runs is None else self.runs(len(packs)), [tuple(of_one) for of_one in packs]
        shares = [MicroBatchShare(self._read(of_one).share) for of_one in of_step]
        for name in self.encoders:
            for call in self._calls(name, of_step, runs.get(name)):
                if any(self._sizes(name, of_one) for of_one in of_step[call.start : call.stop]):
                    self._add_call(shares, name, call, of_step)
        return shares

    def _calls(self, name: str, packs: Sequence[Packs], runs: Sequence[range] | None) -> tuple[range, ...]:
        if runs is None:
            return tuple(range(m, m + 1) for m in range(len(packs)))
        shape, layout = self.encoders[name], self.layouts[name]
        patches = [shape.unit * sum(map(shape.rows, self._sizes(name, of_one))) for of_one in packs]
        return cut_calls(patches, runs, layout, self.limits.get(name))

    def _sizes(self, name: str, packs: Packs) -> tuple[Size, ...]:
        """The sizes of all pieces of a micro-batch for an encoder."""
        return tuple(size for pack in packs for size in pack.pieces[self._numbers[name]].sizes)

    def _add_call(self, shares: list[MicroBatchShare], name: str, call: range, packs: Sequence[Packs]) -> None:
        """Add what one call encodes to the share in its first micro-batch, and what crosses to the share in each."""
        encoded, first = self._encode(name, tuple(packs[call.start : call.stop])), shares[call.start]
        shards, patches = encoded.shards, first.patches
        if self.rank in shards.layout:
            decoders = shards.layout.size // shards.layout.dp
            patches = {**patches, name: self._decode(name, shards, call.start % decoders)}
        shares[call.start] = replace(
            first,
            patches=patches,
            encoders=first.encoders if encoded.share is None else {**first.encoders, name: encoded.share},
            loads={**first.loads, name: encoded.loads},
            calls={**first.calls, name: call} if len(call) > 1 else first.calls,
        )
        for m, boundaries in zip(call, encoded.boundaries, strict=True):
            if boundaries:
                shares[m] = replace(shares[m], boundaries={**shares[m].boundaries, **boundaries})

    def _reading(self, packs: Packs) -> _Reading:
        for pack in packs:
            for shape, pieces in zip(self.encoders.values(), pack.pieces, strict=True):
                rows, places = sum(map(shape.rows, pieces.sizes)), len(pieces.positions)
                assert rows == places, f"{rows} rows of items for {places} tokens that stand for them"
        places = {name: tuple(p.pieces[i].positions for p in packs) for name, i in self._numbers.items()}
        lengths = tuple(p.lengths for p in packs)
        tokens = TokenShards(self.text.stage(0), self.sharded[TEXT], lengths, places)
        share = tokens.share(self.text.peer_at_stage(self.rank, 0)) if self.rank in self.text else None
        entered = {edge.target_coordinate(self.text) for edge in self.edges}
        wanted = {at: tokens if at == 0 else replace(tokens, layout=self.text.stage(at)) for at in entered}
        return _Reading(share, wanted)

    def _call(self, name: str, packs: tuple[Packs, ...]) -> _Call:
        shape, layout = self.encoders[name], self.layouts[name]
        each = [self._sizes(name, of_one) for of_one in packs]
        sizes = tuple(size for of_one in each for size in of_one)
        costs = [shape.cost(size) for size in sizes]
        assigned = assign(costs, layout.dp) if self.balance == "replica" else assign_in_order(len(costs), layout.dp)
        of_replicas = tuple(map(tuple, assigned))
        first = EncoderShards(
            shape, layout.stage(0), self.sharded[name], sizes, of_replicas, limit=self.limits.get(name)
        )
        ends = np.cumsum([0, *(sum(map(shape.rows, of_one)) for of_one in each)]).tolist()
        leaving = [edge for edge in self.edges if edge.source == name]
        edges = [edge for edge in leaving if self.rank in edge.source_ranks(layout) + edge.target_ranks(self.text)]
        stages = {at: replace(first, layout=layout.stage(at)) for at in {e.source_coordinate(layout) for e in edges}}
        owned = {at: shards.ownership().cut(ends) for at, shards in stages.items()}
        boundaries = []
        for number, of_one in enumerate(packs):
            sources = {edge: owned[edge.source_coordinate(layout)][number] for edge in edges if each[number]}
            boundaries.append({edge: self._boundary(edge, rows, of_one) for edge, rows in sources.items()})
        share = first.shares(layout.peer_at_stage(self.rank, 0)) if self.rank in layout else None
        return _Call(first, share, tuple(loads_of(costs, assigned)), tuple(boundaries))

    def _boundary(self, edge: Edge, held: Ownership, packs: Packs) -> RankPlan:
        """This rank's plan for the rows of a micro-batch, which cross from the encoder's ownership `held`."""
        needed = self._read(packs).wanted[edge.target_coordinate(self.text)].ownership(edge.source)
        return plan_boundary(held, needed, self.row_bytes * len(self.edges[edge])).rank(self.rank)

    def _patch_share(self, name: str, shards: EncoderShards, turn: int) -> PatchShare:
        replica = shards.layout.replica_of(self.rank)
        unit_bytes = 4 * self.encoders[name].unit_width
        patches = plan_boundary(shards.decoded(replica, turn), shards.replica_ownership(replica), unit_bytes)
        return PatchShare(shards.decoders(replica, turn)[self.rank], patches.rank(self.rank, backward=False))
