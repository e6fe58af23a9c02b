"""Exports of a model with adapters: as a PEFT folder, or as a whole `transformers` folder with adapters merged.

Both writers take the model's stored tensors one by one, in any order, as `model_writer` does, and leave out what they
do not write.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
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
from megatron_hetero.models.adapters import A, Adapter, B, Lora, linear_layers
from megatron_hetero.models.families.common import nested_name
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import fused_of, model_writer, prefix_of, tensors_of

TASK = "CAUSAL_LM"
"""PEFT's type of a vision-language model."""
_TOGETHER = ".in_proj_"
"""Layers of a delta net of which all are adapted or none: vLLM fuses some (vllm-project/vllm#47639)."""
Put = Callable[[str, Tensor], None]
"""Takes a stored tensor of the model by name, on the CPU."""


def lora_of(module: str, shapes: ModelShapes) -> Lora | None:
    """Return the adapters of a module, or tensors that a PEFT folder has replaced, if there are any."""
    added = shapes[module].added
    return added if isinstance(added, Lora) else None


def has_adapters(shapes: ModelShapes) -> bool:
    """Whether any module has adapters."""
    return any(lora_of(module, shapes) is not None for module in shapes.modules)


# ----------------------------------------------------------------------------------------------- PEFT folders


@dataclass(frozen=True)
class _Whole:
    """A module of which a PEFT folder has all tensors. `tensors`: their keys in the folder, by full name."""

    path: str
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class _Contents:
    """The contents of one PEFT folder. `adapters`: with their modules, by full name; `zero`: shapes of layers that have
    none, by path, for which it has adapters of zeros; `whole`: modules that are saved whole.
    """

    adapters: Mapping[str, tuple[str, Adapter]]
    zero: Mapping[str, tuple[int, int]]
    whole: tuple[_Whole, ...]


def adapter_tensors(shapes: ModelShapes, trained: Collection[str]) -> frozenset[str]:
    """Return the stored tensors that `adapter_writer` writes: adapters, what trains beside them, and frozen tensors of
    modules of which something trains. `trained`: stored tensors. Raises `UserError` if PEFT's format cannot have them.
    """
    found = set[str]()
    for modules in _folders(shapes).values():
        contents = _contents(modules, shapes, trained)
        found |= {name + kind for name in contents.adapters for kind in (A, B)}
        fused = _fused(modules, shapes)
        for whole in contents.whole:
            for name in whole.tensors:
                found |= set(fused[name].matrices) if name in fused else {name}
    return frozenset(found)


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
    """Write a PEFT folder that `PeftModel.from_pretrained` loads: yields a function that takes stored tensors by name,
    of which it writes `adapter_tensors`, all of which it has to get. Adapters of further encoders are in PEFT folders
    of their own, `encoders/NAME`. All of a folder is in memory before it is written, as PEFT reads one file.

    `dtype`: one for all, or by name. `companions`: as `model_writer`, of which configurations are left out. `trained`:
    stored tensors that train, adapters too. `bases`: the model's folder, for `text`, and those of further encoders.
    Other options are those of `model_writer`, without meaning here. `target` appears when it is complete. Raises
    `UserError` if it cannot be written, or as `adapter_tensors`.
    """
    puts = dict[str, Callable[[Tensor], None]]()
    with ExitStack() as stack:

        def add_folder(place: Path, name: str, modules: Collection[str]) -> Path:
            contents = _contents(modules, shapes, trained)
            sizes, dtypes = _sizes(contents, modules, shapes, dtype)
            files = {file: content for file, content in companions[name].items() if file != CONFIG}
            if contents.adapters:
                files[ADAPTER_CONFIG] = _config(contents, name, modules, shapes, bases).encode()
            writer = stack.enter_context(folder_writer(place, sizes, dtypes, files, sys.maxsize))
            writer.single, writer.copies = ADAPTER_WEIGHTS, sizes
            puts.update(_puts(contents, modules, shapes, writer))
            for path, (out, inputs) in contents.zero.items():
                r = next(iter(contents.adapters.values()))[1].r
                writer.put(f"{PREFIX}{path}{A}", torch.zeros(r, inputs))
                writer.put(f"{PREFIX}{path}{B}", torch.zeros(out, r))
            return writer.partial

        (own, modules), *further = _folders(shapes).items()
        partial_folder = add_folder(target, own, modules)
        for name, encoder in further:
            if _contents(encoder, shapes, trained).adapters:
                add_folder(partial_folder / ENCODERS / name, name, encoder)
        yield lambda name, tensor: puts[name](tensor) if name in puts else None


def _folders(shapes: ModelShapes) -> dict[str, tuple[str, ...]]:
    """Return the modules of each PEFT folder: the model's own, and each further encoder."""
    return {TEXT: (*shapes.own, TEXT)} | {name: (name,) for name in shapes.further}


def _path(name: str, module: str, shapes: ModelShapes) -> str:
    """Return the path in a `transformers` model of a layer or tensor with this full name."""
    return nested_name(shapes[module].architecture.namespace + name.removeprefix(prefix_of(module, shapes)))


def _fused(modules: Iterable[str], shapes: ModelShapes) -> dict[str, Fused]:
    return {name: fused for module in modules for name, fused in fused_of(module, shapes).items()}


def _contents(modules: Iterable[str], shapes: ModelShapes, trained: Collection[str]) -> _Contents:
    """Return the contents of the folder of these modules. Raises `UserError` if PEFT's format cannot have them."""
    adapters, zero, whole = dict[str, tuple[str, Adapter]](), dict[str, tuple[int, int]](), list[_Whole]()
    for module in modules:
        prefix, lora = prefix_of(module, shapes), lora_of(module, shapes)
        own = {} if lora is None else {prefix + each.name: (module, each) for each in lora.adapters}
        adapters |= own
        zero |= {_path(name, module, shapes): size for name, size in _missing(module, shapes, own).items()}
        replaced = {prefix + name for name in lora.replaces} if lora else set[str]()
        in_folder = tensors_of(module, shapes, in_folder=True)
        whole += _whole(module, shapes, (replaced | set(trained)) & in_folder.keys(), own)
    if whole and not adapters:
        paths = [each.path for each in whole]
        raise _unfit(f"no adapters beside what trains in full ({listed(paths)})", "adapters", "PEFT needs some")
    return _Contents(adapters, zero, tuple(whole))


def _missing(module: str, shapes: ModelShapes, adapters: Collection[str]) -> dict[str, tuple[int, int]]:
    """Return layers without adapters, with their shapes, of those that are adapted together and of which some are."""
    prefix, architecture = prefix_of(module, shapes), shapes[module].architecture
    together = [name for name, _ in linear_layers(architecture) if _TOGETHER in name]
    some = {name.partition(_TOGETHER)[0] for name in together if prefix + name in adapters}
    names = [name for name in together if name.partition(_TOGETHER)[0] in some and prefix + name not in adapters]
    sizes = {prefix + name: architecture.in_folder[f"{name}.weight"] for name in names}
    return {name: (size[0], size[1]) for name, size in sizes.items()}


def _whole(module: str, shapes: ModelShapes, names: Collection[str], adapters: Collection[str]) -> Iterator[_Whole]:
    """Yield the modules that have tensors with these names. Raises `UserError` if they cannot be saved whole."""
    for owner, (inside, chosen) in _owners(module, shapes, names).items():
        if (error := _refusal(owner, inside, chosen, module, shapes, adapters)) is not None:
            raise error
        yield _Whole(_path(owner, module, shapes), {name: PREFIX + _path(name, module, shapes) for name in inside})


def saved_whole(module: str, shapes: ModelShapes, names: Collection[str]) -> frozenset[str]:
    """Return those of these tensors of a module that a PEFT folder can have beside its adapters."""
    prefix, lora = prefix_of(module, shapes), lora_of(module, shapes)
    adapters = () if lora is None else [prefix + each.name for each in lora.adapters]
    found = set[str]()
    for owner, (inside, chosen) in _owners(module, shapes, names).items():
        if _refusal(owner, inside, chosen, module, shapes, adapters) is None:
            found |= chosen
    found |= {part for name, fused in fused_of(module, shapes).items() if name in found for part in fused.matrices}
    return frozenset(found.intersection(names))


def _owners(module: str, shapes: ModelShapes, names: Collection[str]) -> dict[str, tuple[list[str], set[str]]]:
    """Return the modules in `transformers` of these tensors, with all tensors inside and those of `names`, in which
    fused tensors are in place of their parts.
    """
    fused = fused_of(module, shapes)
    fused_name = {part: name for name, each in fused.items() for part in each.matrices}
    stored = dict.fromkeys(fused_name.get(name, name) for name in tensors_of(module, shapes, in_folder=True))
    chosen = {fused_name.get(name, name) for name in names}
    owners = dict.fromkeys(name.rpartition(".")[0] for name in stored if name in chosen)
    inside = {owner: list[str]() for owner in owners}
    for name in stored:
        parent = name
        while parent := parent.rpartition(".")[0]:
            if parent in inside:
                inside[parent].append(name)
    return {owner: (names, chosen.intersection(names)) for owner, names in inside.items()}


def _refusal(
    owner: str, inside: Collection[str], chosen: set[str], module: str, shapes: ModelShapes, adapters: Collection[str]
) -> UserError | None:
    """Return why a module of which `chosen` tensors train cannot be saved whole, if it cannot."""
    path, prefix = _path(owner, module, shapes), prefix_of(module, shapes)
    if any(name.removeprefix(prefix) in shapes[module].architecture.stored_twice.values() for name in inside):
        found, why = f"{path}, which trains in full", "PEFT would untie it from the head"
        return _unfit(found, "an embedding that is frozen", why)
    if any(name.rpartition(".")[0] != owner for name in inside):
        own = [name.rpartition(".")[2] for name in chosen if name.rpartition(".")[0] == owner]
        found, why = f"{path}, of which {listed(own)} train in full", "PEFT would save all modules inside it too"
        return _unfit(found, "modules without others inside", why)
    if owner in adapters or any(each.startswith(f"{owner}.") for each in adapters):
        found, why = f"{path}, of which something trains in full", "PEFT saves a module in full, or adapters of it"
        return _unfit(found, "adapters alone", why)
    return None


def _unfit(found: str, expected: str, why: str) -> UserError:
    fix = "write a merged model with --export.merge true, or freeze it with model.train or model.freeze"
    return UserError.at("export.hf_dir (--export.hf_dir)", found=found, expected=expected, because=why, fix=fix)


def _config(
    contents: _Contents, name: str, modules: Iterable[str], shapes: ModelShapes, bases: Mapping[str, Path]
) -> str:
    targets = [
        Target(_path(full, module, shapes), each.r, each.scale, each.experts > 0)
        for full, (module, each) in contents.adapters.items()
    ]
    r, scale = targets[0].r, targets[0].scale
    targets += [Target(path, r, scale) for path in contents.zero]
    dropout = max(lora.dropout for module in modules if (lora := lora_of(module, shapes)) is not None)
    whole = [each.path for each in contents.whole]
    return config_text(targets, whole, str(bases[name]), TASK if name == TEXT else None, dropout)


def _keys(contents: _Contents, shapes: ModelShapes) -> Iterator[tuple[str, str, Adapter]]:
    """Yield the full name of each adapter, what its keys begin with, and itself."""
    paths = {full: _path(full, module, shapes) for full, (module, _) in contents.adapters.items()}
    for full, (_, adapter) in contents.adapters.items():
        path = paths[full]
        if adapter.experts:
            # The parameter that comes first in the module is wrapped first.
            path, _, kind = path.rpartition(".")
            path += ".base_layer" if kind != "down_proj" and f"{path}.down_proj" in paths.values() else ""
        yield full, PREFIX + path, adapter


def _sizes(
    contents: _Contents, modules: Iterable[str], shapes: ModelShapes, dtype: Dtypes
) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
    """Return shapes and dtypes of the tensors of a folder by key."""
    of_module = {module: tensors_of(module, shapes) for module in modules}
    stored = {name: size for each in of_module.values() for name, size in each.items()}
    fused, sizes, dtypes = _fused(modules, shapes), dict[str, tuple[int, ...]](), dict[str, torch.dtype]()

    def dtype_of(*names: str) -> torch.dtype:
        each = [dtype] if isinstance(dtype, torch.dtype) else [dtype[name] for name in names]
        return reduce(torch.promote_types, each)

    for full, key, adapter in _keys(contents, shapes):
        first, (rows, r), copies = stored[full + A], stored[full + B], adapter.experts or 1
        sizes |= {key + A: first, key + B: (rows // copies, r * copies)}
        dtypes |= {key + A: dtype_of(full + A), key + B: dtype_of(full + B)}
    for path, (out, inputs) in contents.zero.items():
        name, (_, adapter) = next(iter(contents.adapters.items()))
        sizes |= {f"{PREFIX}{path}{A}": (adapter.r, inputs), f"{PREFIX}{path}{B}": (out, adapter.r)}
        dtypes |= {f"{PREFIX}{path}{kind}": dtype_of(name + A) for kind in (A, B)}
    for whole in contents.whole:
        for name, key in whole.tensors.items():
            sizes[key] = fused[name].shape(False) if name in fused else stored[name]
            dtypes[key] = dtype_of(*(fused[name].matrices if name in fused else (name,)))
    return sizes, dtypes


def _puts(
    contents: _Contents, modules: Iterable[str], shapes: ModelShapes, writer: FolderWriter
) -> dict[str, Callable[[Tensor], None]]:
    """Return for each stored tensor of a folder a function that writes it."""
    puts, fused = dict[str, Callable[[Tensor], None]](), _fused(modules, shapes)
    for full, key, adapter in _keys(contents, shapes):
        puts[full + A] = partial(writer.put, key + A)
        puts[full + B] = partial(_put_second, writer, key + B, adapter.experts)
    for whole in contents.whole:
        for name, key in whole.tensors.items():
            if name in fused:
                puts |= fusing(fused[name], False, writer.dtypes[key], partial(writer.put, key))
            else:
                puts[name] = partial(writer.put, key)
    return puts


def _put_second(writer: FolderWriter, key: str, experts: int, values: Tensor) -> None:
    writer.put(key, to_columns(values, experts) if experts else values)


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
    """Write a `transformers` folder as `model_writer` does, with adapters added to the weights in fp32. A weight waits
    in memory for its adapter, so that adapters should come before it or soon after.
    """
    with model_writer(target, shapes, dtype, companions, limit, transposed, source) as put:
        merging = Merging(shapes, put)
        yield merging.put
        assert not merging.waiting, f"no adapters came for {sorted(merging.waiting)}"


@dataclass(frozen=True)
class _Place:
    """What is added to a weight: of the product of adapter `name`, those `rows` of `expert`."""

    name: str
    expert: int
    rows: slice


class Merging:
    """Adds adapters to weights, which it gives to `put` with all other tensors of folders."""

    def __init__(self, shapes: ModelShapes, put: Put) -> None:
        self._put = put
        self.waiting = dict[str, Tensor]()
        self._low = dict[str, Tensor]()
        self._adapters = dict[str, Adapter]()
        self._places = dict[str, _Place]()
        self._left = Counter[str]()
        for module in shapes.modules:
            if (lora := lora_of(module, shapes)) is not None:
                self._add(module, lora, shapes)
        self._left.update(each.name for each in self._places.values())

    def _add(self, module: str, lora: Lora, shapes: ModelShapes) -> None:
        fused, prefix = fused_of(module, shapes), prefix_of(module, shapes)
        for adapter in lora.adapters:
            name = prefix + adapter.name
            self._adapters[name] = adapter
            if not adapter.experts:
                self._places[f"{name}.weight"] = _Place(name, 0, slice(None))
                continue
            for part, cut in fused[name].cuts(False):
                self._places[part] = _Place(name, cut.index, slice(*cut.rows))

    def put(self, name: str, tensor: Tensor) -> None:
        """Take a stored tensor."""
        adapted = name.removesuffix(A).removesuffix(B)
        if name in self._places:
            self.waiting[name] = tensor
            self._merge([name])
        elif adapted != name and adapted in self._adapters:
            self._low[name] = tensor
            if all(adapted + kind in self._low for kind in (A, B)):
                self._merge([each for each in self.waiting if self._places[each].name == adapted])
        else:
            self._put(name, tensor)

    def _merge(self, names: Iterable[str]) -> None:
        for name in names:
            place = self._places[name]
            if any(place.name + kind not in self._low for kind in (A, B)):
                return
            adapter = self._adapters[place.name]
            first, second = (self._low[place.name + kind] for kind in (A, B))
            if copies := adapter.experts:
                first, second = (each.chunk(copies)[place.expert] for each in (first, second))
            weight, rows = self.waiting.pop(name).float(), second[place.rows]
            self._put(name, torch.addmm(weight, rows.float(), first.float(), alpha=adapter.scale))
            self._left[place.name] -= 1
            if not self._left[place.name]:
                del self._low[place.name + A], self._low[place.name + B]
