"""`platform.Function`, the base of our autograd functions."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hetero.groups.platform import Function


class _Cube(Function):
    modes: list[bool] = []  # noqa: RUF012 (for the tests)

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _Cube.modes.append(torch.is_grad_enabled())
        (x,) = ctx.saved_tensors
        return grad * ctx.power * x ** (ctx.power - 1), None


def _cube(x: Tensor) -> Any:
    return _Cube.apply(x, 3)


def test_values_and_gradients() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(_cube(x), x.detach() ** 3)
    assert type(_cube(x).grad_fn).__name__ == "_CubeBackward"
    assert torch.autograd.gradcheck(_cube, x)
    with torch.no_grad():
        assert not _cube(x).requires_grad


def test_gradients_cannot_be_differentiated() -> None:
    x = torch.randn(5, requires_grad=True)
    (grad,) = torch.autograd.grad(_cube(x), x, torch.ones(5, requires_grad=True), create_graph=True)
    assert torch.allclose(grad, 3 * x.detach() ** 2)
    assert not _Cube.modes[-1], "operations of the backward pass are not recorded"
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_no_wrapper_of_pytorch_runs() -> None:
    """Neither pass of a call runs Python code of PyTorch around `forward` and `backward`, for each layer."""
    x, names = torch.randn(5, requires_grad=True), set[str]()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            names.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        out = _cube(x)
        torch.autograd.backward([out], [torch.ones(5)])
    finally:
        sys.setprofile(None)
    assert {"forward", "backward"} <= names, "the passes were observed"
    assert not names & {"wrapper", "unwrap_dead_wrappers", "_get_user_fn", "__enter__", "__exit__"}
