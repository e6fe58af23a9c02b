"""The model folder and the data set that every system trains on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.material import ANSWER, ModelSize, write_samples

SAMPLES = 4
"""Samples of a step: the global batch."""


@dataclass(frozen=True)
class Case:
    """One step's data: `patches` in all, in `images` pictures of equal size, one for each of the first samples. Answers
    have so many `words`, that of the last sample `long` if it is given.
    """

    patches: int
    images: int
    words: int = ANSWER
    long: int = 0

    @property
    def side(self) -> int:
        """Patches of a picture's side."""
        side = round((self.patches / self.images) ** 0.5)
        assert side**2 * self.images == self.patches, f"{self.patches} patches are no {self.images} squares"
        return side

    def __str__(self) -> str:
        pictures = f"{self.patches // 1024}k patches in {self.images} image{'s' * (self.images > 1)}"
        words = "" if self.words == ANSWER else f", {self.words} words each"
        return pictures + words + f", one text of {self.long} words" * bool(self.long)

    @property
    def answers(self) -> list[int]:
        """Words of the answer of each sample."""
        return [*[self.words] * (SAMPLES - 1), self.long or self.words]


def write_material(folder: Path, size: ModelSize, cases: list[Case]) -> None:
    """`folder/model`, and `folder/data.jsonl` in which case i has the samples from `SAMPLES` x i on."""
    sides = [case.side * size.patch if k < case.images else 0 for case in cases for k in range(SAMPLES)]
    write_samples(folder, size, sides, [words for case in cases for words in case.answers])
