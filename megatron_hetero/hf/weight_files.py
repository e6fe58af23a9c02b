"""The safetensors files of a `transformers` folder: listed, opened, and checked for finite values."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hetero.errors import UserError
from megatron_hetero.files.json_objects import read_object, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ROWS = 4096
"""Rows in memory at a time when a whole tensor is checked."""
_FILE_NAME = re.compile(r"[\w.-]{1,200}\.safetensors")
_AGAIN = "download it again"
_MOST_INDEX_BYTES = 64 * 2**20
"""Some half a million tensors."""


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a folder, with the tensors that its index says are there; None where there is no index.

    Raises:
        UserError: there are none, or the index cannot be read or names files elsewhere.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_object(index, _MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_FILE_NAME.fullmatch(str(file)) for file in weight_map.values()):
            expected = "one that says for each tensor which file of this folder has it (*.safetensors)"
            raise UserError.at(f"{index}: weight_map", found=shown(weight_map), expected=expected, fix=_AGAIN)
        files: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(folder / file, set()).add(name)
        return dict(files)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    raise UserError.at(
        folder,
        found="no safetensors weights",
        expected=f"{SINGLE} or {INDEX} with its shards",
        because="pickles are never loaded",
        fix="convert the model with save_pretrained(..., safe_serialization=True)",
    )


def open_file(path: Path) -> Any:
    """A handle that reads tensors on demand. Raises `UserError`."""
    if not path.is_file():
        expected = f"it because {INDEX} names it"
        raise UserError.at(path, found="no such file", expected=expected, fix="download the folder again")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        found = f"a file that is truncated or not safetensors ({error})"
        raise UserError.at(path, found=found, expected="an intact one", fix="restore or download it again") from error


@contextlib.contextmanager
def readable(path: Path, stored: str) -> Iterator[None]:
    """Inside, a failure to read a tensor is a `UserError`."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError.at(path, problem=f"unreadable tensor {stored} ({error})", fix=_AGAIN) from error


def all_finite(values: Tensor) -> bool:
    """Whether the values hold neither NaN nor infinity. Takes no memory, and less time than reading them."""
    return values.numel() == 0 or all(bool(bound.isfinite()) for bound in torch.aminmax(values))
