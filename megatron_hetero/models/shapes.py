"""The shapes of a model's modules: its own encoder and text module, and further encoders.

The sample that a plan assumes, which is all that is known of the data before any is read.

A sample is the rows of its items, encoder by encoder, then its text, of which the last tokens are supervised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_hetero.base.errors import ROWS, TEXT, VISION, UserError
from megatron_hetero.config.sections import EstimateConfig
from megatron_hetero.layout.layout import ModuleShape
from megatron_hetero.models.family import EncoderShape, TextShape
from megatron_hetero.models.folders import ModelFolders, read_config, sound
from megatron_hetero.models.items.types import ItemType, Size
from megatron_hetero.models.registry import family_of


@dataclass(frozen=True)
class ModelShapes:
    """The modules' shapes: of all encoders by name, the folder's own `vision` first, and of the text module."""

    encoders: Mapping[str, EncoderShape]
    text: TextShape

    @classmethod
    def of(cls, folders: ModelFolders, further: Mapping[str, Path] | None = None) -> ModelShapes:
        """The model of these folders, and `further` encoders: those of folders of any family whose rows are as wide,
        and whose outputs the text module takes. Raises `UserError`.
        """
        with sound(folders.text / "config.json"):
            text = folders.family.text_shape(folders.config)
        with sound(folders.vision / "config.json"):
            encoders = {VISION: folders.family.encoder_shape(folders.config)}
        for name, path in (further or {}).items():
            other = read_config(path, f"model.encoders.{name}.hf_path")
            family = family_of(other.model_type)
            with sound(path / "config.json"):
                family.check_encoder(path, other)
                encoders[name] = family.encoder_shape(other)
            if encoders[name].out_hidden != text.hidden:
                raise UserError.at(
                    path / "config.json",
                    found=f"vision_config.out_hidden_size = {encoders[name].out_hidden}",
                    expected=f"{text.hidden}, the hidden size of the text module",
                    because=f"rows of encoder {name} go into its embedding",
                    fix="use an encoder made for a language model of that width",
                )
        places = {VISION: folders.vision, **(further or {})}
        for name, encoder in encoders.items():
            _check_outputs(name, places[name], encoder, text)
        return cls(encoders, text)

    @property
    def vision(self) -> EncoderShape:
        """The folder's own encoder."""
        return self.encoders[VISION]

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all modules: encoders, then text."""
        return (*self.encoders, TEXT)

    def __getitem__(self, module: str) -> EncoderShape | TextShape:
        return self.text if module == TEXT else self.encoders[module]

    def module_shapes(self) -> dict[str, ModuleShape]:
        """What layouts are validated against."""
        found = {}
        for name in self.modules:
            shape = self[name]
            heads = shape.architecture.heads, shape.architecture.kv_heads
            kind = "text" if name == TEXT else "encoder"
            found[name] = ModuleShape(name, *heads, shape.hidden, shape.layers, kind, shape.views, shape.parts)
        return found


def _check_outputs(name: str, folder: Path, encoder: EncoderShape, text: TextShape) -> None:
    """Check that the language model takes all that the encoder gives. Raises `UserError`."""
    not_taken = [output for output in encoder.outputs if text.entry_layer(output) is None]
    if not_taken:
        kind = f"a language model of {family_of(text.family).title} with {text.layers} layers"
        raise UserError.at(
            folder / "config.json",
            found=f"an encoder ({name}) that gives {', '.join(not_taken)} in addition to {ROWS}",
            expected=f"outputs that {kind} takes",
            because="they enter the language model after some of its layers, and would be lost",
            fix="use an encoder and a language model of the same model",
        )


@dataclass(frozen=True)
class AssumedSample:
    """By encoder, `sizes` of the pieces of the sample's items and their `rows`. `tokens`: of the sample, those of rows
    included; `supervised`: tokens that the loss counts.
    """

    sizes: Mapping[str, tuple[Size, ...]]
    rows: Mapping[str, int]
    tokens: int
    supervised: int

    @property
    def text(self) -> int:
        """Tokens of the sample, those of rows excluded."""
        return self.tokens - sum(self.rows.values())

    def positions(self, encoder: str) -> np.ndarray:
        """Where the encoder's rows go in the sample, int64."""
        names = list(self.rows)
        first = sum(self.rows[name] for name in names[: names.index(encoder)])
        return np.arange(first, first + self.rows[encoder])

    def fitting(self, tokens: int, patches: int | None, shapes: ModelShapes) -> int:
        """How many such samples make a micro-batch of so many tokens, and patches for each encoder (None: any number);
        at least 1.
        """
        most = [tokens // self.tokens]
        if patches is not None:
            most += [patches // (rows * shapes.encoders[name].unit) for name, rows in self.rows.items() if rows]
        return max(1, min(most))


def assumed_sizes(plan: EstimateConfig, shapes: ModelShapes) -> dict[str, Size]:
    """By encoder the size of its pieces."""
    return {name: item_type(shape).assumed(shape, plan) for name, shape in shapes.encoders.items()}


def item_type(shape: EncoderShape) -> ItemType:
    """The type of the items that section `plan` describes."""
    return family_of(shape.family).items[0]


def assumed_sample(plan: EstimateConfig, shapes: ModelShapes) -> AssumedSample:
    """The sample that section `plan` describes, for a model of these shapes."""
    of_piece = assumed_sizes(plan, shapes)
    sizes = {name: (size,) * plan.images for name, size in of_piece.items()}
    rows = {name: shapes.encoders[name].rows(size) * plan.images for name, size in of_piece.items()}
    tokens = plan.tokens + sum(rows.values())
    return AssumedSample(sizes, rows, tokens, min(tokens - 1, round(plan.supervised * plan.tokens)))


def lengthened(plan: EstimateConfig, tokens: int, shapes: ModelShapes) -> EstimateConfig:
    """`plan` with as much more text that its sample has `tokens`, if it has fewer."""
    missing = tokens - assumed_sample(plan, shapes).tokens
    return replace(plan, tokens=plan.tokens + missing) if missing > 0 else plan
