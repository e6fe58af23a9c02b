"""Records the metrics of a run: on the terminal, in `log.dir`, and optionally in TensorBoard and Weights & Biases.

runs/
  metrics.jsonl  config.yaml  bad_records.jsonl  events.out.tfevents.*  trace-rank0.json ...   of the last run
  earlier-1/     earlier-2/                                           of earlier runs
  .metrics.lock  held by the run that writes here

One rank gets a `MetricsWriter`, the others a `Writer` that does nothing, so that the training loop has no conditions.
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
"""Maximum number of bad records that are named."""
_AFTER_RECORD = b', "where": '
"""The text that follows data set and number of the record in a line of bad_records.jsonl."""


def unwritable(path: Path, error: OSError, setting: str = "log.dir") -> UserError:
    """Return the error for something in `log.dir` that cannot be written."""
    problem = f"cannot be written ({in_the_way(path, error)})"
    fix = "free space or grant access, or choose another folder with --log.dir DIR"
    return UserError.at(f"{setting}: {path}", problem=problem, fix=fix)


class LogFolder:
    """The folder in which only this run writes, its configuration and metrics.jsonl, which starts with the lines of
    `history`. `notes`: notes for the user.
    """

    def __init__(self, folder: Path, history: str, config: str) -> None:
        """Raises `UserError` if it cannot be written, or another run writes there."""
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
        """Append a line to metrics.jsonl, after lines that could not be written before. Raises `OSError`."""
        self._waiting += line.encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        with open_own(self._path, "ab", buffering=0) as file:
            while self._waiting:
                self._waiting = self._waiting[file.write(self._waiting) :]

    def name(self, bad: Iterable[BadSample]) -> None:
        """Add a line to bad_records.jsonl for each record that has none, up to `MAX_NAMED`. Raises `OSError`."""
        for line in (json.dumps(each._asdict()).encode() for each in bad):
            if (key := line.partition(_AFTER_RECORD)[0]) not in self._named and len(self._named) < MAX_NAMED:
                with open_own(self.folder / BAD_RECORDS, "ab") as file:
                    file.write(line + b"\n")
                self._named.add(key)

    def history(self) -> str:
        """Return all lines so far, also lines that could not be written yet; only these if the file is unreadable."""
        written = b""
        with suppress(OSError):
            written = read_own(self._path)
        return (written + self._waiting).decode("utf-8", errors="replace")

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()


def _set_aside(folder: Path, history: bytes, config: bytes) -> Iterator[str]:
    """Move the files of another run, or a different configuration, to a new subfolder. Yields notes for the user.
    Raises `OSError`.
    """
    lines, settings = read_own(folder / METRICS), read_own(folder / CONFIG)
    # The last lines of a run whose disk was full are only in its checkpoint; steps after that are trained again.
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
    """Writes event files to `folder`. If the first `done` steps were trained before, later steps are purged."""

    name = "TensorBoard"

    def __init__(self, folder: Path, done: int) -> None:
        """Raises `UserError` if TensorBoard is not installed, or the folder cannot be written."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("log.tensorboard", self.name, "tensorboard", error) from None
        with os_errors_as(partial(unwritable, folder)):
            self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record values by metric name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Close the event file, which does not say how a run ended."""
        self._writer.close()


class WandB:
    """Logs to a Weights & Biases project, with the configuration of the run. A resumed run continues the W&B run whose
    id an earlier one has left in `folder`. `WANDB_MODE=offline` writes to `folder/wandb` only, for `wandb sync`.

    Steps are a separate metric (`step`), since W&B's counter refuses steps that are trained again.
    """

    name = "Weights & Biases"

    def __init__(self, folder: Path, project: str, config: str) -> None:
        """Raises `UserError` if it is not installed or cannot be started, for want of a login for example."""
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
                # Standard output belongs to the progress bar.
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
        """Record values by metric name."""
        self._run.log({**values, "step": step})

    def close(self, *, failed: bool) -> None:
        """Finish the upload, and mark the run as failed or finished."""
        self._run.finish(exit_code=int(failed))


class Writer:
    """Receives the output of the training loop, and does nothing with it; a context manager that closes itself.

    `faults`: messages about writes that failed, by target. `failed`: whether the run ends with an error, for the
    trackers; an exception that leaves the context also sets it.
    """

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self.failed = False

    def write(self, metrics: StepMetrics) -> None:
        """Record one step."""

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Record the evaluation of one data set."""

    def write_bad(self, bad: Iterable[BadSample]) -> None:
        """Name the records of bad samples."""

    def history(self) -> str:
        """Return the lines of metrics.jsonl so far, including those before a resume."""
        return ""

    def print(self, renderable: object) -> None:
        """Print text or anything that `rich` renders, above the progress bar."""

    def close(self) -> None:
        """Finish; nothing is written afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.failed = self.failed or kind is not None
        self.close()


class MetricsWriter(Writer):
    """Writes the metrics of a run to a folder and the terminal. A failing write does not end the run: it is reported at
    once, retried if possible, and recorded in `faults`.

    Args:
        folder: the folder; files of an earlier run in it are moved to a subfolder.
        steps: number of steps of the run.
        config: the resolved configuration as YAML, which is saved with the metrics.
        done: number of steps that were trained before.
        history: the lines of metrics.jsonl of these steps.
        tensorboard: whether to write event files for TensorBoard.
        wandb: the Weights & Biases project to log to, if any.
        console: receives lines and progress; the default is standard output.

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
        # Only a terminal can redraw a bar; elsewhere there are plain lines.
        if self._console.is_terminal:
            self._progress.start()
        for note in self._log.notes:
            self.print(note)

    def write(self, metrics: StepMetrics) -> None:
        """Record one step."""
        record = metrics.record()
        self._append(json.dumps(record, allow_nan=False) + "\n")
        self._track("train", metrics.step, record)
        self.print(metrics.line(self._steps))
        self._progress.update(self._task, completed=metrics.step)

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Record the evaluation of one data set."""
        self._append(json.dumps(metrics.record(), allow_nan=False) + "\n")
        self._track(f"eval/{metrics.dataset}", metrics.step, metrics.values)
        self.print(metrics.line(self._steps))

    def write_bad(self, bad: Iterable[BadSample]) -> None:
        """Name the records of bad samples, each once."""
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
        """Send the numbers to each tracker as `group/name`, until that fails."""
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
        """Report a fault if it is new."""
        if what not in self.faults:
            with suppress(OSError):
                print(f"warning: {fault}", file=sys.stderr, flush=True)
        self.faults[what] = fault

    def print(self, renderable: object) -> None:
        """Print text or anything that `rich` renders, above the progress bar."""
        # A pipe or terminal that has gone must not end the run; on a closed pipe `rich` exits.
        with suppress(OSError, SystemExit):
            if isinstance(renderable, str) and not self._console.is_terminal:
                # A file or a pipe has no width to wrap at.
                print(renderable, file=self._console.file)
            else:
                self._console.print(renderable, markup=False, highlight=False)
            self._console.file.flush()

    def close(self) -> None:
        """Finish; nothing is written afterwards."""
        if self._progress.live.is_started:
            with suppress(OSError):
                self._progress.stop()
        self._append("")  # Lines still waiting for disk space.
        self._log.close()
        for tracker in self._trackers:
            with suppress(Exception):  # Each step was flushed as it was written, and failures were reported.
                tracker.close(failed=self.failed)
