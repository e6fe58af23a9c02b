"""The interface of a model family and of the shapes of its modules. One folder per family, see `registry`.

A family is known by the `model_type` of its `transformers` configuration. Its encoder and its language model are used
apart: an encoder of one family may feed the language model of another.
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

# Layers import torch, which takes a second.
if TYPE_CHECKING:
    from megatron_hetero.models.added import Added
    from megatron_hetero.models.architecture import Architecture
    from megatron_hetero.models.layers.parts import Tokens
    from megatron_hetero.models.layers.rotary import Rotary


@dataclass(frozen=True)
class TransformerShape:
    """Base of the shapes of encoders and of language models. Widths are in elements."""

    layers: int
    """Number of transformer layers."""
    hidden: int
    """Width of a token between layers."""
    added: Added | None = field(default=None, kw_only=True)
    """Tensors of its `architecture` beside those of folders."""

    family: ClassVar[str]
    """`model_type` of its family."""
    views: ClassVar[tuple[View, ...]] = ()
    """Views besides the main one that its layers need."""

    @property
    def parts(self) -> Mapping[Split, int]:
        """Number of things that these views split, see `ModuleShape`."""
        return {}

    @property
    def architecture(self) -> Architecture:
        """Layers and ends of the module."""
        raise NotImplementedError

    def layer_costs(self, tokens: int) -> Sequence[float] | None:
        """Return the cost of each layer for sequences of so many tokens, by which pipeline stages are cut; None if all
        are equal.
        """
        return None

    @property
    def rotary(self) -> Rotary:
        """Rotary embedding of queries and keys."""
        raise NotImplementedError


class EncoderShape(TransformerShape, ItemShape):
    """Base of the shape of an encoder with its projector."""

    out_hidden: int
    """Width of a row."""

    @property
    def patch_elements(self) -> int:
        """Input elements of a patch."""
        raise NotImplementedError

    @property
    def outputs(self) -> Mapping[str, int]:
        """Output names, each with the layer after which it is computed: `ROWS` first, then those that enter the
        language model deeper. All have the same number of rows, of the same width.
        """
        ends = [end for end in self.architecture.ends if end.output]
        return {end.output: end.at if isinstance(end.at, int) else self.layers - 1 for end in ends}

    def tokens(self, sizes: Iterable[Any]) -> Tokens:
        """Return the tokens that the encoder computes on for items of these sizes."""
        raise NotImplementedError


class TextShape(TransformerShape):
    """Base of the shape of a language model."""

    vocab: int
    """Rows of the embedding."""
    tied: bool
    """Whether the head shares the weight of the embedding."""

    def entry_layer(self, output: str) -> int | None:
        """The layer at which rows of an encoder's output enter: 0 for `ROWS`, which replace embeddings before the
        layers; for others the layer to whose output they are added. None if the model does not take them.
        """
        return 0 if output == ROWS else None


class Family:
    """Base class of a model family: its configuration, its shapes, its items and the names of its tensors."""

    model_type: str
    """`model_type` of a whole model's configuration."""
    language_models: Collection[str] = ()
    """`model_type`s of folders that contain the language model alone."""
    title: str
    """Name for messages."""
    built: Mapping[str, Only] = {}
    """Keys of `config.json` with the only values that are supported."""
    copied: Sequence[str] = ()
    """Patterns (`fnmatch`) of tensors in folders of the language model that are no part of it here: an export copies
    them unchanged, and says so.
    """
    tokens: Mapping[str, str]
    """Tokens that show items, by the key of their number in `config.json`."""
    encoders: Mapping[str, Sequence[ItemType]]
    """Its own encoders in order, each with the types of items that it takes, one per modality. Section `plan` describes
    the first.
    """
    encoders_of: Collection[str] = ()
    """`model_type`s of families whose encoders its language models take too."""

    @property
    def items(self) -> tuple[ItemType, ...]:
        """Types of items of all encoders."""
        return tuple(each for types in self.encoders.values() for each in types)

    def config_class(self, model_type: str) -> Any:
        """Return the `transformers` class for a configuration of `model_type`."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return CONFIG_MAPPING[model_type]

    def check_values(self, path: Path, values: dict[str, Json]) -> None:
        """Check the values of a `config.json` of the family, before transformers reads it. Raises `UserError`."""
        check(path, values, self.built)

    def check_encoder(self, folder: Path, config: Any) -> None:
        """Check that the encoder of `folder` is supported. Raises `UserError`."""

    def check_text(self, folder: Path, config: Any) -> None:
        """Check that the language model of `folder` is supported. Raises `UserError`."""

    def rope_settings(self, head_dim: int) -> dict[str, Any]:
        """Return how a language model of its own divides its rotary frequencies when it joins an encoder. Tokens of
        text have equal positions in all sections, so that nothing changes on text alone.
        """
        return {}

    def encoder_settings(self, vision: Any) -> dict[str, Any]:
        """Return `vision_config` of a model of the family with the encoder of `vision`, a whole model's configuration
        of this family or of one of `encoders_of`.
        """
        return {name: value for name, value in vision.vision_config.to_dict().items() if name != "model_type"}

    def joined(self, own: Any, vision: Any, text_alone: bool) -> Any:
        """Return the configuration of a model with the language model of `own` and the encoder of `vision`.
        `text_alone`: `own` describes a language model alone.
        """
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        if text_alone:
            of_the_folder = ("architectures", "model_type", "transformers_version")
            text = {name: value for name, value in own.to_dict().items() if name not in of_the_folder}
            head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
            text["rope_parameters"] = self.rope_settings(head_dim) | dict(text["rope_parameters"])
        else:
            text = own.text_config.to_dict()
        return self.config_class(self.model_type)(
            text_config=text,
            vision_config=self.encoder_settings(vision) | {"out_hidden_size": text["hidden_size"]},
            tie_word_embeddings=own.tie_word_embeddings,
            architectures=[MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[self.model_type]],
            **{name: getattr(own, name) for name in (() if text_alone else self.tokens)},
        )

    def encoder_shape(self, config: Any, encoder: str, /) -> EncoderShape:
        """Return the shape of one of `encoders` from a whole model's configuration."""
        raise NotImplementedError

    def text_shape(self, config: Any) -> TextShape:
        """Return the language model's shape from a whole model's configuration."""
        raise NotImplementedError

    def positions(self, tokens: int, starts: np.ndarray, blocks: Sequence[RowBlock], /) -> np.ndarray:
        """Return the rotary positions of a sample of `tokens` tokens, int64 [dims, tokens]. `starts`: the first row of
        each block of its items.
        """
        raise NotImplementedError

    def canonical_name(self, stored: str, /) -> str:
        """Return the name used here for a tensor in a folder of the family."""
        return stored

    def published_name(self, name: str, /) -> str:
        """Return the name of tensor `name` in folders that are published or that `transformers` writes; the inverse of
        `canonical_name`.
        """
        return name

    def fused_name(self, name: str, /) -> tuple[str, int] | None:
        """Return the tensor of which tensor `name` is a part in some folders (see `Fused`), and its index there; None
        if it is stored by itself in all.
        """
        return None
