"""Micro-batches from the host to what the modules read on the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.data.packing import IGNORED, PackedBatch
from megatron_hetero.data.sharding.encoder_shards import EncoderShare
from megatron_hetero.data.sharding.token_shards import TokenShare
from megatron_hetero.data.step_loader import MicroBatch
from megatron_hetero.distributed.platform import Platform, on_device
from megatron_hetero.execution.runtime import DeviceMicroBatch
from megatron_hetero.models.common.inputs import EncoderInput, TextInput
from megatron_hetero.models.layers.attention import AttentionPlan
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.names import TEXT

PADDING_TOKEN = 0
"""What shards are filled with: any token will do, since nothing attends to it and it predicts nothing."""


def to_device(
    batch: MicroBatch, platform: Platform, dtype: torch.dtype, outputs: Mapping[str, Collection[str]]
) -> DeviceMicroBatch:
    """Move one micro-batch; patches arrive in `dtype`. `outputs`: of each encoder, those whose rows enter the text."""
    plan, inputs = batch.plan, {}
    for name, share in plan.encoders.items():
        patches = _move(batch.patches[name], platform).to(dtype) if name in batch.patches else None
        inputs[name] = _encoder_input(share, patches, platform)
    if plan.text is not None and batch.pack is not None:
        inputs[TEXT] = _text_input(batch.pack, plan.text, platform, outputs)
    boundaries = {edge: load_plan(part, platform.device) for edge, part in plan.boundaries.items()}
    return DeviceMicroBatch(inputs, boundaries, plan.calls)


def _encoder_input(share: EncoderShare, patches: Tensor | None, platform: Platform) -> EncoderInput:
    attention = AttentionPlan(
        full=PackedSegments.of_segments(share.segments, platform.device, share.cp_lengths),
        sp_lengths=share.sp_lengths,
        cp_lengths=share.cp_lengths,
        windows=PackedSegments.of(share.windows, platform.device),
    )
    return EncoderInput(patches, _move(share.positions, platform), attention, share.padding)


def _text_input(
    pack: PackedBatch, share: TokenShare, platform: Platform, outputs: Mapping[str, Collection[str]]
) -> TextInput:
    """The tokens of this rank's shard, with the labels that belong to them."""
    labels = pack.labels[share.tokens]
    supervised = np.flatnonzero(labels != IGNORED)
    padding = share.padded - len(share.tokens)
    return TextInput(
        tokens=_move(np.pad(pack.input_ids[share.tokens], (0, padding), constant_values=PADDING_TOKEN), platform),
        positions=_move(pack.position_ids[:, share.tokens], platform),
        supervised=_move(supervised, platform),
        targets=_move(labels[supervised], platform),
        rows_at={name: _move(places, platform) for name, places in _places(share, outputs).items()},
        attention=AttentionPlan(
            full=PackedSegments.of_segments(share.segments, platform.device, share.cp_lengths),
            sp_lengths=share.sp_lengths,
            cp_lengths=share.cp_lengths,
        ),
    )


def _places(share: TokenShare, outputs: Mapping[str, Collection[str]]) -> dict[str, np.ndarray]:
    """Where the rows of each output go: encoder by encoder, as they are handed to a stage."""
    names = dict.fromkeys(name for each in outputs.values() for name in each)
    none = np.zeros(0, np.int64)
    return {
        name: np.concatenate([none, *(share.rows_at[encoder] for encoder, each in outputs.items() if name in each)])
        for name in names
    }


def _move(values: np.ndarray | Tensor, platform: Platform) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return on_device(tensor, platform.device)
