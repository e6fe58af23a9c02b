"""The parts of a checkpoint that each rank writes and reads, in terms of the tensors in `keys`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_hetero.checkpoint.format.blocks import Block, cut, first_held
from megatron_hetero.checkpoint.format.keys import RANDOM, STEP, WEIGHTS, Entry, Shape, matrix
from megatron_hetero.engine.module import TrainedModule
from megatron_hetero.engine.optimizer_state import OptimizerShard, shard_of
from megatron_hetero.hf.weight_map import TensorSlice


def written(
    modules: Sequence[TrainedModule], optimizers: Sequence[ChainedOptimizer | None], shapes: Mapping[str, Shape]
) -> Iterator[Entry]:
    """What this rank writes. Over all ranks, each element of each tensor is written once."""
    for module, optimizer in zip(modules, optimizers, strict=True):
        for name, slices in first_held(module.maps, module.groups.tp.rank()).items():
            if name != module.tied_copy:
                yield from _written(slices, module, module.parameters[name], optimizer, shapes)


def _written(
    slices: Sequence[TensorSlice],
    module: TrainedModule,
    parameter: torch.nn.Parameter,
    optimizer: ChainedOptimizer | None,
    shapes: Mapping[str, Shape],
) -> Iterator[Entry]:
    shard = shard_of(optimizer, parameter) if optimizer is not None else None
    if shard is not None and shard.inner is not None:
        blocks = list(cut(slices, width_of(parameter), shard.start, shard.stop))
        kinds = {WEIGHTS: shard.master} | {kind: shard.state[kind] for kind in shard.moments}
        for kind, values in kinds.items():
            yield from entries(kind, blocks, values, shapes)
        for block in blocks:
            if block.begins:
                yield Entry(f"{STEP}/{block.name}", (1,), (0,), shard.state[STEP].view(1))
    elif parameter.requires_grad and module.ddp is not None and shard is None:
        return  # held by other ranks of the data-parallel group
    else:
        # Replicated over the data- and context-parallel group: each rank writes an equal part.
        values, group = (parameter if shard is None else shard.master).detach().view(-1), module.groups.dp_cp
        start, stop = (len(values) * (group.rank() + i) // group.size() for i in range(2))
        yield from entries(WEIGHTS, cut(slices, width_of(parameter), start, stop), values[start:stop], shapes)


def read(
    modules: Sequence[TrainedModule],
    optimizers: Sequence[ChainedOptimizer | None],
    shapes: Mapping[str, Shape],
    stored: Collection[str],
) -> Iterator[Entry]:
    """What this rank reads, and into which tensors. State that is not `stored` (of a part that was frozen when the
    checkpoint was written) stays as initialised.
    """
    for module, optimizer in zip(modules, optimizers, strict=True):
        for name, slices in module.own_map.items():
            parameter, held = (
                module.parameters[name],
                [tensor_slice for tensor_slice in slices if not tensor_slice.empty],
            )
            flat, width = parameter.detach().view(-1), width_of(parameter)
            yield from entries(WEIGHTS, cut(held, width, 0, len(flat)), flat, shapes)
            shard = shard_of(optimizer, parameter) if optimizer is not None else None
            if shard is not None:
                yield from _read_shard(shard, held, width, shapes, stored)


@torch.no_grad()
def renew_masters(modules: Sequence[TrainedModule], optimizers: Sequence[ChainedOptimizer | None]) -> None:
    """Master weights that are the parameters' values, as where an optimizer begins."""
    for module, optimizer in zip(modules, optimizers, strict=True):
        for parameter in module.parameters.values():
            shard = shard_of(optimizer, parameter) if optimizer is not None else None
            if shard is not None:
                shard.master.copy_(parameter.view(-1)[shard.start : shard.stop])


def _read_shard(
    shard: OptimizerShard,
    slices: Sequence[TensorSlice],
    width: int,
    shapes: Mapping[str, Shape],
    stored: Collection[str],
) -> Iterator[Entry]:
    blocks = list(cut(slices, width, shard.start, shard.stop))
    yield from entries(WEIGHTS, blocks, shard.master.detach(), shapes)
    if shard.inner is None or not all(f"{STEP}/{tensor_slice.name}" in stored for tensor_slice in slices):
        return
    state = shard.make_state()
    for kind in shard.moments:
        yield from entries(kind, blocks, state[kind], shapes)
    if slices:
        # All stored tensors that a parameter is made of were updated together.
        yield Entry(f"{STEP}/{slices[0].name}", (1,), (0,), state[STEP].view(1))


def entries(kind: str, blocks: Iterable[Block], flat: Tensor, shapes: Mapping[str, Shape]) -> Iterator[Entry]:
    """Blocks of a flat buffer as parts of the tensors of one `kind`."""
    for block in blocks:
        size = matrix(shapes[block.name])
        offsets = (block.rows[0], block.columns[0])[: len(size)]
        yield Entry(f"{kind}/{block.name}", size, offsets, block.view(flat.detach(), len(size)))


def random_entries(rank: int, states: Mapping[str, Tensor]) -> Iterator[Entry]:
    """The random states of a rank, by name, uint8 [bytes]."""
    for name, state in states.items():
        yield Entry(f"{RANDOM}/{rank:05d}/{name}", tuple(state.shape), (0,), state)


def width_of(parameter: Tensor) -> int:
    """Elements of one row of a parameter."""
    return max(1, parameter.numel() // max(1, parameter.shape[0])) if parameter.dim() > 1 else 1
