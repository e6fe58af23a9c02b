"""Micro-batches from the host to what the modules read on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.models.attention import AttentionPlan, Segments
from megatron_hetero.models.qwen2_5_vl.text import TextInput
from megatron_hetero.models.qwen2_5_vl.vision import VisionInput
from megatron_hetero.platform import Platform
from megatron_hetero.schedule.colocated import DeviceMicroBatch
from megatron_hetero.training.step_loader import MicroBatch, supervised_positions
from megatron_hetero.training.step_plan import EncoderShare


def to_device(batch: MicroBatch, platform: Platform, dtype: torch.dtype) -> DeviceMicroBatch:
    """Move one micro-batch; pixels arrive in `dtype`."""
    share = batch.plan.encoder
    return DeviceMicroBatch(
        vision=None if share is None else _vision_input(share, batch.pixels, platform, dtype),
        boundary=batch.plan.boundary,
        text=_text_input(batch, platform),
    )


def _vision_input(share: EncoderShare, pixels: np.ndarray, platform: Platform, dtype: torch.dtype) -> VisionInput:
    attention = AttentionPlan(
        full=Segments.of(share.sequences, platform.device),
        shard_lengths=share.shard_lengths,
        windows=Segments.of(share.windows, platform.device),
    )
    return VisionInput(_move(pixels, platform).to(dtype), _move(share.positions, platform), attention)


def _text_input(batch: MicroBatch, platform: Platform) -> TextInput:
    pack = batch.pack
    supervised = supervised_positions(pack)
    return TextInput(
        tokens=_move(pack.input_ids, platform),
        positions=_move(pack.position_ids[:, : pack.length], platform),
        supervised=_move(supervised, platform),
        targets=_move(pack.labels[supervised], platform),
        rows_at=_move(batch.plan.rows_at, platform),
        attention=AttentionPlan(Segments.of(np.diff(pack.cu_seqlens).tolist(), platform.device), (pack.length,)),
    )


def _move(array: np.ndarray, platform: Platform) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(platform.device, non_blocking=True) if platform.is_cuda else tensor
