"""Functions of tensors alone, compiled for any number of tokens (Ansel et al. 2024, "PyTorch 2", ASPLOS)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MOST_GRAPHS = 64
"""Of one function: encoders and text module, widths that tp leaves, normed heads, padding or none, each with and
without gradients.
"""


def run(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, compiled for any number of tokens, which is the first dim of all tensors but parameters.
    Compilers treat 0 and 1 as cases of their own, which are not worth one.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor) and not isinstance(x, torch.nn.Parameter)]
    if any(len(x) < 2 for x in tensors):
        return function(*inputs)
    for x in tensors:
        torch._dynamo.mark_dynamic(x, 0)
    # Here, as settings are those of a thread, and backward passes run in threads of their own.
    if torch._dynamo.config.recompile_limit < MOST_GRAPHS:
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
    return _compiled(function)(*inputs)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """For any number of tokens, and nothing else: widths that are known make better kernels."""
    return torch.compile(function, dynamic=False, fullgraph=True)
