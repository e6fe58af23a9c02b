"""Ids of the tokens and patches that ranks work on, by which dropout is drawn: equal in every layout and micro-batch,
different in every step.

    text       number of the sample in the stream, place of the token in the sample
    encoder    number of the sample in the stream, of the item in it, and of the piece in that; place of the patch in
               the piece, unit by unit in raster order
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_hetero.data.dealing import Deal, PackMetadata
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.partition import MicroBatchShare, StepPartitioner
from megatron_hetero.groups.platform import Platform, on_device
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.layers.dropout import TokenIds, mixed_bits
from megatron_hetero.schedule.contract import InParts


def modules_with_dropout(job: JobSpec) -> tuple[str, ...]:
    """Return the modules whose adapters have dropout."""
    return tuple(name for name, row in job.config.modules.items() if row.lora.enabled and row.lora.dropout)


def token_ids(
    partitioner: StepPartitioner,
    modules: Sequence[str],
    deal: Deal,
    packs: Sequence[Sequence[PackMetadata]],
    shares: Sequence[MicroBatchShare],
) -> list[dict[str, list[np.ndarray]]]:
    """Return for each micro-batch, by module, the ids in each part of this rank's share of it, with padding: int64 of
    the shape of `TokenIds`.

    Args:
        partitioner: this rank's.
        modules: modules whose tokens get ids.
        deal: samples of each micro-batch and replica.
        packs: their packs.
        shares: this rank's shares.
    """
    found: list[dict[str, list[np.ndarray]]] = [{} for _ in shares]
    for name in modules:
        if name == TEXT:
            of_module = _of_text(partitioner, deal, packs, shares)
        else:
            of_module = _of_encoder(partitioner, name, packs, shares)
        for m, ids in of_module.items():
            found[m][name] = ids
    return found


def _of_text(
    partitioner: StepPartitioner,
    deal: Deal,
    packs: Sequence[Sequence[PackMetadata]],
    shares: Sequence[MicroBatchShare],
) -> dict[int, list[np.ndarray]]:
    """Return the ids of the text module's tokens by micro-batch, where this rank has some."""
    layout = partitioner.text
    if partitioner.rank not in layout:
        return {}
    replica, tp, found = layout.replica_of(partitioner.rank), _tp(partitioner, TEXT), {}
    for m, share in enumerate(shares):
        assert share.text is not None, "a rank of the text module has a share of each pack"
        tokens, ends = share.text.tokens, np.cumsum(packs[m][replica].shape.lengths)
        sample = np.searchsorted(ends, tokens, side="right")
        starts = np.concatenate([[0], ends])
        numbers = np.array(deal[m][replica], np.int64)
        found[m] = [_sharded(mixed_bits(numbers[sample], tokens - starts[sample]), share.text.padded // tp, tp)]
    return found


def _of_encoder(
    partitioner: StepPartitioner,
    name: str,
    packs: Sequence[Sequence[PackMetadata]],
    shares: Sequence[MicroBatchShare],
) -> dict[int, list[np.ndarray]]:
    """Return the ids of an encoder's patches by the first micro-batch of each call, where this rank has a share."""
    number, tp, found = list(partitioner.encoders).index(name), _tp(partitioner, name), {}
    for m, share in enumerate(shares):
        if name not in share.encoders:
            continue
        called = [packs[of_one] for of_one in share.calls.get(name, range(m, m + 1))]
        every = [source for of_one in called for pack in of_one for source in pack.sources[number]]
        sources = np.array(every, np.int64).reshape(-1, 3)
        shards = partitioner.encoder_shards(name, [tuple(pack.shape for pack in of_one) for of_one in called])
        found[m] = [
            _sharded(_of_patches(part, partitioner.rank, sources), own.embedded + own.padding, tp)
            for part, own in zip(shards.parts, share.encoders[name], strict=True)
        ]
    return found


def _of_patches(part: EncoderShards, rank: int, sources: np.ndarray) -> np.ndarray:
    """Return the ids of the patches of a rank's shard. `sources`: of all pieces, int64 [pieces, 3]."""
    at, unit, found, before = part.layout.coordinate(rank), part.shape.unit, [np.zeros(0, np.int64)], 0
    shards, member = part.replica(at.dp), at.cp * part.layout.sp + at.sp
    first, stop = (int(shards.units[:end].sum()) for end in (member, member + 1))
    for piece in part.assigned[at.dp]:
        units = part.shape.order(part.sizes[piece]).units.astype(np.int64)
        own = units[max(0, first - before) : max(0, stop - before)]
        found.append(mixed_bits(*sources[piece], (own[:, None] * unit + np.arange(unit)).ravel()))
        before += len(units)
    return np.concatenate(found)


def _tp(partitioner: StepPartitioner, module: str) -> int:
    """Return the number of tp ranks that split the activations of a module."""
    return partitioner.layouts[module].tp if partitioner.sharded[module] else 1


def _sharded(ids: np.ndarray, tokens: int, ranks: int) -> np.ndarray:
    """Return ids [ranks, tokens of each], with padding."""
    return np.pad(ids, (0, ranks * tokens - len(ids))).reshape(ranks, tokens)


def with_ids(
    inputs: Mapping[str, Any], ids: Mapping[str, Sequence[np.ndarray]], platform: Platform
) -> Mapping[str, Any]:
    """Return the inputs of modules with their `token_ids`, on the device."""
    result = dict(inputs)
    for name, of_parts in ids.items():
        given = inputs[name].parts if isinstance(inputs[name], InParts) else [inputs[name]]
        moved = [on_device(torch.from_numpy(own), platform.device) for own in of_parts]
        parts = [
            replace(part, attention=replace(part.attention, ids=TokenIds(each)))
            for part, each in zip(given, moved, strict=True)
        ]
        result[name] = InParts(parts) if isinstance(inputs[name], InParts) else parts[0]
    return result
