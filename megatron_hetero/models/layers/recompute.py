"""The hooks that autograd calls for the tensors that it saves. It calls the innermost pair alone: whoever sets a pair
inside of another hands on to that what he does not treat himself.

What a module's layers make again, as it is configured. Pure.

Tensors that the backward pass makes again instead of keeping them.

    made = remake(norm, hidden)          # keeps `hidden`, and nothing that `norm` makes on its way
    with not_keeping(made):
        out = linear(made)               # nor does the linear layer keep `made`: its backward pass makes it again

What `norm` computes is computed twice, whether the linear layer asks for it first or the gradient of `made` arrives. As
`CheckpointWithoutOutput` of Megatron-Core (tensor_parallel/random.py at core_v0.16.1), which asks Transformer Engine
for FP8 recomputation by default, so that plain layers cannot use it, and frees storages that others may still read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class Hooks:
    """As `torch.autograd.graph.saved_tensors_hooks` takes them."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @classmethod
    def current(cls) -> Self:
        """Those in force; where there are none, what autograd does without."""
        autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        found = autograd._top_saved_tensors_default_hooks(False)
        return cls(_itself, _itself) if found is None else cls(*found)


def _itself(x: Any) -> Any:
    return x


How = Literal["none", "selective", "full"]


class Settings(Protocol):
    """The two settings, by module; what they lack is made as usual."""

    @property
    def recompute(self) -> Mapping[str, How | int]:
        """`none`, `selective`, `full` or a number of layers."""
        ...

    @property
    def chunk(self) -> Mapping[str, int]:
        """Tokens at a time through an MLP."""
        ...


@dataclass(frozen=True)
class Recompute:
    """What the layers of a module make again in the backward pass, instead of keeping it.

    `how`: nothing; what follows from what is kept without a matrix product and without communication (`selective`); all
    but the inputs of layers (`full`), or that in the first so many layers of each pipeline stage. `chunk`: so many
    tokens at a time go through the MLP on a rank where there are more, and gate and up are made again for each; 0 for
    all at once.
    """

    how: How | int = "none"
    chunk: int = 0

    @classmethod
    def of(cls, settings: Settings, module: str) -> Recompute:
        """That of `module`."""
        return cls(settings.recompute.get(module, "none"), settings.chunk.get(module, 0))

    @property
    def selective(self) -> bool:
        """Whether all layers keep less."""
        return self.how == "selective"

    def whole_layers(self, layers: int) -> int:
        """How many layers of a stage that has so many are made again as a whole; they are its first."""
        if isinstance(self.how, int):
            return min(self.how, layers)
        return layers if self.how == "full" else 0

    def chunks(self, tokens: int) -> bool:
        """Whether an MLP takes `tokens` in several chunks."""
        return 0 < self.chunk < tokens


EVERYTHING_KEPT = Recompute()


Make = Callable[..., "Tensor | tuple[Tensor, ...]"]


def remake(make: Make, *inputs: Tensor) -> Any:
    """`make(*inputs)`, of which the inputs are all that is kept.

    `make` draws no random numbers. Other tensors that it uses get no gradients, parameters do: each time that it is
    made again, so that they add up as those of micro-batches do.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return make(*inputs)
    return _Remade.apply(make, *inputs)


def not_keeping(*made: Tensor) -> contextlib.AbstractContextManager[object]:
    """Inside, autograd does not keep those of `made` that `remake` gave, or views of them. What else it saves is as
    outer hooks want it.
    """
    places = {x.untyped_storage()._cdata: (x.grad_fn, i) for i, x in enumerate(made) if _is_remade(x)}
    if not places:
        return contextlib.nullcontext()
    outer = Hooks.current()

    def pack(x: Tensor) -> Any:
        place = places.get(x.untyped_storage()._cdata)
        return outer.pack(x) if place is None else _View(*place, x)

    return saved_tensors_hooks(pack, lambda kept: kept.again() if isinstance(kept, _View) else outer.unpack(kept))


def _is_remade(x: Tensor) -> bool:
    return hasattr(x.grad_fn, "remade")


class _View:
    """How a tensor lies in the `output` of `node`."""

    def __init__(self, node: Any, output: int, x: Tensor):
        self.node, self.output = node, output
        self.geometry = x.size(), x.stride(), x.storage_offset()

    def again(self) -> Tensor:
        """The tensor, with the memory of what has been made again."""
        return _Remade.again(self.node)[1][self.output].detach().as_strided(*self.geometry)


class _Remade(torch.autograd.Function):
    """`ctx.remade`: copies of the inputs, and what was made of them with its graph, from the first time that the
    backward pass needs either to the end of this node's own.
    """

    @staticmethod
    def forward(ctx: Any, make: Make, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.make, ctx.remade = make, None
        ctx.save_for_backward(*inputs)
        return make(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs = _Remade.again(ctx)
        ctx.remade = None
        torch.autograd.backward(outputs, grads)
        return None, *(x.grad for x in inputs)

    @staticmethod
    def again(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`ctx.remade`."""
        if ctx.remade is None:
            inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors)
            with torch.enable_grad():
                made = ctx.make(*inputs)
            ctx.remade = inputs, made if isinstance(made, tuple) else (made,)
        return ctx.remade
