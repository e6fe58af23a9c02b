"""How the samples of a step are dealt to replicas of the text module and micro-batches. Pure.

A step trains the same samples of the stream in every layout; dealing them out changes rounding only, since losses are
summed over all tokens of a step (docs/gradients.md). Every rank computes the deal itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TypeAlias

import numpy as np

from megatron_hetero.data.balance import UNLIMITED, fill_bins, into_rounds
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.job.job import BatchShape, Budget, JobSpec, samples_of
from megatron_hetero.models.items.types import ItemShape

Deal = Sequence[Sequence[Sequence[int]]]
"""Numbers of the samples of each micro-batch and replica, ascending; at least one micro-batch."""
FLOPS = 1 << 20
"""Flops per unit of cost. Costs are integers, so that their sums are exact in float64."""


@dataclass(frozen=True)
class InOrder(BatchShape):
    """Deals the same number of samples to every micro-batch, in the order of the stream."""

    def foreseen(self, step: int, replica: int) -> list[int]:
        """Return the samples of a replica in `step`, which are known before the lengths of samples."""
        return [n for m in range(self.micro_batches) for n in self.numbers(step, replica, m)]

    def deal(self, step: int, samples: Mapping[int, PackMetadata]) -> Deal:
        """Deal out the `samples` of `step`. Packs are shorter where samples were skipped."""
        return [
            [[n for n in self.numbers(step, r, m) if n in samples] for r in range(self.replicas)]
            for m in range(self.micro_batches)
        ]


@dataclass(frozen=True)
class ByBudget:
    """Deals samples to as few micro-batches as the budget allows, with even loads, see `fill_bins`.

    `replicas`: number of replicas of the text module. `encoders`: shapes by name. `text_work`: predicted flops of a
    sample of `n` tokens. `end`: number of samples in the stream; None for an infinite one.
    """

    replicas: int
    step_samples: int
    budget: Budget
    encoders: Mapping[str, ItemShape]
    text_work: Callable[[int], float]
    end: int | None = None

    def step(self, step: int) -> range:
        """Return the numbers of the samples of `step`, see `BatchShape.step`."""
        return samples_of(step, self.step_samples, self.end)

    def foreseen(self, step: int, replica: int) -> None:
        """Return None: the samples of a replica depend on the lengths of all samples."""
        return

    def deal(self, step: int, samples: Mapping[int, PackMetadata]) -> Deal:
        """Deal out the `samples` of `step`. Raises `ValueError` if a single sample exceeds the budget."""
        numbers = sorted(samples)
        ordered = [samples[number] for number in numbers]
        sizes = [[sample.tokens, *sample.patches(self.encoders)] for sample in ordered]
        patches = UNLIMITED if self.budget.patches is None else self.budget.patches
        costs = [int(sample.cost(self.encoders)) // FLOPS for sample in ordered]
        table = np.array(sizes, np.int64).reshape(len(numbers), 1 + len(self.encoders))
        budgets = [self.budget.tokens, *(patches for _ in self.encoders)]
        bins = fill_bins(table, budgets, np.array(costs, np.int64), self.replicas)
        work = [sum(self.text_work(ordered[i].tokens) for i in items) for items in bins]
        rounds = into_rounds(work, self.replicas)
        return [[[numbers[i] for i in bins[number]] for number in bins_of_round] for bins_of_round in rounds]

    def once(self, samples: int) -> ByBudget:
        """Return a copy for a stream that ends after `samples` samples, see `BatchShape.once`."""
        return replace(self, end=samples)


Dealing: TypeAlias = InOrder | ByBudget
"""Deals out the samples of a step; immutable and the same on all ranks."""


def dealing_of(job: JobSpec) -> Dealing:
    """Return the dealing that a job's configuration selects."""
    if job.budget is None:
        return InOrder(*astuple(job.batch))
    samples = job.config.train.global_batch_size
    return ByBudget(job.batch.replicas, samples, job.budget, job.shapes.encoders, job.text_work)
