"""Tensors that the backward pass recomputes instead of loading them.

    normed = recompute(norm, hidden)     # saves `hidden`, and no intermediate result of `norm`
    with not_saving(normed):
        out = linear(normed)             # the linear layer does not save `normed` either

The backward pass computes `norm` once more, when the linear layer or `norm` itself first needs the result.
Megatron-Core's `CheckpointWithoutOutput` (tensor_parallel/random.py at core_v0.16.1) requires Transformer Engine by
default, and frees storages that other tensors may still use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

How = Literal["none", "selective", "experts", "full"]


@dataclass(frozen=True)
class Recompute:
    """What the backward pass of a module's layers recomputes."""

    how: How | int = "none"
    """What is recomputed: nothing (`none`); operations other than matrix products and communication (`selective`);
    these and the first product of experts (`experts`); whole layers (`full`); or, for an integer, this many whole
    layers at the start of each pipeline stage.
    """
    chunk: int = 0
    """Number of tokens that pass through an MLP at a time, with gate and up recomputed; 0 for all tokens at once."""

    @property
    def selective(self) -> bool:
        """Whether cheap results are recomputed in all layers."""
        return self.how in ("selective", "experts")

    @property
    def experts(self) -> bool:
        """Whether hidden activations of experts are recomputed from received rows in all layers."""
        return self.how == "experts"

    def whole_layers(self, layers: int) -> int:
        """Return the number of a stage's first layers that are recomputed as a whole."""
        if isinstance(self.how, int):
            return min(self.how, layers)
        return layers if self.how == "full" else 0

    def chunks(self, tokens: int) -> bool:
        """Return whether `tokens` tokens pass through an MLP in several chunks."""
        return 0 < self.chunk < tokens


NO_RECOMPUTE = Recompute()
Function = Callable[..., "Tensor | tuple[Tensor, ...]"]


def recompute(function: Function, *inputs: Tensor) -> Any:
    """Return `function(*inputs)`, saving only the inputs.

    `function` must not draw random numbers. Parameters that it uses get gradients from the recomputation.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return function(*inputs)
    return _Recomputed.apply(function, *inputs)


def ahead(output: Tensor) -> Callable[[], None]:
    """Return a function for the backward pass that recomputes `output`, a result of `recompute`, before it is needed.
    For other tensors, the function does nothing.
    """
    node: Any = output.grad_fn  # Not the tensor, which need not live until then.

    def compute() -> None:
        if hasattr(node, "again"):
            _Recomputed.compute(node)

    return compute


def not_saving(*outputs: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which autograd does not save `outputs` that come from `recompute`, or views of these. Other
    tensors, and outputs that are views of saved inputs, pass to outer hooks.
    """
    nodes = {x.untyped_storage()._cdata: (x.grad_fn, i) for i, x in enumerate(outputs) if hasattr(x.grad_fn, "again")}
    if not nodes:
        return contextlib.nullcontext()
    outer = Hooks.current()

    def pack(x: Tensor) -> Any:
        storage = x.untyped_storage()._cdata
        node: Any = nodes.get(storage)
        return outer.pack(x) if node is None or storage in node[0].storages else _View(node[0], node[1], x)

    return saved_tensors_hooks(pack, lambda saved: saved.tensor() if isinstance(saved, _View) else outer.unpack(saved))


@dataclass(frozen=True)
class Hooks:
    """A pair of `torch.autograd.graph.saved_tensors_hooks`. Autograd calls only the innermost pair, which has to call
    the outer pair for tensors that it does not handle.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @classmethod
    def current(cls) -> Self:
        """Return the innermost active pair; if there is none, a pair that changes nothing."""
        autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        hooks = autograd._top_saved_tensors_default_hooks(False)
        return cls(_itself, _itself) if hooks is None else cls(*hooks)


def _itself(x: Any) -> Any:
    return x


class _View:
    """A saved view of output number `output` of the recomputed `node`, represented by its geometry."""

    def __init__(self, node: Any, output: int, x: Tensor):
        self.node, self.output = node, output
        self.geometry = x.size(), x.stride(), x.storage_offset()

    def tensor(self) -> Tensor:
        _, outputs = _Recomputed.compute(self.node)
        return outputs[self.output].detach().as_strided(*self.geometry)


class _Recomputed(torch.autograd.Function):
    """Autograd function of `recompute`. `ctx.storages`: those of inputs. `ctx.again`: detached inputs and recomputed
    outputs with their graph, from the first use of an output in the backward pass until the backward pass of this node.
    """

    @staticmethod
    def forward(ctx: Any, function: Function, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.function, ctx.again = function, None
        ctx.storages = {x.untyped_storage()._cdata for x in inputs}
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
