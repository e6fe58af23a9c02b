"""What a rank stores of a micro-batch between the actions of a step; the last action that uses a tensor frees it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.communicator import Crossing
from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.actions import WorkKind
from megatron_hetero.schedule.contract import DeviceMicroBatch, InParts
from megatron_hetero.schedule.program import StageId


@dataclass(eq=False)
class Activation:
    """A micro-batch in one stage. Where one call computes several, the last of them has what belongs to the call."""

    embedded: Tensor | None = None
    """Result of the model's `embed`, until the forward pass."""
    receives: dict[WorkKind, tuple[Tensor, dist.Work]] = field(default_factory=dict[WorkKind, tuple[Tensor, dist.Work]])
    """Hidden states (F, R) and their gradient (B), from `irecv` to `wait`."""
    received: dict[WorkKind, Tensor] = field(default_factory=dict[WorkKind, Tensor])
    """The same, from `wait` to the run that uses them."""
    hidden: Tensor | None = None
    """Received hidden states as a leaf of the stage's graph, from the forward pass until their gradient is sent."""
    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """By name, from the forward pass until they have left the rank or, with a graph, until the backward pass."""
    hidden_shape: torch.Size | None = None
    """Shape of the hidden states among the outputs, and so of the gradient that comes back."""
    random_state: Any = None
    """State of the generators before a forward pass that will be recomputed."""
    called: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Outputs of a call of several micro-batches, with their graph, until its backward pass."""
    in_parts: tuple[InParts, Any] | None = None
    """Input whose parts run again in the backward pass, and the random state before the first."""
    row_grads: dict[tuple[Edge, int], Tensor] = field(default_factory=dict[tuple[Edge, int], Tensor])
    """Gradients of rows that left, by edge and micro-batch, from `finish` to the backward pass."""


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """The rows that crossed along an edge in one micro-batch: leaves of the text module's graph, [needed, width], by
    the name of the encoder's output.
    """

    leaves: Mapping[str, Tensor]

    @classmethod
    def of(cls, rows: Tensor, names: Sequence[str], requires_grad: bool) -> ReceivedRows:
        """Split rows of several outputs that are side by side, [needed, outputs * width]."""
        parts = rows.chunk(len(names), dim=1) if len(names) > 1 else [rows]
        return cls(dict(zip(names, (part.detach().requires_grad_(requires_grad) for part in parts), strict=True)))

    def grad(self) -> Tensor:
        """The gradients, side by side like the rows; zero for unused rows."""
        grads = [grad_of(leaf) for leaf in self.leaves.values()]
        return grads[0] if len(grads) == 1 else torch.cat(grads, dim=1)

    def when_gradients_are_computed(self, call: Callable[[], None]) -> None:
        """Call once, in the backward pass, when the last gradient is computed; never if one is not."""
        missing = set(self.leaves)

        def arrived(name: str) -> None:
            missing.discard(name)
            if not missing:
                call()

        for name, leaf in self.leaves.items():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda _, name=name: arrived(name))


@dataclass(eq=False)
class LiveMicroBatch:
    """A micro-batch on a rank, from its first action to its last."""

    batch: DeviceMicroBatch
    """The rank's part, on the device."""
    stages: defaultdict[StageId, Activation] = field(default_factory=partial(defaultdict, Activation))
    """What each stage on the rank stores."""
    crossings: dict[tuple[WorkKind, Edge], Crossing] = field(default_factory=dict[tuple[WorkKind, Edge], Crossing])
    """Crossings of rows (F) and of their gradients (B), from `start` to `finish`."""
    rows: dict[Edge, ReceivedRows] = field(default_factory=dict[Edge, ReceivedRows])
    """Rows that entered, from `finish` to the run that uses them or, if gradients return, until these leave."""


def grad_of(leaf: Tensor) -> Tensor:
    """The gradient of a model's input; zero if unused."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
