"""Evaluations come after the save of their step: none is lost, however a run ends, and goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_hetero.base.outputs import whole
from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import same
from tests.functional.checkpoint.conftest import Untouched
from tests.functional.checkpoint.runs import flags
from tests.support.pool import Pools


def lines(run: Path) -> list[dict[str, Any]]:
    """Those of metrics.jsonl."""
    return [json.loads(line) for line in (run / "log/metrics.jsonl").read_text().splitlines()]


def order(run: Path) -> list[str]:
    """What the lines of metrics.jsonl are of."""
    return [f"{line.get('eval_dataset', 'step')} {line['step']}" for line in lines(run)]


def test_a_stopped_run_makes_up_for_its_evaluations(
    untouched: Untouched, folders: Path, tmp_path: Path, pools: Pools
) -> None:
    def started(asked: str = "") -> bool:
        more = f"--eval.datasets a b --eval.interval 2 --export.hf_dir {tmp_path}/out"
        return pools(2).run(jobs.program, flags(folders, tmp_path, "sp:2", "tp:2", more), asked)[0] == (True, "")

    assert not started("step 2")
    assert order(tmp_path) == ["step 1", "step 2"]
    assert not started("step 4")
    assert order(tmp_path) == ["step 1", "step 2", "a 2", "b 2", "step 3", "step 4"]
    # Nothing is left to train; it is asked after the last step, while there is still something to measure.
    assert not started("evaluation 4") and not (tmp_path / "out").exists()
    assert order(tmp_path)[6:] == ["a 4", "b 4"]
    assert started() and (tmp_path / "out/config.json").is_file()
    assert order(tmp_path)[6:] == ["a 4", "b 4"], "what is measured again takes the place of what was measured"

    assert [line["loss"] for line in lines(tmp_path) if "loss" in line] == untouched.found["losses"]
    for name in ("step-00000002", "step-00000004"):
        same(untouched.folder / "checkpoints" / name, tmp_path / "checkpoints" / name, but="")


def test_an_evaluation_that_fails_loses_no_step(folders: Path, tmp_path: Path, pools: Pools) -> None:
    shutil.copytree(folders / "a", tmp_path / "held")
    (tmp_path / "held/images").rename(tmp_path / "elsewhere")
    (tmp_path / "held/images").mkdir()
    more = (
        f"--data.registry.held.annotations {tmp_path}/held/data.jsonl "
        f"--data.registry.held.images {tmp_path}/held/images "
        f"--eval.datasets b held --eval.interval 2 --train.iters 3 --checkpoint.interval 100"
    )
    line = flags(folders, tmp_path, "tp:2", "tp:2", more)
    for finished, error in pools(2).run(jobs.program, line):
        assert not finished and "evaluation of held" in error and "checkpoints/step-00000002; the same" in error
    assert list(whole(tmp_path / "checkpoints")) == [2] and order(tmp_path) == ["step 1", "step 2", "b 2"]
    shutil.rmtree(tmp_path / "held/images")
    (tmp_path / "elsewhere").rename(tmp_path / "held/images")
    assert pools(2).run(jobs.program, line)[0] == (True, "")
    # All are made again: the one that was not lost has two lines.
    assert order(tmp_path) == ["step 1", "step 2", "b 2", "b 2", "held 2", "step 3", "b 3", "held 3"]
