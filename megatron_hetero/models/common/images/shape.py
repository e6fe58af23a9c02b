"""What follows from the sizes of an encoder of images, whatever its family."""

from __future__ import annotations

import math

from megatron_hetero.sharding.items import Size


class ImageSizes:
    """Mixed into the shapes of encoders that cut images into square patches, and merge square units of patches."""

    hidden: int
    heads: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int

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

    def rows(self, size: Size) -> int:
        """Rows of an image of `size` patches (time, height, width)."""
        return math.prod(size) // self.unit

    def sequences(self, size: Size) -> tuple[int, ...]:
        """Patches of each frame: full attention sees one."""
        frames, rows, columns = size
        return (rows * columns,) * frames

    def square(self, side: int) -> Size:
        """The patches of a square image of `side` pixels, which is resized to whole units as the processor does."""
        patches = max(1, round(side / (self.patch * self.merge))) * self.merge
        return 1, patches, patches

    def side(self, size: Size) -> int:
        """Pixels of a side of a square image of that size."""
        return size[1] * self.patch

    def cost(self, size: Size) -> float:
        """Predicted forward flops of encoding an image."""
        linear, quadratic = self.flops_per_patch()
        frame = float(math.prod(size[1:]))
        return size[0] * (linear * frame + quadratic * frame * frame)

    def cost_per_patch(self, size: Size) -> float:
        """Those of one of its patches, which meets all patches of its frame."""
        linear, quadratic = self.flops_per_patch()
        return linear + quadratic * size[1] * size[2]

    def flops_per_patch(self) -> tuple[float, float]:
        """Forward flops per patch, and per patch and patch of its sequence in layers of full attention."""
        raise NotImplementedError
