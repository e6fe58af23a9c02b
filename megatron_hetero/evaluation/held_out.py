"""The loss and the exact match of held-out data sets during training, in the layout that trains.

Samples go the way of a training step, from the reading to the loss, without its backward pass: through loaders of their
own and a schedule without any backward. Nothing that training goes on with is touched: no weight, gradient or random
state, and no position in its data.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_hetero.batch.step_loader import StepBatch, StepLoader
from megatron_hetero.batch.to_device import to_device
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.errors import SharedError
from megatron_hetero.evaluation.exact_match import answer_counts, exact_match, supervised_samples
from megatron_hetero.execution.contract import DeviceMicroBatch
from megatron_hetero.names import TEXT
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.training.metrics import EvaluationMetrics
from megatron_hetero.training.metrics_history import evaluated_after
from megatron_hetero.training.trainer import Trainer


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A data set that is evaluated: how it is read, from its first sample to its last, and run."""

    name: str
    loader: StepLoader
    schedule: Schedule

    @classmethod
    def of(cls, name: str, samples: Mixture, run: Trainer) -> HeldOut:
        """`samples`, one epoch of them, in batches as large as those of training, or less where there are few."""
        batch = run.loader.batch.once(len(samples))
        what = f"evaluation of {name}, batch"
        loader = replace(run.loader, mixture=samples, batch=batch, what=what)
        return cls(name, loader, run.job.evaluation_schedule(batch))

    def batches(self, workers: int) -> Iterator[StepBatch]:
        """All samples, each once."""
        steps = -(-len(self.loader.mixture) // self.loader.batch.step_samples)
        yield from self.loader.steps(1, steps, workers)


@dataclass(frozen=True, eq=False)
class HeldOutEvaluation:
    """What a run evaluates every `eval.interval` steps; nothing where that is 0. Every rank has one."""

    run: Trainer
    held_out: tuple[HeldOut, ...]

    @classmethod
    def build(cls, run: Trainer) -> HeldOutEvaluation:
        """Of the data sets that the run has opened."""
        evaluated = run.held_out.items() if run.config.eval.interval else ()
        return cls(run, tuple(HeldOut.of(name, samples, run) for name, samples in evaluated))

    def after(self, step: int, but: Collection[str] = ()) -> Iterator[EvaluationMetrics]:
        """What is measured of each data set but some, where `step` (from 1) is one after which they are evaluated.
        Every rank goes through it to the end.

        Raises `SharedError` for data that cannot be used.
        """
        if evaluates(step, self.run.config.eval.interval, self.run.config.train.iters):
            for held_out in self.held_out:
                if held_out.name not in but:
                    yield self._evaluate(step, held_out)

    def made_up(self) -> Iterator[EvaluationMetrics]:
        """What was due after the step that the run goes on from, and was not measured, since the run was stopped there,
        or ended with an error; as `after` has it.
        """
        resumed = self.run.resumed
        if resumed.step > 0:
            yield from self.after(resumed.step, but=evaluated_after(resumed.step, resumed.history))

    def _evaluate(self, step: int, held_out: HeldOut) -> EvaluationMetrics:
        start, mine, supervised, samples = time.perf_counter(), 0.0, 0, 0
        counts = []
        for batch in self._watched_batches(held_out):
            loss_sum, hits = self._forward(held_out.schedule, batch)
            mine += loss_sum
            counts.append(self._counts(held_out, batch, hits))
            supervised += batch.supervised
            samples += len(batch.sample_lengths)
        if supervised == 0:
            raise SharedError.at(
                f"eval.datasets: {held_out.name}",
                found="no supervised token",
                expected="some",
                because="the loss divides by their number",
                fix="raise data.max_seq_length, mend the data set, or leave it out",
            )
        # In fp64, so that the sum of many batches is as good as that of one.
        with self.run.watched(f"the sums over ranks of the evaluation of {held_out.name} after step {step}"):
            total = float(self.run.over_ranks([mine if self.run.counts_loss else 0.0]).sum())
            right, asked = exact_match(self.run.added_over_ranks(np.concatenate(counts, axis=1)))
        self.run.watch.read()  # What was measured here is no part of the next step.
        return EvaluationMetrics(
            step=step,
            dataset=held_out.name,
            loss=total / supervised,
            exact_match=right / asked,
            asked=asked,
            supervised_tokens=supervised,
            samples=samples,
            time_s=time.perf_counter() - start,
        )

    def _watched_batches(self, held_out: HeldOut) -> Iterator[StepBatch]:
        """All batches of the data set."""
        batches = iter(held_out.batches(self.run.config.data.workers))
        while True:
            with self.run.watched(f"the data of the evaluation of {held_out.name}"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _forward(self, schedule: Schedule, batch: StepBatch) -> tuple[float, dict[int, torch.Tensor]]:
        """This rank's sum of token losses; and by micro-batch, for each supervised token of this rank, whether it is
        predicted right, bool [t], filled where this rank has the last stage of the text module.
        """
        platform, dtype, outputs = self.run.platform, self.run.job.dtype, self.run.job.outputs
        hits: dict[int, torch.Tensor] = {}

        def load(m: int) -> DeviceMicroBatch:
            moved = to_device(batch.micro_batches[m], platform, dtype, outputs)
            text = moved.inputs.get(TEXT)
            if text is None:
                return moved
            hits[m] = torch.zeros_like(text.targets, dtype=torch.bool)
            return replace(moved, inputs={**moved.inputs, TEXT: replace(text, hits=hits[m])})

        return float(self.run.interpreter.run(schedule, load)), hits

    def _counts(self, held_out: HeldOut, batch: StepBatch, hits: Mapping[int, torch.Tensor]) -> np.ndarray:
        """What this rank counts of the samples of a batch, see `answer_counts`: int64 [2, samples of a full batch].

        Where samples were left out as too long, the others of their pack move up and places at its end stay empty.
        """
        run, shape = self.run, held_out.loader.batch
        counts = np.zeros((2, shape.step_samples), np.int64)
        if not run.counts_loss:
            return counts
        replica = run.topology.layouts[TEXT].replica_of(run.topology.rank)
        for m, of_tokens in hits.items():
            pack, share = batch.micro_batches[m].pack, batch.micro_batches[m].plan.text
            assert pack is not None and share is not None, "a rank of the text module has a pack"
            places = shape.numbers(1, replica, m)
            samples = supervised_samples(pack, share.tokens)
            counts[:, places.start : places.stop] = answer_counts(samples, of_tokens.cpu().numpy(), len(places))
        return counts


def evaluates(step: int, interval: int, iters: int) -> bool:
    """Whether data sets are evaluated after `step` of `iters`: after each `interval` steps, and after the last one."""
    return interval > 0 and (step % interval == 0 or step == iters)
