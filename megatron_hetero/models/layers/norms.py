"""Norms, as values and as torch modules that save their input and one or two numbers per row.

Megatron's `WrappedTorchNorm` refuses sequence-parallel activations, which need no more than the mark on the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.hf.weight_map import Share, TensorShapes, WeightMap, whole
from megatron_hetero.models.layers.parts import Part, Site, kinds


@dataclass(frozen=True)
class Norm(Part):
    """A norm of the last dim of `width` elements: root-mean-square if `rms`, else a layer norm with a bias."""

    width: int
    eps: float
    rms: bool = True

    def tensors(self) -> TensorShapes:
        """Return the weight, and the bias of a layer norm."""
        return dict.fromkeys(kinds(not self.rms), (self.width,))

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return all of both on every rank."""
        return {kind: whole(stored + kind, self.width) for kind in kinds(not self.rms)}

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the backend's norm."""
        config = site.config_of(rms_norm=self.rms)
        kind = site.backend.rms_norm if self.rms else site.backend.layer_norm
        return site.mark(kind(config=config, hidden_size=self.width, eps=self.eps))


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in fp32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of `x`."""
        return _RMSNorm.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]


class LayerNorm(torch.nn.LayerNorm):
    """Layer norm with a bias (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=torch.cuda.current_device())


class _RMSNorm(torch.autograd.Function):
    """Compute y = x * s * weight with s = 1 / sqrt(mean(x^2) + eps), rounded once. PyTorch has kernels for that on CUDA
    alone; elsewhere it would save most intermediate results.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if _has_kernels(x):
            # The gradient is below; and a build for CPUs would decompose the operator above this level.
            with torch._C._AutoDispatchBelowAutograd():
                out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        else:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
            scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out = (x * scale).mul_(weight).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        if _has_kernels(x):
            return *torch.ops.aten._fused_rms_norm_backward(grad, x, weight.shape, scale, weight, wanted), None
        return *_gradients(grad, x, weight, scale, wanted), None


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.numel() > 0


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of an RMS norm's input and weight, where `wanted`, with g = `grad`, s = `scale`:

    dx = s * g * weight - x * s^3 * mean(g * weight * x)    dweight = sum over rows of s * g * x
    """
    product, wide = grad.float() * x, weight.float()
    rows = product.flatten(0, -2)
    of_weight = (scale.flatten() @ rows).to(weight.dtype) if wanted[1] else None
    if not wanted[0]:
        return None, of_weight
    mean = (rows @ wide).view_as(scale).div_(x.shape[-1])
    of_x = torch.mul(grad, wide, out=product).mul_(scale).addcmul_(x, mean * scale**3, value=-1)
    return of_x.to(x.dtype), of_weight
