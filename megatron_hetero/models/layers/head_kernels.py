"""Norms and rotary embedding of heads on GPUs, in one Triton kernel each way, which computes in fp32.

A tile is a group of a token: QUERIES query heads, a key and a value of DIM elements, of which WIDTH are rotated. HEADS
is a power of two from QUERIES + 2 on, BLOCK from DIM on. Import this module only where `platform.compiles_for` holds.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_hetero.models.layers.compiled import NormWeights

WARPS = 2048
"""Maximum warps of a backward pass, whose programs add up gradients of the norms' weights: as many as run at once."""


@triton.jit
def _gains(q_weight, k_weight, offset, head, at, QUERIES: tl.constexpr, DIM: tl.constexpr):
    of_q = tl.load(q_weight + at, mask=at < DIM, other=0).to(tl.float32)
    of_k = tl.load(k_weight + at, mask=at < DIM, other=0).to(tl.float32)
    return tl.where(head < QUERIES, of_q, of_k) + offset


@triton.jit
def _sines(sines, token, at, WIDTH: tl.constexpr):
    """Load sines, the first half negated; zeros where nothing is rotated."""
    sine = tl.load(sines + token * WIDTH + at, mask=at < WIDTH, other=0)
    return tl.where(at < WIDTH // 2, -sine, sine)


@triton.jit
def heads_forward(
    mixed, cosines, sines, q_weight, k_weight, row_stride, group_stride, eps, offset, q, k,
    QUERIES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a group of `q` [n, G * QUERIES, DIM] and of `k` [n, G, DIM]."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    other = tl.where(at < WIDTH, (at + WIDTH // 2) % WIDTH, at)
    inside, heads = (head <= QUERIES) & (at < DIM), mixed + token * row_stride + group * group_stride + head * DIM
    x = tl.load(heads + at, mask=inside, other=0).to(tl.float32)
    y = tl.load(heads + other, mask=inside, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
    cosine = tl.load(cosines + token * WIDTH + at, mask=at < WIDTH, other=1)
    turned = x * _gains(q_weight, k_weight, offset, head, at, QUERIES, DIM) * cosine
    turned += y * _gains(q_weight, k_weight, offset, head, other, QUERIES, DIM) * _sines(sines, token, at, WIDTH)
    out, row = (turned * scale).to(q.dtype.element_ty), token * tl.num_programs(1) + group
    tl.store(q + (row * QUERIES + head) * DIM + at, out, mask=inside & (head < QUERIES))
    tl.store(k + row * DIM + at + 0 * head, out, mask=inside & (head == QUERIES))


@triton.jit(do_not_specialize=["rows"])
def heads_backward(
    mixed, cosines, sines, q_weight, k_weight, row_stride, group_stride, eps, offset,
    grad_q, grad_k, grad_v, grad, sums, rows, groups,
    QUERIES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `grad` [n, G, QUERIES + 2, DIM] of `mixed`, and a program's partial sums of the gradients of both weights,
    `sums` [programs, 2, DIM]. `rows`: n * G.
    """
    head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    other = tl.where(at < WIDTH, (at + WIDTH // 2) % WIDTH, at)
    inside, is_query, is_key = (head < QUERIES + 2) & (at < DIM), (head < QUERIES) & (at < DIM), head == QUERIES
    is_key &= at < DIM
    gain = _gains(q_weight, k_weight, offset, head, at, QUERIES, DIM)
    of_gains = tl.zeros([HEADS, BLOCK], tl.float32)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        token = row // groups
        q, k, v = grad_q + (row * QUERIES + head) * DIM, grad_k + row * DIM + 0 * head, grad_v + row * DIM + 0 * head
        g = tl.load(q + at, mask=is_query, other=0) + tl.load(k + at, mask=is_key, other=0)
        g = (g + tl.load(v + at, mask=inside & (head > QUERIES), other=0)).to(tl.float32)
        y = tl.load(q + other, mask=is_query, other=0) + tl.load(k + other, mask=is_key, other=0)
        heads = mixed + token * row_stride + row % groups * group_stride + head * DIM
        x = tl.load(heads + at, mask=inside & (head <= QUERIES), other=0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
        cosine = tl.load(cosines + token * WIDTH + at, mask=at < WIDTH, other=1)
        unit, turned = x * scale, g * cosine + y.to(tl.float32) * _sines(sines, token, other, WIDTH)
        of_gains += turned * unit
        mean = tl.sum(turned * gain * unit, axis=1, keep_dims=True) / DIM
        of_x = tl.where(head <= QUERIES, (turned * gain - unit * mean) * scale, g)
        tl.store(grad + (row * (QUERIES + 2) + head) * DIM + at, of_x.to(grad.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    places, inside = sums + tl.program_id(0) * 2 * DIM + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < DIM
    tl.store(places, tl.sum(tl.where(is_query, of_gains, 0), axis=0), mask=inside)
    tl.store(places + DIM, tl.sum(tl.where(is_key, of_gains, 0), axis=0), mask=inside)


def forward(mixed: Tensor, *of_heads: Any) -> tuple[Tensor, ...]:
    """Return queries and keys like `rotary.rotated_heads`. `of_heads`: see `arguments`."""
    inputs, sizes = arguments(mixed, *of_heads)
    tokens, groups = len(inputs[1]), mixed.shape[-2]
    outs = tuple(mixed.new_empty(tokens, groups * heads, sizes["DIM"]) for heads in (sizes["QUERIES"], 1))
    heads_forward[(tokens, groups)](*inputs, *outs, **sizes)
    return outs


def backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, mixed: Tensor, *of_heads: Any) -> tuple[Tensor, ...]:
    """Return the gradients of `mixed`, [S, G, heads of a group, D], and of both weights; see `forward`."""
    inputs, sizes = arguments(mixed, *of_heads)
    groups, dim, rows = mixed.shape[-2], sizes["DIM"], len(grad_v) * mixed.shape[-2]
    grad = mixed.new_empty(len(mixed), groups, sizes["QUERIES"] + 2, dim)
    grad[len(grad_v) :].zero_()
    sums = inputs[1].new_empty(min(WARPS // sizes["num_warps"], rows), 2, dim)
    grads = (x.contiguous() for x in (grad_q, grad_k, grad_v))
    heads_backward[(len(sums),)](*inputs, *grads, grad, sums, rows, groups, **sizes)
    return grad, *sums.sum(dim=0).to(inputs[3].dtype).unbind()


def arguments(
    mixed: Tensor, cosines: Tensor, sines: Tensor, dim: int, q_norm: NormWeights, k_norm: NormWeights
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Return the first arguments of both kernels, their constants, and how many warps run a program."""
    assert q_norm[1:] == k_norm[1:] and q_norm.bias is None, "root-mean-square norms that differ only in weights"
    weights, strides = (q_norm.weight, k_norm.weight), (mixed.stride(0), mixed.stride(-2))
    queries, width = mixed.shape[-1] // dim - 2, cosines.shape[1]
    heads, block = triton.next_power_of_2(queries + 2), triton.next_power_of_2(dim)
    sizes = {"QUERIES": queries, "DIM": dim, "WIDTH": width, "HEADS": heads, "BLOCK": block}
    sizes["num_warps"] = min(16, max(1, heads * block // 512))
    return (mixed, cosines, sines, *weights, *strides, q_norm.eps, q_norm.offset), sizes
