"""What a checkpoint holds, in terms of the model alone, so that every layout can read what any other wrote.

For each tensor NAME of the model's `transformers` folder (those of further encoders with their prefix):

    weights/NAME                          fp32 where it is trained (the master weights), else in the model's type
    exp_avg/NAME, exp_avg_sq/NAME         AdamW's moments, fp32, where it is trained
    step/NAME                             the number of AdamW's updates of it, [1]

and for each rank `random/RANK/...`, states of random generators. Padding is not stored, replicas and copies of tied
weights once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.checkpoint.blocks import Block, cut, first_held
from megatron_hetero.checkpoint.optimizer_state import MOMENTS, Shard, shard_of
from megatron_hetero.models.qwen2_5_vl.weights import group_of, prefix_of
from megatron_hetero.models.weight_map import Piece
from megatron_hetero.module_names import TEXT
from megatron_hetero.training.modules import TrainedModule

WEIGHTS, STEP, RANDOM = "weights", "step", "random"

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """A rectangle of the tensor `key`, of shape `size`: it begins at `offsets`, and its values are (or go) in
    `values`, a view.
    """

    key: str
    size: Shape
    offsets: Shape
    values: Tensor


def matrix(shape: Shape) -> Shape:
    """A stored tensor's shape as checkpoints have it: of at most two dims."""
    return shape if len(shape) <= 2 else (shape[0], prod(shape[1:]))


def expected_shapes(shapes: Mapping[str, Shape], freeze: Collection[str], adamw: bool) -> dict[str, Shape]:
    """Every tensor of a checkpoint of a model with the stored `shapes`, but for random states."""
    trained = {name: shape for name, shape in shapes.items() if adamw and part_of(name, shapes) not in freeze}
    expected = {f"{WEIGHTS}/{name}": matrix(shape) for name, shape in shapes.items()}
    expected |= {f"{kind}/{name}": matrix(shape) for kind in MOMENTS for name, shape in trained.items()}
    return expected | {f"{STEP}/{name}": (1,) for name in trained}


def part_of(stored: str, shapes: Mapping[str, Shape]) -> str:
    """The part of the model (as `model.freeze` names them) of a stored tensor."""
    before, mark, within = stored.partition("visual.")
    if not mark or stored not in shapes:
        return TEXT
    encoder = before.rstrip(".") or "vision"
    assert stored.startswith(prefix_of(encoder)), f"{stored} is not a tensor of encoder {encoder}"
    return group_of(encoder, within)


def written(
    modules: Sequence[TrainedModule], optimizers: Sequence[Any], shapes: Mapping[str, Shape]
) -> Iterator[Entry]:
    """What this rank writes: over all ranks, each element of each tensor once."""
    for module, optimizer in zip(modules, optimizers, strict=True):
        for name, pieces in first_held(module.maps, module.groups.tp.rank()).items():
            if name != module.tied_copy:
                yield from _written(pieces, module, module.parameters[name], optimizer, shapes)


def _written(
    pieces: Sequence[Piece],
    module: TrainedModule,
    parameter: torch.nn.Parameter,
    optimizer: Any,
    shapes: Mapping[str, Shape],
) -> Iterator[Entry]:
    shard = shard_of(optimizer, parameter) if optimizer is not None else None
    if shard is not None and shard.inner is not None:
        blocks = list(cut(pieces, width_of(parameter), shard.start, shard.stop))
        kinds = {WEIGHTS: shard.master} | {kind: shard.state[kind] for kind in MOMENTS}
        for kind, values in kinds.items():
            yield from entries(kind, blocks, values, shapes)
        for block in blocks:
            if block.begins:
                yield Entry(f"{STEP}/{block.name}", (1,), (0,), shard.state[STEP].view(1))
    elif parameter.requires_grad and module.ddp is not None and shard is None:
        return  # other ranks of the data-parallel group keep it
    else:
        # Every rank of the data- and context-parallel group has it: each writes an equal part.
        values, group = (parameter if shard is None else shard.master).detach().view(-1), module.groups.dp_cp
        start, stop = (len(values) * (group.rank() + i) // group.size() for i in range(2))
        yield from entries(WEIGHTS, cut(pieces, width_of(parameter), start, stop), values[start:stop], shapes)


def read(
    modules: Sequence[TrainedModule], optimizers: Sequence[Any], shapes: Mapping[str, Shape], stored: Collection[str]
) -> Iterator[Entry]:
    """What this rank reads, with the places where it goes. State that is not `stored` (of a part that was frozen when
    the checkpoint was written) stays as it is before the first update.
    """
    for module, optimizer in zip(modules, optimizers, strict=True):
        for name, pieces in module.own_map.items():
            parameter, held = module.parameters[name], [piece for piece in pieces if not piece.empty]
            flat, width = parameter.detach().view(-1), width_of(parameter)
            yield from entries(WEIGHTS, cut(held, width, 0, len(flat)), flat, shapes)
            shard = shard_of(optimizer, parameter) if optimizer is not None else None
            if shard is not None:
                yield from _read_shard(shard, held, width, shapes, stored)


def _read_shard(
    shard: Shard, pieces: Sequence[Piece], width: int, shapes: Mapping[str, Shape], stored: Collection[str]
) -> Iterator[Entry]:
    blocks = list(cut(pieces, width, shard.start, shard.stop))
    yield from entries(WEIGHTS, blocks, shard.master.detach(), shapes)
    if shard.inner is None or not all(f"{STEP}/{piece.name}" in stored for piece in pieces):
        return
    state = shard.make_state()
    for kind in MOMENTS:
        yield from entries(kind, blocks, state[kind], shapes)
    if pieces:
        # All stored tensors that a parameter is made of were updated together.
        yield Entry(f"{STEP}/{pieces[0].name}", (1,), (0,), state[STEP].view(1))


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
