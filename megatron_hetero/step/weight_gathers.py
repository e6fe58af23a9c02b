"""The gathering of a module's weights after an update, bucket by bucket, beside the forward pass that reads them.

When a rank has updated its shares it begins to gather all buckets, those first that are read first. Each part of a
stage (an embedding, a layer, what is left) waits, before it runs, for the buckets that its parameters lie in. All ranks
of a group begin the same gathers in one order, whenever each of them runs the module, or if it does not in this step;
whoever reads or writes weights otherwise waits for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_hetero.execution.contract import Gathered
from megatron_hetero.step.buffers import Bucket

Part = tuple[nn.Module, Collection[nn.Parameter]]
"""What waits for its weights before it runs, and which these are."""


class WeightGathers:
    """Those of a module, one update after the other. `name`: of the module. `parts`: of its stages on this rank, in the
    order in which they run.
    """

    def __init__(self, name: str, buckets: Sequence[Bucket], group: dist.ProcessGroup, parts: Sequence[Part]):
        self.name, self.group = name, group
        first_read = {id(p): place for place, (_, own) in reversed(list(enumerate(parts))) for p in own}
        self.buckets = sorted(buckets, key=lambda bucket: min(first_read[id(p)] for p in bucket.parameters))
        self._works: dict[int, dist.Work] = {}
        places = {id(p): place for place, bucket in enumerate(self.buckets) for p in bucket.parameters}
        for module, own in parts:
            read = sorted({places[id(p)] for p in own if id(p) in places})
            if read:
                module.register_forward_pre_hook(partial(self._before_run, read))

    def start(self) -> None:
        """Begin to give all ranks what each has updated. Collective. Nothing that is computed waits for it."""
        self.wait()
        with torch.profiler.record_function(f"{self.name} weights"):
            for place, bucket in enumerate(self.buckets):
                assert bucket.weights is not None and bucket.share is not None, "ranks update shares"
                work = dist.all_gather_into_tensor(bucket.weights, bucket.share, group=self.group, async_op=True)
                assert work is not None, "this rank is in the group"
                self._works[place] = work

    def wait(self, places: Iterable[int] | None = None) -> None:
        """What is computed from here on sees the weights of the buckets at `places`, by default of all."""
        for place in list(self._works) if places is None else places:
            if (work := self._works.pop(place, None)) is not None:
                work.wait()

    def _before_run(self, places: Sequence[int], *_: Any) -> None:
        if self._works:
            self.wait(places)


def parts_of_stage(stage: Any) -> list[Part]:
    """What is left of it besides its `units()`, which its first run needs, and these."""
    units = [(unit.module, list(unit.module.parameters())) for unit in units_of(stage)]
    inside = {id(p) for _, own in units for p in own}
    return [(stage, [p for p in stage.parameters() if id(p) not in inside]), *units]


def units_of(stage: Any) -> list[Gathered]:
    """The parts that the stage names in `units()`, in the order in which they run; none where it has no such method."""
    named = stage.units() if hasattr(stage, "units") else ()
    return [unit if isinstance(unit, Gathered) else Gathered(unit) for unit in named]
