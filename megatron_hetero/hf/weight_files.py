"""The files of safetensors in a `transformers` folder: which there are, opened, and whether they hold numbers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hetero.errors import UserError
from megatron_hetero.files.json_objects import Rule, Table, check, read_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ROWS = 4096
"""Of a tensor that is looked at whole, so many are in memory at a time."""
_FILE_NAME = re.compile(r"[\w.-]{1,200}\.safetensors")
_AGAIN = "download it again"
_RULES: Table = {
    "weight_map": Rule(
        "an object that says of each tensor in which file of this folder it is (*.safetensors)",
        lambda v: isinstance(v, dict) and all(isinstance(f, str) and _FILE_NAME.fullmatch(f) for f in v.values()),
        fix=_AGAIN,
    )
}


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a folder, with the tensors that its index says are there; None where there is no index.

    Raises:
        UserError: there are none, or the index cannot be read or names files elsewhere.
    """
    index = folder / INDEX
    if index.is_file():
        values = read_object(index)
        if "weight_map" not in values:
            raise UserError.at(index, found="no weight_map", expected="one", fix=_AGAIN)
        check(index, values, _RULES)
        files: dict[Path, set[str]] = {}
        for name, file in values["weight_map"].items():
            files.setdefault(folder / file, set()).add(name)
        return dict(files)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    raise UserError(
        f"{folder}: found no safetensors weights, expected {SINGLE} or {INDEX} with its shards; other formats "
        f"(pickles) are never loaded: convert with save_pretrained(..., safe_serialization=True)"
    )


def open_file(path: Path) -> Any:
    """A handle whose tensors are read when they are asked for. Raises `UserError`."""
    if not path.is_file():
        raise UserError(f"{path}: found no such file, expected it because {INDEX} names it; download the folder again")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: found a file that is truncated or not safetensors ({error}), expected a whole one; "
            f"download it again"
        ) from error


@contextlib.contextmanager
def readable(path: Path, stored: str) -> Iterator[None]:
    """Inside, a tensor that cannot be read is a `UserError`."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: found tensor {stored} unreadable ({error}); download the file again") from error


def all_finite(values: Tensor) -> bool:
    """Whether there is no NaN and no infinity in it. Takes no memory, and less time than reading it did."""
    return values.numel() == 0 or all(bool(bound.isfinite()) for bound in torch.aminmax(values))


def count_not_finite(read: Callable[[slice], Tensor], length: int) -> int:
    """How many values of a tensor of `length` rows are NaN or infinite. `read`: some of its rows."""
    parts = (read(slice(start, start + ROWS)) for start in range(0, length, ROWS))
    return sum(int(part.isfinite().logical_not().sum()) for part in parts)
