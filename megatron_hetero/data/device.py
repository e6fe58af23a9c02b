"""Moves a micro-batch to the device: what modules read of it, and the plans by which rows cross between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.data.encoder_shards import EncoderShare
from megatron_hetero.data.loader import MicroBatch
from megatron_hetero.data.packing import IGNORED, PackedBatch
from megatron_hetero.data.token_ids import with_ids
from megatron_hetero.data.token_shards import TokenShare
from megatron_hetero.groups.platform import Platform, on_device
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.balance_loss import BalancedSamples
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.stages import EncoderInput, TextInput
from megatron_hetero.schedule.contract import DeviceMicroBatch, InParts

PADDING_TOKEN = 0
"""Fills shards: any token will do, since nothing attends to it and it predicts nothing."""


def to_device(batch: MicroBatch, job: JobSpec, platform: Platform, *, trains: bool = True) -> DeviceMicroBatch:
    """Move a micro-batch to the device; patches arrive in the dtype of the job. `trains`: whether a loss that balances
    experts counts, and adapters have dropout.
    """
    own, inputs = batch.share, {}
    for name, shares in own.encoders.items():
        patches = [_move(part, platform).to(job.dtype) for part in batch.patches.get(name, ())] or [None] * len(shares)
        parts = [_encoder_input(*part, platform) for part in zip(shares, patches, strict=True)]
        inputs[name] = parts[0] if len(parts) == 1 else InParts(parts)
    if own.text is not None and batch.pack is not None:
        balance = job.balance if trains else 0.0
        balanced = _balanced(batch.pack, own.text, platform, balance) if balance else None
        inputs[TEXT] = replace(_text_input(batch.pack, own.text, platform, job.outputs), balanced=balanced)
    boundaries = {edge: load_plan(part, platform.device) for edge, part in own.boundaries.items()}
    return DeviceMicroBatch(with_ids(inputs, batch.ids, platform) if trains else inputs, boundaries, own.calls)


def _encoder_input(share: EncoderShare, patches: Tensor | None, platform: Platform) -> EncoderInput:
    attention = AttentionParams(
        full=PackedSegments.of_segments(share.segments, platform.device, share.cp_lengths),
        sp_lengths=share.sp_lengths,
        cp_lengths=share.cp_lengths,
        windows=PackedSegments.of(share.windows, platform.device),
    )
    return EncoderInput(patches, _move(share.positions, platform), attention, share.padding)


def _text_input(
    pack: PackedBatch, share: TokenShare, platform: Platform, outputs: Mapping[str, Collection[str]]
) -> TextInput:
    """Return the tokens of this rank's shard, with their labels."""
    labels = pack.labels[share.tokens]
    supervised = np.flatnonzero(labels != IGNORED)
    padding = share.padded - len(share.tokens)
    return TextInput(
        tokens=_move(np.pad(pack.input_ids[share.tokens], (0, padding), constant_values=PADDING_TOKEN), platform),
        positions=_move(pack.position_ids[:, share.tokens], platform),
        supervised=_move(supervised, platform),
        targets=_move(labels[supervised], platform),
        rows_at={name: _move(places, platform) for name, places in _places(share, outputs).items()},
        attention=AttentionParams(
            full=PackedSegments.of_segments(share.segments, platform.device, share.cp_lengths),
            sp_lengths=share.sp_lengths,
            cp_lengths=share.cp_lengths,
            lengths=tuple(np.diff(pack.cu_seqlens).tolist()),
        ),
    )


def _balanced(pack: PackedBatch, share: TokenShare, platform: Platform, weight: float) -> BalancedSamples:
    """Return the samples of a pack for the loss that balances experts."""
    starts, lengths = pack.cu_seqlens[1:], np.diff(pack.cu_seqlens)
    supervised = np.searchsorted(starts, np.flatnonzero(pack.labels != IGNORED), side="right")
    factors = weight * np.bincount(supervised, minlength=len(lengths)) / lengths.astype(np.float64) ** 2
    of_tokens = np.searchsorted(starts, share.tokens, side="right")
    return BalancedSamples(_move(of_tokens, platform), _move(factors.astype(np.float32), platform))


def _places(share: TokenShare, outputs: Mapping[str, Collection[str]]) -> dict[str, np.ndarray]:
    """Return the token positions of the rows of each output, encoder by encoder as stages receive them."""
    names = dict.fromkeys(name for each in outputs.values() for name in each)
    none = np.zeros(0, np.int64)
    return {
        name: np.concatenate([none, *(share.rows_at[encoder] for encoder, each in outputs.items() if name in each)])
        for name in names
    }


def _move(values: np.ndarray | Tensor, platform: Platform) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return on_device(tensor, platform.device)
