"""Read the weights of a `transformers` folder: safetensors only, strictly, a slice at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hetero.errors import UserError, listed
from megatron_hetero.models.weight_map import Piece

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
