"""SwiGLU by PyTorch, by its compiler with dynamic and static widths, and as the package computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.hopper.timing import medians_ms
from benchmarks.gpu.record import Record
from megatron_hetero.groups.platform import Platform, compiled
from megatron_hetero.models.layers.compiled import activated, run
from megatron_hetero.models.layers.mlp import swiglu, swiglu_forward

SIZES = {"7B tp:4": (8208, 4736), "32B tp:8": (8208, 3456), "encoder sp:8": (648, 3420)}
"""Tokens, and the width of gate and of up."""
FORWARD, BACKWARD = 3, 5
"""Tensors [tokens, width] that are read and written: gate, up, output; these with their gradients and no output."""


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Each variant at each size."""
    platform, rows = Platform.detect(), list[dict[str, Any]]()
    for size, (tokens, width) in SIZES.items():
        tokens = tokens // 64 if small else tokens
        wide, grad = (torch.randn(tokens, 1, n, device=platform.device).bfloat16() for n in (2 * width, width))
        expected = _both(eager, wide.float(), grad.float())
        for name, variant in _variants(platform).items():
            rows.append({"size": size, "variant": name, **_measured(variant, wide, grad, expected, platform)})
            record.put("variants", rows)


def eager(wide: Tensor) -> Tensor:
    """By PyTorch's operators."""
    return activated(wide, F.silu, True)


def as_before(wide: Tensor) -> Tensor:
    """SwiGLU compiled for any number of tokens and any width, as it was computed before it had kernels of its own."""
    return _AnyWidth.apply(wide)  # pyright: ignore[reportReturnType]


class _AnyWidth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        return compiled(swiglu_forward)(wide)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return compiled(_backward)(grad, *ctx.saved_tensors)


def _backward(grad: Tensor, wide: Tensor) -> Tensor:
    gate, up = wide.chunk(2, dim=-1)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat((grad_gate, grad * F.silu(gate)), dim=-1)


def _variants(platform: Platform) -> dict[str, Callable[[Tensor], Tensor]]:
    found = {"PyTorch": eager, "the package's": swiglu}
    if platform.is_cuda:
        # On a CPU this would compile C++ for minutes.
        found |= {
            "torch.compile, dynamic": as_before,
            "torch.compile, static width": lambda wide: run(activated, wide, F.silu, True),
        }
    return found


def _both(variant: Callable[[Tensor], Tensor], wide: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    local = wide.clone().requires_grad_()
    out = variant(local)
    return out.detach(), torch.autograd.grad(out, local, grad)[0]


def _measured(
    variant: Callable[[Tensor], Tensor], wide: Tensor, grad: Tensor, expected: tuple[Tensor, Tensor], platform: Platform
) -> dict[str, float]:
    local, outs = wide.clone().requires_grad_(), list[Tensor]()

    def forward() -> None:
        outs[:] = [variant(local)]

    found = _both(variant, wide, grad)
    times = medians_ms({"forward": forward, "backward": lambda: torch.autograd.grad(outs[0], local, grad)}, platform)
    gigabytes = grad.nbytes / 1e9
    errors = [float((x.float() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)]
    return {
        "forward ms": times["forward"], "backward ms": times["backward"],
        "forward GB/s": FORWARD * gigabytes / times["forward"] * 1e3,
        "backward GB/s": BACKWARD * gigabytes / times["backward"] * 1e3,
        "error forward": errors[0], "error backward": errors[1],
    }  # fmt: skip
