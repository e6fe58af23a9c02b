"""Conversion between checkpoints and `transformers` folders in a single process; tensors stream from file to file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial as bind
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.base import lock as file_lock
from megatron_hetero.base.errors import UserError, reason
from megatron_hetero.base.files import resolved
from megatron_hetero.base.outputs import (
    chosen_in,
    discard,
    is_ours,
    lock_of,
    name_of,
    partial_of,
    publish,
    whole,
    write_synced,
)
from megatron_hetero.checkpoint.index import (
    WEIGHTS,
    Entry,
    Index,
    Shape,
    index_dtypes,
    index_shapes,
    matrix,
)
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import ModelSources, RunRecord, alone, differences, hashes
from megatron_hetero.checkpoint.recorded_adapters import fingerprints, require_same_bases, with_recorded
from megatron_hetero.checkpoint.storage import Advance, open_checkpoint, read_entries, write_entries
from megatron_hetero.data.tokenizer import export_changes
from megatron_hetero.hf.model_files import CONFIG, ENCODERS, SHARD_BYTES, SINGLE, require_writable
from megatron_hetero.hf.model_files import INDEX as WEIGHTS_INDEX
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import TensorShapes, TensorSlice
from megatron_hetero.job.job import DTYPES
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapter_writers import adapter_tensors, adapter_writer, merging_writer
from megatron_hetero.models.folders import ModelFolders, sound
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    Writer,
    added_shapes,
    companions_of,
    model_writer,
    module_of,
    open_encoders,
    open_modules,
    open_text,
    stored_shapes,
)
from megatron_hetero.step.number_formats import nearest_bfloat16

STORED = "stored"
UNTRAINED = name_of(0)
"""Folder name of imported weights in `checkpoint.dir`; a run that starts from them begins with step 1."""
_ROWS = 4096
"""Number of rows compared at a time when the copies of a tied weight are compared."""


@dataclass(frozen=True)
class Copied:
    """Summary of a conversion: number of tensors, bytes, names of dtypes, and a notice about other tensors."""

    tensors: int
    size: int
    dtypes: tuple[str, ...]
    notice: str = ""


@dataclass(frozen=True, eq=False)
class OpenCheckpoint:
    """A complete checkpoint whose files have been verified, opened for reading."""

    folder: Path
    record: RunRecord
    index: Index

    @classmethod
    def open(cls, path: Path, advance: Advance = lambda *_: None) -> OpenCheckpoint:
        """Verify and open the checkpoint `path`, or the newest one in that folder. Raises `UserError` on any fault."""
        folder = chosen_in(path)
        record, index, _ = open_checkpoint(folder, RECORD, RunRecord.read, None, advance=advance)
        return cls(folder, record, index)

    def dtypes(self, names: Iterable[str], base: Mapping[str, StoredWeights]) -> dict[str, torch.dtype]:
        """Return the stored dtype of each named tensor: in `base` if the name is there, else in the checkpoint."""
        stored = index_dtypes(self.index)
        return {name: base[name].dtype(name) if name in base else stored[f"{WEIGHTS}/{name}"] for name in names}

    def weight(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Read the model's tensor `name` in its stored dtype."""
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
    *,
    merge: bool = False,
) -> Copied:
    """Write the model of a checkpoint to `target`, bit-identical to an export by the run that wrote the checkpoint.
    Adapters are written as a PEFT folder unless `merge` is set.

    Args:
        checkpoint: provides the weights.
        target: a new or empty folder, or an earlier export, which is replaced.
        sources: the model's folders, with its configuration, tokenizer and processor.
        dtype: dtype of the weights: float32, bfloat16, or "stored" for the stored dtypes (master weights are float32).
            None: `model.dtype` of the run; "stored" for imported weights.
        limit: maximum size of a weight file, and of the tensors in memory, in bytes.
        advance: receives progress.
        merge: whether to write a whole model with the adapters merged.

    Raises:
        UserError: a folder of the model is missing or has another model or base, or `target` cannot be written.
    """
    require_apart(target, {"the checkpoint": checkpoint.folder, **sources.folders})
    _require_no_checkpoints_name(target, checkpoint.folder.parent)
    require_folders(sources, checkpoint.folder)
    require_writable(target)
    folders, plain = sources.read()
    checkpoint.record.require_complete(index_shapes(checkpoint.index), plain, checkpoint.folder)
    require_configurations(sources, checkpoint)
    contents = _contents_of(checkpoint, sources, folders, plain, merge)
    stored = contents.tensors
    imported = checkpoint.record.imported_from is not None
    dtypes = checkpoint.dtypes(stored, contents.base)
    chosen = dtype or (STORED if imported else checkpoint.record.config["model"].get("dtype") or STORED)
    targets = dtypes if chosen == STORED else dict.fromkeys(dtypes, DTYPES[chosen])
    sizes = {name: prod(shape) * targets[name].itemsize for name, shape in stored.items()}
    total, done = sum(sizes.values()), 0
    with sound(checkpoint.folder / RECORD):
        changes = export_changes(folders, checkpoint.record.config, sources.encoders)
    companions = companions_of(sources.companions, changes)
    source = open_text(folders, plain) if folders.family.copied and contents.whole else None
    options = {"limit": limit, "transposed": checkpoint.record.experts_transposed, "source": source}
    with contents.writer(target, contents.shapes, targets, companions, **options) as put:
        for name, shape in stored.items():
            if name in contents.base:
                values = contents.base[name].whole(name).reshape(shape)
            else:
                values = checkpoint.weight(name, shape, dtypes[name])
            if not imported and (values.dtype, targets[name]) == (torch.float32, torch.bfloat16):
                values = nearest_bfloat16(values)  # The training run rounds master weights in the same way.
            put(name, values)
            done += sizes[name]
            advance("writing", done, total)
    written, notice = contents.written, "" if source is None else source.notice
    dtypes = {name: targets[name] for name in written}
    return Copied(len(written), sum(sizes[name] for name in written), _names_of(dtypes), notice)


@dataclass(frozen=True, eq=False)
class Export:
    """Contents of an export: a whole model, a PEFT folder, or a whole model with adapters merged.

    Attributes:
        shapes: shapes of the model, with the adapters of the checkpoint.
        tensors: shapes of the tensors that `writer` receives, by name, in order.
        writer: function that writes the folder.
        base: sources of tensors that the checkpoint lacks, by name.
        whole: whether the export is a whole model.
    """

    shapes: ModelShapes
    tensors: TensorShapes
    writer: Writer = model_writer
    base: Mapping[str, StoredWeights] = field(default_factory=dict)
    whole: bool = True

    @property
    def written(self) -> list[str]:
        """Names of the tensors that the folder will contain: all except merged adapters."""
        merged = added_shapes(self.shapes) if self.writer is merging_writer else {}
        return [name for name in self.tensors if name not in merged]


def _contents_of(
    checkpoint: OpenCheckpoint, sources: ModelSources, folders: ModelFolders, plain: ModelShapes, merge: bool
) -> Export:
    """Return the contents of an export of a checkpoint. `folders`, `plain`: folders and shapes of `sources`, without
    adapters. `merge`: whether to merge adapters. Raises `UserError`.
    """
    record, folder = checkpoint.record, checkpoint.folder
    if not record.adapters:
        if merge:
            raise UserError.at("--merge", problem=f"{folder} has no adapters", fix="remove it")
        return Export(plain, stored_shapes(plain))
    shapes, saved = with_recorded(plain, record.adapters), record.held(plain)
    # An export of adapters alone does not need the base weights, so these are checked only where they exist.
    bases = {setting: each for setting, each in sources.folders.items() if merge or _has_weights(each)}
    old, original = {setting: record.bases.get(setting, "") for setting in bases}, ModelSources.recorded(record.config)
    what = f"the base of the adapters in {folder}"
    require_same_bases(old, fingerprints(bases), bases, original.folders, what, _flag)
    tensors = {**added_shapes(shapes), **stored_shapes(shapes)}
    writer = merging_writer
    if not merge:
        bases = {TEXT: sources.model, **sources.encoders}
        writer = bind(adapter_writer, trained=saved.keys(), bases=bases)
        chosen = adapter_tensors(shapes, saved.keys())
        tensors = {name: shape for name, shape in tensors.items() if name in chosen}
    base = dict[str, StoredWeights]()
    if lacking := tensors.keys() - saved.keys():
        opened = open_modules(folders, plain, seed=0) | open_encoders(sources.encoders, plain)
        base = {name: opened[module_of(name, shapes)] for name in lacking}
    return Export(shapes, tensors, writer, base, whole=merge)


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SINGLE, WEIGHTS_INDEX))


def _names_of(dtypes: Mapping[str, torch.dtype]) -> tuple[str, ...]:
    return tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))


def require_apart(target: Path, others: Mapping[str, Path]) -> None:
    """Check that replacing `target` leaves the folders `others`, by description, intact. Raises `UserError`."""
    place = resolved(target, "the target")
    for what, folder in others.items():
        source = resolved(folder, what)
        if place == source or place in source.parents or source in place.parents:
            problem, why = f"overlaps {what} ({folder})", "an export replaces the whole folder"
            raise UserError.at(target, problem=problem, because=why, fix="choose another folder")


def _require_no_checkpoints_name(target: Path, checkpoints: Path) -> None:
    """Check that no run would mistake an export at `target` for a checkpoint and delete it. Raises `UserError`."""
    if is_ours(target.name) and resolved(target.parent, "the target") == resolved(checkpoints, "the checkpoint"):
        problem = f"the name {target.name} is reserved in a folder of checkpoints"
        raise UserError.at(target, problem=problem, fix=f"try {target.with_name('export')}")


def require_folders(sources: ModelSources, checkpoint: Path) -> None:
    """Check that the model folders of a checkpoint exist. Raises `UserError` naming the flag for a new location."""
    for setting, folder in sources.folders.items():
        if not os.path.isfile(folder / CONFIG):  # noqa: PTH113 (`Path.is_file` raises an error for invalid file names)
            why = "the export needs the model's configuration, tokenizer and processor (not its weights)"
            where, fix = f"{setting} of {checkpoint / RECORD}", f"give the folder's new location with {_flag(setting)}"
            raise UserError.at(where, problem=f"no {folder / CONFIG}", because=why, fix=fix)


def require_configurations(sources: ModelSources, checkpoint: OpenCheckpoint) -> None:
    """Check that the `config.json` of a checkpoint's model folders is unchanged. Raises `UserError`."""
    before = alone(checkpoint.record.model_files, CONFIG)
    for setting, name, change in differences(before, alone(hashes(sources), CONFIG)) if before else ():
        where, why = f"{setting}: {sources.folders[setting] / name}", "the same weights would be another model"
        problem = f"{change} since {checkpoint.folder / RECORD} was written"
        fix = f"give the folder that the model was trained from: {_flag(setting)}"
        raise UserError.at(where, problem=problem, because=why, fix=fix)


def _flag(setting: str) -> str:
    """Return the command-line flag that gives the new location of the folder in `setting`."""
    flags = {"model.hf_path": "--model DIR", "model.hf_path_vision": "--vision DIR"}
    name = setting.removeprefix("modules.").removesuffix(".hf_path")
    return flags.get(setting, f"--encoder {name}=DIR")


# ------------------------------------------------------------------------------------------------- import


def with_own_encoders(sources: ModelSources) -> ModelSources:
    """Return `sources` with the encoders in the model's `encoders` folder added; given encoders take precedence."""
    files = sorted((sources.model / ENCODERS).glob(f"*/{CONFIG}"))
    encoders = {file.parent.name: file.parent for file in files if not file.parent.name.startswith(".")}
    return replace(sources, encoders={**encoders, **sources.encoders})


def import_folders(
    sources: ModelSources, target: Path, seed: int | None = None, advance: Advance = lambda *_: None
) -> Copied:
    """Write the weights of a model, in their stored dtype, as the checkpoint `target`.

    Args:
        sources: the model's folders.
        target: a new or empty folder. If it is named `step-00000000`, in a folder without checkpoints, a run with that
            `checkpoint.dir` starts from it.
        seed: seed of a fresh projector, by default the default of `train.seed` (0).
        advance: receives progress.

    Raises:
        UserError: a folder is damaged, incomplete or has another model, or `target` is taken or cannot be written.
    """
    require_free(target)
    folders, shapes = sources.read()
    if seed is not None and not folders.fresh_projector:
        why, fix = (
            "nothing of this model is random, as a fresh projector would be",
            "add --fresh-projector, or remove it",
        )
        raise UserError.at("--seed", found=str(seed), expected="none", because=why, fix=fix)
    seed = seed or 0
    weights = open_modules(folders, shapes, seed) | open_encoders(sources.encoders, shapes, seed)
    _require_equal_copies(weights[TEXT], shapes)
    stored = {name: weights[module_of(name, shapes)] for name in stored_shapes(shapes)}
    dtypes = {name: folder_weights.dtype(name) for name, folder_weights in stored.items()}
    sizes = {name: prod(shape) * dtypes[name].itemsize for name, shape in stored_shapes(shapes).items()}
    total, done = sum(sizes.values()), 0

    def load(name: str, shape: Shape) -> Tensor:
        nonlocal done
        done += sizes[name]
        advance("writing", done, total)
        return stored[name].whole(name).reshape(shape)

    entries = []
    for name, shape in stored_shapes(shapes).items():
        size = matrix(shape)
        values = torch.empty(size, dtype=dtypes[name], device="meta")
        entries.append(Entry(f"{WEIGHTS}/{name}", size, (0,) * len(size), values, bind(load, name, size)))
    partial, record = partial_of(target), _record(sources, seed, weights[TEXT].transposed)
    try:
        if not target.parent.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
        with file_lock.alone(lock_of(target), target, "import"):
            try:
                discard(partial)  # Remove what a killed import left.
                partial.mkdir()
                records = write_entries(partial, entries, None)
                publish(partial, records | {RECORD: write_synced(partial / RECORD, record.to_json())})
            finally:
                discard(partial)
    except OSError as error:
        raise _unwritable(target, error) from None
    return Copied(len(entries), total, _names_of(dtypes))


def _require_equal_copies(weights: StoredWeights, shapes: ModelShapes) -> None:
    """Check that both stored copies of a tied weight are equal, since only one is imported. Raises `UserError`."""
    for copy, original in shapes.text.architecture.stored_twice.items():
        if copy in weights.shapes:
            rows = weights.shapes[original][0]
            slices = [TensorSlice(original, (start, min(rows, start + _ROWS))) for start in range(0, rows, _ROWS)]
            weights.require_copy(copy, original, slices)


def _record(sources: ModelSources, seed: int, transposed: bool) -> RunRecord:
    config = {**sources.as_config(), "train": {"seed": seed}, "optimizer": {"name": "none"}}
    config["model"] |= {"freeze": []}
    origin = str(sources.model.absolute())
    return RunRecord(0, 0, {}, (), config, origin, hashes(sources), transposed, bases=fingerprints(sources.folders))


def require_free(target: Path) -> None:
    """Check that a checkpoint can be written to `target`, and that a run would find it there. Raises `UserError`."""
    steps = whole(target.parent)
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        problem = "exists, and is not an empty folder"
    elif target.name.startswith("step-") and target.name != UNTRAINED:
        problem = f"the name {target.name} is for trained weights; imported ones are {UNTRAINED}"
    elif target.name == UNTRAINED and steps:
        newest = next(reversed(steps.values()))
        problem = f"{newest.name} in {target.parent} is newer, and a run would resume from that"
    else:
        return
    raise UserError.at(target, problem=problem, fix=f"choose {UNTRAINED} in a new folder")


def _unwritable(target: Path, error: OSError) -> UserError:
    fix = "free space or grant access, or choose another folder"
    return UserError.at(error.filename or target, problem=f"cannot be written ({reason(error)})", fix=fix)
