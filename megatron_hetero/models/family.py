"""The interfaces of a model family and of the shapes of its modules. Each family has a folder, see `registry`.

A family is identified by the `model_type` of its `transformers` configuration. Encoders and language models are
independent: the encoder of one family may feed the language model of another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_hetero.base.files import Json, Only, check
from megatron_hetero.layout.axes import Split, View
from megatron_hetero.layout.names import ROWS
from megatron_hetero.models.items.types import ItemShape, ItemType, RowBlock

# Importing layers imports torch, which takes a second.
if TYPE_CHECKING:
    from megatron_hetero.models.added import Added
    from megatron_hetero.models.architecture import Architecture
    from megatron_hetero.models.layers.parts import Tokens
    from megatron_hetero.models.layers.rotary import Rotary


@dataclass(frozen=True)
class TransformerShape:
    """Base of the shapes of encoders and language models. Widths are in elements."""

    layers: int
    """Number of transformer layers."""
    hidden: int
    """Width of a token between layers."""
    added: Added | None = field(default=None, kw_only=True)
    """Tensors, such as adapters, that the module has in addition to the tensors of its folder."""

    family: ClassVar[str]
    """`model_type` of the module's family."""
    views: ClassVar[tuple[View, ...]] = ()
    """Views other than the main view that its layers need."""

    @property
    def counts(self) -> Mapping[Split, int]:
        """Number of units, such as experts, that each of `views` splits; see `ModuleShape`."""
        return {}

    @property
    def architecture(self) -> Architecture:
        """Layers and ends of the module."""
        raise NotImplementedError

    def layer_costs(self, tokens: int) -> Sequence[float] | None:
        """Return the cost of each layer for sequences of `tokens` tokens, used to balance pipeline stages; None if all
        costs are equal.
        """
        return None

    @property
    def rotary(self) -> Rotary:
        """Rotary embedding of queries and keys."""
        raise NotImplementedError


class EncoderShape(TransformerShape, ItemShape):
    """Base of the shapes of encoders, including their projectors."""

    out_hidden: int
    """Width of the rows that enter the language model."""

    @property
    def patch_elements(self) -> int:
        """Input elements of a patch."""
        raise NotImplementedError

    @property
    def outputs(self) -> Mapping[str, int]:
        """Output names, each with the layer after which it is computed: `ROWS` first, then outputs that enter deeper
        layers of the language model. All outputs have the same number of rows and the same width.
        """
        ends = [end for end in self.architecture.ends if end.output]
        return {end.output: end.at if isinstance(end.at, int) else self.layers - 1 for end in ends}

    def tokens(self, sizes: Iterable[Any]) -> Tokens:
        """Return the numbers of tokens that the encoder computes on for items of these sizes."""
        raise NotImplementedError


class TextShape(TransformerShape):
    """Base of the shapes of language models."""

    vocab: int
    """Number of rows of the embedding, one per token id."""
    tied: bool
    """Whether the head shares the weight of the embedding."""

    def entry_layer(self, output: str) -> int | None:
        """Return the number of the layer at which the rows of an encoder's output enter: 0 for `ROWS`, which replace
        embeddings before the first layer; for other outputs, the layer after which the rows are added; None for an
        unused output.
        """
        return 0 if output == ROWS else None


class Family:
    """Base class of a model family: its configuration, shapes, items and tensor names."""

    model_type: str
    """`model_type` of a whole model's configuration."""
    language_models: Collection[str] = ()
    """`model_type`s of folders with a language model alone."""
    title: str
    """Name of the family in messages."""
    built: Mapping[str, Only] = {}
    """Keys of `config.json`, each with its supported values."""
    copied: Sequence[str] = ()
    """Patterns (`fnmatch`) of tensors in folders that the language model in this package does not have. An export
    copies these tensors unchanged, and reports the copies.
    """
    tokens: Mapping[str, str]
    """Tokens that stand for items, by the key of their id in `config.json`."""
    encoders: Mapping[str, Sequence[ItemType]]
    """Encoders of the family in order, each with its item types, one per modality."""
    encoders_of: Collection[str] = ()
    """`model_type`s of other families whose encoders work with its language models."""

    @property
    def items(self) -> tuple[ItemType, ...]:
        """Item types of all encoders."""
        return tuple(each for types in self.encoders.values() for each in types)

    def config_class(self, model_type: str) -> Any:
        """Return the `transformers` configuration class of `model_type`."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]

    def check_values(self, path: Path, values: dict[str, Json]) -> None:
        """Check the values of a `config.json` of the family before transformers reads it. Raises `UserError`."""
        check(path, values, self.built)

    def check_encoder(self, folder: Path, config: Any) -> None:
        """Check that the encoder of `folder` is supported. Raises `UserError`."""

    def check_text(self, folder: Path, config: Any) -> None:
        """Check that the language model of `folder` is supported. Raises `UserError`."""

    def rope_settings(self, head_dim: int) -> dict[str, Any]:
        """Return the rotary settings of a language model alone that is joined with an encoder. Text tokens have equal
        positions in all sections, so results for text do not change.
        """
        return {}

    def joined(self, text: Any, encoder: Any, text_alone: bool) -> Any:
        """Return the configuration of a model with the language model of the configuration `text` and the encoder of
        the configuration `encoder`, of this family or of one of `encoders_of`. `text_alone`: whether `text` describes
        only a language model.
        """
        raise NotImplementedError

    def encoder_shape(self, config: Any, encoder: str, /) -> EncoderShape:
        """Return the shape of one of `encoders` from a whole model's configuration."""
        raise NotImplementedError

    def text_shape(self, config: Any) -> TextShape:
        """Return the language model's shape from a whole model's configuration."""
        raise NotImplementedError

    def positions(self, tokens: int, starts: np.ndarray, blocks: Sequence[RowBlock], /) -> np.ndarray:
        """Return the rotary positions of a sample, int64 [dims, tokens]. `starts`: index of the first row of each of
        the `blocks` of its items.
        """
        raise NotImplementedError

    def canonical_name(self, stored: str, /) -> str:
        """Return the canonical name, which this package uses, of a tensor in a folder of the family."""
        return stored

    def published_name(self, name: str, /) -> str:
        """Return the name of a tensor in published folders and in folders that `transformers` writes: the inverse of
        `canonical_name`.
        """
        return name

    def fused_name(self, name: str, /) -> tuple[str, int] | None:
        """Return the fused tensor that contains tensor `name` in some folders (see `Fused`), and its index in it; None
        if no folder fuses it.
        """
        return None
