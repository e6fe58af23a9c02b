"""An encoder that takes two types of items, in one call, in one sample and in one step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.dealing import PackMetadata
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Annotations
from megatron_hetero.data.validation import item_fields
from tests.support import clips
from tests.support import runs as jobs
from tests.support.folders import write_data
from tests.support.pool import Pool
from tests.support.runs import MakeFlags

Pools = Callable[[int], Pool]
COUNTS = (3, 2, 0, 1)
"""Pictures of each sample: a picture and a clip, a clip, text alone, a picture."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same samples with pictures, and with clips of two of them."""
    plain = write_data(tmp_path_factory.mktemp("clips"), 8, pictures=COUNTS)
    return plain, clips.as_clips(plain)


def step_with_clips(flags: list[str]) -> dict[str, Any]:
    """A step of an encoder that takes clips too."""
    with clips.taken():
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
    with clips.taken():
        processor = Processor.from_folder(small_model)
        names = [field.name for field in processor.fields]
        plain, mixed = (Annotations("d", path, path.parent / "images", processor.fields) for path in data)
        assert names == ["image", "video"]
        for one, other in zip(plain, mixed, strict=True):
            pictures, pieces = processor.tokenize(one), processor.tokenize(other)
            rows = np.isin(pieces.input_ids, processor.row_tokens)
            np.testing.assert_array_equal(pictures.input_ids[~rows], pieces.input_ids[~rows])
            np.testing.assert_array_equal(pictures.position_ids, pieces.position_ids)
            told, expected = (PackMetadata.of_sample(0, sample, ["vision"]) for sample in (pieces, pictures))
            assert told.shape.pieces == expected.shape.pieces
            assert len(told.sources[0]) == len(expected.sources[0]) == len(one.items)
            if len(told.sources[0]) == 3:
                assert told.sources == (((0, 0, 0), (0, 1, 0), (0, 1, 1)),)


def test_without_such_a_type_its_records_are_refused(data: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="field 'video': a video or <video>, but the model does not support videos"):
        Annotations("d", data[1], data[1].parent / "images")


def test_fields_of_several_encoders_and_types() -> None:
    fields = item_fields({"vision": ("image", "video"), "aerial": ("image", "video"), "sound": ("audio",)})
    assert [field.name for field in fields] == ["image", "video", "aerial", "aerial_video", "sound"]
    assert [field.key for field in fields] == ["vision", "vision:video", "aerial", "aerial:video", "sound"]
