"""Packing: nothing crosses samples, nothing is lost or added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.device import PADDING_TOKEN, text_input
from megatron_hetero.data.packing import IGNORED, PackMetadata, SampleLimits, TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.data.token_shards import TokenShards
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.items.pictures import ImageSize, rope_positions
from megatron_hetero.models.items.types import RowBlock
from megatron_hetero.models.stages import TextInput
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


def packed(parts: list[TokenizedSample]) -> TextInput:
    """The input of the only rank of the text module, samples being numbered from 10."""
    shards = TokenShards(Layout.parse("dp:1", 1), False, (tuple(map(len, parts)),), {})
    return text_input({10 + i: part for i, part in enumerate(parts)}, shards.shard(0), {})


def labels_of(batch: TextInput) -> np.ndarray:
    labels = np.full(batch.positions.shape[1], IGNORED)
    labels[batch.supervised.numpy()] = batch.targets.numpy()
    return labels


@given(st.lists(samples(), min_size=1, max_size=4))
def test_packs_hold_every_sample_unchanged(parts: list[TokenizedSample]) -> None:
    batch, start = packed(parts), 0
    assert len(batch.tokens) == sum(map(len, parts)) and batch.positions.shape == (3, len(batch.tokens))
    assert len(batch.targets) == sum(int(part.supervised.sum()) for part in parts)
    assert batch.attention.lengths == tuple(map(len, parts))
    for number, part in enumerate(parts):
        stretch = slice(start, start := start + len(part))
        np.testing.assert_array_equal(batch.tokens[stretch], part.input_ids)
        np.testing.assert_array_equal(batch.positions[:, stretch], part.position_ids)
        expected = [*np.where(part.supervised, part.input_ids, -100)[1:], -100]
        assert labels_of(batch)[stretch].tolist() == part.labels.tolist() == expected
        assert (batch.samples[stretch] == 10 + number).all()
    for tensor in (batch.tokens, batch.positions, batch.supervised, batch.targets):
        assert tensor.dtype == torch.int64


def test_packs_of_real_samples(processor: Processor, make_record: MakeRecord, pictures: Path) -> None:
    with_image = make_record("<image>What?", "A disc.", images=["200x140.png"], folder=pictures)
    text_only = make_record("Hello?", "Hello.", "Sure?", "Yes.")
    parts = [processor.tokenize(record) for record in (with_image, text_only)]
    targets = packed(parts).targets
    assert processor.tokenizer.decode(targets) == "A disc.<|im_end|>Hello.<|im_end|>Yes.<|im_end|>"
    assert (targets != processor.readers[PICTURES].token_id).all()


def test_an_empty_answer_is_its_end(processor: Processor, make_record: MakeRecord) -> None:
    sample = processor.tokenize(make_record("Hello?", ""))
    assert len(packed([sample]).targets) == PackMetadata.of_sample(0, sample, []).supervised == 1


def test_a_pack_may_be_empty() -> None:
    """Megatron's layers take one token at least, of padding."""
    batch = packed([])
    assert batch.tokens.tolist() == [PADDING_TOKEN] and batch.positions.shape == (3, 0)
    assert len(batch.supervised) == len(batch.targets) == len(batch.samples) == 0
    for tensor in (batch.tokens, batch.positions, batch.supervised, batch.targets):
        assert tensor.dtype == torch.int64
    assert PackMetadata.joined([], 2) == PackMetadata((), ((), ()), (b"", b""))


def test_too_long_is_an_error_or_skipped(processor: Processor, make_record: MakeRecord) -> None:
    sample = processor.tokenize(make_record("Hello?", "Hello."))
    for too_long in ("error", "skip"):
        assert SampleLimits(len(sample), None, too_long).admits(sample, {})
    assert not SampleLimits(len(sample) - 1, None, "skip").admits(sample, {})
    with pytest.raises(
        UserError, match=r"train\.jsonl:1: found a sample of \d+ tokens.*data\.max_seq_length = 3.*skip"
    ):
        SampleLimits(3).admits(sample, {})
