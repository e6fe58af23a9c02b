"""Builds this rank's stages of a module of a model family, with their weights, sharded by its ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.base.errors import TEXT
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Share, WeightMap, WeightSource, load_slices
from megatron_hetero.layout.axes import MAIN, View
from megatron_hetero.layout.pipeline import PipelineStage, stages_of_rank
from megatron_hetero.models.layers.offload import ActivationOffload
from megatron_hetero.models.layers.parts import Backend, Site
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.stages import EncoderModel, TextModel
from megatron_hetero.models.weights import weight_map
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
    """Build this rank's part of a module, one value for each view of its layout.

    `every`: all pipeline stages of the module. `frozen`: stored tensors that do not train. `sharded`: whether the
    optimizer will be. `gradients`: dtype of their buffers. `offload`: where activations go, if they do not stay on the
    device.
    """
    layout = topology.layouts[name]
    coordinate, views = layout.coordinate(topology.rank), layout.every_view
    stages = stages_of_rank(every, coordinate.pp, layout.pp)
    site = Site(
        topology.collection(name), topology.platform, backend, dtype, sequence_parallel, recompute, compile_layers
    )
    of_views = [_maps(name, shapes, stages, topology, view) for view in views]
    own = [maps[topology.group(name, *view.part_axes).rank()] for view, maps in zip(views, of_views, strict=True)]
    of_stages = tuple(_joined(of_view[number] for of_view in own) for number in range(len(stages)))
    parts = _Parts(
        make=partial(TextModel if name == TEXT else EncoderModel, shapes[name], site, offload=offload),
        topology=topology,
        name=name,
        views=views,
        names=tuple(frozenset(each for of_stage in of_view for each in of_stage) for of_view in own),
        stages=stages,
        maps=of_stages,
        weights=weights,
        copies=shapes.text.architecture.stored_twice,
        trained=frozenset(each for of in of_stages for each, slices in of.items() if slices[0].name not in frozen),
        tied=next(filter(None, map(shapes[name].architecture.tied_parameter, stages)), None),
        gradients=gradients,
        adds_up=recompute.chunk > 0,
    )
    if shares_weights(zero, max(group.size() for group in parts.replicas), bool(parts.trained)):
        chunks, sharing = _fully_sharded(parts, zero)
    else:
        chunks, sharing = _replicated(parts, sharded=sharded, in_one_bucket=coordinate.pp > 0)
    numbers = tuple(coordinate.pp + i * layout.pp for i in range(len(stages)))
    return tuple(
        _of_view(parts, view, numbers, chunks, tuple(map(_joined, of_view)), data_parallel)
        for view, of_view, data_parallel in zip(views, of_views, sharing, strict=True)
    )


def _maps(
    name: str, shapes: ModelShapes, stages: Sequence[PipelineStage], topology: Topology, view: View
) -> list[list[WeightMap]]:
    """The weight map of each stage, for each rank that holds parts of a view's parameters."""
    holders = topology.group(name, *view.part_axes).size()
    shares = [Share(rank, holders) for rank in range(holders)]
    return [[weight_map(name, shapes, share, stage, view.name) for stage in stages] for share in shares]


def _joined(maps: Iterable[WeightMap]) -> WeightMap:
    return {each: slices for of in maps for each, slices in of.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class _Parts:
    """The ingredients of a module on this rank.

    `make`: builds the model of a stage. `names`: those of the parameters of each view. `maps`: the weight map of each
    stage. `copies`: what the folder may store a second time, and the original. `trained`: names of what trains. `tied`:
    the parameter of which another stage has a copy.
    """

    make: Callable[..., Any]
    topology: Topology
    name: str
    views: Sequence[View]
    names: tuple[frozenset[str], ...]
    stages: tuple[PipelineStage, ...]
    maps: tuple[WeightMap, ...]
    weights: WeightSource
    copies: Mapping[str, str]
    trained: frozenset[str]
    tied: str | None
    gradients: torch.dtype
    adds_up: bool

    @property
    def replicas(self) -> list[Any]:
        """The group of each view that sums its gradients."""
        return [self.topology.group(self.name, *view.sum_axes) for view in self.views]

    def named(self, chunks: Sequence[Any], names: Collection[str]) -> dict[str, torch.nn.Parameter]:
        """The parameters of all stages with these names."""
        of_stages = [named_parameters(model, stage) for model, stage in zip(chunks, self.stages, strict=True)]
        return {name: p for of_stage in of_stages for name, p in of_stage.items() if name in names}


def _of_view(
    parts: _Parts,
    view: View,
    numbers: tuple[int, ...],
    chunks: tuple[Any, ...],
    maps: tuple[WeightMap, ...],
    data_parallel: DataParallel,
) -> TrainedModule:
    over_tp: dict[str, OverTp] = {
        name: "sum" for name, p in data_parallel.parameters.items() if getattr(p, "sequence_parallel", False)
    }
    tied = parts.tied if view == MAIN else None
    return TrainedModule(
        *(parts.name, parts.topology, numbers, chunks, maps, data_parallel),
        over_tp=over_tp,
        tied=tied,
        tied_copy=None if any(stage.is_first for stage in parts.stages) else tied,
        view=view,
    )


def _replicated(parts: _Parts, *, sharded: bool, in_one_bucket: bool) -> tuple[tuple[Any, ...], Sequence[DataParallel]]:
    """The models of the stages, and how each view shares their parameters."""
    models = list[Any]()
    for stage, own_map in zip(parts.stages, parts.maps, strict=True):
        model = parts.make(stage=stage)
        load_parameters(model, own_map, parts.weights, stage, parts.copies)
        for name, parameter in named_parameters(model, stage).items():
            parameter.requires_grad_(name in parts.trained)
        models.append(model)
    chunks = tuple(models)
    if parts.tied is not None:
        # A bucket of its own: a sharded optimizer then cuts both copies alike, so that the ranks that hold the same
        # elements of both are those that differ in `pp` alone.
        tied = parts.named(chunks, {parts.tied})[parts.tied]
        tied.shared_embedding = True  # pyright: ignore[reportAttributeAccessIssue]
    return chunks, [
        Replicated.of(
            parts.name if view == MAIN else f"{parts.name}.{view.name}",
            parts.named(chunks, names),
            chunks,
            group,
            in_one_bucket=in_one_bucket,
            prefers_all_reduce=parts.topology.platform.prefers_all_reduce,
            sharded=sharded,
            gradients=parts.gradients,
            adds_up=parts.adds_up,
        )
        for view, group, names in zip(parts.views, parts.replicas, parts.names, strict=True)
    ]


def _fully_sharded(parts: _Parts, zero: int) -> tuple[tuple[Any, ...], Sequence[DataParallel]]:
    """The models of the stages, and how each view shares their parameters."""
    shards = list[tuple[ShardedStage, ...]]()
    of_views = list(zip(parts.replicas, parts.names, strict=True))
    for stage, own_map in zip(parts.stages, parts.maps, strict=True):
        with without_weights():
            model = parts.make(stage=stage)
        _require_same_names(named_parameters(model, stage), own_map)
        _require_equal_copies(own_map, parts.weights, parts.copies)
        load = partial(_load, own_map, parts.weights)
        device = parts.topology.platform.device
        shards.append(
            shard_stage(
                *(model, stage.global_name, of_views[0][0], device, load, parts.trained),
                gradients=parts.gradients,
                zero=zero,
                adds_up=parts.adds_up,
                further=of_views[1:],
            )
        )
    chunks = tuple(shard.model for shard, *_ in shards)
    return chunks, [
        FullySharded.of(parts.named(chunks, names), group, stages)
        for (group, names), stages in zip(of_views, zip(*shards, strict=True), strict=True)
    ]


def named_parameters(model: torch.nn.Module, stage: PipelineStage | None) -> dict[str, torch.nn.Parameter]:
    """The parameters of a stage (None: a whole module), by their names in the whole module."""
    return {name if stage is None else stage.global_name(name): p for name, p in model.named_parameters()}


def load_parameters(
    model: torch.nn.Module,
    own_map: WeightMap,
    weights: WeightSource,
    stage: PipelineStage | None,
    copies: Mapping[str, str],
) -> None:
    """Read each parameter's own slices. Parameters and map must have the same names.

    `copies`: what the folder may store a second time, and the original.
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
    """Check that copies in the folder of a tied model are equal, in the rows of this rank. Raises `UserError`."""
    slices = {tensor_slice for of_parameter in own_map.values() for tensor_slice in of_parameter}
    used = {tensor_slice.name for tensor_slice in slices}
    for copy, original in copies.items():
        if copy not in used and copy in weights.shapes and original in used:
            weights.require_copy(
                copy, original, [tensor_slice for tensor_slice in slices if tensor_slice.name == original]
            )
