"""The sums of a module's gradients over ranks, bucket by bucket: within its last backward pass of a step, else behind
it.

All ranks of a group begin the same sums in one order, that of the buckets, whatever they hold: a bucket that is ready
before the one ahead of it waits for that one, and what a backward pass has not begun (without images there is none, and
a parameter may get no gradient) begins behind it. When a rank begins is its own affair: nothing that is computed waits
for a sum before the end of the step, and the group's communicator has no other use meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hetero.errors import UserError
from megatron_hetero.step.buffers import Bucket


class BucketSums:
    """Those of a step, one step after the other. `name`: of the module. `accumulators`: of all parameters, the nodes in
    which autograd accumulates gradients, once for each backward pass.
    """

    def __init__(
        self,
        name: str,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        accumulators: Sequence[tuple[nn.Parameter, Any]],
    ):
        self.name, self.buckets, self.group = name, buckets, group
        self._place = {id(p): place for place, bucket in enumerate(buckets) for p in bucket.parameters}
        self._accumulators, self._hooked = accumulators, False
        self.begin_step()

    def begin_step(self) -> None:
        """Nothing has been summed, and no backward pass is known to be the last."""
        self._missing = [set(map(id, bucket.parameters)) for bucket in self.buckets]
        self._expected = set[int]()
        self._finite: list[Tensor] = []
        self._works: list[dist.Work] = []

    def expect(self, parameters: Collection[nn.Parameter]) -> None:
        """The next backward pass is the last of the step that gives `parameters` gradients, and gives them once."""
        if not self._hooked:  # Behind Megatron's hooks, which add gradients up.
            for parameter, accumulator in self._accumulators:
                accumulator.register_hook(partial(self._accumulated, parameter))
            self._hooked = True
        self._expected.update(map(id, parameters))

    def require_before(self, place: int = 0) -> None:
        """Check that the sum of a bucket has not begun in this step: its gradients may change. Raises `UserError`."""
        if place < len(self._works):
            problem, because = "a backward pass comes after their sums over ranks have begun", "its part would be lost"
            fix = "give all micro-batches of a step to one call of the `Runner`, and call `zero_grad` before the next"
            raise UserError.at(f"gradients of `{self.name}`", problem=problem, because=because, fix=fix)

    def start_rest(self) -> Tensor:
        """Begin the sums that have not begun. Returns whether all gradients of this rank were finite before their sum,
        fp64 scalar.
        """
        for place in range(len(self._works), len(self.buckets)):
            self._start(place)
        return torch.stack(self._finite).isfinite().all().double()

    def wait(self) -> None:
        """What is computed from here on sees the sums."""
        for work in self._works:
            work.wait()

    def _accumulated(self, parameter: nn.Parameter, *_: object) -> None:
        key, place = id(parameter), self._place[id(parameter)]
        self.require_before(place)
        if key in self._expected:
            self._missing[place].discard(key)
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._start(len(self._works))

    def _start(self, place: int) -> None:
        bucket = self.buckets[place]
        with torch.no_grad(), torch.profiler.record_function(f"{self.name} gradient sums"):
            # The extremes are finite where all of it is; NaN counts as both. Many times as fast as a norm.
            self._finite.extend(torch.aminmax(bucket.gradients))
            sums: Callable[..., Any] = dist.all_reduce
            tensors = [bucket.gradients]
            if bucket.summed is not bucket.gradients:
                sums, tensors = dist.reduce_scatter_tensor, [bucket.summed, bucket.gradients]
            work = sums(*tensors, group=self.group, async_op=True)
        assert work is not None, "this rank is in the group"
        self._works.append(work)
