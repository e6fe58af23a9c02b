"""Apex's extension of kernels on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refused(name: str) -> Callable[..., Any]:
    """A function that must not be called."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError(f"apex: {name} is used")

    return fail


multi_tensor_l2norm = refused("multi_tensor_l2norm")
multi_tensor_scale = refused("multi_tensor_scale")
