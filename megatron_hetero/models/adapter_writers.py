"""Writers of a model with adapters: to a PEFT folder, or to a whole `transformers` folder with the adapters merged.

Like `model_writer`, both receive the model's stored tensors one by one, in any order, and skip tensors that they do not
write. A *full name* is the name of a tensor with its module's prefix, a *path* its name in a `transformers` model.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.base.errors import UserError, listed
from megatron_hetero.hf.fused_tensors import Fused, fusing
from megatron_hetero.hf.model_files import (
    CONFIG,
    ENCODERS,
    SHARD_BYTES,
    Companions,
    Dtypes,
    FolderWriter,
    folder_writer,
)
from megatron_hetero.hf.peft_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, Target, config_text, to_columns
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapters import A, Adapter, B, Lora, linear_layers, lora_of
from megatron_hetero.models.families.common import nested_name
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import fused_of, model_writer, prefix_of, tensors_of

TASK = "CAUSAL_LM"
"""PEFT's task type for a vision-language model."""
_TOGETHER = ".in_proj_"
"""Substring of the names of a delta net's input projections. All of these projections get an adapter or none, because
vLLM fuses some of them (vllm-project/vllm#47639).
"""
Put = Callable[[str, Tensor], None]
"""Function that receives the name of a stored tensor and its values on the CPU."""


# ----------------------------------------------------------------------------------------------- PEFT folders


def adapter_tensors(shapes: ModelShapes, trained: Collection[str]) -> frozenset[str]:
    """Return the stored tensors that `adapter_writer` writes: adapters, other trained tensors, and the frozen tensors
    of modules that also have trained ones. `trained`: names of stored tensors. Raises `UserError` if PEFT's format
    cannot represent them.
    """
    names = set[str]()
    for modules in _folders(shapes).values():
        contents = _Contents.of(modules, shapes, trained)
        names |= {name + kind for name in contents.adapters for kind in (A, B)}
        for keys in contents.whole.values():
            names.update(matrix for name in keys for matrix in contents.matrices(name))
    return frozenset(names)


@contextmanager
def adapter_writer(
    target: Path,
    shapes: ModelShapes,
    dtype: Dtypes,
    companions: Mapping[str, Companions],
    *,
    trained: Collection[str],
    bases: Mapping[str, Path],
    **_: Any,
) -> Iterator[Put]:
    """Write a PEFT folder that `PeftModel.from_pretrained` loads.

    Yields a function that receives stored tensors by name. It writes the tensors of `adapter_tensors`, and must receive
    all of them. Adapters of further encoders are written to separate PEFT folders, `encoders/NAME`. PEFT reads a single
    file, so the whole folder is in memory until it is written.

    Args:
        target: the folder, which appears once it is complete.
        shapes: shapes of the model, with adapters.
        dtype: one dtype for all tensors, or a dtype by name.
        companions: files to write next to the weights, as for `model_writer`; model configurations are skipped.
        trained: names of the stored tensors that train, including adapters.
        bases: folders of the base weights: the model's folder under `text`, and one for each further encoder.
        _: other options of `model_writer`, which have no effect here.

    Raises:
        UserError: the folder cannot be written, or PEFT's format cannot represent the tensors.
    """
    puts = dict[str, Callable[[Tensor], None]]()
    with ExitStack() as stack:

        def add_folder(place: Path, name: str, contents: _Contents) -> Path:
            sizes, dtypes = contents.sizes_and_dtypes(dtype)
            files = {file: content for file, content in companions[name].items() if file != CONFIG}
            if contents.adapters:
                files[ADAPTER_CONFIG] = contents.config(name, bases[name]).encode()
            writer = stack.enter_context(folder_writer(place, sizes, dtypes, files, sys.maxsize))
            writer.single, writer.copies = ADAPTER_WEIGHTS, sizes
            puts.update(contents.puts(writer))
            contents.put_zeros(writer)
            return writer.partial

        folders = {name: _Contents.of(modules, shapes, trained) for name, modules in _folders(shapes).items()}
        partial_folder = add_folder(target, TEXT, folders.pop(TEXT))
        for name, contents in folders.items():
            if contents.adapters:
                add_folder(partial_folder / ENCODERS / name, name, contents)
        yield lambda name, tensor: puts[name](tensor) if name in puts else None


def _folders(shapes: ModelShapes) -> dict[str, tuple[str, ...]]:
    """Return the modules of each PEFT folder: the model's own modules under `text`, and each further encoder."""
    return {TEXT: (*shapes.own, TEXT)} | {name: (name,) for name in shapes.further}


@dataclass(frozen=True)
class _Contents:
    """The contents of one PEFT folder.

    Attributes:
        shapes: shapes of the model.
        modules: modules whose tensors the folder has.
        adapters: the module and the adapter of each adapted layer, by full name.
        zero: weight shape [out, in] of each layer that gets an adapter of zeros, by path.
        whole: by path of each `transformers` module that is saved whole: the keys of its tensors, by full name.
    """

    shapes: ModelShapes
    modules: tuple[str, ...]
    adapters: Mapping[str, tuple[str, Adapter]]
    zero: Mapping[str, tuple[int, int]]
    whole: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, modules: tuple[str, ...], shapes: ModelShapes, trained: Collection[str]) -> _Contents:
        """Return the contents of the PEFT folder of `modules`. `trained`: names of all trained tensors. Raises
        `UserError` if PEFT's format cannot represent the contents.
        """
        adapters, zero = dict[str, tuple[str, Adapter]](), dict[str, tuple[int, int]]()
        whole = dict[str, Mapping[str, str]]()
        for module in modules:
            prefix, lora = prefix_of(module, shapes), lora_of(module, shapes)
            adapted = {} if lora is None else {prefix + each.name: (module, each) for each in lora.adapters}
            adapters |= adapted
            zero |= {_path(name, module, shapes): size for name, size in _missing(module, shapes, adapted).items()}
            replaced = {prefix + name for name in lora.replaces} if lora else set[str]()
            names = (replaced | set(trained)) & tensors_of(module, shapes, in_folder=True).keys()
            whole |= _whole(module, shapes, names, adapted)
        if whole and not adapters:
            raise _unfit(f"no adapters beside what trains in full ({listed(whole)})", "adapters", "PEFT needs some")
        return cls(shapes, modules, adapters, zero, whole)

    @cached_property
    def fused(self) -> dict[str, Fused]:
        """Fused tensors of the modules, by full name."""
        return {name: fused for module in self.modules for name, fused in fused_of(module, self.shapes).items()}

    def matrices(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that a tensor of `whole` consists of."""
        return tuple(self.fused[name].matrices) if name in self.fused else (name,)

    def keys(self) -> Iterator[tuple[str, str, Adapter]]:
        """Yield the full name, the prefix of the keys, and the adapter of each adapted layer."""
        paths = {name: _path(name, module, self.shapes) for name, (module, _) in self.adapters.items()}
        for name, (_, adapter) in self.adapters.items():
            path = paths[name]
            if adapter.experts:
                # PEFT wraps parameters one after another, so the first parameter is inside the wrapper of the second.
                path, _, kind = path.rpartition(".")
                path += ".base_layer" if kind != "down_proj" and f"{path}.down_proj" in paths.values() else ""
            yield name, PREFIX + path, adapter

    def config(self, name: str, base: Path) -> str:
        """Return the text of `adapter_config.json` for the folder of module `name` with base model `base`."""
        targets = [
            Target(_path(full, module, self.shapes), each.r, each.scale, each.experts > 0)
            for full, (module, each) in self.adapters.items()
        ]
        first = targets[0]
        targets += [Target(path, first.r, first.scale) for path in self.zero]
        loras = [lora for module in self.modules if (lora := lora_of(module, self.shapes)) is not None]
        dropout = max(lora.dropout for lora in loras)
        return config_text(targets, list(self.whole), str(base), TASK if name == TEXT else None, dropout)

    def sizes_and_dtypes(self, dtype: Dtypes) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
        """Return the shape and the dtype of each tensor of the folder by key. `dtype`: see `adapter_writer`."""
        stored = {name: size for module in self.modules for name, size in tensors_of(module, self.shapes).items()}
        sizes, dtypes = dict[str, tuple[int, ...]](), dict[str, torch.dtype]()

        def dtype_of(*names: str) -> torch.dtype:
            if isinstance(dtype, torch.dtype):
                return dtype
            return reduce(torch.promote_types, (dtype[name] for name in names))

        for name, key, adapter in self.keys():
            rows, r = stored[name + B]
            copies = adapter.experts or 1
            sizes |= {key + A: stored[name + A], key + B: (rows // copies, r * copies)}
            dtypes |= {key + kind: dtype_of(name + kind) for kind in (A, B)}
        for path, (out, inputs) in self.zero.items():
            name, r = self._first
            sizes |= {f"{PREFIX}{path}{A}": (r, inputs), f"{PREFIX}{path}{B}": (out, r)}
            dtypes |= {f"{PREFIX}{path}{kind}": dtype_of(name + A) for kind in (A, B)}
        for keys in self.whole.values():
            for name, key in keys.items():
                sizes[key] = self.fused[name].shape(False) if name in self.fused else stored[name]
                dtypes[key] = dtype_of(*self.matrices(name))
        return sizes, dtypes

    def puts(self, writer: FolderWriter) -> dict[str, Callable[[Tensor], None]]:
        """Return, for each stored tensor, a function that writes its values to the folder."""
        puts = dict[str, Callable[[Tensor], None]]()
        for name, key, adapter in self.keys():
            puts[name + A] = partial(writer.put, key + A)
            puts[name + B] = partial(_put_second, writer, key + B, adapter.experts)
        for keys in self.whole.values():
            for name, key in keys.items():
                if name in self.fused:
                    puts |= fusing(self.fused[name], False, writer.dtypes[key], partial(writer.put, key))
                else:
                    puts[name] = partial(writer.put, key)
        return puts

    def put_zeros(self, writer: FolderWriter) -> None:
        """Write an adapter of zeros for each layer of `zero`."""
        for path, (out, inputs) in self.zero.items():
            _, r = self._first
            writer.put(f"{PREFIX}{path}{A}", torch.zeros(r, inputs))
            writer.put(f"{PREFIX}{path}{B}", torch.zeros(out, r))

    @property
    def _first(self) -> tuple[str, int]:
        """Full name and rank of the first adapter. Adapters of zeros have the same dtype and rank."""
        name, (_, adapter) = next(iter(self.adapters.items()))
        return name, adapter.r


def _put_second(writer: FolderWriter, key: str, experts: int, values: Tensor) -> None:
    writer.put(key, to_columns(values, experts) if experts else values)


def _path(name: str, module: str, shapes: ModelShapes) -> str:
    """Return the path in a `transformers` model of a layer or tensor with this full name."""
    return nested_name(shapes[module].architecture.namespace + name.removeprefix(prefix_of(module, shapes)))


def _missing(module: str, shapes: ModelShapes, adapters: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return the weight shapes, by full name, of layers without an adapter in groups (see `_TOGETHER`) in which other
    layers have one.
    """
    prefix, architecture = prefix_of(module, shapes), shapes[module].architecture
    grouped = [name for name, _ in linear_layers(architecture) if _TOGETHER in name]
    adapted = {name.partition(_TOGETHER)[0] for name in grouped if prefix + name in adapters}
    sizes = dict[str, tuple[int, int]]()
    for name in grouped:
        if name.partition(_TOGETHER)[0] in adapted and prefix + name not in adapters:
            out, inputs = architecture.in_folder[f"{name}.weight"]
            sizes[prefix + name] = out, inputs
    return sizes


def _whole(
    module: str, shapes: ModelShapes, names: Collection[str], adapters: Collection[str]
) -> dict[str, dict[str, str]]:
    """Return `_Contents.whole` for the `transformers` modules that contain the tensors `names`. Raises `UserError` if
    PEFT cannot save such a module whole.
    """
    whole = dict[str, dict[str, str]]()
    for owner, (inside, chosen) in _owners(module, shapes, names).items():
        if (error := _refusal(owner, inside, chosen, module, shapes, adapters)) is not None:
            raise error
        whole[_path(owner, module, shapes)] = {name: PREFIX + _path(name, module, shapes) for name in inside}
    return whole


def saved_whole(module: str, shapes: ModelShapes, names: Collection[str]) -> frozenset[str]:
    """Return the tensors among `names` that a PEFT folder can contain in addition to the adapters of `module`."""
    prefix, lora = prefix_of(module, shapes), lora_of(module, shapes)
    adapters = () if lora is None else [prefix + each.name for each in lora.adapters]
    saved = set[str]()
    for owner, (inside, chosen) in _owners(module, shapes, names).items():
        if _refusal(owner, inside, chosen, module, shapes, adapters) is None:
            saved |= chosen
    saved |= {matrix for name, fused in fused_of(module, shapes).items() if name in saved for matrix in fused.matrices}
    return frozenset(saved.intersection(names))


def _owners(module: str, shapes: ModelShapes, names: Collection[str]) -> dict[str, tuple[list[str], set[str]]]:
    """Return the `transformers` modules that contain the tensors `names`: for each module, all tensors inside it, and
    the subset in `names`. Fused tensors replace their matrices.
    """
    fused_name = {matrix: name for name, fused in fused_of(module, shapes).items() for matrix in fused.matrices}
    stored = dict.fromkeys(fused_name.get(name, name) for name in tensors_of(module, shapes, in_folder=True))
    chosen = {fused_name.get(name, name) for name in names}
    inside = {name.rpartition(".")[0]: list[str]() for name in stored if name in chosen}
    for name in stored:
        parent = name
        while parent := parent.rpartition(".")[0]:
            if parent in inside:
                inside[parent].append(name)
    return {owner: (names, chosen.intersection(names)) for owner, names in inside.items()}


def _refusal(
    owner: str, inside: Collection[str], chosen: set[str], module: str, shapes: ModelShapes, adapters: Collection[str]
) -> UserError | None:
    """Return the error if PEFT cannot save module `owner`, whose tensors `chosen` train, as a whole; else None."""
    path, prefix = _path(owner, module, shapes), prefix_of(module, shapes)
    if any(name.removeprefix(prefix) in shapes[module].architecture.stored_twice.values() for name in inside):
        found, why = f"{path}, which trains in full", "PEFT would untie it from the head"
        return _unfit(found, "an embedding that is frozen", why)
    if any(name.rpartition(".")[0] != owner for name in inside):
        direct = [name.rpartition(".")[2] for name in chosen if name.rpartition(".")[0] == owner]
        found, why = f"{path}, of which {listed(direct)} train in full", "PEFT would save all modules inside it too"
        return _unfit(found, "modules without others inside", why)
    if owner in adapters or any(each.startswith(f"{owner}.") for each in adapters):
        found, why = f"{path}, of which something trains in full", "PEFT saves a module in full, or adapters of it"
        return _unfit(found, "adapters alone", why)
    return None


def _unfit(found: str, expected: str, why: str) -> UserError:
    fix = "write a merged model with --export.merge true, or freeze it with model.train or model.freeze"
    return UserError.at("export.hf_dir (--export.hf_dir)", found=found, expected=expected, because=why, fix=fix)


# ----------------------------------------------------------------------------------------------- merged folders


@contextmanager
def merging_writer(
    target: Path,
    shapes: ModelShapes,
    dtype: Dtypes,
    companions: Mapping[str, Companions],
    limit: int = SHARD_BYTES,
    transposed: bool = False,
    source: StoredWeights | None = None,
) -> Iterator[Put]:
    """Write a `transformers` folder like `model_writer`, with adapters merged into the weights in fp32. A weight stays
    in memory until its adapter arrives, so an adapter should arrive before its weight or soon after it.
    """
    with model_writer(target, shapes, dtype, companions, limit, transposed, source) as put:
        merging = Merging(shapes, put)
        yield merging.put
        assert not merging.waiting, f"no adapters came for {sorted(merging.waiting)}"


@dataclass(frozen=True)
class _Term:
    """Product to add to a weight: `rows` of B A, of one `expert`, in the adapter with full name `name`."""

    name: str
    adapter: Adapter
    expert: int
    rows: slice


class Merging:
    """Merger of adapters into weights, which passes merged weights and all other tensors of folders to `put`."""

    def __init__(self, shapes: ModelShapes, put: Put) -> None:
        self._put = put
        self.waiting = dict[str, Tensor]()
        """Weights that wait for their adapters, by name."""
        self._factors = dict[str, Tensor]()
        self._terms = dict[str, _Term]()
        for module in shapes.modules:
            if (lora := lora_of(module, shapes)) is not None:
                self._add(module, lora, shapes)
        self._left = Counter(term.name for term in self._terms.values())

    def _add(self, module: str, lora: Lora, shapes: ModelShapes) -> None:
        fused, prefix = fused_of(module, shapes), prefix_of(module, shapes)
        for adapter in lora.adapters:
            name = prefix + adapter.name
            if not adapter.experts:
                self._terms[f"{name}.weight"] = _Term(name, adapter, 0, slice(None))
                continue
            for matrix, cut in fused[name].cuts(False):
                self._terms[matrix] = _Term(name, adapter, cut.index, slice(*cut.rows))

    def put(self, name: str, tensor: Tensor) -> None:
        """Receive a stored tensor: a factor of an adapter, a weight to merge, or a tensor to pass on."""
        adapted = name.removesuffix(A).removesuffix(B)
        if name in self._terms:
            self.waiting[name] = tensor
            self._merge(name)
        elif adapted != name and adapted in self._left:
            self._factors[name] = tensor
            for weight in [each for each in self.waiting if self._terms[each].name == adapted]:
                self._merge(weight)
        else:
            self._put(name, tensor)

    def _merge(self, name: str) -> None:
        """Merge a weight if both factors of its adapter have arrived, and free the factors after their last use."""
        term = self._terms[name]
        if any(term.name + kind not in self._factors for kind in (A, B)):
            return
        a, b = (self._factors[term.name + kind] for kind in (A, B))
        if copies := term.adapter.experts:
            a, b = (factor.chunk(copies)[term.expert] for factor in (a, b))
        weight = self.waiting.pop(name).float()
        self._put(name, torch.addmm(weight, b[term.rows].float(), a.float(), alpha=term.adapter.scale))
        self._left[term.name] -= 1
        if not self._left[term.name]:
            del self._factors[term.name + A], self._factors[term.name + B]
