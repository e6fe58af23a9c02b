"""Tensors that the backward pass recomputes instead of saving them.

    normed = recompute(norm, hidden)     # saves `hidden`, and nothing that `norm` computes on its way
    with not_saving(normed):
        out = linear(normed)             # nor does the linear layer save `normed`

The backward pass computes `norm` again, once for the linear layer's gradient and its own, whichever comes first.
Megatron-Core's `CheckpointWithoutOutput` (tensor_parallel/random.py at core_v0.16.1) asks Transformer Engine for FP8
recomputation by default, so that plain layers cannot use it, and frees storages that others may still read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

How = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Recompute:
    """Recomputation in the backward pass of a module's layers.

    `how`: nothing; what needs neither a matrix product nor communication (`selective`); all but the inputs of layers
    (`full`), or that in the first so many layers of each pipeline stage. `chunk`: tokens that pass through an MLP at a
    time, whose gate and up are recomputed chunk by chunk; 0 for all at once.
    """

    how: How | int = "none"
    chunk: int = 0

    @property
    def selective(self) -> bool:
        """Whether all layers save less."""
        return self.how == "selective"

    def whole_layers(self, layers: int) -> int:
        """Return how many of a stage's first layers are recomputed as a whole."""
        if isinstance(self.how, int):
            return min(self.how, layers)
        return layers if self.how == "full" else 0

    def chunks(self, tokens: int) -> bool:
        """Whether an MLP takes `tokens` in several chunks."""
        return 0 < self.chunk < tokens


NO_RECOMPUTE = Recompute()
Function = Callable[..., "Tensor | tuple[Tensor, ...]"]


def recompute(function: Function, *inputs: Tensor) -> Any:
    """Return `function(*inputs)`, of which only the inputs are saved.

    `function` draws no random numbers. Other tensors that it uses get no gradients; parameters do, when it is computed
    again.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return function(*inputs)
    return _Recomputed.apply(function, *inputs)


def not_saving(*outputs: Tensor) -> contextlib.AbstractContextManager[object]:
    """Inside, autograd does not save those of `outputs` that come from `recompute`, or views of them. Everything else
    goes to outer hooks.
    """
    nodes = {x.untyped_storage()._cdata: (x.grad_fn, i) for i, x in enumerate(outputs) if hasattr(x.grad_fn, "again")}
    if not nodes:
        return contextlib.nullcontext()
    outer = Hooks.current()

    def pack(x: Tensor) -> Any:
        node = nodes.get(x.untyped_storage()._cdata)
        return outer.pack(x) if node is None else _View(*node, x)

    return saved_tensors_hooks(pack, lambda saved: saved.tensor() if isinstance(saved, _View) else outer.unpack(saved))


@dataclass(frozen=True)
class Hooks:
    """A pair of `torch.autograd.graph.saved_tensors_hooks`. Autograd calls the innermost pair alone, so a pair that is
    set inside another one has to call it for the tensors that it leaves alone.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @classmethod
    def current(cls) -> Self:
        """Return the pair in force; without one, a pair that changes nothing."""
        autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        found = autograd._top_saved_tensors_default_hooks(False)
        return cls(_itself, _itself) if found is None else cls(*found)


def _itself(x: Any) -> Any:
    return x


class _View:
    """Geometry of a tensor in the memory of an `output` of `node`."""

    def __init__(self, node: Any, output: int, x: Tensor):
        self.node, self.output = node, output
        self.geometry = x.size(), x.stride(), x.storage_offset()

    def tensor(self) -> Tensor:
        _, outputs = _Recomputed.compute(self.node)
        return outputs[self.output].detach().as_strided(*self.geometry)


class _Recomputed(torch.autograd.Function):
    """`ctx.again`: detached inputs and the outputs computed from them, with their graph; set from the time that the
    backward pass needs either until this node's backward.
    """

    @staticmethod
    def forward(ctx: Any, function: Function, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.function, ctx.again = function, None
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs = _Recomputed.compute(ctx)
        ctx.again = None
        torch.autograd.backward(outputs, grads)
        return None, *(x.grad for x in inputs)

    @staticmethod
    def compute(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        if ctx.again is None:
            inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors)
            with torch.enable_grad():
                outputs = ctx.function(*inputs)
            ctx.again = inputs, outputs if isinstance(outputs, tuple) else (outputs,)
        return ctx.again
