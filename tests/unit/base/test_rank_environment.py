"""What says which rank a process is, checked before it is believed."""

from __future__ import annotations

import resource

import pytest

from megatron_hetero.base.environment import raise_open_files, rank, require_ranks
from megatron_hetero.base.errors import UserError

GOOD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
WRONG = [
    ({"RANK": "abc"}, "RANK: found `abc`"),
    ({"RANK": ""}, "RANK: found ``"),
    ({"RANK": "-1"}, "RANK: found `-1`"),
    ({"RANK": "2"}, "RANK 2 of WORLD_SIZE 2"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE: found `0`"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT: found `0`, expected a port"),
    ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE: found `2.0`"),
    ({"WORLD_SIZE": None}, "WORLD_SIZE: not set, but RANK is"),
    ({"RANK": None}, "RANK unset of WORLD_SIZE 2"),
    ({"LOCAL_RANK": "one"}, "LOCAL_RANK: found `one`"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT: found `http`"),
    ({"MASTER_PORT": "70000"}, "MASTER_PORT: found `70000`, expected a port"),
    ({"RANK": "9" * 5000}, "RANK: found `999"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR: not set, but RANK is"),
    ({"MASTER_PORT": None}, "MASTER_PORT: not set, but RANK is"),
]


@pytest.mark.parametrize("change, told", WRONG, ids=str)
def test_what_cannot_be_is_refused_with_the_name_of_the_variable(change: dict[str, str | None], told: str) -> None:
    environ = {name: value for name, value in (GOOD | change).items() if value is not None}
    with pytest.raises(UserError, match="environment variable") as refused:
        require_ranks(environ, meet=True)
    assert told in str(refused.value)
    assert "python -m megatron_hetero.run" in str(refused.value)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1"}, {"MASTER_PORT": "29500"}, GOOD], ids=str)
def test_a_process_alone_needs_nothing(environ: dict[str, str]) -> None:
    require_ranks(environ, meet=True)


def test_a_rank_that_is_no_number_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tells of it asks for the rank."""
    monkeypatch.setenv("RANK", "abc")
    assert rank() == 0


@pytest.mark.parametrize("refused", [None, PermissionError, ValueError], ids=str)
def test_the_limit_of_open_files_is_raised_where_that_may_be(
    refused: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(1024, 4096)]

    def set_limit(_: int, wanted: tuple[int, int]) -> None:
        if refused:
            raise refused
        limits.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    raise_open_files()
    assert limits[-1] == ((1024, 4096) if refused else (4096, 4096))
