"""Low-rank adapters of a module (LoRA): which linear layers have some, their stored tensors, and what is frozen.

Adapters are stored tensors of the architecture beside those of folders: `NAME.lora_A.weight` [r, in] and
`NAME.lora_B.weight` [out, r] for a linear layer whose weight is `NAME.weight`. Their parameters on each rank follow
from the weight map of the layer's own parameter, so that no kind of layer has code for them.

The experts of a layer have one adapter for the gates and ups of all, `….experts.gate_up_proj`, and one for their downs,
`….experts.down_proj`: A [experts r, in] and B [experts out, r], those of one expert below those of the other. Each
expert has low-rank matrices of its own, with one A for its gate and its up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_hetero.base.errors import listed
from megatron_hetero.config.fields import unused, wrong
from megatron_hetero.config.lora import LoraConfig, matches
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.hf.weight_map import Share, TensorShapes, TensorSlice, WeightMap, split_length
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.adapter_folders import Adapter, FolderTensors, read_folders
from megatron_hetero.models.architecture import Architecture
from megatron_hetero.models.families.common import nested_name
from megatron_hetero.models.frozen import any_layer
from megatron_hetero.models.layers.dropout import Dropout
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.low_rank import ExpertsLowRank, LowRank, LowRankShape, Rows
from megatron_hetero.models.layers.parts import Part, Site
from megatron_hetero.models.shapes import ModelShapes

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj")
"""Names of an expert's matrices, without `.weight`."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""What the names of adapters have in place of `.weight`."""


@dataclass(frozen=True)
class Lora:
    """The adapters of a module: an `Added`. `freezes`: tensors of folders that do not train unless `model.train` names
    them. `dropout`: of the inputs of layers, drawn with `seed`. `start`: first values, if they are not new.
    """

    adapters: tuple[Adapter, ...]
    freezes: frozenset[str]
    dropout: float = 0.0
    lr_ratio: float = 1.0
    seed: int = 0
    start: FolderTensors | None = None

    @property
    def replaces(self) -> frozenset[str]:
        """Tensors of the model's folder that other first values replace."""
        return frozenset() if self.start is None else self.start.replaced

    @property
    def folder(self) -> Path | None:
        """The PEFT folder that first values come from, if one does."""
        return None if self.start is None else self.start.folder.folder

    @cached_property
    def _by_tensor(self) -> Mapping[str, Adapter]:
        return {f"{adapter.name}.weight": adapter for adapter in self.adapters}

    def tensors(self, stored: TensorShapes) -> TensorShapes:
        """Return A and B of each adapter."""
        result: TensorShapes = {}
        for adapter in self.adapters:
            out, inputs = shape_of(adapter.name, stored)
            copies = adapter.experts or 1
            result |= {adapter.name + A: (copies * adapter.r, inputs), adapter.name + B: (copies * out, adapter.r)}
        return result

    def weight_map(self, weights: WeightMap, prefix: str) -> WeightMap:
        """Return the parameters with `lora.A` and `lora.B` behind those of each linear layer that has adapters."""
        result: dict[str, tuple[TensorSlice, ...]] = {}
        for module, names in groupby(weights, lambda name: name.rpartition(".")[0]):
            result |= {name: weights[name] for name in names}
            if pair := self._pair(result.get(f"{module}.weight", ()), prefix):
                result[f"{module}.lora.A"], result[f"{module}.lora.B"] = pair
            if module.endswith(".experts"):
                own = {name: weights[f"{module}.{name}"] for name in OF_EXPERTS if f"{module}.{name}" in weights}
                for name, slices in own.items():
                    if (adapter := self._of_experts(slices, prefix)) is not None:
                        pair = _pair_of_experts(adapter, slices, prefix)
                        result[f"{module}.{name}_lora.A"], result[f"{module}.{name}_lora.B"] = pair
        return result

    def _of_experts(self, slices: Sequence[TensorSlice], prefix: str) -> Adapter | None:
        """Return the adapter beside a parameter of experts."""
        return self._by_tensor.get(f"{fused_name(slices[0].name.removeprefix(prefix))}.weight")

    def _of(self, slices: Sequence[TensorSlice], prefix: str) -> list[Adapter]:
        """Return the adapters beside the tensors of a parameter, in order."""
        names = dict.fromkeys(each.name.removeprefix(prefix) for each in slices)
        return [self._by_tensor[name] for name in names if name in self._by_tensor]

    def _pair(
        self, slices: Sequence[TensorSlice], prefix: str
    ) -> tuple[tuple[TensorSlice, ...], tuple[TensorSlice, ...]] | None:
        """Return the slices of A and of B beside a parameter of these slices."""
        adapters = self._of(slices, prefix)
        if not adapters:
            return None
        widest, beside = max(each.r for each in adapters), {f"{prefix}{each.name}.weight": each for each in adapters}
        first, second, at = list[TensorSlice](), list[TensorSlice](), 0
        for number, adapter in enumerate(adapters):
            columns = next(each for each in slices if beside.get(each.name) is adapter)
            cut: dict[str, Any] = {"padding": widest - adapter.r}
            if columns.columns is not None:
                cut = {"columns": columns.columns, "padding": columns.padding}
            first.append(TensorSlice(prefix + adapter.name + A, (0, adapter.r), number * widest, **cut))
        for each in slices:
            if (adapter := beside.get(each.name)) is None:
                continue
            name, padding = prefix + adapter.name + B, widest - adapter.r
            second += [TensorSlice(name, each.rows, at, (0, adapter.r), padding), *_padding(name, each, at)]
            at += _length(each)
        return tuple(first), tuple(second)

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return A as PEFT draws it, uniform within 1 / sqrt(in), and B of zeros, or the values of a PEFT folder."""
        if self.start is not None:
            return self.start.read(name, shape)
        if name.endswith(B):
            return torch.zeros(shape)
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def elements(self, stored: str, part: Part | Layer) -> int:
        """Return the elements of A and B that a token is multiplied with: of experts, those of the chosen ones."""
        own = {stored + name: shape for name, shape in part.tensors().items()}
        chosen = getattr(part.mlp, "top_k", 0) if isinstance(part, Layer) else 0
        beside = (adapter for adapter in self.adapters if adapter.name.startswith(stored))
        return sum(each.r * sum(shape_of(each.name, own)) * (chosen if each.experts else 1) for each in beside)

    def attach(self, module: torch.nn.Module, name: str, weights: WeightMap, site: Site) -> None:
        """Add adapters beside the linear layers of `module`."""
        for parameter, slices in weights.items():
            owner, _, attribute = parameter.removeprefix(f"{name}.").rpartition(".")
            adapters, layer = self._of(slices, ""), cast(Any, module.get_submodule(owner))
            if adapters and attribute == "weight":
                layer.lora = LowRank(self._shape_of(adapters, slices, *layer.weight.shape), site)
            elif attribute in OF_EXPERTS and (adapter := self._of_experts(slices, "")) is not None:
                (rows, inputs), experts = getattr(layer, attribute).shape, len(_experts(slices))
                sizes = experts, split_length(adapter.r, 1), inputs, rows // experts
                layer.add_module(f"{attribute}_lora", ExpertsLowRank(*sizes, adapter.scale, site))

    def _shape_of(
        self, adapters: Sequence[Adapter], slices: Sequence[TensorSlice], outputs: int, inputs: int
    ) -> LowRankShape:
        numbers, rows = {f"{each.name}.weight": number for number, each in enumerate(adapters)}, list[Rows]()
        at = 0
        for each in slices:
            length = _length(each)
            if each.name in numbers:
                rows.append(Rows((at, at + length), numbers[each.name]))
            at += length
        return LowRankShape(
            inputs=inputs,
            outputs=outputs,
            r=max(each.r for each in adapters),
            scales=tuple(each.scale for each in adapters),
            rows=tuple(rows),
            by_input=slices[0].columns is not None,
            dropout=self._dropout_of(slices[0]) if self.dropout else None,
        )

    def _dropout_of(self, first: TensorSlice) -> Dropout:
        """Return the dropout of a layer whose parameter begins with that slice."""
        return Dropout.of(self.dropout, self.seed, first.name, first.columns[0] if first.columns else 0)


OF_EXPERTS = "first", "second"
"""Parameters of experts that may have adapters, whose modules are named `NAME_lora`."""


def fused_name(name: str) -> str:
    """Return the name of the fused tensor that has a matrix of an expert; any other name as it is."""
    if (found := EXPERT.fullmatch(name.removesuffix(".weight"))) is None:
        return name.removesuffix(".weight")
    experts, _, kind = found.groups()
    return f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj"


def fused_layers(stored: TensorShapes) -> dict[str, int]:
    """Return the fused tensors of experts whose matrices are `stored`, each with the number of experts."""
    numbers = {name: found[2] for name in stored if (found := EXPERT.fullmatch(name.removesuffix(".weight")))}
    return {fused_name(name): int(number) + 1 for name, number in numbers.items()}


def shape_of(name: str, stored: TensorShapes) -> tuple[int, ...]:
    """Return the shape of the weight of a layer that can have an adapter; of a fused tensor that of one expert."""
    module, _, kind = name.rpartition(".")
    if f"{name}.weight" in stored:
        return stored[f"{name}.weight"]
    matrices = [stored[f"{module}.0.{each}_proj.weight"] for each in kind.removesuffix("_proj").split("_")]
    return sum(rows for rows, _ in matrices), matrices[0][1]


def _experts(slices: Sequence[TensorSlice]) -> list[int]:
    """Return the numbers of the experts whose matrices a parameter has."""
    return list(dict.fromkeys(int(each.name.rsplit(".", 3)[1]) for each in slices))


def _pair_of_experts(
    adapter: Adapter, slices: Sequence[TensorSlice], prefix: str
) -> tuple[tuple[TensorSlice, ...], tuple[TensorSlice, ...]]:
    """Return the slices of A and B beside a parameter of experts. On each rank the rank of an adapter is padded, so
    that products are aligned.
    """
    name, r, numbers = prefix + adapter.name, adapter.r, _experts(slices)
    wide, first, second = split_length(r, 1), list[TensorSlice](), list[TensorSlice]()
    columns = slices[0].columns if slices[0].padding else None
    for place, expert in enumerate(numbers):
        rows, padding = (expert * r, expert * r + r), wide - r if columns is None else slices[0].padding
        first.append(TensorSlice(name + A, rows, place * wide, columns, padding))
    out = sum(each.rows[1] - each.rows[0] for each in slices) // len(numbers)
    below = dict.fromkeys(numbers, 0)
    for each in slices:
        (expert,), rows = _experts([each]), each.rows[1] - each.rows[0]
        start = expert * out + below[expert]
        below[expert] += rows
        second.append(TensorSlice(name + B, (start, start + rows), each.at, (0, r), wide - r))
        second += _padding(name + B, each, each.at)
    return tuple(first), tuple(second)


def _length(each: TensorSlice) -> int:
    """Return the rows of a slice in its parameter, with padding."""
    return each.rows[1] - each.rows[0] + (each.padding if each.columns is None else 0)


def _padding(name: str, each: TensorSlice, at: int) -> Iterator[TensorSlice]:
    """Yield a slice of no rows of B with the padding below the rows of a slice of the weight at `at`."""
    if each.columns is None and each.padding:
        yield TensorSlice(name, (0, 0), at + each.rows[1] - each.rows[0], padding=each.padding)


# ------------------------------------------------------------------------------------------------- configuration


def with_adapters(shapes: ModelShapes, modules: Mapping[str, ModuleConfig], seed: int = 0) -> ModelShapes:
    """Return the shapes with the adapters of each module. `seed`: of dropout. Raises `UserError`."""
    chosen = {name: row.lora for name, row in modules.items() if row.lora.enabled and name in shapes.modules}
    folders = {name: lora.hf_path for name, lora in chosen.items() if lora.hf_path is not None}
    layers = {name: dict(linear_layers(shapes[name].architecture)) for name in shapes.modules} if folders else {}
    starts = read_folders(folders, shapes, layers)
    added = {name: _lora(name, lora, shapes) for name, lora in chosen.items() if name not in starts}
    added |= {name: _of_folder(start, chosen[name], name, shapes[name].architecture) for name, start in starts.items()}
    return shapes.with_added({name: replace(each, seed=seed) for name, each in added.items()})


def linear_layers(architecture: Architecture) -> Iterator[tuple[str, bool]]:
    """Yield the name of each linear layer that can have adapters, without `.weight`, and whether it is the projector's:
    those of layers and of the projector, among them the fused tensors of experts. Embeddings, the head, routers and the
    gate of a shared expert are none.
    """
    stored, stage = architecture.in_folder, PipelineStage.whole(len(architecture.layers))
    for parameter, slices in architecture.own_weight_map("", Share(0, 1), stage).items():
        projector = architecture.in_projector(parameter)
        if not parameter.endswith(".weight") or not (projector or architecture.is_of_layer(slices[0].name)):
            continue
        for tensor in dict.fromkeys(each.name for each in slices):
            if len(stored[tensor]) == 2:
                yield tensor.removesuffix(".weight"), projector
    yield from ((name, False) for name in fused_layers(stored))


def _lora(module: str, lora: LoraConfig, shapes: ModelShapes) -> Lora:
    architecture = shapes[module].architecture
    layers, experts = dict(linear_layers(architecture)), fused_layers(architecture.in_folder)
    chosen = [name for name, projector in layers.items() if not projector]
    if lora.targets:
        found = [_matching(f"modules.{module}.lora.targets", each, module, shapes) for each in lora.targets]
        chosen = [name for name in layers if any(name in names for names in found)]
    patterns = {
        each: _matching(f"modules.{module}.lora.patterns", each, module, shapes, chosen) for each in lora.patterns
    }
    deciding = {name: next((each for each, names in patterns.items() if name in names), None) for name in chosen}
    _require_deciding(module, patterns, deciding)
    adapters = list[Adapter]()
    for name, pattern in deciding.items():
        entry = None if pattern is None else lora.patterns[pattern]
        r = (entry and entry.r) or lora.r
        alpha = (entry and entry.alpha) or lora.alpha or lora.r
        scale = alpha / (math.sqrt(r) if lora.rslora else r)
        adapters.append(Adapter(name, r, scale, experts.get(name, 0)))
    _require_low(module, adapters, architecture)
    _require_used(module, lora, adapters)
    return Lora(tuple(adapters), frozen_beside(adapters, architecture), lora.dropout, lora.lr_ratio)


def _of_folder(start: FolderTensors, lora: LoraConfig, module: str, architecture: Architecture) -> Lora:
    """Return the adapters of a PEFT folder."""
    _require_used(module, lora, start.adapters)
    return Lora(start.adapters, frozen_beside(start.adapters, architecture), lora.dropout, lora.lr_ratio, start=start)


def frozen_beside(adapters: Sequence[Adapter], architecture: Architecture) -> frozenset[str]:
    """Return the tensors of folders that do not train beside the adapters of a module: all but the projector's, and the
    projector's too if one of its layers has an adapter.
    """
    of_projector = any(architecture.is_of_projector(f"{each.name}.weight") for each in adapters)
    return frozenset(name for name in architecture.in_folder if of_projector or not architecture.is_of_projector(name))


def _require_deciding(module: str, patterns: Mapping[str, Sequence[str]], deciding: Mapping[str, str | None]) -> None:
    """Check that each pattern is the first one of some layer. `patterns`: the layers that each matches; `deciding`: the
    first pattern of each layer. Raises `UserError`.
    """
    for pattern, names in patterns.items():
        if pattern not in deciding.values():
            earlier = next(each for each in patterns if each in {deciding[name] for name in names})
            fix = f"put it before `{earlier}`" if {*patterns[earlier]} - {*names} else "remove one of them"
            expected = "a pattern that decides for some layer"
            because = f"`{earlier}` comes before it, and the first pattern that matches a layer counts"
            raise wrong(f"modules.{module}.lora.patterns", f"`{pattern}`", expected, because, fix)


def _require_used(module: str, lora: LoraConfig, adapters: Sequence[Adapter]) -> None:
    """Check that the settings of adapters have an effect on some of these. Raises `UserError`."""
    setting = f"modules.{module}.lora"
    if lora.dropout and all(each.experts for each in adapters):
        because = "adapters of experts have none" if adapters else f"{lora.hf_path} has no adapters of {module}"
        raise unused(f"{setting}.dropout", lora.dropout, because, "remove it")
    if lora.lr_ratio != 1 and not adapters:
        because = f"{lora.hf_path} has no adapters of {module}"
        raise unused(f"{setting}.lr_ratio", lora.lr_ratio, because, "remove it")


def _require_low(module: str, adapters: Sequence[Adapter], architecture: Architecture) -> None:
    """Check that no rank is larger than the dims of its weight. Raises `UserError`."""
    sizes = {each: shape_of(each.name, architecture.in_folder) for each in adapters}
    high = {each.name.rpartition(".")[2]: each for each in reversed(adapters) if each.r > min(sizes[each])}
    if high:
        first, setting = next(reversed(high.values())), f"modules.{module}.lora.r"
        patterns = [f"patterns.{kind}.r to {min(sizes[each])}" for kind, each in reversed(high.items())]
        why = f"the weight of {first.name} is {list(sizes[first])}"
        fix = f"lower it, or set in modules.{module}.lora {' and '.join(patterns)}"
        raise wrong(setting, first.r, f"≤ {min(sizes[first])}", why, fix)


def _names(module: str, name: str, shapes: ModelShapes) -> tuple[str, ...]:
    """Return the names that folders and PEFT have for a linear layer."""
    full = shapes[module].architecture.namespace + name
    return tuple(dict.fromkeys((full, nested_name(full), name)))


def _matching(
    setting: str, entry: str, module: str, shapes: ModelShapes, among: Sequence[str] | None = None
) -> list[str]:
    """Return the linear layers that an entry matches. Raises `UserError` if there are none."""
    known = [name for name, _ in linear_layers(shapes[module].architecture)] if among is None else among
    found = [name for name in known if any(matches(entry, each) for each in _names(module, name, shapes))]
    if found:
        return found
    others = [
        other
        for other in shapes.modules
        if other != module and any(
            matches(entry, each)
            for name, _ in linear_layers(shapes[other].architecture)
            for each in _names(other, name, shapes)
        )
    ]  # fmt: skip
    kinds = list(dict.fromkeys(any_layer(shapes[module].architecture.namespace + name) for name in known))
    close = get_close_matches(entry, [*kinds, *(kind.rpartition(".")[2] for kind in kinds)], n=1)
    guess = f" (did you mean `{close[0]}`?)" if close else ""
    because = f"it matches none of {module}"
    tensors = {name.removesuffix(".weight"): None for name in shapes[module].architecture.in_folder}
    layers = dict(linear_layers(shapes[module].architecture))
    if unfit := [name for name in tensors if name not in layers and matches(entry, name)]:
        because = f"{unfit[0]} is no linear layer that can have adapters"
    because += f"; {' and '.join(others)} {'has' if len(others) == 1 else 'have'} such layers" if others else ""
    fix = f"move it to modules.{others[0]}.lora" if others else "correct or remove it"
    expected = f"linear layers of {module}: {listed(kinds, 12)}"
    raise wrong(setting, f"`{entry}`{guess}", expected, because, fix)


def is_target(entry: str, module: str, name: str, shapes: ModelShapes) -> bool:
    """Whether an entry of `lora.targets` matches a linear layer of a module."""
    return any(matches(entry, each) for each in _names(module, name, shapes))


def adapters_text(shapes: ModelShapes) -> Iterator[str]:
    """Yield a line about the adapters of each module that has some: their ranks, how many there are, and their size."""
    for name in shapes.modules:
        architecture, lora = shapes[name].architecture, shapes[name].added
        if not isinstance(lora, Lora):
            continue
        if not lora.adapters:
            yield f"Adapters of {name}: none; {lora.folder} has other values for {len(lora.replaces)} of its tensors."
            continue
        ranks = sorted({adapter.r for adapter in lora.adapters})
        own = sum(map(math.prod, architecture.in_folder.values()))
        added = sum(map(math.prod, architecture.tensors.values())) - own
        r = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        size = f"{len(lora.adapters):,} linear layers, {added / own:.2%} of its parameters"
        yield f"Adapters of {name}: r {r} beside {size}."
