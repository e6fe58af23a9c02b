"""The phases of gradients in a step, without ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_hetero.base.errors import UserError
from megatron_hetero.step.gradient_state import GradientState, Phase

ORDER = [Phase.SUMMED, Phase.SCALED, Phase.APPLIED]


def _after(*phases: Phase, persistent: bool = True) -> tuple[GradientState, torch.Tensor]:
    state, gradient = GradientState("text"), torch.zeros(4)
    for phase in phases:
        state.advance(phase, gradient, persistent=persistent)
    return state, gradient


@pytest.mark.parametrize("phases", [ORDER, [Phase.SUMMED, Phase.APPLIED]])
def test_a_step(phases: list[Phase]) -> None:
    state, gradient = _after(*phases)
    assert state.phase(gradient) is Phase.APPLIED
    state.reset()
    assert state.phase(gradient) is Phase.LOCAL
    state.advance(Phase.SUMMED, gradient, persistent=True)


@pytest.mark.parametrize(
    "phases, then, problem",
    [
        ([], Phase.SCALED, "they are not finished"),
        ([], Phase.APPLIED, "they are not finished"),
        ([Phase.SUMMED], Phase.SUMMED, "they are finished already"),
        ([Phase.SUMMED, Phase.SCALED], Phase.SUMMED, "they are finished already"),
        (ORDER, Phase.SUMMED, "they are those of the step before"),
        (ORDER, Phase.APPLIED, "they are those of the step before"),
    ],
)
def test_a_wrong_order_is_an_error(phases: list[Phase], then: Phase, problem: str) -> None:
    state, gradient = _after(*phases)
    with pytest.raises(UserError, match=f"gradients of `text`: {problem}"):
        state.advance(then, gradient, persistent=True)


def test_gradients_that_a_user_replaces_are_local() -> None:
    state, gradient = _after(*ORDER)
    assert state.phase(None) is state.phase(torch.zeros(4)) is Phase.LOCAL
    del gradient
    assert state.phase(torch.zeros(4)) is Phase.LOCAL


@pytest.mark.parametrize("persistent", [False, True])
def test_gradients_that_a_user_zeroes_in_place(persistent: bool) -> None:
    """Those in buffers are zeroed so; a gradient that autograd replaces may have been added to."""
    state, gradient = _after(Phase.SUMMED, Phase.SCALED, persistent=persistent)
    gradient.zero_()
    if persistent:
        state.advance(Phase.SUMMED, gradient, persistent=True)
    else:
        with pytest.raises(UserError, match="they are finished already"):
            state.advance(Phase.SUMMED, gradient, persistent=False)
