"""`TRITON_INTERPRET=1 python -m tests.unit.models.swiglu_values`: how far results of the kernels of SwiGLU are from
exact ones, in roundings: the largest of each case and result, as JSON. A process of its own, since Triton decides at
import whether it interprets.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from megatron_hetero.models.layers import swiglu_kernels
from megatron_hetero.models.layers.mlp import swiglu_backward, swiglu_forward

ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7}
"""Of a result to the nearest number; to bfloat16 the interpreter truncates."""
SHAPES = {"experts": (5, 768), "a part of a block": (3, 1, 4736), "unaligned": (2, 7), "no rows": (0, 1, 24)}


def roundings(found: Tensor, exact: Tensor, terms: Tensor | None = None) -> float:
    """The largest error in roundings. `terms`: sums of absolute values of what was added up in fp32."""
    unit = ROUNDING[found.dtype] * exact.abs() * 1.001 + 1e-7 * (1 if terms is None else 1 + terms)
    return float(((found.double() - exact).abs() / unit).amax()) if exact.numel() else 0.0


def main() -> None:
    """See above."""
    generator, errors = torch.Generator().manual_seed(0), dict[str, float]()
    for dtype in ROUNDING:
        for name, (rows, *others) in SHAPES.items():
            wide, grad = (
                torch.randn(rows, *others[:-1], width, generator=generator).to(dtype)
                for width in (2 * others[-1], others[-1])
            )
            wide[..., :1], wide[..., 1:2] = 100, -100  # where exponentials overflow
            for weights in (None, torch.rand(rows, generator=generator).to(dtype)):
                if weights is not None and name != "experts":
                    continue
                case = f"{dtype} {name} {'' if weights is None else 'weighted'}"
                exact = wide.double(), None if weights is None else weights.double()
                out = swiglu_kernels.forward(wide, weights)
                grad_wide, grad_weights = swiglu_kernels.backward(grad, wide.clone(), weights)
                of_wide, of_weights = swiglu_backward(grad.double(), *exact)
                errors[f"{case} out"] = roundings(out, swiglu_forward(*exact))
                errors[f"{case} wide"] = roundings(grad_wide, of_wide)
                if grad_weights is not None and of_weights is not None:
                    terms = (grad.double() * swiglu_forward(exact[0])).abs().sum(-1)
                    errors[f"{case} weights"] = roundings(grad_weights, of_weights, terms)
                    assert torch.equal(grad_wide, swiglu_kernels.backward(grad, wide.t().contiguous().t(), weights)[0])
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
