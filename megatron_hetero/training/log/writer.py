"""The writers of metrics: to the terminal, to metrics.jsonl, and optionally to TensorBoard and Weights & Biases.

One rank gets a `MetricsWriter`, the others a `Writer` that does nothing, so that the training loop has no conditions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_hetero import terminal
from megatron_hetero.checkpoint.state import History
from megatron_hetero.errors import UserError, reason
from megatron_hetero.outputs.logs import METRICS as FILE_NAME
from megatron_hetero.training.log.folder import LogFolder, unwritable
from megatron_hetero.training.log.metrics import EvaluationMetrics, StepMetrics, Value
from megatron_hetero.training.log.trackers import open_trackers, scalars

_TRACKER_FIX = "free space or restore access for the next run; metrics.jsonl has all steps"
TERMINAL = "terminal"
"""The fault of a writer after which nothing more is printed."""


class Writer:
    """Receives the output of the training loop, and does nothing with it; a context manager that closes itself.

    `faults`: what could not be written, by what failed.
    """

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}

    @property
    def is_broken(self) -> bool:
        """Whether something cannot be written at the moment."""
        return bool(self.faults)

    def write(self, metrics: StepMetrics) -> None:
        """Records one step."""

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Records the evaluation of one data set."""

    def history(self) -> History:
        """Returns the metrics so far, including those before a resume."""
        return History()

    def print(self, renderable: object) -> None:
        """Prints text or anything that `rich` renders, above the progress bar."""

    def notes(self) -> tuple[str, ...]:
        """Notes for the end of training."""
        return ()

    def fail(self) -> None:
        """Notes that the run ends with an error, as one that leaves the context does too."""

    def close(self) -> None:
        """Finishes; nothing is written afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.fail()
        self.close()


class MetricsWriter(Writer):
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
        super().__init__()
        self._steps = steps
        self._console = console or terminal.console()
        self._failed = False
        self._log = LogFolder(folder, history, config)
        self._skipped = Skipped()
        try:
            self._trackers = open_trackers(folder, tensorboard=tensorboard, wandb=wandb, config=config, done=done)
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

    def history(self) -> History:
        """Returns the metrics so far, including those before a resume."""
        return self._log.history()

    def _record(self, record: Mapping[str, Value]) -> None:
        self._append(json.dumps(record, allow_nan=False) + "\n")

    def _append(self, line: str) -> None:
        try:
            self._log.append(line)
        except OSError as error:
            return self._note(FILE_NAME, str(unwritable(self._log.folder / FILE_NAME, error)))
        self.faults.pop(FILE_NAME, None)
        return None

    def _show(self, group: str, step: int, values: Mapping[str, Value]) -> None:
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
        """Notes for the end of training, on the steps of this run."""
        return self._skipped.notes()

    def fail(self) -> None:
        """Notes that the run ends with an error, for the trackers to record."""
        self._failed = True

    def close(self) -> None:
        """Finishes; nothing is written afterwards."""
        if self._progress.live.is_started:
            self._progress.stop()
        self._append("")  # Lines still waiting for disk space.
        self._log.close()
        for tracker in self._trackers:
            with suppress(OSError):  # Each step was flushed as it was written, and failures were reported.
                tracker.close(failed=self._failed)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


@dataclass(frozen=True)
class Skipped:
    """Counts of this run: skipped samples, steps with any, and steps with no other samples."""

    samples: int = 0
    steps: int = 0
    idle_steps: int = 0

    def and_of(self, record: Mapping[str, object]) -> Skipped:
        """With one more step."""
        samples = record.get("skipped_samples")
        if not isinstance(samples, int) or samples <= 0:
            return self
        idle = record.get("loss") is None
        return Skipped(self.samples + samples, self.steps + 1, self.idle_steps + idle)

    def notes(self) -> tuple[str, ...]:
        """Notes for the user; none if nothing was skipped."""
        if not self.samples:
            return ()
        idle = f"; {_counted(self.idle_steps, 'step')} had no other samples and trained nothing" * bool(self.idle_steps)
        where = _counted(self.steps, "step")
        return (f"{_counted(self.samples, 'sample')} longer than data.max_seq_length skipped, in {where}{idle}",)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
