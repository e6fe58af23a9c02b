"""SwiGLU on GPUs in two Triton kernels, which read and write each element once and compute in fp32.

    forward    out = silu(gate) * up * weight
    backward   the gradients of gate and up, in their place, and, as a sum over the row, of weight

A program computes one row: gate and up [2 WIDTH] and, for experts, its routing weight. The width is a constant, so that
16 bytes are loaded at once, and the number of rows is that of programs, so that one kernel serves any number.

Import this module only where `platform.compiles_for` holds, which requires Triton.
"""

# pyright: basic, reportMissingImports=false
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

BLOCK = 1024
"""Elements of a step along a row. Each thread of 4 warps has 8 elements: 16 bytes in half precision."""


@triton.jit
def swiglu_forward(wide, weights, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row of `out` [rows, WIDTH] from `wide` [rows, 2 WIDTH] and `weights` [rows] or None."""
    row = tl.program_id(0).to(tl.int64)
    gates, outs = wide + row * (2 * WIDTH), out + row * WIDTH
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < WIDTH
        gate = tl.load(gates + at, mask=inside).to(tl.float32)
        up = tl.load(gates + WIDTH + at, mask=inside).to(tl.float32)
        result = gate / (1 + tl.exp(-gate)) * up
        if weights is not None:
            result *= tl.load(weights + row).to(tl.float32)
        tl.store(outs + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(wide, weights, grad, grad_weights, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Replace a row of `wide` [rows, 2 WIDTH] by its gradient, and write that of `weights` [rows], from `grad` [rows,
    WIDTH].
    """
    row = tl.program_id(0).to(tl.int64)
    grads, gates = grad + row * WIDTH, wide + row * (2 * WIDTH)
    products = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < WIDTH
        of_out = tl.load(grads + at, mask=inside, other=0).to(tl.float32)
        gate = tl.load(gates + at, mask=inside, other=0).to(tl.float32)
        up = tl.load(gates + WIDTH + at, mask=inside, other=0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-gate))
        if weights is not None:
            products += of_out * gate * sigmoid * up
            of_out *= tl.load(weights + row).to(tl.float32)
        of_gate = of_out * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(gates + at, of_gate.to(wide.dtype.element_ty), mask=inside)
        tl.store(gates + WIDTH + at, (of_out * gate * sigmoid).to(wide.dtype.element_ty), mask=inside)
    if weights is not None:
        tl.store(grad_weights + row, tl.sum(products).to(grad_weights.dtype.element_ty))


def forward(wide: Tensor, weights: Tensor | None) -> Tensor:
    """Return `mlp.swiglu_forward(wide, weights)`."""
    out = wide.new_empty(*wide.shape[:-1], wide.shape[-1] // 2)
    _launch(swiglu_forward, wide, weights, out)
    return out


def backward(grad: Tensor, wide: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return `mlp.swiglu_backward(grad, wide, weights)`."""
    wide, grad_weights = wide.contiguous(), None if weights is None else weights.new_empty(len(weights))
    _launch(swiglu_backward, wide, weights, grad.contiguous(), grad_weights)
    # Autograd does not see what kernels write: another backward pass must not use it.
    increment_version(wide)
    return wide.detach(), grad_weights


def _launch(kernel: Any, wide: Tensor, weights: Tensor | None, *others: Tensor | None) -> None:
    """Launch a program for each row."""
    width = wide.shape[-1] // 2
    weights = None if weights is None else weights.contiguous()
    if rows := wide.numel() // (2 * width):
        # With 8 warps a thread loads 4 elements: rows of other widths are not aligned to 16 bytes.
        warps = 4 if width % 8 == 0 else 8
        kernel[(rows,)](wide.contiguous(), weights, *others, width, BLOCK, num_warps=warps)
