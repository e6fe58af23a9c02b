"""Norms and rotation of heads by an operator after the other, and as the package computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.hopper.timing import medians_ms
from benchmarks.gpu.record import Record
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers.compiled import NormWeights
from megatron_hetero.models.layers.rotary import in_one_pass, rotate, rotated_heads, split_heads

SIZES = {
    "30B-A3B dp": (8208, 4, 8, 128, 128),
    "8B tp:4": (8208, 2, 4, 128, 128),
    "Qwen3.5-9B tp:4": (8208, 1, 4, 256, 64),
}
"""Tokens, groups, query heads of each, elements of a head, and how many of them are rotated."""
Heads = Callable[[Tensor, Tensor, Tensor, Tensor, int], Sequence[Tensor]]


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """Each variant at each size."""
    platform, rows = Platform.detect(), list[dict[str, Any]]()
    for size, (tokens, groups, queries, dim, width) in SIZES.items():
        tokens = tokens // 64 if small else tokens
        mixed = torch.randn(tokens, 1, groups, (queries + 2) * dim, device=platform.device)
        table, weights = (
            torch.randn(2, tokens, width, device=platform.device),
            torch.randn(2, dim, device=platform.device),
        )
        grads = [torch.randn(tokens, groups * n, dim, device=platform.device) for n in (queries, 1, 1)]
        expected = _both(one_by_one, mixed, table, weights, dim, grads)
        halves = (mixed.bfloat16(), table, weights.bfloat16(), dim, [grad.bfloat16() for grad in grads])
        for name, variant in {"one by one": one_by_one, "the package's": as_in_layers}.items():
            rows.append({"size": size, "variant": name, **_measured(variant, *halves, expected, platform)})
            record.put("variants", rows)


def one_by_one(mixed: Tensor, table: Tensor, q_weight: Tensor, k_weight: Tensor, dim: int) -> Sequence[Tensor]:
    """By PyTorch's norms, and rotations in a kernel each where there is a compiler."""
    q, k, v = (x.flatten(1, 2).contiguous() for x in split_heads(mixed, table.shape[1], dim))
    normed = (torch.nn.functional.rms_norm(x, (dim,), weight, 1e-6) for x, weight in ((q, q_weight), (k, k_weight)))
    return *(rotate(x, table) for x in normed), v


def as_in_layers(mixed: Tensor, table: Tensor, q_weight: Tensor, k_weight: Tensor, dim: int) -> Sequence[Tensor]:
    """As layers do it on this device."""
    if not in_one_pass(mixed, table):
        return one_by_one(mixed, table, q_weight, k_weight, dim)
    return rotated_heads(mixed, table, dim, norms=[NormWeights(weight, None, 1e-6) for weight in (q_weight, k_weight)])


def _both(
    variant: Heads, mixed: Tensor, table: Tensor, weights: Tensor, dim: int, grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in (mixed, *weights)]
    outs = variant(leaves[0], table, leaves[1], leaves[2], dim)
    return [out.detach() for out in outs], list(torch.autograd.grad(outs, leaves, grads))


def _measured(
    variant: Heads,
    mixed: Tensor,
    table: Tensor,
    weights: Tensor,
    dim: int,
    grads: Sequence[Tensor],
    expected: tuple[list[Tensor], list[Tensor]],
    platform: Platform,
) -> dict[str, float]:
    leaves, outs = [x.clone().requires_grad_() for x in (mixed, *weights)], list[Tensor]()

    def forward() -> None:
        outs[:] = variant(leaves[0], table, leaves[1], leaves[2], dim)

    def backward() -> None:
        torch.autograd.grad(outs, leaves, grads)

    found = _both(variant, mixed, table, weights, dim, grads)
    times = medians_ms({"forward": forward, "backward": backward}, platform)
    # The projection and the results forward; backward also their gradients.
    moved = {"forward": 2 * mixed.nbytes / 1e9, "backward": 3 * mixed.nbytes / 1e9}
    errors = [
        max(float((x.float() - y).norm() / y.norm()) for x, y in zip(*way, strict=True))
        for way in zip(found, expected, strict=True)
    ]
    return {
        **{f"{way} ms": ms for way, ms in times.items()},
        **{f"{way} GB/s": moved[way] / ms * 1e3 for way, ms in times.items()},
        "error forward": errors[0], "error backward": errors[1],
    }  # fmt: skip
