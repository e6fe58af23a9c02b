"""The weights of a `transformers` folder: safetensors only, checked strictly, read one slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hetero.base.errors import UserError, listed
from megatron_hetero.hf.model_files import INDEX, all_finite, weight_files
from megatron_hetero.hf.weight_map import TensorSlice

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass
class StoredWeights:
    """Tensors of a folder, read on demand. `shapes`: by canonical name; `fresh`: tensors that replace the folder's."""

    folder: Path
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fresh: Mapping[str, Tensor] = field(default_factory=dict)
    _types: dict[str, str] = field(default_factory=dict)
    _where: dict[str, tuple[Path, str]] = field(default_factory=dict)
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, canonical: Callable[[str], str] = lambda name: name) -> StoredWeights:
        """Open every file of weights. `canonical` maps stored names to canonical ones. Raises `UserError` for a
        missing, truncated or unreadable file, and for a name stored twice.
        """
        weights = cls(folder)
        for path in weight_files(folder):
            weights._add(path, canonical)
        return weights

    @property
    def files(self) -> tuple[Path, ...]:
        """Files with the weights."""
        return tuple(self._open)

    def _add(self, path: Path, canonical: Callable[[str], str]) -> None:
        if not path.is_file():
            expected = f"it because {INDEX} names it"
            raise UserError.at(path, found="no such file", expected=expected, fix="download the folder again")
        with _intact(path, "a file that is truncated or not safetensors"):
            handle = self._open[path] = safe_open(path, framework="pt", device="cpu")
        for stored in handle.keys():  # noqa: SIM118 (handles are no mappings)
            name = canonical(stored)
            if name in self._where:
                raise UserError.at(
                    path,
                    found=f"{name} a second time",
                    expected="each tensor once",
                    fix="remove stale files from the folder",
                )
            tensor = handle.get_slice(stored)
            self._where[name] = (path, stored)
            self.shapes[name], self._types[name] = tuple(tensor.get_shape()), tensor.get_dtype()

    def require(self, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str] = frozenset()) -> None:
        """Check that the folder has exactly the `expected` tensors, in their shapes and in a supported dtype. Raises
        `UserError` listing all faults.
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
            raise UserError.at(
                self.folder,
                problem=f"weights do not match config.json ({'; '.join(faults)})",
                fix="use config.json and weights of the same model",
            )
        strange = {f"{name} is {kind}" for name in expected if (kind := self._types[name]) not in _STORED}
        if strange:
            raise UserError.at(
                self.folder,
                found=f"{len(strange)} tensors of unsupported types: {listed(strange)}",
                expected=f"{', '.join(_STORED)}",
                because="quantised weights are not supported",
                fix="use an unquantised folder, or save the model again in bfloat16",
            )

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a required tensor is stored."""
        return self.fresh[name].dtype if name in self.fresh else _STORED[self._types[name]]

    def whole(self, name: str) -> Tensor:
        """A whole tensor as stored."""
        if name in self.fresh:
            return self.fresh[name]
        path, stored = self._where[name]
        # A handle of its own: what a handle has mapped is this process's memory until it is closed.
        with _intact(path, f"an unreadable tensor {stored}"), safe_open(path, framework="pt", device="cpu") as handle:
            values = handle.get_tensor(stored)
        self._require_finite(name, values)
        return values

    def require_copy(self, copy: str, original: str, slices: Iterable[TensorSlice]) -> None:
        """Check that a tied weight stored twice, as `copy` and `original`, is the same in these `slices` of the latter.
        Raises `UserError`.
        """
        alike = self.shapes[copy] == self.shapes[original] and self._types[copy] == self._types[original]
        same = alike and all(
            torch.equal(self.read(tensor_slice), self.read(replace(tensor_slice, name=copy))) for tensor_slice in slices
        )
        if not same:
            raise UserError.at(
                self.folder,
                found=f"a {copy} that differs from {original}",
                expected="equal ones",
                because="config.json ties them (tie_word_embeddings)",
                fix=f"set tie_word_embeddings to false in config.json, or remove {copy} from the weights",
            )

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        """The values of one slice: 1-D if the stored tensor is, else 2-D. Raises `UserError` if one is not finite."""
        if tensor_slice.name in self.fresh:
            drawn = self.fresh[tensor_slice.name]
            drawn = drawn.flatten(1) if drawn.dim() > 2 else drawn
            return drawn[tensor_slice.source if tensor_slice.columns else tensor_slice.source[0]]
        columns = () if tensor_slice.columns is None else (slice(*tensor_slice.columns),)
        path, stored = self._where[tensor_slice.name]
        with _intact(path, f"an unreadable tensor {stored}"):
            values = self._open[path].get_slice(stored)[(slice(*tensor_slice.rows), *columns)]
        self._require_finite(tensor_slice.name, values)
        return values.flatten(1) if values.dim() > 2 else values

    def _require_finite(self, name: str, values: Tensor) -> None:
        if all_finite(values):
            return
        path, stored = self._where[name]
        raise UserError.at(
            f"{path}: tensor {stored}",
            found="values that are NaN or infinite",
            expected="finite values",
            fix="download the file again, or use the weights of an earlier training step",
        )


@contextmanager
def _intact(path: Path, problem: str) -> Iterator[None]:
    """Convert a failure to read a file to a `UserError`."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError.at(
            path, found=f"{problem} ({error})", expected="an intact one", fix="restore or download it again"
        ) from error
