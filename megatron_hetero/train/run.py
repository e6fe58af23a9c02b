"""A training run on one rank: its batches, its export, and the table of modules that it prints at the start."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from rich.table import Table

from megatron_hetero.base.errors import NotFiniteError, SharedError
from megatron_hetero.base.outputs import BAD_RECORDS
from megatron_hetero.checkpoint.resume import Resumed
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.data.loader import StepBatch, StepLoader
from megatron_hetero.train.hf_export import export_model, writer_of
from megatron_hetero.train.inputs import Inputs
from megatron_hetero.train.log import Writer
from megatron_hetero.train.metrics import StepMetrics
from megatron_hetero.train.trainer import Trainer

ALLOWED_BAD = 10
"""Number of bad samples that are always allowed, regardless of their share of all samples."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """A run on one rank: its trainer, its data, and the writers of its results."""

    trainer: Trainer
    inputs: Inputs
    loader: StepLoader
    writer: Writer
    resumed: Resumed
    saver: Saver

    def batches(self) -> Iterator[tuple[int, StepBatch, float]]:
        """Yield (step, batch, seconds waited) for each remaining step. Batches are not prefetched across an evaluation.
        Raises `UserError` on every rank for unusable data, and if all samples are skipped.
        """
        config, first, in_a_row = self.trainer.job.config, self.resumed.step + 1, 0
        data, last = config.data, config.train.iters
        ends, everything = stretches(first, last, config.eval.interval), last * self.loader.dealing.step_samples
        loaded = chain.from_iterable(self.loader.steps(*each, data.workers) for each in ends)
        batches = self.checked(loaded, "since the start")
        for step in range(first, last + 1):
            start = time.perf_counter()
            with self.trainer.watched(f"the data of step {step}"):
                batch = next(batches)
            in_a_row = 0 if batch.sample_lengths else in_a_row + batch.skipped + len(batch.bad)
            if in_a_row >= min(len(self.loader.mixture), everything):  # Every available sample was skipped.
                what = f"longer than {data.max_seq_length} tokens" + (" or bad" if batch.bad else "")
                problem = f"all of {in_a_row} samples in a row are {what} and were skipped"
                where, fix = "data.max_seq_length (--data.max_seq_length)", "raise it, or lower data.max_pixels"
                fix = f"correct the records in {BAD_RECORDS} of log.dir, or {fix}" if batch.bad else fix
                raise SharedError.at(f"{where}, step {step}", problem=problem, fix=fix)
            yield step, batch, time.perf_counter() - start

    def steps(self, stop: object) -> Iterator[StepMetrics]:
        """Train the remaining steps, and yield their metrics in order. The next step is issued to the device before the
        metrics of a step are read, unless a checkpoint or an evaluation is due after it.

        `stop`: true once this rank was asked to stop. All ranks then stop after the steps that have been issued; only
        the last metrics are `stopping`. Raises `UserError` like `batches`, and `SharedError` like `Trainer.read_step`.
        """
        trainer, config, stopping = self.trainer, self.trainer.job.config, False
        for step, batch, waited in self.batches():
            trainer.issue_step(step, batch, waited, stop)
            settles = self.saver.is_due(step) or step == config.train.iters
            settles = settles or evaluates(step, config.eval.interval, config.train.iters)
            while len(trainer.issued) > (0 if settles or stopping else 1):
                metrics = trainer.read_step()
                stopping = stopping or metrics.stopping
                yield replace(metrics, stopping=stopping and not trainer.issued)
            if stopping:
                return

    def settle(self, error: SharedError) -> SharedError:
        """Read the steps that are still issued after an error on all ranks, so that what was trained can be saved.
        Returns the error that ends the run: if one of these steps is not finite, that is the cause to report.
        """
        try:
            while self.trainer.issued:
                metrics = self.trainer.read_step()
                self.writer.write(metrics)
                self.saver.trained = metrics.step
        except NotFiniteError as fault:
            return fault
        return error

    def checked(self, batches: Iterable[StepBatch], when: str) -> Iterator[StepBatch]:
        """Yield the batches after recording their bad samples in the log folder. `when`: description of when samples
        were drawn, for the message. Raises `SharedError` on every rank once too many samples are bad.
        """
        bad, drawn, share = 0, 0, self.trainer.job.config.data.max_bad_share
        for batch in batches:
            bad, drawn = bad + len(batch.bad), drawn + len(batch.sample_lengths) + batch.skipped + len(batch.bad)
            if batch.bad:
                self.writer.write_bad(batch.bad)
            if batch.bad and bad > max(ALLOWED_BAD, share * drawn):
                where, found = "data.max_bad_share (--data.max_bad_share)", f"{bad} bad samples of {drawn} {when}"
                fix = f"correct the records in {BAD_RECORDS} of log.dir, such as `{batch.bad[-1].message}`, or raise it"
                raise SharedError.at(where, found=found, expected=f"at most {share} of them, or {ALLOWED_BAD}", fix=fix)
            yield batch

    def export(self, target: Path) -> None:
        """Export the model to `target` in `transformers` format, or in PEFT format if it has adapters that are not
        merged. Raises `SharedError` if `target` cannot be written.
        """
        trainer, inputs = self.trainer, self.inputs
        writer, only = writer_of(trainer.job)
        with trainer.topology.watchdog.waiting(lambda: "the export of the model, with all other ranks,"):
            export_model(
                trainer.optimizer.modules,
                trainer.job.shapes,
                trainer.topology,
                target,
                inputs.companions,
                trainer.job.dtype,
                transposed=inputs.transposed,
                source=inputs.source,
                writer=writer,
                only=only,
            )


def evaluates(step: int, interval: int, iters: int) -> bool:
    """Return whether an evaluation is due after `step`: every `interval` steps, and after the last of `iters` steps."""
    return step > 0 and interval > 0 and (step % interval == 0 or step == iters)


def stretches(first: int, last: int, interval: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of ranges of steps that end at multiples of `interval`; a single range if that is 0.

    An evaluation after a range uses the process groups that load training data, so no step may be loading meanwhile.
    """
    while first <= last:
        end = last if interval == 0 else min(last, -(-first // interval) * interval)
        yield first, end
        first = end + 1


def describe(trainer: Trainer) -> Table:
    """Return a table with each module's layout, ranks and maximum number of parameters on a rank. Collective."""
    model = trainer.job.config.model
    title = f"{model.hf_path} in {model.dtype} on {trainer.topology.platform.device.type}"
    table = Table(title=title + trainer.job.waves_text)
    for column in ("module", "layout", "ranks", "parameters per rank", "trained per rank", "activations over tp"):
        table.add_column(column, justify="right" if "per rank" in column else "left")
    for name, layout in trainer.topology.layouts.items():
        stored, trained = trainer.all_gather(_parameters(trainer, name)).max(dim=0).values.long().tolist()
        over_tp = "-" if layout.tp == 1 else "sharded" if trainer.job.sequence_parallel[name] else "whole"
        table.add_row(name, layout.degrees_text, layout.ranks_text, f"{stored:,}", f"{trained:,}", over_tp)
    return table


def _parameters(trainer: Trainer, name: str) -> tuple[int, int]:
    """Return the number of parameters of a module on this rank, and how many of these are trained."""
    views = (module for module in trainer.optimizer.modules if module.name == name)
    parameters = [p for view in views for p in view.parameters.values()]
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
