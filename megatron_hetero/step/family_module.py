"""Builds a module of a model family: the stages of this rank, their weights read, shared as its ZeRO stage says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.distributed.communicators import GRADIENT_AXES
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.execution.gathering import shares_weights
from megatron_hetero.hf.weight_map import WeightMap, WeightSource, held, load_slices
from megatron_hetero.layout.stages import Stage, stages_of_rank
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.models.layers.parts import Backend, Site
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.stages.encoder import EncoderModel
from megatron_hetero.models.stages.text import TextModel
from megatron_hetero.models.weights import tied_parameter, weight_map
from megatron_hetero.names import TEXT
from megatron_hetero.step.data_parallel import DataParallel, Replicated
from megatron_hetero.step.fully_sharded import FullySharded, shard_stage, without_weights
from megatron_hetero.step.module import TrainedModule


def build_module(
    name: str,
    shapes: ModelShapes,
    every: Sequence[Stage],
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
) -> TrainedModule:
    """Build this rank's part of `name`: in its layout the stages that it holds, their weights read, and with buffers of
    `gradients`, that dtype. `every`: the pipeline stages of the module. `frozen`: the stored tensors that do not train.
    `sharded`: whether its optimizer will be. `zero`: the ZeRO stage. `offload`: where activations go, if they do not
    stay on the device. `compile_layers`: see `Site`.
    """
    groups, layout = topology.collection(name), topology.layouts[name]
    tp, coordinate = layout.tp, layout.coordinate(topology.rank)
    stages = stages_of_rank(every, coordinate.pp, layout.pp)
    site = Site(groups, topology.platform, backend, dtype, sequence_parallel, recompute, compile_layers)
    make = partial(TextModel if name == TEXT else EncoderModel, shapes[name], site, offload=offload)
    of_stages = [[weight_map(name, shapes, rank, tp, stage) for stage in stages] for rank in range(tp)]
    maps = tuple({each: slices for of in of_rank for each, slices in of.items()} for of_rank in of_stages)
    parts = _Parts(
        make,
        stages,
        tuple(of_stages[coordinate.tp]),
        weights,
        shapes.text.architecture.stored_twice,
        frozenset(each for each, slices in maps[0].items() if slices[0].name not in frozen),
        next(filter(None, (tied_parameter(name, shapes, stage) for stage in stages)), None),
    )
    adds_up, replicas = recompute.chunk > 0, topology.group(name, *GRADIENT_AXES)
    if shares_weights(zero, replicas.size(), bool(parts.trained)):
        chunks, data_parallel = _fully_sharded(parts, replicas, topology.platform, gradients, zero, adds_up=adds_up)
    else:
        chunks = _replicated(parts)
        data_parallel = Replicated.of(
            *(name, parts.named(chunks), chunks, replicas),
            in_one_bucket=coordinate.pp > 0,
            prefers_all_reduce=topology.platform.prefers_all_reduce,
            sharded=sharded,
            gradients=gradients,
            adds_up=adds_up,
        )
    return TrainedModule(
        name,
        topology,
        tuple(coordinate.pp + i * layout.pp for i in range(len(stages))),
        chunks,
        maps,
        held(maps),
        data_parallel.parameters,
        data_parallel,
        {
            each: "sum"
            for each, parameter in data_parallel.parameters.items()
            if getattr(parameter, "sequence_parallel", False)
        },
        parts.tied,
        None if any(stage.is_first for stage in stages) else parts.tied,
    )


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a module is made of on this rank: a constructor of stages, these, the weight map of each, where weights come
    from, what is stored a second time there, the names of what trains, and of what another stage holds a copy of.
    """

    make: Callable[..., Any]
    stages: tuple[Stage, ...]
    maps: tuple[WeightMap, ...]
    weights: WeightSource
    copies: Mapping[str, str]
    trained: frozenset[str]
    tied: str | None

    def named(self, chunks: Sequence[Any]) -> dict[str, torch.nn.Parameter]:
        """The parameters of all stages."""
        of_stages = zip(chunks, self.stages, strict=True)
        return {name: p for model, stage in of_stages for name, p in named_parameters(model, stage).items()}


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
        parts.named(chunks)[parts.tied].shared_embedding = True  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(chunks)


def _fully_sharded(
    parts: _Parts,
    replicas: dist.ProcessGroup,
    platform: Platform,
    gradients: torch.dtype,
    zero: int,
    *,
    adds_up: bool,
) -> tuple[tuple[Any, ...], DataParallel]:
    shards = []
    for stage, own_map in zip(parts.stages, parts.maps, strict=True):
        with without_weights():
            model = parts.make(stage=stage)
        _require_same_names(named_parameters(model, stage), own_map)
        _require_equal_copies(own_map, parts.weights, parts.copies)
        load = partial(_load, own_map, parts.weights)
        shards.append(
            shard_stage(
                *(model, stage.global_name, replicas, platform.device, load, parts.trained),
                gradients=gradients,
                zero=zero,
                adds_up=adds_up,
            )
        )
    chunks = tuple(shard.model for shard in shards)
    return chunks, FullySharded(parts.named(chunks), replicas, tuple(shards))


def named_parameters(model: torch.nn.Module, stage: Stage | None) -> dict[str, torch.nn.Parameter]:
    """The parameters of one stage (or a whole module, None) by the names that they have in the whole module."""
    return {name if stage is None else stage.global_name(name): p for name, p in model.named_parameters()}


def load_parameters(
    model: torch.nn.Module,
    own_map: WeightMap,
    weights: WeightSource,
    stage: Stage | None,
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
