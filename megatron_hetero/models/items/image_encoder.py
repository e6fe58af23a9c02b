"""Base of the shapes of encoders that cut images into square patches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from megatron_hetero.models.family import EncoderShape
from megatron_hetero.models.items.pictures import ImageSize, patch_positions
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.parts import FORWARD, Tokens
from megatron_hetero.models.layers.rotary import AxialRotary


@dataclass(frozen=True)
class ImageEncoderShape(EncoderShape):
    """Base of the shapes (`megatron_hetero.models.family.EncoderShape`) of encoders that cut images into square patches
    and merge square units of them. Sizes are in elements.
    """

    norm_eps: ClassVar[float] = 1e-6
    """Epsilon of norms, the same in all configurations."""

    heads: int
    ffn: int
    channels: int
    patch: int
    """Side of a patch in pixels."""
    temporal_patch: int
    """Number of frames in a patch."""
    merge: int
    """Side of a unit in patches."""
    out_hidden: int
    rope_theta: float

    @classmethod
    def of(cls, vision: Any, **further: Any) -> Self:
        """Return the shape that a `vision_config` describes. `further`: further fields of a family's shape."""
        return cls(
            layers=vision.depth,
            hidden=vision.hidden_size,
            heads=vision.num_heads,
            ffn=vision.intermediate_size,
            channels=vision.in_channels,
            patch=vision.patch_size,
            temporal_patch=vision.temporal_patch_size,
            merge=vision.spatial_merge_size,
            out_hidden=vision.out_hidden_size,
            rope_theta=float(vision.rope_parameters["rope_theta"]),
            **further,
        )

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads

    @property
    def patch_elements(self) -> int:
        """Pixel values in a patch: channels x temporal x height x width."""
        return self.channels * self.temporal_patch * self.patch**2

    @property
    def unit(self) -> int:
        """Number of patches merged into one row."""
        return self.merge**2

    @property
    def unit_width(self) -> int:
        """Pixel values in a unit."""
        return self.unit * self.patch_elements

    def rows(self, size: ImageSize) -> int:
        """Return the number of rows of an image."""
        return math.prod(size) // self.unit

    def sequences(self, size: ImageSize) -> tuple[int, ...]:
        """Return the number of patches in each frame, which is a sequence of full attention."""
        frames, rows, columns = size
        return (rows * columns,) * frames

    def tokens(self, sizes: Iterable[ImageSize]) -> Tokens:
        """Return the lengths of the sequences and windows of images of these sizes."""
        sizes = list(sizes)
        return Tokens(
            [patches for size in sizes for patches in self.sequences(size)],
            [patches for size in sizes for patches in (self.order(size).windows * self.unit).tolist()],
        )

    def positions(self, size: ImageSize, units: np.ndarray) -> np.ndarray:
        """Return the row and column of each patch in these units: int64 [2, patches]."""
        return patch_positions(size, self.merge, units)

    def cost_per_patch(self, size: ImageSize) -> float:
        """Return the predicted forward FLOPs of one patch, which attends to all patches of its frame."""
        linear, quadratic = self.flops_per_patch
        return linear + quadratic * size[1] * size[2]

    @property
    def window_patches(self) -> int:
        """Number of patches in a full window of local attention, a multiple of `unit`."""
        return self.unit

    @property
    def rotary(self) -> AxialRotary:
        """Rotary embedding of queries and keys."""
        return AxialRotary(self.rope_theta, self.head_dim)

    def attention(self, *, windowed: bool = False) -> SelfAttention:
        """Return the attention part of a layer, within windows if `windowed`."""
        return SelfAttention(
            self.hidden,
            self.heads,
            self.heads,
            self.head_dim,
            stored=("attn.qkv", "attn.proj"),
            causal=False,
            windowed=windowed,
            qkv_bias=True,
            out_bias=True,
        )

    @cached_property
    def flops_per_patch(self) -> tuple[float, float]:
        """Forward FLOPs per patch, and per pair of patches in one sequence of full attention: the coefficients of
        linear * n + quadratic * n^2 for n patches, fitted to images of one and of two windows.
        """
        n = self.window_patches
        one, two = (
            self.architecture.operations(Tokens([windows * n], [n] * windows), passes=FORWARD) for windows in (1, 2)
        )
        return float((4 * one - two) // (2 * n)), float((two - 2 * one) // (2 * n * n))
