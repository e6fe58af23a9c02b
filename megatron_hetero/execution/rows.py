"""Named outputs of stages, and rows that arrived on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ReceivedRows:
    """The rows that crossed along an edge in one micro-batch: `leaves` of the text module's graph, [needed, width], by
    the name of the encoder's output.
    """

    leaves: Mapping[str, Tensor]

    @classmethod
    def of(cls, rows: Tensor, names: Sequence[str], requires_grad: bool) -> ReceivedRows:
        """From rows of several outputs side by side, [needed, outputs * width]."""
        parts = rows.chunk(len(names), dim=1) if len(names) > 1 else [rows]
        return cls(dict(zip(names, (part.detach().requires_grad_(requires_grad) for part in parts), strict=True)))

    def grad(self) -> Tensor:
        """Their gradients, side by side as they came; zero where they were not used."""
        grads = [grad_of(leaf) for leaf in self.leaves.values()]
        return grads[0] if len(grads) == 1 else torch.cat(grads, dim=1)

    def when_gradients_are_known(self, call: Callable[[], None]) -> None:
        """Call once, amid the backward pass that makes the last of the gradients; never where one is not made."""
        missing = set(self.leaves)

        def arrived(name: str) -> None:
            missing.discard(name)
            if not missing:
                call()

        for name, leaf in self.leaves.items():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(lambda _, name=name: arrived(name))


def grad_of(leaf: Tensor) -> Tensor:
    """The gradient of a model's input; zero if unused."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def wrong_outputs(output: object, expected: Sequence[str], may_have: Sequence[str] = ()) -> str:
    """What is wrong with what a stage returned; empty where it is a tensor by each of the names, and of those that it
    `may_have`, or one tensor for the only name.
    """
    if isinstance(output, Tensor):
        return "" if len(expected) == 1 else f"outputs {expected[0]}"
    if not isinstance(output, Mapping):
        return f"a {type(output).__name__}"
    if output.keys() - set(may_have) != set(expected):
        return f"outputs {', '.join(map(str, output))}" if output else "no outputs"
    return ", ".join(f"{n} of type {type(v).__name__}" for n, v in output.items() if not isinstance(v, Tensor))
