"""The phases of a module's gradients in a step, and the errors for calls in a wrong order.

    phase     gradients are                                      next
    LOCAL     accumulated over this rank's tokens                SUMMED, by `sum_gradients`
    SUMMED    summed over all tokens of the step                 SCALED or APPLIED
    SCALED    divided by the number of tokens                    APPLIED
    APPLIED   used by an update                                  LOCAL, by `zero_grad`

Users may also set gradients to None, or zero the buffers of a wrapper, without a call of this package. Therefore the
state refers to one gradient tensor: if another tensor replaces it, gradients are LOCAL again.
"""

from __future__ import annotations

from enum import Enum, auto

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from megatron_hetero.base.errors import UserError


class Phase(Enum):
    """The phase of a module's gradients in a step: local, summed over ranks, scaled, or applied by an update."""

    LOCAL = auto()
    SUMMED = auto()
    SCALED = auto()
    APPLIED = auto()


class GradientState:
    """The phase of the gradients of the module `name`.

    The methods take the module's first gradient tensor, None if there is none yet. `persistent`: whether this tensor is
    the same in each step. A change of a persistent tensor since the last transition means that gradients are new.
    """

    def __init__(self, name: str):
        self.name = name
        self.reset()

    def reset(self) -> None:
        """Enter the phase LOCAL. Called when gradients are zeroed."""
        self._phase = Phase.LOCAL
        self._gradient: TensorWeakRef | None = None
        self._version = 0

    def phase(self, gradient: Tensor | None) -> Phase:
        """Return the phase of the gradients whose first tensor is `gradient`; LOCAL if it is another tensor."""
        is_same = gradient is not None and self._gradient is not None and self._gradient() is gradient
        return self._phase if is_same else Phase.LOCAL

    def advance(self, phase: Phase, gradient: Tensor | None, *, persistent: bool) -> None:
        """Enter `phase`. Raises `UserError` if it does not follow the current phase."""
        if phase is Phase.SUMMED:
            self.require_local(gradient, persistent=persistent)
        else:
            self.require_summed(gradient)
        if gradient is not None:
            self._phase, self._gradient, self._version = phase, TensorWeakRef(gradient), gradient._version

    def require_local(self, gradient: Tensor | None, *, persistent: bool) -> None:
        """Check that gradients have not been summed over ranks. Raises `UserError`."""
        phase = self.phase(gradient)
        self._require_not_applied(phase)
        if phase is Phase.LOCAL:
            return
        assert gradient is not None, "only a tensor has been summed"
        if not (persistent and gradient._version != self._version):
            self._refuse(
                problem="they are finished already",
                because="they would be summed and divided again",
                fix="call `finish_gradients` and then `step(tokens=None)`, or `step(tokens=...)` alone, once after the "
                "last backward pass of a step; set gradients to None before the next",
            )

    def require_summed(self, gradient: Tensor | None) -> None:
        """Check that gradients are summed over ranks and not yet applied. Raises `UserError`."""
        phase = self.phase(gradient)
        self._require_not_applied(phase)
        if phase is Phase.LOCAL:
            self._refuse(
                problem="they are not finished",
                because="each rank has those of its own tokens",
                fix="give `tokens`, or call `finish_gradients` before",
            )

    def refuse_backward(self) -> None:
        """Raise `UserError` for a backward pass that adds to gradients after their sums over ranks have begun."""
        self._refuse(
            problem="a backward pass comes after their sums over ranks have begun",
            because="its gradients would be lost",
            fix="give all micro-batches of a step to one call of the `Runner`, and call `zero_grad` before the next",
        )

    def refuse_unreduced(self, wrapper: str) -> None:
        """Raise `UserError` for a PyTorch `wrapper` that did not average gradients in the last backward pass."""
        self._refuse(
            problem=f"{wrapper} has not averaged them: its last pass was inside `no_sync()`, `no_grad()` or "
            "`set_requires_gradient_sync(False)`",
            because="they are taken to be means over its ranks",
            fix="leave the last micro-batch of each step out of these, and evaluate after the step",
        )

    def _require_not_applied(self, phase: Phase) -> None:
        if phase is Phase.APPLIED:
            self._refuse(
                problem="they are those of the step before, which has applied them",
                because="gradients of this step are added to them",
                fix="call `zero_grad()` of this optimizer after each step; zeros that others write are not seen",
            )

    def _refuse(self, *, problem: str, because: str, fix: str) -> None:
        raise UserError.at(f"gradients of `{self.name}`", problem=problem, because=because, fix=fix)
