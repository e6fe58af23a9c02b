"""What a model family gives, and what is asked of the shapes of its modules. One folder per family, see `registry`.

A family is known by the `model_type` of its `transformers` configuration. Its encoder and its text module are used
apart: an encoder of one family may feed the text module of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_hetero.base.files import Only
from megatron_hetero.layout.axes import Split, View
from megatron_hetero.models.items.types import ItemShape, ItemType

# Layers import torch, which takes a second: families do not, until a shape is asked for.
if TYPE_CHECKING:
    from megatron_hetero.models.architecture import Architecture
    from megatron_hetero.models.layers.parts import Tokens
    from megatron_hetero.models.layers.rotary import Rotary


class TransformerShape(Protocol):
    """What both modules are; widths in elements."""

    @property
    def architecture(self) -> Architecture:
        """Its layers and ends, which everything is asked of that depends on what they are made of."""
        ...

    @property
    def rotary(self) -> Rotary:
        """How positions turn queries and keys."""
        ...

    @property
    def family(self) -> str:
        """The `model_type` of its family."""
        ...

    @property
    def layers(self) -> int:
        """Transformer layers."""
        ...

    @property
    def hidden(self) -> int:
        """Width of a token between layers."""
        ...

    @property
    def views(self) -> tuple[View, ...]:
        """Further views of the module's layouts that its layers need."""
        ...

    @property
    def parts(self) -> Mapping[Split, int]:
        """How many there are of what these views split, see `ModuleShape`."""
        ...


class EncoderShape(TransformerShape, ItemShape, Protocol):
    """An encoder with its projector."""

    @property
    def out_hidden(self) -> int:
        """Width of a row."""
        ...

    @property
    def patch_elements(self) -> int:
        """Input elements of a patch."""
        ...

    @property
    def outputs(self) -> Mapping[str, int]:
        """What it gives, by name, with the number of the layer after which it is made: `ROWS` first, then what enters
        the language model deeper. All have the same number of rows, of the same width.
        """
        ...

    def tokens(self, sizes: Iterable[Any]) -> Tokens:
        """What the encoder computes on, of items of these sizes."""
        ...


class TextShape(TransformerShape, Protocol):
    """A language model."""

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def tied(self) -> bool:
        """Whether the head shares the weight of the embedding."""
        ...

    def entry_layer(self, output: str) -> int | None:
        """The layer at which the rows of an encoder's output enter: 0 for `ROWS`, which take the place of embeddings
        before the layers; for others the layer to whose output they are added. None where the model does not take them.
        """
        ...


class Family(Protocol):
    """A model family. Importing one imports neither torch nor transformers; its methods do."""

    @property
    def model_type(self) -> str:
        """Of the configuration of a whole model."""
        ...

    @property
    def language_models(self) -> Collection[str]:
        """The `model_type`s of folders that hold the text module alone."""
        ...

    @property
    def title(self) -> str:
        """What people call it."""
        ...

    # ------------------------------------------------------------------------------------------- configuration

    @property
    def built(self) -> Mapping[str, Only]:
        """Values of `config.json`, by key, that may only be these."""
        ...

    def config_class(self, model_type: str) -> Any:
        """The class of `transformers` for a configuration of that type."""
        ...

    def model_class(self) -> Any:
        """The class of `transformers` for a whole model that generates."""
        ...

    def check_encoder(self, folder: Path, config: Any) -> None:
        """Check that the encoder of `folder` is one that is built here. Raises `UserError`."""
        ...

    def check_text(self, folder: Path, config: Any) -> None:
        """Check that the language model of `folder` is one that is built here. Raises `UserError`."""
        ...

    def joined(self, own: Any, vision: Any, text_alone: bool) -> Any:
        """The configuration of a model with the language model of `own` and the encoder of `vision`. `text_alone`:
        `own` is of a language model alone.
        """
        ...

    def encoder_shape(self, config: Any) -> EncoderShape:
        """Of the encoder of a whole model's configuration."""
        ...

    def text_shape(self, config: Any) -> TextShape:
        """Of the language model of a whole model's configuration."""
        ...

    # ---------------------------------------------------------------------------------------------------- data

    @property
    def tokens(self) -> Mapping[str, str]:
        """The tokens that show items, by what `config.json` calls their numbers."""
        ...

    @property
    def items(self) -> Sequence[ItemType]:
        """What the encoder takes: types of items, of a modality each, of which section `plan` describes the first."""
        ...

    @property
    def positions(self) -> Callable[[int, np.ndarray, Sequence[np.ndarray]], np.ndarray]:
        """Rotary positions of a sample of so many tokens, int64 [dims, tokens], from the first token of each block and
        the places of its rows, see `Block`.
        """
        ...

    # ------------------------------------------------------------------------------------------------- weights

    def canonical_name(self, stored: str, /) -> str:
        """The name here of a tensor in a folder of the family."""
        ...

    def published_name(self, name: str, /) -> str:
        """What published folders of the family, and those that `transformers` writes, call the tensor `name`: the one
        of which `canonical_name` makes `name`.
        """
        ...
