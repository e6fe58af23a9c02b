"""The gated delta rule of flash-linear-attention and the convolution of causal-conv1d.

Signatures: `chunk_gated_delta_rule` of fla-core 0.6.0, fla/ops/gated_delta_rule/chunk.py; `causal_conv1d_fn` of
causal-conv1d 1.6.0 to 1.7.0, causal_conv1d/causal_conv1d_interface.py. Checks: those of these functions and of the
kernels below them, but for device and dtype; for the convolution `causal_conv1d_fwd` and `causal_conv1d_bwd` in
csrc/causal_conv1d.cpp, and that its vectors of 8 elements are aligned. Results: by definition, token by token, in the
precision of the inputs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR = 8


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The outputs [1, T, HV, V], and no state. Rows in no sequence are NaN, for what was in memory."""
    unused = (initial_state, output_final_state, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first)
    assert unused == (None, False, False, False, False), "not what this stands in for"
    assert (chunk_indices, cp_context, kwargs) == (None, None, {}), "not what this stands in for"
    assert q.dim() == k.dim() == v.dim() == 4 and q.shape == k.shape, "q and k must have the same number of heads"
    (batch, tokens, heads, width), (value_heads, value_width) = k.shape, v.shape[2:]
    assert v.shape[:2] == (batch, tokens) and g.shape == beta.shape == (batch, tokens, value_heads)
    assert value_heads % heads == 0, "For GVA, num_v_heads must be evenly divisible by num_heads"
    assert width <= 256, "current kernel does not support head dimension larger than 256."
    assert q.dtype == k.dtype == v.dtype, "tl.dot takes operands of one dtype"
    assert g.dtype.itemsize >= 4, "decays are added up in their own dtype"
    assert cu_seqlens is not None and cu_seqlens_cpu is not None and batch == 1
    assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.long and cu_seqlens_cpu.device.type == "cpu"
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(value_heads // heads, dim=2) for x in (q, k))
    q = q * (width**-0.5 if scale is None else scale)
    rows: list[Tensor] = []
    for first, end in pairwise(cu_seqlens_cpu.tolist()):
        state = v.new_zeros(value_heads, width, value_width)
        for t in range(first, end):
            state = state * g[0, t, :, None, None].exp()
            change = beta[0, t, :, None] * (v[0, t] - torch.einsum("hkv,hk->hv", state, k[0, t]))
            state = state + torch.einsum("hk,hv->hkv", k[0, t], change)
            rows.append(torch.einsum("hkv,hk->hv", state, q[0, t]))
    rows += [torch.full_like(v[0, 0], torch.nan)] * (tokens - len(rows))
    return torch.stack(rows).unsqueeze(0), None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The activated convolution of x [batch, dim, seqlen] with weight [dim, width], in strides as those of x."""
    unused = (bias, initial_states, return_final_states, final_states_out)
    assert unused == (None, None, False, None) and seq_idx is not None, "not what this stands in for"
    assert activation in (None, "silu", "swish"), "activation must be None, silu, or swish"
    return _CausalConv1d.apply(x, weight, seq_idx, activation)


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seq_idx: Tensor, activation: str | None) -> Tensor:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        check_layout(x, weight, seq_idx)
        ctx.save_for_backward(x, weight, seq_idx)
        ctx.activation = activation
        return torch.empty_like(x).copy_(_convolution(x, weight, seq_idx, activation))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,), (x, weight, seq_idx) = grads, ctx.saved_tensors
        if dout.stride(1) != 1:
            dout = dout.transpose(-1, -2).contiguous().transpose(-1, -2)
        strides = dout.stride(2) % VECTOR == 0 and dout.stride(0) % VECTOR == 0
        assert strides, "causal_conv1d with channel last layout requires strides to be multiples of 8"
        assert dout.storage_offset() % VECTOR == 0, "misaligned address"
        with torch.enable_grad():
            x, weight = (each.detach().requires_grad_() for each in (x, weight))
            out = _convolution(x, weight, seq_idx, ctx.activation)
        return *torch.autograd.grad(out, (x, weight), dout), None, None


def check_layout(x: Tensor, weight: Tensor, seq_idx: Tensor) -> None:
    """Check what the kernel for channels side by side needs."""
    batch, dim, seqlen = x.shape
    assert weight.shape[0] == dim and weight.dim() == 2, "weight must have shape (dim, width)"
    assert x.stride(1) == 1 and x.stride(2) > 1, "seq_idx is only supported for channel last layout"
    assert dim % 8 == 0, "causal_conv1d only supports channel dimension divisible by 8 for now"
    strides = x.stride(2) % VECTOR == 0 and x.stride(0) % VECTOR == 0
    assert strides, "causal_conv1d with channel last layout requires strides to be multiples of 8"
    assert x.storage_offset() % VECTOR == 0, "misaligned address"
    assert 2 <= weight.shape[1] <= 4, "causal_conv1d only supports width between 2 and 4"
    assert seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and seq_idx.shape == (batch, seqlen)


def _convolution(x: Tensor, weight: Tensor, seq_idx: Tensor, activation: str | None) -> Tensor:
    width, seqlen = weight.shape[1], x.shape[2]
    out = torch.zeros_like(x)
    for tap in range(width):
        shift = width - 1 - tap  # Tokens back.
        if shift < seqlen:
            same = seq_idx[:, shift:] == seq_idx[:, : seqlen - shift]
            earlier = x[:, :, : seqlen - shift] * same[:, None] * weight[:, tap, None].to(x.dtype)
            out = out + F.pad(earlier, (shift, 0))
    return out if activation is None else F.silu(out)
