"""What a run says of its steps: a line on the terminal, a line in metrics.jsonl, TensorBoard when asked.

One rank gets a `MetricsWriter`, the others a `NullWriter` with the same methods, so that the training
loop has no conditions.
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
from typing import TYPE_CHECKING, Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_hetero import terminal
from megatron_hetero.errors import UserError
from megatron_hetero.outputs.logs import METRICS as FILE_NAME
from megatron_hetero.training.log_folder import LogFolder, unwritable
from megatron_hetero.training.skipped import Skipped

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TERMINAL, REMOVED = "terminal", "removed"
"""Of the faults of a writer: the one for which nothing more is printed, and the one that has been mended."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What is known of one step, over all ranks.

    Attributes:
        step: counted from 1.
        loss: sum of the supervised tokens' losses over their number, in nats; NaN where nothing was trained.
        grad_norm: over all modules, before clipping; NaN where nothing was trained.
        lr: of the text module.
        tokens: of all samples, image tokens included, padding not.
        images: number of images.
        skipped_samples: those that were too long; where all were, nothing was trained.
        step_time_s: wall-clock seconds.
        peak_memory_bytes: of the rank that needed most.
        data_time_s: seconds of the step spent waiting for data.
        boundary_time_s: seconds of the step, on this rank, in which it packed rows or waited for them; rows travel
            beside other work.
        mfu: model FLOPs utilisation, None where the device's peak is unknown.
        stopping: whether a rank was asked to stop, so that all stop after this step; not recorded.
        extra: more values to record, by names that are not taken.
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
        """The values as metrics.jsonl has them; what is not a finite number is None."""
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
        """The values as the terminal shows them, in a run of so many steps."""
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
    """What is known of one held-out data set after one step, over all ranks.

    Attributes:
        step: the last one before it, counted from 1.
        dataset: its name.
        loss: sum of the losses of all its supervised tokens over their number, in nats.
        exact_match: the share of samples, 0 to 1, that greedy decoding would answer with exactly their tokens.
        asked: samples that this is a share of: those with a supervised token.
        supervised_tokens: number of all supervised tokens.
        samples: those that were not too long.
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
        """The numbers by name; what is not finite is None."""
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
        """The values as metrics.jsonl has them, in a line of their own."""
        return {"step": self.step, "eval_dataset": self.dataset} | {f"eval_{n}": v for n, v in self.values.items()}

    def line(self, steps: int) -> str:
        """The values as the terminal shows them, in a run of so many steps."""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps} | evaluation of {self.dataset} | loss {self.loss:.4f} | "
            f"exact match {self.exact_match:.1%} of {self.asked:,} | "
            f"{self.supervised_tokens:,} tokens of {self.samples:,} samples | {self.time_s:.3f} s"
        )


class Writer(Protocol):
    """What the training loop says things to; a context manager that closes itself."""

    def write(self, metrics: StepMetrics) -> None:
        """Records one step."""
        ...

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Records the evaluation of one data set."""
        ...

    def print(self, renderable: object) -> None:
        """Shows text or anything that `rich` renders, above the progress bar."""
        ...

    def notes(self) -> tuple[str, ...]:
        """What there is to say when no more steps are trained."""
        ...

    def close(self) -> None:
        """Finishes; nothing is written afterwards."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NullWriter:
    """A writer for the ranks that say nothing."""

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
    """Writes the metrics of a run into a folder and onto the terminal. What cannot be written ends nothing: it is told
    at once, tried again where it can be, and in `faults` by what it is of.

    Args:
        folder: made if need be; what an earlier run left in it is set aside.
        steps: number of steps of the run.
        config: the resolved configuration, which goes beside the metrics.
        done: number of steps that were trained before, with the lines of metrics.jsonl in `history`.
        tensorboard: whether TensorBoard's files are written to the folder too.
        console: where lines and progress go; the standard output where left out.

    Raises:
        UserError: the folder cannot be written to, another run writes there, or TensorBoard is wanted but not
            installed.
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
        console: Console | None = None,
    ) -> None:
        self._steps = steps
        self._console = console or terminal.console()
        self.faults: dict[str, str] = {}
        self._log = LogFolder(folder, history, config)
        self._skipped = Skipped.of(history)
        self._tensorboard = _summary_writer(folder, done) if tensorboard else None
        self._progress = _progress(self._console)
        self._task = self._progress.add_task("training", total=steps, completed=done)
        # Only a terminal can redraw a bar; elsewhere there are plain lines.
        if self._console.is_terminal:
            self._progress.start()
        for note in self._log.notes:
            self.print(note)

    @property
    def is_broken(self) -> bool:
        """Whether something cannot be written now."""
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
        """Write for TensorBoard, until that fails."""
        try:
            if self._tensorboard is not None:
                _add_scalars(self._tensorboard, group, step, values)
        except OSError as error:
            self._tensorboard = None
            self._note("TensorBoard", str(unwritable(self._log.folder, error)))

    def _note(self, what: str, fault: str) -> None:
        """Tell a fault where it is new."""
        if what not in self.faults:
            with suppress(OSError):
                print(f"warning: {fault}", file=sys.stderr, flush=True)
        self.faults[what] = fault

    def print(self, renderable: object) -> None:
        """Shows text or anything that `rich` renders, above the progress bar."""
        if TERMINAL in self.faults:
            return
        try:
            if isinstance(renderable, str) and not self._console.is_terminal:
                # A file or a pipe has no width to wrap at.
                print(renderable, file=self._console.file)
            else:
                self._console.print(renderable, markup=False, highlight=False)
            self._console.file.flush()
        except (OSError, SystemExit) as error:  # `rich` exits where nobody reads its pipe any more
            reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "a pipe nobody reads"
            self._note(TERMINAL, f"standard output: found {reason}, expected something that can be written to.")

    def notes(self) -> tuple[str, ...]:
        """What there is to say when no more steps are trained: of all steps, those before a resume included."""
        return self._skipped.notes()

    def close(self) -> None:
        """Finishes; nothing is written afterwards."""
        if self._progress.live.is_started:
            self._progress.stop()
        self._append("")  # what has been waiting for room, and a file that was removed after the last step
        self._log.close()
        if self._tensorboard is not None:
            with suppress(OSError):  # Each step was flushed when it was written, and what could not be was told.
                self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def _removed(folder: Path) -> str:
    return str(
        UserError.at(
            f"log.dir: {folder / FILE_NAME}",
            found="that somebody removed it while the run went on",
            expected="it to stay",
            because="every step's metrics go there",
            fix="nothing is lost of it: it has been written again, but other files of the folder may be gone",
        )
    )


def _summary_writer(folder: Path, done: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError.at(
            "log.tensorboard",
            found=f"no TensorBoard ({error})",
            expected="the package tensorboard",
            fix="install it with `pip install tensorboard`, or leave log.tensorboard out",
        ) from None
    try:
        # What an interrupted run showed of later steps is taken back.
        return SummaryWriter(str(folder), purge_step=done + 1 if done else None)
    except OSError as error:
        raise unwritable(folder, error) from None


def _add_scalars(writer: SummaryWriter, group: str, step: int, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name != "step" and isinstance(value, int | float):
            writer.add_scalar(f"{group}/{name}", value, step)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


def _finite(value: Any) -> Any:
    """The value as JSON can hold it: JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
