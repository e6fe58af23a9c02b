"""The hooks that autograd calls for the tensors that it saves. It calls the innermost pair alone: whoever sets a pair
inside of another hands on to that what he does not treat himself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hooks:
    """As `torch.autograd.graph.saved_tensors_hooks` takes them."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @classmethod
    def current(cls) -> Self:
        """Those in force; where there are none, what autograd does without."""
        autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        found = autograd._top_saved_tensors_default_hooks(False)
        return cls(_itself, _itself) if found is None else cls(*found)


def _itself(x: Any) -> Any:
    return x
