"""Serves the rules to the processes of a pool: a thread of the process that owns it, one connection for each rank."""

from __future__ import annotations

import selectors
import threading
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.support.nccl_rules.rules import Broken, Rules


class Coordinator:
    """Listens to `connections`, one by rank.

    Messages are ("meet", request, keys), ("issue", request), ("wait", thread, communicator, index, where) and
    ("finish",); answers are ("met", thread), ("move", moves), ("broken", text) and ("idle",), once all ranks have
    finished a job; then the next begins.
    """

    def __init__(self, connections: list[Connection], *, one_connection: bool = False):
        self._connections, self._one_connection = connections, one_connection
        self._job = _Job(Rules(len(connections), one_connection=one_connection))
        self._thread = threading.Thread(target=self._serve, name="nccl-rules", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until all ranks have hung up."""
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    try:
                        message = self._connections[rank].recv()
                    except (EOFError, OSError):
                        selector.unregister(self._connections[rank])
                        self._break(f"the process of rank {rank} has ended")
                        continue
                    self._handle(rank, message)

    def _handle(self, rank: int, message: tuple[Any, ...]) -> None:
        job = self._job
        try:
            if message[0] == "finish":
                job.finished.add(rank)
            if not job.broken:
                for host, thread in getattr(job.rules, message[0])(rank, *message[1:]) or ():
                    self._send([host], ("met", thread))
                self._send_moves()
        except Broken as broken:
            self._send_moves()
            self._break(str(broken))
        except Exception:  # Nobody else would tell the ranks.
            self._break(traceback.format_exc())
        if len(job.finished) == len(self._connections):
            self._job = _Job(Rules(len(self._connections), one_connection=self._one_connection))
            self._send(range(len(self._connections)), ("idle",))

    def _send_moves(self) -> None:
        by_rank = defaultdict(list)
        for rank, move in self._job.rules.take_moves():
            by_rank[rank].append(move)
        for rank, moves in by_rank.items():
            self._send([rank], ("move", moves))

    def _break(self, text: str) -> None:
        """Tell all ranks; what they issue afterwards in this job is not listened to."""
        if not self._job.broken:
            self._job.broken = True
            self._send(range(len(self._connections)), ("broken", text))

    def _send(self, ranks: Any, message: tuple[Any, ...]) -> None:
        for rank in ranks:
            try:
                self._connections[rank].send(message)
            except OSError:
                continue  # It has hung up, which is noticed when it is read from.


@dataclass
class _Job:
    rules: Rules
    finished: set[int] = field(default_factory=set)
    broken: bool = False
