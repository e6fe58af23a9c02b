"""PyTorch's optimizers for 16-bit parameters, with fp32 copies of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class MasterOptimizer(Optimizer):
    """An optimizer of PyTorch, of parameters of which the 16-bit ones have fp32 copies that it updates.

    To PyTorch's checkpoints (`torch.distributed.checkpoint.state_dict`) and schedulers it is an optimizer of the
    parameters themselves, with the copy in the state of each as `master`. `masters`: the copies, by parameter; a
    step takes their gradients, or where they have none that of the parameter.
    """

    def __init__(self, parameters: Sequence[Any], make: Callable[[list[Any]], Optimizer]):
        self.masters: dict[Any, Any] = {p: nn.Parameter(p.detach().float()) for p in parameters if p.element_size() < 4}
        for p, master in self.masters.items():
            vars(master).update({key: value for key, value in vars(p).items() if not key.startswith("_")})
        self.inner = make([self.masters.get(p, p) for p in parameters])
        of_master = {master: p for p, master in self.masters.items()}
        groups = [
            {**group, "params": [of_master.get(p, p) for p in group["params"]]} for group in self.inner.param_groups
        ]
        super().__init__(groups, self.inner.defaults)

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """By parameter, with `master`; empty before the first step."""
        kept, found = self.inner.state, {}
        for p in chain.from_iterable(group["params"] for group in self.param_groups) if kept else ():
            master = self.masters.get(p)
            found[p] = kept[p] if master is None else {**kept[master], "master": master.detach()}
        return found

    @state.setter
    def state(self, _: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass  # PyTorch's class sets it.

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the copies, and the parameters from them."""
        _copy_settings(self.param_groups, self.inner.param_groups)
        for p, master in self.masters.items():
            if master.grad is None and p.grad is not None:
                master.grad = p.grad.float()
        self.inner.step()
        for p, master in self.masters.items():
            p.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of parameters and copies."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """That of PyTorch, with `master` in the state of each 16-bit parameter."""
        found = self.inner.state_dict()
        for number, p in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            if p in self.masters:
                found["state"][number] = {**found["state"].get(number, {}), "master": self.masters[p].detach()}
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the state, the copies and from them the parameters."""
        saved = state_dict["state"]
        others = {key: {name: v for name, v in own.items() if name != "master"} for key, own in saved.items()}
        self.inner.load_state_dict({**state_dict, "state": others})
        _copy_settings(self.inner.param_groups, self.param_groups)
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(keys, own, strict=True):
            if p in self.masters:
                self.masters[p].copy_(saved[key]["master"])
                p.copy_(self.masters[p])


def _copy_settings(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """What groups say besides their parameters."""
    for own, other in zip(source, target, strict=True):
        other.update({name: value for name, value in own.items() if name != "params"})
