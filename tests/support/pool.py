"""A pool of gloo workers, started once, that run functions of the tests on real process groups."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
PRELOADED = [
    "torch.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
]
"""Imported once by the server that workers are forked from: imports cost seconds per process otherwise."""


class Pool:
    """`ranks` processes with an initialised default process group.

    `packages`: folders whose packages they find before those that are installed.
    """

    def __init__(self, ranks: int, folder: Path, packages: Sequence[Path] = ()):
        context = _context(packages)
        self.ranks = ranks
        self._jobs = [context.Queue() for _ in range(ranks)]
        self._results = context.Queue()
        store = str(folder / f"store-{ranks}")
        self._workers = [
            context.Process(
                target=_serve, args=(rank, ranks, store, packages, self._jobs[rank], self._results), daemon=True
            )
            for rank in range(ranks)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """`function(*args)` on every rank; results by rank. A failure on any rank is raised here with its trace."""
        for jobs in self._jobs:
            jobs.put((function, args))
        results: dict[int, Any] = {}
        while len(results) < self.ranks:
            try:
                rank, result, failure = self._results.get(timeout=timeout_s)
            except queue.Empty:
                self.close()
                raise TimeoutError(
                    f"ranks {set(range(self.ranks)) - results.keys()} hang in {function.__name__}"
                ) from None
            if failure is not None:
                self.close()
                raise AssertionError(f"rank {rank}: {failure}")
            results[rank] = result
        return [results[rank] for rank in range(self.ranks)]

    @property
    def alive(self) -> bool:
        """Whether all workers can take jobs."""
        return all(worker.is_alive() for worker in self._workers)

    def close(self) -> None:
        """Stop all workers."""
        for worker in self._workers:
            worker.terminate()
            worker.join()


def world() -> Any:
    """The group of all workers, to the functions that they run."""
    import torch.distributed as dist

    return dist.group.WORLD


def _context(packages: Sequence[Path]) -> Any:
    """Workers with packages of their own import everything themselves."""
    if packages:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(rank: int, ranks: int, store: str, packages: Sequence[Path], jobs: Any, results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(folder) for folder in packages]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    files = dist.FileStore(store, ranks)
    gc.freeze()  # What has been imported need not be looked through after every job.
    for number in count():
        function, args = jobs.get()
        if dist.is_initialized():  # By now all ranks have done the job before.
            gc.collect()
            dist.destroy_process_group()
        # Each job has a store and process groups of its own: groups are found by names that come again.
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"job {number}", files),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        try:
            answer = (rank, function(*args), None)
        except BaseException:
            answer = (rank, None, traceback.format_exc())
        results.put(answer)
