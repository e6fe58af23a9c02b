"""Converts `transformers` folders to a checkpoint that any run can start from, in one process without a group: tensors
stream from file to file, one at a time.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.base import lock as file_lock
from megatron_hetero.base.errors import TEXT, UserError, reason
from megatron_hetero.base.outputs import LATEST, MANIFEST, lock_of, name_of, partial_of, publish, whole, write_synced
from megatron_hetero.checkpoint.exporting import Advance, Copied, names_of
from megatron_hetero.checkpoint.index import WEIGHTS, Entry, matrix
from megatron_hetero.checkpoint.record import FILE_NAME as RECORD
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.checkpoint.sources import ModelSources, hashes
from megatron_hetero.checkpoint.storage import write_entries
from megatron_hetero.hf.folders import CONFIG, ENCODERS
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.hf.weights import StoredWeights
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import drawn_tensors, open_encoders, open_modules, prefix_of, stored_shapes

UNTRAINED = name_of(0)
"""The name of imported weights in a `checkpoint.dir`, from which a run starts at step 1."""
_STEP = "step-"

_ROWS = 4096
"""Rows in memory at a time when two copies of a tensor are compared."""


def with_own_encoders(sources: ModelSources) -> ModelSources:
    """With the additional encoders that an export of ours holds; those of `sources` take precedence."""
    own = sorted((sources.model / ENCODERS).glob(f"*/{CONFIG}"))
    found = {file.parent.name: file.parent for file in own if not file.parent.name.startswith(".")}
    return replace(sources, encoders={**found, **sources.encoders})


def import_folders(
    sources: ModelSources, target: Path, seed: int | None = None, advance: Advance = lambda *_: None
) -> Copied:
    """Write the weights of a model, in their stored dtype, as the checkpoint `target`.

    Args:
        sources: the model's folders.
        target: a new or empty folder. Named `step-00000000`, in a folder without checkpoints, it is what a run with
            that `checkpoint.dir` starts from.
        seed: of a fresh projector, as `train.seed` (0).
        advance: receives progress.

    Raises:
        UserError: a folder is damaged, incomplete or of another model, or `target` is taken or cannot be written.
    """
    require_free(target)
    folders, shapes = sources.read()
    if seed is not None and not folders.fresh_projector and not any(drawn_tensors(m, shapes) for m in shapes.modules):
        raise UserError.at(
            "--seed",
            found=str(seed),
            expected="none",
            because="nothing of this model is random, as a fresh projector would be",
            fix="add --fresh-projector, or remove it",
        )
    seed = seed or 0
    weights = open_modules(folders, shapes, seed) | open_encoders(sources.encoders, shapes, seed)
    _require_equal_copies(weights[TEXT], shapes)
    stored = {name: weights[_module_of(name, shapes)] for name in stored_shapes(shapes)}
    dtypes = {name: of_module.dtype(name) for name, of_module in stored.items()}
    entries = [_entry(name, shape, dtypes[name]) for name, shape in stored_shapes(shapes).items()]
    total, done = sum(prod(entry.size) * entry.values.dtype.itemsize for entry in entries), 0

    def value(entry: Entry) -> Tensor:
        nonlocal done
        name = entry.key.removeprefix(f"{WEIGHTS}/")
        done += entry.values.nbytes
        advance("writing", done, total)
        return stored[name].whole(name).reshape(entry.size)

    partial = partial_of(target)
    try:
        if not target.parent.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
        with file_lock.alone(lock_of(target), target, "import"):
            try:
                _make(partial)
                records = write_entries(partial, entries, None, value)
                publish(partial, records | {RECORD: write_synced(partial / RECORD, _record(sources, seed).to_json())})
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise _unwritable(target, error, complete=(target / MANIFEST).is_file()) from None
    return Copied(len(entries), total, names_of(dtypes))


def _entry(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Entry:
    values = torch.empty(matrix(shape), dtype=dtype, device="meta")
    return Entry(f"{WEIGHTS}/{name}", tuple(values.shape), (0,) * values.dim(), values)


def _module_of(name: str, shapes: ModelShapes) -> str:
    """The module that a stored tensor is of."""
    return next((encoder for encoder in shapes.encoders if name.startswith(prefix_of(encoder, shapes))), TEXT)


def _require_equal_copies(weights: StoredWeights, shapes: ModelShapes) -> None:
    """Check that tied weights stored twice are equal, since only one is kept. Raises `UserError`."""
    for copy, original in shapes.text.architecture.stored_twice.items():
        if copy in weights.shapes:
            rows = weights.shapes[original][0]
            slices = [TensorSlice(original, (start, min(rows, start + _ROWS))) for start in range(0, rows, _ROWS)]
            weights.require_copy(copy, original, slices)


def _record(sources: ModelSources, seed: int) -> RunRecord:
    config = {
        "model": {**sources.as_config(), "freeze": []},
        "train": {"seed": seed},
        "optimizer": {"name": "none"},
    }
    origin = str(sources.model.absolute())
    return RunRecord(0, 0, {}, (), config, imported_from=origin, model_files=hashes(sources))


def require_free(target: Path) -> None:
    """Check that a checkpoint can be written to `target`, and that a run would find it there. Raises `UserError` with a
    path that works.
    """
    problem = _why_taken(target)
    if problem is not None:
        good = next(place for place in _others(target) if _why_taken(place) is None)
        raise UserError.at(target, problem=problem, fix=f"try {good}")


def _why_taken(target: Path) -> str | None:
    steps = whole(target.parent)
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        return "exists, and is not an empty folder"
    if target.name.startswith(_STEP) and target.name != UNTRAINED:
        return f"the name {target.name} is for trained weights; imported ones are {UNTRAINED}"
    if target.name == UNTRAINED and steps:
        newest = next(reversed(steps.values()))
        return f"{newest.name} in {target.parent} is newer, and a run would resume from that"
    return None


def _others(target: Path) -> Iterator[Path]:
    """Other paths where a run would find the checkpoint, closest to the given one first."""
    folder = target.parent if target.name.startswith(_STEP) else target
    if folder.is_dir():
        yield folder / UNTRAINED
    for number in itertools.count(1):
        yield folder.parent / f"{folder.name}-imported{'' if number == 1 else f'-{number}'}" / UNTRAINED


def _make(partial: Path) -> None:
    if partial.exists():
        shutil.rmtree(partial)  # left by a killed import
    partial.mkdir(parents=True)


def _unwritable(target: Path, error: OSError, complete: bool) -> UserError:
    left = f"{target} is complete, but {LATEST} may not name it" if complete else "nothing was left behind"
    return UserError.at(
        error.filename or target,
        problem=f"cannot be written ({reason(error)}); {left}",
        fix="free space or grant access, or choose another folder",
    )
