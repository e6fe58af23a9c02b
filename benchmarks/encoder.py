"""The vision encoder alone, forward and backward, under several layouts in the same processes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.meter import CollectiveMeter, SavedActivations, predicted_sp_bytes, total_bytes, total_seconds
from megatron_hetero.batch.step_plan import EncoderShards
from megatron_hetero.distributed.megatron import prepare_globals
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.layout.layout import ModuleShape, resolve
from megatron_hetero.models.common.attention import AttentionPlan, Segments
from megatron_hetero.models.common.backend import spec_provider
from megatron_hetero.models.common.inputs import EncoderInput
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.qwen2_5_vl.vision import VisionModel
from megatron_hetero.sharding.items import Size

SYSTEMS = {"sp": ("sp", True), "tp": ("tp", True), "tp, whole activations": ("tp", False)}
"""What is compared: the axis that covers all ranks, and whether activations are split over tp."""


def encoder_shape(hidden: int, layers: int = 8, heads: int = 16, out_hidden: int = 256) -> VisionShape:
    """Qwen2.5-VL's proportions at another width.

    An MLP of 2.67 x hidden, one layer in eight with full attention, 8 x 8 patches a window.
    """
    return VisionShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=round(hidden * 3420 / 1280 / 4) * 4,
        channels=3,
        patch=14,
        temporal_patch=2,
        merge=2,
        window=4,
        full_layers=frozenset(range(7, layers, 8)) or frozenset({layers - 1}),
        out_hidden=out_hidden,
        rope_theta=10000.0,
    )


@dataclass
class Encoder:
    """One rank's part of an encoder in one layout, with random weights and the patches of random images."""

    model: VisionModel
    batch: EncoderInput
    shard_lengths: tuple[int, ...]
    platform: Platform
    grad: Tensor | None = None

    @classmethod
    def build(
        cls,
        shape: VisionShape,
        layout: str,
        grids: tuple[Size, ...],
        platform: Platform,
        *,
        sequence_parallel: bool = True,
    ) -> Encoder:
        """For `grids`, the images of one replica, in `layout` over the whole world."""
        platform.prepare_megatron()
        prepare_globals(seed=0)
        module = ModuleShape("vision", shape.heads, shape.heads, shape.hidden, shape.layers, "encoder")
        layouts = resolve({"vision": layout}, {"vision": module}, dist.get_world_size())
        topology = Topology.build(layouts, platform)
        model = VisionModel(
            shape,
            topology.collection("vision"),
            platform,
            spec_provider("auto", platform),
            dtype=torch.float32,
            sequence_parallel=sequence_parallel,
            recompute="none",
        )
        _fill(model)
        shards = EncoderShards(shape, layouts["vision"], sequence_parallel, grids, (tuple(range(len(grids))),))
        share = shards.share(topology.rank)
        patches = shards.ownership().num_rows(topology.rank) * shape.unit + share.padding
        device = platform.device
        batch = EncoderInput(
            torch.randn(patches, shape.patch_elements, device=device),
            torch.from_numpy(share.positions).to(device),
            AttentionPlan(
                full=Segments.of_pieces(share.pieces, device, share.cp_lengths),
                sp_lengths=share.sp_lengths,
                cp_lengths=share.cp_lengths,
                windows=Segments.of(share.windows, device),
            ),
            share.padding,
        )
        return cls(model, batch, share.sp_lengths, platform)

    def forward_backward(self) -> None:
        """One pass each way. The gradient of the rows is random, made once."""
        rows = self.model(self.batch)
        if self.grad is None:
            self.grad = torch.randn_like(rows)
        rows.backward(self.grad)
        self.model.zero_grad(set_to_none=True)

    def seconds(self) -> float:
        """Of one pass, on the slowest rank; all start together."""
        dist.barrier()
        start = time.perf_counter()
        self.forward_backward()
        self.platform.synchronize()
        return max(_everybodys(time.perf_counter() - start))

    def meter(self, *, timed: bool = False) -> CollectiveMeter:
        """The collectives of one pass."""
        meter = CollectiveMeter(timed=timed)
        with meter:
            self.forward_backward()
        return meter

    def saved_activation_bytes(self) -> int:
        """What this rank keeps for its backward pass, without parameters."""
        with SavedActivations(list(self.model.parameters())) as saved:
            rows = self.model(self.batch)
        rows.sum().backward()
        self.model.zero_grad(set_to_none=True)
        return saved.bytes


@torch.no_grad()
def _fill(model: VisionModel) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
        elif not torch.isfinite(parameter).all() or parameter.abs().max() > 1:
            parameter.zero_()


def _everybodys(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


class EncoderBench:
    """What the processes of the sweep run."""

    def __init__(self, platform: Platform):
        self.platform = platform

    def measure(self, hidden: int, layers: int, grid: Size, rounds: int) -> dict[str, Any]:
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
            "as_predicted": all(_everybodys(total_bytes(encoders["sp"].meter().records) == predicted[dist.get_rank()])),
        }

    def _traffic(self, encoder: Encoder) -> dict[str, float]:
        meters = [encoder.meter(timed=True) for _ in range(3)]
        seconds = sorted(total_seconds(meter.records) for meter in meters)[1]
        return {
            "bytes": max(_everybodys(total_bytes(meters[0].records))),
            "collectives": len(meters[0].records),
            "seconds": mean(_everybodys(seconds)),
            "saved_activation_bytes": max(_everybodys(encoder.saved_activation_bytes())),
        }
