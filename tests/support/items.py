"""Data sets of annotations, and items as records have them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hetero.base.contents import StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources.json_files import JsonFiles
from megatron_hetero.data.validation import IMAGES, ItemField, ItemRef
from megatron_hetero.models.items.types import Item, Piece, Size

[IMAGE] = IMAGES
"""The field of pictures for the encoder `vision`."""


def pictures(*files: str) -> tuple[ItemRef, ...]:
    """Items of a record."""
    return tuple(ItemRef(IMAGE, file) for file in files)


def whole(size: Size) -> list[Piece]:
    """The pieces of a picture of that size."""
    return [Piece(0, size)]


def annotated(
    name: str, path: Path, images: Path | None = None, fields: Sequence[ItemField] = IMAGES, **more: Any
) -> Dataset:
    """A data set of JSON or JSONL, without a stored index."""
    return Dataset(name, DatasetConfig(annotations=path, images=images, **more), Reading(fields))


def item_of(path: Path, where: str = "d:1", *, frames: Sequence[Path] = (), **given: Any) -> Item:
    """The item in a file, or in the files of its frames."""
    return Item(StoredFile(str(path)), where, tuple(StoredFile(str(each)) for each in frames), tuple(given.items()))


def values_of(path: Path) -> list[Any]:
    """The values of all records of a JSON file, as they are decoded. Raises the first error."""
    format, file, columns = JsonFiles(), StoredFile(str(path)), {}
    records = len(list(format.scan(file, columns)))
    arrays = {name: np.frombuffer(column, np.int64) for name, column in columns.items()}
    found = [each.value for each in format.read(file, arrays, range(records))]
    for value in found:
        if isinstance(value, UserError):
            raise value
    return found
