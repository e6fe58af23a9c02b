"""Dealing the samples of a step by a token budget: the same on all ranks and in all runs, and nothing but the dealing
changes.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.dealing import ByBudget
from megatron_hetero.data.loader import StepBatch
from megatron_hetero.data.packing import PackMetadata, TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.job.job import Budget
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.items.pictures import ImageSize
from tests.support.folders import write_data
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.support.runs import MakeFlags, build, error_of
from tests.unit.data.packs import SHAPE, by_rank

BUDGET = "--train.tokens_per_micro_batch 200 --data.max_seq_length 200"
ENCODERS = {"vision": SHAPE}


def sample(text: int, units: int) -> PackMetadata:
    """A sample of so many tokens of text after the rows of a picture, if it has any."""
    sizes = (ImageSize(1, 2, 2 * units),) if units else ()
    return PackMetadata((units + text,), (sizes,), (np.arange(units).tobytes(),), text // 2)


samples = st.lists(st.builds(sample, st.integers(1, 30), st.integers(0, 20)), max_size=24)


@settings(max_examples=40)
@given(samples, st.integers(1, 4), st.sampled_from([None, 80, 200]), st.randoms())
def test_a_deal_is_of_the_samples_alone(
    drawn: list[PackMetadata], replicas: int, patches: int | None, random: Random
) -> None:
    """All samples once, as many packs on each replica, none over the budget, whatever the order in which they come."""
    dealing = ByBudget(replicas, 32, Budget(50, patches), ENCODERS, float)
    found = {7 + number: each for number, each in enumerate(drawn)}
    deal = dealing.deal(1, found)
    packs = [numbers for of_round in deal for numbers in of_round]
    assert len(deal) >= 1 and {len(of_round) for of_round in deal} == {replicas}
    assert sorted(number for numbers in packs for number in numbers) == sorted(found)
    for numbers in packs:
        assert sum(found[number].tokens for number in numbers) <= 50
        assert patches is None or sum(found[number].patches(ENCODERS)[0] for number in numbers) <= patches
    shuffled = list(found)
    random.shuffle(shuffled)
    assert dealing.deal(1, {number: found[number] for number in shuffled}) == deal


@pytest.mark.parametrize("samples", [1, 5, 8, 17])
def test_a_stream_with_an_end_is_read_once(samples: int) -> None:
    dealing = ByBudget(2, 8, Budget(50), ENCODERS, float).once(samples)
    assert [n for step in range(1, 5) for n in dealing.step(step)] == list(range(samples))


def uneven_data(folder: Path, words: int, pictures: tuple[int, ...] = (1, 2, 0, 1)) -> Path:
    """Eight samples, the first four with so many words more."""
    data = write_data(folder, 8, pictures=pictures)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for record in records[:4]:
        record["conversations"][0]["value"] += " word" * words
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    return data


@dataclass(frozen=True)
class Case:
    """Command lines of the same run: with micro-batches by a token budget, and of single samples."""

    ranks: int
    by_budget: list[str]
    alone: list[str]


@pytest.fixture
def case(request: pytest.FixtureRequest, make_flags: MakeFlags, tmp_path: Path) -> Case:
    """The case of layouts of vision and text on so many ranks."""
    vision, text, ranks = request.param
    data, more = uneven_data(tmp_path, 18), "--train.iters 3 --train.global_batch_size 6 --optimizer.lr 1e-2"
    by_budget = make_flags(vision, text, f"{more} {BUDGET} --data.workers 2", data)
    return Case(ranks, by_budget, make_flags(vision, text, more, data))


def samples_of(batch: StepBatch) -> tuple[int, ...]:
    """The numbers of the samples that this rank reads."""
    texts = [micro_batch.inputs[TEXT] for micro_batch in batch.micro_batches if TEXT in micro_batch.inputs]
    return tuple(n for text in texts for n in np.unique(text.samples).tolist())


@pytest.mark.parametrize(
    "case", thinned([(("sp:2@0-1", "tp:2@1-2", 3),), (("sp:4", "tp:2,dp:2", 4),)], 2), ids=str, indirect=True
)
@on_ranks("case.ranks")
def test_ranks_agree_and_losses_are_those_of_single_samples(case: Case) -> None:
    """Steps of as many micro-batches as they need, with training in between."""
    run, losses, extras, lengths = build(case.by_budget), [], [], []
    for step, batch, _ in run.batches():
        metrics = run.trainer.train_step(step, batch)
        losses.append(metrics.loss)
        extra: dict[str, Any] = dict(metrics.extra)
        extras.append(extra["micro_batches"])
        lengths.append(np.array(batch.sample_lengths))
        of_replicas = set[tuple[int, ...]](by_rank(samples_of(batch))) - {()}
        assert sorted(n for numbers in of_replicas for n in numbers) == list(range(6 * step - 6, 6 * step))
        packs = extra["micro_batches"] * len(of_replicas)
        assert extra["budget_share"] == lengths[-1].sum() / (200 * packs) <= 1
        assert (extra["text_idle_share_predicted"] == 0) == (len(of_replicas) == 1)
        assert extra["text_padding_share"] <= packs / (packs + lengths[-1].sum())
    assert by_rank(losses) == [losses] * case.ranks
    assert len(set(extras)) > 1, "all steps are alike"
    run = build(case.alone)
    for (step, batch, _), loss in zip(run.batches(), losses, strict=True):
        metrics = run.trainer.train_step(step, batch)
        assert metrics.loss == pytest.approx(loss, rel=1e-5)
        # tp:2 adds a token to odd lengths.
        alone = np.array(batch.sample_lengths)
        added = (alone % 2).sum()
        assert metrics.extra["text_padding_share"] == pytest.approx(added / (alone.sum() + added))


@pytest.fixture
def with_long(make_flags: MakeFlags, tmp_path: Path) -> list[str]:
    """A command line for two steps, in which all samples of the first and some of the second are too long."""
    data = uneven_data(tmp_path, 200, (0, 0, 0, 0, 2, 0, 2, 0))
    more = f"--train.iters 2 --data.too_long skip --train.patches_per_micro_batch 16 {BUDGET}"
    return make_flags("sp:2", "dp:2", more, data=data)


@on_ranks(2)
def test_skipped_samples_are_not_dealt(with_long: list[str]) -> None:
    run = build(with_long)
    skipped, numbers = [], []
    for step, batch, _ in run.batches():
        skipped.append(run.trainer.train_step(step, batch).skipped_samples)
        numbers = sorted(n for of_rank in by_rank(samples_of(batch)) for n in of_rank)
    assert skipped == [4, 2] and numbers == [5, 7]


@pytest.mark.parametrize("flags", [("sp:2", "dp:2", f"{BUDGET} --train.patches_per_micro_batch 4")], indirect=True)
@on_ranks(2)
def test_a_sample_of_too_many_patches_is_an_error(flags: list[str]) -> None:
    [(_, message)] = set(by_rank(error_of(flags)))
    assert "data.jsonl:1: found images of" in message and "at most train.patches_per_micro_batch = 4" in message


@pytest.mark.parametrize("flags", [("sp:2", "dp:2", BUDGET)], indirect=True)
@on_ranks(2)
def test_a_change_of_a_sample_is_noticed(flags: list[str]) -> None:
    """Rank 1 reads samples with one more token, as if another node had another picture."""
    run = build(flags)
    tokenize = Processor.tokenize

    def longer(processor: Processor, record: Record) -> TokenizedSample:
        sample = tokenize(processor, record)
        return replace(
            sample,
            input_ids=np.append(sample.input_ids, 1),
            supervised=np.append(sample.supervised, False),
            position_ids=np.pad(sample.position_ids, ((0, 0), (0, 1))),
        )

    changed = mock.patch.object(Processor, "tokenize", longer) if run.trainer.topology.rank else nullcontext()
    with changed, pytest.raises(UserError, match="as another rank has read it") as raised:
        next(iter(run.batches()))
    assert len(set(by_rank(str(raised.value)))) == 1
