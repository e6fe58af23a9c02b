"""A module of the model as it is trained: weights, data-parallel buffers, optimizer, and what it holds in common with
others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hetero.errors import UserError
from megatron_hetero.models.hf_folder import StoredWeights
from megatron_hetero.models.qwen2_5_vl.shapes import Qwen25VLShapes
from megatron_hetero.models.qwen2_5_vl.text import TextModel
from megatron_hetero.models.qwen2_5_vl.vision import VisionModel
from megatron_hetero.models.qwen2_5_vl.weights import TIED_COPIES, group_of, weight_map
from megatron_hetero.models.weight_map import Held, WeightMap, held, lay_into
from megatron_hetero.topology import Topology

MODULES: Mapping[str, type] = {"vision": VisionModel, "text": TextModel}


@dataclass(frozen=True, eq=False)
class TrainedModule:
    """One module on this rank.

    `maps`, `held`: for each rank of its tensor-parallel group the weight map, and how often that group holds each
    parameter. `ddp` is None where every parameter is frozen.
    """

    name: str
    model: Any
    groups: ProcessGroupCollection
    maps: tuple[WeightMap, ...]
    held: tuple[Mapping[str, Held], ...]
    ddp: DistributedDataParallel | None

    @property
    def own_map(self) -> WeightMap:
        """The weight map of this rank."""
        return self.maps[self.groups.tp.rank()]

    @property
    def own_held(self) -> Mapping[str, Held]:
        """How often the tensor-parallel group holds each of this rank's parameters."""
        return self.held[self.groups.tp.rank()]

    @property
    def parameters_per_rank(self) -> int:
        """Elements of the parameters that this rank holds."""
        return sum(p.numel() for p in self.model.parameters())


def build_module(
    name: str,
    shapes: Qwen25VLShapes,
    topology: Topology,
    provider: BackendSpecProvider,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: str,
    freeze: Collection[str],
    distributed_optimizer: bool,
    weights: StoredWeights,
) -> TrainedModule:
    """Build `name` in its layout, read its weights, freeze what is to be frozen, and make its gradient buffers."""
    groups = topology.collection(name)
    tp = groups.tp.size()
    model = MODULES[name](
        getattr(shapes, name),
        groups,
        topology.platform,
        provider,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    maps = tuple(weight_map(name, shapes, rank, tp) for rank in range(tp))
    load_parameters(model, maps[groups.tp.rank()], weights)
    _freeze(name, model, freeze)
    ddp = _data_parallel(model, groups, distributed_optimizer)
    return TrainedModule(name, model, groups, maps, held(maps), ddp)


def load_parameters(model: torch.nn.Module, own_map: WeightMap, weights: StoredWeights) -> None:
    """Read each parameter's own slices. Every parameter must be in the map, and the other way round."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == own_map.keys(), f"weight map: {parameters.keys() ^ own_map.keys()}"
    for name, pieces in own_map.items():
        lay_into(parameters[name], pieces, [weights.read(piece) for piece in pieces])
    _require_equal_copies(own_map, weights)


def _require_equal_copies(own_map: WeightMap, weights: StoredWeights) -> None:
    """Check what a folder of a tied model stores twice, in the rows that this rank holds. Raises `UserError`."""
    pieces = {piece for of_parameter in own_map.values() for piece in of_parameter}
    used = {piece.name for piece in pieces}
    for copy, original in TIED_COPIES.items():
        if copy in used or copy not in weights.shapes or original not in used:
            continue
        same = weights.shapes[copy] == weights.shapes[original] and all(
            torch.equal(weights.read(piece), weights.read(replace(piece, name=copy)))
            for piece in pieces
            if piece.name == original
        )
        if not same:
            raise UserError(
                f"{weights.folder}: found a {copy} that differs from {original}, expected equal ones, because "
                "config.json says that they are tied (tie_word_embeddings) and one of them would be lost; set "
                f"tie_word_embeddings to false in config.json, or remove {copy} from the weights"
            )


def _freeze(module: str, model: torch.nn.Module, freeze: Collection[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(group_of(module, name) not in freeze)


def _data_parallel(
    model: Any, groups: ProcessGroupCollection, distributed_optimizer: bool
) -> DistributedDataParallel | None:
    if not any(p.requires_grad for p in model.parameters()):
        return None
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=False
    )
    return DistributedDataParallel(model.config, config, model, pg_collection=groups)
