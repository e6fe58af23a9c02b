"""Metrics of a run: on the terminal, in metrics.jsonl, and optionally in TensorBoard and Weights & Biases.

One rank gets a `MetricsWriter`, the others a `NullWriter` with the same methods, so that the training loop has no
conditions.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_hetero import terminal
from megatron_hetero.errors import UserError, reason
from megatron_hetero.outputs.logs import METRICS as FILE_NAME
from megatron_hetero.training.log_folder import LogFolder, unwritable
from megatron_hetero.training.skipped import Skipped
from megatron_hetero.training.trackers.tracker import open_trackers, scalars

_TRACKER_FIX = "free space or restore access for the next run; metrics.jsonl has all steps"
TERMINAL, REMOVED = "terminal", "removed"
"""Two faults of a writer: the one after which nothing more is printed, and the one that has been repaired."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, over all ranks.

    Attributes:
        step: counted from 1.
        loss: mean over supervised tokens, in nats; NaN if nothing was trained.
        grad_norm: over all modules, before clipping; NaN if nothing was trained.
        lr: of the text module.
        tokens: of all samples, including image tokens, excluding padding.
        images: number of images.
        skipped_samples: samples skipped as too long; if all were, nothing was trained.
        step_time_s: wall-clock seconds.
        peak_memory_bytes: maximum over ranks.
        data_time_s: seconds of the step spent waiting for data.
        boundary_time_s: seconds of the step in which this rank packed or awaited rows; transfers overlap with compute.
        mfu: model FLOPs utilisation, None if the device's peak is unknown.
        stopping: whether a rank was asked to stop, so that all stop after this step; not recorded.
        extra: further values to record, under unused names.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    images: int
    step_time_s: float
    peak_memory_bytes: int
    skipped_samples: int = 0
    data_time_s: float = 0.0
    boundary_time_s: float = 0.0
    mfu: float | None = None
    stopping: bool = False
    extra: Mapping[str, float | int | str | None] = field(default_factory=dict)

    def per_second(self, count: int) -> float:
        """`count` of the step as a rate; 0 where no time passed."""
        return count / self.step_time_s if self.step_time_s > 0 else 0.0

    def share(self, seconds: float) -> float:
        """`seconds` as a share of the step's time; 0 where no time passed."""
        return seconds / self.step_time_s if self.step_time_s > 0 else 0.0

    def record(self) -> dict[str, Any]:
        """The record for metrics.jsonl; numbers that are not finite are None."""
        values = {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens": self.tokens,
            "images": self.images,
            "skipped_samples": self.skipped_samples,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.per_second(self.tokens),
            "images_per_s": self.per_second(self.images),
            "peak_memory_bytes": self.peak_memory_bytes,
            "data_share": self.share(self.data_time_s),
            "boundary_share": self.share(self.boundary_time_s),
            "mfu": self.mfu,
        }
        taken = values.keys() & self.extra.keys()
        assert not taken, f"extra metrics {sorted(taken)} have names that are taken"
        return {name: _finite(value) for name, value in (values | dict(self.extra)).items()}

    def line(self, steps: int) -> str:
        """The line for the terminal, in a run of so many steps."""
        parts = [
            f"step {self.step:>{len(str(steps))}}/{steps}",
            "nothing trained" if math.isnan(self.loss) else f"loss {self.loss:.4f} | norm {self.grad_norm:.3f}",
            f"lr {self.lr:.2e}",
            f"{self.per_second(self.tokens):,.0f} tokens/s",
            f"{self.per_second(self.images):,.1f} images/s",
            f"{self.step_time_s:.3f} s",
            f"data {self.share(self.data_time_s):.0%}",
            f"boundary {self.share(self.boundary_time_s):.0%}",
            f"memory {self.peak_memory_bytes / 2**30:.2f} GiB",
        ]
        parts += [] if self.mfu is None else [f"MFU {self.mfu:.1%}"]
        parts += [f"{self.skipped_samples:,} too long"] if self.skipped_samples else []
        return " | ".join(parts)


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """Metrics of one held-out data set after one step, over all ranks.

    Attributes:
        step: the step that it follows, counted from 1.
        dataset: its name.
        loss: mean over all supervised tokens, in nats.
        exact_match: fraction of samples whose answer greedy decoding would reproduce exactly.
        asked: the number of samples that this is a fraction of: those with a supervised token.
        supervised_tokens: number of supervised tokens.
        samples: number of samples, without those skipped as too long.
        time_s: wall-clock seconds.
    """

    step: int
    dataset: str
    loss: float
    exact_match: float
    asked: int
    supervised_tokens: int
    samples: int
    time_s: float

    @property
    def values(self) -> dict[str, float | None]:
        """The numbers by name; those that are not finite are None."""
        numbers = {
            "loss": self.loss,
            "exact_match": self.exact_match,
            "asked": self.asked,
            "supervised_tokens": self.supervised_tokens,
            "samples": self.samples,
            "time_s": self.time_s,
        }
        return {name: _finite(value) for name, value in numbers.items()}

    def record(self) -> dict[str, Any]:
        """The record for metrics.jsonl, in a line of its own."""
        return {"step": self.step, "eval_dataset": self.dataset} | {f"eval_{n}": v for n, v in self.values.items()}

    def line(self, steps: int) -> str:
        """The line for the terminal, in a run of so many steps."""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps} | evaluation of {self.dataset} | loss {self.loss:.4f} | "
            f"exact match {self.exact_match:.1%} of {self.asked:,} | "
            f"{self.supervised_tokens:,} tokens of {self.samples:,} samples | {self.time_s:.3f} s"
        )


class Writer(Protocol):
    """Receives the output of the training loop; a context manager that closes itself."""

    def write(self, metrics: StepMetrics) -> None:
        """Records one step."""
        ...

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Records the evaluation of one data set."""
        ...

    def print(self, renderable: object) -> None:
        """Prints text or anything that `rich` renders, above the progress bar."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Notes for the end of training."""
        ...

    def close(self) -> None:
        """Finishes; nothing is written afterwards."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NullWriter:
    """A writer for the ranks that report nothing."""

    faults: Mapping[str, str] = MappingProxyType({})
    is_broken = False

    def write(self, metrics: StepMetrics) -> None:
        """Does nothing."""

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Does nothing."""

    def print(self, renderable: object) -> None:
        """Does nothing."""

    def notes(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def close(self) -> None:
        """Does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


class MetricsWriter:
    """Writes the metrics of a run to a folder and the terminal. A failing write does not end the run: it is reported at
    once, retried if possible, and kept in `faults` by what failed.

    Args:
        folder: created if necessary; files of an earlier run are moved to a subfolder.
        steps: number of steps of the run.
        config: the resolved configuration, saved with the metrics.
        done: number of steps trained before, with the lines of metrics.jsonl in `history`.
        tensorboard: whether TensorBoard's files are written to the folder too.
        wandb: the Weights & Biases project to log to; None: not at all.
        console: receives lines and progress; standard output by default.

    Raises:
        UserError: the folder cannot be written, another run writes there, or a tracker is not installed or cannot be
            started.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        config: str = "",
        done: int = 0,
        history: str = "",
        tensorboard: bool = False,
        wandb: str | None = None,
        console: Console | None = None,
    ) -> None:
        self._steps = steps
        self._console = console or terminal.console()
        self.faults: dict[str, str] = {}
        self._log = LogFolder(folder, history, config)
        self._skipped = Skipped.of(history)
        try:
            self._trackers = list(open_trackers(folder, tensorboard=tensorboard, wandb=wandb, config=config, done=done))
        except UserError:
            self._log.close()
            raise
        self._progress = _progress(self._console)
        self._task = self._progress.add_task("training", total=steps, completed=done)
        # Only a terminal can redraw a bar; elsewhere there are plain lines.
        if self._console.is_terminal:
            self._progress.start()
        for note in self._log.notes:
            self.print(note)

    @property
    def is_broken(self) -> bool:
        """Whether something cannot be written at the moment."""
        return bool(self.faults.keys() - {REMOVED})

    def write(self, metrics: StepMetrics) -> None:
        """Records one step."""
        record = metrics.record()
        self._record(record)
        self._skipped = self._skipped.and_of(record)
        self._show("train", metrics.step, record)
        self.print(metrics.line(self._steps))
        self._progress.update(self._task, completed=metrics.step)

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Records the evaluation of one data set."""
        self._record(metrics.record())
        self._show(f"eval/{metrics.dataset}", metrics.step, metrics.values)
        self.print(metrics.line(self._steps))

    def _record(self, record: Mapping[str, Any]) -> None:
        self._append(json.dumps(record, allow_nan=False) + "\n")

    def _append(self, line: str) -> None:
        try:
            made_again = self._log.append(line)
        except (OSError, UserError) as error:
            wrong = unwritable(self._log.folder / FILE_NAME, error) if isinstance(error, OSError) else error
            return self._note(FILE_NAME, str(wrong))
        self.faults.pop(FILE_NAME, None)
        if made_again:
            self._note(REMOVED, _removed(self._log.folder))
        return None

    def _show(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers to each tracker, until that fails."""
        for tracker in tuple(self._trackers):
            try:
                tracker.log(step, scalars(group, values))
            except OSError as error:
                self._trackers.remove(tracker)
                fault = UserError.at(tracker.name, problem=f"stopped recording ({reason(error)})", fix=_TRACKER_FIX)
                self._note(tracker.name, str(fault))

    def _note(self, what: str, fault: str) -> None:
        """Report a fault if it is new."""
        if what not in self.faults:
            with suppress(OSError):
                print(f"warning: {fault}", file=sys.stderr, flush=True)
        self.faults[what] = fault

    def print(self, renderable: object) -> None:
        """Prints text or anything that `rich` renders, above the progress bar."""
        if TERMINAL in self.faults:
            return
        try:
            if isinstance(renderable, str) and not self._console.is_terminal:
                # A file or a pipe has no width to wrap at.
                print(renderable, file=self._console.file)
            else:
                self._console.print(renderable, markup=False, highlight=False)
            self._console.file.flush()
        except (OSError, SystemExit) as error:  # `rich` exits on a closed pipe.
            why = reason(error) if isinstance(error, OSError) else "broken pipe"
            self._note(TERMINAL, f"standard output: cannot be written ({why}).")

    def notes(self) -> tuple[str, ...]:
        """Notes for the end of training, on all steps, including those before a resume."""
        return self._skipped.notes()

    def close(self) -> None:
        """Finishes; nothing is written afterwards."""
        if self._progress.live.is_started:
            self._progress.stop()
        self._append("")  # Lines still waiting for disk space, and a file that was removed after the last step.
        self._log.close()
        for tracker in self._trackers:
            with suppress(OSError):  # Each step was flushed as it was written, and failures were reported.
                tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def _removed(folder: Path) -> str:
    return str(
        UserError.at(
            f"log.dir: {folder / FILE_NAME}",
            problem="was removed during the run",
            fix="it has been written again in full, but other files of the folder may be gone",
        )
    )


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


def _finite(value: Any) -> Any:
    """The value, or None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
