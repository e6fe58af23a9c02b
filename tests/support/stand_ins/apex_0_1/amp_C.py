"""Apex's extension of kernels on lists of tensors."""

from __future__ import annotations

from typing import Any


def refused(name: str) -> Any:
    """A class, or a function, that must not be called."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError(f"apex: {name} is used")

    return type(name, (), {"__init__": fail})


multi_tensor_l2norm = refused("multi_tensor_l2norm")
multi_tensor_scale = refused("multi_tensor_scale")
