"""An encoder that takes two types of items, in one call, in one sample and in one step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.sections import EstimateConfig
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.validation import item_fields
from megatron_hetero.models.families.qwen2_5_vl.family import QWEN2_5_VL
from megatron_hetero.models.items.pictures import ImageSize, Pictures
from megatron_hetero.models.items.types import Header, Item, ItemTokens, ItemType, Modality, Piece, RowBlock
from tests.support import runs as jobs
from tests.support.folders import write_data
from tests.support.items import annotated, item_of
from tests.support.pool import Pools
from tests.support.runs import MakeFlags

PICTURES = QWEN2_5_VL.items[0]
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
        path = Path(str(item.content))
        return [item_of(path.parent / name, item.where) for name in path.read_text().split()]

    def header(self, item: Item) -> Header:
        return 0, 0

    def size(self, item: Item) -> Sizes:
        return tuple(map(self.pictures.size, self._items(item)))

    def pieces(self, size: Sizes) -> Sizes:
        return size

    def blocks(self, size: Sizes) -> Sequence[RowBlock]:
        found = [block for each in size for block in self.pictures.blocks(each)]
        between = "<|vision_end|>\n<|vision_start|>"
        return [*(RowBlock(block.places, after=between) for block in found[:-1]), *found[-1:]]

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        items = self._items(item)
        return np.concatenate([self.pictures.patches(items[n], [Piece(0, size)]) for n, size in pieces])

    def describe(self, item: Item, size: Sizes) -> str:
        return f"{len(size)} pictures"


@dataclass(frozen=True)
class Clips(ItemType):
    """Clips as an item type."""

    modality: Modality = "video"
    tokens: ItemTokens = _TOKENS
    processor: str = "a processor of clips"

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> ClipReader:
        return ClipReader(PICTURES.open(folder, config, section, setting, token_id))

    def assumed(self, shape: Any, plan: EstimateConfig) -> Any:
        return PICTURES.assumed(shape, plan)

    def measures(self, shape: Any, size: ImageSize) -> str:
        return PICTURES.measures(shape, size)


@contextmanager
def taken() -> Iterator[None]:
    """The encoder takes pictures and clips."""
    with mock.patch.object(type(QWEN2_5_VL), "encoders", {"vision": (PICTURES, Clips())}):
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


COUNTS = (3, 2, 0, 1)
"""Pictures of each sample: a picture and a clip, a clip, text alone, a picture."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same samples with pictures, and with clips of two of them."""
    plain = write_data(tmp_path_factory.mktemp("clips"), 8, pictures=COUNTS)
    return plain, as_clips(plain)


def step_with_clips(flags: list[str]) -> dict[str, Any]:
    """A step of an encoder that takes clips too."""
    with taken():
        return jobs.step(flags)


@pytest.mark.parametrize(
    "vision, text, more",
    [
        ("dp:2", "dp:2", ""),
        ("sp:2", "tp:2", "--train.micro_batch_size 2"),
        ("cp:2", "cp:2", "--train.micro_batch_size 2"),
        ("dp:2", "tp:2", "--train.micro_batch_size 1 --schedule.waves 2"),
        ("dp:1@0", "dp:1@1", ""),
    ],
)
def test_a_step_is_that_of_the_same_pictures(
    vision: str, text: str, more: str, data: tuple[Path, Path], make_flags: MakeFlags, pools: Pools
) -> None:
    """All bits: pieces of clips are dealt, decoded and encoded as pictures are."""
    plain, mixed = (make_flags(vision, text, more, data=path) for path in data)
    with_pictures, with_clips = pools(2).run(jobs.step, plain), pools(2).run(step_with_clips, mixed)
    for expected, found in zip(with_pictures, with_clips, strict=True):
        assert found["loss"] == expected["loss"] and found["norm"] == expected["norm"]
        for name, value in expected["after"].items():
            np.testing.assert_array_equal(found["after"][name], value)


def test_tokens_positions_and_metadata_are_those_of_the_pieces(data: tuple[Path, Path], small_model: Path) -> None:
    with taken():
        processor = Processor.from_folder(small_model)
        names = [field.name for field in processor.fields]
        plain, mixed = (annotated("d", path, path.parent / "images", processor.fields) for path in data)
        assert names == ["image", "video"]
        for one, other in zip(plain, mixed, strict=True):
            pictures, pieces = processor.tokenize(one), processor.tokenize(other)
            rows = np.isin(pieces.input_ids, processor.row_tokens)
            np.testing.assert_array_equal(pictures.input_ids[~rows], pieces.input_ids[~rows])
            np.testing.assert_array_equal(pictures.position_ids, pieces.position_ids)
            told, expected = (PackMetadata.of_sample(0, sample, ["vision"]) for sample in (pieces, pictures))
            assert told == expected
            assert len(told.sources[0]) == len(expected.sources[0]) == len(one.items)
            if len(told.sources[0]) == 3:
                assert told.sources[0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_without_such_a_type_its_records_are_refused(data: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="field 'video': .*does not support videos"):
        annotated("d", data[1], data[1].parent / "images")


def test_fields_of_several_encoders_and_types() -> None:
    fields = item_fields({"vision": ("image", "video")}, {"aerial": ("image", "video"), "sound": ("audio",)})
    assert [field.name for field in fields] == ["image", "video", "aerial", "aerial_video", "sound"]
    assert [field.key for field in fields] == ["vision", "vision:video", "aerial", "aerial:video", "sound"]
