"""Builds and loads this rank's stages of a module of a model family, sharded by the module's ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.weight_map import Share, WeightMap, WeightSource, load_slices
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.axes import MAIN, View
from megatron_hetero.layout.pipeline import PipelineStage, stages_of_rank
from megatron_hetero.models.layers.backend import choose_backend
from megatron_hetero.models.layers.linear import fuse_exchanges
from megatron_hetero.models.layers.offload import ActivationOffload
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.schedule.gathering import shares_weights
from megatron_hetero.step.buffers import in_buffers
from megatron_hetero.step.fully_sharded import ShardedStage, in_shards, shard_stage, without_weights
from megatron_hetero.step.module import ModuleGradients, ModuleWeights, TrainedModule


@dataclass(frozen=True)
class _RankView:
    """A view of a module's layout on this rank.

    Attributes:
        view: the view.
        group: the ranks with the same parameters.
        maps: for each rank with a different shard of the view's parameters, the weight map of each stage.
        local: the weight map of each stage on this rank.
    """

    view: View
    group: dist.ProcessGroup
    maps: tuple[tuple[WeightMap, ...], ...]
    local: tuple[WeightMap, ...]

    @classmethod
    def of(cls, module: ModuleJob, topology: Topology, view: View, stages: Sequence[PipelineStage]) -> _RankView:
        holders = topology.group(module.name, *view.shard_axes)
        shares = [Share(rank, holders.size()) for rank in range(holders.size())]
        maps = tuple(tuple(module.weight_map(share, stage, view.name) for stage in stages) for share in shares)
        return cls(view, topology.group(module.name, *view.sum_axes), maps, maps[holders.rank()])

    @cached_property
    def names(self) -> frozenset[str]:
        """The names in the whole module of this rank's parameters in the view."""
        return frozenset(_merged(self.local))


def build_module(module: ModuleJob, topology: Topology, weights: WeightSource) -> tuple[TrainedModule, ...]:
    """Build this rank's stages of a module, and return a `TrainedModule` for each view of its layout. Raises
    `UserError` for a backend that is not available on the platform, or weights that do not belong to the module.
    """
    layout, settings = module.layout, module.settings
    coordinate = layout.coordinate(topology.rank)
    stages = stages_of_rank(module.stages, coordinate.pp, layout.pp)
    views = [_RankView.of(module, topology, view, stages) for view in layout.every_view]
    maps = [_merged(views_of_stage) for views_of_stage in zip(*(view.local for view in views), strict=True)]
    frozen = {module.prefix + tensor for tensor in module.frozen}
    trained = frozenset(name for each in maps for name, slices in each.items() if slices[0].name not in frozen)
    shard = None
    if shares_weights(settings.zero, max(view.group.size() for view in views), bool(trained)):
        shard = _shard(module, topology, views, trained)
    platform = topology.platform
    site = module.site(topology.collection(module.name), platform, choose_backend(module.backend, platform))
    offload = ActivationOffload(platform) if settings.offload.activations else None
    copies = module.shape.architecture.stored_twice
    chunks, sharded_stages = list[Any](), list[tuple[ShardedStage, ...]]()
    for stage, weight_map in zip(stages, maps, strict=True):
        build = partial(_model, module, site, offload, stage)
        model, sharded_views = _build_stage(build, stage, weight_map, weights, copies, trained, shard)
        chunks.append(model)
        sharded_stages.append(sharded_views)
    parameters = {
        name: parameter
        for model, stage in zip(chunks, stages, strict=True)
        for name, parameter in named_parameters(model, stage).items()
    }
    tied = next(filter(None, map(module.shape.architecture.tied_parameter, stages)), None)
    if tied is not None and shard is None:
        # Give the parameter a separate bucket: a sharded optimizer then shards both copies equally, so that ranks that
        # differ only in `pp` update the same elements of both copies.
        parameters[tied].shared_embedding = True  # pyright: ignore[reportAttributeAccessIssue]
    trained_views = list[TrainedModule]()
    for number, view in enumerate(views):
        in_view = {name: parameter for name, parameter in parameters.items() if name in view.names}
        stages_in_view = None if shard is None else tuple(each[number] for each in sharded_stages)
        weights_in_view, gradients = _stored(module, topology, view, in_view, chunks, stages_in_view)
        is_main = view.view == MAIN
        trained_views.append(
            TrainedModule(
                name=module.name,
                topology=topology,
                stages=tuple(coordinate.pp + i * layout.pp for i in range(len(stages))),
                chunks=tuple(chunks),
                maps=tuple(map(_merged, view.maps)),
                weights=weights_in_view,
                gradients=gradients,
                over_tp={name: "sum" for name, p in in_view.items() if getattr(p, "sequence_parallel", False)},
                tied=tied if is_main else None,
                tied_copy=tied if is_main and not any(stage.is_first for stage in stages) else None,
                view=view.view,
            )
        )
    return tuple(trained_views)


def _shard(
    module: ModuleJob, topology: Topology, views: Sequence[_RankView], trained: Collection[str]
) -> Callable[..., tuple[ShardedStage, ...]]:
    """Return a function that shards a stage by the module's settings, given the model, a name function and `load`."""
    return partial(
        shard_stage,
        group=views[0].group,
        device=topology.platform.device,
        trained=trained,
        gradients=getattr(torch, module.settings.precision.gradients),
        zero=module.settings.zero,
        adds_up=_adds_up(module),
        further=[(view.group, view.names) for view in views[1:]],
    )


def _stored(
    module: ModuleJob,
    topology: Topology,
    view: _RankView,
    parameters: Mapping[str, torch.nn.Parameter],
    chunks: Sequence[Any],
    stages: tuple[ShardedStage, ...] | None,
) -> tuple[ModuleWeights, ModuleGradients]:
    """Return the weights and gradients of a view, in the sharded `stages` if given, else in new flat buffers."""
    key = module.name if view.view == MAIN else f"{module.name}.{view.view.name}"
    if stages is not None:
        return in_shards(key, parameters, view.group, stages)
    return in_buffers(
        key,
        parameters,
        chunks,
        view.group,
        in_one_bucket=module.layout.coordinate(topology.rank).pp > 0,
        prefers_all_reduce=topology.platform.prefers_all_reduce,
        sharded=module.optimizer.sharded,
        gradients=getattr(torch, module.settings.precision.gradients),
        adds_up=_adds_up(module),
    )


def _adds_up(module: ModuleJob) -> bool:
    """Return whether a backward pass computes several gradients of a parameter, one for each chunk of tokens."""
    return module.recompute.chunk > 0


def _model(module: ModuleJob, site: Site, offload: ActivationOffload | None, stage: PipelineStage) -> Any:
    """Build the model of a stage. With `tp_overlap`, its layers fuse exchanges over tp with their products."""
    model = module.model(site, stage, offload)
    if module.settings.tp_overlap:
        fuse_exchanges(model, gpu=site.platform.is_cuda)
    return model


def _merged(maps: Iterable[WeightMap]) -> WeightMap:
    return {name: slices for weight_map in maps for name, slices in weight_map.items()}


def _build_stage(
    build: Callable[[], Any],
    stage: PipelineStage,
    weight_map: WeightMap,
    weights: WeightSource,
    copies: Mapping[str, str],
    trained: Collection[str],
    shard: Callable[..., tuple[ShardedStage, ...]] | None,
) -> tuple[Any, tuple[ShardedStage, ...]]:
    """Build the model of a stage and load its weights, sharded by `shard` if it is given. Returns the model, and the
    sharded stage in each view.
    """
    if shard is None:
        model = build()
        load_parameters(model, weight_map, weights, stage, copies)
        for name, parameter in named_parameters(model, stage).items():
            parameter.requires_grad_(name in trained)
        return model, ()
    with without_weights():
        model = build()
    _require_same_names(named_parameters(model, stage), weight_map)
    _require_equal_copies(weight_map, weights, copies)
    return model, shard(model, stage.global_name, load=partial(_load, weight_map, weights))


def named_parameters(model: torch.nn.Module, stage: PipelineStage | None) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `model` by their names in the whole module. `stage`: None for a whole module."""
    return {name if stage is None else stage.global_name(name): p for name, p in model.named_parameters()}


def load_parameters(
    model: torch.nn.Module,
    weight_map: WeightMap,
    weights: WeightSource,
    stage: PipelineStage | None,
    copies: Mapping[str, str],
) -> None:
    """Load each parameter of a stage from `weights`. The parameters and the weight map must have the same names.

    `copies`: names of tensors that the folder may store as copies, and of their originals. Raises `UserError`.
    """
    parameters = named_parameters(model, stage)
    _require_same_names(parameters, weight_map)
    for name, parameter in parameters.items():
        _load(weight_map, weights, name, parameter)
    _require_equal_copies(weight_map, weights, copies)


def _load(weight_map: WeightMap, weights: WeightSource, name: str, parameter: Tensor) -> None:
    load_slices(parameter, weight_map[name], [weights.read(tensor_slice) for tensor_slice in weight_map[name]])


def _require_same_names(parameters: Collection[str], weight_map: WeightMap) -> None:
    missing, unexpected = set(parameters) - weight_map.keys(), weight_map.keys() - set(parameters)
    assert not missing and not unexpected, f"weight map: missing {sorted(missing)}, unexpected {sorted(unexpected)}"


def _require_equal_copies(weight_map: WeightMap, weights: WeightSource, copies: Mapping[str, str]) -> None:
    """Check that stored copies of tied tensors equal the originals in this rank's rows. Raises `UserError`."""
    slices = {tensor_slice for parameter_slices in weight_map.values() for tensor_slice in parameter_slices}
    used = {tensor_slice.name for tensor_slice in slices}
    for copy, original in copies.items():
        if copy not in used and copy in weights.shapes and original in used:
            weights.require_copy(
                copy, original, [tensor_slice for tensor_slice in slices if tensor_slice.name == original]
            )
