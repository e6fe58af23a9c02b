"""Merges an adapter with the model beside which it was trained, and splits a tuned model in its base and an adapter, in
one process: tensors stream from file to file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod, sqrt
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.base.errors import UserError, listed
from megatron_hetero.checkpoint.adapters import adapters_of, replaced
from megatron_hetero.checkpoint.convert import STORED, Advance, Copied, require_apart
from megatron_hetero.checkpoint.record import ModelSources
from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.data.tokenizer import export_changes
from megatron_hetero.hf.model_files import ENCODERS, SHARD_BYTES, Companions, require_writable
from megatron_hetero.hf.peft_folders import PeftFolder, has_adapter
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.job.job import DTYPES
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapter_export import (
    Put,
    adapter_tensors,
    adapter_writer,
    has_adapters,
    merging_writer,
    saved_whole,
)
from megatron_hetero.models.adapter_folders import modules_in
from megatron_hetero.models.adapters import (
    A,
    Adapter,
    B,
    Lora,
    fused_name,
    is_target,
    linear_layers,
    with_adapters,
)
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    added_shapes,
    companions_of,
    fused_of,
    open_encoders,
    open_modules,
    own_projectors,
    prefix_of,
    stored_shapes,
    tensors_of,
)


def merge_adapter(
    sources: ModelSources,
    adapter: Path,
    target: Path,
    dtype: str = STORED,
    limit: int = SHARD_BYTES,
    advance: Advance = lambda *_: None,
) -> Copied:
    """Write the model of `sources` with an adapter merged in fp32 as a `transformers` folder.

    Args:
        sources: the model beside which the adapter was trained.
        adapter: PEFT folder of the model's own modules; those of further encoders are in `encoders/NAME` of it.
        target: a new or empty folder, or an earlier export, which is replaced.
        dtype: of the weights: float32, bfloat16, or "stored" for those of the base.
        limit: maximum bytes of a weight file, and in memory.
        advance: receives progress.

    Raises:
        UserError: a folder is damaged or of another model, or `target` cannot be written.
    """
    require_apart(target, {"the adapter": adapter, **sources.folders})
    require_writable(target)
    folders, plain = sources.read()
    shapes = with_adapters(plain, _rows(adapter, plain))
    weights = _Weights.open(sources, folders, shapes)
    given = replaced(adapters_of(shapes), shapes)
    drawn = [name for name in own_projectors(shapes) if folders.fresh_projector and name not in given]
    if drawn:
        found, why = f"no weights of {listed(drawn)}", "neither the adapter nor the base folders have them"
        fix = "give the whole model as it was trained, merged or exported"
        raise UserError.at(adapter, found=found, expected="a whole projector", because=why, fix=fix)
    stored = stored_shapes(shapes)
    dtypes = {name: weights.dtype(name) if dtype == STORED else DTYPES[dtype] for name in stored}
    low = added_shapes(shapes)
    names = [name for name in stored if name not in low]
    total, done, companions = sum(map(weights.size, stored)), 0, _companions(sources, folders)
    transposed, source = weights.text.transposed, weights.text if weights.text.unchanged else None
    with merging_writer(target, shapes, dtypes, companions, limit, transposed, source) as put:
        for name in (*low, *names):
            put(name, weights.whole(name))
            done += weights.size(name)
            advance("merging", done, total)
    written = sum(prod(stored[name]) * dtypes[name].itemsize for name in names)
    kinds = sorted({str(dtypes[name]).removeprefix("torch.") for name in names})
    return Copied(len(names), written, tuple(kinds), weights.text.notice)


def _rows(adapter: Path, shapes: ModelShapes) -> dict[str, ModuleConfig]:
    """Return settings of modules that load the adapters of a PEFT folder and of the encoders in it."""
    layers = {name: dict(linear_layers(shapes[name].architecture)) for name in shapes.modules}
    further = {path.name: path for path in sorted((adapter / ENCODERS).glob("*")) if has_adapter(path)}
    for name in further.keys() - set(shapes.further):
        found, why = f"adapters of encoder {name}", "its own folder is not given"
        fix = f"give it with --encoder {name}=DIR"
        raise UserError.at(further[name], found=found, expected="adapters of given encoders", because=why, fix=fix)
    folders = dict(further)
    if has_adapter(adapter) or not further:
        folders |= dict.fromkeys(modules_in(PeftFolder.open(adapter, str(adapter)), shapes, layers) or [TEXT], adapter)
    return {name: ModuleConfig(lora=LoraConfig(hf_path=folder)) for name, folder in folders.items()}


def _companions(sources: ModelSources, folders: ModelFolders) -> Mapping[str, Companions]:
    return companions_of(sources.companions, export_changes(folders, sources.as_config(), sources.encoders))


@dataclass(frozen=True, eq=False)
class _Weights:
    """The opened weights of a model, by stored name."""

    by_module: Mapping[str, StoredWeights]
    module_of: Mapping[str, str]
    sizes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, sources: ModelSources, folders: ModelFolders, shapes: ModelShapes) -> _Weights:
        opened = open_modules(folders, shapes, 0) | open_encoders(sources.encoders, shapes, 0)
        return cls(
            opened,
            {name: module for module in shapes.modules for name in tensors_of(module, shapes)},
            stored_shapes(shapes),
        )

    @property
    def text(self) -> StoredWeights:
        return self.by_module[TEXT]

    def whole(self, name: str) -> Tensor:
        return self.by_module[self.module_of[name]].whole(name).reshape(self.sizes[name])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the model's folder, or of a tensor that it does not have."""
        weights = self.by_module[self.module_of[name]]
        return (replace(weights, fresh={}) if name in weights.shapes else weights).dtype(name)

    def size(self, name: str) -> int:
        return prod(self.sizes[name]) * self.dtype(name).itemsize


# --------------------------------------------------------------------------------------------------- split


@dataclass(frozen=True)
class Split:
    """An adapter that was split from a model: the number of layers with one, of tensors that are saved whole, and of
    values. `error`: norm of what is missing, relative to that of the difference; `worst`: the layer with the largest
    such error of its own, and that; `left_out`: tensors that differ and that PEFT cannot have.
    """

    layers: int
    whole: int
    values: int
    error: float
    worst: tuple[str, float]
    left_out: tuple[str, ...]


def split_adapter(
    sources: ModelSources,
    tuned: ModelSources,
    target: Path,
    r: int,
    targets: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    advance: Advance = lambda *_: None,
) -> Split:
    """Write the adapter of rank `r` that is nearest to the difference of two models as a PEFT folder: for each layer
    the leading singular vectors of the difference of its weights (Eckart and Young 1936). It is exact if the difference
    has that rank. Tensors that are not of linear layers are saved whole if they differ and PEFT can have them.

    Args:
        sources: the base.
        tuned: another model of the same shapes.
        target: a new or empty folder, or an earlier export, which is replaced.
        r: rank; a layer with fewer rows or columns has that many.
        targets: layers, as `modules.NAME.lora.targets`; by default all linear layers that differ.
        dtype: of adapters.
        advance: receives progress.

    Raises:
        UserError: a folder is damaged, the models do not differ or have other shapes, no layer matches a target, or
            `target` cannot be written.
    """
    others = {f"the tuned model's {name}": folder for name, folder in tuned.folders.items()}
    require_apart(target, {**sources.folders, **others})
    require_writable(target)
    folders, plain = sources.read()
    other_folders, other = tuned.read()
    _require_same(plain, other, tuned.model)
    base, new = _Weights.open(sources, folders, plain), _Weights.open(tuned, other_folders, other)
    stored = stored_shapes(plain)
    total, done, changed = 2 * sum(map(base.size, stored)), 0, set[str]()
    for name in stored:
        if not torch.equal(base.whole(name).float(), new.whole(name).float()):
            changed.add(name)
        done += base.size(name)
        advance("comparing", done, total)
    shapes = _chosen(plain, r, targets, changed)
    if not has_adapters(shapes):
        where, fix = tuned.model, "name other targets, or give a model that was tuned from the base"
        raise UserError.at(where, problem="no linear layer that can have an adapter differs from the base", fix=fix)
    adapted, whole = set[str](), set[str]()
    for module in shapes.modules:
        adapted |= {part for _, parts in _layers(module, shapes) for part in parts}
        linear = {f"{prefix_of(module, shapes)}{name}" for name, _ in linear_layers(shapes[module].architecture)}
        others = changed & {name for name in tensors_of(module, plain) if _owner(name, linear) is None}
        whole |= saved_whole(module, shapes, others)
    left_out = tuple(name for name in stored if name in changed and name not in adapted | whole)
    trained = added_shapes(shapes).keys() | whole
    bases, companions = {TEXT: sources.model, **sources.encoders}, _companions(sources, folders)
    errors = dict[str, tuple[float, float]]()

    def progress(name: str) -> None:
        nonlocal done
        done += base.size(name)
        advance("splitting", done, total)

    with adapter_writer(target, shapes, dtype, companions, trained=trained, bases=bases) as put:
        for name in adapter_tensors(shapes, trained) & stored.keys():
            put(name, new.whole(name))
        for module in shapes.modules:
            for (name, adapter), parts in _layers(module, shapes):
                differences = partial(_differences, parts, max(1, adapter.experts), base, new, progress)
                errors[name] = _put_nearest(name, adapter, differences, put)
    missing = sum(lost for lost, _ in errors.values()) + sum(_squares(base, new, name) for name in left_out)
    every = sum(every for _, every in errors.values()) + sum(_squares(base, new, name) for name in (*whole, *left_out))
    worst = max(errors, key=lambda name: errors[name][0] / errors[name][1])
    values = sum(map(prod, added_shapes(shapes).values()))
    own = sqrt(errors[worst][0] / errors[worst][1])
    return Split(len(errors), len(whole), values, sqrt(missing / every), (worst, own), left_out)


def _owner(name: str, linear: Collection[str]) -> str | None:
    """Return the linear layer, or the layer's experts, that a stored tensor is of, if it is of one."""
    return next((each for each in (name.rpartition(".")[0], fused_name(name)) if each in linear), None)


def _require_same(base: ModelShapes, tuned: ModelShapes, where: Path) -> None:
    """Check that both models have the same tensors. Raises `UserError`."""
    one, other = stored_shapes(base), stored_shapes(tuned)
    if different := [name for name in {**one, **other} if one.get(name) != other.get(name)]:
        found, fix = f"a model that differs in the shapes of {listed(different)}", "give a model tuned from the base"
        raise UserError.at(where, found=found, expected="the shapes of the base", fix=fix)


def _layers(module: str, shapes: ModelShapes) -> Iterator[tuple[tuple[str, Adapter], list[str]]]:
    """Yield the adapters of a module, each with its full name, and the stored weights that it is beside."""
    added, prefix, fused = shapes[module].added, prefix_of(module, shapes), fused_of(module, shapes)
    for adapter in added.adapters if isinstance(added, Lora) else ():
        name = prefix + adapter.name
        yield (name, adapter), list(fused[name].matrices) if adapter.experts else [f"{name}.weight"]


def _chosen(shapes: ModelShapes, r: int, targets: Sequence[str], changed: set[str]) -> ModelShapes:
    """Return the shapes with adapters beside layers that match a target and differ. Raises `UserError`."""
    added, matched = dict[str, Lora](), set[str]()
    for module in shapes.modules:
        architecture, fused = shapes[module].architecture, fused_of(module, shapes)
        adapters, prefix = list[Adapter](), prefix_of(module, shapes)
        for name, _ in linear_layers(architecture):
            found = {each for each in targets if is_target(each, module, name, shapes)}
            matched |= found
            parts = list(fused[prefix + name].matrices) if prefix + name in fused else [f"{prefix}{name}.weight"]
            if (found or not targets) and changed.intersection(parts):
                experts = len(fused[prefix + name].names) if prefix + name in fused else 0
                size = fused[prefix + name].shape(False)[1:] if experts else architecture.in_folder[f"{name}.weight"]
                adapters.append(Adapter(name, min(r, *size), 1.0, experts))
        if adapters:
            added[module] = Lora(tuple(adapters), frozenset())
    if missing := [each for each in targets if each not in matched]:
        expected, fix = "names or patterns of linear layers, as in modules.NAME.lora.targets", "correct or remove it"
        raise UserError.at("--targets", found=listed(missing), expected=expected, fix=fix)
    return shapes.with_added(added)


def _differences(
    parts: Sequence[str], experts: int, base: _Weights, new: _Weights, progress: Callable[[str], None]
) -> Iterator[Tensor]:
    """Yield the difference of a layer's weights, or of each expert's, fp64."""
    stacked = len(parts) // experts
    for first in range(0, len(parts), stacked):
        of_expert = parts[first : first + stacked]
        yield torch.cat([new.whole(name).double() - base.whole(name).double() for name in of_expert])
        for name in of_expert:
            progress(name)


def _put_nearest(
    name: str, adapter: Adapter, differences: Callable[[], Iterator[Tensor]], put: Put
) -> tuple[float, float]:
    """Put the adapter that is nearest to these differences; return the squares of what is missing and of all."""
    firsts, seconds, missing, every = list[Tensor](), list[Tensor](), 0.0, 0.0
    for difference in differences():
        first, second = nearest(difference, adapter.r)
        firsts.append(first.float())
        seconds.append(second.float())
        missing += float((difference - seconds[-1].double() @ firsts[-1].double()).square().sum())
        every += float(difference.square().sum())
    put(name + A, torch.cat(firsts))
    put(name + B, torch.cat(seconds))
    return missing, every


def nearest(matrix: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return A [r, in] and B [out, r], fp64 as the `matrix` [out, in], whose product is nearest to it. Singular vectors
    of the smaller side are the eigenvectors of its Gram matrix.
    """
    if matrix.shape[0] > matrix.shape[1]:
        first, second = nearest(matrix.t(), r)
        return second.t().contiguous(), first.t().contiguous()
    _, vectors = torch.linalg.eigh(matrix @ matrix.t())
    second = vectors[:, -r:].flip(1)
    first = second.t() @ matrix
    root = first.norm(dim=1).sqrt()  # Half of each singular value on either side.
    return first / root.clamp(min=torch.finfo(root.dtype).tiny)[:, None], second * root


def _squares(base: _Weights, new: _Weights, name: str) -> float:
    return float((new.whole(name).double() - base.whole(name).double()).square().sum())
