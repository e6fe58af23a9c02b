"""Video files and records with them, and what plain `transformers` makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.support.folders import WORDS, write_data
from tests.support.oracle import Oracle
from tests.support.video_processors import module_of, video_processor

FPS = 2.0
FLAGS = ("--data.video.fps", f"{FPS}", "--data.video.min_frames", "2")
"""How the oracle samples."""
SIDES = ((56, 56), (84, 56), (64, 96), (61, 90))


def noise(count: int, size: tuple[int, int], seed: int) -> list[np.ndarray]:
    """Frames of coarse noise, uint8 [height, width, 3]."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return [np.asarray(Image.fromarray(each).resize(size)) for each in coarse]


def write_video(
    path: Path,
    frames: Sequence[np.ndarray],
    *,
    rate: Fraction | int = 4,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    times: Sequence[float] | None = None,
    rotation: int = 0,
    keys_every: int = 12,
    container: dict[str, str] | None = None,
) -> Path:
    """A video file of these frames, at `rate` per second or at `times` in seconds; its format follows from its name."""
    height, width = frames[0].shape[:2]
    with av.open(str(path), "w", options=container or {}) as file:
        stream: Any = file.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, pixels
        stream.codec_context.gop_size = keys_every
        stream.codec_context.thread_count = 1
        if codec == "libx265":
            stream.options = {"x265-params": "log-level=none"}
        if rotation:
            stream.set_display_rotation(rotation)
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for k, pixels_of in enumerate(frames):
            padded = np.pad(pixels_of, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            frame = av.VideoFrame.from_ndarray(padded, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = round(times[k] * 1000), Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def write_video_data(
    folder: Path,
    samples: int,
    seed: int = 0,
    pictures: tuple[int, ...] = (1, 0, 2, 0),
    videos: tuple[int, ...] = (1, 2, 0, 0, 1),
) -> Path:
    """As `write_data`, and sample i has `videos[i % len]` videos of 3 to 14 frames too, of several formats, shown
    before, between and after pictures. A third of them are lists of frames.
    """
    path, rng = write_data(folder, samples, seed, pictures, turns=2), random.Random(seed + 1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for i, record in enumerate(records):
        shown = [_video(folder / "images", f"{i}_{k}", rng) for k in range(videos[i % len(videos)])]
        if not shown:
            continue
        human = record["conversations"][0]
        marks, text = human["value"].count("<image>\n"), human["value"].replace("<image>\n", "")
        order = ["<image>\n"] * marks + ["<video>\n"] * len(shown)
        rng.shuffle(order)
        human["value"] = "".join(order) + text + rng.choice(WORDS)
        lists = any(isinstance(each, list) for each in shown)
        record["video"] = shown[0] if len(shown) == 1 else shown
        if lists:
            record["fps"] = FPS
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _video(folder: Path, name: str, rng: random.Random) -> str | list[str]:
    frames = noise(rng.randint(3, 14), rng.choice(SIDES), rng.randrange(1 << 30))
    if rng.random() < 1 / 3:
        files = [f"{name}_{k}.png" for k in range(len(frames[:5]))]
        for file, frame in zip(files, frames, strict=False):
            Image.fromarray(frame).save(folder / file)
        return files
    suffix, codec = rng.choice([("mp4", "libx264"), ("webm", "libvpx-vp9"), ("mkv", "libx264")])
    write_video(folder / f"{name}.{suffix}", frames, codec=codec, rate=4)
    return f"{name}.{suffix}"


@dataclass
class VideoOracle(Oracle):
    """The oracle for records with videos: `transformers`' samplers, sizes, patches and positions. The text after a
    video of Qwen2.5-VL goes on after the largest position, as in its pretraining.
    """

    overlapping: bool = False
    pairs_only: bool = False
    """Go on where releases from 5.3 on do instead."""

    @classmethod
    def load(cls, model: Path, data: Path) -> VideoOracle:
        """Load everything in fp32."""
        return cls(**vars(Oracle.load(model, data)))

    @property
    def family(self) -> str:
        """The family whose processor of videos it has."""
        return "qwen2_5_vl" if self.model.config.model_type == "qwen2_5_vl" else "qwen3_vl"

    def inputs_of(self, record: dict) -> tuple[Tensor, dict[str, Any]]:
        """Tokens, and what the model gets beside them."""
        inputs: dict[str, Any] = dict(self._images(record, "image", self.images))
        videos = [self._video(each, record.get("fps")) for each in _videos(record)]
        text = self._render(record)
        for patches, grid, times in videos:
            text = text.replace("<|video_pad|>", self._shown(grid, times), 1)
            inputs.setdefault("pixel_values_videos", []).append(patches)
            inputs.setdefault("video_grid_thw", []).append(grid)
        text = text.replace("<|placed|>", "<|video_pad|>")
        if videos:
            inputs["pixel_values_videos"] = torch.cat(inputs["pixel_values_videos"])
            inputs["video_grid_thw"] = torch.tensor(inputs["video_grid_thw"])
        ids = self._tokens(text, {"<|image_pad|>": inputs.get("image_grid_thw", [])})
        config = self.model.config
        types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        grids = {name: inputs[name] for name in ("image_grid_thw", "video_grid_thw") if name in inputs}
        if self.family == "qwen2_5_vl" and videos:
            # 2 over the sampled frames per second.
            steps = torch.tensor([2.0 / rate for _, _, (_, rate) in videos])
            if self.overlapping:
                grids["second_per_grid_ts"] = steps
                positions, _ = self.model.model.get_rope_index(ids[None], types[None], **grids)
            else:
                positions = self._after_the_largest(types.tolist(), grids, steps)
        else:
            positions, _ = self.model.model.get_rope_index(ids[None], types[None], **grids)
        return ids, inputs | {"mm_token_type_ids": types[None], "position_ids": positions}

    def _logits(self, record: dict) -> tuple[Tensor, Tensor]:
        ids, inputs = self.inputs_of(record)
        output = self.model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **inputs)
        return ids, output.logits[0]

    def _render(self, record: dict) -> str:
        messages = [turn | {"value": turn["value"].replace("<video>", "\0")} for turn in record["conversations"]]
        text = super()._render(record | {"conversations": messages})
        return text.replace("\0", "<|video_pad|>" if self.pairs_only else "<|vision_start|><|video_pad|><|vision_end|>")

    def _shown(self, grid: list[int], times: tuple[list[float], float]) -> str:
        pads = "<|placed|>" * (grid[1] * grid[2] // 4)
        if self.family == "qwen2_5_vl":
            return pads * grid[0]
        seconds = times[0]
        pairs = [(seconds[k] + seconds[k + 1]) / 2 for k in range(0, len(seconds), 2)]
        return "".join(f"<{each:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for each in pairs)

    def _video(self, video: str | list[str], fps: float | None) -> tuple[Tensor, list[int], tuple[list[float], float]]:
        """Patches, grid, and times of the frames with the sampled frames per second."""
        if isinstance(video, list):
            frames, rate = [Image.open(self.folder / name).convert("RGB") for name in video], fps or 24.0
        else:
            with av.open(str(self.folder / video)) as file:
                frames = [frame.to_image() for frame in file.decode(video=0)]
                rate = float(file.streams.video[0].average_rate or 0)
        processor = video_processor(self.family)
        metadata = type("Metadata", (), {"total_num_frames": len(frames), "fps": rate})()
        more = {"min_frames": 2, "max_frames": 768} if self.family == "qwen2_5_vl" else {}
        processor.min_frames = 2
        numbers = [int(n) for n in processor.sample_frames(metadata, fps=FPS, **more)]
        count = len(numbers)
        chosen = [frames[n] for n in numbers + numbers[-1:] * (count % 2)]
        seconds = [n / rate for n in numbers + numbers[-1:] * (count % 2)]
        width, height = chosen[0].size
        resize = module_of(self.family).smart_resize
        settings = json.loads((Path(self.model.config._name_or_path) / self._settings).read_text())
        low, high = (settings["size"][name] for name in ("shortest_edge", "longest_edge"))
        patch = settings["patch_size"]
        given = {"num_frames": count} if self.family == "qwen3_vl" else {}
        height, width = resize(height=height, width=width, factor=2 * patch, min_pixels=low, max_pixels=high, **given)
        pixels = np.stack([np.asarray(each.resize((width, height), Image.Resampling.BICUBIC)) for each in chosen])
        scaled = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(settings[name])[:, None, None] for name in ("image_mean", "image_std"))
        patches, *grid = processor.patchify(((scaled - mean) / std)[None], patch, 2, 2)
        return patches[0], list(grid), (seconds, count / len(frames) * rate)

    @property
    def _settings(self) -> str:
        return "preprocessor_config.json" if self.family == "qwen2_5_vl" else "video_preprocessor_config.json"

    def _after_the_largest(self, types: list[int], grids: dict[str, Tensor], steps: Tensor) -> Tensor:
        """Positions of Qwen2.5-VL as its authors train it, int64 [3, 1, tokens]."""
        per_second = self.model.config.vision_config.tokens_per_second
        coming = {1: iter(grids.get("image_grid_thw", ())), 2: iter(grids.get("video_grid_thw", ()))}
        at, position, parts, waiting = 0, 0, [], iter(steps)
        while at < len(types):
            kind = types[at]
            if kind == 0:
                parts.append(torch.full((3, 1), position))
                at, position = at + 1, position + 1
                continue
            t, h, w = (int(x) for x in next(coming[kind]))
            seconds = float(next(waiting)) if kind == 2 else 0.0
            times = torch.tensor([int(np.float32(k) * np.float32(per_second * np.float32(seconds))) for k in range(t)])
            mesh = torch.meshgrid(times, torch.arange(h // 2), torch.arange(w // 2), indexing="ij")
            block = torch.stack(mesh).reshape(3, -1) + position
            parts.append(block)
            at, position = at + block.shape[1], int(block.max()) + 1
        return torch.cat(parts, dim=1)[:, None]


def _videos(record: dict) -> list[str | list[str]]:
    given = record.get("video")
    if given is None:
        return []
    if isinstance(given, str):
        return [given]
    if all(isinstance(each, str) and each.endswith(".png") for each in given):
        return [given]
    return given
