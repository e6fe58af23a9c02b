"""A module of the model as it is trained: weights, data-parallel buffers, optimizer, and what it holds in common with
others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hetero.distributed.topology import Topology
from megatron_hetero.hf.weight_map import Held, WeightMap, WeightSource, held, load_slices
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.common.parameters import TIED_COPIES
from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import group_of, tied_parameter, weight_map
from megatron_hetero.names import TEXT
from megatron_hetero.sharding.stages import Stage, stages_of_rank


@dataclass(frozen=True, eq=False)
class TrainedModule:
    """One module on this rank.

    `stages`: the pipeline stages that this rank holds, and `chunks`: the model of each of them. `maps`, `held`: for
    each rank of its tensor-parallel group the weight map, and how often that group holds each parameter. `ddp` is None
    where every parameter is frozen. `tied`: the parameter of which another stage holds a copy, if any. Parameters are
    named as in the whole module.
    """

    name: str
    stages: tuple[Stage, ...]
    chunks: tuple[Any, ...]
    groups: ProcessGroupCollection
    maps: tuple[WeightMap, ...]
    held: tuple[Mapping[str, Held], ...]
    ddp: DistributedDataParallel | None
    tied: str | None

    @cached_property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """This rank's parameters by name."""
        of_stages = zip(self.chunks, self.stages, strict=True)
        return {name: p for model, stage in of_stages for name, p in named_parameters(model, stage).items()}

    @property
    def tied_copy(self) -> str | None:
        """The parameter of this rank that counts on another stage, if any: the head of a tied model."""
        return None if any(stage.is_first for stage in self.stages) else self.tied

    @cached_property
    def owned(self) -> Mapping[str, tuple[int, int]]:
        """Of each trained parameter the flat range whose reduced gradient this rank has, and whose weights it updates:
        with a sharded optimizer what lies in this rank's part of the parameter's bucket, else all of it.
        """
        if self.ddp is None:
            return {}
        ranges: dict[int, tuple[int, int]] = {}
        for buffer in self.ddp.buffers:  # pyright: ignore[reportGeneralTypeIssues]
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel()
                share = size // self.groups.dp_cp.size() if self.sharded else size
                low = bucket.offset + (share * self.groups.dp_cp.rank() if self.sharded else 0)
                for parameter in bucket.params:
                    start, stop, _ = buffer.param_index_map[parameter]
                    first = min(max(start, low), stop)
                    ranges[id(parameter)] = first - start, max(first, min(stop, low + share)) - start
        return {name: ranges[id(p)] for name, p in self.parameters.items() if p.requires_grad}

    @property
    def sharded(self) -> bool:
        """Whether the ranks that hold the same weights share their optimizer, each a part (ZeRO stage 1)."""
        return self.ddp is not None and self.ddp.ddp_config.use_distributed_optimizer

    @property
    def own_map(self) -> WeightMap:
        """The weight map of this rank."""
        return self.maps[self.groups.tp.rank()]

    @property
    def own_held(self) -> Mapping[str, Held]:
        """How often the tensor-parallel group holds each of this rank's parameters."""
        return self.held[self.groups.tp.rank()]


def build_module(
    name: str,
    shapes: ModelShapes,
    every: Sequence[Stage],
    topology: Topology,
    provider: BackendSpecProvider,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: Recompute,
    freeze: Collection[str],
    sharded: bool,
    gradients: torch.dtype,
    weights: WeightSource,
    offload: ActivationOffload | None = None,
) -> TrainedModule:
    """Build this rank's part of `name`: in its layout the stages that it holds, their weights read, what is to be
    frozen frozen, and with buffers of `gradients`, that dtype. `every`: the pipeline stages of the module. `sharded`:
    whether its optimizer will be. `offload`: where activations go, if they do not stay on the device.
    """
    groups = topology.collection(name)
    tp, tp_rank = groups.tp.size(), groups.tp.rank()
    stages = stages_of_rank(every, groups.pp.rank(), topology.layouts[name].pp)
    chunks, copies = [], TIED_COPIES if shapes.text.tied else {}
    family = family_of(shapes[name].family)
    kind = family.text_model() if name == TEXT else family.encoder_model()
    for stage in stages:
        model = kind(
            shapes[name],
            groups,
            topology.platform,
            provider,
            dtype=dtype,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            stage=stage,
            offload=offload,
        )
        load_parameters(model, weight_map(name, shapes, tp_rank, tp, stage), weights, stage, copies)
        _freeze(name, model, freeze)
        chunks.append(model)
    tied = _mark_tied(name, shapes, stages, chunks)
    maps = tuple(_map_of_stages(name, shapes, rank, tp, stages) for rank in range(tp))
    ddp = _data_parallel(chunks, groups, sharded, gradients)
    return TrainedModule(name, stages, tuple(chunks), groups, maps, held(maps), ddp, tied)


def named_parameters(model: torch.nn.Module, stage: Stage | None) -> dict[str, torch.nn.Parameter]:
    """The parameters of one stage (or a whole module, None) by the names that they have in the whole module."""
    return {name if stage is None else stage.global_name(name): p for name, p in model.named_parameters()}


def load_parameters(
    model: torch.nn.Module,
    own_map: WeightMap,
    weights: WeightSource,
    stage: Stage | None = None,
    copies: Mapping[str, str] = TIED_COPIES,
) -> None:
    """Read each parameter's own slices. Parameters and map must have the same names.

    `copies`: what the folder may store a second time, and the tensor of which it is a copy.
    """
    parameters = named_parameters(model, stage)
    missing, unexpected = parameters.keys() - own_map.keys(), own_map.keys() - parameters.keys()
    assert not missing and not unexpected, f"weight map: missing {sorted(missing)}, unexpected {sorted(unexpected)}"
    for name, slices in own_map.items():
        load_slices(parameters[name], slices, [weights.read(tensor_slice) for tensor_slice in slices])
    _require_equal_copies(own_map, weights, copies)


def _map_of_stages(name: str, shapes: ModelShapes, tp_rank: int, tp: int, stages: Sequence[Stage]) -> WeightMap:
    of_stages = [weight_map(name, shapes, tp_rank, tp, stage) for stage in stages]
    return {parameter: slices for of_stage in of_stages for parameter, slices in of_stage.items()}


def _mark_tied(name: str, shapes: ModelShapes, stages: Sequence[Stage], chunks: Sequence[Any]) -> str | None:
    """The parameter of these stages of which another rank holds a copy, marked for Megatron."""
    for stage, model in zip(stages, chunks, strict=True):
        tied = tied_parameter(name, shapes, stage)
        if tied is not None:
            # A bucket of its own: the distributed optimizer then cuts both copies alike, so that the ranks that hold
            # the same elements of both are those that differ in `pp` alone.
            named_parameters(model, stage)[tied].shared_embedding = True  # pyright: ignore[reportAttributeAccessIssue]
            return tied
    return None


def _require_equal_copies(own_map: WeightMap, weights: WeightSource, copies: Mapping[str, str]) -> None:
    """Check what a folder of a tied model stores twice, in the rows that this rank holds. Raises `UserError`."""
    slices = {tensor_slice for of_parameter in own_map.values() for tensor_slice in of_parameter}
    used = {tensor_slice.name for tensor_slice in slices}
    for copy, original in copies.items():
        if copy not in used and copy in weights.shapes and original in used:
            weights.require_copy(
                copy, original, [tensor_slice for tensor_slice in slices if tensor_slice.name == original]
            )


def _freeze(module: str, model: torch.nn.Module, freeze: Collection[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(group_of(module, name) not in freeze)


def _data_parallel(
    chunks: Sequence[Any], groups: ProcessGroupCollection, sharded: bool, gradients: torch.dtype
) -> DistributedDataParallel | None:
    model = chunks[0] if len(chunks) == 1 else torch.nn.ModuleList(chunks)
    if not any(p.requires_grad for p in model.parameters()):
        return None
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=gradients == torch.float32, use_distributed_optimizer=sharded, overlap_grad_reduce=False
    )
    return DistributedDataParallel(chunks[0].config, config, model, pg_collection=groups)
