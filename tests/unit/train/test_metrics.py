"""Metrics: the file, the line, TensorBoard, Weights & Biases, and the silent writer."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from unittest import mock

import pytest
from rich.console import Console

from megatron_hetero.base.errors import UserError
from megatron_hetero.train.log import MetricsWriter, Writer
from megatron_hetero.train.metrics import EvaluationMetrics, StepMetrics

EVALUATED = EvaluationMetrics(
    step=3, dataset="held", loss=1.25, exact_match=0.625, asked=32, supervised_tokens=1200, samples=40, time_s=0.5
)


def metrics(step: int = 1, **changes: object) -> StepMetrics:
    values = {"step": step, "loss": 2.5, "grad_norm": 0.75, "lr": 1e-4, "tokens": 1000, "images": 4, "step_time_s": 0.5}
    more = {"peak_memory_bytes": 3 * 2**29, "data_time_s": 0.05, "boundary_time_s": 0.1}
    return StepMetrics(**values | more | changes)  # pyright: ignore[reportArgumentType]


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def test_the_file_has_one_object_per_step(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on the way"
    with MetricsWriter(folder, 2, console=plain()) as writer:
        writer.write(metrics(1))
        # Readers see a step as soon as it is done.
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
        writer.write(metrics(2, extra={"idle": 0.25}, mfu=0.4))
    first, second = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert first == {
        "step": 1,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 1e-4,
        "tokens": 1000,
        "images": 4,
        "skipped_samples": 0,
        "step_time_s": 0.5,
        "tokens_per_s": 2000.0,
        "images_per_s": 8.0,
        "peak_memory_bytes": 3 * 2**29,
        "data_share": 0.1,
        "boundary_share": 0.2,
        "mfu": None,
    }
    assert (second["idle"], second["mfu"]) == (0.25, 0.4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_without_nan(tmp_path: Path, value: float) -> None:
    with MetricsWriter(tmp_path, 1, console=plain()) as writer:
        writer.write(metrics(loss=value, extra={"x": value}))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert record["loss"] is None and record["x"] is None


def test_no_time_is_no_division_by_zero() -> None:
    record = metrics(step_time_s=0.0).record()
    assert (record["tokens_per_s"], record["data_share"]) == (0.0, 0.0)


def test_the_line() -> None:
    assert metrics(7, mfu=0.415).line(100) == (
        "step   7/100 | loss 2.5000 | norm 0.750 | lr 1.00e-04 | 2,000 tokens/s | 8.0 images/s | 0.500 s | data 10% | "
        "boundary 20% | memory 1.50 GiB | MFU 41.5%"
    )
    assert "MFU" not in metrics().line(1)
    idle = metrics(loss=math.nan, grad_norm=math.nan, tokens=0, skipped_samples=1024).line(1)
    assert idle.startswith("step 1/1 | nothing trained | lr 1.00e-04 |") and idle.endswith("| 1,024 too long")


def test_off_a_terminal_there_are_plain_lines_only(tmp_path: Path) -> None:
    console = plain()
    with MetricsWriter(tmp_path, 1, console=console) as writer:
        writer.print("[started]")
        writer.write(metrics())
    assert console.file.getvalue() == f"[started]\n{metrics().line(1)}\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_on_a_terminal_there_is_a_bar_too(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with MetricsWriter(tmp_path, 4, console=console) as writer:
        writer.write(metrics(2))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "loss 2.5000" in shown and "2/4" in shown and "training" in shown


def test_tensorboard(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsWriter(tmp_path, 2, tensorboard=True, console=plain()) as writer:
        writer.write(metrics(1))
        writer.write(metrics(2, loss=1.5))
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.5), (2, 1.5)]
    assert "train/mfu" not in events.Tags()["scalars"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"log\.dir.*cannot be written .(not a directory|file exists)"):
        MetricsWriter(tmp_path / "file" / "folder", 1)
    with pytest.raises(UserError, match=r"log\.dir"):
        MetricsWriter(tmp_path / "file", 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_at_once_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> IO[bytes]:
        return Path("/dev/full").open("ab", 0)

    with MetricsWriter(tmp_path, 1, console=plain()) as writer, mock.patch("megatron_hetero.train.log.open_own", full):
        assert not writer.faults
        writer.write(metrics())
        writer.write(metrics(2))
        assert "no space left on device" in writer.faults["metrics.jsonl"]
        assert capsys.readouterr().err.count("warning: log.dir: ") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_terminal_that_takes_nothing_ends_nothing(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        with MetricsWriter(tmp_path, 1, console=Console(file=full, force_terminal=False)) as writer:
            writer.write(metrics())
            writer.write(metrics(2))
        with contextlib.suppress(OSError):
            full.close()
    assert not writer.faults
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_pipe_that_nobody_reads_ends_nothing(tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    with open(pipe, "w") as file:
        with MetricsWriter(tmp_path, 1, console=Console(file=file, force_terminal=False)) as writer:
            writer.write(metrics())
        with contextlib.suppress(OSError):
            file.close()
    assert not writer.faults and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_silent_writer_takes_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with Writer() as writer:
        writer.write(metrics())
        writer.print("text")
    writer.close()
    assert capsys.readouterr().out == ""


def test_evaluations_have_lines_of_their_own(tmp_path: Path) -> None:
    console, found = plain(), EVALUATED
    with MetricsWriter(tmp_path, 10, tensorboard=True, console=console) as writer:
        writer.write_evaluation(found)
        writer.write_evaluation(replace(found, loss=math.nan))
    record, broken = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert record == {
        "step": 3,
        "eval_dataset": "held",
        "eval_loss": 1.25,
        "eval_exact_match": 0.625,
        "eval_asked": 32,
        "eval_supervised_tokens": 1200,
        "eval_samples": 40,
        "eval_time_s": 0.5,
    }
    assert broken["eval_loss"] is None
    line = (
        "step  3/10 | evaluation of held | loss 1.2500 | exact match 62.5% of 32 | 1,200 tokens of 40 samples | 0.500 s"
    )
    assert line in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/held/loss")] == [(3, 1.25)]
    assert [event.value for event in events.Scalars("eval/held/exact_match")] == [0.625, 0.625]
    Writer().write_evaluation(found)


# ------------------------------------------------------------------------------------------ Weights & Biases


class WandB(ModuleType):
    """A stand-in for the package: what it was given, by call."""

    def __init__(self, broken: str = "") -> None:
        super().__init__("wandb")
        self.id, self.broken = "a1b2", broken
        self.begun: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.finished: list[int] = []
        """Exit codes."""

    def _call(self, name: str) -> None:
        if name == self.broken:
            raise ValueError(f"{name} failed")

    def init(self, **settings: Any) -> WandB:
        self._call("init")
        self.begun = settings
        return self

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any]) -> None:
        self._call("log")
        self.logged.append(values)

    def finish(self, *, exit_code: int) -> None:
        self.finished.append(exit_code)
        self._call("finish")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[WandB], WandB]:
    def put(package: WandB) -> WandB:
        monkeypatch.setitem(sys.modules, "wandb", package)
        return package

    return put


def test_wandb_gets_what_tensorboard_gets(tmp_path: Path, install: Callable[[WandB], WandB]) -> None:
    package = install(WandB())
    with MetricsWriter(tmp_path, 2, wandb="mine", config="train: {iters: 2}\n", console=plain()) as writer:
        writer.write(metrics(1))
        writer.write_evaluation(EVALUATED)
    begun = package.begun
    assert (begun["project"], begun["dir"], begun["id"]) == ("mine", str(tmp_path), None)
    assert begun["config"] == {"train": {"iters": 2}}
    trained, evaluated = package.logged
    assert trained == trained | {"step": 1, "train/loss": 2.5, "train/lr": 1e-4} and "train/mfu" not in trained
    assert evaluated == evaluated | {"step": 3, "eval/held/loss": 1.25} and package.finished == [0]


@pytest.mark.parametrize("raises", [False, True])
def test_a_run_that_fails_is_not_finished_for_wandb(
    raises: bool, tmp_path: Path, install: Callable[[WandB], WandB]
) -> None:
    package = install(WandB())
    with contextlib.suppress(ValueError), MetricsWriter(tmp_path, 2, wandb="mine", console=plain()) as writer:
        writer.write(metrics(1))
        writer.failed = not raises
        if raises:
            raise ValueError
    assert package.finished == [1]


def test_a_resumed_run_continues_the_run_of_wandb(tmp_path: Path, install: Callable[[WandB], WandB]) -> None:
    package = install(WandB())
    with MetricsWriter(tmp_path, 2, wandb="mine", console=plain()) as writer:
        writer.write(metrics(1))
    history = (tmp_path / "metrics.jsonl").read_text()
    MetricsWriter(tmp_path, 2, wandb="mine", done=1, history=history, console=plain()).close()
    assert (package.begun["id"], package.begun["resume"]) == ("a1b2", "allow")
    MetricsWriter(tmp_path, 2, wandb="mine", console=plain()).close()  # A new run, which sets the old one aside.
    assert package.begun["id"] is None and (tmp_path / "earlier-1/wandb-run-id").is_file()


def test_wandb_is_not_imported_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # Any import of it fails.
    MetricsWriter(tmp_path / "a", 1, console=plain()).close()
    with pytest.raises(UserError, match=r"log\.wandb .*is not installed.*`pip install wandb`"):
        MetricsWriter(tmp_path / "b", 1, wandb="mine", console=plain())


def test_wandb_that_does_not_start_is_an_error(tmp_path: Path, install: Callable[[WandB], WandB]) -> None:
    install(WandB(broken="init"))
    with pytest.raises(UserError, match=r"log\.wandb .*\(ValueError: init failed\).*WANDB_MODE=offline"):
        MetricsWriter(tmp_path, 1, wandb="mine", console=plain())


def test_wandb_that_fails_midway_loses_no_line(
    tmp_path: Path, install: Callable[[WandB], WandB], capsys: pytest.CaptureFixture[str]
) -> None:
    install(WandB(broken="log"))
    with MetricsWriter(tmp_path, 2, wandb="mine", console=plain()) as writer:
        writer.write(metrics(1))
        writer.write(metrics(2))
    assert "(ValueError: log failed)" in writer.faults["Weights & Biases"]
    assert capsys.readouterr().err.count("warning: ") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    install(WandB(broken="finish"))
    MetricsWriter(tmp_path / "b", 2, wandb="mine", console=plain()).close()


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_a_real_offline_run_of_wandb(tmp_path: Path) -> None:
    """In a process of its own, as it starts a service."""
    program = (
        "import sys; from pathlib import Path\n"
        "from megatron_hetero.train.metrics import StepMetrics\n"
        "from megatron_hetero.train.log import MetricsWriter\n"
        "values = dict(loss=2.5, grad_norm=1.0, lr=1e-4, tokens=9, images=1, step_time_s=0.5, peak_memory_bytes=1)\n"
        "with MetricsWriter(Path(sys.argv[1]), 2, wandb='mine', config='train: {iters: 2}') as writer:\n"
        "    [writer.write(StepMetrics(step=step, **values)) for step in (1, 2)]\n"
        "assert not writer.faults\n"
    )
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1 and (tmp_path / "wandb-run-id").is_file()
