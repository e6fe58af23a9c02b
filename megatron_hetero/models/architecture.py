"""The architecture of a module as a value: its layers, and the ends around them.

The weights and operations of a module follow from its parts. Parameters have the names of the torch modules in
`megatron_hetero.models.stages`, with layers numbered over the whole module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

import torch

from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, WeightMap
from megatron_hetero.layout.axes import Limit
from megatron_hetero.layout.pipeline import LAYERS, PipelineStage
from megatron_hetero.models.added import Added
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.parts import FORWARD, TRAINED, Part, Passes, Site, Tokens, named


@dataclass(frozen=True)
class End:
    """A part of a module outside its layers.

    Attributes:
        name: attribute of the torch module.
        part: the `Part` with its tensors and operations, such as an embedding.
        stored: prefix of its stored tensors.
        at: the pipeline stage that has it: the first, the last, or the stage of the layer with this number.
        copies: name of another end whose tensors it shares. A stage with both ends has the parameter once.
        copy: prefix of its tensors in folders that store them a second time.
        output: name of the module's output that it computes, if any.
        projector: whether it belongs to an encoder's projector, which can be frozen separately.
    """

    name: str
    part: Part
    stored: str
    at: Literal["first", "last"] | int
    copies: str | None = None
    copy: str = ""
    output: str = ""
    projector: bool = False

    def is_on(self, stage: PipelineStage) -> bool:
        """Return whether `stage` has this end."""
        return stage.is_first if self.at == "first" else stage.is_last if self.at == "last" else self.at in stage.layers


@dataclass(frozen=True)
class Architecture:
    """The architecture of a module: its layers, and the ends around them.

    Attributes:
        entry: the end at the beginning of the first stage.
        layers: all layers. The names of their stored tensors begin with `stored`, a number and a dot.
        ends: the other ends in the order of their parameters, which follow the parameters of layers.
        stored: prefix of the stored tensors of layers.
        namespace: prefix of all tensors in folders of whole models; names in the architecture omit it.
        added: tensors, such as adapters, in addition to the tensors of folders.
    """

    entry: End
    layers: tuple[Layer, ...]
    ends: tuple[End, ...]
    stored: str
    namespace: str = ""
    added: Added | None = None

    @property
    def views(self) -> tuple[str, ...]:
        """Views to which the parameters of the module belong."""
        parts = [*self.layers, *(end.part for end in (self.entry, *self.ends))]
        return tuple(dict.fromkeys(view for part in parts for view in part.views))

    def layers_in(self, view: str) -> tuple[int, ...]:
        """Return the numbers of the layers that have parameters in `view`."""
        return tuple(number for number, layer in enumerate(self.layers) if view in layer.views)

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """Limits on layouts, each with the numbers of the layers that it applies to, or none if it applies to all."""
        layers = dict[Limit, list[int]]()
        for number, layer in enumerate(self.layers):
            for limit in layer.attention.limits:
                layers.setdefault(limit, []).append(number)
        every = len(self.layers)
        return tuple(
            limit._replace(layers=tuple(numbers) if len(numbers) < every else ()) for limit, numbers in layers.items()
        )

    @property
    def heads(self) -> int:
        """Greatest common divisor of the numbers of heads that tp·sp has to divide; 0 if sp has no limit."""
        return math.gcd(*(limit.size for limit in self.limits if "sp" in limit.axes))

    @property
    def kv_heads(self) -> int:
        """Greatest common divisor of the numbers of key/value heads; 0 if no layer has any."""
        return math.gcd(*(layer.attention.kv_heads for layer in self.layers))

    @cached_property
    def tensors(self) -> TensorShapes:
        """All stored tensors with their shapes: tensors `in_folder`, then `added` ones."""
        return self.in_folder | ({} if self.added is None else self.added.tensors(self.in_folder))

    @cached_property
    def in_folder(self) -> TensorShapes:
        """Shapes of the tensors that folders have, in writing order."""
        ends = [end for end in (self.entry, *self.ends) if end.copies is None]
        parts: list[tuple[str, Part | Layer]] = [(end.stored, end.part) for end in ends if end.at == "first"]
        parts += [(f"{self.stored}{number}.", layer) for number, layer in enumerate(self.layers)]
        parts += [(end.stored, end.part) for end in ends if end.at != "first"]
        return {stored + name: shape for stored, part in parts for name, shape in part.tensors().items()}

    @property
    def stored_twice(self) -> dict[str, str]:
        """Tensors that a folder may store a second time, each with the tensor of which it is a copy."""
        ends = [end for end in self.ends if end.copies is not None]
        return {end.copy + name: end.stored + name for end in ends for name in end.part.tensors()}

    @cached_property
    def projector(self) -> TensorShapes:
        """Tensors of the projector in folders."""
        ends = [end for end in self.ends if end.projector]
        return {end.stored + name: shape for end in ends for name, shape in end.part.tensors().items()}

    def is_of_projector(self, tensor: str) -> bool:
        """Return whether a stored tensor belongs to the projector."""
        return any(end.projector and tensor.startswith(end.stored) for end in self.ends)

    def is_of_layer(self, tensor: str) -> bool:
        """Return whether a stored tensor belongs to a layer."""
        return tensor.startswith(self.stored) and tensor.removeprefix(self.stored)[:1].isdigit()

    def in_projector(self, parameter: str) -> bool:
        """Return whether a parameter belongs to the projector."""
        return any(end.projector and parameter.startswith(f"{end.name}.") for end in self.ends)

    def ends_of(self, stage: PipelineStage) -> Iterator[End]:
        """Return the ends of `stage`, including ends that share the weight of another end of the stage."""
        return (end for end in (self.entry, *self.ends) if end.is_on(stage))

    def holds_copy(self, end: End, stage: PipelineStage) -> bool:
        """Return whether `end` shares the weight of another end of the same stage."""
        return end.copies is not None and any(other.name == end.copies for other in self.ends_of(stage))

    def weight_map(self, prefix: str, share: Share, stage: PipelineStage, view: str = MAIN) -> WeightMap:
        """Return the parameters of `stage` in the order of its torch module, each as slices of stored tensors for one
        `share` of a view. `prefix`: prefix of all stored tensors.
        """
        result = self.own_weight_map(prefix, share, stage, view)
        return result if self.added is None else self.added.weight_map(result, prefix)

    def own_weight_map(self, prefix: str, share: Share, stage: PipelineStage, view: str = MAIN) -> WeightMap:
        """Return the `weight_map` of the parameters without `added` tensors."""
        ends = [end for end in self.ends_of(stage) if not self.holds_copy(end, stage)]
        parts: list[tuple[str, str, Part | Layer]] = [(end.name, end.stored, end.part) for end in ends]
        layers = [(f"{LAYERS}{i}", f"{self.stored}{i}.", self.layers[i]) for i in stage.layers]
        first = int(self.entry in ends)
        result: dict[str, tuple] = {}
        for name, stored, part in [*parts[:first], *layers, *parts[first:]]:
            result |= named(name, part.weight_map(prefix + stored, share, view))
        return result

    def tied_parameter(self, stage: PipelineStage) -> str | None:
        """Return the name of the parameter of `stage` that another stage has a copy of, or None."""
        every = {end.name: end for end in (self.entry, *self.ends)}
        for copy in self.ends:
            if copy.copies is None:
                continue
            original = every[copy.copies]
            if copy.is_on(stage) != original.is_on(stage):
                end = copy if copy.is_on(stage) else original
                (parameter,) = end.part.weight_map("", Share(0, 1))
                return f"{end.name}.{parameter}"
        return None

    def operations(
        self,
        tokens: Tokens,
        stage: PipelineStage | None = None,
        passes: Passes = TRAINED,
        projector: Passes | None = None,
        first: int = 0,
    ) -> int:
        """Return the FLOPs over all ranks of the forward pass and of the backward computations in `passes`.

        Args:
            tokens: the tokens to compute.
            stage: the stage; default: the whole module.
            passes: the gradients to compute. The module's input never needs a gradient; added tensors always train.
            projector: the gradients that the projector computes, if different.
            first: number of the first layer with gradients.
        """
        stage = stage or PipelineStage.whole(len(self.layers))
        kinds = self._kinds if len(stage.layers) == len(self.layers) else Counter(self.layers[i] for i in stage.layers)
        total = sum(count * layer.operations(tokens).of(passes) for layer, count in kinds.items())
        for layer in self.layers[stage.first : min(first, stage.last)]:
            operations = layer.operations(tokens)
            total -= operations.of(passes) - operations.of(FORWARD)
        for end in self.ends_of(stage):
            if end.projector and projector is not None:
                end_passes = projector
            else:
                end_passes = replace(passes, inputs=False) if end is self.entry else passes
            total += end.part.operations(tokens).of(end_passes)
        return total + self._added_operations(tokens, stage, passes, projector or passes)

    def _added_operations(self, tokens: Tokens, stage: PipelineStage, passes: Passes, projector: Passes) -> int:
        """Return the FLOPs of `added` tensors, all of which train."""
        by_layer, by_end = self._added_elements
        elements = sum(by_layer[n] for n in stage.layers if by_layer)
        total = 2 * tokens.total * elements * replace(passes, share=1).linear
        for end in self.ends_of(stage):
            if end.name in by_end:
                end_passes = replace(projector if end.projector else passes, share=1)
                total += end.part.operations(tokens).linear * by_end[end.name] * end_passes.linear
        return int(total)

    @cached_property
    def _added_elements(self) -> tuple[Sequence[int], Mapping[str, Fraction]]:
        """Elements of added matrices by which each token is multiplied: the number for each layer; and by end with
        added matrices, the number as a fraction of the elements of the end's matrices.
        """
        if self.added is None:
            return (), {}
        by_layer = [self.added.elements(f"{self.stored}{n}.", layer) for n, layer in enumerate(self.layers)]
        by_end = dict[str, Fraction]()
        for end in (self.entry, *self.ends):
            if added := self.added.elements(end.stored, end.part):
                matrices = [shape for shape in end.part.tensors().values() if len(shape) == 2]
                by_end[end.name] = Fraction(added, sum(map(math.prod, matrices)))
        return by_layer, by_end

    @cached_property
    def _kinds(self) -> Counter[Layer]:
        """Number of occurrences of each distinct layer."""
        return Counter(self.layers)

    def build(self, part: int | str, site: Site, *, whole: bool = False) -> torch.nn.Module:
        """Build the torch module of the layer with this number, or of the end with this name, with uninitialised
        weights. On the device `meta` or with fake tensors it needs no memory. `whole`: see `Layer.build`.
        """
        if isinstance(part, int):
            name, stored, value = f"{LAYERS}{part}", f"{self.stored}{part}.", self.layers[part]
            module: torch.nn.Module = value.build(site, part, whole=whole)
        else:
            (end,) = (end for end in (self.entry, *self.ends) if end.name == part)
            name, stored, value = end.name, end.stored, end.part
            module = value.build(site, 0)
        if self.added is not None:
            for view in value.views:
                holders = site.groups.holders[view]
                weights = value.weight_map(stored, Share(holders.rank(), holders.size()), view)
                self.added.attach(module, name, named(name, weights), site)
        return module
