"""Which layers modules are built from: Transformer Engine's where it is installed, else ours on plain PyTorch."""

from __future__ import annotations

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers.attention import TorchAttention
from megatron_hetero.models.layers.kernels import (
    FLASH_ATTN,
    FLASH_ATTN_3,
    TRANSFORMER_ENGINE,
    Found,
    cuda_capability,
    find,
    notices,
    unusable,
)
from megatron_hetero.models.layers.linear import ColumnLinear, RowLinear
from megatron_hetero.models.layers.norms import LayerNorm, RMSNorm
from megatron_hetero.models.layers.parts import Backend


class TorchSpecProvider:
    """Our linears, attention and norms: runs on any device."""

    def column_parallel_linear(self) -> type:
        """Our `ColumnLinear`."""
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        """Our `RowLinear`."""
        return RowLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Our `RMSNorm` or `LayerNorm`."""
        return RMSNorm if rms_norm else LayerNorm

    def core_attention(self) -> type:
        """Our `TorchAttention`."""
        return TorchAttention


def spec_provider(choice: str, platform: Platform, found: Found | None = None) -> Backend:
    """The provider for `model.backend`: `torch`, `te` (Transformer Engine), or `auto` (that one on CUDA, where it is
    installed in a version that is known to work).

    `found`: the Transformer Engine that is installed; looked for where None. Raises `UserError` where `te` is asked for
    and cannot be had.
    """
    if choice == "torch" or (choice == "auto" and not platform.is_cuda):
        return TorchSpecProvider()
    why = unusable(TRANSFORMER_ENGINE, found or find(TRANSFORMER_ENGINE)) if platform.is_cuda else ""
    if choice == "te" and (why or not platform.is_cuda):
        raise _no_transformer_engine(why, platform)
    return TorchSpecProvider() if why else te_provider(cuda_capability(platform.device))


def te_provider(capability: tuple[int, int]) -> Backend:
    """Transformer Engine's linears and norms, and its attention on GPUs of a `capability` where it has a kernel of its
    own for packed sequences.

    That is cuDNN's, on Hopper and the Blackwell of data centres (`nvte_get_fused_attn_backend` in
    transformer_engine/common/fused_attn/fused_attn.cpp, `get_attention_backend` in pytorch/attention/
    dot_product_attention/utils.py, both at v2.9). Elsewhere it would call flash-attn, which ours does too.
    """
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    class TransformerEngineSpecs(TESpecProvider):
        def core_attention(self) -> type:
            return super().core_attention() if capability[0] in (9, 10) else TorchAttention

    return TransformerEngineSpecs()


def backend_notices(choice: str, platform: Platform) -> list[str]:
    """A line for each optional package that is installed on this CUDA machine and yet not used, with the reason."""
    if not platform.is_cuda:
        return []
    packages = [FLASH_ATTN, FLASH_ATTN_3] + [TRANSFORMER_ENGINE] * (choice != "torch")
    return notices([(package, find(package)) for package in packages])


def _no_transformer_engine(why: str, platform: Platform) -> UserError:
    expected = f"Transformer Engine{TRANSFORMER_ENGINE.versions} on CUDA"
    if not platform.is_cuda:
        found, fix = f"te on the device {platform.device.type}", "use --model.backend torch"
        return UserError.at("model.backend", found=found, expected=expected, because="it needs a GPU", fix=fix)
    return UserError.at(
        "model.backend",
        found=f"te, but {TRANSFORMER_ENGINE.module} {why}",
        expected=expected,
        fix="install it as docs/installation.md says, or use --model.backend torch",
    )
