"""ZeRO stages 2 and 3: what a step computes, what a checkpoint holds, and who resumes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import require_exact_resume
from tests.functional.checkpoint.runs import BF16, HOST, SMALL, flags, zero
from tests.support.matrix import thinned
from tests.support.pool import Pools


@pytest.mark.parametrize(
    "stages, more",
    thinned(
        [
            (zero(3, 3), ""),
            (zero(2, 3), "--text-precision.master split"),
            (zero(3, 2), HOST),
            (zero(3, 3), "--vision-chunk 8 --text-chunk 8"),
        ],
        5,
    ),
)
def test_training_is_the_same_bit_by_bit(stages: str, more: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    """Where gradients are sums of the same two numbers, of two ranks and one micro-batch, and not scaled by a norm."""
    more = f"{BF16} --train.iters 6 --train.micro_batch_size 2 --optimizer.clip_grad 0 {more}"
    expected = pools(2).run(jobs.train, flags(folders, tmp_path / "one", "dp:2", "dp:2", more))[0]
    found = pools(2).run(jobs.train, flags(folders, tmp_path / "zero", "dp:2", "dp:2", f"{more} {stages}"))[0]
    assert found["losses"] == expected["losses"]
    assert all(np.array_equal(found["weights"][name], value) for name, value in expected["weights"].items())


@pytest.mark.parametrize("more", thinned([f"{zero(3, 3)} {SMALL}", f"{zero(3, 2)} {HOST}"], 2))
def test_a_resume_is_exact(more: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    more = f"{BF16} --train.iters 4 --checkpoint.interval 100 {more}"
    require_exact_resume(pools, tmp_path, lambda run: flags(folders, tmp_path / run, "sp:2", "dp:2", more))


@pytest.mark.long
def test_every_stage_resumes_every_other(folders: Path, tmp_path: Path, pools: Pools) -> None:
    """In other layouts, with parts that were or are frozen: what was saved is what is loaded."""
    runs = [
        ("", "sp:2", "tp:2"),
        (zero(3, 3), "dp:2", "dp:2"),
        (f"{zero(3, 3)} --model.freeze vision", "sp:2", "cp:2"),
        ("--model.freeze model.layers.*.mlp.* visual.blocks.0.*", "dp:2", "pp:2"),
        ("--vision-zero 2 --model.train *norm* projector", "dp:2", "tp:2"),
        (f"{zero(3, 2)} --text-precision.master split", "sp:2", "dp:2"),
    ]
    written = tmp_path
    for turn, (setting, vision, text) in enumerate(runs):
        resume = f"--checkpoint.resume {written}" if turn else ""
        more = f"{BF16} --train.iters {2 * turn + 2} --checkpoint.interval 100 {setting} {resume}"
        copy = tmp_path / f"{turn}/copy" if turn else None
        found = pools(2).run(jobs.train, flags(folders, tmp_path / f"{turn}", vision, text, more, "deep"), copy)[0]
        assert found["from"] == 2 * turn and np.isfinite(found["losses"]).all()
        if copy is not None:
            before, loaded = jobs.tensors(written), jobs.tensors(copy / f"step-{2 * turn:08d}")
            for key, value in loaded.items():
                if key.startswith("weights/") and "--model" not in setting:
                    assert np.array_equal(value.float().numpy(), before[key].float().numpy()), key
        written = tmp_path / f"{turn}/checkpoints/step-{2 * turn + 2:08d}"
