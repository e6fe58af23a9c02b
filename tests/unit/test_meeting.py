"""Ranks that meet in a store which earlier attempts have used: they agree, on something new, and say who is missing."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_hetero.distributed.meeting import Patience, gather, join, meet
from megatron_hetero.errors import UserError


def start(place: dist.Store, rank: int, world_size: int, timeout_s: float = 10.0) -> int:
    """What `meet` does with a store, on a thread."""
    patience = Patience(timeout_s, reports=rank == 0)
    if rank > 0:
        return join(place, rank, patience)
    attempt = gather(place, world_size, patience)
    place.set(f"attempt {attempt} is complete", "1")
    return attempt


def attempt(place: dist.Store, world_size: int, order: Iterable[int]) -> set[int]:
    """The attempts that ranks find who start one after the other."""
    with ThreadPoolExecutor(world_size) as threads:
        found = []
        for rank in order:
            found.append(threads.submit(start, place, rank, world_size))
            time.sleep(0.02)
        return {future.result() for future in found}


def test_each_attempt_has_a_number_of_its_own() -> None:
    place = dist.HashStore()
    assert [attempt(place, 4, order) for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2))] == [{1}, {2}, {3}]
    assert attempt(place, 1, (0,)) == {4}


def test_what_the_dead_left_is_answered_and_not_taken_for_an_arrival() -> None:
    """Rank 1 died after it gave its name, rank 2 after it joined: the attempt begins when both have come again."""
    place = dist.HashStore()
    place.add("attempts", 1)
    place.set("rank 1", "of a dead process")
    place.set("rank 2", "in attempt 1")
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(start, place, 0, 3)
        time.sleep(0.1)
        assert not first.done()
        others = [threads.submit(start, place, rank, 3) for rank in (1, 2)]
        assert {future.result() for future in (first, *others)} == {2}


def test_a_rank_follows_rank_0_into_its_next_attempt() -> None:
    """Rank 0 dies while it waits for rank 2, and is started again; rank 1 is not."""
    place = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        second = threads.submit(start, place, 1, 3)
        with pytest.raises(UserError, match="rank 2"):
            start(place, 0, 3, timeout_s=0.1)
        later = [threads.submit(start, place, rank, 3) for rank in (0, 2)]
        assert {future.result() for future in (second, *later)} == {2}


def test_who_is_missing_is_said_and_at_last_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    place = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(start, place, 2, 6, timeout_s=1.0)
        with pytest.raises(UserError, match=r"found no ranks 1,3-5 after . s, expected all"):
            start(place, 0, 6, timeout_s=0.4)
        with pytest.raises(UserError, match="found no word from rank 0 that all ranks have come"):
            other.result()
    told = capsys.readouterr().err.splitlines()
    assert 1 <= len(told) <= 3 and all(line.startswith("waiting for ranks 1,3-5 since") for line in told)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment as of ranks that are started by hand, at a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", **environ}.items():
        monkeypatch.setenv(name, value)
    return environ


def test_ranks_that_do_not_come_are_named(place: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="found no ranks 1-3 after .* expected all 4 to come"):
        meet(0.2)
    assert capsys.readouterr().err.startswith("waiting for ranks 1-3 since")


def test_a_rank_0_that_does_not_come_is_named(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")
    who = f"rank 0 at 127.0.0.1:{place['MASTER_PORT']}"
    with pytest.raises(UserError, match=f"found no {who} after"):
        meet(0.2)
    assert capsys.readouterr().err.startswith(f"waiting for {who} since")


def test_a_port_that_is_taken_is_named(place: dict[str, str]) -> None:
    port = place["MASTER_PORT"]
    refused = pytest.raises(UserError, match=f"MASTER_PORT, 127.0.0.1:{port}: found .*EADDRINUSE")
    with socket.create_server(("127.0.0.1", int(port))), refused:
        meet(0.2)


def test_a_service_that_is_no_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(mute.getsockname()[1]))
        with pytest.raises(UserError, match="no answer of a store at 127.0.0.1:.* where something else may listen"):
            meet(0.5)
