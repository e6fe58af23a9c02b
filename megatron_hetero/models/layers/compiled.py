"""Compiled operations between matrix products, attention and communication: few kernels in place of many
(docs/training.md, "Compiled layers"; Ansel et al. 2024, "PyTorch 2", ASPLOS).

Shape suffixes are those of `rotary`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import compile_problem
from megatron_hetero.groups.platform import compiled as compiled_once

Activation = Callable[[Tensor], Tensor]


class NormWeights(NamedTuple):
    """The weights of a norm: a layer norm if it has a bias, else a root-mean-square norm. The sum of `weight` and
    `offset` is the gain.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: int = 0

    @classmethod
    def of(cls, module: Any) -> NormWeights:
        """Return the weights of a norm module of `megatron_hetero.models.layers.norms`."""
        return cls(module.weight, getattr(module, "bias", None), module.eps, module.offset)


def gain_of(weight: Tensor, offset: int) -> Tensor:
    """Return the gain of a norm: `weight`, or the sum of `weight` and `offset` in fp32."""
    return weight.float() + offset if offset else weight


def run(function: Callable[..., Any], *inputs: Any) -> Any:
    """Return `function(*inputs)`, compiled for any number of tokens, which is the first dim of all tensors except
    parameters. Fewer than two tokens, which PyTorch would specialise for, run without the compiler.
    """
    for x in inputs:
        if isinstance(x, Tensor) and not isinstance(x, torch.nn.Parameter):
            if x.shape[0] < 2:
                return function(*inputs)
            if 0 not in getattr(x, "_dynamo_dynamic_indices", ()):  # Tables of angles pass here in each layer.
                torch._dynamo.mark_dynamic(x, 0)
    return compiled_once(function, dynamic=False)(*inputs)


def require_compiler(device: torch.device) -> None:
    """Raise `UserError` if PyTorch cannot compile for `device`."""
    if problem := compile_problem(device):
        needs = "Triton, a C compiler and Python's headers" if device.type == "cuda" else "a C++ compiler"
        raise UserError.at(
            "model.compile (--model.compile)",
            problem=f"PyTorch cannot compile for {device.type}: {problem}",
            fix=f"install {needs} on every host, or use --model.compile none",
        )


# --------------------------------------------------------------- functions for `run`, which compute in fp32


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: int = 0) -> Tensor:
    """Normalise `x` [S, 1, hidden] with the fields of `NormWeights`."""
    wide, gain = x.float(), gain_of(weight, offset)
    if bias is not None:
        out = F.layer_norm(wide, weight.shape, gain.float(), bias.float(), eps)
    else:
        out = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * gain
    return out.to(x.dtype)


def added_and_normed(x: Tensor, bias: Tensor | None, residual: Tensor, *norm: Any) -> tuple[Tensor, Tensor]:
    """Return the sum x + bias + residual, [S, 1, hidden], and the sum normalised with `NormWeights(*norm)`."""
    out = residual + (x if bias is None else x + bias)
    return out, normed(out, *norm)


def activated(wide: Tensor, activation: Activation, has_gate: bool) -> Tensor:
    """Return the activation of `wide` [S, 1, ffn], or the activated gate times up if `wide` is [S, 1, 2 ffn]."""
    if not has_gate:
        return activation(wide)
    gate, up = wide.chunk(2, dim=-1)
    return activation(gate) * up


def gated(out: Tensor, gate: Tensor) -> Tensor:
    """Multiply the output of attention [S, ...] by the sigmoid of its gate, which has the same shape."""
    return (out.float() * gate.float().sigmoid()).to(out.dtype)


def turned(x: Tensor, cosines_nD: Tensor, sines_nD: Tensor) -> Tensor:
    """Compute the forward pass of `rotary.rotate`."""
    return _turned_by(x, cosines_nD, _signed(sines_nD))


def turned_back(grad: Tensor, cosines_nD: Tensor, sines_nD: Tensor) -> Tensor:
    """Compute the backward pass of `rotary.rotate`, the adjoint of `turned`."""
    return _turned_by(grad, cosines_nD, _signed(sines_nD).flip(1))


def _turned_by(x: Tensor, cosines_nD: Tensor, sines_n2h: Tensor) -> Tensor:
    """Return each half of `x` [n, ..., D] times the cosines plus the other half times the sines."""
    width = cosines_nD.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((_turned_by(x[..., :width], cosines_nD, sines_n2h), x[..., width:]), dim=-1)
    halves = x.unflatten(-1, (2, -1)).float()
    broadcast = len(x), *[1] * (x.dim() - 2), *halves.shape[-2:]
    cosines, sines = (table.view(broadcast) for table in (cosines_nD, sines_n2h))
    return (halves * cosines + halves.flip(-2) * sines).flatten(-2).to(x.dtype)


def _signed(sines_nD: Tensor) -> Tensor:
    """Return the sines as [n, 2, D / 2] with the first half negated."""
    signs = 2 * torch.arange(2, device=sines_nD.device) - 1
    return sines_nD.unflatten(-1, (2, -1)) * signs[:, None]
