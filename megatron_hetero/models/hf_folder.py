"""Read and write the weights of a `transformers` folder: safetensors only, strictly, a slice at a time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_hetero.errors import UserError, listed
from megatron_hetero.models.folder_files import COMPANIONS, CONFIG, ENCODERS
from megatron_hetero.models.weight_map import Piece

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
K = TypeVar("K")
SHARD_BYTES = 5 * 10**9
NO_CHANGES: Mapping[str, str | None] = {}
Dtypes = torch.dtype | Mapping[str, torch.dtype]
"""One type for all tensors of a folder, or one for each by name."""
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class StoredWeights:
    """The tensors of a folder, opened lazily. `shapes` maps canonical name to shape; `fresh` are tensors that stand in
    the place of the folder's.
    """

    folder: Path
    canonical: Callable[[str], str]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fresh: Mapping[str, Tensor] = field(default_factory=dict)
    _where: dict[str, tuple[Path, str]] = field(default_factory=dict)
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, canonical: Callable[[str], str] = lambda name: name) -> StoredWeights:
        """Open every file that the folder's index names. `canonical` maps stored names to the names used here.

        Raises `UserError` for a missing, truncated or unreadable file, and for a name stored twice.
        """
        weights = cls(folder, canonical)
        for path, expected in sorted(_files(folder).items()):
            weights._add(path, expected)
        return weights

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of weights."""
        return tuple(self._open)

    def _add(self, path: Path, expected: set[str] | None) -> None:
        handle = self._open[path] = _open_file(path)
        found = set(handle.keys())
        if expected is not None and not expected <= found:
            raise UserError(
                f"{path}: found no tensor {listed(expected - found)}, expected it because {INDEX} says that it "
                f"is here; download the folder again"
            )
        for stored in found:
            name = self.canonical(stored)
            if name in self._where:
                raise UserError(
                    f"{path}: found {name} a second time, expected it once; remove stale files from the folder"
                )
            self._where[name] = (path, stored)
            self.shapes[name] = tuple(handle.get_slice(stored).get_shape())

    def require(self, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str] = frozenset()) -> None:
        """Check that the folder holds exactly the `expected` tensors in their shapes. Raises `UserError` listing all
        faults.
        """
        missing = expected.keys() - self.shapes.keys()
        extra = self.shapes.keys() - expected.keys() - optional
        wrong = {n for n, shape in expected.items() if n in self.shapes and self.shapes[n] != shape}
        faults = [f"{len(missing)} missing: {listed(missing)}"] if missing else []
        faults += [f"{len(extra)} unexpected: {listed(extra)}"] if extra else []
        faults += [
            f"{len(wrong)} of another shape: "
            + listed({f"{n} is {self.shapes[n]}, not {expected[n]}" for n in wrong})
        ] if wrong else []  # fmt: skip
        if faults:
            raise UserError(
                f"{self.folder}: found weights that do not fit its config.json ({'; '.join(faults)}), expected "
                f"exactly the "
                f"{len(expected)} tensors of the model; config.json and weights must come from the same model"
            )

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is stored in. Raises `UserError` where it is none that weights are trained from."""
        if name in self.fresh:
            return self.fresh[name].dtype
        path, stored = self._where[name]
        found = self._open[path].get_slice(stored).get_dtype()
        if found not in _STORED:
            raise UserError.at(
                f"{path}: tensor {stored}",
                found=f"type {found}",
                expected=f"one of {', '.join(_STORED)}",
                because="weights of other types are not those of the model alone",
                fix="take a folder that is not quantised",
            )
        return _STORED[found]

    def whole(self, name: str) -> Tensor:
        """A whole tensor as stored. Nothing of it stays in memory once it is given up."""
        if name in self.fresh:
            return self.fresh[name]
        path, stored = self._where[name]
        # A handle of its own: what a handle has mapped counts as this process's until it is closed.
        with _readable(path, stored), safe_open(path, framework="pt", device="cpu") as handle:
            return handle.get_tensor(stored)

    def require_copy(self, copy: str, original: str, pieces: Iterable[Piece]) -> None:
        """Check that what a folder of a tied model stores twice, as `copy` and `original`, is the same in these
        `pieces` of the latter. Raises `UserError`.
        """
        same = self.shapes[copy] == self.shapes[original] and all(
            torch.equal(self.read(piece), self.read(replace(piece, name=copy))) for piece in pieces
        )
        if not same:
            raise UserError(
                f"{self.folder}: found a {copy} that differs from {original}, expected equal ones, because "
                "config.json says that they are tied (tie_word_embeddings) and one of them would be lost; set "
                f"tie_word_embeddings to false in config.json, or remove {copy} from the weights"
            )

    def read(self, piece: Piece) -> Tensor:
        """The values of one piece, as stored: 1-D where the stored tensor is, else 2-D."""
        if piece.name in self.fresh:
            return self.fresh[piece.name][piece.source if piece.columns else piece.source[0]]
        path, stored = self._where[piece.name]
        with _readable(path, stored):
            part = self._open[path].get_slice(stored)
            if piece.columns is None:
                values = part[piece.rows[0] : piece.rows[1]]
            else:
                values = part[piece.rows[0] : piece.rows[1], piece.columns[0] : piece.columns[1]]
        return values.flatten(1) if values.dim() > 2 else values


@contextlib.contextmanager
def _readable(path: Path, stored: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: found tensor {stored} unreadable ({error}); download the file again") from error


def _files(folder: Path) -> dict[Path, set[str] | None]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files: dict[Path, set[str] | None] = {}
            for name, file in weight_map.items():
                if Path(file).name != file:
                    raise UserError(f"{index}: found the file name {file!r}, expected one inside the folder")
                files.setdefault(folder / file, set()).add(name)  # pyright: ignore[reportOptionalMemberAccess]
            return files
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: found an index that cannot be read ({error}); download it again") from error
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    raise UserError(
        f"{folder}: found no safetensors weights, expected {SINGLE} or {INDEX} with its shards; other formats "
        f"(pickles) are never loaded: convert with save_pretrained(..., safe_serialization=True)"
    )


def _open_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path}: found no such file, expected it because {INDEX} names it; download the folder again")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: found a file that is truncated or not safetensors ({error}), expected a whole one; "
            f"download it again"
        ) from error


class FolderWriter:
    """Writes a `transformers` folder shard by shard, beside its final place, and moves it there when it is whole.

    `shapes`: every tensor to come, with its shape; `dtype`: what they are written as. Use `put` for each, in any order
    (in that of `shapes`, no more than one shard is held), then `finish`.
    """

    def __init__(self, target: Path, shapes: Mapping[str, tuple[int, ...]], dtype: Dtypes, limit: int = SHARD_BYTES):
        self.target = target
        self.dtypes = {name: dtype if isinstance(dtype, torch.dtype) else dtype[name] for name in shapes}
        self.partial = target.with_name(f".{target.name}.partial")
        require_writable(target)
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
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

    def finish(self, companions: Path, changes: Mapping[str, str | None]) -> None:
        """Add index, configuration, tokenizer and processor files, and move into place. These are from the folder
        `companions`, but for `changes`: by name another text, or None for a file that is left out. The configuration
        names the type of the tensors, where all have the same.
        """
        if len(self.shards) > 1:
            self._write_index()
        for name in COMPANIONS:
            if name not in changes and (companions / name).is_file():
                shutil.copyfile(companions / name, self.partial / name)
        for name, text in changes.items():
            if text is not None:
                (self.partial / name).write_text(text, encoding="utf-8")
        if len(dtypes := set(self.dtypes.values())) == 1:
            _set_dtype(self.partial / CONFIG, dtypes.pop())
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
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        probe = folder.with_name(f".{folder.name}.probe-{os.getpid()}")
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise UserError(
            f"{folder}: found that it cannot be written ({error.strerror or error}), expected a place for the "
            f"exported model; choose another folder (of a run export.hf_dir) or mend its permissions"
        ) from error
    try:
        found = _foreign(folder)
    except OSError as error:
        found = f"that {error.filename or folder} cannot be read ({error.strerror or error})"
    if found is not None:
        raise UserError.at(
            folder,
            found=found,
            expected="nothing, an empty folder or an earlier export",
            because="the export replaces it whole",
            fix="choose another folder (of a run export.hf_dir)",
        )


def _foreign(folder: Path) -> str | None:
    """What says that a folder is no export of ours, so that replacing it would lose something. None: nothing does."""
    if not (folder.exists() or folder.is_symlink()):
        return None
    if folder.is_symlink() or not folder.is_dir():
        return f"something that is not an exported model (a {'link' if folder.is_symlink() else 'file'})"
    names = {path.name for path in folder.iterdir()}
    if names and CONFIG not in names:
        return f"something that is not an exported model ({min(names)}, and no {CONFIG})"
    strange = next(_strange(folder), None)
    return strange and f"{strange.relative_to(folder)}, which no export writes"


def _strange(folder: Path, inside: bool = False) -> Iterator[Path]:
    """What no export writes into its folder. `inside`: it is that of a further encoder, which has none of its own."""
    for path in sorted(folder.iterdir()):
        if path.name == ENCODERS and not inside and _is_plain(path, Path.is_dir):
            for encoder in sorted(path.iterdir()):
                if _is_plain(encoder, Path.is_dir) and (encoder / CONFIG).is_file():
                    yield from _strange(encoder, inside=True)
                else:
                    yield encoder
        elif not (_is_plain(path, Path.is_file) and _is_written(path.name)):
            yield path


def _is_plain(path: Path, kind: Callable[[Path], bool]) -> bool:
    """Whether a path is of a `kind` and no link, which an export never makes."""
    return kind(path) and not path.is_symlink()


def _is_written(name: str) -> bool:
    """Whether an export writes files of that name."""
    return name in (INDEX, *COMPANIONS) or _WEIGHTS.fullmatch(name) is not None


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
    old = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def folder_writer(
    target: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: Dtypes,
    companions: Path,
    limit: int = SHARD_BYTES,
    changes: Mapping[str, str | None] = NO_CHANGES,
) -> Iterator[FolderWriter]:
    """A `FolderWriter` that finishes on success and leaves nothing behind on failure. `companions`, `changes`: see
    `finish`. A full disk is a `UserError`.
    """
    writer = FolderWriter(target, shapes, dtype, limit)
    try:
        yield writer
        writer.finish(companions, changes)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{target}: found that the model cannot be written ({error}); free space or choose another folder (of a "
            f"run export.hf_dir)"
        ) from error
    finally:
        shutil.rmtree(writer.partial, ignore_errors=True)
