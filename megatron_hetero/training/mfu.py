"""Model FLOPs utilisation of a step, and the peak rates of devices."""

from __future__ import annotations

from collections.abc import Collection

from megatron_hetero.data.step_loader import StepBatch
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.models.family import EncoderShape
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.items.types import Size
from megatron_hetero.models.layers.parts import Tokens
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.names import TEXT, parts_of


def utilisation(
    shapes: ModelShapes, frozen: Frozen, batch: StepBatch, seconds: float, topology: Topology
) -> float | None:
    """The fraction of all devices' peak FLOPs that a step achieved; None if the device's peak is unknown."""
    name = topology.platform.device_name
    if peak_flops(name) is None:
        return None
    return mfu(step_flops(shapes, frozen, batch), seconds, topology.world_size, name)


def step_flops(shapes: ModelShapes, frozen: Frozen, batch: StepBatch) -> int:
    """Model FLOPs of a step; those of encoders are counted per patch: by the rows that reach the language model most of
    their work would be missed. A part that is frozen is billed for what the gradients of the others need.
    """
    encoders_train = len(frozen.modules(shapes.encoders)) < len(shapes.encoders)
    passes = frozen.passes(TEXT, inputs=encoders_train or frozen.trains(TEXT))
    first = 0 if encoders_train else frozen.first_layer(shapes)
    of_encoders = [_encoder_flops(name, shape, frozen, batch.sizes[name]) for name, shape in shapes.encoders.items()]
    tokens = Tokens(batch.sample_lengths, supervised=batch.supervised)
    return sum(of_encoders) + shapes.text.architecture.operations(tokens, passes=passes, first=first)


def _encoder_flops(name: str, v: EncoderShape, frozen: Frozen, sizes: Collection[Size]) -> int:
    encoder, projector = parts_of(name)
    return v.architecture.operations(
        v.tokens(sizes),
        passes=frozen.passes(encoder, inputs=frozen.trains(encoder)),
        projector=frozen.passes(projector, inputs=frozen.trains(encoder)),
    )


# Dense bfloat16 operations per second, from the vendors' data sheets. The first entry whose words are all
# in the device's name counts, so longer names come first.
_PEAKS = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("GH200", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.4e12),
    ("H800", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364.2e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307.4e12),
    ("MI325X", 1307.4e12),
)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bfloat16 operations per second of a device, by the name that its driver reports.

    None where it is not known, as for CPUs and for slices of a device.
    """
    words = device_name.replace("-", " ").upper().split()
    if "MIG" in words:
        return None
    return next((peak for name, peak in _PEAKS if set(name.upper().split()) <= set(words)), None)


def mfu(flops: int, seconds: float, devices: int, device_name: str) -> float | None:
    """Model FLOPs utilisation: the share of all devices' peak that a step achieved; None where no peak is known."""
    peak = peak_flops(device_name)
    return None if peak is None or seconds <= 0 else flops / (seconds * devices * peak)
