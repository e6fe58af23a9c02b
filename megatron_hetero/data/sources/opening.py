"""The files of a data set, and the format that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_hetero.base.contents import StoredFile, is_url
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.sources.formats import Opened
from megatron_hetero.data.sources.json_files import JsonFiles
from megatron_hetero.data.sources.patterns import files_of

_SUFFIXES = {".parquet": "parquet", ".tar": "webdataset"}


def open_files(entry: DatasetConfig, setting: str, items: Sequence[str]) -> Opened:
    """Finds the files of the data set of a `setting`. `items`: fields that items may be in. Raises `UserError`."""
    if entry.annotations is not None:
        return JsonFiles(), (StoredFile(str(entry.annotations)),), {}
    pattern, chosen = entry.files or "", entry.format
    if chosen == "auto":
        is_folder = not is_url(pattern) and Path(pattern).is_dir()
        chosen = "energon" if is_folder else _SUFFIXES.get(Path(pattern).suffix.lower(), "json")
    if chosen == "energon":
        from megatron_hetero.data.sources.energon import open_energon

        return open_energon(Path(pattern), entry, f"{setting}.files")
    format = JsonFiles()
    if chosen == "parquet":
        from megatron_hetero.data.sources.parquet import ParquetFiles

        format = ParquetFiles(entry.fields, items)
    elif chosen == "webdataset":
        from megatron_hetero.data.sources.tars import TarFiles

        format = TarFiles(bool(entry.fields))
    return format, files_of(pattern, f"{setting}.files"), {}
