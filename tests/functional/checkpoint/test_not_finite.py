"""A step that is not finite changes nothing, and ends the run one step later: the host reads a step once it has issued
the next one. What it reads is what it would have read at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.base.errors import NotFiniteError
from megatron_hetero.base.outputs import unfinished, whole
from megatron_hetero.schedule.contract import StepResult
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.runner import Runner
from megatron_hetero.train.run import Run
from megatron_hetero.train.trainer import Trainer
from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import same
from tests.functional.checkpoint.runs import calling, flags, fused, zero
from tests.support.matrix import thinned
from tests.support.pool import Pools
from tests.support.runs import build_logged


class Fault(NamedTuple):
    """A number that is not finite, on one rank in one step: in a gradient of a module, or in the loss alone."""

    where: str
    rank: int
    step: int

    @property
    def message(self) -> str:
        kind = "loss" if self.where == "loss" else f"gradient of module {self.where}"
        return (
            f"step {self.step}: found a {kind} that is NaN or infinite on rank {self.rank}, expected finite numbers; "
        )


@contextmanager
def broken(fault: Fault) -> Iterator[list[str]]:
    """Inside, there is this fault. Yields what happens in order: "issue 1", "read 1" …"""
    events, real_run, real_expect = list[str](), Runner.run, JointOptimizer.expect

    def now(where: str) -> bool:
        issues = [event for event in events if event.startswith("issue")]
        return where == fault.where and dist.get_rank() == fault.rank and issues[-1] == f"issue {fault.step}"

    def run(self: Runner, schedule: Schedule, load: Any) -> StepResult:
        result = real_run(self, schedule, load)
        return replace(result, loss=result.loss + (torch.nan if now("loss") else 0.0))

    def expect(self: JointOptimizer, module: str, stage: int) -> None:
        if now(module):
            view = next(view for view in self.modules if view.name == module and view.trained)
            gradient: Any = next(iter(view.trained.values()))
            gradient.main_grad.view(-1)[3] = torch.nan
        real_expect(self, module, stage)

    with ExitStack() as stack:
        stack.enter_context(calling(Trainer, "issue_step", lambda step, *_: events.append(f"issue {step}")))
        stack.enter_context(calling(Trainer, "_refuse_faults", lambda step, *_: events.append(f"read {step}")))
        stack.enter_context(mock.patch.object(Runner, "run", run))
        stack.enter_context(mock.patch.object(JointOptimizer, "expect", expect))
        yield events


def states(run: Run) -> dict[str, torch.Tensor]:
    """All weights of this rank, and all that its optimizers store, counts of updates too."""
    optimizer = run.trainer.optimizer
    optimizer.wait_for_weights()
    found = {
        f"{module.key} {name}": parameter.detach().clone()
        for module in optimizer.modules
        for name, parameter in module.parameters.items()
    }
    for name, each in optimizer.sharded.items():
        for parameter, shard in each.state_dict()["shards"].items():
            found |= {f"{name} {parameter} {kind}": values for kind, values in shard.items()}
    return {name: getattr(value, "to_local", lambda value=value: value)() for name, value in found.items()}


class Outcome(NamedTuple):
    """How a run ended: steps whose metrics were read; the error; events; and the states that differ."""

    steps: list[int]
    error: str
    events: list[str]
    changed: list[str]


def outcome(flags: list[str], other: list[str], fault: Fault, one_pass: bool) -> Outcome:
    """Of a run with a fault, whose states are compared with those of a run of the steps before it, by the flags
    `other`. `one_pass`: whether updates are those of GPUs.
    """
    with fused(compiled=False) if one_pass else nullcontext():
        expected = build_logged(other)
        with expected.writer:
            for step, batch, _ in expected.batches():
                if step == fault.step:
                    break
                expected.trainer.train_step(step, batch)
        run, steps, error = build_logged(flags), list[int](), ""
        with run.writer, broken(fault) as events:
            try:
                for metrics in run.steps(False):
                    steps.append(metrics.step)
                    run.saver.after(metrics.step, metrics.stopping)
            except NotFiniteError as raised:
                error = str(raised)
        assert not run.trainer.issued
        before, after = states(expected), states(run)
        assert before.keys() == after.keys() and any("updates" in name for name in after)
        return Outcome(steps, error, events, [name for name in before if not torch.equal(before[name], after[name])])


BF16 = "--model.dtype bfloat16 --data.workers 0"
SMALL = f"{jobs.SMALL} --text-precision.gradients bfloat16"
CASES = [
    ("sp:2,dp:2", "tp:4", "", Fault("vision", 2, 2), True),
    ("sp:2,dp:2", "tp:4", "", Fault("text", 3, 2), False),
    ("dp:2@0-1", "tp:2@2-3", "", Fault("text", 3, 3), True),
    ("dp:2@0-1", "tp:2@2-3", "--optimizer.name sgd", Fault("vision", 1, 2), False),
    ("dp:4", "tp:2,dp:2", f"{BF16} {SMALL}", Fault("vision", 1, 2), True),
    ("dp:4", "tp:2,dp:2", f"{BF16} {SMALL}", Fault("text", 0, 3), False),
    ("dp:4", "dp:4", zero(3, 2), Fault("loss", 1, 2), True),
    ("dp:4", "tp:2,dp:2", f"{BF16} {zero(2, 3)} {SMALL}", Fault("loss", 0, 2), True),
    ("dp:4", "dp:4", zero(3, 3), Fault("loss", 3, 3), False),
    ("dp:4", "tp:2,dp:2", f"{BF16} --text-precision.moments 8bit", Fault("vision", 3, 2), True),
    ("sp:2,dp:2", "tp:4", "--optimizer.name sgd", Fault("loss", 0, 2), True),
    ("dp:4", "tp:2,dp:2", f"{BF16} {jobs.HOST}", Fault("text", 2, 2), True),
]


@pytest.mark.parametrize("vision, text, more, fault, one_pass", thinned(CASES, 2), ids=str)
def test_a_step_that_is_not_finite_changes_nothing_and_ends_the_run_a_step_later(
    vision: str, text: str, more: str, fault: Fault, one_pass: bool, folders: Path, tmp_path: Path, pools: Pools
) -> None:
    line, other = (
        flags(folders, tmp_path / run, vision, text, f"--checkpoint.interval 100 --train.iters 9 {more}")
        for run in ("broken", "other")
    )
    for words in (line, other) if "sgd" in more else ():
        at = words.index("--optimizer.weight_decay")
        del words[at : at + 2]
    found = pools(4).run(outcome, line, other, fault, one_pass)
    for each in found:
        assert each.error.startswith(fault.message) and "the weights have not been updated" in each.error
        assert each.changed == []
        assert each.steps == list(range(1, fault.step))
        assert each.events[-2:] == [f"issue {fault.step + 1}", f"read {fault.step}"]
    assert not whole(tmp_path / "broken/checkpoints") and not unfinished(tmp_path / "broken/checkpoints")


@pytest.mark.parametrize("interval, kept, more", [(2, [], ""), (3, [], ""), (1, [1], "--checkpoint.async true")])
def test_no_checkpoint_has_a_step_that_is_not_finite(
    interval: int, kept: list[int], more: str, folders: Path, tmp_path: Path, pools: Pools
) -> None:
    """Whether one is due after this step, which is then read before the next, or after the next one. The same command
    resumes, and ends as a run without the fault does.
    """
    fault = Fault("vision", 1, 2)

    def line(run: str) -> list[str]:
        return flags(folders, tmp_path / run, "sp:2", "tp:2", f"--checkpoint.interval {interval} {more}")

    found = pools(2).run(program_broken, line("broken"), fault)
    (finished, error, events), other = found
    assert not finished and other == (finished, error, events) and error.startswith(fault.message)
    before = {1: ["read 1", "issue 2"], 2: ["issue 2", "read 1"], 3: ["read 1", "issue 3"]}
    assert events[-3:] == [*before[interval], "read 2"]
    assert "Step 1 was not saved" in error if not kept else "The newest checkpoint is " in error
    assert list(whole(tmp_path / "broken/checkpoints")) == kept and not unfinished(tmp_path / "broken/checkpoints")
    assert [each["step"] for each in logged(tmp_path / "broken")] == [1]

    assert set(pools(2).run(jobs.program, line("broken"))) == {(True, "")}
    assert set(pools(2).run(jobs.program, line("whole"))) == {(True, "")}
    same(*(tmp_path / run / "checkpoints/step-00000004" for run in ("broken", "whole")), but="")


def program_broken(flags: list[str], fault: Fault) -> tuple[bool, str, list[str]]:
    """What the program does with a fault, and the events."""
    with broken(fault) as events:
        return (*jobs.program(flags), events)


def logged(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "log/metrics.jsonl").read_text().splitlines()]


def one_by_one(flags: list[str]) -> None:
    """Train as the program does, but read each step before the next one begins."""
    run = build_logged(flags)
    with run.writer:
        for step, batch, waited in run.batches():
            run.writer.write(run.trainer.train_step(step, batch, waited))


TIMES = re.compile(r".*_s$|.*_share$|mfu|peak_memory_bytes|encoder_idle_share")


@pytest.mark.parametrize("model, vision, text", [("plain", "dp:1@0", "dp:1@1"), ("moe", "dp:2", "dp:2,ep:2")])
def test_metrics_are_those_of_a_run_that_reads_each_step_at_once(
    model: str, vision: str, text: str, folders: Path, tmp_path: Path, pools: Pools
) -> None:
    """All steps are there, in order, each with its own numbers; times are of one step each."""
    more = "--model.router_aux_loss_coef 0.01" if model == "moe" else ""
    late, at_once = (
        flags(folders, tmp_path / run, vision, text, f"--checkpoint.interval 3 --train.iters 5 {more}", model)
        for run in ("late", "at-once")
    )
    assert set(pools(2).run(jobs.program, late)) == {(True, "")}
    pools(2).run(one_by_one, at_once)
    found, expected = logged(tmp_path / "late"), logged(tmp_path / "at-once")
    assert [each["step"] for each in found] == [1, 2, 3, 4, 5]
    for got, want in zip(found, expected, strict=True):
        assert got.keys() == want.keys()
        numbers = [name for name in got if not TIMES.fullmatch(name)]
        assert {"loss", "grad_norm", "lr", "tokens", "supervised_tokens"} <= set(numbers)
        assert model != "moe" or {"expert_load", "balance_loss"} <= set(numbers)
        assert [got[name] for name in numbers] == [want[name] for name in numbers]
        assert got["step_time_s"] > 0 and got["peak_memory_bytes"] > 0


@pytest.mark.parametrize("asked, stopped", [("step 1", 2), ("step 2", 3), ("step 3", 3)])
def test_a_run_stops_with_the_step_that_was_issued(
    asked: str, stopped: int, folders: Path, tmp_path: Path, pools: Pools
) -> None:
    """That is the next one, unless a checkpoint is due after the step in which it was asked."""
    more = "--checkpoint.interval 3 --train.iters 5"
    line = flags(folders, tmp_path / "cut", "sp:2", "tp:2", more)
    assert set(pools(2).run(jobs.program, line, asked)) == {(False, "")}
    assert list(whole(tmp_path / "cut/checkpoints")) == [stopped]
    assert [each["step"] for each in logged(tmp_path / "cut")] == list(range(1, stopped + 1))
    assert set(pools(2).run(jobs.program, line)) == {(True, "")}
    assert set(pools(2).run(jobs.program, flags(folders, tmp_path / "whole", "sp:2", "tp:2", more))) == {(True, "")}
    same(*(tmp_path / run / "checkpoints/step-00000005" for run in ("cut", "whole")), but="")
    assert [each["step"] for each in logged(tmp_path / "cut")] == [1, 2, 3, 4, 5]


def order(flags: list[str]) -> list[str]:
    """In which order steps are issued, read and saved."""
    run = build_logged(flags)
    with run.writer, broken(Fault("loss", 0, 0)) as events:
        for metrics in run.steps(False):
            events.append(f"got {metrics.step}")
    return events


def test_the_next_step_is_issued_before_a_step_is_read(folders: Path, tmp_path: Path, pools: Pools) -> None:
    """Unless a checkpoint, or an evaluation, is due after it, or it is the last one."""

    def events(more: str) -> list[str]:
        folder = tmp_path / str(sum(1 for _ in tmp_path.iterdir()))
        return pools(1).run(order, flags(folders, folder, "dp:1", "dp:1", more))[0]

    free = ["issue 1", "issue 2", "read 1", "got 1", "issue 3", "read 2", "got 2", "issue 4"]
    free += ["read 3", "got 3", "read 4", "got 4"]
    assert events("--checkpoint.interval 100") == free
    due = ["issue 1", "issue 2", "read 1", "got 1", "read 2", "got 2", "issue 3", "issue 4"]
    due += ["read 3", "got 3", "read 4", "got 4"]
    assert events("--checkpoint.interval 2") == due
    assert events("--checkpoint.interval 100 --eval.datasets a --eval.interval 2") == due
