"""Writes the model as a `transformers` folder: parameters stream from their ranks to rank 0, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.models.hf_folder import folder_writer
from megatron_hetero.models.qwen2_5_vl.shapes import Qwen25VLShapes
from megatron_hetero.models.qwen2_5_vl.weights import stored_shapes
from megatron_hetero.models.weight_map import Piece, take_out
from megatron_hetero.topology import Topology
from megatron_hetero.training.modules import TrainedModule

WRITER = 0


def export_model(
    modules: Sequence[TrainedModule],
    shapes: Qwen25VLShapes,
    topology: Topology,
    target: Path,
    companions: Path,
    dtype: torch.dtype,
) -> None:
    """Write `target` from the weights of the first replica of each module. Every rank calls it; rank 0 writes.

    `companions`: the folder that configuration, tokenizer and processor files are copied from. Raises `UserError` on
    rank 0 where the folder cannot be written.
    """
    parts = gather_parameters(modules, topology)
    if topology.rank != WRITER:
        for _ in parts:
            pass
    else:
        with folder_writer(target, stored_shapes(shapes), dtype, companions) as writer:
            for name, tensor in assemble(parts, stored_shapes(shapes)):
                writer.put(name, tensor)
    dist.barrier(topology.world)


def gather_parameters(
    modules: Sequence[TrainedModule], topology: Topology, value: Callable[[Any], Tensor] = lambda parameter: parameter
) -> Iterator[tuple[tuple[Piece, ...], Tensor]]:
    """(pieces, values) of each parameter of each tp rank of the first replicas, on the writer; nothing elsewhere.

    `value` maps a parameter to what is gathered of it, of the same shape and type on all ranks.
    """
    for module in modules:
        layout = topology.layouts[module.name]
        own = dict(module.model.named_parameters())
        for name in module.own_map:
            for tp_rank, pieces in enumerate(module.maps):
                values = _fetch(value(own[name]), layout.rank_at(tp=tp_rank), topology)
                if values is not None:
                    yield pieces[name], values


def _fetch(parameter: Tensor, holder: int, topology: Topology) -> Tensor | None:
    """The values of a parameter of `holder` on the writer's host. Shards of a parameter have the same shape on all
    ranks.
    """
    if topology.rank == WRITER == holder:
        return parameter.detach().cpu()
    if topology.rank == holder:
        dist.send(parameter.detach().contiguous(), WRITER, group=topology.world)
    if topology.rank != WRITER:
        return None
    received = torch.empty_like(parameter)
    dist.recv(received, holder, group=topology.world)
    return received.cpu()


def assemble(
    parts: Iterable[tuple[tuple[Piece, ...], Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
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
