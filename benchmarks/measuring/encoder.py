"""The vision encoder alone, forward and backward, in any layout."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measuring.meter import CollectiveMeter, SavedActivations
from megatron_hetero.data.device import encoder_input, to_device
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.groups.megatron import prepare, prepare_globals
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.layout import ModuleShape
from megatron_hetero.layout.modules import resolve
from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.items.pictures import ImageSize
from megatron_hetero.models.layers.backend import choose_backend
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.stages import EncoderInput, EncoderModel
from megatron_hetero.schedule.contract import MicroBatchInputs


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

    model: EncoderModel
    batch: EncoderInput
    shard_lengths: tuple[int, ...]
    platform: Platform
    grad: Tensor | None = None

    @classmethod
    def build(
        cls,
        shape: VisionShape,
        layout: str,
        grids: tuple[ImageSize, ...],
        platform: Platform,
        *,
        sequence_parallel: bool = True,
    ) -> Encoder:
        """For `grids`, the images of one replica, in `layout` over the whole world."""
        prepare(platform)
        prepare_globals(seed=0)
        module = ModuleShape("vision", shape.heads, shape.heads, shape.hidden, shape.layers, "encoder")
        layouts = resolve({"vision": layout}, {"vision": module}, dist.get_world_size())
        topology = Topology.build(layouts, platform)
        groups, backend = topology.collection("vision"), choose_backend("auto", platform)
        model = EncoderModel(shape, Site(groups, platform, backend, torch.float32, sequence_parallel))
        _fill(model)
        shards = EncoderShards(shape, layouts["vision"], sequence_parallel, grids, (tuple(range(len(grids))),))
        [share] = shards.shards(topology.rank)
        patches = torch.randn(share.local, shape.patch_elements, device=platform.device)
        inputs = MicroBatchInputs({"vision": encoder_input(share, patches)})
        batch = to_device(inputs, platform.device).inputs["vision"]
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
        return max(over_ranks(time.perf_counter() - start))

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
def _fill(model: EncoderModel) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02)
        elif not torch.isfinite(parameter).all() or parameter.abs().max() > 1:
            parameter.zero_()


def over_ranks(value: Any) -> list[Any]:
    """Every rank's value, by rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told
