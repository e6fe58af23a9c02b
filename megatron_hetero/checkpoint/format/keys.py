"""The tensors of a checkpoint, independent of the layout, so that every layout can read what any other wrote.

For each tensor NAME of the model's `transformers` folder (those of additional encoders with their prefix):

    weights/NAME                          fp32 if trained (the master weights, if there are any), else in the model's
                                          dtype; in the dtype of their folder if imported
    exp_avg/NAME, exp_avg_sq/NAME         AdamW's moments, if trained: bfloat16 where they are kept so, else fp32
    step/NAME                             the number of AdamW's updates of it, [1]

and for each rank `random/RANK/...`, states of random generators. Padding is not stored; replicas and tied weights are
stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megatron_hetero.config.optimizers import OptimizerKind
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import parts_of_tensors, stored_shapes

WEIGHTS, STEP, RANDOM = "weights", "step", "random"

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


def expected_shapes(shapes: ModelShapes, freeze: Collection[str], optimizer: OptimizerKind) -> dict[str, Shape]:
    """Every tensor of a checkpoint of a model, except random states."""
    stored, parts = stored_shapes(shapes), parts_of_tensors(shapes)
    trained = {name: shape for name, shape in stored.items() if optimizer.moments and parts[name] not in freeze}
    expected = {f"{WEIGHTS}/{name}": matrix(shape) for name, shape in stored.items()}
    expected |= {f"{kind}/{name}": matrix(shape) for kind in optimizer.moments for name, shape in trained.items()}
    return expected | {f"{STEP}/{name}": (1,) for name in trained}
