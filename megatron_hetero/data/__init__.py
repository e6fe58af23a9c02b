"""LLaVA-style data: records, mixtures of data sets, the model's processor, and packing.

Nothing here knows about ranks: ``mixture[i]`` is the i-th sample of one infinite stream, whoever asks.
"""

from megatron_hetero.data.mixture import Mixture, RegistryEntry
from megatron_hetero.data.packing import PackedBatch, check_length, pack
from megatron_hetero.data.processing import Processor, TokenizedSample
from megatron_hetero.data.records import Annotations, Record, Turn

__all__ = [
    "Annotations",
    "Mixture",
    "PackedBatch",
    "Processor",
    "Record",
    "RegistryEntry",
    "TokenizedSample",
    "Turn",
    "check_length",
    "pack",
]
