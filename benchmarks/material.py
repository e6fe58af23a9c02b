"""The model folder and the data set that every system trains on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.measuring.material import ANSWER, ModelSize, write_samples

SAMPLES = 4
"""Samples of a step: the global batch."""

Picture = tuple[int, int] | None
"""Width and height in pixels; None: the sample is text."""

LLAVA: dict[str, tuple[int, dict[Picture, int]]] = {
    "COCO": (364_100, {(640, 480): 50, (640, 427): 25, (480, 640): 25}),
    "Visual Genome, GQA": (158_557, {(500, 375): 60, (333, 500): 30, (800, 600): 10}),
    "OCR-VQA": (80_000, {(333, 500): 100}),
    "TextCaps": (21_953, {(1024, 768): 50, (1024, 683): 30, (768, 1024): 20}),
    "ShareGPT": (40_688, {None: 100}),
}
"""Samples of each source in `llava_v1_5_mix665k.json`, as counted in issues 657 and 702 of haotian-liu/LLaVA on GitHub,
and the usual sizes of its pictures with their shares in percent. These sizes and shares are our approximation: pictures
of COCO have a long side of 640 pixels, those of Visual Genome are 500 wide on average, those of TextCaps are from Open
Images, and OCR-VQA has covers of books. Over many steps of four samples the largest picture has 1.44 times the mean of
its step.
"""


@dataclass(frozen=True)
class Case:
    """Data of a measurement: `pictures` of the samples of each step, and the words of each sample's answer, which are
    the same in all steps.
    """

    name: str
    pictures: tuple[tuple[Picture, ...], ...]
    answers: tuple[int, ...]
    is_drawn: bool = False

    @classmethod
    def even(cls, patches: int, images: int, patch: int, words: int = ANSWER, long: int = 0) -> Case:
        """One step of `patches` in all, `patch` pixels wide, in square pictures of the first `images` samples. Answers
        have `words` words, the last sample's `long` if it is given.
        """
        side = round((patches / images) ** 0.5)
        assert side**2 * images == patches, f"{patches} patches are not {images} equal squares"
        name = f"{patches // 1024}k patches in {f'{images} equal images' if images > 1 else '1 image'}"
        name += "" if words == ANSWER else f", {words} words each"
        name += f", one text of {long} words" * bool(long)
        squares = [(side * patch, side * patch)] * images + [None] * (SAMPLES - images)
        return cls(name, (tuple(squares),), (*[words] * (SAMPLES - 1), long or words))

    @classmethod
    def llava(cls, steps: int, seed: int, words: int = ANSWER) -> Case:
        """Steps with pictures of sizes drawn from `LLAVA`."""
        weights = {
            (source, size): samples * share / 100
            for source, (samples, shares) in LLAVA.items()
            for size, share in shares.items()
        }
        drawn = random.Random(seed).choices(list(weights), list(weights.values()), k=steps * SAMPLES)
        sizes = [size for _, size in drawn]
        pictures = tuple(tuple(sizes[i : i + SAMPLES]) for i in range(0, len(sizes), SAMPLES))
        return cls(f"sizes as in LLaVA-1.5, {steps} steps", pictures, (words,) * SAMPLES, is_drawn=True)

    @property
    def description(self) -> str:
        """The sizes of all pictures, step by step."""
        texts = ["text" if size is None else f"{size[0]}×{size[1]}" for step in self.pictures for size in step]
        steps = [", ".join(texts[i : i + SAMPLES]) for i in range(0, len(texts), SAMPLES)]
        pixels = [[0 if size is None else size[0] * size[1] for size in step] for step in self.pictures]
        uneven = sum(map(max, pixels)) * SAMPLES / sum(map(sum, pixels))
        return (
            f"Pictures with {self.name}, in pixels: {'; '.join(steps)}. The largest one of a step has {uneven:.2f} "
            "times the mean of its step."
        )

    @property
    def steps(self) -> int:
        """Global batches that are trained on one after the other."""
        return len(self.pictures)


def write_material(folder: Path, size: ModelSize, cases: Sequence[Case]) -> None:
    """`folder/model`, and `folder/data.jsonl` with the samples of all steps of all cases, in this order."""
    pictures = [picture for case in cases for step in case.pictures for picture in step]
    answers = [words for case in cases for _ in case.pictures for words in case.answers]
    write_samples(folder, size, pictures, answers)


def count_parameters(folder: Path) -> int:
    """The parameters of `folder/model`."""
    tensors = load_file(folder / "model" / "model.safetensors")
    return sum(tensor.numel() for tensor in tensors.values())
