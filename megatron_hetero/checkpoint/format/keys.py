"""The names of tensors in a checkpoint, which do not depend on the layout: see docs/checkpoints.md, "Contents"."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megatron_hetero.config.optimizers import OptimizerKind

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


def expected_shapes(shapes: Mapping[str, Shape], frozen: Collection[str], optimizer: OptimizerKind) -> dict[str, Shape]:
    """Every tensor of a checkpoint of a model with the stored `shapes`, except random states. `frozen`: those that do
    not train.
    """
    trained = {name: shape for name, shape in shapes.items() if optimizer.moments and name not in frozen}
    expected = {f"{WEIGHTS}/{name}": matrix(shape) for name, shape in shapes.items()}
    expected |= {f"{kind}/{name}": matrix(shape) for kind in optimizer.moments for name, shape in trained.items()}
    return expected | {f"{STEP}/{name}": (1,) for name in trained}
