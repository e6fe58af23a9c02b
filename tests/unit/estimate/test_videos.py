"""Plans of long videos: memory of a rank depends on its own frames."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_hetero.estimate.estimate import KINDS
from megatron_hetero.estimate.report import assumptions
from tests.unit.estimate.conftest import MakePlan

FRAMES = 96
"""Frames of a video for each rank of the encoder."""
ACTIVATIONS = KINDS.index("activations")


@pytest.mark.parametrize("axis", ["sp", "cp", "dp"])
def test_memory_of_a_rank_does_not_grow_with_the_video(axis: str, make_plan: MakePlan) -> None:
    """Videos of one frame more for each rank more, on ranks of the encoder alone."""
    found = []
    for ranks in (1, 2, 4, 8):
        layouts = f"{axis}:{ranks}@0-{ranks - 1}", f"tp:4@{ranks}-{ranks + 3}"
        video = f"--plan.images 0 --plan.videos 1 --plan.frames {FRAMES * ranks} --plan.frame_side 224"
        plan = make_plan(ranks + 4, *layouts, f"{video} --train.global_batch_size 8 --data.max_seq_length 65536")
        found.append(float(plan.memory[:ranks, ACTIVATIONS].max()))
    # Gathered keys and values of one frame pair come on top under cp.
    np.testing.assert_allclose(found, found[0], rtol=0.1)


def test_several_calls_bound_what_a_rank_stores(make_plan: MakePlan) -> None:
    """Only patches, rows and gradients of rows grow with the video: 1,176 and twice 3,584 / 4 elements of two bytes
    for each patch.
    """

    def stored(frames: int, more: str = "") -> int:
        video = (
            f"--plan.images 0 --plan.videos 1 --plan.frames {frames} --plan.frame_side 224 --data.max_seq_length 65536"
        )
        plan = make_plan(5, "dp:1@0", "tp:4@1-4", f"{video} --train.global_batch_size 1 {more}")
        return int(plan.memory[0, ACTIVATIONS])

    flags = "--vision-patches_per_call 4096"
    growth = (stored(768, flags) - stored(384, flags)) / (192 * 256)
    assert growth == 2 * (1176 + 2 * 3584 / 4)
    assert stored(768, "--vision-recompute full") > 2 * stored(768, flags)


def test_an_hour_is_planned(make_plan: MakePlan) -> None:
    """60 minutes at 1 frame per second."""
    hour = "--plan.images 0 --plan.videos 1 --plan.frames 3600 --plan.frame_side 224 --data.max_seq_length 262144"
    plan = make_plan(8, "sp:8", "cp:8", f"{hour} --train.global_batch_size 1")
    text = "\n".join(assumptions(plan))
    assert "1 video, 1,800 frame pairs of 224x224 pixels (256 patches, 64 rows)" in text
    assert plan.assumed.sample.tokens == 1800 * 64 + plan.job.config.plan.tokens
