"""`TRITON_INTERPRET=1 python -m tests.unit.models.swiglu_values`: how far results of the kernels of SwiGLU are from
exact ones, in roundings: the largest of each case and result, as JSON. A process of its own, since Triton decides at
import whether it interprets.
"""

from __future__ import annotations

import json
from itertools import product

import torch
from torch import Tensor

from megatron_hetero.models.layers import swiglu_kernels
from megatron_hetero.models.layers.mlp import swiglu_forward

ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7, torch.float32: 2**-21}
"""Of a result to the nearest number; to bfloat16 the interpreter truncates. In fp32, of a few operations."""
SHAPES = {"experts": (5, 1536), "a part of a block": (3, 1, 4736), "unaligned": (2, 7), "no rows": (0, 24)}


def roundings(found: Tensor, exact: Tensor, terms: Tensor | None = None) -> float:
    """The largest error in roundings. `terms`: sums of absolute values of what was added up in fp32."""
    unit = ROUNDING[found.dtype] * exact.abs() * 1.001 + 1e-7 * (1 if terms is None else 1 + terms)
    return float(((found.double() - exact).abs() / unit).amax()) if exact.numel() else 0.0


def exactly(wide: Tensor, weights: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
    """The result in fp64, and the gradients."""
    leaves = [x.double().requires_grad_() for x in (wide, weights) if x is not None]
    gate, up = leaves[0].chunk(2, dim=-1)
    out = torch.nn.functional.silu(gate) * up
    out = out if weights is None else out * leaves[1][:, None]
    return out.detach(), *torch.autograd.grad(out, leaves, grad.double())


def errors_on(device: str) -> dict[str, float]:
    """The largest error of each case and result."""
    generator, errors = torch.Generator().manual_seed(0), dict[str, float]()

    def drawn(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    for dtype, (name, (rows, *others)) in product(ROUNDING, SHAPES.items()):
        width = others.pop()
        wide, grad = drawn(rows, *others, 2 * width, dtype=dtype), drawn(rows, *others, width, dtype=dtype)
        wide[..., :1], wide[..., 1:2] = 100, -100  # where exponentials overflow
        for weights in (None, drawn(rows, dtype=dtype)) if not others else (None,):
            case, (exact_out, *exact) = f"{dtype} {name} {weights is not None}", exactly(wide, weights, grad)
            out = swiglu_kernels.forward(wide, weights)
            grad_wide, grad_weights = swiglu_kernels.backward(grad, wide.clone(), weights)
            errors |= {f"{case} out": roundings(out, exact_out), f"{case} wide": roundings(grad_wide, exact[0])}
            if grad_weights is not None:
                terms = (grad.double() * swiglu_forward(wide.double())).abs().sum(-1)
                errors[f"{case} weights"] = roundings(grad_weights, exact[1], terms)
                strided = swiglu_kernels.backward(grad.t().contiguous().t(), wide.t().contiguous().t(), weights)
                assert torch.equal(grad_wide, strided[0])
    return errors


if __name__ == "__main__":
    print(json.dumps(errors_on("cpu")))
