"""The stream of samples: shares, permutations, wrapping, and messages."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig, SampledDataset
from megatron_hetero.data import mixture as mixture_module
from megatron_hetero.data.mixture import Mixture, Shuffle
from megatron_hetero.data.sources import index

SIZES = {"a": 1, "b": 4, "c": 7}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DatasetConfig]]:
    """Data sets of these sizes, in blocks of two records."""
    folder = tmp_path_factory.mktemp("sets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "BLOCK_RECORDS", 2)
        yield {name: DatasetConfig(annotations=write(folder / name, size)) for name, size in SIZES.items()}


def write(path: Path, size: int) -> Path:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": path.name}]
    path.write_text((json.dumps({"conversations": turns}) + "\n") * size)
    return path


def epoch(mixture: Mixture, number: int) -> list[tuple[str, int]]:
    start = number * len(mixture)
    records = [mixture[i] for i in range(start, start + len(mixture))]
    return [(record.dataset, record.index) for record in records]


rates = st.sampled_from(["", "%10", "%33.3", "%50", "%100", "%130", "%250"])
entries = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), rates), min_size=1, max_size=4)


def rate_of(text: str) -> Fraction:
    return Fraction(text[1:]) / 100 if text else Fraction(1)


@settings(max_examples=60)
@given(chosen=entries, seed=st.integers(-3, 2**40), number=st.integers(0, 5), shuffle=st.sampled_from([True, "blocks"]))
def test_every_shuffled_epoch_has_the_right_shares(
    registry: dict[str, DatasetConfig], chosen: list[tuple[str, str]], seed: int, number: int, shuffle: Shuffle
) -> None:
    mixture = Mixture.parse([name + rate for name, rate in chosen], registry, shuffle=shuffle, seed=seed)
    assert len(mixture) == sum(math.ceil(rate_of(rate) * SIZES[name]) for name, rate in chosen)
    counts = Counter(epoch(mixture, number))
    for name, size in SIZES.items():
        wanted = [math.ceil(rate_of(rate) * size) for other, rate in chosen if other == name]
        per_record = [counts[name, k] for k in range(size)]
        assert sum(per_record) == sum(wanted)
        # Each entry takes every record as often as any other, or once more.
        low, high = sum(n // size for n in wanted), sum(-(-n // size) for n in wanted)
        assert all(low <= n <= high for n in per_record)


@given(chosen=entries, i=st.integers(0, 10**9))
def test_without_shuffle_the_stream_is_the_first_records_again_and_again(
    registry: dict[str, DatasetConfig], chosen: list[tuple[str, str]], i: int
) -> None:
    mixture = Mixture.parse([name + rate for name, rate in chosen], registry, shuffle=False, seed=0)
    expected = []
    for name, rate in chosen:
        count = math.ceil(rate_of(rate) * SIZES[name])
        expected += [(name, k % SIZES[name]) for k in range(count)]
    assert epoch(mixture, 0) == expected
    record = mixture[i]
    assert (record.dataset, record.index) == expected[i % len(expected)]


@pytest.mark.parametrize("shuffle", [True, "blocks"])
def test_the_order_depends_on_seed_and_epoch_alone(registry: dict[str, DatasetConfig], shuffle: Shuffle) -> None:
    def make(seed: int) -> Mixture:
        return Mixture.parse(["b", "c%50"], registry, shuffle=shuffle, seed=seed)

    ascending = [epoch(make(1), k) for k in range(6)]
    mixture = make(1)
    assert [epoch(mixture, k) for k in (5, 0, 3)] == [ascending[k] for k in (5, 0, 3)]
    assert len({tuple(order) for order in ascending}) == 6
    assert epoch(make(2), 0) != ascending[0]
    # A share is drawn anew: over six epochs more than half of c is seen.
    assert len({key for order in ascending for key in order if key[0] == "c"}) > 4


def test_whole_data_sets_are_permuted_and_mixed(registry: dict[str, DatasetConfig]) -> None:
    mixture = Mixture.parse(["b", "c"], registry, shuffle=True, seed=0)
    orders = [epoch(mixture, k) for k in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    assert {order[0][0] for order in orders} == {"b", "c"}
    assert len({order[0] for order in orders}) > 5


def test_blocks_are_permuted_whole_and_mixed_within_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK_RECORDS", 5)
    monkeypatch.setattr(mixture_module, "WINDOW_RECORDS", 15)
    registry = {name: DatasetConfig(annotations=write(tmp_path / name, 50)) for name in "xy"}
    mixture = Mixture.parse(["x", "y%50"], registry, shuffle="blocks", seed=0)
    order = epoch(mixture, 0)
    blocks = [Counter((name, k // 5) for name, k in order[first : first + 15]) for first in range(0, 75, 15)]
    assert all(set(window.values()) == {5} and len(window) == 3 for window in blocks), "each window is three blocks"
    assert len({name for window in blocks for name, _ in window}) == 2
    assert len(set(order)) == 75 and order != sorted(order)
    assert not any(all(a[1] < b[1] for a, b in itertools.pairwise(order[k : k + 15])) for k in range(0, 75, 15))


def in_groups(path: Path, rows: int) -> DatasetConfig:
    """13 records in row groups of so many."""
    table = pa.table({"question": [f"{k}?" for k in range(13)], "answer": ["It."] * 13})
    parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=rows)
    return DatasetConfig(files=Pattern(f"{path}.parquet"))


def spaced(path: Path, blanks: int) -> DatasetConfig:
    """13 records, one after another with so many blanks in it."""
    texts = [json.dumps({"question": f"{k}?", "answer": "It."}) for k in range(13)]
    path.write_text("\n".join(text.replace(" ", " " * (1 + blanks * (k % 2))) for k, text in enumerate(texts)))
    return DatasetConfig(annotations=path)


@pytest.mark.parametrize("write, one, other, alike", [
    (in_groups, 5, 8, False),
    (spaced, 0, 400, False),
    (spaced, 0, 3, True),
])  # fmt: skip
def test_hashes_of_blocks_are_equal_if_the_order_is(
    write: Any, one: int, other: int, alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same records in another physical form."""
    monkeypatch.setattr(index, "BLOCK_RECORDS", 2)
    monkeypatch.setattr(mixture_module, "WINDOW_RECORDS", 4)
    monkeypatch.setattr(mixture_module, "WINDOW_BYTES", 1500)
    forms = [Mixture.parse(["d%150", "d"], {"d": write(tmp_path / f"{size}", size)}, shuffle="blocks", seed=0)
             for size in (one, other)]  # fmt: skip
    digests = [[(data.digest, blocks) for data, _, blocks in form.hashed()] for form in forms]
    assert digests[0][0][0] == digests[1][0][0] and all(blocks for _, blocks in digests[0])
    assert (digests[0] == digests[1]) == alike
    orders = [[[number for _, number in epoch(form, k)] for k in range(9)] for form in forms]
    assert (orders[0] == orders[1]) == alike
    forms[0].shuffle = True
    assert [blocks for *_, blocks in forms[0].hashed()] == ["", ""]


def test_large_blocks_are_windows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_module, "WINDOW_BYTES", 100)
    blocks = np.array([[0, 10, 60], [10, 20, 60], [20, 30, 40], [30, 40, 500], [40, 41, 1]])
    assert list(mixture_module._windows(blocks)) == [10, 20, 10, 1]


def test_negative_samples_and_iteration_are_refused(registry: dict[str, DatasetConfig]) -> None:
    mixture = Mixture.parse(["a"], registry, shuffle=False, seed=0)
    with pytest.raises(IndexError):
        mixture[-1]
    with pytest.raises(TypeError):
        iter(mixture)  # type: ignore[call-overload]


@pytest.mark.parametrize("text", ["shapes", "shapes%50", "shapes%12.5", "shapes%250"])
def test_shares_round_trip(text: str) -> None:
    assert str(SampledDataset.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["c%", "c%0", "c%0.0", "c%-5", "c%half", "c%nan", "c%1e300", f"c%{10**300}", "%50", "c%50%"]
)
def test_bad_rates_are_named(registry: dict[str, DatasetConfig], text: str) -> None:
    with pytest.raises(
        UserError, match=r"data\.datasets: found '.*a percentage > 0 and ≤ 1000000, in digits.*%50"
    ) as caught:
        Mixture.parse([text], registry, shuffle=False, seed=0)
    assert repr(text) in str(caught.value)


def test_unknown_names_get_a_suggestion(tmp_path: Path) -> None:
    registry = {
        "shapes": DatasetConfig(annotations=tmp_path / "x"),
        "captions": DatasetConfig(annotations=tmp_path / "y"),
    }
    with pytest.raises(UserError, match=r"unknown data set 'shape'.*\(shapes, captions\).*Did you mean 'shapes'\?$"):
        Mixture.parse(["shape%50"], registry, shuffle=False, seed=0)
    with pytest.raises(UserError, match=r"unknown data set 'zzz'.*Add it to data\.registry"):
        Mixture.parse(["zzz"], registry, shuffle=False, seed=0)
    with pytest.raises(UserError, match=r"data\.datasets: no data set"):
        Mixture.parse([], registry, shuffle=False, seed=0)
