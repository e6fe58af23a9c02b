"""A module of the model as it is trained: its part on this rank, and what that has in common with other ranks'."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_hetero.distributed.platform import Platform
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.engine.data_parallel import DataParallel, Replicated
from megatron_hetero.engine.fully_sharded import FullySharded, shard_stage, without_weights
from megatron_hetero.execution.gathering import shares_weights
from megatron_hetero.hf.weight_map import Held, WeightMap, WeightSource, held, load_slices
from megatron_hetero.layout.stages import Stage, stages_of_rank
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.common.parameters import TIED_COPIES
from megatron_hetero.models.common.recompute.policy import Recompute
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import group_of, tied_parameter, weight_map
from megatron_hetero.names import TEXT


@dataclass(frozen=True, eq=False)
class TrainedModule:
    """One module on this rank.

    `stages`: the pipeline stages that this rank holds, and `chunks`: the model of each of them. `maps`, `held`: for
    each rank of its tensor-parallel group the weight map, and how often that group holds each parameter. `parameters`:
    of this rank, with the shapes that they have before data-parallel ranks share them; their values may be on the way
    between ranks, other than those of `weight` and `whole_weight`. `data_parallel`: how they do.
    `tied`: the parameter of which another stage holds a copy, if any. Parameters are named as in the whole module.
    """

    name: str
    stages: tuple[Stage, ...]
    chunks: tuple[Any, ...]
    groups: ProcessGroupCollection
    maps: tuple[WeightMap, ...]
    held: tuple[Mapping[str, Held], ...]
    parameters: Mapping[str, torch.nn.Parameter]
    data_parallel: DataParallel
    tied: str | None

    @cached_property
    def trained(self) -> Mapping[str, torch.nn.Parameter]:
        """Those of the parameters that train."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def gradient(self, name: str) -> Tensor:
        """The reduced gradient of what this rank updates of a parameter, flat."""
        values, (begin, _) = self.data_parallel.accumulated(name)
        start, stop = self.data_parallel.owned[name]
        return values[start - begin : stop - begin]

    def weight(self, name: str) -> Tensor:
        """What this rank updates of a parameter, flat: a view."""
        (begin, _), (start, stop) = self.data_parallel.kept(name), self.data_parallel.owned[name]
        return self.data_parallel.weights(name)[start - begin : stop - begin]

    def whole_weight(self, name: str) -> Tensor:
        """A parameter, shaped as in `parameters`. Collective where data-parallel ranks share it."""
        return self.data_parallel.whole(name, self.data_parallel.weights(name))

    def whole_gradient(self, name: str) -> Tensor:
        """What is accumulated of its gradient, likewise; zero where it is frozen."""
        if name not in self.trained:
            return torch.zeros(self.parameters[name].shape)
        return self.data_parallel.whole(name, self.data_parallel.accumulated(name)[0])

    def expect(self, stage: int) -> None:
        """The next backward pass of that pipeline stage is its last in the step: sums of gradients may begin within it.
        Not those of a parameter that other stages of this rank have, too.
        """
        of_chunks = [set(chunk.parameters()) for chunk in self.chunks]
        own = of_chunks.pop(stage // self.groups.pp.size())
        self.data_parallel.expect([p for p in own.difference(*of_chunks) if p.requires_grad])

    @property
    def overlaps_sums(self) -> bool:
        """Whether its gradients are summed over ranks behind its last backward pass, and not within backward passes."""
        return bool(self.trained) and not self.data_parallel.reduces_early

    @property
    def tied_copy(self) -> str | None:
        """The parameter of this rank that counts on another stage, if any: the head of a tied model."""
        return None if any(stage.is_first for stage in self.stages) else self.tied

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
    zero: int,
    gradients: torch.dtype,
    weights: WeightSource,
    offload: ActivationOffload | None = None,
    compile_layers: bool = False,
) -> TrainedModule:
    """Build this rank's part of `name`: in its layout the stages that it holds, their weights read, what is to be
    frozen frozen, and with buffers of `gradients`, that dtype. `every`: the pipeline stages of the module. `sharded`:
    whether its optimizer will be. `zero`: the ZeRO stage. `offload`: where activations go, if they do not stay on the
    device. `compile_layers`: see `layer_spec`.
    """
    groups, tp = topology.collection(name), topology.layouts[name].tp
    stages = stages_of_rank(every, groups.pp.rank(), topology.layouts[name].pp)
    family = family_of(shapes[name].family)
    make = partial(
        family.text_model() if name == TEXT else family.encoder_model(),
        shapes[name],
        groups,
        topology.platform,
        provider,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        offload=offload,
        compile_layers=compile_layers,
    )
    of_stages = [[weight_map(name, shapes, rank, tp, stage) for stage in stages] for rank in range(tp)]
    maps = tuple({each: slices for of in of_rank for each, slices in of.items()} for of_rank in of_stages)
    parts = _Parts(
        make,
        stages,
        tuple(of_stages[groups.tp.rank()]),
        weights,
        TIED_COPIES if shapes.text.tied else {},
        frozenset(each for each in maps[0] if group_of(name, each) not in freeze),
        next(filter(None, (tied_parameter(name, shapes, stage) for stage in stages)), None),
    )
    if shares_weights(zero, groups.dp_cp.size(), bool(parts.trained)):
        chunks, data_parallel = _fully_sharded(
            parts, groups, topology.platform, gradients, zero, adds_up=recompute.chunk > 0
        )
    else:
        chunks, data_parallel = _replicated(
            name, parts, groups, topology.platform, gradients, sharded, adds_up=recompute.chunk > 0
        )
    return TrainedModule(
        name, stages, chunks, groups, maps, held(maps), data_parallel.parameters, data_parallel, parts.tied
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


def _replicated(
    name: str,
    parts: _Parts,
    groups: ProcessGroupCollection,
    platform: Platform,
    gradients: torch.dtype,
    sharded: bool,
    *,
    adds_up: bool,
) -> tuple[tuple[Any, ...], DataParallel]:
    chunks = []
    for stage, own_map in zip(parts.stages, parts.maps, strict=True):
        model = parts.make(stage=stage)
        load_parameters(model, own_map, parts.weights, stage, parts.copies)
        for of_stage, parameter in named_parameters(model, stage).items():
            parameter.requires_grad_(of_stage in parts.trained)
        chunks.append(model)
    named = parts.named(chunks)
    if parts.tied is not None:
        # A bucket of its own: the distributed optimizer then cuts both copies alike, so that the ranks that hold the
        # same elements of both are those that differ in `pp` alone.
        named[parts.tied].shared_embedding = True  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(chunks), Replicated.of(
        *(name, named, chunks, groups, platform), sharded=sharded, gradients=gradients, adds_up=adds_up
    )


def _fully_sharded(
    parts: _Parts,
    groups: ProcessGroupCollection,
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
                *(model, stage.global_name, groups, platform.device, load, parts.trained),
                gradients=gradients,
                zero=zero,
                adds_up=adds_up,
            )
        )
    chunks = tuple(shard.model for shard in shards)
    return chunks, FullySharded(parts.named(chunks), groups, tuple(shards))


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
