"""A module as a value: the list of its layers between its ends.

Weights and operations of a module follow from its parts. Parameters are named as in the torch modules of
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
    """A part of a module beside its layers.

    Attributes:
        name: attribute of the torch module.
        part: the part itself.
        stored: prefix of its stored tensors.
        at: the pipeline stage that has it: the first, the last, or that of the layer with this number.
        copies: another end whose tensors it shares; a stage with both has the parameter once.
        copy: prefix of its tensors in folders that store them a second time.
        output: the output of the module that it computes.
        projector: whether it belongs to an encoder's projector, which trains or is frozen by itself.
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
        """Whether `stage` has it."""
        return stage.is_first if self.at == "first" else stage.is_last if self.at == "last" else self.at in stage.layers


@dataclass(frozen=True)
class Architecture:
    """A module: its layers between its ends.

    Attributes:
        entry: the end with which the first stage begins.
        layers: all layers, whose stored tensors begin with `stored`, a number and a dot.
        ends: the other ends in the order of their parameters, which are behind those of the layers.
        namespace: prefix of all tensors in a folder of the whole model, not part of the names here.
        added: tensors beside those of folders.
    """

    entry: End
    layers: tuple[Layer, ...]
    ends: tuple[End, ...]
    stored: str
    namespace: str = ""
    added: Added | None = None

    @property
    def views(self) -> tuple[str, ...]:
        """Views that parameters belong to."""
        parts = [*self.layers, *(end.part for end in (self.entry, *self.ends))]
        return tuple(dict.fromkeys(view for part in parts for view in part.views))

    def layers_in(self, view: str) -> tuple[int, ...]:
        """Return the numbers of the layers that have parameters of a view."""
        return tuple(number for number, layer in enumerate(self.layers) if view in layer.views)

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        """Limits of layouts, each with the layers whose it is."""
        layers = dict[Limit, list[int]]()
        for number, layer in enumerate(self.layers):
            for limit in layer.attention.limits:
                layers.setdefault(limit, []).append(number)
        every = len(self.layers)
        return tuple(limit._replace(layers=tuple(own) if len(own) < every else ()) for limit, own in layers.items())

    @property
    def heads(self) -> int:
        """Greatest common divisor of what tp·sp has to divide in any layer; 0 if sp has no limit."""
        return math.gcd(*(limit.size for limit in self.limits if "sp" in limit.axes))

    @property
    def kv_heads(self) -> int:
        """Greatest common divisor of the layers' key/value heads; 0 if no layer has any."""
        return math.gcd(*(layer.attention.kv_heads for layer in self.layers))

    @cached_property
    def tensors(self) -> TensorShapes:
        """All stored tensors with their shapes, those `in_folder` before `added` ones."""
        return self.in_folder | ({} if self.added is None else self.added.tensors(self.in_folder))

    @cached_property
    def in_folder(self) -> TensorShapes:
        """The tensors that folders have, in the order in which they are written."""
        ends = [end for end in (self.entry, *self.ends) if end.copies is None]
        parts: list[tuple[str, Part | Layer]] = [(end.stored, end.part) for end in ends if end.at == "first"]
        parts += [(f"{self.stored}{number}.", layer) for number, layer in enumerate(self.layers)]
        parts += [(end.stored, end.part) for end in ends if end.at != "first"]
        return {stored + name: shape for stored, part in parts for name, shape in part.tensors().items()}

    @property
    def stored_twice(self) -> dict[str, str]:
        """Tensors that a folder may store a second time, each with the tensor that it has to equal."""
        ends = [end for end in self.ends if end.copies is not None]
        return {end.copy + name: end.stored + name for end in ends for name in end.part.tensors()}

    @cached_property
    def projector(self) -> TensorShapes:
        """Tensors of the projector that folders have."""
        ends = [end for end in self.ends if end.projector]
        return {end.stored + name: shape for end in ends for name, shape in end.part.tensors().items()}

    def is_of_projector(self, tensor: str) -> bool:
        """Whether a stored tensor is the projector's."""
        return any(end.projector and tensor.startswith(end.stored) for end in self.ends)

    def is_of_layer(self, tensor: str) -> bool:
        """Whether a stored tensor is a layer's."""
        return tensor.startswith(self.stored) and tensor.removeprefix(self.stored)[:1].isdigit()

    def in_projector(self, parameter: str) -> bool:
        """Whether a parameter is in the projector."""
        return any(end.projector and parameter.startswith(f"{end.name}.") for end in self.ends)

    def ends_of(self, stage: PipelineStage) -> Iterator[End]:
        """Return the ends of `stage`. One that copies another on the same stage has no parameters there."""
        return (end for end in (self.entry, *self.ends) if end.is_on(stage))

    def holds_copy(self, end: End, stage: PipelineStage) -> bool:
        """Whether `end` shares the weight of another end of the same stage."""
        return end.copies is not None and any(other.name == end.copies for other in self.ends_of(stage))

    def weight_map(self, prefix: str, share: Share, stage: PipelineStage, view: str = MAIN) -> WeightMap:
        """Return the parameters of `stage` in the order of its torch module, and the slices of stored tensors that they
        are for one `share`. `prefix`: of all stored tensors.
        """
        result = self.own_weight_map(prefix, share, stage, view)
        return result if self.added is None else self.added.weight_map(result, prefix)

    def own_weight_map(self, prefix: str, share: Share, stage: PipelineStage, view: str = MAIN) -> WeightMap:
        """Return the `weight_map` of tensors that folders have."""
        ends = [end for end in self.ends_of(stage) if not self.holds_copy(end, stage)]
        parts: list[tuple[str, str, Part | Layer]] = [(end.name, end.stored, end.part) for end in ends]
        layers = [(f"{LAYERS}{i}", f"{self.stored}{i}.", self.layers[i]) for i in stage.layers]
        first = int(self.entry in ends)
        result: dict[str, tuple] = {}
        for name, stored, part in [*parts[:first], *layers, *parts[first:]]:
            result |= named(name, part.weight_map(prefix + stored, share, view))
        return result

    def tied_parameter(self, stage: PipelineStage) -> str | None:
        """Return the parameter of `stage` of which another stage has a copy, if there is one."""
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
        """Count the operations of `stage`, or of the whole module, over all ranks, with the gradients of `passes`.
        `projector`: gradients of the projector, if they differ. `first`: the first layer with gradients. The input of
        the module never needs one. Added tensors always train.
        """
        stage = stage or PipelineStage.whole(len(self.layers))
        kinds = self._kinds if len(stage.layers) == len(self.layers) else Counter(self.layers[i] for i in stage.layers)
        found = sum(count * layer.operations(tokens).of(passes) for layer, count in kinds.items())
        for layer in self.layers[stage.first : min(first, stage.last)]:
            operations = layer.operations(tokens)
            found -= operations.of(passes) - operations.of(FORWARD)
        for end in self.ends_of(stage):
            own = replace(passes, inputs=False) if end is self.entry else passes
            own = projector if end.projector and projector is not None else own
            found += end.part.operations(tokens).of(own)
        return found + self._added_operations(tokens, stage, passes, projector or passes)

    def _added_operations(self, tokens: Tokens, stage: PipelineStage, passes: Passes, projector: Passes) -> int:
        """Count the operations of `added` tensors, all of which train."""
        of_layers, of_ends = self._added_elements
        elements = sum(of_layers[n] for n in stage.layers if of_layers)
        found = 2 * tokens.total * elements * replace(passes, share=1).linear
        for end in self.ends_of(stage):
            if end.name in of_ends:
                own = projector if end.projector else passes
                found += end.part.operations(tokens).linear * of_ends[end.name] * replace(own, share=1).linear
        return int(found)

    @cached_property
    def _added_elements(self) -> tuple[Sequence[int], Mapping[str, Fraction]]:
        """Elements of added matrices that a token of each layer is multiplied with; and beside each end that has some,
        relative to its own elements.
        """
        if self.added is None:
            return (), {}
        of_layers = [self.added.elements(f"{self.stored}{n}.", layer) for n, layer in enumerate(self.layers)]
        of_ends = {end: self.added.elements(end.stored, end.part) for end in (self.entry, *self.ends)}
        own = {end: sum(math.prod(s) for s in end.part.tensors().values() if len(s) == 2) for end in of_ends}
        return of_layers, {end.name: Fraction(n, own[end]) for end, n in of_ends.items() if n}

    @cached_property
    def _kinds(self) -> Counter[Layer]:
        """Number of layers of each kind."""
        return Counter(self.layers)

    def build(self, part: int | str, site: Site, *, whole: bool = False) -> torch.nn.Module:
        """Build the torch module of the layer with that number or of the end with that name, without values of weights.
        Under `torch.device("meta")`, or on fake tensors, it takes no memory. `whole`: see `Layer.build`.
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
                own = value.weight_map(stored, Share(holders.rank(), holders.size()), view)
                self.added.attach(module, name, named(name, own), site)
        return module
