"""Megatron-Core's linear layers with fused products: the bias is added, and weight gradients are accumulated, inside
the matrix product.

In a column-parallel layer with sequence-parallel activations, the input is gathered before the product and again in the
backward pass, and its gradient is reduced while the weight's gradient is computed. The method is Megatron-Core's
(`LinearWithGradAccumulationAndAsyncCommunication`, tensor_parallel/layers.py at core_v0.16.1; Korthikanti et al. 2022,
arXiv 2205.05198), which adds the bias in a separate pass, and accumulates with kernels of apex or Transformer Engine.

On a CPU PyTorch uses MKL for fp32, which needs Intel processors for full vectors: on a Zen 5 core it reaches
97 GFLOP/s, and oneDNN, also in PyTorch, reaches 220. oneDNN builds a kernel for each new shape in about a millisecond,
and is slower if a dim is as small as the rank of an adapter, so only larger products use it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.groups.megatron import tensor_parallel
from megatron_hetero.groups.platform import Function

LEAST = 2**24
"""Minimum number of multiplications of a product that uses oneDNN."""
FUSED = 1280
"""Minimum width of a rank's part of a linear layer whose products are fused with exchanges on GPUs. Of narrower ones
the product hides so little of the exchange on an H100 that one collective takes less time than copies rank by rank.
"""
SYMMETRIC = 256 * 2**20
"""Bytes of the symmetric memory of a tp group whose products are fused with exchanges."""
NARROW = 64
"""Minimum size of each dim of a product that uses oneDNN, which is slower for smaller dims."""


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x` [..., in] times `matrix` [in, out] plus `bias` [out]: [..., out], in `dtype` (default: as `x`).

    The result is not a view, so it can be modified in place. For use inside autograd functions only.
    """
    if dtype is not None and dtype != x.dtype:
        return torch.mm(x, matrix, out_dtype=dtype) if keeps_wide(x, dtype) else product(x, matrix).to(dtype)
    is_matrix = x.dim() == 2
    rows = x if is_matrix else x.flatten(0, -2)
    if _by_onednn(rows, matrix):
        out = _onednn(rows, matrix, bias)
    else:
        out = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
    return out if is_matrix else out.resize_(*x.shape[:-1], matrix.shape[1])


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left` [m, k] times `right` [k, n] to `total` [m, n], which has their dtype or fp32."""
    if total.dtype != left.dtype and keeps_wide(total, total.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif total.dtype != left.dtype or _by_onednn(left, right):
        total.add_(product(left, right))
    else:
        total.addmm_(left, right)


def keeps_wide(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether products of lower-precision factors on the device of `x` are returned in `dtype` unrounded."""
    return x.is_cuda and dtype == torch.float32


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    # Most products on the host are decided by their size, which is the cheapest to read.
    if left.numel() * right.shape[1] < LEAST or left.device.type != "cpu":
        return False
    return min(*left.shape, right.shape[1]) >= NARROW and left.dtype == right.dtype == torch.float32 and has_onednn()


@cache
def has_onednn() -> bool:
    """Return whether oneDNN is available and faster than MKL, which requires 512-bit vectors."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")


def gradient_of_weight(parameter: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the gradient `left @ right` of a weight; or add it directly to its `main_grad`, and return a placeholder,
    which Megatron's `DistributedDataParallel` ignores unless the parameter has other gradients too.
    """
    if not adds_to_main_grad(parameter, left.dtype):
        if hasattr(parameter, "grad_added_to_main_grad"):  # An earlier micro-batch may have set it.
            parameter.grad_added_to_main_grad = False  # pyright: ignore[reportAttributeAccessIssue]
        return product(left, right)
    add_product(parameter.main_grad, left, right)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return torch.zeros_like(parameter) if _is_shared(parameter) else torch.empty_like(parameter)


def scaled_gradient(parameter: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
    """Scale `gradient` by `scale` [] in place and return it for autograd; or add the result to `main_grad` and return a
    placeholder, see `gradient_of_weight`.
    """
    total = _main_grad(parameter)
    if total is None:
        return gradient.mul_(scale)
    torch.addcmul(total, gradient, scale, out=total)
    parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return gradient.zero_() if _is_shared(parameter) else gradient


def adds_to_main_grad(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Return whether products of factors of `dtype` can be added to the parameter's `main_grad` inside the product."""
    total = _main_grad(parameter)
    return total is not None and (total.dtype == dtype or keeps_wide(total, total.dtype))


def _main_grad(parameter: Tensor) -> Tensor | None:
    """Return `main_grad` of Megatron's `DistributedDataParallel` if layers may add to it."""
    return getattr(parameter, "main_grad", None) if hasattr(parameter, "grad_added_to_main_grad") else None


def _is_shared(parameter: Tensor) -> bool:
    """Return whether an embedding and an output layer share this weight, according to Megatron's mark."""
    return getattr(parameter, "zero_out_wgrad", False)


Sharing = Literal["split", "fused", "whole", "none"]
"""How ranks share tokens over tp: each has some of the tokens (`split`; `fused` if exchanges are fused with products);
each has all tokens, and computes partial sums of their gradients (`whole`); or nothing is exchanged (`none`).
"""


class ColumnLinear(tensor_parallel.ColumnParallelLinear):
    """Column-parallel linear layer. It adds its bias itself, regardless of `skip_bias_add`."""

    fused = False
    """Whether products are fused with exchanges of sequence-parallel activations: see `fuse_exchanges`."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_: Tensor, *_: Any, ahead: Any = None, **__: Any
    ) -> tuple[Tensor, None]:
        """Map [S, 1, in] (or [S / tp, 1, in] with sequence-parallel activations) to [S, 1, out / tp].

        Args:
            input_: this rank's tokens.
            ahead: early gather of the input in the backward pass (`overlapped.Ahead`), if any.
        """
        split = "fused" if self.fused else "split"
        sharing = split if self.sequence_parallel else "whole" if self.allreduce_dgrad else "none"
        return _linear(self, input_, self.bias, sharing, ahead), None


class RowLinear(tensor_parallel.RowParallelLinear):
    """Row-parallel linear layer. It adds its bias itself, regardless of `skip_bias_add`: in the product of the first tp
    rank, or after a sum that is fused with the product.
    """

    fused = False

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Map [S, 1, in / tp] to [S, 1, out] (or [S / tp, 1, out] with sequence-parallel activations)."""
        if self.input_size_per_partition == self.input_size:
            return _linear(self, input_, self.bias), None
        group: Any = self.tp_group
        if self.sequence_parallel and self.fused:
            return _Scattered.apply(input_, self.weight, self.bias, group), None  # pyright: ignore[reportReturnType]
        bias = None if self.bias is None or group.rank() > 0 else self.bias.detach()
        sharing = "split" if self.sequence_parallel else "whole"
        return _Summed.apply(_linear(self, input_, bias), self.bias, sharing, group), None  # pyright: ignore[reportReturnType]


class WholeLinear(torch.nn.Linear):
    """Linear layer whose weight is not split over tp."""

    def forward(self, input: Tensor) -> Tensor:
        """Map [S, in] to [S, out]."""
        return _Linear.apply(input, self.weight, self.bias, "none", None, None)  # pyright: ignore[reportReturnType]


def fuse_exchanges(model: torch.nn.Module, *, gpu: bool) -> None:
    """Fuse products of linear layers with their exchanges of sequence-parallel activations over tp; on a GPU, except of
    layers that are narrower than `FUSED`.
    """
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, (ColumnLinear, RowLinear))]
    for layer in layers:
        # Column-parallel weights are split by rows, row-parallel weights by columns.
        if not gpu or layer.weight.shape[isinstance(layer, RowLinear)] >= FUSED:
            layer.fused = True


def _linear(layer: Any, x: Tensor, bias: Tensor | None = None, sharing: Sharing = "none", ahead: Any = None) -> Tensor:
    return _Linear.apply(x, layer.weight, bias, sharing, layer.tp_group, ahead)  # pyright: ignore[reportReturnType]


class _Summed(Function):
    """Autograd function that sums the partial products of all ranks, and returns the sum or its rows for this rank's
    tokens. The product of one rank includes `bias`, which is passed only for its gradient over this rank's tokens.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, bias: Tensor | None, sharing: Sharing, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004 (for its gradient)
        ctx.sharing, ctx.group = sharing, group
        out, work = _reduced(partial, group, sharing)
        assert work is not None, "this rank is in the group"
        work.wait()
        if sharing == "whole":
            ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_partial, work = gathered(grad, ctx.group, async_op=True) if ctx.sharing == "split" else (grad, None)
        grad_bias = grad.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        if work is not None:
            work.wait()
        return grad_partial, grad_bias, None, None


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sharing: Sharing, group: dist.ProcessGroup, ahead: Any
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] and ahead is None else None, weight)
        # Keep the parameter itself, for its `main_grad`.
        ctx.parameter, ctx.sharing, ctx.group, ctx.ahead = weight, sharing, group, ahead
        if sharing == "fused":
            return gathered_product(x, weight.t(), group, bias)[1]
        whole, _ = gathered(x, group) if sharing == "split" else (x, None)
        return product(whole, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = gathering = reducing = None
        # This order overlaps each exchange with a product.
        if ctx.ahead is not None:
            x, gathering = ctx.ahead.take()
        elif ctx.needs_input_grad[1] and ctx.sharing in ("split", "fused"):
            x, gathering = gathered(x, ctx.group, async_op=True)
        if ctx.needs_input_grad[0]:
            fused = ctx.sharing == "fused"
            grad_x = scattered_product(grad, weight, ctx.group) if fused else product(grad, weight)
        if gathering is not None:
            gathering.wait()
        if grad_x is not None and ctx.sharing in ("split", "whole"):
            grad_x, reducing = _reduced(grad_x, ctx.group, ctx.sharing)
        rows = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            grad_weight = gradient_of_weight(ctx.parameter, rows.t(), x.flatten(0, -2))
        grad_bias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        if reducing is not None:
            reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


class _Scattered(Function):
    """Autograd function of a row-parallel layer whose exchanges are fused with products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.parameter, ctx.group = weight, group
        out = scattered_product(x, weight.t(), group)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        whole, grad_x = gathered_product(grad, weight, ctx.group)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = gradient_of_weight(ctx.parameter, whole.flatten(0, -2).t(), x.flatten(0, -2))
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(dim=0)
        return grad_x if ctx.needs_input_grad[0] else None, grad_weight, grad_bias, None


def gathered_product(
    x: Tensor, matrix: Tensor, group: dist.ProcessGroup, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the activations `x` [S / tp, 1, in] of all ranks of `group`, [S, 1, in], and their product with `matrix`
    [in, out] plus `bias` [out].

    On GPUs, copy engines fetch the activations of one rank from its symmetric memory while those of another are
    multiplied (PyTorch's `fused_all_gather_matmul`; Wang et al. 2023, ASPLOS, "Overlap Communication with Dependent
    Computation via Decomposition"). Collectives of NCCL would wait for multiprocessors, which a product holds.
    """
    if not _fits(x, x.numel()):
        whole, _ = gathered(x, group)
        return whole, product(whole, matrix, bias)
    gather_matmul = torch.ops.symm_mem.fused_all_gather_matmul
    whole, (out,) = gather_matmul(x.contiguous(), [matrix], 0, group.group_name)
    out = torch.ops.aten._unsafe_view(out, out.shape)  # Adapters add to results in place, unless these are views.
    return whole, out if bias is None else out.add_(bias)


def scattered_product(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the product of `x` [S, 1, in / tp] and `matrix` [in / tp, out], summed over the ranks of `group`, for this
    rank's tokens: [S / tp, 1, out]. See `gathered_product`. On GPUs partial sums are rounded, and added in fp32.
    """
    if not _fits(x, len(x) // group.size() * matrix.shape[1]):
        out, work = _reduced(product(x, matrix), group, "split")
        if work is not None:
            work.wait()
        return out
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, matrix, "sum", 0, group.group_name)


def _fits(x: Tensor, size: int) -> bool:
    """Return whether activations of `size` elements of a rank are exchanged in symmetric memory, which all ranks of a
    tp group decide alike. A sum takes twice their size: one half is fetched while the other is computed.
    """
    return _has_symmetric_memory(x) and 0 < 2 * size * x.itemsize <= SYMMETRIC


def _has_symmetric_memory(x: Tensor) -> bool:
    return x.is_cuda


def reserve_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Allocate the symmetric memory of `group`, once for the whole run: to make it larger PyTorch would free the former
    one, for which the host waits for all streams of the device, with messages that other ranks have yet to send.
    """
    from torch.distributed._symmetric_memory import get_symm_mem_workspace  # This import defines the operators.

    get_symm_mem_workspace(group.group_name, SYMMETRIC)  # pyright: ignore[reportArgumentType]


def gathered(x: Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    """Return the activations `x` [S / tp, 1, in] of all ranks, [S, 1, in], and the work after which they are valid."""
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=async_op)


def _reduced(grad: Tensor, group: dist.ProcessGroup, sharing: Sharing) -> tuple[Tensor, dist.Work | None]:
    """Return the sum over `group` or its rows for this rank's tokens, and the work after which the result is valid."""
    if sharing == "whole":
        return grad, dist.all_reduce(grad, group=group, async_op=True)
    local = grad.new_empty(len(grad) // group.size(), *grad.shape[1:])
    return local, dist.reduce_scatter_tensor(local, grad, group=group, async_op=True)
