"""Functions of tensors alone, compiled for any number of tokens (Ansel et al. 2024, "PyTorch 2", ASPLOS)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.distributed.platform import compiled


def run(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, compiled for any number of tokens, which is the first dim of all tensors but parameters.
    Compilers treat 0 and 1 as cases of their own, which are not worth one.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor) and not isinstance(x, torch.nn.Parameter)]
    if any(len(x) < 2 for x in tensors):
        return function(*inputs)
    for x in tensors:
        torch._dynamo.mark_dynamic(x, 0)
    return compiled(function, dynamic=False)(*inputs)
