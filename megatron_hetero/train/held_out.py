"""Computes loss and exact match on held-out data sets during training, in the layout of training.

An evaluation runs only forward passes, with separate data loaders and a forward-only schedule; the state of training
is unchanged. Greedy decoding reproduces an answer exactly if, given the correct previous tokens, the most likely token
at each position is correct. One teacher-forced forward pass therefore gives both the loss and the exact match.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_hetero.base.errors import BadSample, SharedError
from megatron_hetero.data.device import to_device
from megatron_hetero.data.loader import StepBatch, StepLoader
from megatron_hetero.data.packing import bad_counts
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.stages import TextInput
from megatron_hetero.schedule.contract import MicroBatchInputs
from megatron_hetero.train.metrics import EvaluationMetrics
from megatron_hetero.train.run import Run, evaluates


def answer_counts(samples: np.ndarray, hits: np.ndarray, number: int) -> np.ndarray:
    """Count supervised tokens and correctly predicted tokens of each sample. Returns int64 [2, number].

    `samples`: int64 [t], the sample index of each supervised token. `hits`: bool [t], whether each is predicted
    correctly. `number`: number of samples.
    """
    counted = [np.bincount(chosen, minlength=number) for chosen in (samples, samples[hits])]
    return np.stack(counted).astype(np.int64)


def exact_match(counts: np.ndarray) -> tuple[int, int]:
    """Return the number of samples whose supervised tokens are all correct, and the number of samples with supervised
    tokens. `counts`: sum of `answer_counts` over ranks.
    """
    supervised, hits = counts
    asked = supervised > 0
    return int((asked & (hits == supervised)).sum()), int(asked.sum())


@dataclass(frozen=True, eq=False)
class HeldOutEvaluation:
    """Evaluates held-out data sets every `eval.interval` steps. Each rank has an instance.

    Attributes:
        run: the run whose model is evaluated.
        loaders: loaders by name of data set; each loads its data set once, in order.
    """

    run: Run
    loaders: Mapping[str, StepLoader]

    @classmethod
    def build(cls, run: Run) -> HeldOutEvaluation:
        """Build the evaluation of a run's held-out data sets, with batches of at most the training batch size."""
        return cls(run, run.loader.of_held_out(run.inputs.held_out))

    def after(self, step: int) -> Iterator[EvaluationMetrics]:
        """Yield the metrics of each data set if an evaluation is due after `step`. Collective: all ranks must exhaust
        the iterator. Raises `SharedError` for unusable data.
        """
        if evaluates(step, self.run.trainer.job.config.eval.interval, self.run.trainer.job.config.train.iters):
            for name in self.loaders:
                yield self._evaluate(step, name)

    def _evaluate(self, step: int, name: str) -> EvaluationMetrics:
        trainer, start = self.run.trainer, time.perf_counter()
        local_loss, supervised, samples = 0.0, 0, 0
        counts, bad = list[np.ndarray](), list[BadSample]()
        for batch in self._batches(name):
            loss_sum, hits = self._forward(batch)
            local_loss += loss_sum
            counts.append(self._counts(self.loaders[name].dealing.step_samples, batch, hits))
            supervised += batch.supervised
            samples += len(batch.sample_lengths)
            bad += batch.bad
        if supervised == 0:
            because, where = "the loss divides by their number", f"eval.datasets: {name}"
            fix = "raise data.max_seq_length, correct the data set, or remove it"
            raise SharedError.at(where, problem="no supervised token", because=because, fix=fix)
        # Sum in fp64, so that accuracy does not depend on the number of batches.
        with trainer.watched(f"the sums over ranks of the evaluation of {name} after step {step}"):
            total = float(trainer.all_gather([local_loss if trainer.counts_loss else 0.0]).sum())
            right, asked = exact_match(trainer.all_reduce(np.concatenate(counts, axis=1)))
        trainer.runner.watch.read()  # Discard these times, so that the next step does not report them.
        return EvaluationMetrics(
            step=step,
            dataset=name,
            loss=total / supervised,
            exact_match=right / asked,
            asked=asked,
            supervised_tokens=supervised,
            samples=samples,
            time_s=time.perf_counter() - start,
            bad=bad_counts(bad),
        )

    def _batches(self, name: str) -> Iterator[StepBatch]:
        """Yield all batches of the data set `name`."""
        trainer, loader = self.run.trainer, self.loaders[name]
        steps = -(-len(loader.mixture) // loader.dealing.step_samples)
        loaded = loader.steps(1, steps, trainer.job.config.data.workers)
        batches = self.run.checked(loaded, f"in an evaluation of {name}")
        for _ in range(steps):
            with trainer.watched(f"the data of the evaluation of {name}"):
                batch = next(batches)
            yield batch

    def _forward(self, batch: StepBatch) -> tuple[float, dict[int, torch.Tensor]]:
        """Run the forward pass of a batch. Returns this rank's sum of token losses and, by micro-batch, whether each
        supervised token is predicted correctly, bool [t], set only on the text module's last stage.
        """
        trainer, job = self.run.trainer, self.run.trainer.job
        hits: dict[int, torch.Tensor] = {}

        def load(m: int) -> MicroBatchInputs:
            moved = to_device(batch.micro_batches[m], trainer.topology.platform.device)
            text = moved.inputs.get(TEXT)
            if text is None:
                return moved
            hits[m] = torch.zeros_like(text.targets, dtype=torch.bool)
            return replace(moved, inputs={**moved.inputs, TEXT: replace(text, hits=hits[m])})

        schedule = job.schedule_of(len(batch.micro_batches), evaluation=True)
        return float(trainer.runner.run(schedule, load).loss), hits

    def _counts(self, size: int, batch: StepBatch, hits: Mapping[int, torch.Tensor]) -> np.ndarray:
        """Return this rank's `answer_counts` of a batch, with samples in data set order: int64 [2, size], where `size`
        is that of a full batch. Skipped and missing samples have zero counts.
        """
        counts = np.zeros((2, size), np.int64)
        for m, token_hits in hits.items() if self.run.trainer.counts_loss else ():
            text: TextInput = batch.micro_batches[m].inputs[TEXT]
            places = text.samples[text.supervised.numpy()] % size
            counts += answer_counts(places, token_hits.cpu().numpy(), size)
        return counts
