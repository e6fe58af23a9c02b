"""The weights of a `transformers` folder: safetensors only, checked strictly, read one slice at a time."""

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
    """The file of a tensor, its name there, and of a part of a fused tensor where it is in that."""

    path: Path
    stored: str
    cut: Cut | None = None


@dataclass
class StoredWeights:
    """Tensors of a folder, read on demand. `shapes`: by canonical name, of parts of fused tensors one by one; `fused`:
    those that the folder may have, by canonical name; `fresh`: tensors that replace the folder's; `copied`: patterns of
    tensors that are only copied.
    """

    folder: Path
    fused: Mapping[str, Fused] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fresh: Mapping[str, Tensor] = field(default_factory=dict)
    copied: Sequence[str] = ()
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
        """Open every file of weights. `canonical` maps stored names to canonical ones. `adapters`: see `weight_files`.
        Raises `UserError` for a missing, truncated or unreadable file, for a name stored twice, and if the order of a
        fused tensor's dims is unknown.
        """
        weights = cls(folder, fused or {})
        for path in weight_files(folder, adapters):
            weights._add(path, canonical)
        weights._require_known_order()
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
            name, tensor = canonical(stored), handle.get_slice(stored)
            for part, shape, cut in self._parts(name, tuple(tensor.get_shape())):
                if part in self._where:
                    found, fix = f"{part} a second time", "remove stale files from the folder"
                    raise UserError.at(path, found=found, expected="each tensor once", fix=fix)
                self._where[part] = _Place(path, stored, cut)
                self.shapes[part], self._types[part] = shape, tensor.get_dtype()

    def _parts(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], Cut | None]]:
        """Yield the tensors that one of the folder consists of: itself, unless it is a fused one."""
        fused = self.fused.get(name)
        transposed = None if fused is None else fused.is_transposed(shape)
        if fused is None or transposed is None:
            yield name, shape, None
            return
        for part, cut in fused.cuts(transposed):
            yield part, (cut.rows[1] - cut.rows[0], fused.columns), cut

    @property
    def transposed(self) -> bool:
        """Whether the folder has fused tensors transposed."""
        return any(place.cut is not None and place.cut.transposed for place in self._where.values())

    def _require_known_order(self) -> None:
        """Check that no fused tensor could be transposed or not. Raises `UserError`."""
        square = [name for name, fused in self.fused.items() if fused.shape(True) == fused.shape(False)]
        if square and self.transposed:
            found = f"transposed tensors beside such with as many rows as columns: {listed(square)}"
            expected = "tensors whose shapes tell whether they are transposed"
            why = "transformers takes these as not transposed, so that its model would be another"
            fix = "store all tensors of experts as transformers 5 does: experts, outputs, inputs"
            raise UserError.at(self.folder, found=found, expected=expected, because=why, fix=fix)

    @property
    def _in_folder(self) -> dict[str, str]:
        """Parts of fused tensors that the folder does not have one by one, with the names of the fused tensors."""
        alone = {name for name, place in self._where.items() if place.cut is None}
        return {
            part: name
            for name, fused in self.fused.items()
            if alone.isdisjoint(fused.parts)
            for part in fused.parts
        }  # fmt: skip

    @cached_property
    def unchanged(self) -> dict[str, tuple[int, ...]]:
        """Tensors that are only copied, unless they have no dims."""
        return {
            name: size for name, size in self.shapes.items() if size and any(fnmatchcase(name, p) for p in self.copied)
        }

    @property
    def notice(self) -> str:
        """A line about them, if there are any."""
        what = f"exports have {listed(self.unchanged)} of {self.folder} unchanged: training does not update them"
        return what if self.unchanged else ""

    def require(self, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str] = frozenset()) -> None:
        """Check that the folder has exactly the `expected` tensors and `unchanged` ones, in their shapes and in a
        supported dtype. Raises `UserError` listing all faults.
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
        """The dtype in which a required tensor is stored."""
        return self.fresh[name].dtype if name in self.fresh else _STORED[self._types[name]]

    def whole(self, name: str) -> Tensor:
        """A whole tensor as stored."""
        if name in self.fresh:
            return self.fresh[name]
        path, stored, cut = self._where[name]
        # A handle of its own: what a handle has mapped is this process's memory until it is closed.
        with _intact(path, f"an unreadable tensor {stored}"), safe_open(path, framework="pt", device="cpu") as handle:
            values = handle.get_tensor(stored) if cut is None else cut.turned(handle.get_slice(stored)[cut.source()])
        self._require_finite(name, values)
        return values.contiguous()

    def require_copy(self, copy: str, original: str, slices: Iterable[TensorSlice]) -> None:
        """Check that a tied weight stored twice, as `copy` and `original`, is the same in these `slices` of the latter.
        Raises `UserError`.
        """
        alike = self.shapes[copy] == self.shapes[original] and self._types[copy] == self._types[original]
        same = alike and all(
            torch.equal(self.read(tensor_slice), self.read(replace(tensor_slice, name=copy))) for tensor_slice in slices
        )
        if not same:
            found, why = f"a {copy} that differs from {original}", "config.json ties them (tie_word_embeddings)"
            fix = f"set tie_word_embeddings to false in config.json, or remove {copy} from the weights"
            raise UserError.at(self.folder, found=found, expected="equal ones", because=why, fix=fix)

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        """The values of one slice: 1-D if the stored tensor is, else 2-D. Raises `UserError` if one is not finite."""
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
    """Convert a failure to read a file to a `UserError`."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        found, fix = f"{problem} ({error})", "restore or download it again"
        raise UserError.at(path, found=found, expected="an intact one", fix=fix) from error
