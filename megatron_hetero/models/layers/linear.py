"""Matrix products, by the library that is fastest at them; and those that give gradients of weights.

On a CPU PyTorch takes MKL for fp32, which on processors of other makers than Intel uses half of their vectors: on a
Zen 5 core it reaches 97 GFLOP/s where oneDNN, which PyTorch brings too, reaches 220. oneDNN makes a kernel for each new
shape, in about a millisecond, and so is asked for products that a few layers repay that with.

Megatron's linear layers, of which the matrix product adds the bias, and adds the gradient of the weight to that of
earlier micro-batches.

Where weights are split over tp by column and activations by token, the input is gathered before the product, once more
in the backward pass, and its gradient reduced beside the product that gives the weight's. All as in Megatron-Core
(`LinearWithGradAccumulationAndAsyncCommunication`, tensor_parallel/layers.py at core_v0.16.1; Korthikanti et al. 2022,
arXiv 2205.05198), which adds the bias in a pass of its own, and accumulates with kernels of apex or Transformer Engine.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST = 2**24
"""Multiplications of a product that is worth a kernel of its own."""


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """`x` [..., in] times `matrix` [in, out], and `bias` [out] where given: [..., out], in their own dtype or in fp32.
    No view, so that what comes can be added in place; for autograd this is no operation.
    """
    if dtype not in (None, x.dtype):
        return torch.mm(x, matrix, out_dtype=dtype) if keeps_wide(x, dtype) else product(x, matrix).to(dtype)
    rows, shape = x.flatten(0, -2), (*x.shape[:-1], matrix.shape[1])
    if _by_onednn(rows, matrix):
        return _onednn(rows, matrix, bias).resize_(shape)
    out = x.new_empty(shape)
    if bias is None:
        torch.mm(rows, matrix, out=out.flatten(0, -2))
    else:
        torch.addmm(bias, rows, matrix, out=out.flatten(0, -2))
    return out


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left` [m, k] times `right` [k, n] to `total` [m, n], which is of their dtype or in fp32."""
    if total.dtype != left.dtype and keeps_wide(total, total.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif total.dtype != left.dtype or _by_onednn(left, right):
        total.add_(product(left, right))
    else:
        total.addmm_(left, right)


def keeps_wide(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether PyTorch has products of narrower factors on the device of `x` that it does not round to their dtype."""
    return x.is_cuda and dtype == torch.float32


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    usable = left.device.type == "cpu" and left.dtype == right.dtype == torch.float32 and has_onednn()
    return usable and left.shape[0] * left.shape[1] * right.shape[1] >= LEAST


@cache
def has_onednn() -> bool:
    """Whether it is there, and faster: it is with vectors of 512 bits; with 256 they are alike."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")


def gradient_of_weight(parameter: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` for autograd; or what it is to pass on where the product is added to `main_grad` at once, which
    Megatron's `DistributedDataParallel` is told of and does not look at, unless the parameter has other gradients too.
    """
    if not adds_to_main_grad(parameter, left.dtype):
        if hasattr(parameter, "grad_added_to_main_grad"):  # Of an earlier micro-batch, perhaps.
            parameter.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
        return product(left, right)
    add_product(parameter.main_grad, left, right)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return torch.zeros_like(parameter) if _is_shared(parameter) else torch.empty_like(parameter)


def scaled_gradient(parameter: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
    """`gradient` times `scale` [] for autograd, in its place; or, likewise, what it is to pass on where that is added
    to `main_grad` at once.
    """
    total = _main_grad(parameter)
    if total is None:
        return gradient.mul_(scale)
    torch.addcmul(total, gradient, scale, out=total)
    parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return gradient.zero_() if _is_shared(parameter) else gradient


def adds_to_main_grad(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether products of factors of `dtype` are added to the parameter's `main_grad` at once."""
    total = _main_grad(parameter)
    return total is not None and (total.dtype == dtype or keeps_wide(total, total.dtype))


def _main_grad(parameter: Tensor) -> Tensor | None:
    """That of Megatron's `DistributedDataParallel`, of which it takes word that something was added."""
    return getattr(parameter, "main_grad", None) if hasattr(parameter, "grad_added_to_main_grad") else None


def _is_shared(parameter: Tensor) -> bool:
    """Whether a head is the embedding, too, which Megatron marks so."""
    return getattr(parameter, "zero_out_wgrad", False)


Sharing = Literal["split", "whole", "none"]
"""How a tp group has the input of a layer that is split by column: each rank some tokens; each all of them, so that
parts of their gradient are to be added; or there is nothing to exchange.
"""


class ColumnLinear(ColumnParallelLinear):
    """Split by column. It adds its bias in any case, and so leaves none to its caller."""

    exchanges_in_parts = True

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[S, 1, in] ([S / tp, 1, in] with sequence-parallel activations) to [S, 1, out / tp]."""
        sharing = "split" if self.sequence_parallel else "whole" if self.allreduce_dgrad else "none"
        return _linear(self, input_, self.bias, sharing), None


class RowLinear(RowParallelLinear):
    """Split by row. It adds its bias in any case, and so leaves none to its caller: over tp the product of the first
    rank adds it, before the sum.
    """

    exchanges_in_parts = True

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[S, 1, in / tp] to [S, 1, out] ([S / tp, 1, out] with sequence-parallel activations)."""
        if self.input_size_per_partition == self.input_size:
            return _linear(self, input_, self.bias), None
        group: Any = self.tp_group
        bias = None if self.bias is None or group.rank() > 0 else self.bias.detach()
        sharing = "split" if self.sequence_parallel else "whole"
        return _Summed.apply(_linear(self, input_, bias), self.bias, sharing, group), None  # pyright: ignore[reportReturnType]


class WholeLinear(torch.nn.Linear):
    """Not split: every rank has all of it."""

    def forward(self, input: Tensor) -> Tensor:
        """[S, in] to [S, out]."""
        return _Linear.apply(input, self.weight, self.bias, "none", None)  # pyright: ignore[reportReturnType]


def _linear(layer: Any, x: Tensor, bias: Tensor | None = None, sharing: Sharing = "none") -> Tensor:
    return _Linear.apply(x, layer.weight, bias, sharing, layer.tp_group)  # pyright: ignore[reportReturnType]


class _Summed(torch.autograd.Function):
    """The sum of all ranks' parts, or this rank's tokens of it. `bias`, which is in one of the parts, gets the gradient
    of the tokens that are here.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, bias: Tensor | None, sharing: Sharing, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004 (for its gradient)
        ctx.sharing, ctx.group = sharing, group
        out, work = _reduced(part, group, sharing)
        assert work is not None, "this rank is in the group"
        work.wait()
        if sharing == "whole":
            ctx.mark_dirty(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_bias = grad.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        of_part = _gathered(grad, ctx.group)[0] if ctx.sharing == "split" else grad
        return of_part, of_bias, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sharing: Sharing, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        # The parameter itself, which has more than values. It is no part of the graph.
        ctx.parameter, ctx.sharing, ctx.group = weight, sharing, group
        whole, _ = _gathered(x, group) if sharing == "split" else (x, None)
        return product(whole, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x = of_weight = gathering = reducing = None
        # The order in which the device is asked: each exchange is under way while a product is computed.
        if ctx.needs_input_grad[1] and ctx.sharing == "split":
            x, gathering = _gathered(x, ctx.group, async_op=True)
        if ctx.needs_input_grad[0]:
            of_x = product(grad, weight)
        if gathering is not None:
            gathering.wait()
        if of_x is not None and ctx.sharing != "none":
            of_x, reducing = _reduced(of_x, ctx.group, ctx.sharing)
        rows = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            of_weight = gradient_of_weight(ctx.parameter, rows.t(), x.flatten(0, -2))
        of_bias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        if reducing is not None:
            reducing.wait()
        return of_x, of_weight, of_bias, None, None


def _gathered(x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=async_op)


def _reduced(grad: Tensor, group: dist.ProcessGroup, sharing: Sharing) -> tuple[Tensor, dist.Work | None]:
    """The sum over `group`, or this rank's share of it, once the work is done."""
    if sharing == "whole":
        return grad, dist.all_reduce(grad, group=group, async_op=True)
    own = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
    return own, dist.reduce_scatter_tensor(own, grad, group=group, async_op=True)
