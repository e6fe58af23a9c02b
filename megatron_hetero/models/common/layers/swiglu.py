"""SiLU of a gate, times what passes it (Shazeer 2020, arXiv 2002.05202): one pass forward and one backward where a GPU
compiles them, few elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.distributed.platform import compiled, compiles_for


def swiglu(wide: Tensor) -> Tensor:
    """silu(gate) * up, [..., ffn], of gate and up in one tensor [..., 2 ffn], which is all that is kept."""
    return _SwiGLU.apply(wide)  # pyright: ignore[reportReturnType]


def forward(wide: Tensor) -> Tensor:
    """`swiglu`, without its gradient."""
    gate, up = wide.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def backward(grad: Tensor, wide: Tensor) -> Tensor:
    """The gradient of `wide`, as a compiler joins it into one pass."""
    gate, up = wide.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat((of_gate, grad * F.silu(gate)), dim=-1)


def backward_in_place(grad: Tensor, wide: Tensor) -> Tensor:
    """The gradient of `wide`, each part of it where it belongs."""
    (gate, up), made = wide.chunk(2, dim=-1), torch.empty_like(wide)
    of_gate, of_up = made.chunk(2, dim=-1)
    activated = F.silu(gate)
    torch.mul(grad, activated, out=of_up)
    of_activated = torch.mul(grad, up, out=activated)  # It is read no more.
    torch.ops.aten.silu_backward.grad_input(of_activated, gate, grad_input=of_gate)
    return made


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        return compiled(forward)(wide) if compiles_for(wide) else forward(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (wide,) = ctx.saved_tensors
        return compiled(backward)(grad, wide) if compiles_for(wide) else backward_in_place(grad, wide)
