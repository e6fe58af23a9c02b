"""Products of groups of rows with one matrix per group: in a single kernel, or one group after the other.

    out = W x + scale * B A x        for each row x, with the W (and A and B, if any) of its group

A [r, in] and B [out, r] are the low-rank matrices of an adapter of W [out, in] (`low_rank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.groups.platform import Function

Ends = Tensor | Sequence[int]
"""Where the rows of each group end: int32 [groups] on the device for a single kernel, or integers on the host for one
product per group.
"""


class Matrices(NamedTuple):
    """The weight matrix of each group, with low-rank matrices if there are adapters."""

    weight: Tensor
    """Weights W, [groups, out, in]."""
    a: Tensor | None = None
    """Low-rank matrices A, [groups, r, in]."""
    b: Tensor | None = None
    """Low-rank matrices B, [groups, out, r]."""
    scale: float = 1.0

    def of(self, groups: slice) -> Matrices:
        """Return the matrices of a range of groups."""
        a, b = (None if each is None else each[groups] for each in (self.a, self.b))
        return Matrices(self.weight[groups], a, b, self.scale)

    def forward(self, x: Tensor, ends: Ends) -> tuple[Tensor, Tensor | None]:
        """Return the output [rows, out] for rows `x` [rows, in], and the result of `low`."""
        out, low = products(x, self.weight.transpose(1, 2), ends), self.low(x, ends)
        if low is None or self.b is None:
            return out, None
        return _with_products(out, low, self.b.transpose(1, 2), ends), low

    def low(self, x: Tensor, ends: Ends) -> Tensor | None:
        """Return scale * A x [rows, r], or None without adapters."""
        return None if self.a is None else self._scaled(products(x, self.a.transpose(1, 2), ends))

    def backward(self, grad: Tensor, ends: Ends) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of x and of A x, given the gradient `grad` of the output."""
        grad_x, grad_low = products(grad, self.weight, ends), self.backward_low(grad, ends)
        if grad_low is None or self.a is None:
            return grad_x, None
        return _with_products(grad_x, grad_low, self.a, ends), grad_low

    def backward_low(self, grad: Tensor, ends: Ends) -> Tensor | None:
        """Return the gradient of A x, given the gradient `grad` of the output; None without adapters."""
        return None if self.b is None else self._scaled(products(grad, self.b, ends))

    def gradients(
        self,
        grad: Tensor,
        x: Tensor | None,
        low: Tensor | None,
        grad_low: Tensor | None,
        ends: Ends,
        needed: Sequence[bool],
    ) -> Iterator[Tensor | None]:
        """Yield the gradients of weight, a and b, or None where not `needed`. `low`, `grad_low`: results of `forward`
        and `backward`.
        """
        factors = (grad, x), (grad_low, x), (grad, low)
        for (left, right), matrices, need in zip(factors, self[:3], needed, strict=True):
            if not need or left is None or right is None or matrices is None:
                yield None
            else:
                yield outer_products(left, right, ends, matrices)

    def _scaled(self, low: Tensor) -> Tensor:
        return low if self.scale == 1 else low.mul_(self.scale)


def grouped_linear(x: Tensor, matrices: Matrices, ends: Ends) -> Tensor:
    """Multiply each row of `x` [rows, in] by the matrices of its group. Return [rows, out]. `ends`: where the rows of
    each group end; the last group ends at the last row.
    """
    return _GroupedLinear.apply(x, ends, matrices.scale, *matrices[:3])  # pyright: ignore[reportReturnType]


class _GroupedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ends: Ends, scale: float, weight: Tensor, a: Tensor | None, b: Tensor | None
    ) -> Tensor:
        out, low = Matrices(weight, a, b, scale).forward(x, ends)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:5]) else None, low, weight, a, b)
        ctx.ends, ctx.scale = ends, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, low, weight, a, b = ctx.saved_tensors
        matrices, grad, ends = Matrices(weight, a, b, ctx.scale), grad.contiguous(), ctx.ends
        if ctx.needs_input_grad[0]:
            grad_x, grad_low = matrices.backward(grad, ends)
        else:
            grad_x, grad_low = None, matrices.backward_low(grad, ends)
        return grad_x, None, None, *matrices.gradients(grad, x, low, grad_low, ends, ctx.needs_input_grad[3:])


def products(x: Tensor, matrices: Tensor, ends: Ends) -> Tensor:
    """Multiply rows `x` [rows, in] by the matrix of their group in `matrices` [groups, in, out]: [rows, out]."""
    if isinstance(ends, Tensor) and not x.is_meta:
        return F.grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(len(x), matrices.shape[2])
    if not x.is_meta:
        for rows, matrix in zip(_groups(ends), matrices, strict=True):
            torch.mm(x[rows], matrix, out=out[rows])
    return out


def outer_products(grad: Tensor, x: Tensor, ends: Ends, weight: Tensor) -> Tensor:
    """Return the gradient of `weight` [groups, out, in] from rows `grad` [rows, out] and `x` [rows, in]."""
    if isinstance(ends, Tensor) and not x.is_meta:
        return F.grouped_mm(grad.t(), x, offs=ends)
    out = torch.empty_like(weight)
    if not x.is_meta:
        for rows, matrix in zip(_groups(ends), out, strict=True):
            torch.mm(grad[rows].t(), x[rows], out=matrix)
    return out


def is_grouped(x: Tensor, *widths: int) -> bool:
    """Return whether PyTorch multiplies groups of rows in a single kernel, which requires rows aligned to 16 bytes.
    GPUs of compute capability 9 and 10 have a kernel for bfloat16 (`_grouped_mm_cuda` of GroupedBlas.cpp at v2.11); on
    other GPUs `F.grouped_mm` loops over groups and synchronises in each iteration.
    """
    if any(width * x.element_size() % 16 for width in widths):
        return False
    if x.is_cuda:
        return x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    return x.dtype in (torch.float32, torch.bfloat16)


def _with_products(out: Tensor, x: Tensor, matrices: Tensor, ends: Ends) -> Tensor:
    """Add `products(x, matrices, ends)` to `out` [rows, out] in place, and return it."""
    if isinstance(ends, Tensor) or x.is_meta:
        return out.add_(products(x, matrices, ends))
    for rows, matrix in zip(_groups(ends), matrices, strict=True):
        out[rows].addmm_(x[rows], matrix)
    return out


def _groups(ends: Ends) -> list[slice]:
    """Return the range of rows of each group."""
    assert not isinstance(ends, Tensor), "ends are on the host"
    return [slice(*bounds) for bounds in pairwise((0, *ends))]
