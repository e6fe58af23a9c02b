"""Which ranks torchrun starts again: not those that reported an error of the user, which they would find again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from megatron_hetero.distributed.launch import FINAL

_REPORTED = "megatron_hetero/reported"
"""Key in the store of the hosts: one of them has ranks that are not to be started again."""


@contextlib.contextmanager
def restarts_that_may_help() -> Iterator[None]:
    """Inside, `--max-restarts` counts for ranks that may fare better next time: those that were killed, that lost
    another rank, or that failed with an exception.
    """
    before, api.LocalElasticAgent = api.LocalElasticAgent, _Agent
    try:
        yield
    finally:
        api.LocalElasticAgent = before


class _Agent(LocalElasticAgent):
    """torchrun's part on a host. It gives up the restarts that are left where a rank has reported a final error."""

    def _monitor_workers(self, worker_group: Any) -> RunResult:  # pyright: ignore[reportIncompatibleVariableOverride], the same
        result: RunResult = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue], torch's decorator
        if result.is_failed() and self._remaining_restarts > 0 and self._is_final(result):
            self._remaining_restarts = 0
        return result

    def _is_final(self, result: RunResult) -> bool:
        """Whether a rank of this host has reported a final error, which other hosts then learn; or one of another."""
        reported = any(map(is_final, result.failures.values()))
        # Without the host that keeps the store there is nobody to report to, and the next rendezvous says so.
        with contextlib.suppress(RuntimeError):
            if self._store is not None and reported:
                self._store.set(_REPORTED, "1")
            elif self._store is not None:
                return self._store.check([_REPORTED])
        return reported


def is_final(failure: ProcessFailure) -> bool:
    """Whether the rank has left word that it would fail again."""
    said = failure.message
    return isinstance(said, dict) and bool(said.get("extraInfo", {}).get(FINAL))
