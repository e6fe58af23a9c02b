"""Norms, described as values, and torch modules that save only their input and one or two numbers per row.

Megatron's `WrappedTorchNorm` refuses sequence-parallel activations, although they only need a mark on the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.groups.platform import Function
from megatron_hetero.hf.weight_map import Share, TensorShapes, WeightMap, whole
from megatron_hetero.models.layers.compiled import NormWeights, gain_of, normed
from megatron_hetero.models.layers.parts import Part, Site, kinds


@dataclass(frozen=True)
class Norm(Part):
    """A norm over the last dim of its input: a root-mean-square norm or a layer norm."""

    width: int
    """Size of the last dim."""
    eps: float
    rms: bool = True
    """Whether the norm is a root-mean-square norm, else a layer norm with a bias."""
    offset: int = 0
    """Constant added to the stored weight in fp32: 1 if weights are centred at zero, else 0."""

    def tensors(self) -> TensorShapes:
        """Return the shapes of the weight and, for a layer norm, of the bias."""
        return dict.fromkeys(kinds(not self.rms), (self.width,))

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the weight map, with the whole tensors on every rank."""
        return {kind: whole(stored + kind, self.width) for kind in kinds(not self.rms)}

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the norm module of the backend."""
        config = site.config_of(rms_norm=self.rms, layernorm_zero_centered_gamma=bool(self.offset))
        kind = site.backend.rms_norm if self.rms else site.backend.layer_norm
        norm: Any = site.mark(kind(config=config, hidden_size=self.width, eps=self.eps))
        norm.offset = self.offset
        return norm


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in fp32."""

    offset = 0

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` over the last dim."""
        return _RMSNorm.apply(x, self.weight, self.eps, self.offset)  # pyright: ignore[reportReturnType]


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm with a bias (Ba et al. 2016, arXiv 1607.06450)."""

    offset = 0

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=torch.cuda.current_device())

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` over the last dim."""
        return normed(input, *NormWeights.of(self)) if self.offset else super().forward(input)


class _RMSNorm(Function):
    """Autograd function that computes y = x * s * gain with s = 1 / sqrt(mean(x^2) + eps) and gain = weight + offset,
    rounded once. PyTorch has fused kernels on CUDA only, for inputs in the dtype of the gain; its composite
    implementation saves most intermediate results.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: int) -> Tensor:
        gain = gain_of(weight, offset)
        if _has_kernels(x):
            wide = x.to(gain.dtype)
            # The gradient is defined below, and CPU builds of PyTorch would decompose the operator in autograd.
            with torch._C._AutoDispatchBelowAutograd():
                out, scale = torch.ops.aten._fused_rms_norm(wide, gain.shape, gain, eps)
            out = out.to(x.dtype)
        else:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out = (x * scale).mul_(gain).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        wanted, gain = list(ctx.needs_input_grad[:2]), gain_of(weight, ctx.offset)
        if _has_kernels(x):
            wide = (each.to(gain.dtype) for each in (grad, x))
            grad_x, grad_gain = torch.ops.aten._fused_rms_norm_backward(*wide, gain.shape, scale, gain, wanted)
            grad_x = None if grad_x is None else grad_x.to(x.dtype)
        else:
            grad_x, grad_gain = _gradients(grad, x, gain, scale, wanted)
        return grad_x, None if grad_gain is None else grad_gain.to(weight.dtype), None, None


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.numel() > 0


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of an RMS norm's input and weight, or None where not `wanted`. With g = `grad`, s = `scale`:

    dx = s * g * weight - x * s^3 * mean(g * weight * x)    dweight = sum over rows of s * g * x
    """
    product, wide = grad.float() * x, weight.float()
    rows = product.flatten(0, -2)
    grad_weight = (scale.flatten() @ rows).to(weight.dtype) if wanted[1] else None
    if not wanted[0]:
        return None, grad_weight
    mean = (rows @ wide).view_as(scale).div_(x.shape[-1])
    grad_x = torch.mul(grad, wide, out=product).mul_(scale).addcmul_(x, mean * scale**3, value=-1)
    return grad_x.to(x.dtype), grad_weight
