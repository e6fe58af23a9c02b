"""Processes that take orders. Each system under test has processes of its own, so that its memory can be measured."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 1800.0
LOOK_S = 5.0
"""How often it is looked whether processes that do not answer are alive."""


class Crew:
    """`ranks` processes with a process group; in each an object, made by `build(platform, *args)`, takes orders.

    `join(rank, ranks, store)`: makes the group and returns the platform. `start`: how processes start; `forkserver`
    imports what they share once, `spawn` is for those that share a GPU, which no server may have looked at before.
    `ready`: whether to wait until all have been built; otherwise `wait` does.
    """

    def __init__(
        self,
        ranks: int,
        store: Path,
        build: Callable[..., Any],
        *args: Any,
        preload: str = "benchmarks.systems",
        join: Callable[[int, int, str], Any] | None = None,
        start: str = "forkserver",
        ready: bool = True,
    ):
        context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            # Heavy modules are imported once and shared; nothing in them starts threads or touches a GPU.
            context.set_forkserver_preload([preload])
        self.ranks = ranks
        self._orders = [context.Queue() for _ in range(ranks)]
        self._results = context.Queue()
        self._workers = [
            context.Process(
                target=_serve,
                args=(rank, ranks, str(store), join or join_group, build, args, self._orders[rank], self._results),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for worker in self._workers:
            worker.start()
        if ready:
            self.wait()

    def wait(self) -> None:
        """Wait until all processes take orders."""
        self._collect()

    def run(self, name: str, *args: Any) -> list[Any]:
        """Call method `name` on every rank; results by rank. A failure on any rank is raised here with its trace."""
        for orders in self._orders:
            orders.put((name, args))
        return self._collect()

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.terminate()
            worker.join()

    def _collect(self) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < self.ranks:
            try:
                rank, result, failure = self._results.get(timeout=LOOK_S)
            except queue.Empty:
                self._require_answers(set(range(self.ranks)) - results.keys(), deadline)
                continue
            if failure is not None:
                self.close()
                raise RuntimeError(f"rank {rank}: {failure}")
            results[rank] = result
        return [results[rank] for rank in range(self.ranks)]

    def _require_answers(self, missing: set[int], deadline: float) -> None:
        """Raise where ranks have died (a fault below Python tells nothing), or it has taken too long."""
        dead = [rank for rank in missing if not self._workers[rank].is_alive()]
        if dead or time.monotonic() > deadline:
            self.close()
            raise TimeoutError(f"ranks {dead} died" if dead else f"ranks {missing} do not answer")


def _serve(rank: int, ranks: int, store: str, join: Any, build: Any, args: Any, orders: Any, results: Any) -> None:
    try:
        worker = build(join(rank, ranks, store), *args)
        results.put((rank, None, None))
        while True:
            name, values = orders.get()
            result = getattr(worker, name)(*values)
            # Systems that wait must not occupy memory that others need; all start their next order in the same state.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            results.put((rank, result, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def join_group(rank: int, ranks: int, store: str) -> Any:
    """The platform of this rank, with the default process group: a GPU each where there are enough, else the CPU."""
    import torch
    import torch.distributed as dist

    from megatron_hetero.groups.platform import CPU, Platform

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(ranks)
    torch.set_num_threads(1)
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    platform = Platform.detect(rank) if enough else Platform(CPU, "gloo")
    platform.init_process_group(
        store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    return platform
