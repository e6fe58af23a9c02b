"""Shapes of a model's modules, and the sample that the section `plan` of the configuration describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.sections import EstimateConfig
from megatron_hetero.layout.layout import ModuleShape
from megatron_hetero.layout.names import ROWS, TEXT, Role
from megatron_hetero.models.family import EncoderShape, TextShape
from megatron_hetero.models.folders import ModelFolders, read_config, sound
from megatron_hetero.models.items.types import ItemType, Size
from megatron_hetero.models.registry import family_of

if TYPE_CHECKING:
    from megatron_hetero.models.added import Added


@dataclass(frozen=True)
class ModelShapes:
    """The shapes of all encoders by name, the model's own first, and of the text module."""

    encoders: Mapping[str, EncoderShape]
    text: TextShape

    @classmethod
    def of(cls, folders: ModelFolders, further: Mapping[str, Path] | None = None) -> ModelShapes:
        """Return the shapes of the model in `folders` and of `further` encoders from folders of any family. Raises
        `UserError` if the width of an encoder's rows differs from the text module's, or it does not use an output.
        """
        encoders, own = dict[str, EncoderShape](), folders.family
        for name in own.encoders.keys() & (further or {}).keys():
            where, found = f"modules.{name}.hf_path (--{name}-hf_path)", f"an encoder of {own.title} itself"
            fix = f"name the further encoder otherwise, or take {name} from another folder with model.hf_path_vision"
            raise UserError.at(where, found=found, expected="a further encoder", fix=fix)
        with sound(folders.text / "config.json"):
            text = own.text_shape(folders.config)
        for name, path in {**dict.fromkeys(own.encoders, folders.vision), **(further or {})}.items():
            file, family, config, kind = path / "config.json", own, folders.config, name
            if name not in own.encoders:
                config = read_config(path, f"modules.{name}.hf_path")
                family = family_of(config.model_type)
                kind = next(iter(family.encoders))
            with sound(file):
                if name not in own.encoders:
                    family.check_encoder(path, config)
                encoder = encoders[name] = family.encoder_shape(config, kind)
            if encoder.out_hidden != text.hidden:
                raise UserError.at(
                    file,
                    found=f"rows of {encoder.out_hidden} elements",
                    expected=f"{text.hidden}, the hidden size of the text module",
                    because=f"rows of encoder {name} go into its embedding",
                    fix="use an encoder made for a language model of that width",
                )
            if not_taken := [output for output in encoder.outputs if text.entry_layer(output) is None]:
                kind = f"a language model of {family_of(text.family).title} with {text.layers} layers"
                raise UserError.at(
                    file,
                    found=f"an encoder ({name}) that gives {', '.join(not_taken)} in addition to {ROWS}",
                    expected=f"outputs that {kind} takes",
                    because="they enter the language model after some of its layers, and would be lost",
                    fix="use an encoder and a language model of the same model",
                )
        return cls(encoders, text)

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the model's own encoders, which its family defines, in order."""
        return tuple(family_of(self.text.family).encoders)

    @property
    def further(self) -> tuple[str, ...]:
        """Names of the further encoders, which come from separate folders."""
        return tuple(name for name in self.encoders if name not in self.own)

    def role(self, module: str) -> Role:
        """Return the role of a module in the graph: encoder or text."""
        return TEXT if module == TEXT else "encoder"

    def subsets_of(self, module: str) -> tuple[str, ...]:
        """Return the names of the subsets of a module that can be frozen: the module itself, and an encoder's
        projector.
        """
        if module == TEXT:
            return (TEXT,)
        return module, "projector" if self.own == (module,) else f"{module}_projector"

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of all modules: encoders, then text."""
        return (*self.encoders, TEXT)

    def __getitem__(self, module: str) -> EncoderShape | TextShape:
        return self.text if module == TEXT else self.encoders[module]

    def with_added(self, added: Mapping[str, Added]) -> ModelShapes:
        """Return the shapes with the `added` tensors of each module in place of earlier ones."""
        encoders = {name: replace(shape, added=added.get(name)) for name, shape in self.encoders.items()}
        return ModelShapes(encoders, replace(self.text, added=added.get(TEXT)))

    def module_shapes(self) -> dict[str, ModuleShape]:
        """Return the `ModuleShape` of each module, against which layouts are validated."""
        shapes = dict[str, ModuleShape]()
        for name in self.modules:
            shape = self[name]
            heads, limits = (shape.architecture.heads, shape.architecture.kv_heads), shape.architecture.limits
            sizes = *heads, shape.hidden, shape.layers
            shapes[name] = ModuleShape(name, *sizes, self.role(name), shape.views, shape.counts, limits)
        return shapes


@dataclass(frozen=True)
class AssumedSample:
    """A sample of known sizes without contents: the rows of its items, encoder by encoder, then its text, whose last
    tokens are supervised.

    Attributes:
        sizes: sizes of the pieces of items, by encoder.
        rows: number of rows, by encoder.
        tokens: number of tokens, including rows.
        supervised: number of supervised tokens.
    """

    sizes: Mapping[str, tuple[Size, ...]]
    rows: Mapping[str, int]
    tokens: int
    supervised: int

    @property
    def text(self) -> int:
        """Number of text tokens, without rows."""
        return self.tokens - sum(self.rows.values())

    def positions(self, encoder: str) -> np.ndarray:
        """Return the positions of an encoder's rows in the sample, int64 [rows]."""
        names = list(self.rows)
        first = sum(self.rows[name] for name in names[: names.index(encoder)])
        return np.arange(first, first + self.rows[encoder])

    def fitting(self, tokens: int, patches: int | None, shapes: ModelShapes) -> int:
        """Return the number of such samples that fit into a micro-batch of `tokens` tokens and `patches` patches per
        encoder (None: unlimited); at least 1.
        """
        limits = [tokens // self.tokens]
        if patches is not None:
            limits += [patches // (rows * shapes.encoders[name].unit) for name, rows in self.rows.items() if rows]
        return max(1, min(limits))


def item_types(shapes: ModelShapes, encoder: str) -> Sequence[ItemType]:
    """Return the item types of an encoder: all of its types, but only the first type for a further encoder."""
    encoders = family_of(shapes.encoders[encoder].family).encoders
    return encoders[encoder] if encoder in shapes.own else next(iter(encoders.values()))[:1]


def assumed_sample(plan: EstimateConfig, shapes: ModelShapes) -> AssumedSample:
    """Return the sample that the section `plan` describes for a model of these shapes."""
    items = {
        name: [(each.assumed(shape, plan), each.assumed_pieces(plan)) for each in item_types(shapes, name)]
        for name, shape in shapes.encoders.items()
    }
    sizes = {name: tuple(size for size, count in pairs for _ in range(count)) for name, pairs in items.items()}
    rows = {name: sum(shapes.encoders[name].rows(s) * n for s, n in pairs) for name, pairs in items.items()}
    tokens = plan.tokens + sum(rows.values())
    return AssumedSample(sizes, rows, tokens, min(tokens - 1, round(plan.supervised * plan.tokens)))
