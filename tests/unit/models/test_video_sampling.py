"""Sampled frames and sizes against `transformers`' own processors, and at uneven times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.models.items.video_sampling import Bounded, Sampling, is_constant, mean_rate, nearest_frames
from tests.support.video_processors import module_of, video_processor

TOTALS = st.one_of(st.integers(2, 40), st.integers(2, 5000))
RATES = st.one_of(st.sampled_from([1.0, 2.0, 10.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]), st.floats(0.5, 90))
WANTED = st.one_of(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.floats(0.1, 70))
SIDES = st.integers(5, 3000)


def sampling(bounded: Bounded, **numbers: Any) -> Sampling:
    """Rules of transformers, with these numbers."""
    given: dict[str, Any] = {"rules": "transformers", "fps": 2.0, "min_frames": 4, "max_frames": 768}
    given |= {"low": 1, "high": 1 << 40, "cap": None, "frame_pixels": None, "total_pixels": None, "unit": 28}
    return Sampling(bounded=bounded, **given | numbers)


@given(TOTALS, RATES, WANTED, st.integers(1, 8), st.sampled_from([8, 17, 768]))
def test_frames_are_those_of_transformers(total: int, rate: float, fps: float, low: int, high: int) -> None:
    metadata = SimpleNamespace(total_num_frames=total, fps=rate)
    newer = video_processor("qwen3_vl")
    newer.min_frames, newer.max_frames = low, high
    found = sampling("video", fps=fps, min_frames=low, max_frames=high).frames(total, rate)
    np.testing.assert_array_equal(found, newer.sample_frames(metadata, fps=fps))
    older: Any = video_processor("qwen2_5_vl")
    found = sampling("frame", fps=fps, min_frames=low, max_frames=high).frames(total, rate)
    try:
        expected = older.sample_frames(metadata, fps=fps, min_frames=low, max_frames=high).numpy()
    except ZeroDivisionError:  # Fewer than two frames are wanted: it has no answer.
        assert len(found) == 2
    else:
        # Rounding may give it one frame more, which no video has.
        np.testing.assert_array_equal(found, expected[expected < total])


@given(SIDES, SIDES, st.integers(2, 768), st.sampled_from([4096, 100_000]), st.sampled_from([200_000, 25_165_824]))
def test_sizes_are_those_of_transformers(height: int, width: int, frames: int, low: int, high: int) -> None:
    def of(function: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return function(*arguments, **more)
        except ValueError:
            return "refused"

    ours = sampling("frame", low=low, high=high)
    assert of(ours.size, frames, height, width) == of(
        module_of("qwen2_5_vl").smart_resize, height, width, 28, low, high
    )
    for cap in (None, 768):
        capped = high if cap is None else max(min(cap * 32**2, high // frames), int(low * 1.05)) * frames
        theirs = of(module_of("qwen3_vl").smart_resize, frames, height, width, 2, 32, low, capped)
        assert of(sampling("video", low=low, high=high, unit=32, cap=cap).size, frames, height, width) == theirs


def test_all_rules_agree_at_the_videos_own_rate() -> None:
    for rules in ("transformers", "authors"):
        for bounded in ("frame", "video"):
            found = sampling(bounded, rules=rules, fps=30.0).frames(60, 30.0)
            np.testing.assert_array_equal(found, np.arange(60))


def test_the_authors_rules() -> None:
    """Figures of qwen-vl-utils 0.0.14."""
    rules = sampling("video", rules="authors", unit=28)
    np.testing.assert_array_equal(rules.frames(300, 30.0), np.linspace(0, 299, 20).round())
    np.testing.assert_array_equal(rules.frames(7, 30.0), [0, 2, 4, 6])
    assert rules.size(60, 720, 1280) == (560, 1008)
    assert rules.size(768, 720, 1280) == (336, 644)


def test_limits_of_a_user() -> None:
    for bounded in ("frame", "video"):
        limited = sampling(bounded, frame_pixels=100_000)
        height, width = limited.size(10, 720, 1280)
        assert 0.7 * 100_000 < height * width <= 100_000
        height, width = sampling(bounded, total_pixels=1_000_000).size(10, 720, 1280)
        assert 0.7 * 100_000 < height * width <= 100_000


@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_videos(total: int) -> None:
    for bounded in ("frame", "video"):
        assert 1 <= len(sampling(bounded).frames(total, 30.0)) <= max(total, 2)
        assert sampling(bounded).frames(total, 30.0).max() < total


def test_uneven_times() -> None:
    """Thirty frames in a second, then two per second: evenly spaced times are mostly in the slow part."""
    times = np.concatenate([np.arange(30) / 30, 1 + np.arange(20) / 2])
    assert not is_constant(times, mean_rate(times))
    numbers = nearest_frames(times, np.linspace(0, 49, 8))
    np.testing.assert_allclose(times[numbers], np.linspace(0, times[-1], 8), atol=0.26)
    even = np.arange(50) / 29.97
    assert is_constant(even, 30000 / 1001) and not is_constant(even, 25.0) and not is_constant(even, 0.0)
    # Milliseconds, as in Matroska.
    assert is_constant(np.round(even, 3), 29.97)
