"""Kernels of gated delta nets: the gated delta rule and the short convolution, by optional packages on CUDA.

Shape suffixes: n tokens, H value heads of this rank, h key heads (a divisor of H), K and V elements of a key and of a
value, c channels, t taps.

    fla            the gated delta rule by flash-linear-attention, in the dtype of its inputs but for sums
    causal_conv1d  convolution and SiLU in one launch, by causal-conv1d
    torch          `delta_rule` and `short_convolution`, on any device and in any precision

The packages take whole packs and start anew at each sequence, as those do. All ranks of a run have the same ones
(`packages.package_facts`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any, Literal, Protocol

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
"""Widest keys of fla: `chunk_gated_delta_rule_fwd_h` in fla/ops/common/chunk_delta_h.py. Its tests have values as wide
as keys.
"""
HEAD_MULTIPLE = 8
"""Elements that heads are multiples of. With odd numbers Triton reads wrong memory (`chunk_bwd_dv` in
fla/ops/common/chunk_o.py).
"""
TAPS = (2, 3, 4)
CHANNEL_MULTIPLE = 8
"""Elements that causal-conv1d loads at once: channels, strides and offsets are multiples of it (`causal_conv1d_fwd` in
csrc/causal_conv1d.cpp).
"""
MAX_TOKENS = 64 * 65535
"""Tokens of a block of causal-conv1d, times the blocks that CUDA allows in the second dim of a grid."""
MAX_ELEMENTS = 2**32
"""causal-conv1d computes places in memory as 32-bit numbers (`index_t` in csrc/causal_conv1d.h)."""


class Rule(Protocol):
    """The gated delta rule of each sequence by itself, see `delta_rule.delta_rule`: [n, H, V]."""

    def __call__(  # noqa: D102 (above)
        self,
        q_nhK: Tensor,
        k_nhK: Tensor,
        v_nHV: Tensor,
        decay_nH: Tensor,
        beta_nH: Tensor,
        sequences: Sequences,
    ) -> Tensor: ...


class Convolution(Protocol):
    """The short convolution of each sequence by itself, then SiLU, see `short_convolution.convolved`: [n, c]."""

    def __call__(self, x_nc: Tensor, weight_ct: Tensor, sequences: Sequences) -> Tensor: ...  # noqa: D102 (above)


def choose_rule(
    device: str,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    capability: tuple[int, int],
    installed: Collection[str],
) -> Literal["fla", "torch"]:
    """Return what computes the rule on a type of `device`, a GPU of that CUDA `capability`. `installed`: names of
    modules. In fp32, fla would multiply in TF32.
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
    """Return what computes the short convolution on a type of `device`, a GPU of that CUDA `capability`. `installed`:
    names of modules.
    """
    fits = channels % CHANNEL_MULTIPLE == 0 and taps in TAPS
    addressable = tokens <= MAX_TOKENS and tokens * channels <= MAX_ELEMENTS
    on_gpu = device == "cuda" and dtype in HALF and capability >= FLASH_CAPABILITY
    return "causal_conv1d" if fits and addressable and on_gpu and "causal_conv1d" in installed else "torch"


@lru_cache
def rule_for(device: torch.device, dtype: torch.dtype) -> Rule:
    """Return the gated delta rule for tensors on this device; which kernel runs depends on the widths of heads too."""
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
    """Return the short convolution for tensors on this device; which kernel runs depends on their sizes too."""
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
    """Return the modules that can be used on a GPU. fla is compiled by Triton, with the tools of PyTorch's compiler."""
    usable = [package.module for package in (FLA, CAUSAL_CONV1D) if not unusable(package, find(package))]
    if FLA.module in usable and not _compiles(device):
        usable.remove(FLA.module)
    return usable


def _compiles(device: torch.device) -> bool:
    return compiles_for(torch.empty(0, device=device))


def _function(package: OptionalPackage) -> Callable[..., Any]:
    """Return the first function that a package is required to have."""
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
    """The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464) by `function`, fla's
    `chunk_gated_delta_rule` (fla/ops/gated_delta_rule/chunk.py). It takes one pack, scales queries by 1 / sqrt(K), and
    shares key heads as `delta_rule` does. With bounds in host memory too, the host does not wait for the device.

    Its forward pass is repeated in the backward pass, as it would save normed queries and keys, values and the inverses
    of chunks (some 20 KiB for a token of a layer with 32 heads of 128), of which `delta_rule`, by which `--plan`
    measures memory, saves none.
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
    """The short convolution by `function`, causal-conv1d's `causal_conv1d_fn`
    (causal_conv1d/causal_conv1d_interface.py). Sequences are told apart by their numbers, which it takes for tensors
    [batch, channels, tokens] with channels side by side; the gradient of the output must be as its input.
    """
    x_1cn = _loadable(x_nc).unsqueeze(0).transpose(1, 2)
    out_1cn = function(x_1cn, weight_ct, seq_idx=sequences.numbers.unsqueeze(0), activation="silu")
    out_nc = out_1cn.transpose(1, 2).squeeze(0)
    if out_nc.requires_grad:
        out_nc.register_hook(_loadable)
    return out_nc


def _loadable(x_nc: Tensor) -> Tensor:
    """Return the tensor, or a copy, with channels side by side and rows that start at multiples of
    `CHANNEL_MULTIPLE` elements. Strides of a single row count, which `contiguous` leaves as they are.
    """
    (rows, channels), (stride, step) = x_nc.shape, x_nc.stride()
    starts = stride % CHANNEL_MULTIPLE == 0 and x_nc.storage_offset() % CHANNEL_MULTIPLE == 0
    if step == 1 and stride >= channels and starts and rows * stride <= MAX_ELEMENTS:
        return x_nc
    return x_nc.clone(memory_format=torch.contiguous_format)
