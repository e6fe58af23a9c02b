"""What ranks really do, and when: the order of their actions, and what their encoders keep meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.measuring.material import ModelSize, write_samples
from benchmarks.measuring.recording import on_one_clock, require_order, step_seconds
from benchmarks.measuring.scheduling import ScheduleBench
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.support.pool import Pools

SIZE = ModelSize(
    vision_hidden=64, vision_layers=2, text_hidden=64, text_layers=4, text_heads=4, text_kv_heads=2, vision_heads=8
)
FOUR_WINDOWS = 224
"""Pixels of a picture's side: enough for every rank to encode a part of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("schedule")
    write_samples(made, SIZE, [FOUR_WINDOWS, FOUR_WINDOWS + 56])
    return made


def record(folder: Path, vision: str, text: str, settings: ScheduleSettings) -> tuple[Any, ...]:
    """The schedule of four micro-batches, and what this rank did."""
    bench = ScheduleBench(Platform(CPU, "gloo"), folder, vision, text, 4, {"": settings})
    return bench.schedule(""), bench.record("")


def peak_activation_bytes(folder: Path, samples: int) -> int:
    """Of this rank's encoder, in waves of two micro-batches."""
    bench = ScheduleBench(Platform(CPU, "gloo"), folder, "sp:2", "pp:2", samples, {"": ScheduleSettings(waves=2)})
    return bench.peak_activation_bytes("")


@pytest.mark.parametrize(
    "vision, text, ranks, settings",
    [
        ("dp:1@0", "dp:1@1", 2, ScheduleSettings()),
        ("sp:2", "pp:2", 2, ScheduleSettings(waves=1)),
        ("sp:2", "pp:2", 2, ScheduleSettings(waves=2)),
        ("sp:2@0-1", "pp:2@2-3", 4, ScheduleSettings()),
        ("sp:4", "pp:4", 4, ScheduleSettings("recompute")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_keep_the_order_of_the_schedule(
    vision: str, text: str, ranks: int, settings: ScheduleSettings, folder: Path, pools: Pools
) -> None:
    schedules, spans = zip(*pools(ranks).run(record, folder, vision, text, settings), strict=True)
    step = on_one_clock(spans)
    require_order(schedules[0], step)
    swapped = {rank: [*own[:-2], own[-1], own[-2]] for rank, own in step.items()}
    with pytest.raises(AssertionError, match="order of rank 0"):
        require_order(schedules[0], swapped)
    assert step_seconds(step) >= max(own[-1].end - own[0].start for own in step.values())


def test_live_encoder_activations_do_not_grow(folder: Path, pools: Pools) -> None:
    measured = [max(pools(2).run(peak_activation_bytes, folder, samples)) for samples in (8, 16, 64)]
    assert measured[0] > 0
    assert measured == [measured[0]] * 3
