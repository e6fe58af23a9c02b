"""What a model family gives, and what is asked of the shapes of its modules. One folder per family, see `registry`.

A family is known by the `model_type` of its `transformers` configuration. Its encoder and its text module are used
apart: an encoder of one family may feed the text module of another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_hetero.files.json_objects import Table
from megatron_hetero.hf.weight_map import WeightMap
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.common.demo_sizes import DemoSizes
from megatron_hetero.models.common.flops import TextFlopShape, VisionFlopShape
from megatron_hetero.models.items.types import ItemShape, ItemType

TensorShapes = dict[str, tuple[int, ...]]
"""Stored tensors by name, in the order in which they are written."""


@dataclass(frozen=True)
class LayerKind:
    """What the layers of a module are made of. `rms_norm`: else layer norms, with a bias. `gated`: whether the MLP has
    a gate. `head_norms`: whether queries and keys are normed, head by head.
    """

    rms_norm: bool = True
    gated: bool = True
    head_norms: bool = False


class TransformerShape(Protocol):
    """What both modules are; widths in elements."""

    @property
    def layer_kind(self) -> LayerKind:
        """What the layers are made of."""
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
    def heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        ...

    @property
    def ffn(self) -> int:
        """Width of the MLP."""
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

    @property
    def full_layers(self) -> Collection[int]:
        """The layers whose attention sees whole sequences; that of the others sees windows."""
        ...

    def flop_shape(self, layers: Collection[int], embeds: bool) -> VisionFlopShape:
        """What the operations of some of the layers depend on; `embeds`: with the patch embedding."""
        ...


class TextShape(TransformerShape, Protocol):
    """A language model."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        ...

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def tied(self) -> bool:
        """Whether the head shares the weight of the embedding."""
        ...

    def flop_shape(self, layers: int, head: bool) -> TextFlopShape:
        """What the operations of some of the layers depend on; `head`: with the logits."""
        ...

    def kv_copies(self, tp: int) -> int:
        """How often each key/value head is held under `tp`: once where tp divides their number, else until it does."""
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
    def rules(self) -> Table:
        """What `config.json` may say, key by key."""
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

    def write_demo(self, folder: Path, corpus: Iterable[str], sizes: DemoSizes, seed: int) -> None:
        """Write a small model with random weights into `folder`, with a tokenizer that is trained on `corpus`."""
        ...

    # ------------------------------------------------------------------------------------------------- modules

    def encoder_model(self) -> type:
        """The class of an encoder's pipeline stage."""
        ...

    def text_model(self) -> type:
        """The class of the text module's pipeline stage."""
        ...

    # ------------------------------------------------------------------------------------------------- weights

    def published_name(self, name: str) -> str:
        """What published folders of the family, and those that `transformers` writes, call the tensor `name`: the one
        of which `canonical_name` makes `name`.
        """
        ...

    def encoder_tensors(self, shape: Any, /) -> TensorShapes:
        """The stored tensors of an encoder, without the prefix of encoders."""
        ...

    def text_tensors(self, shape: Any, /) -> TensorShapes:
        """The stored tensors of the text module."""
        ...

    def encoder_map(self, prefix: str, shape: Any, tp_rank: int, tp: int, stage: Stage, /) -> WeightMap:
        """The map of an encoder's parameters to its stored tensors, whose names begin with `prefix`."""
        ...

    def text_map(self, shape: Any, tp_rank: int, tp: int, stage: Stage, /) -> WeightMap:
        """The map of the text module's parameters to its stored tensors."""
        ...
