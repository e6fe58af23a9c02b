"""Choice between the layers of Transformer Engine and the layers of this package in plain PyTorch."""

from __future__ import annotations

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.megatron import te_layers
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers.attention import TorchAttention
from megatron_hetero.models.layers.kernels import cuda_capability
from megatron_hetero.models.layers.linear import ColumnLinear, RowLinear
from megatron_hetero.models.layers.norms import LayerNorm, RMSNorm
from megatron_hetero.models.layers.packages import PACKAGES, TRANSFORMER_ENGINE, Status, find, unusable
from megatron_hetero.models.layers.parts import Backend

TORCH = Backend(ColumnLinear, RowLinear, RMSNorm, LayerNorm, TorchAttention)
"""Layers of this package, which run on any device."""


def choose_backend(choice: str, platform: Platform, found: Status | None = None) -> Backend:
    """Return the backend for `model.backend`: `torch`, `te` (Transformer Engine), or `auto`, which is `te` on CUDA if a
    version that is known to work is installed. `found`: status of Transformer Engine; default: the result of `find`.

    Raises:
        UserError: `te` is requested but not usable.
    """
    if choice == "torch":
        return TORCH
    why, install = f"does not run on the device {platform.device.type}", ""
    if platform.is_cuda:
        why = unusable(TRANSFORMER_ENGINE, found or find(TRANSFORMER_ENGINE))
        install = "install it as docs/installation.md says, or "
    if choice == "te" and why:
        raise UserError.at(
            "model.backend",
            found=f"te, but {TRANSFORMER_ENGINE.module} {why}",
            expected=f"Transformer Engine{TRANSFORMER_ENGINE.versions} on CUDA",
            fix=f"{install}use --model.backend torch",
        )
    return TORCH if why else te_backend(cuda_capability(platform.device))


def te_backend(capability: tuple[int, int]) -> Backend:
    """Return Transformer Engine's linear layers and norms, and its attention on GPUs of a `capability` for which it has
    a fused kernel for packed sequences.

    That kernel is cuDNN's, for Hopper and data-centre Blackwell (`nvte_get_fused_attn_backend` in
    transformer_engine/common/fused_attn/fused_attn.cpp, `get_attention_backend` in pytorch/attention/
    dot_product_attention/utils.py, both at v2.9; 2.20 with cuDNN 9.18.1 supports capability 12.0 too). On other GPUs
    Transformer Engine would call flash-attn, like `TorchAttention`.
    """
    te = te_layers()
    attention = te.core_attention() if capability[0] in (9, 10) else TorchAttention
    return Backend(
        te.column_parallel_linear(),
        te.row_parallel_linear(),
        te.layer_norm(rms_norm=True),
        te.layer_norm(rms_norm=False),
        attention,
    )


def backend_notices(choice: str, platform: Platform) -> list[str]:
    """Return one line for each installed optional package on CUDA: what it computes, or why it is not used."""
    if not platform.is_cuda:
        return []
    packages = [package for package in PACKAGES if choice != "torch" or package is not TRANSFORMER_ENGINE]
    installed = [(package, found) for package in packages if (found := find(package)).version is not None]
    return [
        f"{package.module} {why}: PyTorch is used instead."
        if (why := unusable(package, found))
        else f"{package.module} {found.version} is used for {package.use}."
        for package, found in installed
    ]
