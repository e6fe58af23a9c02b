"""Selection of the tensors of a model that train.

`model.freeze` and `model.train` list subsets of the tensors (`vision`, `projector`, `text` …) and `fnmatch` patterns
over the names in the folder, such as ``model.layers.*.mlp.*`` or ``visual.blocks.[0-9].*``. Tensors that `freeze` lists
are frozen; if `train` is not empty, all tensors that it does not list are frozen too.
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
    tensors_by_subset,
    weight_map,
)


@dataclass(frozen=True, eq=False)
class Frozen:
    """The tensors and subsets of a model that do not train.

    Attributes:
        tensors: stored tensors that do not train.
        subsets: subsets of the model (see `ModelShapes.subsets_of`) in which nothing trains.
        shares: by subset, the fraction of elements that train in the matrices by which tokens are multiplied, without
            `Added` tensors.
    """

    tensors: frozenset[str]
    subsets: frozenset[str]
    shares: Mapping[str, float]

    @classmethod
    def of(cls, shapes: ModelShapes, freeze: Sequence[str] = (), train: Sequence[str] = ()) -> Frozen:
        """Resolve the settings `model.freeze` and `model.train`.

        Raises:
            UserError: a pattern matches no tensor, some tensors of one parameter train and others do not, or nothing
                trains.
        """
        stored, by_subset = stored_shapes(shapes), tensors_by_subset(shapes)
        tensors = frozen_tensors(shapes, freeze, train)
        frozen = frozenset(subset for subset, names in by_subset.items() if tensors.issuperset(names))
        setting = "train" if train else "freeze"
        if len(frozen) == len(by_subset):
            problem = f"freezes all of {', '.join(by_subset)}, which leaves nothing to train"
            raise UserError.at(f"model.{setting} (--model.{setting})", problem=problem, fix="remove an entry")
        patterns, added = any(map(is_pattern, (*freeze, *train))), added_shapes(shapes)
        if patterns:
            _require_whole_parameters(shapes, tensors, frozen_tensors(shapes, freeze))
        if patterns or added:
            entry = shapes.text.architecture.entry
            # No token is multiplied by an untied embedding: its rows are looked up.
            excluded = set() if shapes.text.tied else {entry.stored + name for name in entry.part.tensors()}
            excluded |= added.keys()
            shares = {subset: _share({*names} - excluded, tensors, stored) for subset, names in by_subset.items()}
        else:
            shares = {subset: float(subset not in frozen) for subset in by_subset}
        return cls(tensors, frozen, shares)

    def trains(self, subset: str) -> bool:
        """Return whether any tensor of a subset trains."""
        return subset not in self.subsets

    def passes(self, subset: str, *, inputs: bool) -> Passes:
        """Return the gradients that a subset computes. `inputs`: whether it computes the gradient of its input."""
        return Passes(inputs, self.trains(subset), self.shares[subset])

    def first_layer(self, shapes: ModelShapes, module: str = TEXT) -> int:
        """Return the number of a module's first layer with a trained tensor, where the backward pass ends if nothing
        before the module trains; 0 if the entry trains.
        """
        architecture, prefix = shapes[module].architecture, prefix_of(module, shapes)
        trained = {name for name in architecture.tensors if prefix + name not in self.tensors}
        if any(architecture.entry.stored + name in trained for name in architecture.entry.part.tensors()):
            return 0
        in_layers = (name.removeprefix(architecture.stored) for name in trained if architecture.is_of_layer(name))
        return min((int(name.split(".")[0]) for name in in_layers), default=len(architecture.layers))

    def operations(self, module: str, shapes: ModelShapes, tokens: Tokens, stage: PipelineStage | None = None) -> int:
        """Return the FLOPs of a module, or of one of its stages, for `tokens`. The backward pass of frozen layers
        counts where other gradients need it.
        """
        if module == TEXT:
            before = any(self.trains(subset) for name in shapes.encoders for subset in shapes.subsets_of(name))
            inputs, projector = before or self.trains(TEXT), None
        else:
            before, inputs, projector = False, self.trains(module), shapes.subsets_of(module)[1]
        return shapes[module].architecture.operations(
            tokens,
            stage,
            passes=self.passes(module, inputs=inputs),
            projector=self.passes(projector, inputs=inputs) if projector else None,
            first=0 if before else self.first_layer(shapes, module),
        )


def frozen_tensors(shapes: ModelShapes, freeze: Sequence[str], train: Sequence[str] = ()) -> frozenset[str]:
    """Return the stored tensors that do not train. Tensors that no folder has, such as adapters, always train. Raises
    `UserError` if a pattern matches no tensor.
    """
    frozen, listed_to_train = _listed("model.freeze", freeze, shapes), _listed("model.train", train, shapes)
    frozen |= frozenset(stored_shapes(shapes)) - listed_to_train if train else frozenset()
    frozen_by_adapters = frozenset(
        prefix_of(module, shapes) + tensor
        for module in shapes.modules
        if (added := shapes[module].added) is not None
        for tensor in added.freezes
    )
    return (frozen | (frozen_by_adapters - listed_to_train)) - added_shapes(shapes).keys()


def _listed(setting: str, entries: Iterable[str], shapes: ModelShapes) -> frozenset[str]:
    """Return the tensors that the entries of a setting match. Raises `UserError` if an entry matches none."""
    names, by_subset = set[str](), tensors_by_subset(shapes)
    for entry in entries:
        if not is_pattern(entry) and entry not in by_subset:
            problem = f"`{entry}`{did_you_mean(entry, by_subset)}"
            expected, why = f"some of {', '.join(by_subset)}", "the model has no other modules and projectors"
            raise wrong(setting, problem, expected, why, "rename or remove it")
        names.update(_matching(setting, entry, shapes) if is_pattern(entry) else by_subset[entry])
    return frozenset(names)


def _matching(setting: str, pattern: str, shapes: ModelShapes) -> set[str]:
    """Return the tensors whose names match a pattern, in folders with modules side by side or nested. Raises
    `UserError` if the two namings match different tensors, or neither matches any.
    """
    canonical, in_folder = family_of(shapes.text.family).canonical_name, folder_shapes(shapes)
    added = added_shapes(shapes)
    flat = {name for name in stored_shapes(shapes) if fnmatchcase(name, canonical(pattern))}
    nested = {name for name in in_folder if canonical(n := nested_name(name)) == name and fnmatchcase(n, pattern)}
    if (names := flat | nested) and names <= added.keys():
        kinds = dict.fromkeys(map(any_layer, sorted(names)))
        others = "freeze other tensors with model.freeze" if setting == "model.train" else "name fewer lora.targets"
        raise UserError.at(
            f"{setting} (--{setting})",
            found=f"`{pattern}`, which matches adapters alone ({listed(kinds, 2)})",
            expected="a pattern of tensors of the model's folders",
            because="adapters always train",
            fix=f"remove it, or {others}",
        )
    side_by_side = flat & in_folder.keys()
    if side_by_side and nested and side_by_side != nested:
        raise UserError.at(
            f"{setting} (--{setting})",
            problem=f"`{pattern}` matches {len(side_by_side)} tensors where folders have modules side by side "
            f"(`{min(side_by_side)}`), and {len(nested)} where they nest them (`{nested_name(min(nested))}`)",
            fix="begin it with `model.layers.`, `model.language_model.` or `model.visual.`, or name a module",
        )
    if not names:
        known = list(dict.fromkeys(any_layer(name) for name in stored_shapes(shapes) if name not in added))
        close = get_close_matches(any_layer(canonical(pattern)), known, n=1)
        raise UserError.at(
            f"{setting} (--{setting})",
            found=f"`{pattern}`{f' (did you mean `{close[0]}`?)' if close else ''}",
            expected=f"a pattern of tensors: {listed(known)}",
            because="it matches none of the model's",
            fix="correct or remove it",
        )
    return names


def any_layer(name: str) -> str:
    """Return a pattern that matches this tensor in every layer."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _require_whole_parameters(shapes: ModelShapes, frozen: frozenset[str], by_freeze: frozenset[str]) -> None:
    """Check that the tensors of each parameter (q, k and v of a layer; all its experts) either all train or are all
    frozen. `by_freeze`: tensors that `model.freeze` lists. Raises `UserError`.
    """
    maps = [
        weight_map(module, shapes, Share(0, 1), view=view)
        for module in shapes.modules
        for view in shapes[module].architecture.views
    ]
    parameters = [dict.fromkeys(each.name for each in slices) for weights in maps for slices in weights.values()]
    mixed = [names for names in parameters if 0 < len(frozen.intersection(names)) < len(names)]
    for names in mixed[:1]:
        patterns = {any_layer(name): None for parameter in mixed for name in parameter}
        setting = "model.freeze" if by_freeze.intersection(names) else "model.train"
        raise UserError.at(
            f"{setting} (--{setting})",
            found=f"{listed(frozen.intersection(names))} frozen without {listed(names.keys() - frozen)}",
            expected="all of them or none",
            because="they are one parameter in training",
            fix=f"list all of them, for all layers {' '.join(patterns)}",
        )


def _share(names: Iterable[str], frozen: Collection[str], stored: Mapping[str, Sequence[int]]) -> float:
    """Return the fraction of elements that train in the matrices among the tensors `names`."""
    sizes = {name: prod(stored[name]) for name in names if len(stored[name]) > 1}
    return sum(size for name, size in sizes.items() if name not in frozen) / max(1, sum(sizes.values()))
