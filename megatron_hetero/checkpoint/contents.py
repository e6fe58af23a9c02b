"""The tensors in a model's checkpoint, and the entries (rectangles of tensors) that each rank writes and reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_hetero.checkpoint.index import RANDOM, STEP, WEIGHTS, Entry, Shape, matrix
from megatron_hetero.checkpoint.storage import FlatBlock, cut, first_owned
from megatron_hetero.config.optimizers import OptimizerKind
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.number_formats import FlatTensors, Master, Plain, Stored, unpacked, write_all
from megatron_hetero.step.optimizer_state import OptimizerShard


def expected_shapes(shapes: Mapping[str, Shape], frozen: Collection[str], optimizer: OptimizerKind) -> dict[str, Shape]:
    """Return the shapes of all tensors in a checkpoint of a model, except random states. `shapes`: shapes of the
    model's tensors. `frozen`: names of the tensors that do not train.
    """
    trained = {name: shape for name, shape in shapes.items() if optimizer.moments and name not in frozen}
    expected = {f"{WEIGHTS}/{name}": matrix(shape) for name, shape in shapes.items()}
    expected |= {f"{kind}/{name}": matrix(shape) for kind in optimizer.moments for name, shape in trained.items()}
    return expected | {f"{STEP}/{name}": (1,) for name in trained}


def written(
    state: JointOptimizer, shapes: Mapping[str, Shape], frozen: Collection[str] | None = None
) -> Iterator[Entry]:
    """Yield the entries that this rank writes. Over all ranks, each element of each tensor is written once. `frozen`:
    the frozen tensors to write; None for all.
    """
    for module in state.modules:
        optimizer = state.sharded.get(module.key)
        for name, slices in first_owned(module.maps, module.holders.rank()).items():
            if name == module.tied_copy:
                continue
            parameter = module.parameters[name]
            if frozen is not None and not parameter.requires_grad:
                slices = [tensor_slice for tensor_slice in slices if tensor_slice.name in frozen]
            if optimizer is None or not parameter.requires_grad:
                weights = module.weights.values(name)
                yield from _written_weights(slices, module, name, Plain(weights, weights.device), shapes)
            elif not module.weights.sharded:
                yield from _written_weights(slices, module, name, optimizer.shards[name].master, shapes)
            elif name in optimizer.shards:
                yield from _written_shard(slices, parameter, optimizer.shards[name], shapes)


def _written_weights(
    slices: Sequence[TensorSlice], module: TrainedModule, name: str, stored: Stored, shapes: Mapping[str, Shape]
) -> Iterator[Entry]:
    """Yield this rank's weights as entries, or an equal share of weights that its dp and cp ranks replicate."""
    group, parameter, (begin, end) = module.replicas, module.parameters[name], module.weights.stored(name)
    start, stop = begin, end
    if not module.gradients.reduces_early:
        start, stop = (parameter.numel() * (group.rank() + i) // group.size() for i in range(2))
    blocks = cut(slices, width_of(parameter), start, stop)
    yield from _stored_entries(WEIGHTS, blocks, stored, start - begin, shapes)


def _written_shard(
    slices: Sequence[TensorSlice], parameter: torch.nn.Parameter, shard: OptimizerShard, shapes: Mapping[str, Shape]
) -> Iterator[Entry]:
    blocks = list(cut(slices, width_of(parameter), shard.start, shard.stop))
    for kind, stored in shard.stored.items():
        yield from _stored_entries(kind, blocks, stored, 0, shapes)
    for block in blocks:
        if block.begins and shard.moments:
            yield Entry(f"{STEP}/{block.name}", (1,), (0,), shard.updates.view(1))


def read(
    state: JointOptimizer, shapes: Mapping[str, Shape], available: Collection[str], *, imported: bool = False
) -> Iterator[Entry | Sequence[Entry]]:
    """Yield the entries that this rank reads. For trained weights these are the master weights, from which
    `renew_weights` computes the weights of all ranks.

    `available`: names of the checkpoint's tensors to read. All others, such as optimizer states of parameters that were
    frozen in the earlier run, keep their initial values. `imported`: whether the checkpoint has only weights imported
    from a model's folder; optimizers then start from these.
    """
    for module in state.modules:
        optimizer = None if imported else state.sharded.get(module.key)
        for name, slices in module.local_map.items():
            parameter = module.parameters[name]
            present = [each for each in slices if not each.empty and f"{WEIGHTS}/{each.name}" in available]
            if not present:
                continue
            flat, width = module.weights.values(name), width_of(parameter)
            if optimizer is None or not parameter.requires_grad:
                blocks = cut(present, width, *module.weights.stored(name))
                if imported or flat.dtype != torch.bfloat16:
                    yield from entries(WEIGHTS, blocks, flat, shapes)
                else:  # The checkpoint has fp32 master weights if the parameter was trained.
                    staged = flat.float().cpu()
                    yield list(entries(WEIGHTS, blocks, staged, shapes))
                    write_all(Master(FlatTensors((flat,))), staged, flat.device)
            elif name in optimizer.shards:
                yield from _read_shard(optimizer.shards[name], present, width, shapes, available)


def _read_shard(
    shard: OptimizerShard,
    slices: Sequence[TensorSlice],
    width: int,
    shapes: Mapping[str, Shape],
    available: Collection[str],
) -> Iterator[Entry | Sequence[Entry]]:
    blocks = list(cut(slices, width, shard.start, shard.stop))
    updated = all(f"{STEP}/{tensor_slice.name}" in available for tensor_slice in slices)
    for kind, stored in shard.stored.items():
        if kind != WEIGHTS and not updated:
            continue
        if stored.values is not None and not (kind == WEIGHTS and stored.values.dtype == torch.bfloat16):
            yield from entries(kind, blocks, stored.values, shapes)
            continue
        # Read other formats into fp32 on the host, one parameter at a time, then convert. Padding is not stored.
        staged = unpacked(stored, 0, shard.stop - shard.start)
        yield list(entries(kind, blocks, staged, shapes))
        write_all(stored, staged, shard.gradient.device)
    if shard.moments and slices and updated:
        # All stored tensors of a parameter have the same number of updates, so any of these entries will do.
        yield Entry(f"{STEP}/{slices[0].name}", (1,), (0,), shard.updates.view(1))


def _stored_entries(
    kind: str, blocks: Iterable[FlatBlock], stored: Stored, start: int, shapes: Mapping[str, Shape]
) -> Iterator[Entry]:
    """Yield blocks of `stored` values, of any number format, as entries; offsets of blocks count from `start`."""
    if stored.values is not None:
        yield from entries(kind, blocks, stored.values[start:], shapes)
        return
    for block in blocks:
        shape_only = torch.empty(block.offset + block.length, device="meta")
        [entry] = entries(kind, [block], shape_only, shapes)
        yield replace(entry, load=partial(_load, stored, block, start + block.offset, len(entry.size)))


def _load(stored: Stored, block: FlatBlock, start: int, dims: int) -> Tensor:
    return replace(block, offset=0).view(unpacked(stored, start, start + block.length), dims)


def entries(kind: str, blocks: Iterable[FlatBlock], flat: Tensor, shapes: Mapping[str, Shape]) -> Iterator[Entry]:
    """Yield blocks of the buffer `flat` as entries of the tensors `kind`/NAME."""
    for block in blocks:
        size = matrix(shapes[block.name])
        offsets = (block.rows[0], block.columns[0])[: len(size)]
        yield Entry(f"{kind}/{block.name}", size, offsets, block.view(flat.detach(), len(size)))


def random_entries(rank: int, states: Mapping[str, Tensor]) -> Iterator[Entry]:
    """Yield an entry for each random state of a rank. `states`: uint8 [bytes], by name."""
    for name, state in states.items():
        yield Entry(f"{RANDOM}/{rank:05d}/{name}", tuple(state.shape), (0,), state)


def width_of(parameter: Tensor) -> int:
    """Return the number of elements in one row of a parameter."""
    return max(1, parameter.numel() // max(1, parameter.shape[0])) if parameter.dim() > 1 else 1
