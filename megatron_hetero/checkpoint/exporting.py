"""Converts a checkpoint to a `transformers` folder, in one process without a group: tensors stream from file to file,
and at most one shard is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import resolved
from megatron_hetero.base.outputs import chosen_in, damaged, is_ours, read_manifest, require_own_name, verify
from megatron_hetero.checkpoint.index import (
    INDEX,
    WEIGHTS,
    Entry,
    Index,
    Shape,
    index_dtypes,
    index_shapes,
    matrix,
    open_index,
)
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.checkpoint.sources import ModelSources, alone, differences, hashes
from megatron_hetero.checkpoint.storage import read_entries
from megatron_hetero.data.tokenizer import export_changes
from megatron_hetero.hf.folders import CONFIG, SHARD_BYTES, require_writable
from megatron_hetero.job import DTYPES
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import companions_of, model_writer, stored_shapes
from megatron_hetero.step.number_formats import nearest_bfloat16

STORED = "stored"

Advance = Callable[[str, int, int], None]
"""Receives progress: the activity, bytes done, bytes in total."""


@dataclass(frozen=True)
class Copied:
    """The result: number of tensors, bytes, and names of dtypes."""

    tensors: int
    size: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OpenCheckpoint:
    """A complete, verified checkpoint."""

    folder: Path
    record: RunRecord
    index: Index

    @classmethod
    def open(cls, path: Path, advance: Advance = lambda *_: None) -> OpenCheckpoint:
        """Verify every file of the checkpoint `path`, or of the newest in it. Raises `UserError` with all faults."""
        folder = chosen_in(path)
        manifest = read_manifest(folder, (INDEX, RECORD))
        faults, total, done = [], sum(record.size for record in manifest.values()), 0
        for name in sorted(manifest):
            faults += verify(folder, manifest, [name])
            done += manifest[name].size
            advance("checking", done, total)
        if faults:
            raise damaged(folder, faults)
        record = RunRecord.read(folder)
        require_own_name(folder, record.step, RECORD)
        return cls(folder, record, open_index(folder, manifest))

    def require(self, shapes: ModelShapes) -> None:
        """Check that it holds exactly the tensors of a model of `shapes`. Raises `UserError`."""
        self.record.require_complete(index_shapes(self.index), shapes, self.folder)

    def dtypes(self, shapes: Mapping[str, Shape]) -> dict[str, torch.dtype]:
        """The dtypes of the model's weights, by stored name."""
        found = index_dtypes(self.index)
        return {name: found[f"{WEIGHTS}/{name}"] for name in shapes}

    def weight(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """One tensor of the model, as stored."""
        values = torch.empty(matrix(shape), dtype=dtype)
        entry = Entry(f"{WEIGHTS}/{name}", tuple(values.shape), (0,) * values.dim(), values)
        read_entries(self.folder, self.index, [entry], None)
        return values.view(shape)


def export_checkpoint(
    checkpoint: OpenCheckpoint,
    target: Path,
    sources: ModelSources,
    dtype: str | None = None,
    limit: int = SHARD_BYTES,
    advance: Advance = lambda *_: None,
) -> Copied:
    """Write the model of a checkpoint to `target`, bit-identical to an export by the run that wrote the checkpoint.

    Args:
        checkpoint: provides the weights.
        target: a new or empty folder, or an earlier export, which is replaced.
        sources: provide configuration, tokenizer and processor.
        dtype: of the weights: float32, bfloat16, or "stored" for the checkpoint's own (master weights are float32).
            None: `model.dtype` of the run; "stored" for imported weights.
        limit: maximum bytes of a weight file, and in memory.
        advance: receives progress.

    Raises:
        UserError: the model's folders are missing or of another model, or `target` cannot be written.
    """
    require_apart(target, {"the checkpoint": checkpoint.folder, **sources.folders})
    _require_no_checkpoints_name(target, checkpoint.folder.parent)
    require_folders(sources, checkpoint.folder)
    require_writable(target)
    folders, shapes = sources.read()
    stored = stored_shapes(shapes)
    checkpoint.require(shapes)
    require_configurations(sources, checkpoint)
    held = checkpoint.dtypes(stored)
    as_what = _dtypes(dtype or _own_dtype(checkpoint.record), held)
    sizes = {name: prod(shape) * as_what[name].itemsize for name, shape in stored.items()}
    total, done = sum(sizes.values()), 0
    companions = companions_of(sources.companions, export_changes(folders))
    with model_writer(target, shapes, as_what, companions, limit) as put:
        for name, shape in stored.items():
            put(name, _as_trained(checkpoint.weight(name, shape, held[name]), as_what[name], checkpoint.record))
            done += sizes[name]
            advance("writing", done, total)
    return Copied(len(stored), total, names_of(as_what))


def _as_trained(values: Tensor, dtype: torch.dtype, record: RunRecord) -> Tensor:
    """A stored tensor in the `dtype` of an export: master weights rounded as the run rounds them."""
    trained = record.imported_from is None and values.dtype == torch.float32
    return nearest_bfloat16(values) if trained and dtype == torch.bfloat16 else values


def _own_dtype(record: RunRecord) -> str:
    return STORED if record.imported_from is not None else record.config["model"]["dtype"]


def _dtypes(chosen: str, held: Mapping[str, torch.dtype]) -> Mapping[str, torch.dtype]:
    return held if chosen == STORED else dict.fromkeys(held, DTYPES[chosen])


def names_of(dtypes: Mapping[str, torch.dtype]) -> tuple[str, ...]:
    """The names of the dtypes."""
    return tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))


def require_apart(target: Path, others: Mapping[str, Path]) -> None:
    """Check that replacing `target` replaces none of the folders `others`, by description. Raises `UserError`."""
    place = resolved(target, "the target")
    for what, folder in others.items():
        source = resolved(folder, what)
        if place == source or place in source.parents or source in place.parents:
            raise UserError.at(
                target,
                problem=f"overlaps {what} ({folder})",
                because="an export replaces the whole folder",
                fix="choose another folder",
            )


def _require_no_checkpoints_name(target: Path, checkpoints: Path) -> None:
    """Check that no run would take an export for a checkpoint next to it, or delete it. Raises `UserError`."""
    if is_ours(target.name) and resolved(target.parent, "the target") == resolved(checkpoints, "the checkpoint"):
        problem = f"the name {target.name} is reserved in a folder of checkpoints"
        raise UserError.at(target, problem=problem, fix=f"try {target.with_name('export')}")


def require_folders(sources: ModelSources, checkpoint: Path) -> None:
    """Check that the model folders of a checkpoint exist. Raises `UserError` with the flag for a new location."""
    for setting, folder in sources.folders.items():
        if not os.path.isfile(folder / CONFIG):  # noqa: PTH113 (the method it raises for a name that no file can have)
            raise UserError.at(
                f"{setting} of {checkpoint / RECORD}",
                problem=f"no {folder / CONFIG}",
                because="the export needs the model's configuration, tokenizer and processor (not its weights)",
                fix=f"give the folder's new location with {_flag(setting)}",
            )


def require_configurations(sources: ModelSources, checkpoint: OpenCheckpoint) -> None:
    """Check that the `config.json` of a checkpoint's model folders is unchanged. Raises `UserError`."""
    before = alone(checkpoint.record.model_files, CONFIG)
    for setting, name, change in differences(before, alone(hashes(sources), CONFIG)) if before else ():
        raise UserError.at(
            f"{setting}: {sources.folders[setting] / name}",
            problem=f"{change} since {checkpoint.folder / RECORD} was written",
            because="the same weights would be another model",
            fix=f"give the folder that the model was trained from: {_flag(setting)}",
        )


def _flag(setting: str) -> str:
    """The flag for the new location of a setting's folder."""
    flags = {"model.hf_path": "--model DIR", "model.hf_path_vision": "--vision DIR"}
    name = setting.removeprefix("model.encoders.").removesuffix(".hf_path")
    return flags.get(setting, f"--encoder {name}=DIR")
