"""Packing: nothing crosses samples, nothing is lost or added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.packing import PackedBatch, SampleLimits, TokenizedSample, pack
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.models.items.pictures import ImageSize, rope_positions
from megatron_hetero.models.items.types import RowBlock
from tests.support.items import IMAGE as PICTURES
from tests.support.items import pictures

MakeRecord = Callable[..., Record]
IMAGE = 7


@st.composite
def samples(draw: st.DrawFn) -> TokenizedSample:
    """A sample with random text, supervision and up to two images."""
    ids, starts, sizes, places = [draw(st.integers(10, 20))], [], [], []
    for height, width in draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=2)):
        starts.append(len(ids))
        sizes.append(ImageSize(1, 2 * height, 2 * width))
        places.append(np.indices((1, height, width)).reshape(3, -1))
        ids += [IMAGE] * (height * width)
        ids += draw(st.lists(st.integers(10, 20), min_size=1, max_size=4))
    input_ids = np.array(ids, dtype=np.int64)
    is_text = input_ids != IMAGE
    supervised = np.array(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))) & is_text
    supervised[0] = False
    positions = rope_positions(len(ids), np.array(starts, dtype=np.int64), [RowBlock(each) for each in places])
    record = Record("test", 0, "train.jsonl:1", (), pictures(*["a.png"] * len(sizes)))
    rows = np.array([of_image.shape[1] for of_image in places], np.int64)
    pieces = tuple((size,) for size in sizes)
    at = np.flatnonzero(~is_text)
    return TokenizedSample(input_ids, supervised, tuple(sizes), pieces, positions, at, rows, record)


def stretches(batch: PackedBatch) -> list[slice]:
    return [slice(a, b) for a, b in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)]


@given(st.lists(samples(), min_size=1, max_size=4))
def test_packs_hold_every_sample_unchanged(parts: list[TokenizedSample]) -> None:
    batch = pack(parts)
    size = len(batch.input_ids)
    assert size == sum(map(len, parts)) == batch.cu_seqlens[-1] and batch.cu_seqlens[0] == 0
    assert batch.position_ids.shape == (3, size) and batch.labels.shape == (size,)
    assert batch.supervised_tokens == sum(int(part.supervised.sum()) for part in parts)
    for stretch, part in zip(stretches(batch), parts, strict=True):
        np.testing.assert_array_equal(batch.input_ids[stretch], part.input_ids)
        np.testing.assert_array_equal(batch.position_ids[:, stretch], part.position_ids)
        expected = [*np.where(part.supervised, part.input_ids, -100)[1:], -100]
        assert batch.labels[stretch].tolist() == expected
    for array in (batch.input_ids, batch.labels, batch.position_ids, batch.cu_seqlens):
        assert array.dtype == np.int64


def test_packs_of_real_samples(processor: Processor, make_record: MakeRecord, pictures: Path) -> None:
    with_image = make_record("<image>What?", "A disc.", images=["200x140.png"], folder=pictures)
    text_only = make_record("Hello?", "Hello.", "Sure?", "Yes.")
    parts = [processor.tokenize(record) for record in (with_image, text_only)]
    batch = pack(parts)
    trained = processor.tokenizer.decode(batch.labels[batch.labels >= 0])
    assert trained == "A disc.<|im_end|>Hello.<|im_end|>Yes.<|im_end|>"
    assert (batch.labels != processor.readers[PICTURES].token_id).all()


def test_a_pack_without_images_has_empty_arrays(processor: Processor, make_record: MakeRecord) -> None:
    batch = pack([processor.tokenize(make_record("Hello?", ""))])
    assert batch.supervised_tokens == 1


def test_a_pack_may_be_empty() -> None:
    batch = pack([])
    assert batch.input_ids.shape == batch.labels.shape == (0,) and batch.position_ids.shape == (3, 0)
    assert batch.cu_seqlens.tolist() == [0] and batch.supervised_tokens == 0
    for array in (batch.input_ids, batch.labels, batch.position_ids, batch.cu_seqlens):
        assert array.dtype == np.int64


def test_too_long_is_an_error_or_skipped(processor: Processor, make_record: MakeRecord) -> None:
    sample = processor.tokenize(make_record("Hello?", "Hello."))
    for too_long in ("error", "skip"):
        assert SampleLimits(len(sample), None, too_long).admits(sample, {})
    assert not SampleLimits(len(sample) - 1, None, "skip").admits(sample, {})
    with pytest.raises(
        UserError, match=r"train\.jsonl:1: found a sample of \d+ tokens.*data\.max_seq_length = 3.*skip"
    ):
        SampleLimits(3).admits(sample, {})
