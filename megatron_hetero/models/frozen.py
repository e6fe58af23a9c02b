"""Which tensors of a model train. Pure.

`model.freeze` and `model.train` list parts (`vision`, `projector`, `text` …) and `fnmatch` patterns over names of the
folder's tensors, such as ``model.layers.*.mlp.*`` or ``visual.blocks.[0-9].*``. What `freeze` lists does not train; if
`train` is not empty, what it does not list does not train either.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod

from megatron_hetero.base.errors import UserError, is_pattern, listed
from megatron_hetero.config.fields import wrong
from megatron_hetero.hf.weight_map import Share
from megatron_hetero.layout.grammar import did_you_mean
from megatron_hetero.layout.names import TEXT
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.families.common import nested_name
from megatron_hetero.models.layers.parts import Passes, Tokens
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    added_shapes,
    folder_shapes,
    prefix_of,
    stored_shapes,
    tensors_of_parts,
    weight_map,
)


@dataclass(frozen=True, eq=False)
class Frozen:
    """The frozen part of a model: stored `tensors`, and `parts` of which nothing trains. `shares`: the share from 0 to
    1 that trains of each part's matrices that tokens are multiplied with, without `Added` ones.
    """

    tensors: frozenset[str]
    parts: frozenset[str]
    shares: Mapping[str, float]

    @classmethod
    def of(cls, shapes: ModelShapes, freeze: Sequence[str] = (), train: Sequence[str] = ()) -> Frozen:
        """Resolve the two settings.

        Raises:
            UserError: a pattern matches no tensor, some tensors of one parameter train and others do not, or nothing
                trains.
        """
        stored, by_part = stored_shapes(shapes), tensors_of_parts(shapes)
        tensors = frozen_tensors(shapes, freeze, train)
        parts = frozenset(part for part, names in by_part.items() if tensors.issuperset(names))
        setting = "train" if train else "freeze"
        if len(parts) == len(by_part):
            problem = f"freezes all of {', '.join(by_part)}, which leaves nothing to train"
            raise UserError.at(f"model.{setting} (--model.{setting})", problem=problem, fix="remove an entry")
        patterns, added = any(map(is_pattern, (*freeze, *train))), added_shapes(shapes)
        if patterns:
            _require_whole_parameters(shapes, tensors, frozen_tensors(shapes, freeze))
        if patterns or added:
            entry = shapes.text.architecture.entry
            looked_up = set() if shapes.text.tied else {entry.stored + name for name in entry.part.tensors()}
            looked_up |= added.keys()
            shares = {part: _share({*names} - looked_up, tensors, stored) for part, names in by_part.items()}
        else:
            shares = {part: float(part not in parts) for part in by_part}
        return cls(tensors, parts, shares)

    def trains(self, part: str) -> bool:
        """Whether anything of a part trains."""
        return part not in self.parts

    def passes(self, part: str, *, inputs: bool) -> Passes:
        """Return the gradients that a part computes. `inputs`: whether it computes those of its input."""
        return Passes(inputs, self.trains(part), self.shares[part])

    def first_layer(self, shapes: ModelShapes, module: str = TEXT) -> int:
        """Return the first layer of a module with gradients, for the language model behind frozen encoders: that of the
        first tensor that trains, or 0 if the entry trains.
        """
        architecture, prefix = shapes[module].architecture, prefix_of(module, shapes)
        trained = {name for name in architecture.tensors if prefix + name not in self.tensors}
        if any(architecture.entry.stored + name in trained for name in architecture.entry.part.tensors()):
            return 0
        of_layers = (name.removeprefix(architecture.stored) for name in trained if architecture.is_of_layer(name))
        return min((int(name.split(".")[0]) for name in of_layers), default=len(architecture.layers))

    def operations(self, module: str, shapes: ModelShapes, tokens: Tokens, stage: PipelineStage | None = None) -> int:
        """Count the operations of a module, or of a stage of it, in a step: a frozen part counts as far as the
        gradients of others need it.
        """
        if module == TEXT:
            behind = any(self.trains(part) for name in shapes.encoders for part in shapes.parts_of(name))
            inputs, projector = behind or self.trains(TEXT), None
        else:
            behind, inputs, projector = False, self.trains(module), shapes.parts_of(module)[1]
        return shapes[module].architecture.operations(
            tokens,
            stage,
            passes=self.passes(module, inputs=inputs),
            projector=self.passes(projector, inputs=inputs) if projector else None,
            first=0 if behind else self.first_layer(shapes, module),
        )


def frozen_tensors(shapes: ModelShapes, freeze: Sequence[str], train: Sequence[str] = ()) -> frozenset[str]:
    """Return the stored tensors that do not train. Tensors that no folder has always do. Raises `UserError` if a
    pattern matches none.
    """
    frozen, listed_to_train = _listed("model.freeze", freeze, shapes), _listed("model.train", train, shapes)
    frozen |= frozenset(stored_shapes(shapes)) - listed_to_train if train else frozenset()
    beside = frozenset(
        prefix_of(module, shapes) + tensor
        for module in shapes.modules
        if (added := shapes[module].added) is not None
        for tensor in added.freezes
    )
    return (frozen | (beside - listed_to_train)) - added_shapes(shapes).keys()


def _listed(setting: str, entries: Iterable[str], shapes: ModelShapes) -> frozenset[str]:
    """Return the tensors that the entries of a setting match. Raises `UserError` if an entry matches none."""
    found, by_part = set[str](), tensors_of_parts(shapes)
    for entry in entries:
        if not is_pattern(entry) and entry not in by_part:
            problem = f"`{entry}`{did_you_mean(entry, by_part)}"
            expected, why = f"some of {', '.join(by_part)}", "the model has no other parts"
            raise wrong(setting, problem, expected, why, "rename or remove it")
        found.update(_matching(setting, entry, shapes) if is_pattern(entry) else by_part[entry])
    return frozenset(found)


def _matching(setting: str, pattern: str, shapes: ModelShapes) -> set[str]:
    """Return the names that a pattern matches in folders with modules side by side or nested. Raises `UserError` if
    these are different tensors, or none.
    """
    canonical, own = family_of(shapes.text.family).canonical_name, folder_shapes(shapes)
    added = added_shapes(shapes)
    flat = {name for name in stored_shapes(shapes) if fnmatchcase(name, canonical(pattern))}
    nested = {name for name in own if canonical(n := nested_name(name)) == name and fnmatchcase(n, pattern)}
    if (found := flat | nested) and found <= added.keys():
        kinds = dict.fromkeys(map(any_layer, sorted(found)))
        others = "freeze other tensors with model.freeze" if setting == "model.train" else "name fewer lora.targets"
        raise UserError.at(
            f"{setting} (--{setting})",
            found=f"`{pattern}`, which matches adapters alone ({listed(kinds, 2)})",
            expected="a pattern of tensors of the model's folders",
            because="adapters always train",
            fix=f"remove it, or {others}",
        )
    side_by_side = flat & own.keys()
    if side_by_side and nested and side_by_side != nested:
        raise UserError.at(
            f"{setting} (--{setting})",
            problem=f"`{pattern}` matches {len(side_by_side)} tensors where folders keep modules side by side "
            f"(`{min(side_by_side)}`), and {len(nested)} where they nest them (`{nested_name(min(nested))}`)",
            fix="begin it with `model.layers.`, `model.language_model.` or `model.visual.`, or name a part",
        )
    if not found:
        known = list(dict.fromkeys(any_layer(name) for name in stored_shapes(shapes) if name not in added))
        close = get_close_matches(any_layer(canonical(pattern)), known, n=1)
        raise UserError.at(
            f"{setting} (--{setting})",
            found=f"`{pattern}`{f' (did you mean `{close[0]}`?)' if close else ''}",
            expected=f"a pattern of tensors: {listed(known)}",
            because="it matches none of the model's",
            fix="correct or remove it",
        )
    return found


def any_layer(name: str) -> str:
    """Return a pattern of the same tensor in all layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _require_whole_parameters(shapes: ModelShapes, frozen: frozenset[str], by_freeze: frozenset[str]) -> None:
    """Check that all tensors of one parameter (q, k and v of a layer; all its experts) train, or none. `by_freeze`:
    tensors that `model.freeze` lists. Raises `UserError`.
    """
    maps = [
        weight_map(module, shapes, Share(0, 1), view=view)
        for module in shapes.modules
        for view in shapes[module].architecture.views
    ]
    parameters = [dict.fromkeys(each.name for each in slices) for of_module in maps for slices in of_module.values()]
    in_part = [names for names in parameters if 0 < len(frozen.intersection(names)) < len(names)]
    for names in in_part[:1]:
        patterns = {any_layer(name): None for of_parameter in in_part for name in of_parameter}
        setting = "model.freeze" if by_freeze.intersection(names) else "model.train"
        raise UserError.at(
            f"{setting} (--{setting})",
            found=f"{listed(frozen.intersection(names))} frozen without {listed(names.keys() - frozen)}",
            expected="all of them or none",
            because="they are one parameter in training",
            fix=f"list all of them, for all layers {' '.join(patterns)}",
        )


def _share(names: Iterable[str], frozen: Collection[str], stored: Mapping[str, Sequence[int]]) -> float:
    """Return the share of the matrices among these tensors that trains."""
    sizes = {name: prod(stored[name]) for name in names if len(stored[name]) > 1}
    return sum(size for name, size in sizes.items() if name not in frozen) / max(1, sum(sizes.values()))
