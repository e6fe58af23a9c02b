"""Attention kernels for the segments of a pack.

Shape suffixes:
    n  query tokens
    K  key tokens
    H  query heads of this rank
    h  key/value heads of this rank, a divisor of H
    D  elements per head

    flash_attn_3  one launch for all segments, by FlashAttention-3 on Hopper (optional package)
    flash_attn    one launch for all segments, by flash-attn (optional package)
    torch_flash   one launch for all segments, by PyTorch's flash kernel
    bucketed      one call of PyTorch's fused attention per shape of segment, on any device and in any precision

The choice of a kernel is a pure function, which needs no GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.models.layers.packages import FLASH_ATTN, FLASH_ATTN_3, find, unusable

if TYPE_CHECKING:
    from megatron_hetero.models.layers.segments import PackedSegments


HALF = (torch.bfloat16, torch.float16)
# Limits of the flash kernel in PyTorch and in flash-attn 2: aten/src/ATen/native/transformers/cuda/flash_attn/
# flash_api.cpp, `mha_varlen_fwd`.
FLASH_CAPABILITY = (8, 0)
FLASH_HEAD_DIM = 256
FLASH_HEAD_MULTIPLE = 8
HOPPER = 9

KernelName = Literal["flash_attn_3", "flash_attn", "torch_flash", "bucketed"]
PACKAGES = {"flash_attn_3": FLASH_ATTN_3, "flash_attn": FLASH_ATTN}


class Kernel(Protocol):
    """A function that computes attention inside each segment: [n, H, D]. Scores are scaled by 1 / sqrt(D). In causal
    segments the last query is aligned with the last key.
    """

    def __call__(  # noqa: D102 (above)
        self, q_nHD: Tensor, k_KhD: Tensor, v_KhD: Tensor, segments: PackedSegments, *, causal: bool
    ) -> Tensor: ...


def choose_kernel(
    device: str, dtype: torch.dtype, head_dim: int, capability: tuple[int, int], installed: Collection[str]
) -> KernelName:
    """Return the kernel for a GPU of CUDA `capability` or another device. `installed`: names of usable packages."""
    fits = head_dim <= FLASH_HEAD_DIM and head_dim % FLASH_HEAD_MULTIPLE == 0
    if not fits or device != "cuda" or dtype not in HALF or capability < FLASH_CAPABILITY:
        return "bucketed"
    if "flash_attn_3" in installed and capability[0] == HOPPER:
        return "flash_attn_3"
    return "flash_attn" if "flash_attn" in installed else "torch_flash"


@lru_cache
def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Return the attention kernel for this device, dtype and number of elements per head."""
    if device.type != "cuda":
        return bucketed
    installed = [name for name, package in PACKAGES.items() if not unusable(package, find(package))]
    name = choose_kernel(device.type, dtype, head_dim, cuda_capability(device), installed)
    if name in PACKAGES:
        function: Any = importlib.import_module(PACKAGES[name].module).flash_attn_varlen_func
        return partial(flash_attn, function=function)
    return torch_flash if name == "torch_flash" else bucketed


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; without a GPU, return the lowest one that supports all kernels."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else FLASH_CAPABILITY


def torch_flash(
    q_nHD: Tensor,
    k_KhD: Tensor,
    v_KhD: Tensor,
    segments: PackedSegments,
    *,
    causal: bool,
    op: Callable[..., Any] | None = None,
) -> Tensor:
    """Compute attention by `op`, PyTorch's `_flash_attention_forward`. Its arguments are the same in all supported
    versions of torch, unlike those of the wrapper `torch.nn.attention.varlen`.

    The operator supports fewer key/value heads (and sums their gradients over the query heads that share them),
    requires int32 offsets and contiguous heads of a multiple of 8 elements, and aligns causal segments at the last
    query and key: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_varlen_fwd` and
    `mha_varlen_bwd`; mask.h in the same folder, `Mask::apply_mask`.
    """
    op = op or torch.ops.aten._flash_attention_forward
    out, *_ = op(
        q_nHD,
        k_KhD,
        v_KhD,
        segments.cu_seqlens_q,
        segments.cu_seqlens_kv,
        segments.max_seqlen_q,
        segments.max_seqlen_kv,
        0.0,  # dropout
        causal,
        False,  # return_debug_mask
        scale=q_nHD.shape[2] ** -0.5,
    )
    return out


def flash_attn(
    q_nHD: Tensor,
    k_KhD: Tensor,
    v_KhD: Tensor,
    segments: PackedSegments,
    *,
    causal: bool,
    function: Callable[..., Any],
) -> Tensor:
    """Compute attention by `function`, `flash_attn_varlen_func` of flash-attn 2 (flash_attn/flash_attn_interface.py),
    whose arguments have the same names from 2.1 to 2.8, or of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608;
    hopper/flash_attn_interface.py), whose earlier betas also return the logsumexp of the scores.
    """
    out: Any = function(
        q_nHD,
        k_KhD,
        v_KhD,
        cu_seqlens_q=segments.cu_seqlens_q,
        cu_seqlens_k=segments.cu_seqlens_kv,
        max_seqlen_q=segments.max_seqlen_q,
        max_seqlen_k=segments.max_seqlen_kv,
        softmax_scale=q_nHD.shape[2] ** -0.5,
        causal=causal,
    )
    return out[0] if isinstance(out, tuple) else out


def bucketed(
    q_nHD: Tensor,
    k_KhD: Tensor,
    v_KhD: Tensor,
    segments: PackedSegments,
    *,
    causal: bool,
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """Compute attention by `attend`, PyTorch's `scaled_dot_product_attention`, once per bucket of `segments`."""
    queries = [bucket.queries * bucket.segments for bucket in segments.buckets]
    keys = [bucket.keys * bucket.segments for bucket in segments.buckets]
    q_buckets = _ordered(q_nHD, segments.order).split(queries)
    k_buckets, v_buckets = (_ordered(x, segments.key_order).split(keys) for x in (k_KhD, v_KhD))
    outs = []
    for *inputs, bucket in zip(q_buckets, k_buckets, v_buckets, segments.buckets, strict=True):
        q, k, v = (x.unflatten(0, (bucket.segments, -1)).transpose(1, 2) for x in inputs)
        # Use a mask, since `is_causal` aligns the first query and key. A single query sees all keys and needs no mask.
        masked = causal and 1 < bucket.queries < bucket.keys
        mask = segments.causal_mask(bucket) if masked else None
        options = {"is_causal": causal and bucket.queries == bucket.keys, "enable_gqa": q.shape[1] != k.shape[1]}
        outs.append(attend(q, k, v, attn_mask=mask, **options).transpose(1, 2).flatten(0, 1))
    out, order = outs[0] if len(outs) == 1 else torch.cat(outs), segments.order
    return out if order is None else torch.empty_like(out).index_copy(0, order, out)


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(0, order)
