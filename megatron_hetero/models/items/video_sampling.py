"""Which frames of a video an encoder takes, and in which size: rules of two programs, as pure functions.

`transformers`: the video processors of `transformers`. `authors`: the utility that the authors of Qwen-VL publish
(qwen-vl-utils 0.0.14). Both agree for an even number of frames, at least 4, at the video's own rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

Rules = Literal["transformers", "authors"]
Bounded = Literal["frame", "video"]
"""What has a largest area: a frame (Qwen2.5-VL), or all frames of a video together (Qwen3-VL)."""


class Numbers(NamedTuple):
    """Frames per second, and of a video."""

    fps: float
    min_frames: int
    max_frames: int


AUTHORS = Numbers(2.0, 4, 768)
"""Of `authors`."""
ANY_NUMBER = 1 << 31
"""In place of the largest number of frames."""
_PICTURE_TOKENS = 4, 16384
"""Tokens of a picture or frame whose size a record gives, at least and at most."""
_FRAME_TOKENS, _VIDEO_TOKENS = (128, 768), 0.9 * 128_000
"""Tokens of a frame, at least and at most, and of a video, by the rules of `authors`."""


@dataclass(frozen=True)
class Sampling:
    """Rules with their numbers.

    Attributes:
        rules: see above.
        bounded: what `low` and `high` are the areas of.
        fps: frames per second; None: the video's own.
        min_frames, max_frames: of a video.
        low, high: smallest and largest area in pixels.
        cap: tokens, the limit that `cap_pixels_per_frame` of `transformers` adds; None without it.
        frame_pixels: largest area of a frame besides; None: no limit.
        total_pixels: largest area of all frames together besides; None: no limit.
        unit: pixels of a unit's side.
        frame_low: smallest area of a frame by what a record says of sizes, which counts as by `authors`; None: nothing.
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
        """The rules with what a record says of a video, by the names of qwen-vl-utils."""
        low = given.get("min_frames", min(self.min_frames, given.get("max_frames", self.min_frames)))
        high = given.get("max_frames", max(self.max_frames, low))
        own = replace(self, fps=given.get("fps") or self.fps, min_frames=low, max_frames=high)
        if "nframes" in given:
            number = max(2, round(given["nframes"] / 2) * 2)
            own = replace(own, fps=None, min_frames=number, max_frames=number)
        if given.keys().isdisjoint(("min_pixels", "max_pixels", "total_pixels")):
            return own
        frame, total = given.get("max_pixels", self.frame_pixels), given.get("total_pixels", self.total_pixels)
        least = given.get("min_pixels", min(_FRAME_TOKENS[0] * self.unit**2, frame or math.inf))
        return replace(own, frame_low=least, frame_pixels=frame, total_pixels=total)

    def frames(self, total: int, rate: float) -> np.ndarray:
        """The frames to take of `total` (at least 1) at `rate` per second: int64 [k], ascending, k at least 1."""
        if total < 2 or (self.fps is None and self.min_frames <= total <= self.max_frames):
            return np.arange(total)
        wanted = total if self.fps is None else total / rate * self.fps
        if self.rules == "transformers" and self.bounded == "video":
            count = min(max(int(wanted), self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(np.int64)
        import torch  # Rounds as these rules' own code does.

        most = max(2, min(self.max_frames, total) // 2 * 2)
        if self.rules == "transformers":
            count = int(min(max(wanted, self.min_frames, 2), most) // 2 * 2)
            return torch.arange(0, total, total / count).int().numpy()[:count].astype(np.int64)
        count = int(min(max(wanted, -(-self.min_frames // 2) * 2, 2), most) // 2 * 2)
        return torch.linspace(0, total - 1, count).round().long().numpy()

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of the frames of a video of so many (at least 2), resized. Raises `ValueError` for sides
        that differ by a factor above 200.
        """
        low, high = self.low, self.high
        if self.rules == "authors" or self.frame_low is not None:
            low, most = (tokens * self.unit**2 for tokens in _FRAME_TOKENS)
            low = low if self.frame_low is None else self.frame_low
            total = self.total_pixels or _VIDEO_TOKENS * self.unit**2
            bound = max(min(most, total / frames * 2), int(low * 1.05))
            return resized_frame(height, width, self.unit, low, min(bound, self.frame_pixels or bound))
        of = frames if self.bounded == "video" else 1
        limits = [] if self.frame_pixels is None else [self.frame_pixels]
        limits += [] if self.total_pixels is None else [self.total_pixels // frames]
        if self.cap is not None:
            pixels = self.cap * self.unit**2
            limits.append(pixels if self.bounded == "video" else int(pixels * 0.9) * 2 // frames)
        if limits:
            high = max(min(high // of, *limits), int(low * 1.05)) * of
        if self.bounded == "frame":
            return resized_frame(height, width, self.unit, low, high)
        return resized_video(frames, height, width, self.unit, low, high)


def given_size(given: Mapping[str, Any], unit: int) -> tuple[int, int] | None:
    """Height and width that a record gives, in whole units as qwen-vl-utils rounds them; None if it gives none. Raises
    `ValueError`.
    """
    if "resized_height" not in given:
        return None
    sides = max(given["resized_height"], unit), max(given["resized_width"], unit)
    return resized_frame(*sides, unit, *(tokens * unit**2 for tokens in _PICTURE_TOKENS))


def resized_frame(height: int, width: int, unit: int, low: float, high: float) -> tuple[int, int]:
    """`smart_resize` of Qwen2-VL: whole units, with an area from `low` to `high`. Raises `ValueError`."""
    return _within((height, width), unit, low, high)


def resized_video(frames: int, height: int, width: int, unit: int, low: float, high: float) -> tuple[int, int]:
    """`smart_resize` of Qwen3-VL's videos: the area of all frames is from `low` to `high`. Raises `ValueError`."""
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    return _within((height, width), unit, low, high, frames, round(frames / 2) * 2)


def _within(
    given: tuple[int, int], unit: int, low: float, high: float, frames: int = 1, even: int = 1
) -> tuple[int, int]:
    """The `given` height and width of so many `frames` in whole units, rounded, or scaled if their area is too large or
    small, for which an `even` number of frames counts. Raises `ValueError`.
    """
    height, width = given
    if max(given) / min(given) > 200:
        raise ValueError(f"sides of {width} x {height} pixels")
    sides = round(height / unit) * unit, round(width / unit) * unit
    area, own = even * math.prod(sides), frames * height * width
    if area > high:
        scale = math.sqrt(own / high)
        return (
            max(unit, math.floor(height / scale / unit) * unit),
            max(unit, math.floor(width / scale / unit) * unit),
        )
    if area < low:
        scale = math.sqrt(low / own)
        return math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return sides


def nearest_frames(times: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The frames shown nearest to the times at which frames `wanted` would be, were all evenly spaced: int64 [k],
    ascending; if all are wanted, all. `times`: float64 [frames], seconds, ascending.
    """
    if len(wanted) == len(times):
        return wanted
    at = times[0] + wanted * (times[-1] - times[0]) / (len(times) - 1)
    return np.interp(at, times, np.arange(len(times))).round().astype(np.int64)


def is_constant(times: np.ndarray, rate: float) -> bool:
    """Whether each frame is shown within a tenth of a frame of its number over `rate`."""
    return rate > 0 and bool(np.abs(times - times[0] - np.arange(len(times)) / rate).max() <= 0.1 / rate)


def mean_rate(times: np.ndarray) -> float:
    """Frames per second; 1 for a single frame, which has none."""
    return (len(times) - 1) / float(times[-1] - times[0]) if len(times) > 1 else 1.0
