"""Exports the model as a `transformers` folder: parameters stream from their ranks to rank 0, one at a time.

Rank 0 need not hold any of them: the layouts give the ranks that do, which describe each parameter as they send it.
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
from megatron_hetero.hf.weight_map import Piece, extract_piece
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.models.writer import model_writer

WRITER = 0

Part = tuple[tuple[Piece, ...], Tensor]
"""One rank's values of a parameter, and the pieces of stored tensors that they are."""


def export_model(
    modules: Sequence[TrainedModule],
    shapes: ModelShapes,
    topology: Topology,
    target: Path,
    companions: Mapping[str, Companions],
    dtype: torch.dtype,
    working: Working = contextlib.nullcontext,
) -> None:
    """Write `target` from the weights of the first replica of each module. Collective; each rank passes its own
    modules. Rank 0 writes, and only it needs `companions` (see `companions_of`). `working`: around writes that others
    wait for.

    Raises `SharedError` if the folder cannot be written; nothing of it is left then, and the export can be retried
    elsewhere.
    """
    on_first(topology.files, lambda: require_writable(target))  # Before anything is sent.
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
            _exhaust(parts)  # Others send regardless.
            raise error if isinstance(error, UserError) else _unexpected(target) from error

    if topology.rank != WRITER:
        _exhaust(parts)
    on_first(topology.files, write)


def _unexpected(target: Path) -> UserError:
    return UserError(f"{target}: internal error, the model was not written:\n{traceback.format_exc()}")


def _exhaust(parts: Iterable[Part]) -> None:
    for _ in parts:
        pass


def gather_parameters(
    modules: Sequence[TrainedModule], topology: Topology, value: Callable[[Any], Tensor] = lambda parameter: parameter
) -> Iterator[Part]:
    """Every parameter of each stage and tp rank of the first replicas, on the writer; empty elsewhere. Collective:
    every rank passes its own modules and exhausts the iterator.

    `value` maps a parameter to the tensor to gather, of the same shape.
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
    """The parameters of `holder`, on the writer's CPU."""
    if holder != WRITER:
        return _received(holder, topology)
    assert own is not None, "the writer holds a part of the module"
    return ((pieces, values.cpu()) for pieces, values in _held_parts(own, value))


def _held_parts(module: TrainedModule, value: Callable[[Any], Tensor]) -> Iterator[Part]:
    """This rank's parameters, except a tied copy that another stage sends."""
    for name, pieces in module.own_map.items():
        if name != module.tied_copy:
            yield pieces, value(module.parameters[name]).detach()


def _send(parts: Iterable[Part], topology: Topology) -> None:
    for pieces, values in parts:
        _send_object((pieces, tuple(values.shape), values.dtype), topology)
        dist.send(values.contiguous(), WRITER, group=topology.world)
    _send_object(None, topology)


def _received(holder: int, topology: Topology) -> Iterator[Part]:
    while (header := _recv_object(holder, topology)) is not None:
        pieces, shape, dtype = header
        values = torch.empty(shape, dtype=dtype, device=topology.platform.device)
        dist.recv(values, holder, group=topology.world)
        yield pieces, values.cpu()


def _send_object(what: Any, topology: Topology) -> None:
    dist.send_object_list([what], WRITER, group=topology.world, device=topology.platform.device)


def _recv_object(holder: int, topology: Topology) -> Any:
    received = [None]
    dist.recv_object_list(received, holder, group=topology.world, device=topology.platform.device)
    return received[0]


def assemble(parts: Iterable[Part], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Assemble pieces into whole stored tensors, and yield each once it is complete."""
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
            part = extract_piece(values, piece)
            whole[piece.source if piece.columns else piece.source[0]] = part.view(len(part), -1)
            missing[piece.name] = missing.get(piece.name, shape.numel()) - part.numel()
            if missing[piece.name] == 0:
                yield piece.name, growing.pop(piece.name).view(shape)
    assert not growing, f"weight map leaves holes in {sorted(growing)}"
