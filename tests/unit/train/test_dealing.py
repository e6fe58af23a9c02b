"""Dealing the samples of a step by a token budget: the same on all ranks and in all runs, and nothing but the dealing
changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.data.dealing import ByBudget, PackMetadata, PackShape, Pieces, PieceSource
from megatron_hetero.job import Budget
from megatron_hetero.models.items.pictures import ImageSize
from tests.support.folders import write_data
from tests.support.pool import Pool
from tests.unit.train import jobs_run as jobs
from tests.unit.train.jobs_packs import SHAPE
from tests.unit.train.jobs_run import MakeFlags

Pools = Callable[[int], Pool]
BUDGET = "--train.tokens_per_micro_batch 200 --data.max_seq_length 200"
ENCODERS = {"vision": SHAPE}


def sample(text: int, units: int) -> PackMetadata:
    """A sample of so many tokens of text after the rows of a picture, if it has any."""
    sizes = (ImageSize(1, 2, 2 * units),) if units else ()
    images = Pieces((len(sizes),), sizes, np.arange(units).tobytes())
    sources = tuple(PieceSource(0, k, 0) for k in range(len(sizes)))
    return PackMetadata(PackShape((units + text,), (images,)), (sources,), text // 2)


samples = st.lists(st.builds(sample, st.integers(1, 30), st.integers(0, 20)), max_size=24)


@settings(max_examples=80)
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


@pytest.mark.parametrize("vision, text, ranks", [("sp:4", "tp:2,dp:2", 4), ("sp:2@0-1", "tp:2@1-2", 3)])
def test_ranks_agree_and_losses_are_those_of_single_samples(
    vision: str, text: str, ranks: int, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    """Steps of as many micro-batches as they need, with training in between."""
    data, more = uneven_data(tmp_path, 18), "--train.iters 5 --train.global_batch_size 6 --optimizer.lr 1e-2"
    dealt = pools(ranks).run(jobs.dealt, make_flags(vision, text, f"{more} {BUDGET} --data.workers 2", data))
    alone = pools(ranks).run(jobs.dealt, make_flags(vision, text, more, data))
    assert all(of_rank["losses"] == dealt[0]["losses"] for of_rank in dealt)
    np.testing.assert_allclose(dealt[0]["losses"], alone[0]["losses"], rtol=1e-5)
    assert len({metrics["micro_batches"] for metrics in dealt[0]["extra"]}) > 1, "all steps are alike"
    for step, extra in enumerate(dealt[0]["extra"]):
        by_replica = {tuple(of_rank["numbers"][step]) for of_rank in dealt} - {()}
        assert sorted(n for numbers in by_replica for n in numbers) == list(range(6 * step, 6 * step + 6))
        replicas = len(by_replica)
        packs = extra["micro_batches"] * replicas
        assert extra["budget_share"] == sum(dealt[0]["lengths"][step]) / (200 * packs) <= 1
        assert (extra["text_idle_share_predicted"] == 0) == (replicas == 1)
        # tp:2 adds a token to odd lengths.
        lengths = np.array(alone[0]["lengths"][step])
        added = (lengths % 2).sum()
        assert alone[0]["extra"][step]["text_padding_share"] == pytest.approx(added / (lengths.sum() + added))
        assert extra["text_padding_share"] <= packs / (packs + lengths.sum())


def test_skipped_samples_are_not_dealt(make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    """Of one step all, of another some."""
    data = uneven_data(tmp_path, 200, (0, 0, 0, 0, 2, 0, 2, 0))
    more = f"--train.iters 2 --data.too_long skip --train.patches_per_micro_batch 16 {BUDGET}"
    found = pools(2).run(jobs.dealt, make_flags("sp:2", "dp:2", more, data=data))
    assert [step["skipped"] for step in found[0]["extra"]] == [4, 2]
    assert sorted(n for of_rank in found for n in of_rank["numbers"][1]) == [5, 7]


def test_a_sample_of_too_many_patches_is_an_error(make_flags: MakeFlags, pools: Pools) -> None:
    flags = make_flags("sp:2", "dp:2", f"{BUDGET} --train.patches_per_micro_batch 4")
    told = set(pools(2).run(jobs.error_of, flags))
    assert len(told) == 1
    message = told.pop()[1]
    assert "data.jsonl:1: found images of" in message and "at most train.patches_per_micro_batch = 4" in message


def test_a_change_of_a_sample_is_noticed(make_flags: MakeFlags, pools: Pools) -> None:
    """As if another node had another picture."""
    told = set(pools(2).run(jobs.error_of_changed_sample, make_flags("sp:2", "dp:2", BUDGET)))
    assert len(told) == 1 and "as another rank has read it" in told.pop()
