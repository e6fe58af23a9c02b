"""Records the metrics of a run: on the terminal, in `log.dir`, and optionally in TensorBoard and Weights & Biases.

runs/
  metrics.jsonl  config.yaml  bad_records.jsonl  events.out.tfevents.*  trace-rank0.json ...   files of the last run
  earlier-1/     earlier-2/                                           files of earlier runs
  .metrics.lock  lock file of the run that writes here

One rank has a `MetricsWriter`; all others have a `Writer` that does nothing, so the training loop needs no conditions.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_hetero.base import terminal
from megatron_hetero.base.errors import BadSample, UserError, in_short, os_errors_as
from megatron_hetero.base.files import in_the_way, open_own, read_own, replacing
from megatron_hetero.base.outputs import BAD_RECORDS, CONFIG, LOG_LOCK, METRICS, OF_A_RUN, WANDB_ID
from megatron_hetero.checkpoint.resume import lock_folder
from megatron_hetero.train.metrics import EvaluationMetrics, StepMetrics, Value

MAX_NAMED = 10_000
"""Maximum number of records in bad_records.jsonl."""
_AFTER_RECORD = b', "where": '
"""Text after the data set and number of a record in each line of bad_records.jsonl."""


def unwritable(path: Path, error: OSError, setting: str = "log.dir") -> UserError:
    """Return the error for a `path` in `log.dir`, or in the folder of another `setting`, that cannot be written."""
    problem = f"cannot be written ({in_the_way(path, error)})"
    fix = "free space or grant access, or choose another folder with --log.dir DIR"
    return UserError.at(f"{setting}: {path}", problem=problem, fix=fix)


class LogFolder:
    """The locked log folder of a run, with its configuration and its metrics.jsonl, which starts with the lines of
    `history`. `notes`: notes for the user.
    """

    def __init__(self, folder: Path, history: str, config: str) -> None:
        """Lock and prepare the folder. Raises `UserError` if it cannot be written, or another run writes there."""
        self.folder, self._path, self._waiting = folder, folder / METRICS, b""
        self._lock = lock_folder(folder, "log.dir", LOG_LOCK, "their metrics", unwritable)
        try:
            self.notes = (*filter(None, [self._lock.note]), *_set_aside(folder, history.encode(), config.encode()))
            for path, text in ((self._path, history), *([(folder / CONFIG, config)] if config else [])):
                with replacing(path) as new:
                    new.write_bytes(text.encode())
            self._named = {line.partition(_AFTER_RECORD)[0] for line in read_own(folder / BAD_RECORDS).splitlines()}
        except OSError as error:
            self._lock.release()
            raise unwritable(Path(error.filename or self._path), error) from None

    def append(self, line: str) -> None:
        """Append a line to metrics.jsonl, after any lines whose writing failed before. Raises `OSError`."""
        self._waiting += line.encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        with open_own(self._path, "ab", buffering=0) as file:
            while self._waiting:
                self._waiting = self._waiting[file.write(self._waiting) :]

    def name(self, bad: Iterable[BadSample]) -> None:
        """Append each new record to bad_records.jsonl, up to `MAX_NAMED` lines in total. Raises `OSError`."""
        for line in (json.dumps(each._asdict()).encode() for each in bad):
            if (key := line.partition(_AFTER_RECORD)[0]) not in self._named and len(self._named) < MAX_NAMED:
                with open_own(self.folder / BAD_RECORDS, "ab") as file:
                    file.write(line + b"\n")
                self._named.add(key)

    def history(self) -> str:
        """Return all lines of metrics.jsonl so far and unwritten lines; only the latter if the file is unreadable."""
        written = b""
        with suppress(OSError):
            written = read_own(self._path)
        return (written + self._waiting).decode("utf-8", errors="replace")

    def close(self) -> None:
        """Release the lock on the folder."""
        self._lock.release()


def _set_aside(folder: Path, history: bytes, config: bytes) -> Iterator[str]:
    """Move the files of an earlier run, or a configuration that differs, to a new subfolder. Yields notes for the user.
    Raises `OSError`.
    """
    lines, settings = read_own(folder / METRICS), read_own(folder / CONFIG)
    # After a full disk, a checkpoint's `history` may have more lines than metrics.jsonl, so compare common lines only.
    continues = bool(history) and history.startswith(lines[: len(history)])
    if (lines or os.path.lexists(folder / BAD_RECORDS)) and not continues:
        moved = [path for pattern in OF_A_RUN for path in sorted(folder.glob(pattern))]
    elif settings and config and settings != config:
        moved = [folder / CONFIG]
    else:
        return
    place = next(p for n in itertools.count(1) if not os.path.lexists(p := folder / f"earlier-{n}"))
    place.mkdir()
    for path in moved:
        path.rename(place / path.name)
    yield f"moved files of an earlier run from {folder} to {place}: {', '.join(path.name for path in moved)}"


def _not_installed(where: str, name: str, package: str, error: ImportError) -> UserError:
    fix = f"install it with `pip install {package}`, or remove log.{package}"
    return UserError.at(where, problem=f"{name} is not installed ({error})", fix=fix)


class TensorBoard:
    """Writer of TensorBoard event files in `folder`. On a resume after `done` steps, later steps are purged."""

    name = "TensorBoard"

    def __init__(self, folder: Path, done: int) -> None:
        """Open an event file. Raises `UserError` if TensorBoard is missing, or the folder cannot be written."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("log.tensorboard", self.name, "tensorboard", error) from None
        with os_errors_as(partial(unwritable, folder)):
            self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step by metric name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Close the event file. `failed` is ignored, since event files do not record how a run ended."""
        self._writer.close()


class WandB:
    """Logger for a Weights & Biases project. A resumed run continues the W&B run whose id is saved in `folder`. With
    `WANDB_MODE=offline`, data is written only to `folder/wandb`, for `wandb sync`.

    Steps are logged as a separate metric (`step`), since W&B's step counter must not decrease after a resume.
    """

    name = "Weights & Biases"

    def __init__(self, folder: Path, project: str, config: str) -> None:
        """Start a W&B run. Raises `UserError` if W&B is not installed or cannot start, for example without a login."""
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise _not_installed("log.wandb (--log.wandb)", self.name, "wandb", error) from None
        file = folder / WANDB_ID
        try:
            self._run = wandb.init(
                project=project,
                dir=str(folder),
                id=read_own(file).decode().strip() or None,
                resume="allow",
                config=yaml.safe_load(config) or {},
                # Do not let W&B capture standard output, which the progress bar uses.
                settings=wandb.Settings(console="off"),
            )
            self._run.define_metric("*", step_metric="step")
            with replacing(file) as new:
                new.write_text(f"{self._run.id}\n", encoding="utf-8")
        except Exception as error:  # Exceptions of W&B and its dependencies share no base class.
            problem = f"Weights & Biases does not start ({in_short(error)})"
            fix = "run `wandb login`, or set WANDB_MODE=offline, or remove log.wandb"
            raise UserError.at("log.wandb (--log.wandb)", problem=problem, fix=fix) from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step by metric name."""
        self._run.log({**values, "step": step})

    def close(self, *, failed: bool) -> None:
        """Finish the upload, and mark the run as failed or finished."""
        self._run.finish(exit_code=int(failed))


class Writer:
    """Writer that discards the output of the training loop, for ranks that do not log. A context manager.

    `faults`: messages about failed writes, by target. `failed`: whether the run ends with an error, as reported to the
    trackers; also set if an exception leaves the context.
    """

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self.failed = False

    def write(self, metrics: StepMetrics) -> None:
        """Record the metrics of one step."""

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Record the metrics of an evaluation of one data set."""

    def write_bad(self, bad: Iterable[BadSample]) -> None:
        """Record which data set records are bad."""

    def history(self) -> str:
        """Return the lines of metrics.jsonl so far, including those before a resume."""
        return ""

    def print(self, renderable: object) -> None:
        """Print text or anything that `rich` renders, above the progress bar."""

    def close(self) -> None:
        """Close all outputs; nothing may be written afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.failed = self.failed or kind is not None
        self.close()


class MetricsWriter(Writer):
    """Writer of a run's metrics to a folder, the terminal and trackers. A failed write does not end the run: it is
    reported at once, retried if possible, and recorded in `faults`.

    Args:
        folder: the log folder; files of an earlier run in it are moved to a subfolder.
        steps: number of steps of the run.
        config: the resolved configuration as YAML, which is saved with the metrics.
        done: number of steps trained before a resume.
        history: lines of metrics.jsonl for these steps.
        tensorboard: whether to write event files for TensorBoard.
        wandb: the Weights & Biases project to log to, if any.
        console: console for lines and progress; by default standard output.

    Raises:
        UserError: the folder cannot be written, another run writes there, or a tracker cannot be started.
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
        self._log = LogFolder(folder, history, config)
        self._trackers: list[TensorBoard | WandB] = []
        try:
            if tensorboard:
                self._trackers.append(TensorBoard(folder, done))
            if wandb is not None:
                self._trackers.append(WandB(folder, wandb, config))
        except UserError:
            self._log.close()
            raise
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=self._console, transient=True)
        self._task = self._progress.add_task("training", total=steps, completed=done)
        # Show the progress bar only on a terminal, which can redraw it.
        if self._console.is_terminal:
            self._progress.start()
        for note in self._log.notes:
            self.print(note)

    def write(self, metrics: StepMetrics) -> None:
        """Record the metrics of one step."""
        record = metrics.record()
        self._append(json.dumps(record, allow_nan=False) + "\n")
        self._track("train", metrics.step, record)
        self.print(metrics.line(self._steps))
        self._progress.update(self._task, completed=metrics.step)

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Record the metrics of an evaluation of one data set."""
        self._append(json.dumps(metrics.record(), allow_nan=False) + "\n")
        self._track(f"eval/{metrics.dataset}", metrics.step, metrics.values)
        self.print(metrics.line(self._steps))

    def write_bad(self, bad: Iterable[BadSample]) -> None:
        """Add bad records to bad_records.jsonl, each once."""
        try:
            self._log.name(bad)
        except OSError as error:
            self._note(BAD_RECORDS, str(unwritable(self._log.folder / BAD_RECORDS, error)))

    def history(self) -> str:
        """Return the lines of metrics.jsonl so far, including those before a resume."""
        return self._log.history()

    def _append(self, line: str) -> None:
        try:
            self._log.append(line)
        except OSError as error:
            self._note(METRICS, str(unwritable(self._log.folder / METRICS, error)))
        else:
            self.faults.pop(METRICS, None)

    def _track(self, group: str, step: int, values: Mapping[str, Value]) -> None:
        """Log the numbers to each tracker as `group/name`; a tracker that fails is dropped."""
        numbers = {f"{group}/{n}": v for n, v in values.items() if n != "step" and isinstance(v, int | float)}
        for tracker in tuple(self._trackers):
            try:
                tracker.log(step, numbers)
            except Exception as error:  # Exceptions of trackers share no base class.
                self._trackers.remove(tracker)
                fix = "free space or restore access for the next run; metrics.jsonl has all steps"
                problem = f"stopped recording ({in_short(error)})"
                self._note(tracker.name, str(UserError.at(tracker.name, problem=problem, fix=fix)))

    def _note(self, what: str, fault: str) -> None:
        """Record a fault of the target `what`; print it if it is the first fault of that target."""
        if what not in self.faults:
            with suppress(OSError):
                print(f"warning: {fault}", file=sys.stderr, flush=True)
        self.faults[what] = fault

    def print(self, renderable: object) -> None:
        """Print text or anything that `rich` renders, above the progress bar."""
        # A closed pipe or terminal must not end the run; `rich` raises SystemExit on a closed pipe.
        with suppress(OSError, SystemExit):
            if isinstance(renderable, str) and not self._console.is_terminal:
                # Print to files and pipes without wrapping lines.
                print(renderable, file=self._console.file)
            else:
                self._console.print(renderable, markup=False, highlight=False)
            self._console.file.flush()

    def close(self) -> None:
        """Close all outputs; nothing may be written afterwards."""
        if self._progress.live.is_started:
            with suppress(OSError):
                self._progress.stop()
        self._append("")  # Retry lines whose writing failed before.
        self._log.close()
        for tracker in self._trackers:
            with suppress(Exception):  # Ignore errors: every step is already flushed.
                tracker.close(failed=self.failed)
