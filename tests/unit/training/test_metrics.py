"""Metrics: the file, the line, TensorBoard, and the silent writer."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron_hetero.errors import UserError
from megatron_hetero.training.metrics import EvaluationMetrics, MetricsWriter, NullWriter, StepMetrics
from megatron_hetero.training.metrics_history import evaluated_after, evaluations_since


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


def test_extras_do_not_hide_metrics() -> None:
    with pytest.raises(AssertionError, match="loss"):
        metrics(extra={"loss": 1.0}).record()


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
    with pytest.raises(UserError, match=r"log\.dir.*found (not a directory|file exists)"):
        MetricsWriter(tmp_path / "file" / "folder", 1)
    with pytest.raises(UserError, match=r"log\.dir"):
        MetricsWriter(tmp_path / "file", 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_at_once_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with MetricsWriter(tmp_path, 1, console=plain()) as writer:
        assert not writer.is_broken
        writer.write(metrics())
        writer.write(metrics(2))
        assert writer.is_broken and "no space left on device" in writer.faults["metrics.jsonl"]
        assert capsys.readouterr().err.count("warning: log.dir: ") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_terminal_that_takes_nothing_ends_nothing(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        with MetricsWriter(tmp_path, 1, console=Console(file=full, force_terminal=False)) as writer:
            writer.write(metrics())
            writer.write(metrics(2))
        with contextlib.suppress(OSError):
            full.close()
    assert writer.is_broken and "standard output: found no space left on device" in writer.faults["terminal"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_pipe_that_nobody_reads_ends_nothing(tmp_path: Path) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    with open(pipe, "w") as file:
        with MetricsWriter(tmp_path, 1, console=Console(file=file, force_terminal=False)) as writer:
            writer.write(metrics())
        with contextlib.suppress(OSError):
            file.close()
    assert writer.faults.keys() == {"terminal"}


def test_the_silent_writer_takes_everything(capsys: pytest.CaptureFixture[str]) -> None:
    with NullWriter() as writer:
        writer.write(metrics())
        writer.print("text")
    writer.close()
    assert capsys.readouterr().out == ""


def test_evaluations_have_lines_of_their_own(tmp_path: Path) -> None:
    console = plain()
    found = EvaluationMetrics(
        step=3, dataset="held", loss=1.25, exact_match=0.625, asked=32, supervised_tokens=1200, samples=40, time_s=0.5
    )
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
    NullWriter().write_evaluation(found)


STEPS = '{"step": 1}\n{"step": 2, "loss": 3.5}\n'
FIRST, SECOND = '{"step": 2, "eval_dataset": "a"}\n', '{"step": 2, "eval_dataset": "b"}\n'


def test_what_was_evaluated_after_a_step() -> None:
    assert evaluated_after(2, STEPS + FIRST + SECOND) == {"a", "b"}
    assert evaluated_after(2, STEPS) == evaluated_after(2, "") == set()
    assert evaluated_after(3, STEPS + FIRST + '{"step": 3}\n') == set()
    garbage = '{"step": 2, "eval_dataset": []}\n[]\n{"step"\n7\n{}\n\ufffd' + "[" * 100_000
    assert evaluated_after(2, STEPS + FIRST + garbage) <= {"a"} and evaluated_after(2, garbage) == set()


@pytest.mark.parametrize("text, more", [
    (STEPS, ""),
    (STEPS + FIRST, FIRST),
    (STEPS + FIRST + SECOND, FIRST + SECOND),
    (STEPS + FIRST + '{"step": 3}\n' + SECOND, FIRST),  # it went on
    (STEPS + FIRST + SECOND[:-1], FIRST),  # it died while it wrote
    (STEPS + FIRST + SECOND[:9], FIRST),
    (STEPS + FIRST + "[]\n", FIRST),
    (STEPS + '{"step": 3, "eval_dataset": "a"}\n', ""),
    (STEPS.replace("3.5", "3.6") + FIRST, ""),  # another run
    (STEPS[:9], ""),
])  # fmt: skip
def test_evaluations_that_follow_on_a_checkpoint(text: str, more: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    assert evaluations_since(STEPS, 2, tmp_path) == more


def test_there_may_be_no_evaluations_to_follow(tmp_path: Path) -> None:
    assert evaluations_since(STEPS, 2, tmp_path) == ""
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe")
    assert evaluations_since(STEPS, 2, tmp_path) == evaluations_since("", 2, tmp_path) == ""
