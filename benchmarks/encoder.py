"""The vision encoder alone, forward and backward, under several layouts in the same processes."""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch.distributed as dist

from benchmarks.measuring.encoder import Encoder, encoder_shape, over_ranks
from benchmarks.measuring.meter import predicted_sp_bytes, total_bytes, total_seconds
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.items.pictures import ImageSize

SYSTEMS = {"sp": ("sp", True), "tp": ("tp", True), "tp, whole activations": ("tp", False)}
"""What is compared: the axis that covers all ranks, and whether activations are split over tp."""


class EncoderBench:
    """What the processes of the sweep run."""

    def __init__(self, platform: Platform):
        self.platform = platform

    def measure(self, hidden: int, layers: int, grid: ImageSize, rounds: int) -> dict[str, Any]:
        """One point of the sweep: all systems in turn, `rounds` times. Seconds; bytes per rank (the largest)."""
        shape, world = encoder_shape(hidden, layers), dist.get_world_size()
        encoders = {
            name: Encoder.build(shape, f"{axis}:{world}", (grid,), self.platform, sequence_parallel=split)
            for name, (axis, split) in SYSTEMS.items()
        }
        for encoder in encoders.values():
            encoder.forward_backward()
        times: dict[str, list[float]] = {name: [] for name in encoders}
        for turn in range(rounds):
            for name in list(encoders)[:: 1 if turn % 2 == 0 else -1]:
                times[name].append(encoders[name].seconds())
        predicted = predicted_sp_bytes(shape, encoders["sp"].shard_lengths, element_bytes=4)
        return {
            "hidden": hidden,
            "patches": grid[0] * grid[1] * grid[2],
            "flops": 3 * shape.cost(grid),
            "seconds": times,
            "traffic": {name: self._traffic(encoder) for name, encoder in encoders.items()},
            "predicted_sp_bytes": max(predicted),
            "as_predicted": all(over_ranks(total_bytes(encoders["sp"].meter().records) == predicted[dist.get_rank()])),
        }

    def _traffic(self, encoder: Encoder) -> dict[str, float]:
        meters = [encoder.meter(timed=True) for _ in range(3)]
        seconds = sorted(total_seconds(meter.records) for meter in meters)[1]
        return {
            "bytes": max(over_ranks(total_bytes(meters[0].records))),
            "collectives": len(meters[0].records),
            "seconds": mean(over_ranks(seconds)),
            "saved_activation_bytes": max(over_ranks(encoder.saved_activation_bytes())),
        }
