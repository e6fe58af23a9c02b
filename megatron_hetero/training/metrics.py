"""What a run says of its steps: a line on the terminal, a line in metrics.jsonl, TensorBoard when asked.

One rank gets a `MetricsWriter`, the others a `NullWriter` with the same methods, so that the training
loop has no conditions.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_hetero import terminal
from megatron_hetero.errors import UserError
from megatron_hetero.training.skipped import Skipped

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FILE_NAME = "metrics.jsonl"


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


def evaluated_after(step: int, history: str) -> frozenset[str]:
    """The data sets whose evaluation after `step` is told by the lines of metrics.jsonl up to that step."""
    records = map(json.loads, reversed(history.splitlines()))
    last = itertools.takewhile(lambda record: record["step"] == step, records)
    return frozenset(record["eval_dataset"] for record in last if "eval_dataset" in record)


def evaluations_since(history: str, step: int, folder: Path) -> str:
    """The evaluations after `step` whose lines follow directly on `history`, which ends with that step, in the
    metrics.jsonl of `folder`: they were made after the checkpoint that has this history. Nothing where the file cannot
    be read or tells of another run.
    """
    try:
        found = (folder / FILE_NAME).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    if not history or not found.startswith(history):
        return ""
    return "".join(_evaluations(found[len(history) :].splitlines(keepends=True), step))


def _evaluations(lines: list[str], step: int) -> Iterator[str]:
    """The evaluations after `step` that begin `lines`."""
    for line in lines:
        try:
            record = json.loads(line) if line.endswith("\n") else {}
        except ValueError:
            return
        if "eval_dataset" not in record or record.get("step") != step:
            return
        yield line


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
    """Writes the metrics of a run into a folder and onto the terminal.

    Args:
        folder: made if need be; a metrics.jsonl of an earlier run in it is replaced.
        steps: number of steps of the run.
        done: number of steps that were trained before, with the lines of metrics.jsonl in `history`.
        tensorboard: whether TensorBoard's files are written to the folder too.
        console: where lines and progress go; the standard output where left out.

    Raises:
        UserError: the folder cannot be written to, or TensorBoard is wanted but not installed.
    """

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        done: int = 0,
        history: str = "",
        tensorboard: bool = False,
        console: Console | None = None,
    ) -> None:
        self._steps = steps
        self._console = console or terminal.console()
        self._path = folder / FILE_NAME
        self._file = self._open(history)
        self._skipped = Skipped.of(history)
        self._tensorboard = _summary_writer(folder, done) if tensorboard else None
        self._progress = _progress(self._console)
        self._task = self._progress.add_task("training", total=steps, completed=done)
        # Only a terminal can redraw a bar; elsewhere there are plain lines.
        if self._console.is_terminal:
            self._progress.start()

    def write(self, metrics: StepMetrics) -> None:
        """Records one step.

        Raises:
            UserError: the file can no longer be written, for example because the disk is full.
        """
        record = metrics.record()
        self._record(record)
        self._skipped = self._skipped.and_of(record)
        if self._tensorboard is not None:
            _add_scalars(self._tensorboard, "train", metrics.step, record)
        self.print(metrics.line(self._steps))
        self._progress.update(self._task, completed=metrics.step)

    def write_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Records the evaluation of one data set. Raises `UserError`, as `write` does."""
        self._record(metrics.record())
        if self._tensorboard is not None:
            _add_scalars(self._tensorboard, f"eval/{metrics.dataset}", metrics.step, metrics.values)
        self.print(metrics.line(self._steps))

    def _record(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def print(self, renderable: object) -> None:
        """Shows text or anything that `rich` renders, above the progress bar."""
        if isinstance(renderable, str) and not self._console.is_terminal:
            # A file or a pipe has no width to wrap at.
            self._console.out(renderable, highlight=False)
        else:
            self._console.print(renderable, markup=False, highlight=False)
        self._console.file.flush()

    def notes(self) -> tuple[str, ...]:
        """What there is to say when no more steps are trained: of all steps, those before a resume included."""
        return self._skipped.notes()

    def close(self) -> None:
        """Finishes; nothing is written afterwards."""
        if self._progress.live.is_started:
            self._progress.stop()
        # Each step was flushed when it was written; what could not be flushed was reported then.
        with suppress(OSError):
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _open(self, history: str) -> IO[str]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(history, encoding="utf-8")
            return open(self._path, "a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(self._path, error) from None


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError.at(
        f"log.dir: {path}",
        found=(error.strerror or str(error)).lower(),
        expected="a file that can be written",
        because="every step's metrics go there",
        fix="free space or grant access, or choose another folder with --log.dir DIR",
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
    # What an interrupted run showed of later steps is taken back.
    return SummaryWriter(str(folder), purge_step=done + 1 if done else None)


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
