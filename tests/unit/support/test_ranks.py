"""`@on_ranks`: arguments reach all ranks, and what fails on one fails the test and says where."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pools
from tests.support.ranks import on_ranks


@on_ranks(3)
def test_ranks_share_a_group() -> None:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    assert (dist.get_world_size(), total) == (3, 3)


@pytest.mark.parametrize("shape", [(2, 3), (4,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@on_ranks(2)
def test_parameters_reach_all_ranks(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert torch.ones(shape, dtype=dtype).sum() == {2: 6, 1: 4}[len(shape)]


@pytest.fixture
def word() -> str:
    return "from a fixture"


@on_ranks(2)
def test_fixtures_are_made_once(word: str, tmp_path: Path) -> None:
    """In the process of the tests: all ranks have the same folder."""
    (tmp_path / f"{dist.get_rank()}").write_text(word)
    dist.barrier()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": word, "1": word}


@on_ranks(2)
def fails_on_one() -> None:
    found = dist.get_rank() + 1
    assert found == 1, "one more"


@on_ranks(2)
def raises(word: str) -> None:
    if dist.get_rank() == 0:
        raise ValueError(word)


@on_ranks(2, timeout_s=1)
def hangs() -> None:
    if dist.get_rank() == 1:
        dist.barrier()


@on_ranks(2)
def never_runs(made: Any) -> None:
    raise AssertionError("ran")


def test_an_assertion_of_one_rank_says_what_was_compared(pools: Pools) -> None:
    with pytest.raises(AssertionError, match="^rank 1: ") as error:
        fails_on_one(pools=pools)
    assert 'assert found == 1, "one more"' in str(error.value) and "assert 2 == 1" in str(error.value)
    assert "in fails_on_one" in str(error.value) and Path(__file__).name in str(error.value)


def test_an_exception_of_one_rank_has_its_trace(pools: Pools) -> None:
    with pytest.raises(AssertionError, match="^rank 0: (?s:.*)in raises(?s:.*)ValueError: something of its own"):
        raises(pools=pools, word="something of its own")


def test_a_rank_that_hangs_is_named(pools: Pools) -> None:
    with pytest.raises(TimeoutError, match=r"1\} hang in hangs\nrank 1:\n(?s:.*)in barrier(?s:.*)in hangs"):
        hangs(pools=pools)


@on_ranks(2)
def fails_where_another_wants_to_live() -> None:
    if dist.get_rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        time.sleep(1000)
    dist.barrier()
    raise ValueError("enough")


def test_ranks_that_heed_no_signal_end_with_one_that_fails(pools: Pools) -> None:
    """As those that train, which take a signal as a request to stop after the step."""
    with pytest.raises(AssertionError, match="rank 0: (?s:.*)enough"):
        fails_where_another_wants_to_live(pools=pools)


def test_what_cannot_travel_is_refused_at_once(pools: Pools) -> None:
    with pytest.raises((TypeError, AttributeError), match="(?i)pickle|local object"):
        never_runs(pools=pools, made=lambda: None)
