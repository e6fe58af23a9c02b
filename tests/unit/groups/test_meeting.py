"""Ranks and hosts meet in a store: all join, or the missing ones are reported."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.launch import join, meet


def test_nobody_continues_before_all_have_joined() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(join, store, "rank", number, 3, 10.0) for number in (2, 0)]
        time.sleep(0.1)
        assert not any(future.done() for future in first)
        threads.submit(join, store, "rank", 1, 3, 10.0).result()
        assert [future.result() for future in first] == [None, None]


def test_who_is_missing_is_reported_and_finally_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(join, store, "host", 2, 6, -4.0)
        with pytest.raises(UserError, match=r"found no hosts 1,3-5 after . s, expected all"):
            join(store, "host", 0, 6, 0.4)
        with pytest.raises(UserError, match="found no confirmation from host 0 "):
            other.result()
    reported = capsys.readouterr().err.splitlines()
    assert 1 <= len(reported) <= 3 and all(line.startswith("waiting for hosts 1,3-5 since") for line in reported)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment as of ranks that are started by hand, at a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", **environ}.items():
        monkeypatch.setenv(name, value)
    return environ


def test_missing_ranks_are_named(place: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="found no ranks 1-3 after "):
        meet(0.2)
    assert capsys.readouterr().err.startswith("waiting for ranks 1-3 since")


def test_a_missing_store_is_named(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "2")
    who = f"store at 127.0.0.1:{place['MASTER_PORT']}"
    with pytest.raises(UserError, match=f"found no {who} after"):
        meet(0.2)
    assert capsys.readouterr().err.startswith(f"waiting for {who} since")


def test_a_port_that_is_taken_is_named(place: dict[str, str]) -> None:
    port = place["MASTER_PORT"]
    refused = pytest.raises(UserError, match=f"MASTER_PORT, 127.0.0.1:{port}: found .*EADDRINUSE")
    with socket.create_server(("127.0.0.1", int(port))), refused:
        meet(0.2)
