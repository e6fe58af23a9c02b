"""Builds a module of a model family: the stages of this rank, their weights read, shared as its ZeRO stage says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import TEXT
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Share, WeightMap, WeightSource, held, load_slices
from megatron_hetero.layout.axes import MAIN, View
from megatron_hetero.layout.stages import PipelineStage, stages_of_rank
from megatron_hetero.models.layers.offload import ActivationOffload
from megatron_hetero.models.layers.parts import Backend, Site
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.stages import EncoderModel, TextModel
from megatron_hetero.models.weights import tied_parameter, weight_map
from megatron_hetero.schedule.gathering import shares_weights
from megatron_hetero.step.data_parallel import DataParallel, Replicated
from megatron_hetero.step.fully_sharded import FullySharded, ShardedStage, shard_stage, without_weights
from megatron_hetero.step.module import OverTp, TrainedModule


def build_module(
    name: str,
    shapes: ModelShapes,
    every: Sequence[PipelineStage],
    topology: Topology,
    backend: Backend,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: Recompute,
    frozen: Collection[str],
    sharded: bool,
    zero: int,
    gradients: torch.dtype,
    weights: WeightSource,
    offload: ActivationOffload | None = None,
    compile_layers: bool = False,
) -> tuple[TrainedModule, ...]:
    """Build this rank's part of `name`, one value for each view of its layout: the stages that it holds, with their
    weights read, and buffers of gradients of the dtype `gradients`. `every`: the pipeline stages of the module.
    `frozen`: the stored tensors that do not train. `sharded`: whether its optimizer will be. `zero`: the ZeRO stage.
    `offload`: where activations go, if they do not stay on the device. `compile_layers`: see `Site`.
    """
    groups, layout = topology.collection(name), topology.layouts[name]
    coordinate, views = layout.coordinate(topology.rank), layout.every_view
    stages = stages_of_rank(every, coordinate.pp, layout.pp)
    site = Site(groups, topology.platform, backend, dtype, sequence_parallel, recompute, compile_layers)
    make = partial(TextModel if name == TEXT else EncoderModel, shapes[name], site, offload=offload)
    of_views = [_maps(name, shapes, stages, topology, view) for view in views]
    own = [maps[topology.group(name, *view.part_axes).rank()] for view, maps in zip(views, of_views, strict=True)]
    of_stages = tuple(_joined(of_view[number] for of_view in own) for number in range(len(stages)))
    parts = _Parts(
        make,
        stages,
        of_stages,
        weights,
        shapes.text.architecture.stored_twice,
        frozenset(each for of in of_stages for each, slices in of.items() if slices[0].name not in frozen),
        next(filter(None, map(shapes[name].architecture.tied_parameter, stages)), None),
    )
    adds_up, replicas = recompute.chunk > 0, [topology.group(name, *view.sum_axes) for view in views]
    names = [frozenset(each for of_stage in of_view for each in of_stage) for of_view in own]
    if shares_weights(zero, max(group.size() for group in replicas), bool(parts.trained)):
        of_groups = list(zip(replicas, names, strict=True))
        chunks, sharing = _fully_sharded(parts, of_groups, topology.platform, gradients, zero, adds_up=adds_up)
    else:
        chunks = _replicated(parts)
        sharing = [
            Replicated.of(
                name if view == MAIN else f"{name}.{view.name}",
                parts.named(chunks, of_view),
                chunks,
                group,
                in_one_bucket=coordinate.pp > 0,
                prefers_all_reduce=topology.platform.prefers_all_reduce,
                sharded=sharded,
                gradients=gradients,
                adds_up=adds_up,
            )
            for view, group, of_view in zip(views, replicas, names, strict=True)
        ]
    numbers = tuple(coordinate.pp + i * layout.pp for i in range(len(stages)))
    copy = None if any(stage.is_first for stage in stages) else parts.tied
    found = []
    for view, of_view, data_parallel in zip(views, of_views, sharing, strict=True):
        maps = tuple(map(_joined, of_view))
        over_tp: dict[str, OverTp] = {
            each: "sum"
            for each, parameter in data_parallel.parameters.items()
            if getattr(parameter, "sequence_parallel", False)
        }
        tied, tied_copy = (parts.tied, copy) if view == MAIN else (None, None)
        of_parameters = data_parallel.parameters, data_parallel, over_tp, tied, tied_copy, view
        found.append(TrainedModule(name, topology, numbers, chunks, maps, held(maps), *of_parameters))
    return tuple(found)


def _maps(
    name: str, shapes: ModelShapes, stages: Sequence[PipelineStage], topology: Topology, view: View
) -> list[list[WeightMap]]:
    """For each rank that holds parts of a view's parameters the weight map of each stage."""
    holders = topology.group(name, *view.part_axes).size()
    shares = [Share(rank, holders) for rank in range(holders)]
    return [[weight_map(name, shapes, share, stage, view.name) for stage in stages] for share in shares]


def _joined(maps: Iterable[WeightMap]) -> WeightMap:
    return {each: slices for of in maps for each, slices in of.items()}


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a module is made of on this rank: a constructor of stages, these, the weight map of each, where weights come
    from, what is stored a second time there, the names of what trains, and of what another stage holds a copy of.
    """

    make: Callable[..., Any]
    stages: tuple[PipelineStage, ...]
    maps: tuple[WeightMap, ...]
    weights: WeightSource
    copies: Mapping[str, str]
    trained: frozenset[str]
    tied: str | None

    def named(self, chunks: Sequence[Any], names: Collection[str]) -> dict[str, torch.nn.Parameter]:
        """Those parameters of all stages that have these names."""
        of_stages = [named_parameters(model, stage) for model, stage in zip(chunks, self.stages, strict=True)]
        return {name: p for of_stage in of_stages for name, p in of_stage.items() if name in names}


def _replicated(parts: _Parts) -> tuple[Any, ...]:
    chunks = []
    for stage, own_map in zip(parts.stages, parts.maps, strict=True):
        model = parts.make(stage=stage)
        load_parameters(model, own_map, parts.weights, stage, parts.copies)
        for of_stage, parameter in named_parameters(model, stage).items():
            parameter.requires_grad_(of_stage in parts.trained)
        chunks.append(model)
    if parts.tied is not None:
        # A bucket of its own: a sharded optimizer then cuts both copies alike, so that the ranks that hold the same
        # elements of both are those that differ in `pp` alone.
        tied = parts.named(chunks, {parts.tied})[parts.tied]
        tied.shared_embedding = True  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(chunks)


def _fully_sharded(
    parts: _Parts,
    views: Sequence[tuple[dist.ProcessGroup, Collection[str]]],
    platform: Platform,
    gradients: torch.dtype,
    zero: int,
    *,
    adds_up: bool,
) -> tuple[tuple[Any, ...], Sequence[DataParallel]]:
    """`views`: by view the ranks that share its parameters, and their names; the main view first."""
    shards = list[tuple[ShardedStage, ...]]()
    for stage, own_map in zip(parts.stages, parts.maps, strict=True):
        with without_weights():
            model = parts.make(stage=stage)
        _require_same_names(named_parameters(model, stage), own_map)
        _require_equal_copies(own_map, parts.weights, parts.copies)
        load = partial(_load, own_map, parts.weights)
        shards.append(
            shard_stage(
                *(model, stage.global_name, views[0][0], platform.device, load, parts.trained),
                gradients=gradients,
                zero=zero,
                adds_up=adds_up,
                further=views[1:],
            )
        )
    chunks = tuple(shard.model for shard, *_ in shards)
    of_views = zip(views, zip(*shards, strict=True), strict=True)
    return chunks, [FullySharded(parts.named(chunks, own), group, stages) for (group, own), stages in of_views]


def named_parameters(model: torch.nn.Module, stage: PipelineStage | None) -> dict[str, torch.nn.Parameter]:
    """The parameters of one stage (or a whole module, None) by the names that they have in the whole module."""
    return {name if stage is None else stage.global_name(name): p for name, p in model.named_parameters()}


def load_parameters(
    model: torch.nn.Module,
    own_map: WeightMap,
    weights: WeightSource,
    stage: PipelineStage | None,
    copies: Mapping[str, str],
) -> None:
    """Read each parameter's own slices. Parameters and map must have the same names.

    `copies`: what the folder may store a second time, and the tensor of which it is a copy.
    """
    parameters = named_parameters(model, stage)
    _require_same_names(parameters, own_map)
    for name, parameter in parameters.items():
        _load(own_map, weights, name, parameter)
    _require_equal_copies(own_map, weights, copies)


def _load(own_map: WeightMap, weights: WeightSource, name: str, parameter: Tensor) -> None:
    load_slices(parameter, own_map[name], [weights.read(tensor_slice) for tensor_slice in own_map[name]])


def _require_same_names(parameters: Collection[str], own_map: WeightMap) -> None:
    missing, unexpected = set(parameters) - own_map.keys(), own_map.keys() - set(parameters)
    assert not missing and not unexpected, f"weight map: missing {sorted(missing)}, unexpected {sorted(unexpected)}"


def _require_equal_copies(own_map: WeightMap, weights: WeightSource, copies: Mapping[str, str]) -> None:
    """Check what a folder of a tied model stores twice, in the rows that this rank holds. Raises `UserError`."""
    slices = {tensor_slice for of_parameter in own_map.values() for tensor_slice in of_parameter}
    used = {tensor_slice.name for tensor_slice in slices}
    for copy, original in copies.items():
        if copy not in used and copy in weights.shapes and original in used:
            weights.require_copy(
                copy, original, [tensor_slice for tensor_slice in slices if tensor_slice.name == original]
            )
