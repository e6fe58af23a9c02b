"""A call of all ranks that one rank makes alone, or leaves out, ends the job with one message that names it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.functional.forked import Forked
from tests.support.matrix import thinned


def train(case: str, folder: str, timeout_s: float = 2.0) -> None:
    """Two steps on two ranks, of which the second leaves something out or the first does something alone."""
    import torch
    from torch import nn

    import megatron_hetero as mh

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 1)

        def forward(self, _: object, rows: torch.Tensor) -> torch.Tensor:
            return self.head(rows).sum()

    def stays_away(where: str) -> None:
        while case == where and torch.distributed.get_rank() == 1:
            time.sleep(0.1)

    def main(_: object) -> None:
        with mh.process_group():
            first = torch.distributed.get_rank() == 0
            stays_away("build")
            graph = mh.Graph({"vision": ["text"]}, width=4, dtype=torch.float32)
            topology = mh.build(graph, vision="dp:2", text="dp:2", timeout_s=timeout_s if case != "its own" else 300.0)
            models = {"vision": nn.Linear(4, 4), "text": Text()}
            stays_away("build_optimizers")
            optimizer = mh.build_optimizers(topology, models, mh.AdamW(lr=0.1))
            stays_away("runner")
            run = mh.Runner(topology, models, optimizer=optimizer, timeout_s=timeout_s if case == "its own" else None)
            if case == "load" and first:
                mh.load_checkpoint(folder, optimizer)
            for step in range(2):
                last = step == 1
                if case in ("data", "its own") and last and not first:
                    break
                optimizer.zero_grad()
                if case == "error" and last and not first:
                    raise RuntimeError("a bug")
                rows = mh.Rows(held=[topology.rank], needed=[topology.rank])
                inputs = {"vision": torch.ones(1, 4), "text": ()}
                result = run([mh.MicroBatchInputs(inputs, {("vision", "text"): rows})])
                if case == "loss" and first:
                    mh.total_loss(topology, "text", result)
                tokens = mh.count_tokens(topology, "text", 1) if case != "tokens" or first else 2
                if not (case == "step" and last and not first):
                    optimizer.step(tokens=tokens)
                if case == "save" and last and first:
                    mh.save_checkpoint(folder, optimizer, 1)
            if case == "last loss" and first:
                mh.total_loss(topology, "text", 1.0)
            if case == "slow end" and first:
                time.sleep(2.5 * timeout_s)
            if case == "exit" and not first:
                raise SystemExit(3)

    mh.guarded(main, [])


def at(line: str) -> str:
    """The place of the first line of `train` that begins so."""
    lines = Path(__file__).read_text().splitlines()
    number = next(n for n, each in enumerate(lines, 1) if each.strip().startswith(line))
    return f"at {Path(__file__).name}:{number}"


END = f"left `process_group`, {at('with mh.process_group')}"
CASES = [
    ("runner", "`Runner.__init__`", "rank 1 did not come", f"nothing that is watched, {at('time.sleep(0.1)')}"),
    ("data", "`Runner.__call__`", "rank 1 left", END),
    ("its own", "`Runner.__call__`", "rank 1 left", END),
    ("step", "`JointOptimizer.step`", "rank 1 left", END),
    ("last loss", "`total_loss`", "rank 1 left", END),
    ("save", "`save_checkpoint`", "rank 1 left", END),
    ("error", "`Runner.__call__`", "rank 1 left", f"left by RuntimeError, {at('raise RuntimeError')}"),
    ("build_optimizers", "`build_optimizers`", "rank 1 did not come", "nothing that is watched, "),
    ("load", "`", "all ranks wait for each other", f"`Runner.__call__`, with all other ranks, {at('result = run')}"),
    ("build", "`build`", "rank 1 did not report", ""),
]


@pytest.mark.parametrize("case, waits, why, other", thinned(CASES, 3), ids=str)
def test_the_others_end_and_name_the_rank_that_is_elsewhere(
    case: str, waits: str, why: str, other: str, tmp_path: Path
) -> None:
    with Forked(tmp_path / "ranks", train, [[case, str(tmp_path / "checkpoints")]] * 2) as ranks:
        ranks.ranks[0].join(60)
        assert ranks.ranks[0].exitcode == 70
        said = ranks.said(0) + ranks.said(1)
    messages = [line for line in said.splitlines() if "unfinished" in line]
    assert len(messages) == 1 and f"found {waits}" in messages[0] and f"because {why}" in messages[0], said
    assert "expected it within timeout_s = 2" in messages[0] and (not other or f"\n  rank 1: {other}" in said), said


LOSS = at('mh.total_loss(topology, "text", result)')
STEP = at("optimizer.step(")


@pytest.mark.parametrize(
    "case, calls",
    [
        (
            "loss",
            (f"`total_loss of text`, {LOSS} on rank 0 and ", f"`count_tokens of text`, {at('tokens =')} on rank 1"),
        ),
        (
            "tokens",
            (f"`count_tokens of text`, {at('tokens =')} on rank 0 ", f"`JointOptimizer.step`, {STEP} on rank 1"),
        ),
    ],
)
def test_calls_that_would_take_each_others_values_are_named_at_once(
    case: str, calls: tuple[str, ...], tmp_path: Path
) -> None:
    with Forked(tmp_path / "ranks", train, [[case, "", 100.0]] * 2) as ranks:
        for rank in ranks.ranks:
            rank.join(60)
        assert [rank.exitcode for rank in ranks.ranks] == [1, 1]
        said = ranks.said(0) + ranks.said(1)
    assert said.count("error: ") == 1 and all(call in said for call in calls), said


def test_the_end_waits_for_work_of_one_rank(tmp_path: Path) -> None:
    with Forked(tmp_path / "ranks", train, [["slow end", "", 1.0]] * 2) as ranks:
        ranks.require_success()


def fail(alone: bool) -> None:
    import megatron_hetero as mh
    from megatron_hetero.groups.launch import rank

    def main(_: object) -> None:
        with mh.process_group():
            if rank() == 1 or not alone:
                raise RuntimeError(f"a bug on rank {rank()}")
            time.sleep(60)

    mh.guarded(main, [])


@pytest.mark.parametrize("alone", [False, True])
def test_a_traceback_that_ranks_share_is_printed_once_and_any_other_too(alone: bool, tmp_path: Path) -> None:
    """Without torchrun, which would end the others."""
    with Forked(tmp_path / "ranks", fail, [[alone]] * 3) as ranks:
        for rank in ranks.ranks[alone : 2 if alone else 3]:
            rank.join(30)
            assert rank.exitcode == 70
        said = [ranks.said(rank) for rank in range(3)]
    assert [len(re.findall("Traceback", each)) for each in said] == ([0, 1, 0] if alone else [1, 0, 0]), said
