"""The `--plan` command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_hetero.config.flags import PlanRequest
from megatron_hetero.config.schema import Config
from megatron_hetero.errors import UserError
from megatron_hetero.planning.estimate import Plan
from megatron_hetero.planning.plot import draw_plan
from megatron_hetero.planning.report import print_plan
from megatron_hetero.schedule.drawing import require_plot


def show_plan(config: Config, request: PlanRequest) -> None:
    """Print the plan of a configuration, and draw it on request. Raises `UserError`."""
    if request.plot is not None:
        require_plot(request.plot)
    if request.files:
        require_files(config)
    replaced = request.plot is not None and request.plot.exists()
    plan = Plan.of(config, request.world_size)
    print_plan(plan)
    if request.plot is not None:
        draw_plan(plan, request.plot)
        print(f"\nwrote {request.plot}{', replacing the previous file' if replaced else ''}")


def require_files(config: Config) -> None:
    """Check that the weights and data sets that a run of the configuration reads are there, held-out ones too. Raises
    `UserError`.
    """
    for file in _weights(config):
        if not file.is_file():
            expected, fix = "weights, which the folder's index names", "download or copy the folder again"
            raise UserError.at(file, found=_found(file), expected=expected, fix=fix)
    names = [text.split("%")[0] for text in config.data.datasets]
    for name in dict.fromkeys([*names, *config.eval.datasets]):
        entry, setting = config.data.registry[name], f"data.registry.{name}"
        if not entry.annotations.is_file():
            raise _missing(f"{setting}.annotations", entry.annotations, "a file of records")
        if entry.images is not None and not entry.images.is_dir():
            raise _missing(f"{setting}.images", entry.images, "the folder that image paths are relative to")


def _weights(config: Config) -> Iterator[Path]:
    """The files of all folders that weights come from. Raises `UserError` for a folder without any."""
    from megatron_hetero.hf.weight_files import weight_files  # Not at the top: it imports torch.

    model = config.model
    folders = [model.hf_path, model.hf_path_vision, *(encoder.hf_path for encoder in model.encoders.values())]
    for folder in folders:
        yield from weight_files(folder) if folder is not None else ()


def _missing(setting: str, path: Path, expected: str) -> UserError:
    found = f"{path}: {_found(path)}"
    return UserError.at(f"{setting} (--{setting})", found=found, expected=expected, fix="correct the path")


def _found(path: Path) -> str:
    return "a folder" if path.is_dir() else "something else" if path.exists() else "nothing there"
