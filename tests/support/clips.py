"""A second item type for tests: a clip is a file with the names of pictures beside it, each a piece.

The text shows them as a record shows as many pictures, one on a line, so that a model computes the same from either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron_hetero.config.sections import EstimateConfig
from megatron_hetero.models.families.qwen2_5_vl.family import QWEN2_5_VL
from megatron_hetero.models.items.pictures import ImageSize, Pictures
from megatron_hetero.models.items.types import Block, Item, ItemTokens, Modality, Piece

[PICTURES] = QWEN2_5_VL.items
assert isinstance(PICTURES, Pictures)
Sizes = tuple[ImageSize, ...]
_TOKENS = PICTURES.tokens._replace(row="video_token_id")


@dataclass(frozen=True)
class ClipReader:
    """Reads the pictures of clips."""

    pictures: Any

    @property
    def token_id(self) -> int:
        return self.pictures.token_id

    def _items(self, item: Item) -> list[Item]:
        return [Item(item.path.parent / name, item.where) for name in item.path.read_text().split()]

    def size(self, item: Item) -> Sizes:
        return tuple(map(self.pictures.size, self._items(item)))

    def pieces(self, size: Sizes) -> Sizes:
        return size

    def blocks(self, size: Sizes) -> Sequence[Block]:
        found = [block for each in size for block in self.pictures.blocks(each)]
        between = "<|vision_end|>\n<|vision_start|>"
        return [*(Block(block.places, after=between) for block in found[:-1]), *found[-1:]]

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        items = self._items(item)
        return np.concatenate([self.pictures.patches(items[n], [Piece(0, size)]) for n, size in pieces])

    def blank(self) -> ClipReader:
        return ClipReader(self.pictures.blank())

    def describe(self, item: Item, size: Sizes) -> str:
        return f"{len(size)} pictures"


@dataclass(frozen=True)
class Clips:
    """Clips as an item type."""

    modality: Modality = "video"
    tokens: ItemTokens = _TOKENS
    processor: str = "a processor of clips"

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> ClipReader:
        return ClipReader(PICTURES.open(folder, config, section, setting, token_id))

    def inputs(self, patches: np.ndarray, sizes: Sequence[Sizes]) -> dict[str, Any]:
        raise NotImplementedError

    def assumed(self, shape: Any, plan: EstimateConfig) -> Any:
        return PICTURES.assumed(shape, plan)

    def measures(self, shape: Any, size: ImageSize) -> str:
        return PICTURES.measures(shape, size)


@contextmanager
def taken() -> Iterator[None]:
    """The encoder takes pictures and clips."""
    with mock.patch.object(type(QWEN2_5_VL), "items", (PICTURES, Clips())):
        yield


def as_clips(data: Path) -> Path:
    """The records of `data`, with a clip in place of the last two pictures of each that has two."""
    target = data.with_name("clips.jsonl")
    records = []
    for number, line in enumerate(data.read_text().splitlines()):
        record = json.loads(line)
        pictures = record.get("image")
        if isinstance(pictures, list):
            (data.parent / f"images/{number}.clip").write_text("\n".join(pictures[-2:]))
            human = record["conversations"][0]
            human["value"] = human["value"].replace("<image>\n" * 2, "<video>\n", 1)
            if len(pictures) > 2:  # The first two marks were taken: the clip comes last.
                human["value"] = human["value"].replace("<video>\n<image>\n", "<image>\n<video>\n", 1)
            record |= {"image": pictures[:-2], "video": f"{number}.clip"}
        records.append(json.dumps(record) + "\n")
    target.write_text("".join(records))
    return target
