"""What an interpreter checks in its first step: the first hidden states of each link and the first gradients of rows
that several ranks need, compared through a store, since ranks are not in step; and what models do.

Waits have no time-out of their own: a watchdog ends those that take too long.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron_hetero.boundary.agreement import Copy, can_compare, require_fit, state
from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.errors import UserError
from megatron_hetero.layout.edge import Edge

_POLL_S = 0.005


class RunChecks:
    """The checks of one interpreter. `name`: the same on all ranks, and of no other interpreter."""

    def __init__(self, name: str):
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._known: set[str] = set()
        self._turns: Counter[str] = Counter()

    def is_new(self, what: str) -> bool:
        """Whether this is the first time that it is asked for."""
        new = what not in self._known
        self._known.add(what)
        return new

    def state(self, key: str, what: Sequence[float]) -> None:
        """State something for other ranks."""
        self._store.set(key, json.dumps(what))

    def stated(self, key: str) -> list[Any]:
        """What another rank states. Waits for it."""
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        return json.loads(self._store.get(key))

    def require_fit(self, edge: Edge, plan: LoadedPlan, grads: Tensor) -> None:
        """Check that gradients of needed rows, [needed, width], are whole or parts, as the plan says: the other would
        be counted too often or too seldom. Those of each kind along an edge are compared until some are not zero. Waits
        for the other ranks that need them. Raises `UserError` on all of these.
        """
        where = f"{edge} on {plan.copies}, {'parts' if plan.summed else 'whole'}"
        if where in self._known or not can_compare(plan, grads):
            return
        self._turns[where] += 1
        turn = f"{where}, {self._turns[where]}"
        self.state(f"{turn} of {plan.rank}", state(plan, grads).tolist())
        copies = [Copy.of(self.stated(f"{turn} of {rank}")) for rank in plan.copies]
        if any(copy.size for copy in copies):
            self._known.add(where)
        require_fit(f"boundary {edge}", copies)


@contextlib.contextmanager
def without_ddp(rank: int, module: str, stage: int) -> Iterator[None]:
    """Around a call of a stage, which must not reduce its gradients by itself, in whatever it keeps DDP. Raises
    `UserError`.
    """

    def refuse(*_: object, **__: object) -> None:
        raise UserError.at(
            f"interpreter on rank {rank}",
            found=f"DistributedDataParallel in stage {stage} of `{module}`",
            expected="the module itself",
            because="DDP averages gradients in every backward pass, and expects one per forward pass",
            fix="leave it out: `build_optimizers` makes replicas equal, and its `step` sums their gradients",
        )

    # Hooks on modules would be seen by torch.compile.
    forward = DistributedDataParallel.forward
    try:
        DistributedDataParallel.forward = refuse  # pyright: ignore[reportAttributeAccessIssue]
        yield
    finally:
        DistributedDataParallel.forward = forward


def require_frozen(module: str, stage: int, model: object, inputs: Sequence[Any], loss: Tensor) -> None:
    """Check that a stage whose `loss` has no graph has nothing to train. A loss of 0 is that of no tokens. Raises
    `UserError`.
    """
    given = [each for some in inputs for each in (some.values() if isinstance(some, Mapping) else [some])]
    trains = isinstance(model, nn.Module) and any(p.requires_grad for p in model.parameters())
    if (trains or any(each.requires_grad and each.numel() for each in given)) and loss.item():
        raise UserError.at(
            f"stage {stage} of `{module}`",
            found="a loss that requires no gradient",
            expected="one with a graph",
            because="nothing would be trained by it",
            fix="return it without `detach()`; where it is to be measured only, run inside `torch.no_grad()`, name "
            "the module in `forward_only`, or return it among `metrics`",
        )
