"""Linear layers of Megatron-Core whose matrix products add the bias, and add the gradient of the weight to that of
earlier micro-batches.

Where weights are split over tp by column and activations by token, the input is gathered before the product, once more
in the backward pass, and its gradient is reduced beside the product that gives the weight's. All as in Megatron-Core
(`LinearWithGradAccumulationAndAsyncCommunication`, tensor_parallel/layers.py at core_v0.16.1; Korthikanti et al. 2022,
arXiv 2205.05198), which adds the bias in a pass of its own, and accumulates with kernels of apex or Transformer Engine.

On a CPU PyTorch takes MKL for fp32, which uses half of the vectors of processors that are not Intel's: 97 GFLOP/s on a
Zen 5 core, where oneDNN, which PyTorch brings too, reaches 220. oneDNN builds a kernel for each new shape, in about a
millisecond, and is slower where a dim is as narrow as the rank of an adapter, so only larger products use it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.groups.megatron import tensor_parallel

LEAST = 2**24
"""Least multiplications of a product by oneDNN."""
NARROW = 64
"""A product with a dim below this is slower by oneDNN."""


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Multiply `x` [..., in] by `matrix` [in, out], add `bias` [out]: [..., out], in their dtype or in fp32. The result
    is no view, so that it can be added to in place. Autograd does not see this operation.
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
    """Add `left` [m, k] times `right` [k, n] to `total` [m, n], in their dtype or in fp32."""
    if total.dtype != left.dtype and keeps_wide(total, total.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif total.dtype != left.dtype or _by_onednn(left, right):
        total.add_(product(left, right))
    else:
        total.addmm_(left, right)


def keeps_wide(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether PyTorch can multiply factors of fewer bits on the device of `x` without rounding to their dtype."""
    return x.is_cuda and dtype == torch.float32


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    usable = left.device.type == "cpu" and left.dtype == right.dtype == torch.float32 and has_onednn()
    sizes = *left.shape, right.shape[1]
    return usable and min(sizes) >= NARROW and math.prod(sizes) >= LEAST


@cache
def has_onednn() -> bool:
    """Whether oneDNN is available and faster, which needs vectors of 512 bits."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")


def gradient_of_weight(parameter: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` for autograd; or add the product to `main_grad` at once, and return a placeholder, which
    Megatron's `DistributedDataParallel` ignores unless the parameter has other gradients too.
    """
    if not adds_to_main_grad(parameter, left.dtype):
        if hasattr(parameter, "grad_added_to_main_grad"):  # It may be set from an earlier micro-batch.
            parameter.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
        return product(left, right)
    add_product(parameter.main_grad, left, right)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return torch.zeros_like(parameter) if _is_shared(parameter) else torch.empty_like(parameter)


def scaled_gradient(parameter: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
    """Return `gradient` times `scale` [] for autograd, in its place; or add that to `main_grad`, and return a
    placeholder, see `gradient_of_weight`.
    """
    total = _main_grad(parameter)
    if total is None:
        return gradient.mul_(scale)
    torch.addcmul(total, gradient, scale, out=total)
    parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return gradient.zero_() if _is_shared(parameter) else gradient


def adds_to_main_grad(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether products of factors of `dtype` can be added to the parameter's `main_grad` directly."""
    total = _main_grad(parameter)
    return total is not None and (total.dtype == dtype or keeps_wide(total, total.dtype))


def _main_grad(parameter: Tensor) -> Tensor | None:
    """Return `main_grad` of Megatron's `DistributedDataParallel` if it accepts additions by others."""
    return getattr(parameter, "main_grad", None) if hasattr(parameter, "grad_added_to_main_grad") else None


def _is_shared(parameter: Tensor) -> bool:
    """Whether it is the weight of an embedding and a head, which Megatron marks so."""
    return getattr(parameter, "zero_out_wgrad", False)


Sharing = Literal["split", "whole", "none"]
"""Distribution over tp of the input of a layer that is split by column: each rank has some tokens (`split`) or all of
them, so that parts of their gradient are summed (`whole`); or there is nothing to exchange (`none`).
"""


class ColumnLinear(tensor_parallel.ColumnParallelLinear):
    """Linear layer that is split by column. It adds its bias itself, whatever `skip_bias_add`."""

    exchanges_in_parts = True

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute [S, 1, in] ([S / tp, 1, in] with sequence-parallel activations) to [S, 1, out / tp]."""
        sharing = "split" if self.sequence_parallel else "whole" if self.allreduce_dgrad else "none"
        return _linear(self, input_, self.bias, sharing), None


class RowLinear(tensor_parallel.RowParallelLinear):
    """Linear layer that is split by row. It adds its bias itself, whatever `skip_bias_add`: in the product of the first
    tp rank, before the sum.
    """

    exchanges_in_parts = True

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute [S, 1, in / tp] to [S, 1, out] ([S / tp, 1, out] with sequence-parallel activations)."""
        if self.input_size_per_partition == self.input_size:
            return _linear(self, input_, self.bias), None
        group: Any = self.tp_group
        bias = None if self.bias is None or group.rank() > 0 else self.bias.detach()
        sharing = "split" if self.sequence_parallel else "whole"
        return _Summed.apply(_linear(self, input_, bias), self.bias, sharing, group), None  # pyright: ignore[reportReturnType]


class WholeLinear(torch.nn.Linear):
    """Linear layer that every rank has all of."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute [S, in] to [S, out]."""
        return _Linear.apply(input, self.weight, self.bias, "none", None)  # pyright: ignore[reportReturnType]


def _linear(layer: Any, x: Tensor, bias: Tensor | None = None, sharing: Sharing = "none") -> Tensor:
    return _Linear.apply(x, layer.weight, bias, sharing, layer.tp_group)  # pyright: ignore[reportReturnType]


class _Summed(torch.autograd.Function):
    """Sum of all ranks' parts, or this rank's tokens of it. `bias`, which one part contains, gets the gradient of this
    rank's tokens.
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
        # The parameter itself, for its `main_grad`. It is no part of the graph.
        ctx.parameter, ctx.sharing, ctx.group = weight, sharing, group
        whole, _ = _gathered(x, group) if sharing == "split" else (x, None)
        return product(whole, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x = of_weight = gathering = reducing = None
        # In the order of issue: each exchange runs beside a product.
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
    """Return the sum over `group`, or this rank's share of it; valid once the work is done."""
    if sharing == "whole":
        return grad, dist.all_reduce(grad, group=group, async_op=True)
    own = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
    return own, dist.reduce_scatter_tensor(own, grad, group=group, async_op=True)
