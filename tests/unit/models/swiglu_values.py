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
from megatron_hetero.models.layers.mlp import swiglu_backward, swiglu_forward

ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7}
"""Of a result to the nearest number; to bfloat16 the interpreter truncates."""
SHAPES = {"experts": (5, 1536), "a part of a block": (3, 1, 4736), "unaligned": (2, 7), "no rows": (0, 24)}


def roundings(found: Tensor, exact: Tensor, terms: Tensor | None = None) -> float:
    """The largest error in roundings. `terms`: sums of absolute values of what was added up in fp32."""
    unit = ROUNDING[found.dtype] * exact.abs() * 1.001 + 1e-7 * (1 if terms is None else 1 + terms)
    return float(((found.double() - exact).abs() / unit).amax()) if exact.numel() else 0.0


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
            case, exact = f"{dtype} {name} {weights is not None}", wide.double()
            factors = None if weights is None else weights.double()
            out, exact_out = swiglu_kernels.forward(wide, weights), swiglu_forward(exact, factors)
            grad_wide, grad_weights = swiglu_kernels.backward(grad, wide.clone(), weights)
            of_wide, of_weights = swiglu_backward(grad.double(), exact, factors)
            errors |= {f"{case} out": roundings(out, exact_out), f"{case} wide": roundings(grad_wide, of_wide)}
            if grad_weights is not None and of_weights is not None:
                terms = (grad.double() * swiglu_forward(exact)).abs().sum(-1)
                errors[f"{case} weights"] = roundings(grad_weights, of_weights, terms)
                strided = swiglu_kernels.backward(grad.t().contiguous().t(), wide.t().contiguous().t(), weights)
                assert torch.equal(grad_wide, strided[0])
    return errors


if __name__ == "__main__":
    print(json.dumps(errors_on("cpu")))
