"""A checkpoint as a `transformers` folder, made by one process without a group: tensors stream from file to file, and
no more than one shard is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megatron_hetero.checkpoint.format.keys import WEIGHTS, Entry, Shape, matrix
from megatron_hetero.checkpoint.format.storage import INDEX, index_dtypes, index_shapes, open_index, read_entries
from megatron_hetero.checkpoint.model_files import alone, differences, hashes
from megatron_hetero.checkpoint.model_sources import ModelSources
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.errors import UserError
from megatron_hetero.files.paths import resolved
from megatron_hetero.hf.folder_files import CONFIG
from megatron_hetero.hf.folder_writer import SHARD_BYTES, require_writable
from megatron_hetero.job import DTYPES
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.models.writer import companions_of, model_writer
from megatron_hetero.outputs.checkpoints import chosen_in, damaged, is_ours, read_manifest, verify
from megatron_hetero.processor.two_folders import export_changes

STORED = "stored"

Advance = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and how many there are."""


@dataclass(frozen=True)
class Copied:
    """What was written: tensors, their bytes, and the names of their types."""

    tensors: int
    size: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OpenCheckpoint:
    """A checkpoint that is whole and undamaged."""

    folder: Path
    record: RunRecord
    index: Metadata

    @classmethod
    def open(cls, path: Path, advance: Advance = lambda *_: None) -> OpenCheckpoint:
        """Check every file of the checkpoint `path`, or of the newest one in it. Raises `UserError` naming all that is
        wrong.
        """
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
        record.require_own_name(folder)
        return cls(folder, record, open_index(folder, manifest))

    def require(self, shapes: Mapping[str, Shape]) -> None:
        """Check that it holds the tensors of a model with the stored `shapes`, and no others. Raises `UserError`."""
        self.record.require_complete(index_shapes(self.index), shapes, self.folder)

    def dtypes(self, shapes: Mapping[str, Shape]) -> dict[str, torch.dtype]:
        """The types of the model's weights, by stored name."""
        found = index_dtypes(self.index)
        return {name: found[f"{WEIGHTS}/{name}"] for name in shapes}

    def weight(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """One tensor of the model, as it is stored."""
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
    """Write the model of a checkpoint to `target`, bit by bit as the run that wrote the checkpoint would.

    Args:
        checkpoint: where the weights come from.
        target: a new folder, an empty one, or an earlier export that has its mark, which is replaced.
        sources: where configuration, tokenizer and processor come from.
        dtype: what weights are written as: float32, bfloat16, or "stored", each as the checkpoint has it (of what is
            trained the master weights, float32). None: `model.dtype` of the run; "stored" where none has trained.
        limit: bytes of a file of weights, which are also what is held in memory.
        advance: told of the progress.

    Raises:
        UserError: the model's folders are missing or of another model, or `target` cannot be written.
    """
    require_apart(target, {"the checkpoint": checkpoint.folder, **sources.folders})
    _require_no_checkpoints_name(target, checkpoint.folder.parent)
    require_folders(sources, checkpoint.folder)
    require_writable(target)
    folders, shapes = sources.read()
    stored = stored_shapes(shapes)
    checkpoint.require(stored)
    require_configurations(sources, checkpoint)
    held = checkpoint.dtypes(stored)
    as_what = _dtypes(dtype or _own_dtype(checkpoint.record), held)
    sizes = {name: prod(shape) * as_what[name].itemsize for name, shape in stored.items()}
    total, done = sum(sizes.values()), 0
    companions = companions_of(sources.companions, export_changes(folders))
    with model_writer(target, shapes, as_what, companions, limit) as put:
        for name, shape in stored.items():
            put(name, checkpoint.weight(name, shape, held[name]))
            done += sizes[name]
            advance("writing", done, total)
    return Copied(len(stored), total, names_of(as_what))


def _own_dtype(record: RunRecord) -> str:
    return STORED if record.imported_from is not None else record.config["model"]["dtype"]


def _dtypes(chosen: str, held: Mapping[str, torch.dtype]) -> Mapping[str, torch.dtype]:
    return held if chosen == STORED else dict.fromkeys(held, DTYPES[chosen])


def names_of(dtypes: Mapping[str, torch.dtype]) -> tuple[str, ...]:
    """The names of the types that tensors have."""
    return tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))


def require_apart(target: Path, others: Mapping[str, Path]) -> None:
    """Check that what replaces `target` replaces none of `others`, by what they are. Raises `UserError`."""
    place = resolved(target, "the target")
    for what, folder in others.items():
        source = resolved(folder, what)
        if place == source or place in source.parents or source in place.parents:
            raise UserError.at(
                target,
                found="that folder",
                expected=f"one apart from {what} ({folder})",
                because="an export replaces its folder whole",
                fix="choose another folder",
            )


def _require_no_checkpoints_name(target: Path, checkpoints: Path) -> None:
    """Check that no run would take an export among checkpoints for one of them. Raises `UserError`."""
    if is_ours(target.name) and resolved(target.parent, "the target") == resolved(checkpoints, "the checkpoint"):
        raise UserError.at(
            target,
            found=f"the name {target.name} in a folder of checkpoints",
            expected="another name",
            because="a run would take the export for a checkpoint",
            fix=f"try {target.with_name('export')}",
        )


def require_folders(sources: ModelSources, checkpoint: Path) -> None:
    """Check that the folders of a checkpoint's model are there. Raises `UserError` naming the flag that says where."""
    for setting, folder in sources.folders.items():
        if not os.path.isfile(folder / CONFIG):  # noqa: PTH113 (the method it raises for a name that no file can have)
            raise UserError.at(
                f"{setting} of {checkpoint / RECORD}",
                found=f"no {folder / CONFIG}",
                expected="the folder that the model comes from",
                because="its configuration, tokenizer and processor go into the export (its weights do not)",
                fix=f"say where it is now with {_flag(setting)}",
            )


def require_configurations(sources: ModelSources, checkpoint: OpenCheckpoint) -> None:
    """Check that the folders of a checkpoint's model have the `config.json` that they had. Raises `UserError`."""
    before = alone(checkpoint.record.model_files, CONFIG)
    for setting, name, found in differences(before, alone(hashes(sources), CONFIG)) if before else ():
        raise UserError.at(
            f"{setting}: {sources.folders[setting] / name}",
            found=found,
            expected=f"what {checkpoint.folder / RECORD} has the hash of",
            because="with it the same weights are another model",
            fix=f"name the folder that they were trained with: {_flag(setting)}",
        )


def _flag(setting: str) -> str:
    """The flag that says where the folder of a setting is now."""
    flags = {"model.hf_path": "--model DIR", "model.hf_path_vision": "--vision DIR"}
    name = setting.removeprefix("model.encoders.").removesuffix(".hf_path")
    return flags.get(setting, f"--encoder {name}=DIR")
