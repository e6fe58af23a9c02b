"""Low-rank adapters of a module (LoRA): which linear layers have one, how adapters are stored, and what they freeze.

Adapters are stored tensors of the architecture that no model folder has: `NAME.lora_A.weight` [r, in] and
`NAME.lora_B.weight` [out, r] for a linear layer with the weight `NAME.weight`. Their parameters on each rank follow
from the weight map of the layer's parameters, so layers need no code for adapters.

The experts of a layer share one adapter for all gates and ups, `….experts.gate_up_proj`, and one for all downs,
`….experts.down_proj`. Each expert has separate low-rank matrices in these adapters, with one A for its gate and its up:
A [experts * r, in] and B [experts * out, r], expert after expert.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.base.errors import UserError, listed
from megatron_hetero.config.fields import unused, wrong
from megatron_hetero.config.lora import LoraConfig, matches
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.hf.weight_map import Share, TensorShapes, TensorSlice, WeightMap, split_length
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.adapter_folders import Adapter, FolderTensors, read_folders
from megatron_hetero.models.architecture import Architecture
from megatron_hetero.models.families.common import fused_expert, nested_name
from megatron_hetero.models.frozen import any_layer
from megatron_hetero.models.layers.dropout import Dropout
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.low_rank import BRows, ExpertsLowRank, LowRank, LowRankShape
from megatron_hetero.models.layers.parts import Part, Site
from megatron_hetero.models.shapes import ModelShapes

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of an adapter's tensors, in place of `.weight`."""
EXPERT_PARAMETERS = "first", "second"
"""Parameters of experts that may have adapters. The adapter of parameter `NAME` is the submodule `NAME_lora`."""
Pair = tuple[tuple[TensorSlice, ...], tuple[TensorSlice, ...]]
"""Slices of the parameters A and B of an adapter."""


@dataclass(frozen=True)
class Lora:
    """The adapters of a module; implements `Added`.

    Attributes:
        adapters: one per adapted layer, in the order of the architecture.
        freezes: tensors of folders that do not train unless `model.train` names them.
        dropout: probability of dropout of the layers' inputs.
        lr_ratio: learning rate of B relative to that of A (LoRA+).
        seed: seed of the dropout.
        start: the initial values, if they come from a PEFT folder.
    """

    adapters: tuple[Adapter, ...]
    freezes: frozenset[str]
    dropout: float = 0.0
    lr_ratio: float = 1.0
    seed: int = 0
    start: FolderTensors | None = None

    @property
    def replaces(self) -> frozenset[str]:
        """Tensors of the model's folder whose initial values come from the PEFT folder instead."""
        return frozenset() if self.start is None else self.start.replaced

    @property
    def folder(self) -> Path | None:
        """The PEFT folder that provides initial values, if any."""
        return None if self.start is None else self.start.folder.folder

    @cached_property
    def _by_tensor(self) -> Mapping[str, Adapter]:
        return {f"{adapter.name}.weight": adapter for adapter in self.adapters}

    def tensors(self, stored: TensorShapes) -> TensorShapes:
        """Return the shapes of A and B of each adapter, by name."""
        shapes: TensorShapes = {}
        for adapter in self.adapters:
            out, inputs = shape_of(adapter.name, stored)
            copies = adapter.experts or 1
            shapes[adapter.name + A] = copies * adapter.r, inputs
            shapes[adapter.name + B] = copies * out, adapter.r
        return shapes

    def weight_map(self, weights: WeightMap, prefix: str) -> WeightMap:
        """Return `weights` with the parameters A and B inserted after the parameters of each adapted layer."""
        result: dict[str, tuple[TensorSlice, ...]] = {}
        for module, names in groupby(weights, lambda name: name.rpartition(".")[0]):
            result |= {name: weights[name] for name in names}
            slices = result.get(f"{module}.weight", ())
            if adapters := self._beside(slices, prefix):
                result[f"{module}.lora.A"], result[f"{module}.lora.B"] = _linear_pair(adapters, slices, prefix)
            if not module.endswith(".experts"):
                continue
            for name in EXPERT_PARAMETERS:
                slices = weights.get(f"{module}.{name}", ())
                if (adapter := self._beside_experts(slices, prefix)) is not None:
                    lora = f"{module}.{name}_lora"
                    result[f"{lora}.A"], result[f"{lora}.B"] = _experts_pair(adapter, slices, prefix)
        return result

    def _beside(self, slices: Sequence[TensorSlice], prefix: str) -> list[Adapter]:
        """Return the adapters of the tensors in a parameter of a linear layer, in order."""
        names = dict.fromkeys(each.name.removeprefix(prefix) for each in slices)
        return [self._by_tensor[name] for name in names if name in self._by_tensor]

    def _beside_experts(self, slices: Sequence[TensorSlice], prefix: str) -> Adapter | None:
        """Return the adapter of a parameter of experts, if any."""
        return self._by_tensor.get(f"{fused_name(slices[0].name.removeprefix(prefix))}.weight") if slices else None

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the values of the PEFT folder, or else PEFT's defaults: A uniform within ±1 / sqrt(in), B zero."""
        if self.start is not None:
            return self.start.read(name, shape)
        if name.endswith(B):
            return torch.zeros(shape)
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def elements(self, stored: str, part: Part | Layer) -> int:
        """Return the number of elements of A and B used per token, counting only the chosen experts."""
        tensors = {stored + name: shape for name, shape in part.tensors().items()}
        chosen = getattr(part.mlp, "top_k", 0) if isinstance(part, Layer) else 0
        adapters = [adapter for adapter in self.adapters if adapter.name.startswith(stored)]
        return sum(each.r * sum(shape_of(each.name, tensors)) * (chosen if each.experts else 1) for each in adapters)

    def attach(self, module: torch.nn.Module, name: str, weights: WeightMap, site: Site) -> None:
        """Add the adapters to the linear layers and the experts of `module`."""
        for parameter, slices in weights.items():
            owner, _, attribute = parameter.removeprefix(f"{name}.").rpartition(".")
            layer: Any = module.get_submodule(owner)
            if attribute == "weight" and (adapters := self._beside(slices, "")):
                layer.lora = LowRank(self._low_rank_shape(adapters, slices, *layer.weight.shape), site)
            elif attribute in EXPERT_PARAMETERS and (adapter := self._beside_experts(slices, "")) is not None:
                rows, inputs = getattr(layer, attribute).shape
                experts = len(_experts(slices))
                r, outputs = split_length(adapter.r, 1), rows // experts
                lora = ExpertsLowRank(experts, r, inputs, outputs, adapter.scale, site)
                layer.add_module(f"{attribute}_lora", lora)

    def _low_rank_shape(
        self, adapters: Sequence[Adapter], slices: Sequence[TensorSlice], outputs: int, inputs: int
    ) -> LowRankShape:
        numbers = {f"{adapter.name}.weight": number for number, adapter in enumerate(adapters)}
        rows, at = list[BRows](), 0
        for each in slices:
            length = _length(each)
            if each.name in numbers:
                rows.append(BRows((at, at + length), numbers[each.name]))
            at += length
        first = slices[0]
        first_column = first.columns[0] if first.columns else 0
        return LowRankShape(
            inputs=inputs,
            outputs=outputs,
            r=max(adapter.r for adapter in adapters),
            scales=tuple(adapter.scale for adapter in adapters),
            rows=tuple(rows),
            by_input=first.columns is not None,
            dropout=Dropout.of(self.dropout, self.seed, first.name, first_column) if self.dropout else None,
        )


def lora_of(module: str, shapes: ModelShapes) -> Lora | None:
    """Return the adapters of a module and its tensors from a PEFT folder; None if it has neither."""
    added = shapes[module].added
    return added if isinstance(added, Lora) else None


def has_adapters(shapes: ModelShapes) -> bool:
    """Return whether any module has adapters or tensors from a PEFT folder."""
    return any(lora_of(module, shapes) is not None for module in shapes.modules)


def fused_name(name: str) -> str:
    """Return the name of the fused tensor that contains an expert's matrix, or else `name` without `.weight`."""
    fused = fused_expert(f"{name.removesuffix('.weight')}.weight")
    return name.removesuffix(".weight") if fused is None else fused[0]


def fused_layers(stored: TensorShapes) -> dict[str, int]:
    """Return the number of experts in each fused tensor whose matrices are `stored`."""
    fused = (fused_expert(name) for name in stored)
    return {each[0]: each[1] + 1 for each in fused if each is not None}


def shape_of(name: str, stored: TensorShapes) -> tuple[int, ...]:
    """Return the weight shape [out, in] of a layer that can have an adapter; for a fused tensor, of one expert."""
    module, _, kind = name.rpartition(".")
    if f"{name}.weight" in stored:
        return stored[f"{name}.weight"]
    matrices = [stored[f"{module}.0.{each}_proj.weight"] for each in kind.removesuffix("_proj").split("_")]
    return sum(rows for rows, _ in matrices), matrices[0][1]


def _linear_pair(adapters: Sequence[Adapter], slices: Sequence[TensorSlice], prefix: str) -> Pair:
    """Return A and B of a linear layer whose weight has these slices. The A's of its projections are stacked, each
    padded to the largest rank; B has the rows of the adapted projections only.
    """
    r = max(adapter.r for adapter in adapters)
    by_name = {f"{prefix}{adapter.name}.weight": adapter for adapter in adapters}
    a_slices, b_slices, at = list[TensorSlice](), list[TensorSlice](), 0
    for number, adapter in enumerate(adapters):
        first = next(each for each in slices if by_name.get(each.name) is adapter)
        columns, padding = (None, r - adapter.r) if first.columns is None else (first.columns, first.padding)
        a_slices.append(TensorSlice(prefix + adapter.name + A, (0, adapter.r), number * r, columns, padding))
    for each in slices:
        if (adapter := by_name.get(each.name)) is not None:
            name = prefix + adapter.name + B
            b_slices.append(TensorSlice(name, each.rows, at, (0, adapter.r), r - adapter.r))
            b_slices += _padding(name, each, at)
            at += _length(each)
    return tuple(a_slices), tuple(b_slices)


def _experts_pair(adapter: Adapter, slices: Sequence[TensorSlice], prefix: str) -> Pair:
    """Return A and B of a parameter of experts with these slices. The adapter's rank is padded for aligned products."""
    name, r, experts = prefix + adapter.name, adapter.r, _experts(slices)
    padded_r = split_length(r, 1)
    columns = slices[0].columns if slices[0].padding else None
    padding = padded_r - r if columns is None else slices[0].padding
    a_slices = [
        TensorSlice(name + A, (expert * r, (expert + 1) * r), place * padded_r, columns, padding)
        for place, expert in enumerate(experts)
    ]
    b_slices = list[TensorSlice]()
    out = sum(each.rows[1] - each.rows[0] for each in slices) // len(experts)
    done = dict.fromkeys(experts, 0)
    for each in slices:
        (expert,), rows = _experts([each]), each.rows[1] - each.rows[0]
        start = expert * out + done[expert]
        done[expert] += rows
        b_slices.append(TensorSlice(name + B, (start, start + rows), each.at, (0, r), padded_r - r))
        b_slices += _padding(name + B, each, each.at)
    return tuple(a_slices), tuple(b_slices)


def _experts(slices: Sequence[TensorSlice]) -> list[int]:
    """Return the numbers of the experts whose matrices are in a parameter."""
    return list(dict.fromkeys(int(each.name.rsplit(".", 3)[1]) for each in slices))


def _length(each: TensorSlice) -> int:
    """Return the number of rows of a slice in its parameter, including padding."""
    return each.rows[1] - each.rows[0] + (each.padding if each.columns is None else 0)


def _padding(name: str, each: TensorSlice, at: int) -> Iterator[TensorSlice]:
    """Yield an empty slice of B that adds the row padding of a slice of the weight at `at`."""
    if each.columns is None and each.padding:
        yield TensorSlice(name, (0, 0), at + each.rows[1] - each.rows[0], padding=each.padding)


# ------------------------------------------------------------------------------------------------- configuration


def with_adapters(shapes: ModelShapes, modules: Mapping[str, ModuleConfig], seed: int = 0) -> ModelShapes:
    """Return the shapes with the adapters of each module. `seed`: seed of the dropout. Raises `UserError`."""
    settings = {name: row.lora for name, row in modules.items() if row.lora.enabled and name in shapes.modules}
    folders = {name: lora.hf_path for name, lora in settings.items() if lora.hf_path is not None}
    layers = {name: dict(linear_layers(shapes[name].architecture)) for name in shapes.modules} if folders else {}
    starts = read_folders(folders, shapes, layers)
    added = dict[str, Lora]()
    for name, lora in settings.items():
        if (start := starts.get(name)) is None:
            added[name] = _new(name, lora, shapes)
        else:
            _require_used(name, lora, start.adapters)
            frozen = frozen_beside(start.adapters, shapes[name].architecture)
            added[name] = Lora(start.adapters, frozen, lora.dropout, lora.lr_ratio, start=start)
    return shapes.with_added({name: replace(each, seed=seed) for name, each in added.items()})


def linear_layers(architecture: Architecture) -> Iterator[tuple[str, bool]]:
    """Yield the name, without `.weight`, of each linear layer that can have an adapter, and whether it is in the
    projector. These are linear layers of transformer layers and of the projector, and the fused tensors of experts, but
    not embeddings, heads, routers, or gates of shared experts.
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


def _new(module: str, lora: LoraConfig, shapes: ModelShapes) -> Lora:
    """Return new adapters as the settings of a module describe. Raises `UserError`."""
    architecture, setting = shapes[module].architecture, f"modules.{module}.lora"
    layers, experts = dict(linear_layers(architecture)), fused_layers(architecture.in_folder)
    chosen = [name for name, projector in layers.items() if not projector]
    if lora.targets:
        targets = set[str]()
        for entry in lora.targets:
            targets.update(_matching(f"{setting}.targets", entry, module, shapes, layers))
        chosen = [name for name in layers if name in targets]
    patterns = {each: _matching(f"{setting}.patterns", each, module, shapes, chosen) for each in lora.patterns}
    deciding = {name: next((each for each, names in patterns.items() if name in names), None) for name in chosen}
    _require_deciding(module, patterns, deciding)
    adapters = list[Adapter]()
    for name, pattern in deciding.items():
        override = None if pattern is None else lora.patterns[pattern]
        r = (override and override.r) or lora.r
        alpha = (override and override.alpha) or lora.alpha or lora.r
        scale = alpha / (math.sqrt(r) if lora.rslora else r)
        adapters.append(Adapter(name, r, scale, experts.get(name, 0)))
    _require_low(module, adapters, architecture)
    _require_used(module, lora, adapters)
    return Lora(tuple(adapters), frozen_beside(adapters, architecture), lora.dropout, lora.lr_ratio)


def frozen_beside(adapters: Sequence[Adapter], architecture: Architecture) -> frozenset[str]:
    """Return the tensors of folders that the adapters of a module freeze: all tensors outside the projector, and the
    projector's tensors too if one of its layers has an adapter.
    """
    adapts_projector = any(architecture.is_of_projector(f"{each.name}.weight") for each in adapters)
    return frozenset(
        name for name in architecture.in_folder if adapts_projector or not architecture.is_of_projector(name)
    )


def _require_deciding(module: str, patterns: Mapping[str, Sequence[str]], deciding: Mapping[str, str | None]) -> None:
    """Check that each pattern is the first match of some layer. `patterns`: the layers that each pattern matches;
    `deciding`: the first pattern that matches each layer. Raises `UserError`.
    """
    for pattern, names in patterns.items():
        if pattern not in deciding.values():
            earlier = next(each for each in patterns if each in {deciding[name] for name in names})
            fix = f"put it before `{earlier}`" if {*patterns[earlier]} - {*names} else "remove one of them"
            expected = "a pattern that decides for some layer"
            because = f"`{earlier}` comes before it, and the first pattern that matches a layer counts"
            raise wrong(f"modules.{module}.lora.patterns", f"`{pattern}`", expected, because, fix)


def _require_used(module: str, lora: LoraConfig, adapters: Sequence[Adapter]) -> None:
    """Check that the adapters of a module use all of its settings. Raises `UserError`."""
    setting = f"modules.{module}.lora"
    if lora.dropout and all(each.experts for each in adapters):
        because = "adapters of experts have none" if adapters else f"{lora.hf_path} has no adapters of {module}"
        raise unused(f"{setting}.dropout", lora.dropout, because, "remove it")
    if lora.lr_ratio != 1 and not adapters:
        because = f"{lora.hf_path} has no adapters of {module}"
        raise unused(f"{setting}.lr_ratio", lora.lr_ratio, because, "remove it")


def _require_low(module: str, adapters: Sequence[Adapter], architecture: Architecture) -> None:
    """Check that no adapter's rank exceeds the dimensions of its weight. Raises `UserError`."""
    sizes = {each: shape_of(each.name, architecture.in_folder) for each in adapters}
    high = {each.name.rpartition(".")[2]: each for each in reversed(adapters) if each.r > min(sizes[each])}
    if high:
        first, setting = next(reversed(high.values())), f"modules.{module}.lora.r"
        patterns = [f"patterns.{kind}.r to {min(sizes[each])}" for kind, each in reversed(high.items())]
        why = f"the weight of {first.name} is {list(sizes[first])}"
        fix = f"lower it, or set in modules.{module}.lora {' and '.join(patterns)}"
        raise wrong(setting, first.r, f"≤ {min(sizes[first])}", why, fix)


def is_target(entry: str, module: str, name: str, shapes: ModelShapes) -> bool:
    """Return whether an entry of `lora.targets` matches a linear layer, by any name that folders or PEFT use."""
    full = shapes[module].architecture.namespace + name
    return any(matches(entry, each) for each in (full, nested_name(full), name))


def _matching(setting: str, entry: str, module: str, shapes: ModelShapes, layers: Collection[str]) -> list[str]:
    """Return the linear layers among `layers` that an entry matches. Raises `UserError` if it matches none."""
    matching = [name for name in layers if is_target(entry, module, name, shapes)]
    if not matching:
        raise _unmatched(setting, entry, module, shapes, layers)
    return matching


def _unmatched(setting: str, entry: str, module: str, shapes: ModelShapes, layers: Collection[str]) -> UserError:
    architecture, adaptable = shapes[module].architecture, dict(linear_layers(shapes[module].architecture))
    others = [
        other
        for other in shapes.modules
        if other != module
        and any(is_target(entry, other, name, shapes) for name, _ in linear_layers(shapes[other].architecture))
    ]
    kinds = list(dict.fromkeys(any_layer(architecture.namespace + name) for name in layers))
    close = get_close_matches(entry, [*kinds, *(kind.rpartition(".")[2] for kind in kinds)], n=1)
    guess = f" (did you mean `{close[0]}`?)" if close else ""
    because = f"it matches none of {module}"
    tensors = {name.removesuffix(".weight"): None for name in architecture.in_folder}
    if unfit := [name for name in tensors if name not in adaptable and matches(entry, name)]:
        because = f"{unfit[0]} is no linear layer that can have adapters"
    because += f"; {' and '.join(others)} {'has' if len(others) == 1 else 'have'} such layers" if others else ""
    fix = f"move it to modules.{others[0]}.lora" if others else "correct or remove it"
    return wrong(setting, f"`{entry}`{guess}", f"linear layers of {module}: {listed(kinds, 12)}", because, fix)


def adapters_text(shapes: ModelShapes) -> Iterator[str]:
    """Yield one line for each module with adapters: their ranks, number and size."""
    for name in shapes.modules:
        architecture, lora = shapes[name].architecture, lora_of(name, shapes)
        if lora is None:
            continue
        if not lora.adapters:
            yield f"Adapters of {name}: none; {lora.folder} has other values for {len(lora.replaces)} of its tensors."
            continue
        ranks = sorted({adapter.r for adapter in lora.adapters})
        base = sum(map(math.prod, architecture.in_folder.values()))
        added = sum(map(math.prod, architecture.tensors.values())) - base
        r = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        size = f"{len(lora.adapters):,} linear layers, {added / base:.2%} of its parameters"
        yield f"Adapters of {name}: r {r} beside {size}."
