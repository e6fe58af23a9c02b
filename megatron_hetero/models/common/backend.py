"""Which layers modules are built from: Transformer Engine's where it is installed, else ours on plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_hetero.distributed.platform import Platform
from megatron_hetero.errors import UserError
from megatron_hetero.models.common.attention import PackedSelfAttention, TorchAttention
from megatron_hetero.models.common.kernels import cuda_capability
from megatron_hetero.models.common.layers import compiled
from megatron_hetero.models.common.layers.compiled import Norm
from megatron_hetero.models.common.layers.linear import ColumnLinear, RowLinear
from megatron_hetero.models.common.layers.norms import LayerNorm, RMSNorm
from megatron_hetero.models.common.optional import (
    FLASH_ATTN,
    FLASH_ATTN_3,
    TRANSFORMER_ENGINE,
    Found,
    find,
    notices,
    unusable,
)
from megatron_hetero.models.common.recompute.mlp import frugal_mlp
from megatron_hetero.models.common.recompute.policy import EVERYTHING_KEPT, Recompute
from megatron_hetero.models.common.recompute.remake import remake


class TorchSpecProvider(LocalSpecProvider):
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


def spec_provider(choice: str, platform: Platform, found: Found | None = None) -> BackendSpecProvider:
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


def te_provider(capability: tuple[int, int]) -> BackendSpecProvider:
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


class StageLayer(TransformerLayer):
    """A transformer layer of a pipeline stage that knows its number in the whole model, and what not to keep.

    Megatron derives the number from the pipeline rank, for the splits that it knows; here stages are built from any
    range of layers, with `before` layers in the stages before. `recompute`: inside of the layer.
    """

    def __init__(
        self,
        *args: Any,
        layer_number: int = 1,
        before: int = 0,
        recompute: Recompute = EVERYTHING_KEPT,
        compile_layers: bool = False,
        **options: Any,
    ):
        super().__init__(*args, layer_number=layer_number + before, **options)
        self.remade, self.selective = layer_number <= recompute.whole_layers(layer_number), recompute.selective
        if recompute.selective:
            norms: list[Any] = [self.input_layernorm, self.pre_mlp_layernorm]
            for norm in norms:
                norm.forward = partial(remake, norm.forward)
        mlp: Any = self.mlp  # Made as Megatron's own class, which alone it gives its groups to.
        mlp.forward = partial(frugal_mlp, mlp, recompute, compile_layers=compile_layers)

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As Megatron's layer; of one that is made again as a whole only the input is kept. Here, and not around the
        layer, so that a wrapper gathers its weights once for both.
        """
        run: Any = partial(self._once, **options)
        if not (self.remade and self.training):
            return run(hidden_states=hidden_states)
        if not hidden_states.requires_grad and any(p.requires_grad for p in self.parameters()):
            # Behind frozen layers: without a gradient of its input it would get none.
            hidden_states = hidden_states.detach().requires_grad_(torch.is_grad_enabled())
        out: Any = tensor_parallel.checkpoint(lambda hidden: run(hidden_states=hidden)[0], False, hidden_states)
        return out, None

    def _once(self, **options: Any) -> tuple[Any, Any]:
        return super().forward(**options)


class CompiledLayer(StageLayer):
    """A layer whose norms are those of `megatron_hetero.models.common.layers.compiled`."""

    def _once(self, *, hidden_states: Tensor, **options: Any) -> tuple[Any, Any]:
        attention: Any = self.self_attention
        mlp: Any = self.mlp
        part, bias = attention(self._normed(self.input_layernorm, hidden_states), **options)
        if self.selective:
            hidden = _added((part, bias), hidden_states)
            normed = self._normed(self.pre_mlp_layernorm, hidden)
        else:
            norm = Norm.of(self.pre_mlp_layernorm)
            hidden, normed = compiled.added_and_normed(part, bias, hidden_states, norm)
        return _added(mlp(normed), hidden), None

    def _normed(self, norm: Any, hidden: Tensor) -> Tensor:
        make = partial(compiled.normed, norm=Norm.of(norm))
        return remake(make, hidden) if self.selective else make(hidden)


def _adding(*_: bool) -> Callable[..., Tensor]:
    """What Megatron's layers add a part to their residual with: without dropout, and so without a compiled function."""
    return _added


def _added(part: tuple[Tensor, Tensor | None], residual: Tensor, _: float = 0.0) -> Tensor:
    out, bias = part
    if out._is_view():  # Autograd lets nobody write into what a function passes on as it was given.
        return residual + (out if bias is None else out + bias)
    return (out if bias is None else out.add_(bias)).add_(residual)


def layer_spec(
    provider: BackendSpecProvider,
    mask: AttnMaskType,
    *,
    windowed: bool = False,
    before: int = 0,
    rms_norm: bool = True,
    head_norms: bool = False,
    recompute: Recompute = EVERYTHING_KEPT,
    compile_layers: bool = False,
) -> ModuleSpec:
    """One pre-norm transformer layer: norm, packed self-attention, norm, MLP. `before`, `recompute`: see `StageLayer`.
    `rms_norm`: else layer norm. `head_norms`: queries and keys are normed head by head, before the rotary embedding.
    `compile_layers`: what lies between matrix products and attention is compiled.
    """
    norm = provider.layer_norm(rms_norm=rms_norm)
    of_heads = provider.layer_norm(rms_norm=rms_norm, for_qk=True) if head_norms else None
    column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
    return ModuleSpec(
        module=CompiledLayer if compile_layers else StageLayer,
        params={"before": before, "recompute": recompute, "compile_layers": compile_layers},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=PackedSelfAttention,
                params={
                    "attn_mask_type": mask,
                    "windowed": windowed,
                    "selective": recompute.selective,
                    "compile_layers": compile_layers,
                },
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=provider.core_attention(),
                    linear_proj=row,
                    q_layernorm=of_heads,  # pyright: ignore[reportArgumentType]
                    k_layernorm=of_heads,  # pyright: ignore[reportArgumentType]
                ),
            ),
            self_attn_bda=_adding,  # pyright: ignore[reportArgumentType]
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
            mlp_bda=_adding,  # pyright: ignore[reportArgumentType]
        ),
    )


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def transformer_config(
    platform: Platform,
    *,
    params_dtype: torch.dtype,
    rms_norm: bool = True,
    gated_linear_unit: bool = True,
    activation_func: Callable[[Tensor], Tensor] = F.silu,
    **shape: Any,
) -> TransformerConfig:
    """Megatron's configuration of a module whose weights will be loaded: no initialisation, no dropout, fp32 softmax.

    `shape` are fields of `TransformerConfig`; fusions are on where the device has them, and Megatron has one for the
    activation function (its fused GELU is the approximation with tanh, so that one is never fused).
    """
    bf16 = params_dtype == torch.bfloat16
    return TransformerConfig(
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        normalization="RMSNorm" if rms_norm else "LayerNorm",
        gated_linear_unit=gated_linear_unit,
        activation_func=activation_func,
        bias_activation_fusion=platform.is_cuda and gated_linear_unit and activation_func is F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=not platform.is_cuda,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        **shape,
    )
