"""Ids of tokens and patches, from which dropout is drawn: the same in every layout and micro-batch, different in every
step.

    text       number of the sample in the stream, place of the token in the sample
    encoder    number of the sample in the stream, of the item in it, and of the piece in that; place of the patch in
               the piece, unit by unit in raster order
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.token_shards import SequenceShard
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.layers.dropout import TokenIds, mixed_bits


def modules_with_dropout(job: JobSpec) -> tuple[str, ...]:
    """Return the names of the modules whose adapters have dropout."""
    return tuple(name for name, row in job.config.modules.items() if row.lora.enabled and row.lora.dropout)


def text_ids(shard: SequenceShard, samples: np.ndarray, places: np.ndarray) -> TokenIds:
    """Return the ids of the tokens of a shard. `samples`: number of each token's sample in the stream, int64 [n];
    `places`: place of each token in its sample, int64 [n].
    """
    return _padded(mixed_bits(samples, places), shard)


def patch_ids(shard: SequenceShard, chunk: EncoderShards, rank: int, sources: np.ndarray) -> TokenIds:
    """Return the ids of the patches in the shard that `rank` encodes in a chunk of a call. `sources`: sources of all
    pieces of the call, see `PackMetadata.sources`.
    """
    at, unit = chunk.layout.coordinate(rank), chunk.shape.unit
    pieces, ids = chunk.assigned[at.dp], [np.zeros(0, np.int64)]
    for piece, units in chunk.replica(at.dp).runs(at.cp * chunk.layout.sp + at.sp):
        patches = units.astype(np.int64)[:, None] * unit + np.arange(unit)
        ids.append(mixed_bits(*sources[pieces[piece]], patches.ravel()))
    return _padded(np.concatenate(ids), shard)


def _padded(ids: np.ndarray, shard: SequenceShard) -> TokenIds:
    """Return ids padded to the shard's length, [ranks, tokens of each rank that splits the shard]."""
    padded = np.pad(ids, (0, shard.padded - len(ids)))
    return TokenIds(torch.from_numpy(padded.reshape(shard.ranks, shard.local)))
