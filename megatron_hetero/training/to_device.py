"""Micro-batches from the host to what the modules read on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.boundary.communicator import load_plan
from megatron_hetero.data.packing import IGNORED, PackedBatch
from megatron_hetero.models.attention import AttentionPlan, Segments
from megatron_hetero.models.qwen2_5_vl.text import TextInput
from megatron_hetero.models.qwen2_5_vl.vision import VisionInput
from megatron_hetero.platform import Platform
from megatron_hetero.schedule.colocated import DeviceMicroBatch
from megatron_hetero.training.encoder_shards import EncoderShare
from megatron_hetero.training.step_loader import MicroBatch
from megatron_hetero.training.token_shards import TokenShare

PADDING_TOKEN = 0
"""What shards are filled with: any token will do, since nothing attends to it and it predicts nothing."""


def to_device(batch: MicroBatch, platform: Platform, dtype: torch.dtype) -> DeviceMicroBatch:
    """Move one micro-batch; pixels arrive in `dtype`."""
    vision = batch.plan.vision
    text = _text_input(batch.pack, batch.plan.text, platform)
    if vision is None or batch.pixels is None:
        return DeviceMicroBatch(None, None, text)
    pixels = _move(batch.pixels, platform).to(dtype)
    return DeviceMicroBatch(
        _vision_input(vision.share, pixels, platform), load_plan(vision.boundary, platform.device), text
    )


def _vision_input(share: EncoderShare, pixels: Tensor, platform: Platform) -> VisionInput:
    attention = AttentionPlan(
        full=Segments.of_pieces(share.pieces, platform.device, share.cp_lengths),
        sp_lengths=share.sp_lengths,
        cp_lengths=share.cp_lengths,
        windows=Segments.of(share.windows, platform.device),
    )
    return VisionInput(pixels, _move(share.positions, platform), attention)


def _text_input(pack: PackedBatch, share: TokenShare, platform: Platform) -> TextInput:
    """The tokens of this rank's shard, with the labels that belong to them."""
    labels = pack.labels[share.tokens]
    supervised = np.flatnonzero(labels != IGNORED)
    padding = share.padded - len(share.tokens)
    return TextInput(
        tokens=_move(np.pad(pack.input_ids[share.tokens], (0, padding), constant_values=PADDING_TOKEN), platform),
        positions=_move(pack.position_ids[:, share.tokens], platform),
        supervised=_move(supervised, platform),
        targets=_move(labels[supervised], platform),
        rows_at=_move(share.rows_at, platform),
        attention=AttentionPlan(
            full=Segments.of_pieces(share.pieces, platform.device, share.cp_lengths),
            sp_lengths=share.sp_lengths,
            cp_lengths=share.cp_lengths,
        ),
    )


def _move(values: np.ndarray | Tensor, platform: Platform) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(platform.device, non_blocking=True) if platform.is_cuda else tensor
