"""What each rank decodes, encodes and reads in the micro-batches of a step, as pure functions of integers known to all
ranks. Both training and `--plan` use this module.

The pieces of items are numbered over the packs of all replicas in turn, and the rows piece by piece in the order of
their units. A *call* of an encoder takes one micro-batch or more (`data.balance.cut_calls`); its pieces and rows are
numbered one micro-batch after the other.

Results depend on lengths, sizes and places only, so equal micro-batches and calls are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, Self

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import RankPlan, plan_boundary
from megatron_hetero.data.balance import assign, assign_in_order, cut_calls
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.token_shards import SequenceShard, TokenShards
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.items.types import ItemShape, Size


@dataclass(frozen=True, eq=False)
class EncoderCall:
    """One call of an encoder, for one micro-batch or more, as one rank executes it.

    Attributes:
        encoder: name of the module.
        micro_batches: micro-batches of the call, in the order of its rows.
        everyone: the pieces of the call, on all ranks of the encoder.
        shards: this rank's shard of each chunk; empty outside the encoder.
        rows: for each micro-batch, by edge, this rank's plan of how rows reach the text module.
        decodes: numbers of the pieces that this rank decodes.
        exchange: boundary plan by which decoded units of patches reach the ranks of the replica that embed them
            (forward direction); None outside the encoder's first stage.
    """

    encoder: str
    micro_batches: range
    everyone: EncoderShards
    shards: tuple[SequenceShard, ...]
    rows: tuple[Mapping[Edge, RankPlan], ...]
    decodes: tuple[int, ...] = ()
    exchange: RankPlan | None = None


Packs = tuple[PackMetadata, ...]
"""The packs of a micro-batch, one for each replica of the text module."""
CallRuns = Callable[[int], Mapping[str, Sequence[range]]]
"""Function that divides a number of micro-batches, by encoder, into runs that one call may encode."""


@dataclass(eq=False)
class StepPartitioner:
    """Computes the work of `rank`, a rank of any module, in micro-batches. `call_ranges`, `token_shards` and
    `encoder_shards` give equal results on all ranks.

    Attributes:
        encoders: shapes by name.
        layouts: layouts of the encoders and of "text".
        sharded: for each module, whether activations are sharded over tp.
        row_bytes: bytes that a row of one output takes when it is sent.
        edges: edges along which the rows of encoders reach the text module, with the outputs that cross there.
        balance: whether pieces are assigned to replicas in order (off), or so that predicted work is even.
        runs: function that returns the micro-batches that one call may encode; None: one per call.
        limits: by encoder, `EncoderShards.limit`.
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
        """Return the partitioner of a rank of a job."""
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
        self._text = lru_cache(maxsize=32)(self._text_shards)  # Small: these values are the largest.
        self._call = lru_cache(maxsize=64)(self._encoder_call)
        self._exchange = lru_cache(maxsize=64)(self._patch_exchange)

    def text_shard(self, packs: Packs) -> SequenceShard | None:
        """Return this rank's shard of a micro-batch in the text module; None outside the text module."""
        return self._text(packs)[1]

    def encoder_calls(self, packs: Sequence[Packs]) -> list[EncoderCall]:
        """Return all calls of encoders in a step, in the order of their first micro-batches and of the encoders.

        Encoders without pieces in a range of micro-batches are skipped. `packs`: the packs of each micro-batch.
        """
        calls = []
        for name, ranges in self.call_ranges(packs).items():
            for call in ranges:
                packs_of_call = tuple(packs[call.start : call.stop])
                if any(self._sizes(name, each) for each in packs_of_call):
                    calls.append(self._in_step(self._call(name, packs_of_call), call))
        return sorted(calls, key=lambda call: call.micro_batches.start)

    def _in_step(self, call: EncoderCall, micro_batches: range) -> EncoderCall:
        """Return a call for these micro-batches of a step, with the pieces that this rank decodes."""
        layout = call.everyone.layout
        if self.rank not in layout.stage(0):
            return replace(call, micro_batches=micro_batches)
        turn = micro_batches.start % (layout.stage_size // layout.dp)
        decodes, exchange = self._exchange(call.everyone, turn)
        return replace(call, micro_batches=micro_batches, decodes=decodes, exchange=exchange)

    def call_ranges(self, packs: Sequence[Packs]) -> dict[str, tuple[range, ...]]:
        """Return by encoder the range of micro-batches of each call in a step."""
        runs = {} if self.runs is None else self.runs(len(packs))
        single = tuple(range(m, m + 1) for m in range(len(packs)))
        ranges = {}
        for name, i in self._numbers.items():
            patches = [sum(pack.patches(self.encoders)[i] for pack in each) for each in packs]
            ranges[name] = cut_calls(patches, runs.get(name, single), self.layouts[name], self.limits.get(name))
        return ranges

    def token_shards(self, packs: Packs) -> TokenShards:
        """Return the packs of a micro-batch, cut over the ranks of the text module."""
        for pack in packs:
            for i, shape in enumerate(self.encoders.values()):
                rows, places = sum(map(shape.rows, pack.sizes[i])), len(pack.positions(i))
                assert rows == places, f"{rows} rows of items for {places} tokens that stand for them"
        places = {name: tuple(pack.positions(i) for pack in packs) for name, i in self._numbers.items()}
        return TokenShards(self.text, self.sharded[TEXT], tuple(pack.lengths for pack in packs), places)

    def encoder_shards(self, name: str, packs: Sequence[Packs]) -> EncoderShards:
        """Return the pieces in a call of an encoder, assigned to its replicas and cut over their ranks. `packs`: the
        packs of each micro-batch of the call.
        """
        shape, layout = self.encoders[name], self.layouts[name]
        sizes = tuple(size for each in packs for size in self._sizes(name, each))
        costs = {size: shape.cost(size) for size in set(sizes)}
        if self.balance == "replica":
            assigned = assign([costs[size] for size in sizes], layout.dp)
        else:
            assigned = assign_in_order(len(sizes), layout.dp)
        pieces_by_replica = tuple(map(tuple, assigned))
        return EncoderShards(shape, layout, self.sharded[name], sizes, pieces_by_replica, self.limits.get(name))

    def _sizes(self, name: str, packs: Packs) -> tuple[Size, ...]:
        """Return the sizes of all pieces of a micro-batch for an encoder."""
        return tuple(size for pack in packs for size in pack.sizes[self._numbers[name]])

    def _text_shards(self, packs: Packs) -> tuple[TokenShards, SequenceShard | None]:
        """Return the packs of a micro-batch on all ranks of the text module, and this rank's shard."""
        shards = self.token_shards(packs)
        return shards, shards.shard(self.rank) if self.rank in self.text else None

    def _encoder_call(self, name: str, packs: tuple[Packs, ...]) -> EncoderCall:
        """Return a call with micro-batches numbered from 0, without the pieces that this rank decodes."""
        layout, everyone = self.layouts[name], self.encoder_shards(name, packs)
        texts = [self._text(each)[0] for each in packs]
        rows: list[dict[Edge, RankPlan]] = [{} for _ in packs]
        for edge in self.edges:
            if edge.source == name and self.rank in edge.source_ranks(layout) + edge.target_ranks(self.text):
                row_bytes = self.row_bytes * len(self.edges[edge])
                for plans, (held, needed) in zip(rows, sides(edge, everyone, texts), strict=True):
                    if len(needed.ids):
                        plans[edge] = plan_boundary(held, needed, row_bytes).rank(self.rank)
        shards = everyone.shards(self.rank) if self.rank in layout else ()
        return EncoderCall(name, range(len(packs)), everyone, shards, tuple(rows))

    def _patch_exchange(self, shards: EncoderShards, turn: int) -> tuple[tuple[int, ...], RankPlan]:
        """Return the numbers of the pieces that this rank decodes, and the plan by which their patches reach the ranks
        that embed them.
        """
        replica = shards.layout.replica_of(self.rank)
        unit_bytes = 4 * shards.shape.unit_width
        patches = plan_boundary(shards.decoded(replica, turn), shards.replica_ownership(replica), unit_bytes)
        return shards.decoders(replica, turn)[self.rank], patches.rank(self.rank, backward=False)


def sides(edge: Edge, call: EncoderShards, texts: Sequence[TokenShards]) -> list[tuple[Ownership, Ownership]]:
    """Return, for each micro-batch of a call, the ownership of an edge's rows on the source ranks and on the target
    ranks. `texts`: the packs of each micro-batch, on the ranks of the text module.
    """
    stage = edge.target_coordinate(texts[0].layout)
    needed = {shards: shards.ownership(edge.source, stage) for shards in set(texts)}
    ends = np.cumsum([0, *(len(needed[shards].ids) for shards in texts)]).tolist()
    held = call.ownership(edge.source_coordinate(call.layout)).cut(ends)
    return [(rows, needed[shards]) for rows, shards in zip(held, texts, strict=True)]
