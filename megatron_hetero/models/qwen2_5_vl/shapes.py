"""The shapes of a Qwen2.5-VL model, read from the `config.json` of its `transformers` folder, and of further vision
encoders beside its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hetero.errors import UserError
from megatron_hetero.layout.layout import ModuleShape
from megatron_hetero.models.qwen2_5_vl.folders import DEFAULT_SECTIONS, ModelFolders, check_vision, read_config
from megatron_hetero.models.qwen2_5_vl.geometry import ImageGeometry, image_geometry
from megatron_hetero.names import TEXT, VISION
from megatron_hetero.sharding.items import Size


@dataclass(frozen=True)
class VisionShape:
    """The vision encoder with its merger (`projector`). Sizes in elements; `window` in merged units per side."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    window: int
    full_layers: frozenset[int]
    out_hidden: int
    rope_theta: float

    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    @property
    def patch_elements(self) -> int:
        """Pixel values of one patch: channels x temporal x height x width."""
        return self.channels * self.temporal_patch * self.patch**2

    @property
    def unit(self) -> int:
        """Patches that are merged into one row."""
        return self.merge**2

    @property
    def unit_width(self) -> int:
        """Pixel values of a unit."""
        return self.unit * self.patch_elements

    @property
    def position_dims(self) -> int:
        """Coordinates of a patch: row and column."""
        return 2

    def rows(self, size: Size) -> int:
        """Rows of an image of `size` patches (time, height, width)."""
        return math.prod(size) // self.unit

    def order(self, size: Size) -> ImageGeometry:
        """The image in window order."""
        return image_geometry(size, self.merge, self.window)

    def sequences(self, size: Size) -> tuple[int, ...]:
        """Patches of each frame: full attention sees one."""
        frames, rows, columns = size
        return (rows * columns,) * frames

    def cost(self, size: Size) -> float:
        """Predicted forward flops of encoding an image."""
        linear, quadratic = forward_flops_per_patch(self)
        frame = float(np.prod(size[1:]))
        return size[0] * (linear * frame + quadratic * frame * frame)

    def cost_per_patch(self, size: Size) -> float:
        """Those of one of its patches, which meets all patches of its frame."""
        linear, quadratic = forward_flops_per_patch(self)
        return linear + quadratic * size[1] * size[2]

    def square(self, side: int) -> Size:
        """The patches of a square image of `side` pixels, which is resized to whole units as the processor does."""
        patches = max(1, round(side / (self.patch * self.merge))) * self.merge
        return 1, patches, patches

    def windows(self, size: Size) -> list[int]:
        """Patches of each window of local attention."""
        return (self.order(size).windows * self.unit).tolist()


@lru_cache
def forward_flops_per_patch(shape: VisionShape) -> tuple[float, float]:
    """(flops per patch, flops per patch and patch of its sequence in full-attention layers)."""
    window_patches = shape.window**2 * shape.unit
    linear = (
        shape.layers * (8 * shape.hidden**2 + 6 * shape.hidden * shape.ffn) + 2 * shape.patch_elements * shape.hidden
    )
    merger = 2 * shape.hidden * (shape.hidden * shape.unit + shape.out_hidden)
    windowed = (shape.layers - len(shape.full_layers)) * 4 * shape.hidden * window_patches
    return float(linear + merger + windowed), float(len(shape.full_layers) * 4 * shape.hidden)


@dataclass(frozen=True)
class TextShape:
    """The language model. `tied` means that the head shares the embedding's weight."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    rope_theta: float
    mrope_section: tuple[int, ...]
    norm_eps: float
    max_positions: int

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    def kv_copies(self, tp: int) -> int:
        """How often each key/value head is held under `tp`: once where tp divides their number, else until it does."""
        return math.lcm(self.kv_heads, tp) // self.kv_heads


@dataclass(frozen=True)
class Qwen25VLShapes:
    """The modules' shapes: of all encoders by name, the folder's own `vision` first, and of the text module."""

    encoders: Mapping[str, VisionShape]
    text: TextShape

    @classmethod
    def from_folder(cls, folder: Path, further: Mapping[str, Path] | None = None) -> Qwen25VLShapes:
        """Read `folder/config.json` (as saved by any version of transformers), and those of `further` encoders, see
        `of`. Raises `UserError`.
        """
        return cls.of(ModelFolders.read(folder), further)

    @classmethod
    def of(cls, folders: ModelFolders, further: Mapping[str, Path] | None = None) -> Qwen25VLShapes:
        """The model of these folders, and `further` encoders, which are vision encoders of Qwen2.5-VL folders whose
        rows are as wide. Raises `UserError`.
        """
        config = folders.config
        encoders, text = {VISION: _vision_shape(config.vision_config)}, _text_shape(config)
        for name, path in (further or {}).items():
            other = read_config(path, f"model.encoders.{name}.hf_path")
            check_vision(path, other)
            encoders[name] = _vision_shape(other.vision_config)
            if encoders[name].out_hidden != text.hidden:
                raise UserError.at(
                    path / "config.json",
                    found=f"vision_config.out_hidden_size = {encoders[name].out_hidden}",
                    expected=f"{text.hidden}, the hidden size of the text module",
                    because=f"rows of encoder {name} go into its embedding",
                    fix="take an encoder that was made for a language model of that width",
                )
        return cls(encoders, text)

    @property
    def vision(self) -> VisionShape:
        """The folder's own encoder."""
        return self.encoders[VISION]

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of all modules: encoders, then text."""
        return (*self.encoders, TEXT)

    def __getitem__(self, module: str) -> VisionShape | TextShape:
        return self.text if module == TEXT else self.encoders[module]

    def module_shapes(self) -> dict[str, ModuleShape]:
        """What layouts are validated against."""
        t = self.text
        encoders = {
            name: ModuleShape(name, v.heads, v.heads, v.hidden, v.layers, "encoder")
            for name, v in self.encoders.items()
        }
        return {**encoders, TEXT: ModuleShape(TEXT, t.heads, t.kv_heads, t.hidden, t.layers, "text")}


def _vision_shape(vision: Any) -> VisionShape:
    return VisionShape(
        layers=vision.depth,
        hidden=vision.hidden_size,
        heads=vision.num_heads,
        ffn=vision.intermediate_size,
        channels=vision.in_channels,
        patch=vision.patch_size,
        temporal_patch=vision.temporal_patch_size,
        merge=vision.spatial_merge_size,
        window=vision.window_size // vision.spatial_merge_size // vision.patch_size,
        full_layers=frozenset(vision.fullatt_block_indexes),
        out_hidden=vision.out_hidden_size,
        rope_theta=float(vision.rope_parameters["rope_theta"]),
    )


def _text_shape(config: Any) -> TextShape:
    text = config.text_config
    rope = text.rope_parameters
    return TextShape(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        ffn=text.intermediate_size,
        vocab=text.vocab_size,
        tied=bool(config.tie_word_embeddings),
        rope_theta=float(rope["rope_theta"]),
        mrope_section=tuple(rope.get("mrope_section", DEFAULT_SECTIONS)),
        norm_eps=text.rms_norm_eps,
        max_positions=text.max_position_embeddings,
    )
