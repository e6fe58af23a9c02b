"""Checks that the export of a run replaces neither an input nor another output, through symbolic links too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_hetero.errors import UserError
from megatron_hetero.files.paths import resolved
from megatron_hetero.outputs.checkpoints import is_ours
from megatron_hetero.outputs.exports import lock_of, partial_of, replaced_of

if TYPE_CHECKING:
    from megatron_hetero.config.schema import Config

CHECKPOINTS, LOGS = "checkpoint.dir", "log.dir"


class _Conflict(NamedTuple):
    """A conflict between the export's folder and another path of the run."""

    setting: str
    """The other setting."""
    path: Path
    """Its path."""
    because: str
    """The reason for the message."""


def check_paths(config: Config) -> None:
    """Check the paths of a run. Raises `UserError` with one that works."""
    places, target = {name: resolved(path, name) for name, path in _given(config)}, config.export.hf_dir
    for conflict in _in_checkpoints(places[LOGS], places):
        where, found, because = f"{LOGS} (--{LOGS})", str(config.log.dir), conflict.because
        expected, fix = f"a folder separate from {CHECKPOINTS} ({conflict.path})", "choose another"
        raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)
    if target is None:
        return
    conflict = next(_conflicts(resolved(target, "export.hf_dir"), places), None)
    if conflict is not None:
        others = (Path(f"{conflict.path}-trained{'' if n == 1 else f'-{n}'}") for n in count(1))
        good = next(path for path in others if next(_conflicts(path, places), None) is None)
        raise UserError.at(
            "export.hf_dir (--export.hf_dir)",
            found=str(target),
            expected=f"a folder separate from {conflict.setting} ({conflict.path})",
            because=conflict.because,
            fix=f"try `--export.hf_dir {good}`",
        )


def _given(config: Config) -> Iterator[tuple[str, Path]]:
    """All inputs and outputs but the export, by setting."""
    model, checkpoint = config.model, config.checkpoint
    yield "model.hf_path", model.hf_path
    if model.hf_path_vision is not None:
        yield "model.hf_path_vision", model.hf_path_vision
    for name, encoder in model.encoders.items():
        yield f"model.encoders.{name}.hf_path", encoder.hf_path
    for name, dataset in config.data.registry.items():
        yield f"data.registry.{name}.annotations", dataset.annotations
        if dataset.images is not None:
            yield f"data.registry.{name}.images", dataset.images
    if checkpoint.resume not in ("auto", "never"):
        yield "checkpoint.resume", Path(checkpoint.resume)
    if checkpoint.dir is not None:
        yield CHECKPOINTS, checkpoint.dir
    yield LOGS, config.log.dir


def _conflicts(target: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """An export replaces its folder and the temporary folders next to it."""
    gone = {target, partial_of(target), replaced_of(target), lock_of(target)}
    for setting, path in places.items():
        if gone & {path, *path.parents}:
            yield _Conflict(setting, path, "the export replaces the whole folder")
        if setting.startswith("model.") and path in target.parents:
            yield _Conflict(setting, path, "a model folder holds one model")
    yield from _in_checkpoints(target, places)


def _in_checkpoints(path: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """A run moves and deletes what has a reserved name in its folder of checkpoints."""
    folder = places.get(CHECKPOINTS)
    if folder is not None and folder in path.parents and is_ours(name := path.relative_to(folder).parts[0]):
        yield _Conflict(CHECKPOINTS, folder, f"{name} is reserved there")
