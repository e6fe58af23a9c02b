"""Which modules of PyTorch the models of stages call: they may be any callables, and hold modules out of sight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from megatron_hetero.errors import UserError


class CalledModules:
    """Observes the first call of each stage."""

    def __init__(self) -> None:
        self._trains: dict[tuple[str, int], bool] = {}

    @contextlib.contextmanager
    def observing(self, module: str, stage: int) -> Iterator[None]:
        """Around a call of a stage. Raises `UserError` amid the first if that calls DDP."""
        if (module, stage) in self._trains:
            yield
            return
        called: list[nn.Module] = []

        def note(each: nn.Module, _: Any) -> None:
            require_no_ddp(module, stage, [each])
            called.append(each)

        hook = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
        self._trains[module, stage] = any(p.requires_grad for each in called for p in each.parameters())

    def require_frozen(self, module: str, stage: int, inputs: Sequence[Any], loss: Tensor) -> None:
        """Check that a stage whose `loss` has no graph has nothing to train. A loss of 0 is that of no tokens. Raises
        `UserError`.
        """
        given = [each for some in inputs for each in (some.values() if isinstance(some, Mapping) else [some])]
        trains = self._trains[module, stage] or any(each.requires_grad and each.numel() for each in given)
        if trains and loss.item():
            raise UserError.at(
                f"stage {stage} of `{module}`",
                found="a loss that requires no gradient",
                expected="one with a graph",
                because="nothing would be trained by it",
                fix="return it without `detach()`; where it is to be measured only, run inside `torch.no_grad()`, name "
                "the module in `forward_only`, or return it among `metrics`",
            )


def require_no_ddp(module: str, stage: int, parts: Iterable[nn.Module]) -> None:
    """Check that a stage does not reduce its gradients by itself. Raises `UserError`."""
    if any(isinstance(part, DistributedDataParallel) for part in parts):
        raise UserError.at(
            f"stage {stage} of `{module}`",
            found="PyTorch's DistributedDataParallel",
            expected="the module itself",
            because="DDP averages gradients in every backward pass, and expects one per forward pass",
            fix="leave it out: `build_optimizers` makes replicas equal, and its `step` sums their gradients",
        )
