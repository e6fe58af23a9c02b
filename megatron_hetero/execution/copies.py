"""Gradients of rows that several ranks of the text module need, compared before they return: whether these are whole or
parts is stated in the plan, and the other would be counted too often or too seldom.
"""

from __future__ import annotations

import json
import time
from collections import Counter

import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.agreement import Copy, can_compare, require_fit, state
from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.layout.edge import Edge

_POLL_S = 0.005


class ComparedCopies:
    """Compares the first gradients along each edge that are not zero, through a store: the ranks with copies are in
    step, the others of the edge are not.

    `name`: the same on all ranks, and of no others. Waits have no time-out of their own: a watchdog ends those that
    take too long.
    """

    def __init__(self, name: str):
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._turns: Counter[str] = Counter()
        self._compared: set[str] = set()

    def require_fit(self, edge: Edge, plan: LoadedPlan, grads: Tensor) -> None:
        """Check gradients of needed rows, [needed, width]. Waits for the other ranks that need them. Raises
        `UserError` on all of these.
        """
        where = f"{edge} on {plan.copies}, {'parts' if plan.summed else 'whole'}"
        if where in self._compared or not can_compare(plan, grads):
            return
        turn = f"{where} {self._turns[where]}"
        self._turns[where] += 1
        self._store.set(f"{turn} of {plan.rank}", json.dumps(state(plan, grads).tolist()))
        copies = [Copy.of(json.loads(self._get(f"{turn} of {rank}"))) for rank in plan.copies]
        if any(copy.size for copy in copies):
            self._compared.add(where)
        require_fit(f"boundary {edge}", copies)

    def _get(self, key: str) -> str:
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        return self._store.get(key).decode()
