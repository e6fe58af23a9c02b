"""`TRITON_INTERPRET=1 python -m tests.unit.models.head_values`: how far results of the kernels of heads are from exact
ones, in roundings: the largest of each case and result, as JSON. A process of its own, since Triton decides at import
whether it interprets.
"""

from __future__ import annotations

import json
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_hetero.models.layers import head_kernels
from megatron_hetero.models.layers.compiled import NormWeights, gain_of
from megatron_hetero.models.layers.rotary import rotated_heads
from tests.support.head_passes import normed_and_rotated
from tests.unit.models.swiglu_values import ROUNDING, roundings

RESULTS = ("q", "k", "mixed", "q weight", "k weight")


class Shape(NamedTuple):
    """`gates`: elements behind each group, which belong to something else. `members`: ranks that exchange heads."""

    groups: int
    queries: int
    dim: int
    width: int
    tokens: int = 3
    padding: int = 0
    gates: int = 0
    members: int = 1


EPS, WARPS = 1e-2, 4
SHAPES = {
    "30B-A3B": Shape(4, 8, 128, 128),
    "a narrow table, gates": Shape(2, 4, 256, 64, padding=2, gates=8),
    "no powers of two": Shape(1, 5, 72, 24, padding=1),
    "several tokens of a warp": Shape(1, 1, 16, 16, tokens=3 * WARPS + 1),
    "an exchange": Shape(4, 2, 16, 16, members=2),
}


def errors_on(device: str) -> dict[str, float]:
    """The largest error of each case and result, of `rotated_heads` with norms."""
    generator, errors = torch.Generator().manual_seed(0), dict[str, float]()

    def drawn(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    for dtype, offset, (name, shape) in product(ROUNDING, (0, 1), SHAPES.items()):
        width, rows = (shape.queries + 2) * shape.dim, shape.tokens + shape.padding
        mixed, table = (
            drawn(rows, 1, shape.groups, width + shape.gates, dtype=dtype),
            drawn(2, shape.tokens, shape.width),
        )
        # Heads of which the square of the length is about `EPS`, and one of zeros.
        mixed[0, 0, 0] *= EPS**0.5
        mixed[1, 0, 0, : shape.dim] = 0
        weights = [drawn(shape.dim, dtype=dtype).requires_grad_() for _ in "qk"]
        ours = [mixed[..., :width].requires_grad_(), *weights]
        norms = [NormWeights(weight, None, EPS, offset) for weight in weights]
        outs = rotated_heads(ours[0], table, shape.dim, members=shape.members, norms=norms)
        grads = [drawn(*out.shape, dtype=dtype) for out in outs]
        if shape.members > 1:  # As from an exchange: members first.
            grads = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in grads]
        found = *outs[:2], *torch.autograd.grad(outs, ours, grads)

        leaves = [x.detach().double().requires_grad_() for x in ours]
        wide = [norm._replace(weight=leaf) for norm, leaf in zip(norms, leaves[1:], strict=True)]
        exact_outs = normed_and_rotated(leaves[0], table, shape.dim, *wide)
        wide_grads = [grad.double().reshape(out.shape) for grad, out in zip(grads, exact_outs, strict=True)]
        exact = *exact_outs[:2], *torch.autograd.grad(exact_outs, leaves, wide_grads)
        terms = scales(shape, mixed, table, norms, grads)
        for result, own, theirs, size in zip(RESULTS, found, exact, terms, strict=True):
            errors[f"{dtype} {offset} {name} {result}"] = roundings(
                own.detach().view(theirs.shape), theirs.detach(), size
            )
        assert all(out.is_contiguous() for out in outs[:2]), "as kernels of attention want them"
    return errors


def scales(
    shape: Shape, mixed: Tensor, table: Tensor, norms: list[NormWeights], grads: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """For each result a bound of what was added up in fp32, in units of its rounding."""
    largest = max(float(x.detach().abs().max()) for x in (*grads, table, *(gain_of(n.weight, n.offset) for n in norms)))
    one = torch.full((), largest**3 * 10)
    rows = torch.full((), largest**3 * shape.tokens * shape.groups * shape.queries)
    return one, one, one * 10, rows, rows


if __name__ == "__main__":
    head_kernels.WARPS = WARPS
    print(json.dumps(errors_on("cpu")))
