"""That what a run writes takes the place of nothing that it reads, or writes elsewhere: links do not hide it."""

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
    """Why a path cannot be what a setting names: the other setting, its path, and the reason."""

    setting: str
    path: Path
    because: str


_Rule = Callable[[Path, Mapping[str, Path]], Iterator[_Conflict]]


def check_paths(config: Config) -> None:
    """Check where a run writes. Raises `UserError` with another place that will do."""
    given = dict(_given(config))
    places = {name: resolved(path, name) for name, path in given.items()}
    if config.export.hf_dir is not None:
        _require("export.hf_dir", config.export.hf_dir, places, _of_export, "trained")
    _require(LOGS, given[LOGS], places, _of_logs, "log")


def _given(config: Config) -> Iterator[tuple[str, Path]]:
    """What is read and written, the export aside, by setting."""
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
    beside = (Path(f"{conflict.path}-{suffix}{'' if n == 1 else f'-{n}'}") for n in count(1))
    good = next(path for path in beside if next(rule(path, places), None) is None)
    raise UserError.at(
        f"{setting} (--{setting})",
        found=str(given),
        expected=f"a folder apart from {conflict.setting} ({conflict.path})",
        because=conflict.because,
        fix=f"try `--{setting} {good}`",
    )


def _of_export(target: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """An export removes what was in its folder, and what it calls its own beside it."""
    gone = {target, partial_of(target), replaced_of(target), lock_of(target)}
    for setting, path in places.items():
        if gone & {path, *path.parents}:
            yield _Conflict(setting, path, "the export replaces its folder whole")
        if setting.startswith("model.") and path in target.parents:
            yield _Conflict(setting, path, "a model's folder holds one model")
    yield from _inside(target, places)


def _of_logs(log: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """A run sets aside what an earlier one has left under the names that it needs."""
    for setting, path in places.items():
        if path.parent == log and path.name in TAKEN:
            yield _Conflict(setting, log, f"the run's own {path.name} goes there")
    yield from _inside(log, {name: path for name, path in places.items() if name != LOGS})


def _inside(path: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """A path in `checkpoint.dir` or `log.dir` must leave the names to them that they use."""
    for setting, names in ((CHECKPOINTS, is_ours), (LOGS, TAKEN.__contains__)):
        folder = places.get(setting)
        if folder is not None and folder in path.parents:
            name = path.relative_to(folder).parts[0]
            if names(name):
                yield _Conflict(setting, folder, f"{name} there is of {setting} itself")
