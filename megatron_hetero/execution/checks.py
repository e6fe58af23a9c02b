"""What is checked while an interpreter runs: the first hidden states of each link and the first gradients of rows that
several ranks need, compared through a store, since ranks are not in step; and what models do.

Waits have no time-out of their own: a watchdog ends those that take too long.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_hetero.boundary.agreement import Copy, can_compare, require_fit, state
from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.errors import UserError
from megatron_hetero.layout.edge import Edge

_POLL_S = 0.005
_LONGEST = 1000
"""Of a list or of attributes, where modules are looked for."""


class RunChecks:
    """The checks of one interpreter. `name`: the same on all ranks, and of no other interpreter."""

    def __init__(self, name: str):
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._seen: set[tuple[str, str]] = set()
        self._turns: Counter[str] = Counter()
        self._compared: set[str] = set()

    # --------------------------------------------------------------------------------------- hidden states
    # A receive buffer of another shape with as many bytes would be filled without an error, and one of another size
    # would hang or abort. The receiver announces the shape of its buffer, the sender its verdict.

    def announce(self, link: str, shape: Sequence[int]) -> None:
        """State what this rank expects first."""
        if self._first(link, "announce"):
            self._store.set(f"{link} expects", str(tuple(shape)))

    def misfit_to_send(self, link: str, shape: Sequence[int]) -> str:
        """What the receiver expects where this rank sends something else first; else empty. Waits for the receiver."""
        if not self._first(link, "send"):
            return ""
        expected = self._get(f"{link} expects")
        fits = expected == str(tuple(shape))
        self._store.set(f"{link} gets", "" if fits else str(tuple(shape)))
        return "" if fits else expected

    def misfit_to_receive(self, link: str) -> str:
        """What the sender has instead of what this rank expects first; else empty. Waits for the sender."""
        return self._get(f"{link} gets") if self._first(link, "receive") else ""

    def _first(self, link: str, what: str) -> bool:
        first = (link, what) not in self._seen
        self._seen.add((link, what))
        return first

    # ---------------------------------------------------------------------------------- gradients of rows

    def require_fit(self, edge: Edge, plan: LoadedPlan, grads: Tensor) -> None:
        """Check that gradients of needed rows, [needed, width], are whole or parts, as the plan says: the other would
        be counted too often or too seldom. Those of each kind along an edge are compared until some are not zero, and
        then the 2nd, 4th, 8th, ... Waits for the other ranks that need them. Raises `UserError` on all of these.
        """
        where = f"{edge} on {plan.copies}, {'parts' if plan.summed else 'whole'}"
        if not can_compare(plan, grads):
            return
        number, turn = self._turns[where], f"{where} {self._turns[where]}"
        self._turns[where] += 1
        if where in self._compared and number & (number + 1):
            return
        self._store.set(f"{turn} of {plan.rank}", json.dumps(state(plan, grads).tolist()))
        copies = [Copy.of(json.loads(self._get(f"{turn} of {rank}"))) for rank in plan.copies]
        if any(copy.size for copy in copies):
            self._compared.add(where)
        require_fit(f"boundary {edge}", copies)

    def _get(self, key: str) -> str:
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        return self._store.get(key).decode()


@contextlib.contextmanager
def without_ddp(rank: int, module: str, stage: int) -> Iterator[None]:
    """Around a call of a stage, which must not reduce its gradients by itself, in whatever it keeps DDP. Raises
    `UserError`.
    """

    def refuse(*_: object, **__: object) -> None:
        refuse_ddp(rank, module, stage)

    # Hooks on modules would be seen by torch.compile.
    forward = DistributedDataParallel.forward
    try:
        DistributedDataParallel.forward = refuse  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        DistributedDataParallel.forward = forward


def refuse_ddp(rank: int, module: str, stage: int) -> NoReturn:
    """Raise the `UserError` of a stage that reduces its gradients by itself."""
    raise UserError.at(
        f"interpreter on rank {rank}",
        found=f"DistributedDataParallel in stage {stage} of `{module}`",
        expected="the module itself",
        because="DDP averages gradients in every backward pass, and expects one per forward pass",
        fix="leave it out: `build_optimizers` makes replicas equal, and its `step` sums their gradients",
    )


def require_frozen(module: str, stage: int, model: object, inputs: Sequence[Any], loss: Tensor) -> None:
    """Check that a stage whose `loss` has no graph has nothing to train. A loss of 0 is that of no tokens. Raises
    `UserError`.
    """
    given = [each for some in inputs for each in (some.values() if isinstance(some, Mapping) else [some])]
    trains = any(p.requires_grad for each in modules_in(model) for p in each.parameters(recurse=False))
    if (trains or any(each.requires_grad and each.numel() for each in given)) and loss.item():
        raise UserError.at(
            f"stage {stage} of `{module}`",
            found="a loss that requires no gradient",
            expected="one with a graph",
            because="nothing would be trained by it",
            fix="return it without `detach()`; where it is to be measured only, run inside `torch.no_grad()`, name "
            "the module in `forward_only`, or return it among `metrics`",
        )


def modules_in(held: object, depth: int = 3) -> Iterator[nn.Module]:
    """The modules of PyTorch that a callable holds: as its parts or attributes, in a closure, or as arguments of a
    partial function.
    """
    inside: Iterable[Any] = getattr(held, "__dict__", {}).values()
    if isinstance(held, nn.Module):
        yield from held.modules()
    elif isinstance(held, FunctionType):
        inside = inspect.getclosurevars(held).nonlocals.values()
    elif isinstance(held, MethodType):
        inside = [held.__self__]
    elif isinstance(held, partial):
        inside = held.func, *held.args, *held.keywords.values()
    elif isinstance(held, (list, tuple, dict)):
        inside = held.values() if isinstance(held, dict) else held
    if depth and not isinstance(held, (Tensor, type, ModuleType)):
        for each in islice(inside, _LONGEST):
            yield from modules_in(each, depth - 1)
