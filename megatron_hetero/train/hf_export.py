"""Exports the model as a `transformers` folder; parameters are streamed one at a time from their ranks to rank 0.

Rank 0 need not have any module: it finds the ranks of each parameter from the layouts, and these ranks send metadata.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import unused
from megatron_hetero.groups.collective import FIRST, on_first
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.model_files import Companions, require_writable
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import Interval, TensorSlice, extract_slice
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapter_writers import adapter_tensors, adapter_writer, merging_writer
from megatron_hetero.models.adapters import has_adapters
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import Writer, model_writer, stored_shapes
from megatron_hetero.step.module import TrainedModule

OwnedSlices = tuple[tuple[TensorSlice, ...], Tensor]
"""A rank's shard of a parameter: the slices of stored tensors that it consists of, and its values."""
Value = Callable[[TrainedModule, str], Tensor]
"""Function that returns values in the shape of a parameter, given a local module and the parameter's name. Collective
over the parameter's data- and context-parallel group.
"""


def export_model(
    modules: Sequence[TrainedModule],
    shapes: ModelShapes,
    topology: Topology,
    target: Path,
    companions: Mapping[str, Companions],
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    source: StoredWeights | None = None,
    writer: Writer = model_writer,
    only: Collection[str] | None = None,
) -> None:
    """Write the model to the folder `target`, from the first replica of each module. Collective over all ranks.

    Args:
        modules: modules on this rank.
        shapes: shapes of the model.
        topology: topology of all modules.
        target: folder to write.
        companions: files exported with the weights, from `companions_of`; needed only on rank 0, which writes.
        dtype: dtype of the weights.
        transposed: whether expert weights are transposed in the folder; see `model_writer`.
        source: stored weights of the original model; see `model_writer`.
        writer: `model_writer`, or another function with the same arguments.
        only: names of the stored tensors to write; None for all.

    Raises:
        SharedError: the folder cannot be written; no partial folder remains.
    """
    on_first(topology.files, lambda: require_writable(target))  # Check before anything is sent.
    shards, working = gather_parameters(modules, topology, only=only), topology.watchdog.working

    def write() -> None:
        try:
            with contextlib.ExitStack() as writing:
                opened = writer(target, shapes, dtype, companions, transposed=transposed, source=source)
                put = writing.enter_context(opened)
                for name, tensor in assemble(shards, stored_shapes(shapes)):
                    with working():
                        put(name, tensor)
                with working():
                    writing.close()
        except Exception as error:
            deque(shards, maxlen=0)  # Receive the rest, since other ranks still send.
            if isinstance(error, UserError):
                raise
            problem = f"internal error, the model was not written:\n{traceback.format_exc()}"
            raise UserError(f"{target}: {problem}") from error

    if topology.rank != FIRST:
        deque(shards, maxlen=0)
    on_first(topology.files, write)


def gather_parameters(
    modules: Sequence[TrainedModule],
    topology: Topology,
    value: Value = TrainedModule.whole_weight,
    only: Collection[str] | None = None,
) -> Iterator[OwnedSlices]:
    """Gather the `value` of every parameter of the first replicas on rank 0, and yield its shards there. `only`: stored
    tensors whose parameters are yielded; None for all. Collective: every rank passes its modules and must exhaust the
    iterator, which yields nothing on ranks other than 0.
    """
    local = {(module.name, module.view): module for module in modules}
    for name, layout in topology.layouts.items():
        for stage, view in product(map(layout.stage, range(layout.pp)), layout.every_view):
            holders = stage.groups(*view.shard_axes)[0]
            if topology.rank == FIRST:
                # Receive one shard from each rank in turn: all have shards of the same tensors in the same order.
                streams = [_from(holder, local.get((name, view)), value, topology, only) for holder in holders]
                yield from chain.from_iterable(zip(*streams, strict=True))
            elif topology.rank in holders:
                _send(_local_shards(local[name, view], value, only), topology)
            elif topology.rank in stage:
                deque(_local_shards(local[name, view], value, only), maxlen=0)


def _from(
    holder: int, local: TrainedModule | None, value: Value, topology: Topology, only: Collection[str] | None
) -> Iterator[OwnedSlices]:
    """Return the shards of rank `holder` in CPU memory: local shards on rank 0, otherwise received ones."""
    if holder != FIRST:
        return _received(holder, topology)
    assert local is not None, "the writer holds a shard of the module"
    return ((slices, values.cpu()) for slices, values in _local_shards(local, value, only))


def _local_shards(module: TrainedModule, value: Value, only: Collection[str] | None) -> Iterator[OwnedSlices]:
    """Yield this rank's shards of a module's parameters, except a tied copy that another stage sends."""
    for name, slices in module.local_map.items():
        if name != module.tied_copy and (only is None or any(each.name in only for each in slices)):
            yield slices, value(module, name).detach()


def _send(shards: Iterable[OwnedSlices], topology: Topology) -> None:
    send_header = partial(dist.send_object_list, dst=FIRST, group=topology.world, device=topology.platform.device)
    for slices, values in shards:
        send_header([(slices, tuple(values.shape), values.dtype)])
        dist.send(values.contiguous(), FIRST, group=topology.world)
    send_header([None])


def _received(holder: int, topology: Topology) -> Iterator[OwnedSlices]:
    world, device = topology.world, topology.platform.device
    while True:
        header: list[tuple[tuple[TensorSlice, ...], tuple[int, ...], torch.dtype] | None] = [None]
        dist.recv_object_list(header, holder, group=world, device=device)
        if header[0] is None:
            return
        slices, shape, dtype = header[0]
        values = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(values, holder, group=world)
        yield slices, values.cpu()


def assemble(shards: Iterable[OwnedSlices], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Assemble slices into whole stored tensors, and yield each tensor as soon as it is complete."""
    growing: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    seen: set[tuple[str, Interval, Interval | None]] = set()
    for slices, values in shards:
        for tensor_slice in slices:
            if tensor_slice.empty or tensor_slice.rectangle in seen:
                continue
            seen.add(tensor_slice.rectangle)
            shape = torch.Size(shapes[tensor_slice.name])
            whole = growing.setdefault(tensor_slice.name, values.new_empty(shape[0], shape[1:].numel()))
            rows = extract_slice(values, tensor_slice)
            whole[tensor_slice.source if tensor_slice.columns else tensor_slice.source[0]] = rows.view(len(rows), -1)
            missing[tensor_slice.name] = missing.get(tensor_slice.name, shape.numel()) - rows.numel()
            if missing[tensor_slice.name] == 0:
                yield tensor_slice.name, growing.pop(tensor_slice.name).view(shape)
    assert not growing, f"weight map leaves holes in {sorted(growing)}"


def writer_of(job: JobSpec) -> tuple[Writer, Collection[str] | None]:
    """Return the writer for the export of a job, and the stored tensors that it writes; None for all."""
    shapes, config, trained = job.shapes, job.config, _trained(job)
    if not has_adapters(shapes):
        return model_writer, None
    if config.export.merge:
        return merging_writer, None
    try:
        only = adapter_tensors(shapes, trained)
    except UserError:  # Reached only if the run exports nothing, so that `require_exportable` was not called.
        return merging_writer, None
    bases = {TEXT: config.model.hf_path, **config.further_folders}
    return partial(adapter_writer, trained=trained, bases=bases), only


def require_exportable(job: JobSpec) -> None:
    """Check that everything the job trains can be exported in its format. Raises `UserError`."""
    merge, adapters = job.config.export.merge, has_adapters(job.shapes)
    if merge and not adapters:
        raise unused("export.merge", merge, "no module has adapters", "remove it, or set lora.r of a module")
    if adapters and not merge:
        adapter_tensors(job.shapes, _trained(job))


def _trained(job: JobSpec) -> frozenset[str]:
    return frozenset(stored_shapes(job.shapes)) - job.frozen.tensors
