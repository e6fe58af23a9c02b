"""A pool of workers, started once, that run functions of the tests on groups of gloo, or with NCCL's rules."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.nccl_rules.coordinator import Coordinator
from tests.support.nccl_rules.waiting import RANK_HAS_ENDED

TIMEOUT_S = 120.0
PRELOADED = [
    "torch.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
]
OURS = ["megatron_hetero.train.start", "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"]
"""Imported once by the server that workers are forked from: imports cost seconds per process otherwise. What other
packages have comes first.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a function on a rank, or its failure."""

    result: Any
    failure: str | None


class Pool:
    """`ranks` processes with an initialised default process group.

    `packages`: folders of packages that precede installed ones. `rules`: whether groups follow NCCL's rules, see
    `tests.support.nccl_rules`. `one_connection`: as with CUDA_DEVICE_MAX_CONNECTIONS=1.
    """

    def __init__(
        self,
        ranks: int,
        folder: Path,
        packages: Sequence[Path] = (),
        *,
        rules: bool = False,
        one_connection: bool = False,
    ):
        context = _context(packages)
        self.ranks, self._rules, self._stacks = ranks, rules, [folder / f"stack-{rank}" for rank in range(ranks)]
        self._jobs = [context.Queue() for _ in range(ranks)]
        self._results = context.Queue()
        store = str(folder / f"store-{ranks}")
        pipes = [context.Pipe() if rules else (None, None) for _ in range(ranks)]
        self._workers = [
            context.Process(
                target=_serve,
                args=(
                    rank,
                    ranks,
                    store,
                    packages,
                    self._stacks[rank],
                    pipes[rank][1],
                    self._jobs[rank],
                    self._results,
                ),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for worker in self._workers:
            worker.start()
        for _, theirs in pipes:
            if theirs is not None:
                theirs.close()
        if rules:
            self._coordinator = Coordinator([ours for ours, _ in pipes], one_connection=one_connection)  # pyright: ignore[reportArgumentType]

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Run `function(*args)` on every rank. Returns results by rank; raises the first failure with its trace."""
        outcomes: dict[int, Outcome] = {}
        for rank, outcome in self._outcomes(function, args, timeout_s):
            outcomes[rank] = outcome
            if outcome.failure is not None and not self._rules:  # Others may hang.
                break
        failures = {rank: outcome.failure for rank, outcome in outcomes.items() if outcome.failure is not None}
        if failures:
            self.close()
            # A rank that only waited for one that failed says less.
            rank = min(failures, key=lambda rank: (RANK_HAS_ENDED in failures[rank], rank))
            raise AssertionError(f"rank {rank}: {failures[rank]}")
        return [outcomes[rank].result for rank in range(self.ranks)]

    def attempt(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Outcome]:
        """Run `function(*args)` on every rank. With NCCL's rules all ranks end, and the pool can be used again."""
        outcomes = dict(self._outcomes(function, args, timeout_s))
        return [outcomes[rank] for rank in range(self.ranks)]

    def _outcomes(self, function: Callable[..., Any], args: Any, timeout_s: float) -> Iterator[tuple[int, Outcome]]:
        """Yield ranks and outcomes as they arrive."""
        for jobs in self._jobs:
            jobs.put((function, args))
        missing = set(range(self.ranks))
        patience = time.monotonic() + timeout_s
        while missing:
            try:
                rank, result, failure = self._results.get(timeout=1.0)
            except queue.Empty:
                if self.alive and time.monotonic() < patience:
                    continue
                what = "hang in" if self.alive else "or others have died before the end of"
                where = self._where(missing)
                self.close()
                raise TimeoutError(f"ranks {missing} {what} {function.__name__}\n{where}") from None
            except BaseException:  # Such as a test's timeout: results of this job would be taken for the next one's.
                self.close()
                raise
            missing.discard(rank)
            patience = time.monotonic() + timeout_s
            yield rank, Outcome(result, failure)
        for jobs in self._jobs:
            jobs.put(None)

    def _where(self, ranks: Iterable[int]) -> str:
        """The stacks of `ranks`."""
        for rank in ranks:
            if self._workers[rank].is_alive():
                os.kill(self._workers[rank].pid, signal.SIGUSR2)
        time.sleep(1)
        return "\n".join(f"rank {rank}:\n{self._stacks[rank].read_text()}" for rank in ranks)

    @property
    def alive(self) -> bool:
        """Whether all workers can take jobs."""
        return all(worker.is_alive() for worker in self._workers)

    def close(self) -> None:
        """End all workers. They are killed: one that trains takes SIGTERM as a request to stop, and may wait."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()


Pools = Callable[[int], Pool]
"""The pool of so many ranks, as the fixture `pools` gives it."""


def world() -> Any:
    """The group of all workers, for the functions that they run."""
    import torch.distributed as dist

    return dist.group.WORLD


def _context(packages: Sequence[Path]) -> Any:
    """How workers are started: those with packages of their own import everything themselves."""
    if packages:
        return multiprocessing.get_context("spawn")
    return forkserver()


def forkserver() -> Any:
    """A context whose processes find imported what the tests need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *OURS])
    return context


def platform() -> Any:
    """The platform of the pool, for the functions that its workers run."""
    import torch.distributed as dist

    from megatron_hetero.groups.platform import CPU, Platform

    backend = dist.get_backend()
    return Platform(CPU, backend, host_backend="host_rules" if backend == "nccl_rules" else backend)


def _serve(
    rank: int,
    ranks: int,
    store: str,
    packages: Sequence[Path],
    stack: Path,
    coordinator: Any,
    jobs: Any,
    results: Any,
) -> None:
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    faulthandler.register(signal.SIGUSR2, stack.open("w"))
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(folder) for folder in packages]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # All ranks meet at a file. Later messages go through a socket, which is not polled.
    files, client = dist.FileStore(store, ranks), None
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        files.set("port", str(server.port))
        jobs_store: Any = server
    else:
        jobs_store = dist.TCPStore("127.0.0.1", int(files.get("port")), wait_for_workers=False)
    options: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=TIMEOUT_S)}
    if coordinator is not None:
        from tests.support.nccl_rules.install import install

        client = install(coordinator, files, rank, ranks)
    gc.freeze()  # Imported objects need not be scanned after every job.
    for number in count():
        job = jobs.get()
        if job is None:  # All ranks have finished the last one. A group of gloo polls in a thread as long as it exists.
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
            continue
        function, args = job
        # Each job has a store and process groups of its own: groups are looked up by names that recur.
        job_store = dist.PrefixStore(str(number), jobs_store)
        if client is None:
            dist.init_process_group("gloo", store=job_store, **options)
        else:
            client.init_process_group(store=job_store, **options)
        answer: tuple[Any, ...]
        try:
            answer = (rank, function(*args), None)
        except BaseException:
            answer = (rank, None, traceback.format_exc())
        results.put(answer if client is None else _finish(client, answer))


def _end_with_parent() -> None:
    """End this worker if pytest is killed: it is a child of a server that lives as long as its workers do."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by `multiprocessing`"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _finish(client: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the outcome of a job, or the rule that something it left behind breaks."""
    try:
        client.finish()
    except RuntimeError:
        return answer if answer[2] else (answer[0], None, traceback.format_exc())
    return answer
