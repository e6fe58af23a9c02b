"""Write a model as a `transformers` folder: shard by shard, beside its place, which it takes when it is whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_hetero.errors import UserError
from megatron_hetero.files import lock as file_lock
from megatron_hetero.hf.folder_files import COMPANIONS, CONFIG
from megatron_hetero.hf.weight_files import INDEX, SINGLE
from megatron_hetero.outputs.export_mark import mark, what_would_be_lost
from megatron_hetero.outputs.exports import lock_of, partial_of, replaced_of

K = TypeVar("K")
SHARD_BYTES = 5 * 10**9
NO_CHANGES: Mapping[str, str | None] = {}
Dtypes = torch.dtype | Mapping[str, torch.dtype]
"""One type for all tensors of a folder, or one for each by name."""
Companions = Mapping[str, bytes]
"""What goes beside the weights, by file name: configuration, tokenizer and processor."""


def read_companions(folder: Path, changes: Mapping[str, str | None] = NO_CHANGES) -> Companions:
    """Those of a folder, but for `changes`: by name another text, or None for a file that is left out. Raises
    `UserError` where one cannot be read.
    """
    names = [name for name in COMPANIONS if name not in changes and (folder / name).is_file()]
    try:
        found = {name: (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise UserError.at(
            error.filename or folder,
            found=(error.strerror or str(error)).lower(),
            expected="a file that can be read",
            because="it goes into the exported model",
            fix="restore the folder",
        ) from None
    return found | {name: text.encode() for name, text in changes.items() if text is not None}


class FolderWriter:
    """Writes a `transformers` folder shard by shard, beside its final place, and moves it there when it is whole.

    `shapes`: every tensor to come, with its shape; `dtype`: what they are written as. Use `put` for each, in any order
    (in that of `shapes`, no more than one shard is held), then `finish`.
    """

    def __init__(self, target: Path, shapes: Mapping[str, tuple[int, ...]], dtype: Dtypes, limit: int = SHARD_BYTES):
        self.target = target
        self.dtypes = {name: dtype if isinstance(dtype, torch.dtype) else dtype[name] for name in shapes}
        self.partial = partial_of(target)
        sizes = {name: torch.Size(shape).numel() * self.dtypes[name].itemsize for name, shape in shapes.items()}
        self.shards = plan_shards(sizes, limit)
        self._shard_of = {name: i for i, names in enumerate(self.shards) for name in names}
        self._waiting: list[dict[str, Tensor]] = [{} for _ in self.shards]

    def put(self, name: str, tensor: Tensor) -> None:
        """Hand over one tensor (on the CPU); its shard is written once all of its tensors are here."""
        shard = self._shard_of[name]
        self._waiting[shard][name] = tensor.to(self.dtypes[name]).contiguous()
        if len(self._waiting[shard]) == len(self.shards[shard]):
            path = self.partial / self.file_name(shard)
            save_file(self._waiting[shard], path, metadata={"format": "pt"})
            path.chmod(0o666 & ~_umask())  # safetensors makes files that nobody else can read
            self._waiting[shard].clear()

    def file_name(self, shard: int) -> str:
        """The file of a shard, named as transformers does."""
        total = len(self.shards)
        return SINGLE if total == 1 else f"model-{shard + 1:05d}-of-{total:05d}.safetensors"

    def finish(self, companions: Companions) -> None:
        """Add the index, the `companions` and the mark of an export, and move into place. The configuration names the
        type of the tensors, where all have the same. Raises `OSError`, and `UserError` where something that is no
        export has taken the place meanwhile.
        """
        if len(self.shards) > 1:
            self._write_index()
        for name, content in companions.items():
            (self.partial / name).write_bytes(content)
        if len(dtypes := set(self.dtypes.values())) == 1:
            _set_dtype(self.partial / CONFIG, dtypes.pop())
        mark(self.partial)
        _require_replaceable(self.target)
        _replace_folder(self.partial, self.target)

    def _write_index(self) -> None:
        size = sum((self.partial / self.file_name(i)).stat().st_size for i in range(len(self.shards)))
        weight_map = {name: self.file_name(i) for i, names in enumerate(self.shards) for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def plan_shards(sizes: Mapping[K, int], limit: int) -> list[list[K]]:
    """Tensors, with their bytes, to files of at most `limit` bytes each (a larger tensor gets its own), in the order
    given: at least one file.
    """
    shards: list[list[K]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def require_writable(folder: Path) -> None:
    """Check, before any work is done, that `folder` can be made or replaced. Raises `UserError`."""
    if os.path.ismount(folder):  # It can be neither renamed nor removed.
        raise UserError.at(
            folder,
            found="a mount point",
            expected="a folder that can be replaced",
            because="the export is put together beside it, and then takes its place",
            fix=f"name a folder inside it, such as {folder / 'model'} (of a run export.hf_dir)",
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        probe = folder.parent / f".{folder.name}.probe-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise UserError(
            f"{folder}: found that it cannot be written ({error.strerror or error}), expected a place for the "
            f"exported model; choose another folder (of a run export.hf_dir) or mend its permissions"
        ) from error
    _require_replaceable(folder)


def _require_replaceable(folder: Path) -> None:
    try:
        found = what_would_be_lost(folder)
    except OSError as error:
        found = f"that {error.filename or folder} cannot be read ({error.strerror or error})"
    if found is not None:
        raise UserError.at(
            folder,
            found=found,
            expected="nothing, an empty folder or an export with the mark of this version",
            because="the export replaces it whole",
            fix="choose another folder (of a run export.hf_dir), or remove this one yourself if nobody needs it",
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    before = path.read_text(encoding="utf-8")
    config = json.loads(before)
    name = str(dtype).removeprefix("torch.")
    for part in (config, *(p for p in config.values() if isinstance(p, dict))):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = name
    config.setdefault("torch_dtype" if "torch_dtype" in config else "dtype", name)
    if config != json.loads(before):
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _replace_folder(new: Path, target: Path) -> None:
    old = replaced_of(target)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def folder_writer(
    target: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: Dtypes,
    companions: Companions,
    limit: int = SHARD_BYTES,
) -> Iterator[FolderWriter]:
    """A `FolderWriter` that finishes on success and leaves nothing behind on failure. `companions`: see `finish`. A
    full disk, and another process that writes there, are `UserError`s.
    """
    writer = FolderWriter(target, shapes, dtype, limit)
    require_writable(target)
    try:
        with file_lock.alone(lock_of(target), target, "export"):
            shutil.rmtree(writer.partial, ignore_errors=True)
            try:
                writer.partial.mkdir()
                yield writer
                writer.finish(companions)
            finally:
                shutil.rmtree(writer.partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{target}: found that the model cannot be written ({error}); free space or choose another folder (of a "
            f"run export.hf_dir)"
        ) from error
