"""Kernels of gated delta nets: the gated delta rule and the short convolution, from optional packages on CUDA.

Shape suffixes:
    n  tokens
    h  key heads of this rank, each with K elements
    H  value heads of this rank, a multiple of h, each with V elements
    c  channels
    t  taps

    fla            the gated delta rule by flash-linear-attention, with sums in fp32 and the rest in the dtype of inputs
    causal_conv1d  convolution and SiLU in one launch, by causal-conv1d
    torch          `delta_rule` and `short_convolution`, on any device and in any precision

All kernels process whole packs, and reset the state at each sequence. All ranks of a run use the same packages
(`packages.package_facts`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_hetero.groups.platform import compiles_for
from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.kernels import FLASH_CAPABILITY, HALF, cuda_capability
from megatron_hetero.models.layers.packages import CAUSAL_CONV1D, FLA, OptionalPackage, find, unusable
from megatron_hetero.models.layers.recompute import recompute
from megatron_hetero.models.layers.sequences import Sequences
from megatron_hetero.models.layers.short_convolution import convolved

MAX_HEAD_DIM = 256
"""Maximum key width of fla: `chunk_gated_delta_rule_fwd_h` in fla/ops/common/chunk_delta_h.py. fla's tests use
values of the same width as keys.
"""
HEAD_MULTIPLE = 8
"""Head widths must be multiples of this number: with odd widths Triton reads wrong memory (`chunk_bwd_dv` in
fla/ops/common/chunk_o.py).
"""
TAPS = (2, 3, 4)
CHANNEL_MULTIPLE = 8
"""Elements that causal-conv1d loads at once. Channels, strides and offsets must be multiples of this number
(`causal_conv1d_fwd` in csrc/causal_conv1d.cpp).
"""
MAX_TOKENS = 64 * 65535
"""Maximum number of tokens for causal-conv1d: its tokens per block times the limit of the second dim of a CUDA grid."""
MAX_ELEMENTS = 2**32
"""Maximum number of elements for causal-conv1d, whose offsets have 32 bits (`index_t` in csrc/causal_conv1d.h)."""


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequences], Tensor]
"""A function with the arguments of `delta_rule.delta_rule` that applies the rule along each sequence: [n, H, V]."""
Convolution = Callable[[Tensor, Tensor, Sequences], Tensor]
"""A function with the arguments of `short_convolution.convolved` that applies convolution and SiLU: [n, c]."""


def choose_rule(
    device: str,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    capability: tuple[int, int],
    installed: Collection[str],
) -> Literal["fla", "torch"]:
    """Return the kernel of the gated delta rule for a device type and a GPU of a CUDA `capability`. `installed`: names
    of usable modules. fla is not used in fp32, which it would multiply in TF32.
    """
    fits = all(dim <= MAX_HEAD_DIM and dim % HEAD_MULTIPLE == 0 for dim in (key_dim, value_dim))
    on_gpu = device == "cuda" and dtype in HALF and capability >= FLASH_CAPABILITY
    return "fla" if fits and on_gpu and "fla" in installed else "torch"


def choose_convolution(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    channels: int,
    taps: int,
    capability: tuple[int, int],
    installed: Collection[str],
) -> Literal["causal_conv1d", "torch"]:
    """Return the kernel of the short convolution for a device type and a GPU of a CUDA `capability`. `installed`: names
    of usable modules.
    """
    fits = channels % CHANNEL_MULTIPLE == 0 and taps in TAPS
    addressable = tokens <= MAX_TOKENS and tokens * channels <= MAX_ELEMENTS
    on_gpu = device == "cuda" and dtype in HALF and capability >= FLASH_CAPABILITY
    return "causal_conv1d" if fits and addressable and on_gpu and "causal_conv1d" in installed else "torch"


@lru_cache
def rule_for(device: torch.device, dtype: torch.dtype) -> Rule:
    """Return a function for the gated delta rule on this device, which chooses a kernel by the widths of heads."""
    if device.type != "cuda":
        return delta_rule
    capability, installed = cuda_capability(device), _installed(device)

    def rule(
        q_nhK: Tensor, k_nhK: Tensor, v_nHV: Tensor, decay_nH: Tensor, beta_nH: Tensor, sequences: Sequences
    ) -> Tensor:
        widths = q_nhK.shape[-1], v_nHV.shape[-1]
        if choose_rule(device.type, dtype, *widths, capability, installed) == "torch":
            return delta_rule(q_nhK, k_nhK, v_nHV, decay_nH, beta_nH, sequences)
        return fla_rule(q_nhK, k_nhK, v_nHV, decay_nH, beta_nH, sequences, function=_function(FLA))

    return rule


@lru_cache
def convolution_for(device: torch.device, dtype: torch.dtype) -> Convolution:
    """Return a function for the short convolution on this device, which chooses a kernel by the sizes of its inputs."""
    if device.type != "cuda":
        return convolved
    capability, installed = cuda_capability(device), _installed(device)

    def convolution(x_nc: Tensor, weight_ct: Tensor, sequences: Sequences) -> Tensor:
        (tokens, channels), taps = x_nc.shape, weight_ct.shape[1]
        if choose_convolution(device.type, dtype, tokens, channels, taps, capability, installed) == "torch":
            return convolved(x_nc, weight_ct, sequences)
        return conv1d_convolution(x_nc, weight_ct, sequences, function=_function(CAUSAL_CONV1D))

    return convolution


def _installed(device: torch.device) -> list[str]:
    """Return the names of the modules that are usable on a GPU. fla is compiled by Triton, which needs the tools of
    PyTorch's compiler.
    """
    usable = [package.module for package in (FLA, CAUSAL_CONV1D) if not unusable(package, find(package))]
    if FLA.module in usable and not _compiles(device):
        usable.remove(FLA.module)
    return usable


def _compiles(device: torch.device) -> bool:
    return compiles_for(torch.empty(0, device=device))


def _function(package: OptionalPackage) -> Callable[..., Any]:
    """Return the first function among the required imports of `package`."""
    module, _, name = package.imports[0].partition(":")
    return getattr(importlib.import_module(module), name)


def fla_rule(
    q_nhK: Tensor,
    k_nhK: Tensor,
    v_nHV: Tensor,
    decay_nH: Tensor,
    beta_nH: Tensor,
    sequences: Sequences,
    *,
    function: Callable[..., Any],
) -> Tensor:
    """Apply the gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464) by `function`, fla's
    `chunk_gated_delta_rule` (fla/ops/gated_delta_rule/chunk.py). Like `delta_rule` it scales queries by 1 / sqrt(K) and
    shares key heads. The bounds of sequences are also passed in host memory, so that the host does not wait for the
    device.

    The backward pass recomputes the forward pass. Otherwise fla would save normed queries and keys, values and inverses
    of chunks (about 20 KiB per token of a layer with 32 heads of 128 elements). `delta_rule`, with which `--plan`
    measures memory, saves none of these tensors.
    """

    def rule(*inputs_n: Tensor) -> Tensor:
        inputs = dict(zip(("q", "k", "v", "g", "beta"), (x.unsqueeze(0) for x in inputs_n), strict=True))
        bounds = {"cu_seqlens": sequences.cu_seqlens, "cu_seqlens_cpu": sequences.host_cu_seqlens}
        out_1nHV, _ = function(**inputs, **bounds, use_qk_l2norm_in_kernel=True)
        return out_1nHV.squeeze(0)

    return recompute(rule, q_nhK, k_nhK, v_nHV, decay_nH, beta_nH)


def conv1d_convolution(
    x_nc: Tensor, weight_ct: Tensor, sequences: Sequences, *, function: Callable[..., Any]
) -> Tensor:
    """Apply the short convolution by `function`, causal-conv1d's `causal_conv1d_fn`
    (causal_conv1d/causal_conv1d_interface.py). It distinguishes sequences by `seq_idx`, which requires tensors
    [batch, channels, tokens] with contiguous channels, also for the gradient of the output.
    """
    x_1cn = _loadable(x_nc).unsqueeze(0).transpose(1, 2)
    out_1cn = function(x_1cn, weight_ct, seq_idx=sequences.numbers.unsqueeze(0), activation="silu")
    out_nc = out_1cn.transpose(1, 2).squeeze(0)
    if out_nc.requires_grad:
        out_nc.register_hook(_loadable)
    return out_nc


def _loadable(x_nc: Tensor) -> Tensor:
    """Return `x_nc`, or a copy if needed, with contiguous channels and rows that start at multiples of
    `CHANNEL_MULTIPLE` elements. Strides matter even for a single row, where `contiguous` does not change them.
    """
    (rows, channels), (stride, step) = x_nc.shape, x_nc.stride()
    starts = stride % CHANNEL_MULTIPLE == 0 and x_nc.storage_offset() % CHANNEL_MULTIPLE == 0
    if step == 1 and stride >= channels and starts and rows * stride <= MAX_ELEMENTS:
        return x_nc
    return x_nc.clone(memory_format=torch.contiguous_format)
