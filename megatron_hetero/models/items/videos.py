"""The item type of videos. To an encoder, a video is a list of pictures: each *frame pair* is a piece, which is
decoded, assigned to a replica and encoded separately. A pair has two frames where a picture has one frame twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import unused
from megatron_hetero.config.sections import VideoConfig
from megatron_hetero.models.items.image_files import load_picture, picture_size
from megatron_hetero.models.items.pictures import ImageSize, fitted, pixels_of, read_settings, require_patches, square
from megatron_hetero.models.items.types import Header, Item, ItemTokens, ItemType, Modality, Piece, RowBlock
from megatron_hetero.models.items.video_files import Convert, Late, Limits, frame_table, read_frames, within
from megatron_hetero.models.items.video_sampling import (
    ANY_NUMBER,
    AUTHORS,
    Bounded,
    Sampling,
    given_size,
    is_constant,
    mean_rate,
    nearest_frames,
)

if TYPE_CHECKING:
    from megatron_hetero.config.sections import EstimateConfig

T = TypeVar("T")
ASSUMED_RATE = 24.0
"""Frames per second of a list of frames without times, as in `transformers`."""


class VideoSize(NamedTuple):
    """Size of a video: number of frame pairs, rows and columns of patches of each pair, times of the frames in seconds,
    and seconds from one pair to the next (None without a constant rate).
    """

    pairs: int
    rows: int
    columns: int
    times: tuple[float, ...]
    step: float | None


class Shot(NamedTuple):
    """The sampled frames of an item: their numbers in the file or the list, with the last number repeated to complete a
    pair, and the size of the resized video. `file_size`: width and height of the frames in the file.
    """

    numbers: np.ndarray
    size: VideoSize
    file_size: tuple[int, int]


@dataclass(frozen=True, eq=False)
class VideoReader:
    """`ItemReader` of videos, which are files or lists of pictures.

    Attributes:
        token_id: id of the token that stands for one row.
        sampling: rules for the choice and the size of frames.
        limits: limits of reading files.
        mean, std: mean and standard deviation of each channel, for pixel values from 0 to 255.
        patch, merge, temporal: side of a patch in pixels, side of a unit in patches, frames of a patch.
        timestamps: whether pairs are shown one by one after a text with their time (Qwen3-VL), or all together
            with times as positions (Qwen2.5-VL).
        rate: temporal positions per second of video.
        text_after: value of the setting `data.video.text_after`.
    """

    token_id: int
    sampling: Sampling
    limits: Limits
    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch: int
    merge: int
    temporal: int
    timestamps: bool
    rate: float
    text_after: str

    def header(self, item: Item) -> Header:
        """Return width and height of an upright frame, after reading all packets of the file and decoding one frame."""
        if item.frames:
            return within(item.content, self.limits.seconds, lambda _: picture_size(item.content, item.where))
        table = frame_table(item, self.limits)
        return table.width, table.height

    def size(self, item: Item) -> VideoSize:
        """Return the size of a video after sampling and resizing its frames."""
        return self._shot(item).size

    def pieces(self, size: VideoSize) -> tuple[ImageSize, ...]:
        """Return the sizes of the frame pairs."""
        return (ImageSize(1, size.rows, size.columns),) * size.pairs

    def blocks(self, size: VideoSize) -> Sequence[RowBlock]:
        """Return the blocks of a video in the text: one for each pair with timestamps, else one for all pairs."""
        rows, columns = size.rows // self.merge, size.columns // self.merge
        if not self.timestamps:
            return (self._block(size, rows, columns),)
        pair = np.indices((1, rows, columns)).reshape(3, -1)
        times = np.array(size.times).reshape(size.pairs, self.temporal)
        texts = [f"<{(first + last) / 2:.1f} seconds>" for first, last in times[:, [0, -1]].tolist()]
        return [RowBlock(pair, before=f"{text}<|vision_start|>", after="<|vision_end|>") for text in texts]

    def _block(self, size: VideoSize, rows: int, columns: int) -> RowBlock:
        """Return one block with all pairs. Times are multiplied in fp32 and then truncated to whole positions, as in
        `transformers`.
        """
        if size.step is None:
            starts = np.array(size.times[:: self.temporal])
            times = np.floor((starts - starts[0]) * self.rate).astype(np.int64)
        else:
            interval = np.float32(self.rate) * np.float32(size.step)
            times = (np.arange(size.pairs, dtype=np.float32) * interval).astype(np.int64)
        places = np.indices((size.pairs, rows, columns)).reshape(3, -1)
        places[0] = times[places[0]]
        return RowBlock(places, length=max(rows, columns) if self.text_after == "transformers" else None)

    def describe(self, item: Item, size: VideoSize) -> str:
        """Return a description of a video: its file, the sampled frames and their size, and the grid of patches."""
        shot = self._shot(item)
        (width, height), taken = shot.file_size, len(np.unique(shot.numbers))
        grid, span = (size.pairs, size.rows, size.columns), f"{size.times[0]:.1f} to {size.times[-1]:.1f} s"
        if item.frames:
            source = f"{len(item.frames)} pictures"
        else:
            table = frame_table(item, self.limits)
            source = f"{len(table.stamps)} frames in {table.times[-1]:.1f} s, {table.pixels}"
        resized = f"{size.columns * self.patch}×{size.rows * self.patch} px"
        return f"{width}×{height} px, {source} → {taken} frames at {span}, {resized}, grid {grid} (t, h, w)"

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        """Decode the patches of some frame pairs.

        Returns:
            float32 [patches, channels · temporal · patch²], normalised; merged groups are adjacent.

        Raises:
            UserError: a frame cannot be decoded, or the video has changed.
        """
        shot = self._shot(item)
        known = self.pieces(shot.size)
        if any(number >= len(known) or piece != known[number] for number, piece in pieces):
            raise UserError.at(
                f"{item.where}: video {item.content}",
                found=f"{shot.size.pairs} pairs of frames of {shot.size.rows} x {shot.size.columns} patches",
                expected="as many as before",
                fix="do not change videos during training, and give all nodes the same ones",
            )
        pairs = [shot.numbers[number * self.temporal :][: self.temporal].tolist() for number, _ in pieces]
        side = self._side(shot)
        frames = self._read(item, shot, {n for pair in pairs for n in pair}, lambda p: np.asarray(fitted(p, side)))
        return np.concatenate([self._patches(np.stack([frames[n] for n in pair])) for pair in pairs])

    def frames(self, item: Item) -> list[tuple[float, Image.Image]]:
        """Return the sampled and resized frames, each with its time in seconds."""
        shot = self._shot(item)
        side = self._side(shot)
        frames = self._read(item, shot, set(shot.numbers.tolist()), lambda picture: fitted(picture, side))
        return [(time, frames[n]) for time, n in zip(shot.size.times, shot.numbers.tolist(), strict=True)]

    def _side(self, shot: Shot) -> tuple[int, int]:
        """Return the width and height of a resized frame in pixels."""
        return shot.size.columns * self.patch, shot.size.rows * self.patch

    def _shot(self, item: Item) -> Shot:
        """Sample the frames of an item. Raises `UserError`."""
        given = dict(item.given)
        if item.frames:
            times, rate, file_size = self._listed(item, given)
        else:
            table = frame_table(item, self.limits)
            times, file_size = table.times, (table.width, table.height)
            rate = table.rate if is_constant(times, table.rate) else mean_rate(times)
        first, stop = _segment(item, times, given)
        if not (constant := is_constant(times, rate)):
            rate = mean_rate(times[first:stop])
        # In a list of frames, `fps` is the rate of the list, not the sampling rate.
        sampling = self.sampling.given({**given, "fps": None} if item.frames else given)
        numbers = sampling.frames(stop - first, rate)
        count = len(numbers)
        numbers = first + (numbers if constant else nearest_frames(times[first:stop], numbers))
        numbers = np.append(numbers, np.full(-count % self.temporal, numbers[-1]))
        shown = times[0] + numbers / rate if constant else times[numbers]
        try:
            unit = self.patch * self.merge
            height, width = given_size(given, unit) or sampling.size(
                max(count, self.temporal), file_size[1], file_size[0]
            )
        except (ValueError, ZeroDivisionError) as error:
            raise UserError.at(
                f"{item.where}: video {item.content}",
                found=f"frames of {file_size[0]} x {file_size[1]} pixels ({error})",
                expected="sides that differ by a factor below 200",
                fix="crop the video, or remove the record",
            ) from error
        step = self.temporal / (count / (stop - first) * rate) if constant else None
        size = VideoSize(
            len(numbers) // self.temporal, height // self.patch, width // self.patch, tuple(shown.tolist()), step
        )
        return Shot(numbers, size, file_size)

    def _listed(self, item: Item, given: Mapping[str, Any]) -> tuple[np.ndarray, float, tuple[int, int]]:
        """Return the times, the rate, and the width and height of a list of pictures. Raises `UserError`."""
        count, file_size = len(item.frames), item.header or self.header(item)
        if "times" in given:
            times = np.array(given["times"], np.float64)
            return times, mean_rate(times) if count > 1 else ASSUMED_RATE, file_size
        if "fps" not in given and self.timestamps:
            raise UserError.at(
                f"{item.where}: field 'video'",
                problem="a list of frames without times",
                because="the model reads at which second each frame is shown",
                fix="add 'fps' (the frames per second of the list) or 'times' (seconds, one for each) to the record",
            )
        rate = float(given.get("fps", ASSUMED_RATE))
        return np.arange(count) / rate, rate, file_size

    def _read(self, item: Item, shot: Shot, numbers: Iterable[int], convert: Convert[T]) -> dict[int, T]:
        if not item.frames:
            return read_frames(item, frame_table(item, self.limits), numbers, self.limits, convert)

        def load(late: Late) -> dict[int, T]:
            frames = {}
            for number in sorted(numbers):
                late()
                picture = load_picture(item.frames[number], item.where)
                if picture.size != shot.file_size:
                    raise UserError.at(
                        f"{item.where}: image {item.frames[number]}",
                        found=f"a frame of {picture.size[0]} x {picture.size[1]} pixels",
                        expected=f"{shot.file_size[0]} x {shot.file_size[1]}, as the first of its video",
                        fix="give the frames of a video one size",
                    )
                frames[number] = convert(picture)
            return frames

        return within(item.content, self.limits.seconds, load)

    @cached_property
    def _values(self) -> np.ndarray:
        """Normalised pixel value for each level from 0 to 255, by channel: float32 [channels, 256]."""
        levels = np.arange(256, dtype=np.float32)
        mean, std = (np.array(each, np.float32)[:, None] for each in (self.mean, self.std))
        return (levels - mean) / std

    def _patches(self, pair: np.ndarray) -> np.ndarray:
        """Cut a pair, uint8 [frames, height, width, channels], into normalised patches in unit order, float32 [patches,
        elements].
        """
        frames, height, width, channels = pair.shape
        rows, columns = height // self.patch // self.merge, width // self.patch // self.merge
        cut = pair.reshape(frames, rows, self.merge, self.patch, columns, self.merge, self.patch, channels)
        # New axes: rows and columns of units, then of patches in units; then channels, frames, pixel rows and columns.
        patches = cut.transpose(1, 4, 2, 5, 7, 0, 3, 6)
        values = self._values[np.arange(channels)[:, None, None, None], patches]
        return values.reshape(rows * columns * self.merge**2, -1)


def _segment(item: Item, times: np.ndarray, given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the frames (first, stop) from `video_start` to `video_end`. Raises `UserError` if there are none."""
    start, end = given.get("video_start", 0.0), given.get("video_end", times[-1])
    first, stop = np.searchsorted(times, [start, end + 1e-9], side="left")
    if first >= stop:
        raise UserError.at(
            f"{item.where}: fields 'video_start' and 'video_end'",
            found=f"{start:g} to {end:g} s",
            expected=f"a segment of the {times[-1]:.2f} s of {item.content}",
            fix="correct the times, which are seconds from the start of the video",
        )
    return int(first), int(stop)


class ProcessorDefaults(NamedTuple):
    """Default settings of a video processor of `transformers`. `fps`: frames per second; None for all frames. `low`,
    `high`: minimum and maximum area. `cap`: maximum tokens with `cap_pixels_per_frame`. `mean`, `std`: mean and
    standard deviation by channel.
    """

    fps: float | None
    low: int
    high: int
    cap: int
    mean: Sequence[float]
    std: Sequence[float]
    min_frames: int = 4
    max_frames: int = 768


@dataclass(frozen=True)
class Videos(ItemType):
    """`ItemType` of videos, with frame pairs as pieces. `bounded`: see `Sampling`; `timestamps`: see `VideoReader`."""

    defaults: ProcessorDefaults
    bounded: Bounded
    timestamps: bool
    modality: Modality = "video"
    tokens = ItemTokens("vision_start_token_id", "video_token_id", "vision_end_token_id")
    processor: str = "a video processor"
    settings: tuple[str, ...] = ("video_processor", "video_preprocessor_config.json", "preprocessor_config.json")

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> VideoReader:
        """Return a reader with the settings of the folder's video processor, or else of its image processor."""
        wanted, vision = getattr(section, "video", None) or VideoConfig(), config.vision_config
        if wanted.marks != "video" and not self.timestamps:
            raise unused("data.video.marks", wanted.marks, "only Qwen3-VL marks pairs of frames", "remove it")
        settings = read_settings(folder, self.settings)
        settings |= {"do_sample_frames": True} if wanted.fps is not None else {}
        require_patches(folder / self.settings[1], settings, vision)
        return VideoReader(
            token_id,
            self._sampling(settings, wanted, vision.patch_size * vision.spatial_merge_size),
            Limits(wanted.timeout_s, wanted.index_folder),
            *self._colours(settings),
            patch=vision.patch_size,
            merge=vision.spatial_merge_size,
            temporal=vision.temporal_patch_size,
            timestamps=self.timestamps,
            rate=float(getattr(vision, "tokens_per_second", 1)),
            text_after=wanted.text_after,
        )

    def chat_entry(self, section: Any, token: str) -> dict[str, str]:
        """Return the chat entry of a video: text if pairs are marked, to which the chat template adds no marks."""
        is_text = (getattr(section, "video", None) or VideoConfig()).marks == "pairs"
        return {"type": "text", "text": token} if is_text else super().chat_entry(section, token)

    def _sampling(self, settings: Mapping[str, Any], wanted: VideoConfig, unit: int) -> Sampling:
        """Return the sampling rules with the user's settings, else the folder's, else the processor's defaults."""
        default, (low, high) = self.defaults, self._areas(settings)
        samples = settings.get("do_sample_frames", default.fps is not None)
        fps = wanted.fps or (settings.get("fps") or default.fps if samples else None)
        frames = (settings.get("min_frames") or default.min_frames, settings.get("max_frames") or default.max_frames)
        if wanted.rules == "authors":
            fps, frames = wanted.fps or AUTHORS.fps, AUTHORS[1:]
        return Sampling(
            rules=wanted.rules,
            bounded=self.bounded,
            fps=fps,
            min_frames=wanted.min_frames or (frames[0] if fps else 1),
            max_frames=wanted.max_frames or (frames[1] if fps else ANY_NUMBER),
            low=low,
            high=high,
            cap=(settings.get("max_video_tokens") or default.cap) if settings.get("cap_pixels_per_frame") else None,
            frame_pixels=wanted.frame_pixels,
            total_pixels=wanted.total_pixels,
            unit=unit,
        )

    def _areas(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        """Return the minimum and maximum area in pixels."""
        size = settings.get("size") or {}
        low = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or self.defaults.low
        high = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or self.defaults.high
        return low, high

    def _colours(self, settings: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of each channel, for pixel values from 0 to 255."""
        mean, std = settings.get("image_mean") or self.defaults.mean, settings.get("image_std") or self.defaults.std
        scale = settings.get("rescale_factor") or 1 / 255
        return tuple(float(x) / scale for x in mean), tuple(float(x) / scale for x in std)

    def exported(self, folder: Path, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the video processor's settings, with the run's settings that `transformers` supports."""
        wanted = section.get("video") or {}
        chosen = {name: wanted[name] for name in AUTHORS._fields if wanted.get(name) is not None}
        if wanted.get("rules") == "authors":
            chosen = AUTHORS._asdict() | chosen | {"cap_pixels_per_frame": True}
        pixels = wanted.get("frame_pixels" if self.bounded == "frame" else "total_pixels")
        # Without a separate file, the limits of pictures would apply to videos.
        if not chosen and pixels is None and not (section.get("min_pixels") or section.get("max_pixels")):
            return {}
        settings = read_settings(folder, self.settings) | chosen
        if chosen and (settings.get("fps") or self.defaults.fps):
            settings["do_sample_frames"] = True
        if pixels is not None:
            low, high = self._areas(settings)
            settings = {key: value for key, value in settings.items() if key not in ("min_pixels", "max_pixels")}
            settings["size"] = {"shortest_edge": low, "longest_edge": max(min(high, pixels), int(low * 1.05))}
        return settings

    def assumed(self, shape: Any, plan: EstimateConfig) -> ImageSize:
        """Return the size of a square frame pair as section `plan` describes, in whole units."""
        return square(plan.frame_side, shape)

    def assumed_pieces(self, plan: EstimateConfig) -> int:
        """Return the number of frame pairs of all videos in a sample."""
        return plan.videos * -(-plan.frames // 2)

    def assumed_items(self, plan: EstimateConfig) -> tuple[str, str]:
        """Return a description of the videos in a sample of section `plan`, and the names of their settings."""
        what = f"{plan.videos} video{'s' * (plan.videos != 1)}, {self.assumed_pieces(plan):,} frame pairs"
        return what, "plan.videos, plan.frames, plan.frame_side"

    def measures(self, shape: Any, size: ImageSize) -> str:
        """Return width and height in pixels as text."""
        return pixels_of(shape, size)
