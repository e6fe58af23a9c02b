"""Optional packages for gated delta nets on the GPU that computes nothing: how many kernels they launch and what memory
these take. Besides, attention by cuDNN, which is in torch for CUDA.

`chunk_gated_delta_rule` of fla-core 0.6 (fla/ops/gated_delta_rule/chunk.py), and `causal_conv1d_fn` of
causal-conv1d 1.6 (csrc/causal_conv1d.cpp).

Shape suffixes: n tokens, H value heads, h key heads, K and V elements of a key and of a value, C chunks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_hetero.models.layers import delta_kernels, kernels
from megatron_hetero.models.layers.packages import FLA
from tests.fake_cuda.device import FakeGpu

CHUNK = 64


@contextlib.contextmanager
def installed(gpu: FakeGpu, modules: Collection[str]) -> Iterator[None]:
    """Inside, the packages with these modules are installed; "cudnn ragged" and "cudnn dense": a form of attention."""
    choices = delta_kernels.rule_for, delta_kernels.convolution_for, kernels.kernel_for
    form = next((module.split()[1] for module in modules if module.startswith("cudnn ")), None)
    of_cudnn = {
        "cudnn_support": lambda _: (form, ""),
        "cuda_capability": lambda _: gpu.capability,
    }

    def function(package: Any) -> Any:
        return rule_of(gpu) if package is FLA else _convolution(gpu)

    for choice in choices:
        choice.cache_clear()
    with (
        mock.patch.multiple(delta_kernels, _installed=lambda _: list(modules), _function=function),
        mock.patch.multiple(kernels, **of_cudnn) if form else contextlib.nullcontext(),
    ):
        yield
    for choice in choices:
        choice.cache_clear()


def rule_of(gpu: FakeGpu) -> Any:
    """The gated delta rule of fla on `gpu`."""

    def chunk_gated_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens_cpu: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        lengths = cu_seqlens_cpu.diff()
        chunks = int((-(-lengths // CHUNK)).sum())
        return _Rule.apply(gpu, chunks, *(x.squeeze(0) for x in (q, k, v, g, beta))).unsqueeze(0), None  # pyright: ignore[reportOptionalMemberAccess]

    return chunk_gated_delta_rule


def _convolution(gpu: FakeGpu) -> Any:
    def causal_conv1d_fn(x: Tensor, weight: Tensor, **_: Any) -> Tensor:
        return _Convolution.apply(gpu, x, weight)  # pyright: ignore[reportReturnType]

    return causal_conv1d_fn


def _ran(gpu: FakeGpu, name: str, args: list[Tensor], *out: Tensor) -> Any:
    """Count a kernel that reads `args` and writes `out`."""
    gpu.usage.kernels[gpu.phase][name] += 1
    gpu.ran_compiled(1, args, list(out), apart=False)
    return out[0] if len(out) == 1 else out


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gpu: FakeGpu, chunks: int, q_nhK: Tensor, k_nhK: Tensor, v_nHV: Tensor, g_nH: Tensor, beta_nH: Tensor
    ) -> Tensor:
        of_token = q_nhK.shape[:2]
        normed = [
            _ran(gpu, "l2norm_fwd", [x], torch.empty_like(x), x.new_empty(of_token, dtype=torch.float32))
            for x in (q_nhK, k_nhK)
        ]
        (q, of_q), (k, of_k) = normed
        g = _ran(gpu, "chunk_local_cumsum", [g_nH], torch.empty_like(g_nH))
        solved = k.new_zeros(*g.shape, CHUNK)
        _ran(gpu, "kkt_solve", [k, g, beta_nH], solved)
        _, _, h, new = _inside(gpu, chunks, k, v_nHV, g, beta_nH, solved)
        out = _ran(gpu, "chunk_fwd_o", [q, k, new, h, g], torch.empty_like(v_nHV))
        ctx.save_for_backward(q, of_q, k, of_k, v_nHV, g, beta_nH, solved)
        ctx.gpu, ctx.chunks = gpu, chunks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gpu: FakeGpu = ctx.gpu
        q, of_q, k, of_k, v, g, beta, solved = ctx.saved_tensors
        w, _, h, new = _inside(gpu, ctx.chunks, k, v, g, beta, solved)
        dv = _ran(gpu, "chunk_bwd_dv_local", [q, k, g, grad], torch.empty_like(v))
        dh, dv = _ran(gpu, "bwd_dhu", [q, k, w, g, grad, dv], torch.empty_like(h), torch.empty_like(dv))
        wide = [torch.empty_like(w) for _ in range(3)]
        dq, dk, dw = _ran(gpu, "bwd_dqkwg", [q, k, new, w, g, h, dv, grad, dh], *wide, torch.empty_like(g))[:3]
        dg, (dq, dk) = torch.empty_like(g)[None].sum(0), (_of_key_heads(x, k) for x in (dq, dk))
        more, dv, db, dg2 = _ran(
            gpu,
            "wy_bwd",
            [k, v, beta, g, solved, dw, dv],
            torch.empty_like(w),
            torch.empty_like(v),
            torch.empty_like(beta),
            torch.empty_like(g),
        )
        dk.add_(_of_key_heads(more, k))
        dg.add_(dg2)
        dg = _ran(gpu, "chunk_local_cumsum", [dg], torch.empty_like(dg))
        dq, dk = (
            _ran(gpu, "l2norm_bwd", [x, scale, dx], torch.empty_like(x))
            for x, scale, dx in ((q, of_q, dq), (k, of_k, dk))
        )
        return None, None, dq, dk, dv, dg, db


def _inside(
    gpu: FakeGpu, chunks: int, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, solved: Tensor
) -> tuple[Tensor, ...]:
    """What each token reads and adds, states [C, H, K, V], and what each token adds to them."""
    (tokens, heads, value), key = v.shape, k.shape[2]
    w, u = _ran(gpu, "w_u_fwd", [k, v, beta, solved, g], k.new_empty(tokens, heads, key), torch.empty_like(v))
    states = k.new_empty(chunks, heads, key, value)
    return w, u, *_ran(gpu, "fwd_h", [k, w, u, g], states, torch.empty_like(u))


def _of_key_heads(x_nHK: Tensor, like_nhK: Tensor) -> Tensor:
    """Sum over the value heads of each key head."""
    tokens, heads, width = like_nhK.shape
    return x_nHK if x_nHK.shape[1] == heads else x_nHK.view(tokens, heads, -1, width).sum(2)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gpu: FakeGpu, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gpu = gpu
        return _ran(gpu, "causal_conv1d_fwd", [x, weight], torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        of_x = _ran(ctx.gpu, "causal_conv1d_bwd", [grad, x, weight], torch.empty_like(x), of_weight)[0]
        return None, of_x, of_weight.to(weight.dtype)
