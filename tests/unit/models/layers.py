"""Layers of Megatron, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.groups.megatron import prepare
from megatron_hetero.groups.platform import CPU, Platform

prepare(Platform(CPU, "gloo"))


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of the inputs for one of it that is the same each time."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def norm_of(kind: Any, width: int, dtype: torch.dtype, offset: int = 0) -> Any:
    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=True)
    norm = kind(config, width, eps=1e-6)
    norm.offset = offset
    with torch.no_grad():
        norm.weight.normal_()
    return norm
