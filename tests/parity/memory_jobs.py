"""What the workers of the pool run for the tests of the encoder's memory and traffic."""

from __future__ import annotations

from typing import Any

from benchmarks.measuring.encoder import Encoder, encoder_shape
from benchmarks.measuring.meter import total_bytes
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.items.pictures import ImageSize


def shape() -> VisionShape:
    """An encoder with one full-attention layer in eight, and one more, so that two layers communicate."""
    narrow = encoder_shape(hidden=64, layers=9, heads=4, out_hidden=48)
    assert narrow.full_layers == {7}
    return VisionShape(**{**vars(narrow), "full_layers": frozenset({3, 7})})


def measure(layout: str, grids: tuple[ImageSize, ...]) -> dict[str, Any]:
    """Saved activations (bytes), collectives by name, and bytes sent in one forward and backward pass."""
    encoder = Encoder.build(shape(), layout, grids, Platform(CPU, "gloo"))
    records = encoder.meter().records
    return {
        "saved": encoder.saved_activation_bytes(),
        "names": [record.name for record in records],
        "sent": total_bytes(records),
        "shard_lengths": encoder.shard_lengths,
    }
