"""Writes the model as a `transformers` folder: parameters stream from their ranks to rank 0, one at a time.

Rank 0 need not hold any of them: the layouts say which ranks do, and these say with each parameter what it is.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.distributed.collective import Working, on_first
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.engine.module import TrainedModule
from megatron_hetero.errors import UserError
from megatron_hetero.hf.folder_writer import Companions, require_writable
from megatron_hetero.hf.weight_map import Piece, take_out
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.models.writer import model_writer

WRITER = 0

Part = tuple[tuple[Piece, ...], Tensor]
"""The values of one parameter of one rank, and what they are of the stored tensors."""


def export_model(
    modules: Sequence[TrainedModule],
    shapes: ModelShapes,
    topology: Topology,
    target: Path,
    companions: Mapping[str, Companions],
    dtype: torch.dtype,
    working: Working = contextlib.nullcontext,
) -> None:
    """Write `target` from the weights of the first replica of each module. Every rank calls it, with the modules that
    it holds a part of; rank 0 writes, and alone needs the `companions` (see `companions_of`). `working`: around what it
    writes while others wait. Raises `SharedError` where the folder cannot be written; nothing of it is left then, and
    it can be tried again elsewhere.
    """
    on_first(topology.files, lambda: require_writable(target))  # before anything is sent
    parts = gather_parameters(modules, topology)

    def write() -> None:
        try:
            with contextlib.ExitStack() as writing:
                put = writing.enter_context(model_writer(target, shapes, dtype, companions))
                for name, tensor in assemble(parts, stored_shapes(shapes)):
                    with working():
                        put(name, tensor)
                with working():
                    writing.close()
        except Exception as error:
            _use_up(parts)  # Others send, whether it is written or not.
            raise error if isinstance(error, UserError) else _unexpected(target) from error

    if topology.rank != WRITER:
        _use_up(parts)
    on_first(topology.files, write)


def _unexpected(target: Path) -> UserError:
    return UserError(
        f"{target}: the model was not written, for an error of the program's own:\n{traceback.format_exc()}"
    )


def _use_up(parts: Iterable[Part]) -> None:
    for _ in parts:
        pass


def gather_parameters(
    modules: Sequence[TrainedModule], topology: Topology, value: Callable[[Any], Tensor] = lambda parameter: parameter
) -> Iterator[Part]:
    """Every parameter of each stage and tp rank of the first replicas, on the writer; nothing elsewhere. Every rank
    goes through it to the end, with the modules that it holds a part of.

    `value` maps a parameter to what is gathered of it, of the same shape.
    """
    own = {module.name: module for module in modules}
    for name, layout in topology.layouts.items():
        for stage in range(layout.pp):
            holders = [layout.rank_at(tp=tp, pp=stage) for tp in range(layout.tp)]
            if topology.rank == WRITER:
                yield from _in_turns([_from(holder, own.get(name), value, topology) for holder in holders])
            elif topology.rank in holders:
                _send(_held_parts(own[name], value), topology)


def _in_turns(streams: Sequence[Iterator[Part]]) -> Iterator[Part]:
    # The ranks of a tp group hold parts of the same stored tensors in the same order.
    for parts in zip(*streams, strict=True):
        yield from parts


def _from(holder: int, own: TrainedModule | None, value: Callable[[Any], Tensor], topology: Topology) -> Iterator[Part]:
    """What `holder` gives, on the writer's host."""
    if holder != WRITER:
        return _received(holder, topology)
    assert own is not None, "the writer holds a part of the module"
    return ((pieces, values.cpu()) for pieces, values in _held_parts(own, value))


def _held_parts(module: TrainedModule, value: Callable[[Any], Tensor]) -> Iterator[Part]:
    """What this rank has to give: everything but what another stage gives."""
    for name, pieces in module.own_map.items():
        if name != module.tied_copy:
            yield pieces, value(module.parameters[name]).detach()


def _send(parts: Iterable[Part], topology: Topology) -> None:
    for pieces, values in parts:
        _tell((pieces, tuple(values.shape), values.dtype), topology)
        dist.send(values.contiguous(), WRITER, group=topology.world)
    _tell(None, topology)


def _received(holder: int, topology: Topology) -> Iterator[Part]:
    while (told := _hear(holder, topology)) is not None:
        pieces, shape, dtype = told
        values = torch.empty(shape, dtype=dtype, device=topology.platform.device)
        dist.recv(values, holder, group=topology.world)
        yield pieces, values.cpu()


def _tell(what: Any, topology: Topology) -> None:
    dist.send_object_list([what], WRITER, group=topology.world, device=topology.platform.device)


def _hear(holder: int, topology: Topology) -> Any:
    told = [None]
    dist.recv_object_list(told, holder, group=topology.world, device=topology.platform.device)
    return told[0]


def assemble(parts: Iterable[Part], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Lay pieces into whole stored tensors, and yield each once every element has come."""
    growing: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    seen: set[Any] = set()
    for pieces, values in parts:
        for piece in pieces:
            if piece.empty or piece.rectangle in seen:
                continue
            seen.add(piece.rectangle)
            shape = torch.Size(shapes[piece.name])
            whole = growing.setdefault(piece.name, values.new_empty(shape[0], shape[1:].numel()))
            part = take_out(values, piece)
            whole[piece.source if piece.columns else piece.source[0]] = part.view(len(part), -1)
            missing[piece.name] = missing.get(piece.name, shape.numel()) - part.numel()
            if missing[piece.name] == 0:
                yield piece.name, growing.pop(piece.name).view(shape)
    assert not growing, f"weight map leaves holes in {sorted(growing)}"
