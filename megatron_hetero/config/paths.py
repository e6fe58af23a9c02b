"""Checks that no output of a run overwrites one of its inputs or another output, through symbolic links too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_hetero.errors import UserError
from megatron_hetero.files.paths import resolved
from megatron_hetero.outputs.checkpoints import is_ours
from megatron_hetero.outputs.exports import lock_of, partial_of, replaced_of
from megatron_hetero.outputs.logs import TAKEN

if TYPE_CHECKING:
    from megatron_hetero.config.schema import Config

CHECKPOINTS, LOGS = "checkpoint.dir", "log.dir"


class _Conflict(NamedTuple):
    """A conflict between an output path and another path of the run."""

    setting: str
    """The other setting."""
    path: Path
    """Its path."""
    because: str
    """The reason for the message."""


_Rule = Callable[[Path, Mapping[str, Path]], Iterator[_Conflict]]


def check_paths(config: Config) -> None:
    """Check the output paths of a run. Raises `UserError` with a path that works."""
    given = dict(_given(config))
    places = {name: resolved(path, name) for name, path in given.items()}
    if config.export.hf_dir is not None:
        _require("export.hf_dir", config.export.hf_dir, places, _of_export, "trained")
    _require(LOGS, given[LOGS], places, _of_logs, "log")


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


def _require(setting: str, given: Path, places: Mapping[str, Path], rule: _Rule, suffix: str) -> None:
    """Check a path by a rule. Raises `UserError`."""
    conflict = next(rule(resolved(given, setting), places), None)
    if conflict is None:
        return
    others = (Path(f"{conflict.path}-{suffix}{'' if n == 1 else f'-{n}'}") for n in count(1))
    good = next(path for path in others if next(rule(path, places), None) is None)
    raise UserError.at(
        f"{setting} (--{setting})",
        found=str(given),
        expected=f"a folder separate from {conflict.setting} ({conflict.path})",
        because=conflict.because,
        fix=f"try `--{setting} {good}`",
    )


def _of_export(target: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """An export replaces its folder and the temporary folders next to it."""
    gone = {target, partial_of(target), replaced_of(target), lock_of(target)}
    for setting, path in places.items():
        if gone & {path, *path.parents}:
            yield _Conflict(setting, path, "the export replaces the whole folder")
        if setting.startswith("model.") and path in target.parents:
            yield _Conflict(setting, path, "a model folder holds one model")
    yield from _inside(target, places)


def _of_logs(log: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """A run moves an earlier run's files away from the names it needs."""
    for setting, path in places.items():
        if path.parent == log and path.name in TAKEN:
            yield _Conflict(setting, log, f"the run writes its own {path.name} there")
    yield from _inside(log, {name: path for name, path in places.items() if name != LOGS})


def _inside(path: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """A path in `checkpoint.dir` or `log.dir` must avoid their reserved names."""
    for setting, names in ((CHECKPOINTS, is_ours), (LOGS, TAKEN.__contains__)):
        folder = places.get(setting)
        if folder is not None and folder in path.parents:
            name = path.relative_to(folder).parts[0]
            if names(name):
                yield _Conflict(setting, folder, f"{name} is reserved there")
