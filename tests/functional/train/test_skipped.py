"""Samples that are too long or bad are left out: counted alike in all layouts, also after a resume, and steps without
others train nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.folders import write_data, write_long
from tests.support.pool import Pools
from tests.support.runs import MakeFlags, build_logged, stored

LAYOUTS = [("sp:2", "tp:2"), ("dp:1@0", "dp:1@1")]


def with_skips(flags: list[str]) -> dict[str, Any]:
    """Train and save as the program does: for each step whether it changed a weight, its loss, and how many samples it
    left out; the step to resume from; and what the start printed.
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run, steps = build_logged(flags), []
    with run.writer:
        for number, batch, _ in run.batches():
            before = stored(run)
            metrics = run.trainer.train_step(number, batch)
            run.writer.write(metrics)
            run.saver.after(number, metrics.stopping)
            after = stored(run)
            changed = any(not np.array_equal(value, after[name]) for name, value in before.items())
            steps.append((changed, metrics.loss, metrics.skipped_samples + len(batch.bad)))
    return {"steps": steps, "from": run.resumed.step, "printed": printed.getvalue()}


def cut_pictures(data: Path, samples: set[int]) -> None:
    """Leave the headers of the pictures of these samples, so that only decoding finds out."""
    for picture in (each for n in samples for each in data.parent.glob(f"images/{n}_*.png")):
        picture.write_bytes(picture.read_bytes()[:100])


KINDS = {
    "skipped_samples": (write_long, "--data.max_seq_length 200 --data.too_long skip"),
    "bad_samples": (cut_pictures, "--data.bad_records skip"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_alike_in_all_layouts_and_after_a_resume(
    kind: str, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    data, (spoil, more) = write_data(tmp_path, 8, seed=3, pictures=(1, 2)), KINDS[kind]
    spoil(data, {2, 3, 5})  # All of step 2, one of step 3.
    data.write_text("".join(json.dumps({"id": 7, **json.loads(line)}) + "\n" for line in data.read_text().splitlines()))
    common = f"--train.iters 4 --optimizer.name adamw --optimizer.lr 1e-3 {more}"

    def train(layouts: tuple[str, str], i: int) -> dict[str, Any]:
        more = f"{common} --checkpoint.dir {tmp_path}/run{i} --checkpoint.interval 2 --log.dir {tmp_path}/log{i}"
        return pools(2).run(with_skips, make_flags(*layouts, more, data=data, batch=2))[0]

    found = [train(layouts, i) for i, layouts in enumerate(LAYOUTS)]
    shutil.rmtree(tmp_path / "run0/step-00000004")
    again = train(("dp:2", "dp:2"), 0)
    assert again["from"] == 2
    assert all(run["printed"].count(": id (8)\n") == 1 for run in (*found, again))
    for run in (*found, {**again, "steps": found[0]["steps"][:2] + again["steps"]}):
        changed, losses, skipped = zip(*run["steps"], strict=True)
        assert changed == (True, False, True, True) and skipped == (0, 2, 1, 0)
        assert losses == pytest.approx([loss for _, loss, _ in found[0]["steps"]], rel=1e-5, nan_ok=True)
    for i in range(len(LAYOUTS)):
        lines = [json.loads(line) for line in (tmp_path / f"log{i}/metrics.jsonl").read_text().splitlines()]
        assert [line[kind] for line in lines] == [0, 2, 1, 0]
        assert [line["loss"] is None for line in lines] == [False, True, False, False]
        if kind == "bad_samples":  # Each named once, those of a resumed run that trains steps again, too.
            named = (tmp_path / f"log{i}/bad_records.jsonl").read_text().splitlines()
            assert [json.loads(line)["record"] for line in named] == [2, 3, 5]
