"""Attention kernels for the segments of a pack.

Shape suffixes:
    n  query tokens
    K  key tokens
    H  query heads of this rank
    h  key/value heads of this rank, a divisor of H
    D  elements per head

    flash_attn_3  one launch for all segments, by FlashAttention-3 on Hopper (optional package)
    cudnn         causal attention of long segments, by cuDNN on Hopper; other attention by one of the following
    flash_attn    one launch for all segments, by flash-attn (optional package)
    torch_flash   one launch for all segments, by PyTorch's flash kernel
    bucketed      one call of PyTorch's fused attention per shape of segment, on any device and in any precision

The choice of a kernel is a pure function, which needs no GPU. It may differ between ranks whose packs differ, because
kernels do not communicate.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.models.layers.cudnn_attention import Call, Form, attend, calls_for
from megatron_hetero.models.layers.packages import FLASH_ATTN, FLASH_ATTN_3, find, unusable
from megatron_hetero.models.layers.segments import PackedSegments

HALF = (torch.bfloat16, torch.float16)
# Limits of the flash kernel in PyTorch and in flash-attn 2: aten/src/ATen/native/transformers/cuda/flash_attn/
# flash_api.cpp, `mha_varlen_fwd`.
FLASH_CAPABILITY = (8, 0)
FLASH_HEAD_DIM = 256
FLASH_HEAD_MULTIPLE = 8
HOPPER = 9
# PyTorch's limits for cuDNN on Hopper (torch/nn/attention/varlen.py at v2.15), without smaller heads.
CUDNN_HEAD_DIMS, CUDNN_VERSION = range(64, 129, FLASH_HEAD_MULTIPLE), 91800

KernelName = Literal["flash_attn_3", "cudnn", "flash_attn", "torch_flash", "bucketed"]
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
    """Return the kernel for a GPU of CUDA `capability` or another device. `installed`: names of usable packages, and
    `cudnn` if usable. cuDNN is ahead of FlashAttention-2 on Hopper alone (huggingface/transformers pull request 48163).
    """
    fits = head_dim <= FLASH_HEAD_DIM and head_dim % FLASH_HEAD_MULTIPLE == 0
    if not fits or device != "cuda" or dtype not in HALF or capability < FLASH_CAPABILITY:
        return "bucketed"
    if "flash_attn_3" in installed and capability[0] == HOPPER:
        return "flash_attn_3"
    if "cudnn" in installed and capability[0] == HOPPER and head_dim in CUDNN_HEAD_DIMS:
        return "cudnn"
    return "flash_attn" if "flash_attn" in installed else "torch_flash"


@lru_cache
def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int, cudnn: bool = True) -> Kernel:
    """Return the attention kernel for this device, dtype and elements per head. `cudnn`: whether cuDNN may be used."""
    if device.type != "cuda":
        return bucketed
    installed = [name for name, package in PACKAGES.items() if not unusable(package, find(package))]
    form = cudnn_support(device)[0] if cudnn else None
    installed += [] if form is None else ["cudnn"]
    name = choose_kernel(device.type, dtype, head_dim, cuda_capability(device), installed)
    if form is not None and name == "cudnn":
        return partial(cudnn_or, form=form, other=kernel_for(device, dtype, head_dim, cudnn=False))
    if name in PACKAGES:
        function: Any = importlib.import_module(PACKAGES[name].module).flash_attn_varlen_func
        return partial(flash_attn, function=function)
    return torch_flash if name == "torch_flash" else bucketed


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; without a GPU, return the lowest one that supports all kernels."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else FLASH_CAPABILITY


@lru_cache
def cudnn_support(device: torch.device) -> tuple[Form | None, str]:
    """Return how cuDNN computes attention on this device, if it does, and a notice about it for the log."""
    if device.type != "cuda" or cuda_capability(device)[0] != HOPPER:
        return None, ""
    if not unusable(FLASH_ATTN_3, find(FLASH_ATTN_3)):  # `choose_kernel` prefers it.
        return None, ""
    version = torch.backends.cudnn.version() or 0
    # This argument is as old as the cache for plans of ragged calls.
    schema = torch.ops.aten._cudnn_attention_forward.default._schema
    form: Form = "ragged" if any(each.name == "seqused_k" for each in schema.arguments) else "dense"
    problem = cudnn_problem(form, device) if version >= CUDNN_VERSION else f"{CUDNN_VERSION} or newer works"
    if problem:
        return None, f"cuDNN {version} is not used for attention ({problem}): FlashAttention is used instead."
    return form, f"cuDNN {version} is used for causal attention of long segments, heads of 64 to 128 ({form} calls)."


def cudnn_problem(form: Form, device: torch.device, attend: Callable[..., Tensor] = attend) -> str:
    """Compute a small pack. Return why cuDNN is not usable: an error, or results that differ from those in fp32."""
    lengths, generator = (200, 57), torch.Generator().manual_seed(0)
    calls = (Call.ragged(257, 2, 200),) if form == "ragged" else tuple(map(Call.dense, lengths))
    drawn = (torch.randn(257, heads, 128, generator=generator) for heads in (4, 2, 2, 4))
    q, k, v, grad = (x.to(device, torch.bfloat16).requires_grad_() for x in drawn)
    segments = PackedSegments.of(lengths, device)
    try:
        with torch.enable_grad():
            outs = attend(q, k, v, segments, calls), bucketed(q.float(), k.float(), v.float(), segments, causal=True)
            ours, exact = ((out.detach(), *torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))) for out in outs)
    except RuntimeError as error:
        return f"{error}".splitlines()[0]
    errors = [float((x - y).float().norm() / y.float().norm()) for x, y in zip(ours, exact, strict=True)]
    # Half precision rounds by 0.4 %. Comparisons with NaN are false.
    return "" if all(error < 0.02 for error in errors) else f"its results differ by {max(errors):.1%}"


def cudnn_or(
    q_nHD: Tensor, k_KhD: Tensor, v_KhD: Tensor, segments: PackedSegments, *, causal: bool, form: Form, other: Kernel
) -> Tensor:
    """Compute attention by cuDNN if segments are long (`calls_for`), causal and with as many queries as keys (cuDNN
    aligns the first of both, so not under `cp`), and deterministic algorithms are not requested; else by `other`.

    Encoders' attention is left to `other`: windows are short, full attention is less than 1 % of a step, and without a
    causal mask cuDNN before 9.26 has wrong gradients for some lengths (sdp_utils.cpp of PyTorch at v2.15).
    """
    lengths, fits = segments.segments.queries, causal and not torch.are_deterministic_algorithms_enabled()
    fits = fits and lengths == segments.segments.keys
    if fits and (calls := calls_for(form, lengths, *q_nHD.shape[1:])):
        return attend(q_nHD, k_KhD, v_KhD, segments, calls)
    return other(q_nHD, k_KhD, v_KhD, segments, causal=causal)


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
    ordered = [_ordered(q_nHD, segments.order), *(_ordered(x, segments.key_order) for x in (k_KhD, v_KhD))]
    if len(segments.buckets) == 1:
        buckets = [ordered]
    else:
        queries = [bucket.queries * bucket.segments for bucket in segments.buckets]
        keys = [bucket.keys * bucket.segments for bucket in segments.buckets]
        buckets = zip(*(x.split(sizes) for x, sizes in zip(ordered, (queries, keys, keys), strict=True)), strict=True)
    outs = []
    for inputs, bucket in zip(buckets, segments.buckets, strict=True):
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
