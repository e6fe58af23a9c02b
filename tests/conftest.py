"""Fixtures that all tests share: pools of gloo workers, spawned once and only where a test asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.pool import Pool  # noqa: E402  (after the number of threads is set)


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Pool]]:
    """`pools(ranks)`: the pool of so many workers. A pool that a failing test broke is replaced."""
    made: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in made or not made[ranks].alive:
            folder: Path = tmp_path_factory.mktemp("pool")
            made[ranks] = Pool(ranks, folder)
        return made[ranks]

    yield get
    for pool in made.values():
        pool.close()
