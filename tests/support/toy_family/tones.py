"""A type of items: tones, `.npy` files of samples in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_hetero.base.errors import UserError, reason
from megatron_hetero.models.items.types import Header, Item, ItemTokens, ItemType, Modality, Piece, RowBlock


class Tone(NamedTuple):
    """The size of a tone, in patches."""

    patches: int


@dataclass(frozen=True)
class ToneReader:
    """Reads tones in patches of `samples`, in whole units."""

    token_id: int
    samples: int
    unit: int

    def _read(self, item: Item) -> np.ndarray:
        try:
            found = np.load(str(item.content), mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({reason(error) if isinstance(error, OSError) else error})"
            raise UserError.at(f"{item.where}: {item.content}", problem=problem, fix="correct the record") from error
        if found.ndim != 1 or found.dtype != np.float32 or not 0 < len(found) < 2**20:
            shape = f"{found.dtype} {found.shape}"
            raise UserError.at(item.content, found=shape, expected="float32 samples in a row", fix="convert the file")
        return found

    def header(self, item: Item) -> Header:
        return len(self._read(item)), 0

    def size(self, item: Item) -> Tone:
        samples, _ = item.header or self.header(item)
        return Tone(-(-samples // (self.samples * self.unit)) * self.unit)

    def pieces(self, size: Tone) -> tuple[Tone, ...]:
        return (size,)

    def blocks(self, size: Tone) -> Sequence[RowBlock]:
        rows = size.patches // self.unit
        return (RowBlock(np.stack([np.arange(rows), *np.zeros((2, rows), np.int64)])),)

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        [(_, size)] = pieces
        assert isinstance(size, Tone), "a tone has the size of a tone"
        found = np.zeros(size.patches * self.samples, np.float32)
        samples = self._read(item)
        found[: len(samples)] = samples
        return found.reshape(size.patches, self.samples)

    def describe(self, item: Item, size: Tone) -> str:
        return f"{len(self._read(item))} samples in {size.patches} patches"


_TOKENS = ItemTokens("tone_start_id", "tone_id", "tone_end_id")


@dataclass(frozen=True)
class Tones(ItemType):
    """Tones as an item type."""

    modality: Modality = "audio"
    tokens: ItemTokens = _TOKENS
    processor: str = "the settings of tones"

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> ToneReader:
        ear = config.vision_config
        return ToneReader(token_id, ear.samples, ear.merged)

    def assumed(self, shape: Any, plan: Any) -> Tone:
        return Tone(max(1, plan.image_side // 64) * shape.unit)

    def measures(self, shape: Any, size: Tone) -> str:
        return f"{size.patches * shape.samples:,} samples"
