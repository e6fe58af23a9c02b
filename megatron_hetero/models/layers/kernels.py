"""Packages that are used where they are installed in a version that is known to work. Nothing here needs a GPU.

`docs/installation.md` says what each brings and how it is installed; `setup.py` asks for the same versions.

What computes attention inside the segments of a pack, and which of it runs where.

Shape suffixes: n tokens of queries, K of keys, H heads of this rank, h of them for keys and values (a divisor of H),
D elements per head.

    flash_attn_3  one launch for all segments, by FlashAttention-3, which is for Hopper
    flash_attn    one launch for all segments, by the package flash-attn
    torch_flash   one launch for all segments, by the flash kernel that PyTorch brings
    bucketed      one call of PyTorch's fused attention for all segments of one shape, on any device and in any
                  precision
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn.functional as F
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from torch import Tensor

if TYPE_CHECKING:
    from megatron_hetero.models.layers.segments import PackedSegments, ShapeBucket


@dataclass(frozen=True)
class OptionalPackage:
    """What is asked of a package: names for pip and for Python, and the versions that are known to work.

    `imports`: modules, and names in them written `module:name`, that have to be there.
    """

    name: str
    module: str
    versions: str
    imports: tuple[str, ...]


TRANSFORMER_ENGINE = OptionalPackage(
    # What megatron-core 0.16.1 asks for in its own extra `dev`.
    "transformer-engine[pytorch]",
    "transformer_engine",
    ">=2.9,<2.12",
    ("transformer_engine.pytorch:Linear", "transformer_engine.pytorch.fp8:fp8_autocast"),
)
FLASH_ATTN = OptionalPackage(
    # Causal attention is aligned at the last query and key from 2.1 on (flash-attn's README, "Changelog"). Version 4
    # shares the name `flash_attn` without having the function.
    "flash-attn",
    "flash_attn",
    ">=2.1,<3",
    ("flash_attn:flash_attn_varlen_func",),
)
FLASH_ATTN_3 = OptionalPackage(
    # All versions so far are betas of 3.0.0 (hopper/__init__.py in flash-attention's repository).
    "flash_attn_3",
    "flash_attn_interface",
    ">=3.0.0b1,<4",
    ("flash_attn_interface:flash_attn_varlen_func",),
)


@dataclass(frozen=True)
class Found:
    """A package as it is installed. `version`: None where it is not. `error`: why it cannot be imported."""

    version: str | None
    error: str = ""


@lru_cache
def find(package: OptionalPackage) -> Found:
    """Look for the package, and import it where it is installed."""
    if importlib.util.find_spec(package.module) is None:
        return Found(None)
    try:
        for place in package.imports:
            module, _, name = place.partition(":")
            getattr(importlib.import_module(module), name)
    except Exception as error:  # A build for another torch or CUDA fails with errors of many kinds.
        return Found(_version(package), f"{type(error).__name__}: {error}".splitlines()[0])
    return Found(_version(package))


def _version(package: OptionalPackage) -> str:
    """Or "?" where nothing says."""
    version = getattr(importlib.import_module(package.module), "__version__", None)
    try:
        return version or importlib.metadata.version(package.name.partition("[")[0])
    except importlib.metadata.PackageNotFoundError:
        return "?"


def unusable(package: OptionalPackage, found: Found) -> str:
    """Why the package is not used, as the rest of a sentence about it; empty where it is."""
    if found.version is None:
        return "is not installed"
    if not _accepts(package.versions, found.version):
        return f"{found.version} is installed, and {_in_words(package.versions)} is known to work"
    return f"{found.version} is installed, but cannot be imported ({found.error})" if found.error else ""


def notices(found: Sequence[tuple[OptionalPackage, Found]]) -> list[str]:
    """A line for each package that is installed and not used. Packages that are not installed need none."""
    lines = [(package, unusable(package, f)) for package, f in found if f.version is not None]
    return [f"{package.module} {why}: PyTorch is used instead." for package, why in lines if why]


def _accepts(versions: str, version: str) -> bool:
    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _in_words(versions: str) -> str:
    """
    >>> _in_words(">=2.9,<2.12")
    '2.9 or newer, below 2.12'
    """
    lowest, below = versions.split(",")
    return f"{lowest.removeprefix('>=')} or newer, below {below.removeprefix('<')}"


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
    """Attention inside each segment of `segments`, [n, H, D]. Causal segments end with their last query and last key.

    `scale`: of the scores; 1 / sqrt(D) where None.
    """

    def __call__(  # noqa: D102 (above)
        self,
        q_nHD: Tensor,
        k_KhD: Tensor,
        v_KhD: Tensor,
        segments: PackedSegments,
        *,
        causal: bool,
        scale: float | None,
    ) -> Tensor: ...


def choose_kernel(
    device: str, dtype: torch.dtype, head_dim: int, capability: tuple[int, int], installed: Collection[str]
) -> KernelName:
    """Which kernel runs on a type of `device`, of the CUDA `capability` where it is a GPU.

    `installed`: the names of those `PACKAGES` that are.
    """
    fits = device == "cuda" and dtype in HALF and head_dim <= FLASH_HEAD_DIM and capability >= FLASH_CAPABILITY
    if not fits:
        return "bucketed"
    if "flash_attn_3" in installed and capability[0] == HOPPER:
        return "flash_attn_3"
    return "flash_attn" if "flash_attn" in installed else "torch_flash"


@lru_cache
def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel for tensors on this device."""
    if device.type != "cuda":
        return bucketed
    installed = [name for name, package in PACKAGES.items() if not unusable(package, find(package))]
    name = choose_kernel(device.type, dtype, head_dim, cuda_capability(device), installed)
    if name == "flash_attn_3":
        from flash_attn_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        return partial(flash_attn_3, function=flash_attn_varlen_func)
    if name == "flash_attn":
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        return partial(flash_attn, function=flash_attn_varlen_func)
    return torch_flash if name == "torch_flash" else bucketed


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU. Tensors on CUDA that only pretend (`FakeTensorMode`) are on a GPU of the oldest kind
    that has all kernels.
    """
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else FLASH_CAPABILITY


def torch_flash(
    q_nHD: Tensor,
    k_KhD: Tensor,
    v_KhD: Tensor,
    segments: PackedSegments,
    *,
    causal: bool,
    scale: float | None,
    op: Callable[..., Any] | None = None,
) -> Tensor:
    """By `op`, PyTorch's `_flash_attention_forward`, which `torch.nn.attention.varlen` rests on. That wrapper changed
    between the supported versions of torch, the operator takes the same arguments in all of them.

    It takes fewer heads for keys and values, in the backward pass too (their gradients are summed over the query heads
    that share them), wants int32 offsets, elements of a head side by side and a multiple of 8 of them, and aligns
    causal segments at the last query and key: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
    `mha_varlen_fwd` and `mha_varlen_bwd`; mask.h in the same folder, `Mask::apply_mask`.
    """
    op = op or torch.ops.aten._flash_attention_forward
    dim = q_nHD.shape[2]
    out, *_ = op(
        *map(_padded, (q_nHD, k_KhD, v_KhD)),
        segments.cu_seqlens_q,
        segments.cu_seqlens_kv,
        segments.max_seqlen_q,
        segments.max_seqlen_kv,
        0.0,  # dropout
        causal,
        False,  # return_debug_mask
        scale=dim**-0.5 if scale is None else scale,
    )
    return _cropped(out, dim)


def _padded(x: Tensor) -> Tensor:
    """Heads as wide as a kernel wants them."""
    padding = -x.shape[-1] % FLASH_HEAD_MULTIPLE
    return F.pad(x, (0, padding)) if padding else x


def _cropped(x: Tensor, dim: int) -> Tensor:
    """Heads of `dim` elements, without padding."""
    return x if x.shape[-1] == dim else x[..., :dim]


def flash_attn_3(
    q_nHD: Tensor,
    k_KhD: Tensor,
    v_KhD: Tensor,
    segments: PackedSegments,
    *,
    causal: bool,
    scale: float | None,
    function: Callable[..., Any],
) -> Tensor:
    """By `function`, the `flash_attn_varlen_func` of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608;
    hopper/flash_attn_interface.py). Earlier betas of 3.0.0 return the logarithm of the softmax's sum besides.
    """
    dim = q_nHD.shape[2]
    q_nHD, k_KhD, v_KhD = map(_padded, (q_nHD, k_KhD, v_KhD))
    scale = dim**-0.5 if scale is None else scale
    found: Any = flash_attn(q_nHD, k_KhD, v_KhD, segments, causal=causal, scale=scale, function=function)
    return _cropped(found[0] if isinstance(found, tuple) else found, dim)


def flash_attn(
    q_nHD: Tensor,
    k_KhD: Tensor,
    v_KhD: Tensor,
    segments: PackedSegments,
    *,
    causal: bool,
    scale: float | None,
    function: Callable[..., Tensor],
) -> Tensor:
    """By `function`, the `flash_attn_varlen_func` of flash-attn 2, whose arguments kept their names from 2.1 to 2.8
    (flash_attn/flash_attn_interface.py at these tags). It pads heads by itself.
    """
    return function(
        q_nHD,
        k_KhD,
        v_KhD,
        cu_seqlens_q=segments.cu_seqlens_q,
        cu_seqlens_k=segments.cu_seqlens_kv,
        max_seqlen_q=segments.max_seqlen_q,
        max_seqlen_k=segments.max_seqlen_kv,
        softmax_scale=scale,
        causal=causal,
    )


def bucketed(
    q_nHD: Tensor,
    k_KhD: Tensor,
    v_KhD: Tensor,
    segments: PackedSegments,
    *,
    causal: bool,
    scale: float | None,
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """By `attend`, PyTorch's `scaled_dot_product_attention`, called once for each bucket of `segments`."""
    queries = [bucket.queries * bucket.segments for bucket in segments.buckets]
    keys = [bucket.keys * bucket.segments for bucket in segments.buckets]
    q_parts = _ordered(q_nHD, segments.order).split(queries)
    k_parts, v_parts = (_ordered(x, segments.key_order).split(keys) for x in (k_KhD, v_KhD))
    inputs = zip(q_parts, k_parts, v_parts, segments.buckets, strict=True)
    parts = [_bucket(q, k, v, bucket, segments, causal, scale, attend) for q, k, v, bucket in inputs]
    out, order = parts[0] if len(parts) == 1 else torch.cat(parts), segments.order
    return out if order is None else torch.empty_like(out).index_copy(0, order, out)


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(0, order)


def _bucket(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: ShapeBucket,
    segments: PackedSegments,
    causal: bool,
    scale: float | None,
    attend: Callable[..., Tensor],
) -> Tensor:
    q, k, v = (x.unflatten(0, (bucket.segments, -1)).transpose(1, 2) for x in (q, k, v))
    # `is_causal` of this function aligns at the first query and key. The one query of a segment sees all its keys.
    masked = causal and 1 < bucket.queries < bucket.keys
    out = attend(
        q,
        k,
        v,
        attn_mask=segments.causal_mask(bucket) if masked else None,
        is_causal=causal and bucket.queries == bucket.keys,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)
