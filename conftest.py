"""Fixtures that all tests share: pools of workers, spawned once and only where a test asks for them."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support.pool import Pool

# Runs store indexes of data in the user's cache, where those of tests would stay. Matplotlib's own cache is kept.
_CACHE = tempfile.TemporaryDirectory(prefix="cache-")
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Property tests look at no clock: what else the machine does is not their business. They draw the same examples each
# time, so that a change is never blamed for what was there before; `make properties` draws others.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")

Pools = Callable[[int], Pool]
gc.disable()  # Until all tests have been imported: hardly anything of that is garbage.


def pytest_collection_finish() -> None:
    """What has been imported need not be looked through again and again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """`pools(ranks)`: the pool of so many gloo workers. A pool that a failing test broke is replaced."""
    yield from _pools(tmp_path_factory)


@pytest.fixture(scope="session")
def rules_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """As `pools`, with the process group that has NCCL's rules: see `tests.support.nccl_rules`."""
    yield from _pools(tmp_path_factory, rules=True)


@pytest.fixture(scope="session")
def one_connection_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """As `rules_pools`, with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    yield from _pools(tmp_path_factory, rules=True, one_connection=True)


def _pools(tmp_path_factory: pytest.TempPathFactory, **options: Any) -> Iterator[Pools]:
    made: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in made or not made[ranks].alive:
            folder: Path = tmp_path_factory.mktemp("pool")
            made[ranks] = Pool(ranks, folder, **options)
        return made[ranks]

    yield get
    for pool in made.values():
        pool.close()
