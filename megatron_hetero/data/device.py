"""Inputs of the modules in a micro-batch: built on the host from samples, patches and shards, then moved to the device
with the plans by which rows cross between modules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.plan import RankPlan
from megatron_hetero.data.packing import IGNORED, TokenizedSample
from megatron_hetero.data.partition import EncoderCall
from megatron_hetero.data.token_ids import text_ids
from megatron_hetero.data.token_shards import SequenceShard
from megatron_hetero.groups.platform import CPU, on_device
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.balance_loss import BalancedSamples
from megatron_hetero.models.layers.dropout import TokenIds
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.stages import EncoderInput, TextInput
from megatron_hetero.schedule.contract import InChunks, MicroBatchInputs

PADDING_TOKEN = 0
"""Token that pads shards. Any token will do, since nothing attends to padding and padding predicts nothing."""


def attention_params(shard: SequenceShard, ids: TokenIds | None = None, device: torch.device = CPU) -> AttentionParams:
    """Return the parameters of attention for a shard. `ids`: token or patch ids for dropout."""
    return AttentionParams(
        full=PackedSegments.of_segments(shard.segments, device, shard.cp_lengths),
        sp_lengths=shard.sp_lengths,
        cp_lengths=shard.cp_lengths,
        windows=PackedSegments.of(shard.windows, device),
        lengths=shard.lengths,
        ids=ids,
    )


def encoder_input(shard: SequenceShard, patches: Tensor | None, ids: TokenIds | None = None) -> EncoderInput:
    """Return the input of an encoder, on the host. `patches`: see `EncoderInput`; `ids`: patch ids for dropout."""
    return EncoderInput(patches, torch.from_numpy(shard.positions), attention_params(shard, ids), shard.padding)


def text_input(
    samples: Mapping[int, TokenizedSample],
    shard: SequenceShard,
    outputs: Mapping[str, Collection[str]],
    *,
    balance: float = 0.0,
    dropout: bool = False,
) -> TextInput:
    """Pack samples, and return the tokens of this rank's shard with their labels, on the host.

    Args:
        samples: all samples of the pack, in order, by number in the stream.
        shard: this rank's shard of the pack.
        outputs: by encoder, the names of the outputs whose rows the text module takes.
        balance: weight of the loss that balances experts; 0: no such loss.
        dropout: whether tokens get ids for dropout.
    """
    packed, positions = list(samples.values()), shard.positions
    dims = len(packed[0].position_ids) if packed else 3
    ids, labels = _joined([each.input_ids for each in packed]), _joined([each.labels for each in packed])
    supervised = np.flatnonzero(labels[positions] != IGNORED)
    # Index in the pack of the sample of each token.
    starts, ends = np.cumsum([0, *shard.lengths]), np.cumsum(shard.lengths)
    sample = np.searchsorted(ends, positions, side="right")
    numbers = np.array([*samples], np.int64)[sample]
    padding = shard.padded - shard.tokens
    return TextInput(
        tokens=_tensor(np.pad(ids[positions], (0, padding), constant_values=PADDING_TOKEN)),
        positions=_tensor(_joined([each.position_ids for each in packed], dims)[:, positions]),
        supervised=_tensor(supervised),
        targets=_tensor(labels[positions][supervised]),
        rows_at={name: _tensor(places) for name, places in _places(shard, outputs).items()},
        attention=attention_params(shard, text_ids(shard, numbers, positions - starts[sample]) if dropout else None),
        balanced=_balanced(packed, sample, balance) if balance else None,
        samples=numbers,
    )


def _joined(arrays: Sequence[np.ndarray], *dims: int) -> np.ndarray:
    """Join arrays, int64 [*dims, n], along the last dim."""
    return np.concatenate([np.zeros((*dims, 0), np.int64), *arrays], axis=-1)


def _balanced(packed: Sequence[TokenizedSample], sample: np.ndarray, weight: float) -> BalancedSamples:
    """Return the samples of a pack for the loss that balances experts. `sample`: index of each token's sample."""
    lengths = np.array([*map(len, packed)], np.int64)
    supervised = np.array([each.label_count for each in packed], np.int64)
    factors = weight * supervised / lengths.astype(np.float64) ** 2
    return BalancedSamples(_tensor(sample), _tensor(factors.astype(np.float32)))


def _places(shard: SequenceShard, outputs: Mapping[str, Collection[str]]) -> dict[str, np.ndarray]:
    """Return the token positions of the rows of each output, in the order of encoders in which stages receive rows."""
    names = dict.fromkeys(name for each in outputs.values() for name in each)
    return {
        name: _joined([shard.rows_at[encoder] for encoder, each in outputs.items() if name in each]) for name in names
    }


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def micro_batch_inputs(
    texts: Sequence[TextInput | None], calls: Sequence[EncoderCall], chunks: Sequence[Sequence[EncoderInput]]
) -> tuple[MicroBatchInputs, ...]:
    """Return this rank's inputs of all micro-batches of a step, on the host.

    Args:
        texts: for each micro-batch, the input of the text module; None outside it.
        calls: the step's calls of encoders.
        chunks: for each call, the encoder's input of each chunk; empty outside the encoder.
    """
    inputs: list[dict[str, Any]] = [{} for _ in texts]
    rows: list[dict[Edge, RankPlan]] = [{} for _ in texts]
    ranges: list[dict[str, range]] = [{} for _ in texts]
    for call, each in zip(calls, chunks, strict=True):
        first = call.micro_batches.start
        if each:
            inputs[first][call.encoder] = each[0] if len(each) == 1 else InChunks(list(each))
        if len(call.micro_batches) > 1:
            ranges[first][call.encoder] = call.micro_batches
        for m, plans in zip(call.micro_batches, call.rows, strict=True):
            rows[m].update(plans)
    for modules, text in zip(inputs, texts, strict=True):
        if text is not None:
            modules[TEXT] = text
    return tuple(MicroBatchInputs(*each) for each in zip(inputs, rows, ranges, strict=True))


def to_device(batch: MicroBatchInputs, device: torch.device) -> MicroBatchInputs:
    """Copy all tensors of a micro-batch to the device, without waiting for the copies, and load its plans there."""
    rows = {edge: load_plan(plan, device) for edge, plan in batch.rows.items()}
    return replace(batch, inputs=_moved(batch.inputs, device, {}), rows=rows)


def _moved(value: Any, device: torch.device, copies: dict[int, Tensor]) -> Any:
    """Return a value with all tensors moved to the device: fields of dataclasses, entries of mappings and lists.
    `copies`: moved tensors by the id of the original, so that a shared tensor stays shared.
    """
    if isinstance(value, Tensor):
        if id(value) not in copies:
            copies[id(value)] = on_device(value, device)
        return copies[id(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _moved(getattr(value, f.name), device, copies) for f in fields(value)})
    if isinstance(value, Mapping):
        return {key: _moved(each, device, copies) for key, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, device, copies) for each in value]
    return value
