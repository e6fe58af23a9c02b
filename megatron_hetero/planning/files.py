"""Whether the files that a run reads are there, without opening any: what can be known of them in no time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_hetero.config.schema import Config
from megatron_hetero.errors import UserError
from megatron_hetero.hf.weight_files import weight_files


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
    model = config.model
    folders = [model.hf_path, model.hf_path_vision, *(encoder.hf_path for encoder in model.encoders.values())]
    for folder in folders:
        yield from weight_files(folder) if folder is not None else ()


def _missing(setting: str, path: Path, expected: str) -> UserError:
    found = f"{path}: {_found(path)}"
    return UserError.at(f"{setting} (--{setting})", found=found, expected=expected, fix="correct the path")


def _found(path: Path) -> str:
    return "a folder" if path.is_dir() else "something else" if path.exists() else "nothing there"
