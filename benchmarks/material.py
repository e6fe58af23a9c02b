"""The model folder and the data set that every system trains on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.material import ModelSize, write_samples

SAMPLES = 4
"""Samples of a step: the global batch."""
PATCH = 14


@dataclass(frozen=True)
class Case:
    """One step's data: `patches` in all, in `images` pictures of equal size, one for each of the first samples."""

    patches: int
    images: int

    @property
    def side(self) -> int:
        """Pixels of a picture's side."""
        side = round((self.patches / self.images) ** 0.5) * PATCH
        assert (side // PATCH) ** 2 * self.images == self.patches, (
            f"{self.patches} patches are no {self.images} squares"
        )
        return side

    def __str__(self) -> str:
        return f"{self.patches // 1024}k patches in {self.images} image{'s' * (self.images > 1)}"


def write_material(folder: Path, size: ModelSize, cases: list[Case]) -> None:
    """`folder/model`, and `folder/data.jsonl` in which case i has the samples from `SAMPLES` x i on."""
    sides = [case.side if k < case.images else 0 for case in cases for k in range(SAMPLES)]
    write_samples(folder, size, sides)
