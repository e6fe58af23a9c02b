"""`transformers` folders: files to read, and a writer of new folders."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, Union

from safetensors import SafetensorError

from megatron_hetero.base.errors import UserError, listed, os_errors_as, reason
from megatron_hetero.base.files import read_bytes, read_object, shown
from megatron_hetero.base.lock import alone
from megatron_hetero.base.outputs import lock_of, mark, new_beside, remove_leftovers, remove_marked, what_would_be_lost

# Commands import this file before torch, whose import takes seconds.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG = "config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
)
NESTED = "processor_config.json"
"""Name of the file in newer folders with the settings of all processors, each under a key."""
PROCESSOR_FILES = ("preprocessor_config.json", NESTED, "video_preprocessor_config.json")
COMPANIONS = (CONFIG, "generation_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES)
"""Names of files other than weights: configuration, tokenizer, processor, chat template."""
ENCODERS = "encoders"
"""The subfolder of an exported model with one folder per additional encoder."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_FILE_NAME = re.compile(r"[\w.-]{1,200}\.safetensors")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Pattern of file names in a Hugging Face cache: the Git hash or SHA-256 of their content."""
_MAX_INDEX_BYTES = 64 * 2**20
"""Maximum size of an index: enough for half a million tensors."""
Changes = Mapping[str, Mapping[str, str | None]]
"""Changed files by encoder and name: the new text, or None to omit the file."""
NO_CHANGES: Changes = {}
SHARD_BYTES = 5 * 10**9
Dtypes = Union["torch.dtype", Mapping[str, "torch.dtype"]]
"""One dtype for all tensors of a folder, or one for each by name."""
Companions = Mapping[str, bytes]
"""Contents of files other than weights, by name: configuration, tokenizer and processor."""
K = TypeVar("K")


def require_own_files(folder: Path) -> None:
    """Check that no link in a folder leads out of it, except from a snapshot of a Hugging Face cache to its blobs.
    Hidden folders, from which no model is read, are not checked, and no link may lead into one. Raises `UserError`.
    """
    root = Path(os.path.realpath(folder))
    snapshots = (path.parent for path in (root, *root.parents) if path.parent.name == "snapshots")
    blobs = {path.parent / "blobs" for path in snapshots if path.parent.name.startswith("models--")}
    for inside, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(inside, name) for name in (*folders, *files)):
            if path.is_symlink():
                place = Path(os.path.realpath(path))
                is_inside = root in place.parents and not any(n.startswith(".") for n in place.relative_to(root).parts)
                if is_inside or (place.parent in blobs and _BLOB.fullmatch(place.name)):
                    continue
                expected, why = "a file in the model's folder", "exports would publish what it links to"
                fix = "copy the file here, or remove the link"
                raise UserError.at(path, found=f"a link to {place}", expected=expected, because=why, fix=fix)


def weight_files(folder: Path, adapters: Iterable[Path | None] = ()) -> list[Path]:
    """Return the weight files of a folder. `adapters`: folders whose adapters are loaded. Raises `UserError` if weight
    files are missing or ambiguous, or if the index is unreadable or names files elsewhere, also by links.
    """
    require_own_files(folder)
    index, single = folder / INDEX, (folder / SINGLE).is_file()
    loaded = any(each is not None and os.path.realpath(each) == os.path.realpath(folder) for each in adapters)
    if not loaded and (unloaded := [name for name in ADAPTERS if (folder / name).exists()]):
        beside = INDEX if index.is_file() else SINGLE if single else "no weights of a model"
        found, expected = f"an adapter ({', '.join(unloaded)}) beside {beside}", "a model's weights alone"
        why = "transformers applies the adapter, which would be ignored here"
        merge = "python -m megatron_hetero.cli.adapters merge"
        fix = f"start from it with modules.NAME.lora.hf_path, merge it ({merge}), or move it to another folder"
        raise UserError.at(folder, found=found, expected=expected, because=why, fix=fix)
    if index.is_file():
        weight_map = read_object(index, _MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_FILE_NAME.fullmatch(str(file)) for file in weight_map.values()):
            where, expected = f"{index}: weight_map", "a file of this folder (*.safetensors) for each tensor"
            raise UserError.at(where, found=shown(weight_map), expected=expected, fix="download it again")
        files = sorted(set(weight_map.values()))
        if single and files != [SINGLE]:
            found, why = f"{SINGLE} beside {INDEX}, which names {listed(files)}", "transformers reads the former alone"
            fix = f"remove {INDEX} if {SINGLE} is the whole model, else {SINGLE}"
            raise UserError.at(folder, found=found, expected="one of them", because=why, fix=fix)
        return [folder / file for file in files]
    if single:
        return [folder / SINGLE]
    expected, why = f"{SINGLE} or {INDEX} with its shards", "pickles are never loaded"
    fix = "convert the model with save_pretrained(..., safe_serialization=True)"
    raise UserError.at(folder, found="no safetensors weights", expected=expected, because=why, fix=fix)


def all_finite(values: Tensor) -> bool:
    """Return whether all values are finite, without allocating a mask."""
    return values.numel() == 0 or all(bool(bound.isfinite()) for bound in values.aminmax())


# ----------------------------------------------------------------------------------------------- writing


def read_companions(folder: Path, changes: Mapping[str, str | None] = {}) -> Companions:
    """Read the companions of a folder. `changes`: new texts by name, or None to omit a file. Raises `UserError`."""

    def unreadable(error: OSError) -> UserError:
        problem, why = f"cannot be read ({reason(error)})", "it goes into the exported model"
        return UserError.at(error.filename or folder, problem=problem, because=why, fix="restore the folder")

    require_own_files(folder)
    names = [name for name in COMPANIONS if name not in changes and (folder / name).is_file()]
    with os_errors_as(unreadable):
        contents = {name: read_bytes(folder / name) for name in names}
    return contents | {name: text.encode() for name, text in changes.items() if text is not None}


class FolderWriter:
    """A writer of a `transformers` folder, shard by shard, to a temporary folder, which is renamed when complete.

    `shapes`: the shape of every tensor. Call `put` for each tensor in any order, then `finish`. In the order of
    `shapes`, at most one shard is in memory.
    """

    single = SINGLE
    """Name of the weight file if there is only one."""
    copies: Collection[str] = ()
    """Names of tensors copied from another model, which do not affect the dtype in the configuration."""

    def __init__(self, target: Path, shapes: Mapping[str, tuple[int, ...]], dtype: Dtypes, limit: int = SHARD_BYTES):
        self.target = target
        self.dtypes = {name: dtype[name] if isinstance(dtype, Mapping) else dtype for name in shapes}
        self.partial = new_beside(target, "partial")
        sizes = {name: math.prod(shape) * self.dtypes[name].itemsize for name, shape in shapes.items()}
        self.shards = plan_shards(sizes, limit)
        self._shard_of = {name: i for i, names in enumerate(self.shards) for name in names}
        self._waiting: list[dict[str, Tensor]] = [{} for _ in self.shards]

    def put(self, name: str, tensor: Tensor) -> None:
        """Add one tensor on the CPU, and write its shard once all tensors of the shard have been added."""
        shard = self._shard_of[name]
        self._waiting[shard][name] = tensor.to(self.dtypes[name]).contiguous()
        if len(self._waiting[shard]) == len(self.shards[shard]):
            from safetensors.torch import save_file

            path = self.partial / self.file_name(shard)
            save_file(self._waiting[shard], path, metadata={"format": "pt"})
            mask = os.umask(0)
            os.umask(mask)
            path.chmod(0o666 & ~mask)  # safetensors creates files that only their owner can read.
            self._waiting[shard].clear()

    def file_name(self, shard: int) -> str:
        """Return the file name of a shard in the naming scheme of transformers."""
        total = len(self.shards)
        return self.single if total == 1 else f"model-{shard + 1:05d}-of-{total:05d}.safetensors"

    def finish(self, companions: Companions) -> None:
        """Add the index, the `companions` and the mark of an export, and move the folder into place. The configuration
        gets the dtype of the tensors if all have the same one. Raises `OSError`, and `UserError` if something other
        than an export has appeared at the target meanwhile.
        """
        if len(self.shards) > 1:
            size = sum((self.partial / self.file_name(i)).stat().st_size for i in range(len(self.shards)))
            weight_map = {name: self.file_name(i) for name, i in sorted(self._shard_of.items())}
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for name, content in companions.items():
            (self.partial / name).write_bytes(content)
        if len(dtypes := {dtype for name, dtype in self.dtypes.items() if name not in self.copies}) == 1:
            _set_dtype(self.partial / CONFIG, dtypes.pop())
        mark(self.partial)
        _require_replaceable(self.target)
        _replace_folder(self.partial, self.target)


def plan_shards(sizes: Mapping[K, int], limit: int) -> list[list[K]]:
    """Distribute tensors, given their sizes in bytes, in order over one or more files of at most `limit` bytes. A
    larger tensor gets a separate file.
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
    """Check that `folder` can be created or replaced. Raises `UserError`."""
    if os.path.ismount(folder):  # A mount point cannot be renamed.
        expected, why = "a folder that can be replaced", "an export is written next to its folder and then replaces it"
        fix = f"choose a folder inside it, such as {folder / 'model'} (of a run export.hf_dir)"
        raise UserError.at(folder, found="a mount point", expected=expected, because=why, fix=fix)
    with os_errors_as(lambda error: _unwritable(folder, reason(error))):
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(prefix=".probe-", dir=folder.parent).cleanup()
    _require_replaceable(folder)


def _unwritable(folder: Path, why: str) -> UserError:
    found, expected = f"a folder that cannot be written ({why})", "a place for the exported model"
    fix = "free space or grant access, or choose another folder (of a run export.hf_dir)"
    return UserError.at(folder, found=found, expected=expected, fix=fix)


def _require_replaceable(folder: Path) -> None:
    try:
        found = what_would_be_lost(folder)
    except OSError as error:
        found = f"that {error.filename or folder} cannot be read ({reason(error)})"
    if found is not None:
        expected, why = "nothing, an empty folder or an export of this version", "an export replaces the whole folder"
        fix = "choose another folder (of a run export.hf_dir), or remove this one yourself if nobody needs it"
        raise UserError.at(folder, found=found, expected=expected, because=why, fix=fix)


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    before = path.read_text(encoding="utf-8")
    config = json.loads(before)
    name = str(dtype).removeprefix("torch.")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = name
    config.setdefault("torch_dtype" if "torch_dtype" in config else "dtype", name)
    if config != json.loads(before):
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _replace_folder(new: Path, target: Path) -> None:
    old = new_beside(target, "replaced")
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    remove_marked(old)
    remove_leftovers(target, "replaced")


@contextlib.contextmanager
def folder_writer(
    target: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: Dtypes,
    companions: Companions,
    limit: int = SHARD_BYTES,
) -> Iterator[FolderWriter]:
    """Yield a `FolderWriter`, which is finished on success and leaves nothing behind on failure. Raises `UserError` if
    the folder cannot be written, as on a full disk, or if another process writes to `target`.
    """
    writer = FolderWriter(target, shapes, dtype, limit)
    require_writable(target)
    try:
        with alone(lock_of(target), target, "export"):
            remove_leftovers(target, "partial")
            writer.partial.mkdir()
            try:
                mark(writer.partial)
                yield writer
                writer.finish(companions)
            finally:
                remove_marked(writer.partial)
    except (OSError, SafetensorError) as error:
        raise _unwritable(target, str(error)) from error
