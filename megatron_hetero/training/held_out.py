"""The loss of held-out data sets during training, in the layout that trains.

Samples go the way of a training step, from the reading to the loss, without its backward pass: through loaders of their
own and a schedule without any backward. Nothing that training goes on with is touched: no weight, gradient or random
state, and no position in its data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_hetero.data.mixture import Mixture
from megatron_hetero.errors import UserError
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.training.metrics import EvaluationMetrics
from megatron_hetero.training.resolved import dtype_of, evaluation_schedule
from megatron_hetero.training.run import Run
from megatron_hetero.training.sources import open_held_out
from megatron_hetero.training.step_loader import StepBatch, StepLoader
from megatron_hetero.training.to_device import to_device


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A data set that is evaluated: how it is read, from its first sample to its last, and run."""

    name: str
    loader: StepLoader
    schedule: Schedule

    @classmethod
    def of(cls, name: str, samples: Mixture, run: Run) -> HeldOut:
        """`samples`, one epoch of them, in batches as large as those of training, or less where there are few."""
        batch = run.loader.batch.once(len(samples))
        what = f"evaluation of {name}, batch"
        loader = replace(run.loader, mixture=samples, batch=batch, what=what)
        return cls(name, loader, evaluation_schedule(run.config, run.topology.layouts, batch))

    def batches(self, workers: int) -> Iterator[StepBatch]:
        """All samples, each once."""
        steps = -(-len(self.loader.mixture) // self.loader.batch.step_samples)
        yield from self.loader.steps(1, steps, workers)


@dataclass(frozen=True, eq=False)
class HeldOutEvaluation:
    """What a run evaluates every `eval.interval` steps; nothing where that is 0. Every rank has one."""

    run: Run
    held_out: tuple[HeldOut, ...]

    @classmethod
    def build(cls, run: Run) -> HeldOutEvaluation:
        """Open the data sets. Raises `UserError` for one that does not load."""
        opened: Mapping[str, Mixture] = open_held_out(run.config) if run.config.eval.interval else {}
        return cls(run, tuple(HeldOut.of(name, samples, run) for name, samples in opened.items()))

    def after(self, step: int) -> Iterator[EvaluationMetrics]:
        """The losses of all data sets, where `step` (from 1) is one after which they are evaluated. Every rank goes
        through it to the end.

        Raises `UserError`, on every rank, for data that cannot be used.
        """
        if evaluates(step, self.run.config.eval.interval, self.run.config.train.iters):
            for held_out in self.held_out:
                yield self._evaluate(step, held_out)

    def _evaluate(self, step: int, held_out: HeldOut) -> EvaluationMetrics:
        start, mine, supervised, samples = time.perf_counter(), 0.0, 0, 0
        for batch in held_out.batches(self.run.config.data.workers):
            mine += self._loss_sum(held_out.schedule, batch)
            supervised += batch.supervised
            samples += len(batch.sample_lengths)
        if supervised == 0:
            raise UserError.at(
                f"eval.datasets: {held_out.name}",
                found="no supervised token",
                expected="some",
                because="the loss divides by their number",
                fix="raise data.max_seq_length, mend the data set, or leave it out",
            )
        # In fp64, so that the sum of many batches is as good as that of one.
        total = float(self.run.over_ranks([mine if self.run.counts_loss else 0.0]).sum())
        self.run.watch.read()  # What was measured here is no part of the next step.
        return EvaluationMetrics(
            step=step,
            dataset=held_out.name,
            loss=total / supervised,
            supervised_tokens=supervised,
            samples=samples,
            time_s=time.perf_counter() - start,
        )

    def _loss_sum(self, schedule: Schedule, batch: StepBatch) -> float:
        """This rank's sum of token losses."""
        platform, dtype = self.run.platform, dtype_of(self.run.config)
        return float(self.run.interpreter.run(schedule, lambda m: to_device(batch.micro_batches[m], platform, dtype)))


def evaluates(step: int, interval: int, iters: int) -> bool:
    """Whether data sets are evaluated after `step` of `iters`: after each `interval` steps, and after the last one."""
    return interval > 0 and (step % interval == 0 or step == iters)
