"""What ranks were started with is compared, and what differs is told, on every rank alike."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from megatron_hetero.distributed.agreement import MOST_SHOWN, Statement, judge, require_agreement
from megatron_hetero.errors import UserError

FACTS = {"optimizer.lr": "0.1", "model.hf_path": "/model", "version of torch": "2.13"}


def test_equal_statements_agree() -> None:
    assert judge([Statement(FACTS)] * 4) == ""
    assert judge([Statement(FACTS), Statement(dict(reversed(FACTS.items())))]) == ""


def test_the_message_names_setting_values_and_ranks() -> None:
    others = FACTS | {"optimizer.lr": "0.2"}
    missing = {name: value for name, value in others.items() if name != "model.hf_path"}
    message = judge([Statement(FACTS), Statement(others), Statement(FACTS), Statement(missing), Statement(others)])
    assert "optimizer.lr is 0.1 on ranks 0,2 and 0.2 on ranks 1,3-4; " in message
    assert "model.hf_path is /model on ranks 0-2,4 and not there on rank 3, expected" in message
    assert "version of torch" not in message


def test_long_values_and_many_differences_are_cut() -> None:
    mine = {f"setting {i}": "x" * 1000 for i in range(30)}
    message = judge([Statement(mine), Statement(dict.fromkeys(mine, "y"))])
    assert message.count("setting ") == MOST_SHOWN and f"and {30 - MOST_SHOWN} more" in message and len(message) < 3000


def test_a_problem_of_one_rank_is_everybody_s() -> None:
    assert judge([Statement(FACTS, "no such file")] * 3) == "no such file"
    assert judge([Statement(FACTS), Statement(FACTS, "no such file"), Statement(FACTS)]) == "on rank 1: no such file"


def test_what_a_rank_with_a_problem_did_not_come_to_is_no_difference() -> None:
    short = {name: FACTS[name] for name in ("optimizer.lr", "version of torch")}
    assert judge([Statement(FACTS), Statement(short, "no such file")]) == "on rank 1: no such file"
    assert "optimizer.lr is" in judge([Statement(FACTS), Statement({"optimizer.lr": "3"}, "no such file")])


def compared(store: dist.Store, statements: list[Statement], **options: object) -> list[str]:
    """What each rank, a thread, hears."""

    def compare(rank: int) -> str:
        try:
            require_agreement(statements[rank], store, rank, len(statements), **options)  # pyright: ignore[reportArgumentType]
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(statements)) as pool:
        return list(pool.map(compare, range(len(statements))))


def test_all_ranks_hear_the_same_again_and_again() -> None:
    store, other = dist.HashStore(), Statement(FACTS | {"optimizer.lr": "0.2"})
    assert compared(store, [Statement(FACTS)] * 8) == [""] * 8
    (message,) = set(compared(store, [Statement(FACTS)] * 7 + [other]))
    assert "optimizer.lr is 0.1 on ranks 0-6 and 0.2 on rank 7" in message
    assert compared(store, [other] * 8) == [""] * 8


def test_ranks_that_do_not_come_are_named() -> None:
    store, mine = dist.HashStore(), Statement(FACTS)
    described: list[Callable[[], str]] = []

    @contextlib.contextmanager
    def watched(what: Callable[[], str]) -> Iterator[None]:
        described.append(what)
        yield

    def start(*ranks: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=require_agreement, args=(mine, store, rank, 5, watched)) for rank in ranks]
        for thread in threads:
            thread.start()
        return threads

    first, end = start(0, 2, 3), time.monotonic() + 20
    while not any("ranks 1,4, which" in what() for what in described) and time.monotonic() < end:
        time.sleep(0.05)
    assert "the settings of ranks 1,4, which all ranks compare before they begin," in [what() for what in described]
    for thread in first + start(1, 4):
        thread.join()
