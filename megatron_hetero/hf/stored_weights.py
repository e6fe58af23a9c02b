"""Weights of a `transformers` folder: safetensors only, checked strictly, read one slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hetero.base.errors import UserError, faults_of, listed
from megatron_hetero.hf.fused_tensors import Cut, Fused
from megatron_hetero.hf.model_files import INDEX, all_finite, weight_files
from megatron_hetero.hf.weight_map import TensorSlice

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class _Place(NamedTuple):
    """The location of a tensor: its file, its name in the file, and its place in a fused tensor, if it is in one."""

    path: Path
    stored: str
    cut: Cut | None = None


@dataclass
class StoredWeights:
    """The tensors of a folder, read on demand by their canonical names."""

    folder: Path
    fused: Mapping[str, Fused] = field(default_factory=dict)
    """Fused tensors that the folder may have, by name."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of all tensors by name, with the matrices of a fused tensor in its place."""
    fresh: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that replace tensors of the folder, by name."""
    copied: Sequence[str] = ()
    """Patterns of the names of tensors that exports copy unchanged."""
    _types: dict[str, str] = field(default_factory=dict)
    _where: dict[str, _Place] = field(default_factory=dict)
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        folder: Path,
        canonical: Callable[[str], str] = lambda name: name,
        fused: Mapping[str, Fused] | None = None,
        adapters: Iterable[Path | None] = (),
    ) -> StoredWeights:
        """Open every weight file. `canonical` maps stored names to canonical ones. `adapters`: see `weight_files`.
        Raises `UserError` for a missing, truncated or unreadable file, for a name stored twice, and if it is ambiguous
        whether a fused tensor is transposed.
        """
        weights = cls(folder, fused or {})
        for path in weight_files(folder, adapters):
            weights._add(path, canonical)
        weights._require_known_order()
        return weights

    @property
    def files(self) -> tuple[Path, ...]:
        """Paths of the weight files."""
        return tuple(self._open)

    def _add(self, path: Path, canonical: Callable[[str], str]) -> None:
        if not path.is_file():
            expected = f"it because {INDEX} names it"
            raise UserError.at(path, found="no such file", expected=expected, fix="download the folder again")
        with _intact(path, "a file that is truncated or not safetensors"):
            handle = self._open[path] = safe_open(path, framework="pt", device="cpu")
        for stored in handle.keys():  # noqa: SIM118 (handles are no mappings)
            name, tensor = canonical(stored), handle.get_slice(stored)
            for each, shape, cut in self._unfused(name, tuple(tensor.get_shape())):
                if each in self._where:
                    found, fix = f"{each} a second time", "remove stale files from the folder"
                    raise UserError.at(path, found=found, expected="each tensor once", fix=fix)
                self._where[each] = _Place(path, stored, cut)
                self.shapes[each], self._types[each] = shape, tensor.get_dtype()

    def _unfused(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], Cut | None]]:
        """Yield name, shape and place of each matrix of a fused tensor, or of any other tensor itself."""
        fused = self.fused.get(name)
        transposed = None if fused is None else fused.is_transposed(shape)
        if fused is None or transposed is None:
            yield name, shape, None
            return
        for matrix, cut in fused.cuts(transposed):
            yield matrix, (cut.rows[1] - cut.rows[0], fused.columns), cut

    @property
    def transposed(self) -> bool:
        """Whether the folder has transposed fused tensors."""
        return any(place.cut is not None and place.cut.transposed for place in self._where.values())

    def _require_known_order(self) -> None:
        """Check that it is unambiguous whether a fused tensor is transposed. Raises `UserError`."""
        square = [name for name, fused in self.fused.items() if fused.shape(True) == fused.shape(False)]
        if square and self.transposed:
            found = f"transposed tensors beside square ones: {listed(square)}"
            expected = "tensors whose shapes tell whether they are transposed"
            why = "transformers takes square ones as not transposed, which gives another model"
            fix = "store all tensors of experts as transformers 5 does: experts, outputs, inputs"
            raise UserError.at(self.folder, found=found, expected=expected, because=why, fix=fix)

    @property
    def _in_folder(self) -> dict[str, str]:
        """Names of fused tensors by matrix, for fused tensors whose matrices the folder does not store separately."""
        alone = {name for name, place in self._where.items() if place.cut is None}
        return {
            matrix: name
            for name, fused in self.fused.items()
            if alone.isdisjoint(fused.matrices)
            for matrix in fused.matrices
        }  # fmt: skip

    @cached_property
    def unchanged(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name of the tensors, except scalars, that exports copy unchanged."""
        return {
            name: size for name, size in self.shapes.items() if size and any(fnmatchcase(name, p) for p in self.copied)
        }

    @property
    def notice(self) -> str:
        """A line for the user about tensors that exports copy unchanged; empty if there are none."""
        what = f"exports have {listed(self.unchanged)} of {self.folder} unchanged: training does not update them"
        return what if self.unchanged else ""

    def require(self, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str] = frozenset()) -> None:
        """Check that the folder has exactly the `expected` and `unchanged` tensors (and any `optional` ones), with
        these shapes and supported dtypes. Raises `UserError` listing all faults.
        """
        expected = {**expected, **self.unchanged}
        in_folder, unfit = self._in_folder, self.fused.keys() & self.shapes.keys()
        missing = {in_folder.get(name, name) for name in expected.keys() - self.shapes.keys()} - unfit
        extra = self.shapes.keys() - expected.keys() - optional - unfit
        wrong = {
            f"{name} is {self.shapes[name]}, not {shape}"
            for name, shape in expected.items()
            if self.shapes.get(name, shape) != shape
        } | {f"{n} is {self.shapes[n]}, not {self.fused[n].shape(False)} or {self.fused[n].shape(True)}" for n in unfit}
        if faults := faults_of({"missing": missing, "unexpected": extra, "of another shape": wrong}):
            fix = "use config.json and weights of the same model"
            raise UserError.at(self.folder, problem=f"weights do not match config.json ({faults})", fix=fix)
        types = {in_folder.get(name, name): self._types[name] for name in expected}
        if strange := {f"{name} is {kind}" for name, kind in types.items() if kind not in _STORED}:
            found = f"{len(strange)} tensors of unsupported types: {listed(strange)}"
            why, fix = "quantised weights are not supported", "use an unquantised folder, or save it again in bfloat16"
            raise UserError.at(self.folder, found=found, expected=", ".join(_STORED), because=why, fix=fix)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a required tensor is stored."""
        return self.fresh[name].dtype if name in self.fresh else _STORED[self._types[name]]

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor in its stored dtype and shape. Raises `UserError` if a value is not finite."""
        if name in self.fresh:
            return self.fresh[name]
        path, stored, cut = self._where[name]
        # Open a new handle: pages that a handle has mapped count as this process's memory until it is closed.
        with _intact(path, f"an unreadable tensor {stored}"), safe_open(path, framework="pt", device="cpu") as handle:
            values = handle.get_tensor(stored) if cut is None else cut.turned(handle.get_slice(stored)[cut.source()])
        self._require_finite(name, values)
        return values.contiguous()

    def require_copy(self, copy: str, original: str, slices: Iterable[TensorSlice]) -> None:
        """Check that a tied weight that is stored twice, as `copy` and `original`, has equal values in these `slices`
        of `original`. Raises `UserError`.
        """
        same = self.shapes[copy] == self.shapes[original] and self._types[copy] == self._types[original]
        same = same and all(
            torch.equal(self.read(tensor_slice), self.read(replace(tensor_slice, name=copy))) for tensor_slice in slices
        )
        if not same:
            found, why = f"a {copy} that differs from {original}", "config.json ties them (tie_word_embeddings)"
            fix = f"set tie_word_embeddings to false in config.json, or remove {copy} from the weights"
            raise UserError.at(self.folder, found=found, expected="equal ones", because=why, fix=fix)

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        """Read one slice: 1-D if the stored tensor is 1-D, else 2-D. Raises `UserError` if a value is not finite."""
        if tensor_slice.name in self.fresh:
            drawn = self.fresh[tensor_slice.name]
            drawn = drawn.flatten(1) if drawn.dim() > 2 else drawn
            return drawn[tensor_slice.source if tensor_slice.columns else tensor_slice.source[0]]
        path, stored, cut = self._where[tensor_slice.name]
        source = tensor_slice.source if cut is None else cut.source(tensor_slice.rows, tensor_slice.columns)
        with _intact(path, f"an unreadable tensor {stored}"):
            values = self._open[path].get_slice(stored)[source]
        values = values if cut is None else cut.turned(values)
        self._require_finite(tensor_slice.name, values)
        return values.flatten(1) if values.dim() > 2 else values

    def _require_finite(self, name: str, values: Tensor) -> None:
        if all_finite(values):
            return
        path, stored, _ = self._where[name]
        where, found = f"{path}: tensor {stored}", "values that are NaN or infinite"
        fix = "download the file again, or use the weights of an earlier training step"
        raise UserError.at(where, found=found, expected="finite values", fix=fix)


@contextmanager
def _intact(path: Path, problem: str) -> Iterator[None]:
    """Convert errors of reading a file inside the context to a `UserError` with the `problem`."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        found, fix = f"{problem} ({error})", "restore or download it again"
        raise UserError.at(path, found=found, expected="an intact one", fix=fix) from error
