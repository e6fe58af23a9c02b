"""What each rank's layers work on in an assumed micro-batch, or call of an encoder: a few different shards, and which
rank has which. Pure.

All replicas of the text module work on packs that are alike, and so do all encoder replicas with pieces of the same
sizes, so that shards are computed for one of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hetero.data.sharding.encoder_shards import EncoderShards
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.items.types import Size, padded_patches
from megatron_hetero.names import TEXT
from megatron_hetero.planning.assumed import AssumedBatch, one_replica

Spans = tuple[tuple[int, int], ...]
"""Queries and keys of segments of attention, in order."""


@dataclass(frozen=True)
class SequenceShard:
    """What one rank of a module works on in one micro-batch or call; lengths in tokens (patches for an encoder).

    `tokens`: of its shard, which its tp group shares; `padded`: with padding; `local`: those that it holds between
    layers, a part of `padded` with sequence-parallel activations. `member`: tokens of its cp member, over all of its sp
    members. `segments`: of full attention; `windows`: of local attention. `supervised`: tokens that predict.
    """

    tokens: int
    padded: int
    local: int
    member: int
    segments: Spans
    windows: Spans = ()
    supervised: int = 0


@dataclass(frozen=True, eq=False)
class ModuleShards:
    """The different shards of a module, and for each of its layout's ranks, in order, the number of its own. There are
    none where the module has nothing to do.
    """

    shards: tuple[SequenceShard, ...]
    of_rank: np.ndarray

    @property
    def used(self) -> bool:
        """Whether the module has anything to do at all."""
        return len(self.shards) > 0


def text_shards(assumed: AssumedBatch) -> ModuleShards:
    """The shards of the text module."""
    layout, sharded = assumed.layouts[TEXT], assumed.sharded[TEXT]
    one = one_replica(layout)
    shards = assumed.token_shards(one)
    labels = np.zeros(sum(assumed.lengths), bool)
    for end in np.cumsum(assumed.lengths):
        labels[end - 1 - assumed.sample.supervised : end - 1] = True
    found = []
    for rank in range(0, one.size, layout.tp):
        share = shards.share(rank)
        shard = SequenceShard(
            tokens=len(share.tokens),
            padded=share.padded,
            local=share.padded // (layout.tp if sharded else 1),
            member=sum(share.sp_lengths),
            segments=_spans(share.segments),
            supervised=int(labels[share.tokens].sum()),
        )
        found += [shard] * layout.tp
    return _numbered([found], layout, np.zeros(layout.dp, np.int64))


def encoder_shards(assumed: AssumedBatch, encoder: str, micro_batches: int) -> ModuleShards:
    """The shards of an encoder in a call of so many micro-batches; none where the assumed samples have no images."""
    layout, sizes = assumed.layouts[encoder], assumed.pieces(encoder, micro_batches)
    if not sizes:
        return ModuleShards((), np.full(layout.size, -1))
    of_replicas = [tuple(sizes[i] for i in mine) for mine in assumed.assigned(encoder, micro_batches)]
    kinds = {kind: number for number, kind in enumerate(sorted(set(of_replicas), key=len))}
    found = [_of_replica(assumed, encoder, kind) for kind in kinds]
    return _numbered(found, layout, np.array([kinds[kind] for kind in of_replicas]))


def _of_replica(assumed: AssumedBatch, encoder: str, sizes: tuple[Size, ...]) -> list[SequenceShard]:
    """The shards of the ranks of a replica with pieces of these sizes."""
    shape, layout, sharded = assumed.shapes.encoders[encoder], assumed.layouts[encoder], assumed.sharded[encoder]
    shards = EncoderShards(shape, one_replica(layout), sharded, sizes, (tuple(range(len(sizes))),))
    found = []
    for rank in range(0, shards.layout.size, layout.tp):
        share = shards.share(rank)
        patches, split = share.positions.shape[1], layout.tp if sharded else 1
        padded = padded_patches(patches, shape.unit, split)
        windows = tuple((n, n) for n in share.windows)
        shard = SequenceShard(patches, padded, padded // split, sum(share.sp_lengths), _spans(share.segments), windows)
        found += [shard] * layout.tp
    return found


def _spans(segments: AttentionSegments) -> Spans:
    return tuple(zip(segments.queries, segments.keys, strict=True))


def _numbered(kinds: list[list[SequenceShard]], layout: Layout, kind_of_replica: np.ndarray) -> ModuleShards:
    """`kinds`: the shards of the ranks of one replica, for each kind of replica."""
    number: dict[SequenceShard, int] = {}
    table = np.array([[number.setdefault(shard, len(number)) for shard in kind] for kind in kinds])
    of_stage = table[kind_of_replica].ravel()  # tp, sp and cp vary fastest, then dp, then pp
    return ModuleShards(tuple(number), np.tile(of_stage, layout.pp))
