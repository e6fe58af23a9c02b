"""How a run exports adapters: as a PEFT folder, or merged."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import unused
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapter_export import (
    adapter_tensors,
    adapter_writer,
    has_adapters,
    merging_writer,
)
from megatron_hetero.models.weights import Writer, model_writer, stored_shapes


def writer_of(job: JobSpec) -> tuple[Writer, Collection[str] | None]:
    """Return the writer of a job's export, and the stored tensors that it writes, if not all."""
    shapes, config, trained = job.shapes, job.config, _trained(job)
    if not has_adapters(shapes):
        return model_writer, None
    if config.export.merge:
        return merging_writer, None
    try:
        only = adapter_tensors(shapes, trained)
    except UserError:  # Of a run without an export, whose model no checkpoint has.
        return merging_writer, None
    bases = {TEXT: config.model.hf_path, **config.further_folders}
    return partial(adapter_writer, trained=trained, bases=bases), only


def require_exportable(job: JobSpec) -> None:
    """Check that an export can have what trains. Raises `UserError`."""
    merge, adapters = job.config.export.merge, has_adapters(job.shapes)
    if merge and not adapters:
        raise unused("export.merge", merge, "no module has adapters", "remove it, or set lora.r of a module")
    if adapters and not merge:
        adapter_tensors(job.shapes, _trained(job))


def _trained(job: JobSpec) -> frozenset[str]:
    return frozenset(stored_shapes(job.shapes)) - job.frozen.tensors
