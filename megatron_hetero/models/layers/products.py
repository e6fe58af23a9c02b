"""Matrix products, by the library that is fastest at them; and those that give gradients of weights.

On a CPU PyTorch takes MKL for fp32, which on processors of other makers than Intel uses half of their vectors: on a
Zen 5 core it reaches 97 GFLOP/s where oneDNN, which PyTorch brings too, reaches 220. oneDNN makes a kernel for each new
shape, in about a millisecond, and so is asked for products that a few layers repay that with.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

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
