"""Which samples a replica of the text module trains in which micro-batch. Pure: all ranks deal for themselves, alike.

A step is the same `samples` of the stream in every layout; how they are dealt changes rounding only, since losses are
summed over all tokens of a step (docs/gradients.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from megatron_hetero.data.metadata import SampleMetadata
from megatron_hetero.data.sharding.bins import UNLIMITED, fill_bins, into_rounds
from megatron_hetero.job import BatchShape, Budget, JobSpec, samples_of
from megatron_hetero.models.items.types import ItemShape

Deal = Sequence[Sequence[Sequence[int]]]
"""For each micro-batch and replica the numbers of its samples, ascending; at least one micro-batch."""
FLOPS = 1 << 20
"""Unit of costs: integers whose sums are exact in float64."""


class Dealing(Protocol):
    """How the samples of a step are dealt out."""

    @property
    def step_samples(self) -> int:
        """Samples of one step, over all replicas: the global batch."""
        ...

    @property
    def budget(self) -> Budget | None:
        """What bounds a micro-batch, if not a number of samples."""
        ...

    def step(self, step: int) -> range:
        """The samples of `step` (from 1): their numbers in the stream (from 0). Fewer, or none, where it ends."""
        ...

    def foreseen(self, step: int, replica: int) -> Sequence[int] | None:
        """The samples of a replica in `step`; None where these depend on their lengths."""
        ...

    def deal(self, step: int, samples: Mapping[int, SampleMetadata]) -> Deal:
        """Deal out those of `step`. `samples`: without those that are skipped."""
        ...

    def once(self, samples: int) -> Dealing:
        """The same for a stream of `samples` samples that is read once."""
        ...


def dealing_of(job: JobSpec) -> Dealing:
    """As the job's configuration has it."""
    if job.budget is None:
        return InOrder(job.batch)
    samples = job.config.train.global_batch_size
    return ByBudget(job.batch.replicas, samples, job.budget, job.shapes.encoders, job.text_work)


@dataclass(frozen=True)
class InOrder:
    """As many samples in every micro-batch, in the order of the stream."""

    batch: BatchShape

    @property
    def step_samples(self) -> int:
        """Samples of one step."""
        return self.batch.step_samples

    @property
    def budget(self) -> None:
        """There is none."""
        return

    def step(self, step: int) -> range:
        """The samples of `step`."""
        return self.batch.step(step)

    def foreseen(self, step: int, replica: int) -> list[int]:
        """The samples of a replica in `step`."""
        return [n for m in range(self.batch.micro_batches) for n in self.batch.numbers(step, replica, m)]

    def deal(self, step: int, samples: Mapping[int, SampleMetadata]) -> Deal:
        """Where samples are skipped, packs are shorter."""
        return [
            [[n for n in self.batch.numbers(step, r, m) if n in samples] for r in range(self.batch.replicas)]
            for m in range(self.batch.micro_batches)
        ]

    def once(self, samples: int) -> InOrder:
        """In at most as many micro-batches a step."""
        return InOrder(self.batch.once(samples))


@dataclass(frozen=True)
class ByBudget:
    """As few micro-batches as the budget allows, with as even loads as can be found, see `fill_bins`.

    `replicas`: of the text module. `encoders`: by name. `text_work`: predicted flops of a sample of so many tokens.
    `end`: where the stream of samples ends; None: it has no end.
    """

    replicas: int
    step_samples: int
    budget: Budget
    encoders: Mapping[str, ItemShape]
    text_work: Callable[[int], float]
    end: int | None = None

    def step(self, step: int) -> range:
        """The samples of `step`."""
        return samples_of(step, self.step_samples, self.end)

    def foreseen(self, step: int, replica: int) -> None:
        """Lengths decide."""
        return

    def deal(self, step: int, samples: Mapping[int, SampleMetadata]) -> Deal:
        """Raises `ValueError` for a sample that exceeds the budget by itself."""
        numbers = sorted(samples)
        everything = [samples[number] for number in numbers]
        sizes = [[sample.tokens, *sample.patches(self.encoders)] for sample in everything]
        patches = UNLIMITED if self.budget.patches is None else self.budget.patches
        costs = [int(sample.cost(self.encoders)) // FLOPS for sample in everything]
        table = np.array(sizes, np.int64).reshape(len(numbers), 1 + len(self.encoders))
        budgets = [self.budget.tokens, *(patches for _ in self.encoders)]
        bins = fill_bins(table, budgets, np.array(costs, np.int64), self.replicas)
        work = [sum(self.text_work(everything[i].tokens) for i in items) for items in bins]
        return [
            [[numbers[i] for i in bins[number]] for number in of_round] for of_round in into_rounds(work, self.replicas)
        ]

    def once(self, samples: int) -> ByBudget:
        """With the same budget."""
        return replace(self, end=samples)
