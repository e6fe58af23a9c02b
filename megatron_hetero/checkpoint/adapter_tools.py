"""Merges an adapter into its base model, and splits a tuned model into its base and an adapter. Both run in a single
process, and tensors stream from file to file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.base.errors import UserError, listed
from megatron_hetero.checkpoint.convert import STORED, Copied, require_apart
from megatron_hetero.checkpoint.record import ModelSources
from megatron_hetero.checkpoint.recorded_adapters import adapters_of, replaced
from megatron_hetero.checkpoint.storage import Advance
from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.data.tokenizer import export_changes
from megatron_hetero.hf.fused_tensors import Fused
from megatron_hetero.hf.model_files import ENCODERS, SHARD_BYTES, Companions, require_writable
from megatron_hetero.hf.peft_folders import PeftFolder, has_adapter
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.job.job import DTYPES
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapter_folders import Adapter, modules_in
from megatron_hetero.models.adapter_writers import Put, adapter_tensors, adapter_writer, merging_writer, saved_whole
from megatron_hetero.models.adapters import (
    A,
    B,
    Lora,
    fused_layers,
    fused_name,
    has_adapters,
    is_target,
    linear_layers,
    lora_of,
    shape_of,
    with_adapters,
)
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    added_shapes,
    companions_of,
    fused_of,
    module_of,
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
    """Write the model of `sources` as a `transformers` folder, with an adapter merged in fp32.

    Args:
        sources: the base model of the adapter.
        adapter: PEFT folder of the model; adapters of additional encoders are in its subfolders `encoders/NAME`.
        target: a new or empty folder, or an earlier export, which is replaced.
        dtype: dtype of the weights: float32, bfloat16, or "stored" for the base's dtypes.
        limit: maximum size of a weight file, and of the tensors in memory, in bytes.
        advance: receives progress.

    Raises:
        UserError: a folder is damaged or has another model, or `target` cannot be written.
    """
    require_apart(target, {"the adapter": adapter, **sources.folders})
    require_writable(target)
    folders, plain = sources.read()
    shapes = with_adapters(plain, _settings(adapter, plain))
    weights = _Weights.open(sources, folders, shapes)
    provided = replaced(adapters_of(shapes), shapes)
    missing = [name for name in own_projectors(shapes) if folders.fresh_projector and name not in provided]
    if missing:
        found, why = f"no weights of {listed(missing)}", "neither the adapter nor the base folders have them"
        fix = "give the whole model as it was trained, merged or exported"
        raise UserError.at(adapter, found=found, expected="a whole projector", because=why, fix=fix)
    stored, added = stored_shapes(shapes), added_shapes(shapes)
    dtypes = {name: weights.dtype(name) if dtype == STORED else DTYPES[dtype] for name in stored}
    names = [name for name in stored if name not in added]
    total, done, companions = sum(map(weights.size, stored)), 0, _companions(sources, folders)
    text = weights.by_module[TEXT]
    source = text if text.unchanged else None
    with merging_writer(target, shapes, dtypes, companions, limit, text.transposed, source) as put:
        for name in (*added, *names):
            put(name, weights.whole(name))
            done += weights.size(name)
            advance("merging", done, total)
    written = sum(prod(stored[name]) * dtypes[name].itemsize for name in names)
    kinds = sorted({str(dtypes[name]).removeprefix("torch.") for name in names})
    return Copied(len(names), written, tuple(kinds), text.notice)


def _settings(adapter: Path, shapes: ModelShapes) -> dict[str, ModuleConfig]:
    """Return settings by module that load the adapters in a PEFT folder and in its folders of encoders."""
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
    """The weights of a model, readable by stored name."""

    by_module: Mapping[str, StoredWeights]
    shapes: ModelShapes
    sizes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, sources: ModelSources, folders: ModelFolders, shapes: ModelShapes) -> _Weights:
        opened = open_modules(folders, shapes, 0) | open_encoders(sources.encoders, shapes, 0)
        return cls(opened, shapes, stored_shapes(shapes))

    def whole(self, name: str) -> Tensor:
        return self.by_module[module_of(name, self.shapes)].whole(name).reshape(self.sizes[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the model's folder; of its initial values if the folder lacks the tensor."""
        weights = self.by_module[module_of(name, self.shapes)]
        return (replace(weights, fresh={}) if name in weights.shapes else weights).dtype(name)

    def size(self, name: str) -> int:
        return prod(self.sizes[name]) * self.dtype(name).itemsize


# --------------------------------------------------------------------------------------------------- split


@dataclass(frozen=True)
class Split:
    """An adapter that was split from a tuned model.

    Attributes:
        layers: number of layers with an adapter.
        whole: number of tensors saved in full.
        values: number of values in the adapters.
        error: norm of the approximation error, relative to the norm of the difference of the models.
        worst: the layer with the largest relative error, and that error.
        left_out: tensors that differ but cannot be saved in a PEFT folder.
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
    """Write the rank-`r` adapter nearest to the difference of two models as a PEFT folder.

    Adapters are truncated singular value decompositions of the differences of weights (Eckart and Young 1936), and are
    exact for differences of at most rank `r`. Other tensors that differ are saved in full if PEFT supports that.

    Args:
        sources: the base model.
        tuned: a model of the same shapes.
        target: a new or empty folder, or an earlier export, which is replaced.
        r: rank of the adapters; in each layer at most the number of its rows and columns.
        targets: layers to adapt, as in `modules.NAME.lora.targets`; by default all linear layers that differ.
        dtype: dtype of the adapters.
        advance: receives progress.

    Raises:
        UserError: a folder is damaged, the models are equal or of different shapes, no layer matches a target, or
            `target` cannot be written.
    """
    others = {f"the tuned model's {name}": folder for name, folder in tuned.folders.items()}
    require_apart(target, {**sources.folders, **others})
    require_writable(target)
    folders, plain = sources.read()
    other_folders, other = tuned.read()
    _require_same(plain, other, tuned.model)
    models = _Models(_Weights.open(sources, folders, plain), _Weights.open(tuned, other_folders, other), advance)
    changed = models.changed()
    shapes = _chosen(plain, r, targets, changed)
    if not has_adapters(shapes):
        where, fix = tuned.model, "name other targets, or give a model that was tuned from the base"
        raise UserError.at(where, problem="no linear layer that can have an adapter differs from the base", fix=fix)
    layers = dict(_adapted(shapes))
    adapted = {weight for _, weights in layers.values() for weight in weights}
    whole = _saved_whole(shapes, plain, changed)
    left_out = tuple(name for name in stored_shapes(plain) if name in changed - adapted - whole)
    trained = added_shapes(shapes).keys() | whole
    bases, companions = {TEXT: sources.model, **sources.encoders}, _companions(sources, folders)
    with adapter_writer(target, shapes, dtype, companions, trained=trained, bases=bases) as put:
        for name in adapter_tensors(shapes, trained) & stored_shapes(plain).keys():
            put(name, models.new.whole(name))
        errors = {name: _put_nearest(name, *layer, models, put) for name, layer in layers.items()}
    lost = sum(missing for missing, _ in errors.values()) + sum(map(models.squares, left_out))
    total = sum(squares for _, squares in errors.values()) + sum(map(models.squares, (*whole, *left_out)))
    relative = {name: sqrt(missing / squares) for name, (missing, squares) in errors.items()}
    worst = max(relative, key=relative.__getitem__)
    values = sum(map(prod, added_shapes(shapes).values()))
    return Split(len(errors), len(whole), values, sqrt(lost / total), (worst, relative[worst]), left_out)


class _Models:
    """The base and the tuned model, compared tensor by tensor with progress reports."""

    def __init__(self, base: _Weights, new: _Weights, advance: Advance) -> None:
        self.base, self.new, self._advance = base, new, advance
        self._done, self._total = 0, 2 * sum(map(base.size, base.sizes))

    def changed(self) -> set[str]:
        """Return the names of the tensors that differ between the models."""
        changed = set[str]()
        for name in self.base.sizes:
            if not torch.equal(self.base.whole(name).float(), self.new.whole(name).float()):
                changed.add(name)
            self._progress("comparing", name)
        return changed

    def differences(self, weights: Sequence[str], experts: int) -> Iterator[Tensor]:
        """Yield the fp64 difference of a layer's weights between the models, one matrix for each expert if any."""
        stacked = len(weights) // max(1, experts)
        for first in range(0, len(weights), stacked):
            names = weights[first : first + stacked]
            yield torch.cat([self._difference(name) for name in names])
            for name in names:
                self._progress("splitting", name)

    def squares(self, name: str) -> float:
        """Return the sum of squares of a tensor's difference between the models."""
        return float(self._difference(name).square().sum())

    def _difference(self, name: str) -> Tensor:
        return self.new.whole(name).double() - self.base.whole(name).double()

    def _progress(self, activity: str, name: str) -> None:
        self._done += self.base.size(name)
        self._advance(activity, self._done, self._total)


def _require_same(base: ModelShapes, tuned: ModelShapes, where: Path) -> None:
    """Check that both models have tensors of the same names and shapes. Raises `UserError`."""
    one, other = stored_shapes(base), stored_shapes(tuned)
    if different := [name for name in {**one, **other} if one.get(name) != other.get(name)]:
        found, fix = f"a model that differs in the shapes of {listed(different)}", "give a model tuned from the base"
        raise UserError.at(where, found=found, expected="the shapes of the base", fix=fix)


def _chosen(shapes: ModelShapes, r: int, targets: Sequence[str], changed: set[str]) -> ModelShapes:
    """Return the shapes with an adapter for each layer that differs and matches a target. Raises `UserError`."""
    added, matched = dict[str, Lora](), set[str]()
    for module in shapes.modules:
        stored, adapters = shapes[module].architecture.in_folder, list[Adapter]()
        experts, fused, prefix = fused_layers(stored), fused_of(module, shapes), prefix_of(module, shapes)
        for name, _ in linear_layers(shapes[module].architecture):
            matching = {each for each in targets if is_target(each, module, name, shapes)}
            matched |= matching
            if (matching or not targets) and changed.intersection(_weights_of(prefix + name, fused)):
                adapters.append(Adapter(name, min(r, *shape_of(name, stored)), 1.0, experts.get(name, 0)))
        if adapters:
            added[module] = Lora(tuple(adapters), frozenset())
    if missing := [each for each in targets if each not in matched]:
        expected, fix = "names or patterns of linear layers, as in modules.NAME.lora.targets", "correct or remove it"
        raise UserError.at("--targets", found=listed(missing), expected=expected, fix=fix)
    return shapes.with_added(added)


def _adapted(shapes: ModelShapes) -> Iterator[tuple[str, tuple[Adapter, Sequence[str]]]]:
    """Yield the full name of each adapted layer, its adapter, and its stored weights."""
    for module in shapes.modules:
        lora, fused = lora_of(module, shapes), fused_of(module, shapes)
        for adapter in () if lora is None else lora.adapters:
            name = prefix_of(module, shapes) + adapter.name
            yield name, (adapter, _weights_of(name, fused))


def _weights_of(name: str, fused: Mapping[str, Fused]) -> Sequence[str]:
    """Return the names of the stored weights of a linear layer, or of the experts in a fused tensor."""
    return list(fused[name].matrices) if name in fused else [f"{name}.weight"]


def _saved_whole(shapes: ModelShapes, plain: ModelShapes, changed: set[str]) -> set[str]:
    """Return the names of changed tensors outside linear layers that PEFT can save in full."""
    whole = set[str]()
    for module in shapes.modules:
        prefix = prefix_of(module, shapes)
        linear = {prefix + name for name, _ in linear_layers(shapes[module].architecture)}
        others = {
            name
            for name in tensors_of(module, plain)
            if name in changed and linear.isdisjoint((name.rpartition(".")[0], fused_name(name)))
        }
        whole |= saved_whole(module, shapes, others)
    return whole


def _put_nearest(name: str, adapter: Adapter, weights: Sequence[str], models: _Models, put: Put) -> tuple[float, float]:
    """Write the adapter nearest to a layer's difference between the models. Return the sums of squares of the
    approximation error and of the difference.
    """
    a_matrices, b_matrices, missing, total = list[Tensor](), list[Tensor](), 0.0, 0.0
    for difference in models.differences(weights, adapter.experts):
        a, b = (factor.float() for factor in nearest(difference, adapter.r))
        a_matrices.append(a)
        b_matrices.append(b)
        missing += float((difference - b.double() @ a.double()).square().sum())
        total += float(difference.square().sum())
    put(name + A, torch.cat(a_matrices))
    put(name + B, torch.cat(b_matrices))
    return missing, total


def nearest(matrix: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Return A [r, in] and B [out, r] such that B A is nearest to the fp64 `matrix` [out, in]. The singular vectors of
    its shorter side are computed as eigenvectors of the Gram matrix.
    """
    if matrix.shape[0] > matrix.shape[1]:
        a, b = nearest(matrix.t(), r)
        return b.t().contiguous(), a.t().contiguous()
    _, vectors = torch.linalg.eigh(matrix @ matrix.t())
    b = vectors[:, -r:].flip(1)
    a = b.t() @ matrix
    root = a.norm(dim=1).sqrt()  # Scale both factors by the square roots of the singular values.
    return a / root.clamp(min=torch.finfo(root.dtype).tiny)[:, None], b * root
