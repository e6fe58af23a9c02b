"""Model FLOPs utilisation of a step."""

from __future__ import annotations

from collections.abc import Collection

from megatron_hetero.data.step_loader import StepBatch
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.models.common.flops import (
    Passes,
    mfu,
    peak_flops,
    text_flops,
    vision_flops,
)
from megatron_hetero.models.family import EncoderShape
from megatron_hetero.models.items.types import Size
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.names import TEXT, parts_of


def utilisation(
    shapes: ModelShapes, freeze: Collection[str], batch: StepBatch, seconds: float, topology: Topology
) -> float | None:
    """The fraction of all devices' peak FLOPs that a step achieved; None if the device's peak is unknown."""
    name = topology.platform.device_name
    if peak_flops(name) is None:
        return None
    return mfu(step_flops(shapes, freeze, batch), seconds, topology.world_size, name)


def step_flops(shapes: ModelShapes, freeze: Collection[str], batch: StepBatch) -> int:
    """Model FLOPs of a step; those of encoders are counted per patch."""
    t = shapes.text
    text = t.flop_shape(t.layers, head=True)
    encoders_train = any(part not in freeze for name in shapes.encoders for part in parts_of(name))
    passes = Passes(inputs=encoders_train, weights=TEXT not in freeze)
    of_encoders = [_encoder_flops(name, shape, freeze, batch.sizes[name]) for name, shape in shapes.encoders.items()]
    return sum(of_encoders) + text_flops(text, batch.sample_lengths, batch.supervised, passes)


def _encoder_flops(name: str, v: EncoderShape, freeze: Collection[str], sizes: Collection[Size]) -> int:
    encoder_trains, projector_trains = (part not in freeze for part in parts_of(name))
    windows = [patches for size in sizes for patches in v.windows(size)]
    images = [patches for size in sizes for patches in v.sequences(size)]
    return vision_flops(
        v.flop_shape(range(v.layers), embeds=True),
        images,
        windows,
        Passes(inputs=encoder_trains, weights=encoder_trains),
        Passes(inputs=encoder_trains, weights=projector_trains),
    )
