"""What the shapes of encoders of pictures have in common, whatever their family."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

from megatron_hetero.layout.axes import Split
from megatron_hetero.layout.views import View
from megatron_hetero.models.architecture import Architecture
from megatron_hetero.models.items.pictures.geometry import ImageSize, PictureOrder
from megatron_hetero.models.layers.parts import FORWARD, Tokens
from megatron_hetero.models.layers.rotary import AxialRotary


@dataclass(frozen=True)
class ImageEncoderShape:
    """Part of a `megatron_hetero.models.family.EncoderShape`, of encoders that cut images into square patches and merge
    square units of them. Sizes in elements.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    channels: int
    patch: int
    """Pixels per side of a patch."""
    temporal_patch: int
    """Frames of a patch."""
    merge: int
    """Patches per side of a unit."""
    out_hidden: int
    rope_theta: float

    @classmethod
    def of(cls, vision: Any, **own: Any) -> Self:
        """Of the configuration `vision_config`. `own`: the fields that only this family has."""
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
            **own,
        )

    @property
    def norm_eps(self) -> float:
        """What norms add to the variance; no configuration says otherwise."""
        return 1e-6

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

    def rows(self, size: ImageSize) -> int:
        """Rows of an image of that size."""
        return math.prod(size) // self.unit

    def sequences(self, size: ImageSize) -> tuple[int, ...]:
        """Patches of each frame: full attention sees one."""
        frames, rows, columns = size
        return (rows * columns,) * frames

    def tokens(self, sizes: Iterable[ImageSize]) -> Tokens:
        """What the encoder computes on, of images of these sizes."""
        sizes = list(sizes)
        return Tokens(
            [patches for size in sizes for patches in self.sequences(size)],
            [patches for size in sizes for patches in self.windows(size)],
        )

    def order(self, size: ImageSize) -> PictureOrder:
        """The order in which the encoder works."""
        raise NotImplementedError

    def windows(self, size: ImageSize) -> list[int]:
        """Patches of each window of local attention; of one unit, where no attention is local."""
        return (self.order(size).windows * self.unit).tolist()

    def cost(self, size: ImageSize) -> float:
        """Predicted forward flops of encoding an image."""
        linear, quadratic = self.flops_per_patch()
        frame = float(math.prod(size[1:]))
        return size[0] * (linear * frame + quadratic * frame * frame)

    def cost_per_patch(self, size: ImageSize) -> float:
        """Those of one of its patches, which meets all patches of its frame."""
        linear, quadratic = self.flops_per_patch()
        return linear + quadratic * size[1] * size[2]

    @property
    def window_patches(self) -> int:
        """Patches of a whole window of local attention, a multiple of a unit."""
        return self.unit

    @property
    def architecture(self) -> Architecture:
        """Layers and ends."""
        raise NotImplementedError

    @property
    def rotary(self) -> AxialRotary:
        """How positions turn queries and keys."""
        return AxialRotary(self.rope_theta, self.head_dim)

    def flops_per_patch(self) -> tuple[float, float]:
        """Forward flops per patch, and per patch and patch of its sequence in layers of full attention."""
        return _flops_per_patch(self)

    @property
    def views(self) -> tuple[View, ...]:
        """No further ones."""
        return ()

    @property
    def parts(self) -> Mapping[Split, int]:
        """None, without further views."""
        return {}


@lru_cache
def _flops_per_patch(shape: ImageEncoderShape) -> tuple[float, float]:
    """Both from the operations of an image of one and of two windows: linear * n + quadratic * n^2."""
    n = shape.window_patches
    one, two = (
        shape.architecture.operations(Tokens([windows * n], [n] * windows), passes=FORWARD) for windows in (1, 2)
    )
    return float((4 * one - two) // (2 * n)), float((two - 2 * one) // (2 * n * n))
