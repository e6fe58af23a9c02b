"""The names of tensors in a checkpoint, which do not depend on the layout: see docs/checkpoints.md, "Contents"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from torch import Tensor

WEIGHTS, STEP, RANDOM, BUFFERS = "weights", "step", "random", "buffers"

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """A rectangle of the tensor `key`, of shape `size`: it begins at `offsets`, and its values are (or go) in
    `values`, a view. What is kept in another form is on the meta device there, and `load` makes it just before it is
    written.
    """

    key: str
    size: Shape
    offsets: Shape
    values: Tensor
    load: Callable[[], Tensor] | None = None

    def current(self) -> Tensor:
        """The values as they are now."""
        return self.values if self.load is None else self.load()


def matrix(shape: Shape) -> Shape:
    """The shape of a stored tensor in checkpoints: at most two dims."""
    return shape if len(shape) <= 2 else (shape[0], prod(shape[1:]))
