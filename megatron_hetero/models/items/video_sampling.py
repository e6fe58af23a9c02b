"""Sampling and resized sizes of video frames by the rules of two programs, as pure functions.

`transformers`: the video processors of `transformers`. `authors`: the utility published by the authors of Qwen-VL
(qwen-vl-utils 0.0.14). The rules agree for an even number of at least 4 frames that are all taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

Rules = Literal["transformers", "authors"]
Bounded = Literal["frame", "video"]
"""What the maximum area applies to: a frame (Qwen2.5-VL), or all frames of a video together (Qwen3-VL)."""


class Numbers(NamedTuple):
    """Frames per second, and limits of the number of frames of a video."""

    fps: float
    min_frames: int
    max_frames: int


AUTHORS = Numbers(2.0, 4, 768)
"""Defaults of the rules `authors`."""
ANY_NUMBER = 1 << 31
"""Maximum number of frames without a limit."""
_PICTURE_TOKENS = 4, 16384
"""Minimum and maximum tokens of a picture or frame whose size is given in the record."""
_FRAME_TOKENS, _VIDEO_TOKENS = (128, 768), 0.9 * 128_000
"""Limits by the rules of `authors`: minimum and maximum tokens of a frame, and maximum tokens of a video."""


@dataclass(frozen=True)
class Sampling:
    """The rules for sampling a video, with their parameters.

    Attributes:
        rules: `transformers` or `authors`.
        bounded: whether `low` and `high` apply to a frame or to a video.
        fps: frames per second; None: the rate of the video.
        min_frames, max_frames: limits of the number of frames of a video.
        low, high: minimum and maximum area in pixels.
        cap: maximum tokens by `cap_pixels_per_frame` of `transformers`; None without this limit.
        frame_pixels: further limit of the area of a frame; None: no limit.
        total_pixels: further limit of the area of all frames together; None: no limit.
        unit: side of a unit in pixels.
        frame_low: minimum area of a frame in a record with settings of sizes, to which the rules of `authors` apply;
            None without such settings.
    """

    rules: Rules
    bounded: Bounded
    fps: float | None
    min_frames: int
    max_frames: int
    low: int
    high: int
    cap: int | None
    frame_pixels: int | None
    total_pixels: int | None
    unit: int
    frame_low: float | None = None

    def given(self, given: Mapping[str, Any]) -> Sampling:
        """Return the rules with the settings of a record, which have the names of qwen-vl-utils."""
        low = given.get("min_frames", min(self.min_frames, given.get("max_frames", self.min_frames)))
        high = given.get("max_frames", max(self.max_frames, low))
        sampling = replace(self, fps=given.get("fps") or self.fps, min_frames=low, max_frames=high)
        if "nframes" in given:
            number = max(2, round(given["nframes"] / 2) * 2)
            sampling = replace(sampling, fps=None, min_frames=number, max_frames=number)
        if given.keys().isdisjoint(("min_pixels", "max_pixels", "total_pixels")):
            return sampling
        frame, total = given.get("max_pixels", self.frame_pixels), given.get("total_pixels", self.total_pixels)
        minimum = given.get("min_pixels", min(_FRAME_TOKENS[0] * self.unit**2, frame or math.inf))
        return replace(sampling, frame_low=minimum, frame_pixels=frame, total_pixels=total)

    def frames(self, total: int, rate: float) -> np.ndarray:
        """Return the numbers of the frames to take of `total` (at least 1) frames at `rate` per second: int64 [k],
        ascending, k at least 1.
        """
        if total < 2 or (self.fps is None and self.min_frames <= total <= self.max_frames):
            return np.arange(total)
        wanted = total if self.fps is None else total / rate * self.fps
        if self.rules == "transformers" and self.bounded == "video":
            count = min(max(int(wanted), self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(np.int64)
        import torch  # torch rounds like the original code of these rules.

        maximum = max(2, min(self.max_frames, total) // 2 * 2)
        if self.rules == "transformers":
            count = int(min(max(wanted, self.min_frames, 2), maximum) // 2 * 2)
            return torch.arange(0, total, total / count).int().numpy()[:count].astype(np.int64)
        count = int(min(max(wanted, -(-self.min_frames // 2) * 2, 2), maximum) // 2 * 2)
        return torch.linspace(0, total - 1, count).round().long().numpy()

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the resized height and width of the frames of a video with `frames` (at least 2) frames. Raises
        `ValueError` for sides that differ by a factor above 200.
        """
        low, high = self.low, self.high
        if self.rules == "authors" or self.frame_low is not None:
            low, maximum = (tokens * self.unit**2 for tokens in _FRAME_TOKENS)
            low = low if self.frame_low is None else self.frame_low
            total = self.total_pixels or _VIDEO_TOKENS * self.unit**2
            bound = max(min(maximum, total / frames * 2), int(low * 1.05))
            return resized_frame(height, width, self.unit, low, min(bound, self.frame_pixels or bound))
        count = frames if self.bounded == "video" else 1
        limits = [] if self.frame_pixels is None else [self.frame_pixels]
        limits += [] if self.total_pixels is None else [self.total_pixels // frames]
        if self.cap is not None:
            pixels = self.cap * self.unit**2
            limits.append(pixels if self.bounded == "video" else int(pixels * 0.9) * 2 // frames)
        if limits:
            high = max(min(high // count, *limits), int(low * 1.05)) * count
        if self.bounded == "frame":
            return resized_frame(height, width, self.unit, low, high)
        return resized_video(frames, height, width, self.unit, low, high)


def given_size(given: Mapping[str, Any], unit: int) -> tuple[int, int] | None:
    """Return the height and width in a record's settings, rounded to whole units like qwen-vl-utils; None without these
    settings. Raises `ValueError`.
    """
    if "resized_height" not in given:
        return None
    sides = max(given["resized_height"], unit), max(given["resized_width"], unit)
    return resized_frame(*sides, unit, *(tokens * unit**2 for tokens in _PICTURE_TOKENS))


def resized_frame(height: int, width: int, unit: int, low: float, high: float) -> tuple[int, int]:
    """Return height and width in whole units with an area from `low` to `high`: `smart_resize` of Qwen2-VL. Raises
    `ValueError`.
    """
    return _within((height, width), unit, low, high)


def resized_video(frames: int, height: int, width: int, unit: int, low: float, high: float) -> tuple[int, int]:
    """Return height and width in whole units, with the area of all frames together from `low` to `high`: `smart_resize`
    of Qwen3-VL for videos. Raises `ValueError`.
    """
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    return _within((height, width), unit, low, high, frames, round(frames / 2) * 2)


def _within(
    given: tuple[int, int], unit: int, low: float, high: float, frames: int = 1, even: int = 1
) -> tuple[int, int]:
    """Return the `given` height and width in whole units: rounded, or scaled if the area of `even` frames is outside
    the limits. Raises `ValueError`.
    """
    height, width = given
    if max(given) / min(given) > 200:
        raise ValueError(f"sides of {width} x {height} pixels")
    sides = round(height / unit) * unit, round(width / unit) * unit
    area, given_area = even * math.prod(sides), frames * height * width
    if area > high:
        scale = math.sqrt(given_area / high)
        return (
            max(unit, math.floor(height / scale / unit) * unit),
            max(unit, math.floor(width / scale / unit) * unit),
        )
    if area < low:
        scale = math.sqrt(low / given_area)
        return math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return sides


def nearest_frames(times: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the frames nearest to the times that frames `wanted` would have with even spacing: int64 [k], ascending;
    all frames if all are wanted. `times`: float64 [frames], seconds, ascending.
    """
    if len(wanted) == len(times):
        return wanted
    at = times[0] + wanted * (times[-1] - times[0]) / (len(times) - 1)
    return np.interp(at, times, np.arange(len(times))).round().astype(np.int64)


def is_constant(times: np.ndarray, rate: float) -> bool:
    """Return whether each frame's time differs from its number over `rate` by at most a tenth of a frame."""
    return rate > 0 and bool(np.abs(times - times[0] - np.arange(len(times)) / rate).max() <= 0.1 / rate)


def mean_rate(times: np.ndarray) -> float:
    """Return the mean number of frames per second; 1 for a single frame."""
    return (len(times) - 1) / float(times[-1] - times[0]) if len(times) > 1 else 1.0
