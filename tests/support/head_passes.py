"""Norms and rotation of heads by definition, and in the form of `models.layers.head_kernels`, where Triton is not."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_hetero.models.layers import rotary
from megatron_hetero.models.layers.compiled import NormWeights

if TYPE_CHECKING:
    import pytest


def normed_and_rotated(mixed: Tensor, table_2nD: Any, dim: int, *norms: NormWeights) -> tuple[Tensor, ...]:
    """Queries, keys and values [n, H, D] of a projection [S, 1, G, heads of a group * D], computed in its dtype."""
    cosines, sines = (table[:, None, None].to(mixed.dtype) for table in table_2nD)
    width = cosines.shape[-1]

    def turned(x: Tensor, norm: NormWeights) -> Tensor:
        unit = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * (norm.weight + norm.offset)
        a, b = unit[..., :width].chunk(2, dim=-1)
        rotated = unit[..., :width] * cosines + torch.cat((-b, a), dim=-1) * sines
        return torch.cat((rotated, unit[..., width:]), dim=-1)

    heads = mixed[: len(cosines)].squeeze(1).unflatten(-1, (-1, dim))
    q, k, v = heads.split((heads.shape[2] - 2, 1, 1), dim=2)
    return tuple(x.flatten(1, 2).contiguous() for x in (turned(q, norms[0]), turned(k, norms[1]), v))


def heads_normed(mixed: Tensor, cosines: Tensor, sines: Tensor, dim: int, *norms: NormWeights) -> tuple[Tensor, ...]:
    """Queries and keys."""
    return normed_and_rotated(mixed, (cosines, sines), dim, *norms)[:2]


def heads_normed_back(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, mixed: Tensor, cosines: Tensor, sines: Tensor, dim: int, *norms: Any
) -> tuple[Tensor, ...]:
    """The gradients of the projection and of the weights."""
    leaves = [x.detach().requires_grad_() for x in (mixed, *(norm.weight for norm in norms))]
    with torch.enable_grad():
        of_leaves = [norm._replace(weight=leaf) for norm, leaf in zip(norms, leaves[1:], strict=True)]
        outs = normed_and_rotated(leaves[0], (cosines, sines), dim, *of_leaves)
    grads = [grad.reshape(out.shape) for grad, out in zip((grad_q, grad_k, grad_v), outs, strict=True)]
    of_mixed, *of_weights = torch.autograd.grad(outs, leaves, grads)
    return of_mixed.contiguous(), *of_weights


forward, backward = heads_normed, heads_normed_back


def replace_kernels(patch: pytest.MonkeyPatch, *others: ModuleType) -> None:
    """Let `rotary`, and `others` that ask it, compute heads in one pass as on a GPU, without a compiler or Triton."""
    for module in (rotary, *others):
        patch.setattr(module, "in_one_pass", lambda x, table: table.shape[1] > 1)
        patch.setattr(module, "run", lambda function, *inputs: function(*inputs))
    patch.setattr(rotary, "_kernels", lambda: sys.modules[__name__])
