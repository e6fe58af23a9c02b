"""Saves and loads checkpoints of modules that library users build; runs in other layouts can resume from them.

Weights, master weights and moments are stored as whole tensors, `MODULE.PARAMETER`, in the format of the training
program. Persistent buffers are stored from the first replica. `modules.json` has the settings of each parameter.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from megatron_hetero.base.errors import UserError, in_short, listed
from megatron_hetero.base.files import read_as
from megatron_hetero.base.lock import Lock
from megatron_hetero.base.outputs import LOCK, MANIFEST, chosen_in, name_of, unwritable, whole
from megatron_hetero.checkpoint.contents import read, written
from megatron_hetero.checkpoint.index import (
    BUFFERS,
    NAMES,
    WEIGHTS,
    Entry,
    Shape,
    index_shapes,
    matrix,
)
from megatron_hetero.checkpoint.record import require_tensors
from megatron_hetero.checkpoint.resume import lock_folder
from megatron_hetero.checkpoint.storage import open_checkpoint, read_entries, save
from megatron_hetero.groups.collective import all_or_none, on_every, on_first, on_first_of_all
from megatron_hetero.groups.watchdog import watched
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.library_modules import global_names
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.wrapped import WrappedWeights, is_sharded

RECORD = "modules.json"
_FIX = "use another checkpoint"
_ELSEWHERE = "save `optimizer.state_for_dcp()` with torch.distributed.checkpoint (docs/library.md)"


class _Record(Struct):
    step: int
    extra: dict[str, Any]
    optimizers: dict[str, str]
    settings: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Loaded:
    """Result of `load_checkpoint`: the last step of the checkpoint, and its `extra` values from `save_checkpoint`."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@partial(watched, patient=True)
def save_checkpoint(
    folder: str | Path,
    optimizer: JointOptimizer,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write modules and optimizers after `step` to `folder`/step-N. Collective; call it between steps.

    Saving is atomic: an interrupted save leaves no step-N, and older checkpoints stay intact. A checkpoint has
    parameters, persistent buffers, and states and settings (`param_groups`) of optimizers, but no random states.

    Args:
        folder: folder of checkpoints, on a disk that all ranks share.
        optimizer: result of `build_optimizers`; each module uses `AdamW` or `SGD`, or is frozen.
        step: number of the last step, greater than the steps of all checkpoints in `folder`.
        extra: additional state of the program as JSON values; only the first rank's is saved.
        keep_last: number of newest checkpoints to keep; None keeps all.

    Returns:
        Path of the checkpoint.

    Raises:
        UserError: on all ranks, if the checkpoint cannot be written, a module has another optimizer, `folder` has a
            later checkpoint, or another run is writing there.
    """
    group, folder, locks = optimizer.topology.files, Path(folder).absolute(), list[Lock]()
    working = optimizer.topology.watchdog.working
    on_every(group, lambda: _require_own(optimizer, keep_last))
    text, writers = on_first_of_all(
        group, lambda: _described(optimizer), lambda by_rank: _joined(by_rank, step, extra), working
    )
    buffers = {
        name: _entry(name, values)
        for name, values in _buffers(optimizer.modules)
        if writers.get(name) == optimizer.topology.rank
    }
    entries = [*written(optimizer, _shapes(optimizer.modules)), *buffers.values()]
    try:
        on_first(group, lambda: _lock(folder, step, locks))
        return save(entries, folder, step, lambda: {RECORD: text}, keep_last, group, working).path
    finally:
        for lock in locks:
            lock.release(remove=True)


@partial(watched, patient=True)
def load_checkpoint(folder: str | Path, optimizer: JointOptimizer) -> Loaded | None:
    """Load weights, buffers, and states and settings of optimizers, saved in any layout. Collective over all ranks.

    Args:
        folder: a checkpoint, or a folder of checkpoints, from which the newest is loaded.
        optimizer: result of `build_optimizers`; its modules have the parameters of the saved modules.

    Returns:
        The step and the `extra` values; None if `folder` is a folder of checkpoints (not step-N) that is missing or
        empty.

    Raises:
        UserError: on all ranks, if the checkpoint is missing or damaged, or has other modules or optimizers.
    """
    group, working = optimizer.topology.files, optimizer.topology.watchdog.working
    on_every(group, lambda: _require_own(optimizer))
    chosen = on_first(group, lambda: _chosen(Path(folder).absolute()))
    if chosen is None:
        return None
    record, index, _ = open_checkpoint(
        chosen, RECORD, lambda folder: read_as(folder / RECORD, _Record, _FIX), group, working
    )
    shapes, stored, buffers = _shapes(optimizer.modules), index_shapes(index), _buffers(optimizer.modules)
    local_shapes = {f"{WEIGHTS}/{name}": matrix(shape) for name, shape in shapes.items()}
    for name, values in buffers:
        entry = _entry(name, values)
        local_shapes[entry.key] = entry.size
    saved = {key: shape for key, shape in stored.items() if key.startswith((f"{WEIGHTS}/", f"{BUFFERS}/"))}
    on_first_of_all(group, lambda: local_shapes, lambda by_rank: _require_same(by_rank, saved, chosen))
    settings = all_or_none(group, lambda: list(_settings(optimizer, record, chosen)))
    optimizer.wait_for_weights()
    read_entries(chosen, index, chain(read(optimizer, shapes, stored), _read_buffers(buffers)), group, working)
    for each in optimizer.sharded.values():
        each.renew_weights()
    optimizer.wait_for_weights()
    for param_group, saved_settings in settings:
        param_group.update(saved_settings)
    return Loaded(record.step, record.extra)


def _require_own(optimizer: JointOptimizer, keep_last: int | None = None) -> None:
    """Check that all optimizer states are flat tensors of dtypes that checkpoints can store. Raises `UserError`."""
    if keep_last is not None and keep_last < 1:
        fix = "use None to keep all"
        raise UserError.at("save_checkpoint: keep_last", found=str(keep_last), expected="1 or more", fix=fix)
    for module in optimizer.modules:
        where = f"checkpoint of module `{module.name}`"
        if module.key in optimizer.optimizers and module.key not in optimizer.sharded:
            found = f"an optimizer of another kind, {type(optimizer.by_module[module.key]).__name__}"
            fix = f"{_ELSEWHERE}, or give the module `AdamW` or `SGD`"
            raise UserError.at(where, found=found, expected="`AdamW` or `SGD`", fix=fix)
        for name, values in chain(module.parameters.items(), _buffers([module])):
            sharded = isinstance(module.weights, WrappedWeights) and is_sharded(values)
            if sharded or values.dtype not in NAMES:
                found = "DTensors" if sharded else str(values.dtype)
                expected = f"tensors of {', '.join(str(each).removeprefix('torch.') for each in NAMES)}"
                raise UserError.at(where, found=f"{found} ({name})", expected=expected, fix=_ELSEWHERE)


def _lock(folder: Path, step: int, locks: list[Lock]) -> None:
    """Lock the folder, add the lock to `locks`, and check that all checkpoints precede `step`. Raises `UserError`."""
    locks.append(lock_folder(folder, "folder of checkpoints", LOCK, "their checkpoints", unwritable))
    if locks[0].note:
        warnings.warn(locks[0].note, stacklevel=2)
    if later := [name_of(each) for each in whole(folder) if each >= step]:
        because, fix = "the newest is resumed from", f"save to another folder, or remove {listed(later)} first"
        raise UserError.at(folder / name_of(step), problem=f"not after {later[-1]}", because=because, fix=fix)


def _chosen(path: Path) -> Path | None:
    """Return the checkpoint to load: `path` itself or the newest one in it; None if that folder has no checkpoint."""
    chosen = chosen_in(path)
    named = (chosen / MANIFEST).is_file() or path.is_file() or re.fullmatch(r"step-\d+", path.name)
    return chosen if named else None


# ---------------------------------------------------------------------------------------- modules.json

_Described = tuple[dict[str, str], dict[str, Any], list[tuple[str, str]]]


def _described(optimizer: JointOptimizer) -> _Described:
    """Return this rank's optimizer kinds by module, settings by parameter, and (name, hash) of each buffer in a first
    replica. Raises `UserError`.
    """
    kinds = {key: each.algorithm.kind.name for key, each in optimizer.sharded.items()}
    settings = dict[str, Any]()
    for group, names in _groups(optimizer):
        values = {key: value for key, value in group.items() if key not in ("params", "names")}
        settings |= dict.fromkeys(names, json.loads(_json(values, "param_groups", default=float)))
    first_replicas = (module for module in optimizer.modules if module.replicas.rank() == 0)
    return kinds, settings, [(name, _hash(values)) for name, values in _buffers(first_replicas)]


def _joined(by_rank: Sequence[_Described], step: int, extra: Mapping[str, Any] | None) -> tuple[str, dict[str, int]]:
    """Return the JSON text of all ranks' joint record, and the writing rank of each buffer. Raises `UserError`."""
    optimizers, settings, buffers = dict[str, str](), dict[str, Any](), dict[str, tuple[int, str]]()
    for rank, (local_optimizers, local_settings, hashes) in enumerate(by_rank):
        optimizers |= local_optimizers
        settings |= local_settings
        for name, digest in hashes:
            first, expected = buffers.setdefault(name, (rank, digest))
            if digest != expected:
                problem = f"differs between ranks {first} and {rank}, of one replica"
                fix = "make it equal, since one of them is saved, or register it with persistent=False"
                raise UserError.at(f"save_checkpoint: buffer {name}", problem=problem, fix=fix)
    record = {"step": step, "extra": dict(extra or {}), "optimizers": optimizers, "settings": settings}
    return _json(record, "extra"), {name: rank for name, (rank, _) in buffers.items()}


def _settings(optimizer: JointOptimizer, record: _Record, checkpoint: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield each parameter group with its saved settings. Raises `UserError` if settings or optimizer do not fit."""
    for key, each in optimizer.sharded.items():
        if (kind := each.algorithm.kind.name) != (found := record.optimizers.get(key, kind)):
            fix = "build the optimizer that was saved, or load another checkpoint"
            raise UserError.at(checkpoint, found=f"{found} of module `{key}`", expected=kind, fix=fix)
    for group, names in _groups(optimizer):
        # Parameters that were frozen when the checkpoint was saved have no settings.
        recorded = [record.settings[name] for name in names if name in record.settings]
        if any(settings != recorded[0] for settings in recorded):
            fix = "choose `lr` and `weight_decay` that group parameters as before"
            raise UserError.at(checkpoint, problem=f"other settings in each of one group ({listed(names)})", fix=fix)
        first = recorded[0] if recorded else {}
        saved = {key: tuple(value) if isinstance(value, list) else value for key, value in first.items()}
        wrong = [
            key
            for key, value in saved.items()
            if key in ("params", "names") or _kind(value) != _kind(group.get(key, value))
        ]
        if wrong:
            raise UserError.at(checkpoint / RECORD, problem=f"wrong settings: {listed(wrong)}", fix=_FIX)
        yield group, saved


def _kind(setting: Any) -> object:
    """Return a key for the compatibility of settings: a saved setting may replace one with an equal key."""
    if isinstance(setting, tuple | list):
        return [_kind(each) for each in setting]
    is_number = isinstance(setting, int | float | Tensor) and not isinstance(setting, bool)
    return abs(setting) < 1e30 if is_number else type(setting)


def _groups(optimizer: JointOptimizer) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield each parameter group of the optimizer with the stored names of its parameters."""
    for each in optimizer.sharded.values():
        for group in each.param_groups:
            yield group, [each.module.local_map[name][0].name for name in group["names"]]


def _json(value: Any, what: str, default: Any = None) -> str:
    try:
        if not _has_text_keys(value):
            raise TypeError("keys that are not text")
        return json.dumps(value, default=default)
    except (TypeError, ValueError) as error:
        fix = "save numbers, texts, lists of them, and dicts by text (for schedulers see docs/library.md)"
        raise UserError.at(f"save_checkpoint: {what}", problem=f"no JSON ({in_short(error)})", fix=fix) from None


def _has_text_keys(value: Any) -> bool:
    """Return whether the keys of all dicts in a value are strings, which JSON preserves."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and _has_text_keys(list(value.values()))
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


# ------------------------------------------------------------------------------------------------ tensors


def _buffers(modules: Iterable[TrainedModule]) -> list[tuple[str, Tensor]]:
    """Return the persistent buffers of this rank with their names, `MODULE.BUFFER`."""
    buffers = list[tuple[str, Tensor]]()
    for module in modules:
        for stage, chunk in zip(module.stages, module.chunks, strict=True):
            transient = {
                f"{path}.{name}".removeprefix(".")
                for path, submodule in chunk.named_modules()
                for name in submodule._non_persistent_buffers_set
            }
            persistent = {path: values.detach() for path, values in chunk.named_buffers() if path not in transient}
            names = global_names(chunk, list(persistent))
            prefix = f"stage {stage}: " if module.topology.layouts[module.name].pp > 1 else ""
            for path, values in persistent.items():
                buffers.append((f"{module.name}.{names.get(path, prefix + path)}", values))
    return buffers


def _hash(values: Tensor) -> str:
    data = values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return f"{values.dtype}{tuple(values.shape)}{hashlib.sha256(data).hexdigest()}"


def _entry(name: str, values: Tensor) -> Entry:
    """Return the checkpoint entry for a whole buffer."""
    size = matrix(tuple(values.shape)) or (1,)
    return Entry(f"{BUFFERS}/{name}", size, (0,) * len(size), values.reshape(size))


def _read_buffers(buffers: Iterable[tuple[str, Tensor]]) -> Iterator[Sequence[Entry]]:
    for name, values in buffers:
        staged = torch.empty(values.shape, dtype=values.dtype)
        yield [_entry(name, staged)]
        values.copy_(staged)


def _shapes(modules: Sequence[TrainedModule]) -> dict[str, Shape]:
    """Return the unsharded shapes of this rank's parameters, by stored name."""
    shapes: dict[str, Shape] = {}
    for module in modules:
        for name, parameter in module.parameters.items():
            by_tensor = dict[str, list[TensorSlice]]()
            for tensor_slice in chain(*(weight_map[name] for weight_map in module.maps)):
                by_tensor.setdefault(tensor_slice.name, []).append(tensor_slice)
            for tensor, slices in by_tensor.items():
                rows = max(each.rows[1] for each in slices)
                columns = [each.columns for each in slices if each.columns]
                if parameter.dim() == 0:
                    shapes[tensor] = (1,)
                elif columns:
                    shapes[tensor] = (rows, max(stop for _, stop in columns))
                else:
                    shapes[tensor] = (rows, *parameter.shape[1:])
    return shapes


def _require_same(by_rank: Sequence[Mapping[str, Shape]], saved: Mapping[str, Shape], checkpoint: Path) -> None:
    """Check that the saved tensors are exactly the tensors of all ranks, with equal shapes. Raises `UserError`."""
    union = dict(chain(*(shapes.items() for shapes in by_rank)))
    require_tensors(checkpoint, saved, union)
    for shapes in by_rank:
        if not shapes.items() <= union.items():
            require_tensors(checkpoint, saved, {**union, **shapes})
