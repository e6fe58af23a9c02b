"""A rank's side: issues operations to the coordinator, and moves their numbers through gloo when it says so."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tests.support.nccl_rules.requests import Key, Move, Request
from tests.support.nccl_rules.waiting import MAIN

HERE = str(Path(__file__).parent)
DEVICE, HOST = "nccl_rules", "host_rules"
"""The names of the backends: with NCCL's rules, and gloo whose ranks wait where the coordinator sees it."""


@dataclass(eq=False)
class Flight:
    """An operation that has been issued. `moves`: what to do with the numbers, one function for each transfer."""

    moves: Sequence[Callable[[], None]]
    left: int
    done: threading.Event = field(default_factory=threading.Event)
    problem: str | None = None


class Client:
    """Talks to the coordinator. One thread moves numbers, in the coordinator's order, which is one for all ranks."""

    def __init__(self, connection: Connection, store: dist.Store, rank: int, ranks: int):
        self.rank, self.ranks = rank, tuple(range(ranks))
        self.actions = threading.local()
        """`described`: what the thread is doing, as the runner tells the watchdog."""
        self.in_step = False
        """Whether the ranks must have connected: in a step hosts never wait, and nothing is allocated."""
        self.takes_as_connected = False
        """Whether ranks count as connected from the start, for jobs that are about other rules."""
        self._connected: set[tuple[str, Key]] = set()
        self._meetings: dict[str, threading.Event] = {}
        self._connection, self._store = connection, store
        self._lock = threading.Lock()
        self._issued: dict[str, int] = {}
        self._flights: dict[tuple[str, int], Flight] = {}
        self._groups: dict[tuple[int, ...], Any] = {}
        self._broken: str | None = None
        self._idle = threading.Event()
        threading.Thread(target=self._listen, name="nccl-rules", daemon=True).start()

    def issue(self, request: Request, moves: Sequence[Callable[[], None]]) -> Work:
        """Issue an operation, without waiting for it, but for ranks to connect."""
        self._meet(request)
        with self._lock:
            if self._broken:
                raise RuntimeError(self._broken)
            index = self._issued.get(request.communicator, 0)
            self._issued[request.communicator] = index + 1
            flight = self._flights[request.communicator, index] = Flight(moves, len(moves))
            self._connection.send(("issue", request))
        return Work(self, request.communicator, index, flight)

    def _meet(self, request: Request) -> None:
        """The host waits in the first use of each algorithm of a communicator, and of messages between two ranks."""
        keys = {key for key in request.connects(self.rank) if (request.communicator, key) not in self._connected}
        if not keys or self.takes_as_connected:
            return
        if self.in_step:
            raise RuntimeError(f"rank {self.rank}, {request.where}: {request} connects ranks in a step")
        with self._lock:
            if self._broken:
                raise RuntimeError(self._broken)
            met = self._meetings[request.thread] = threading.Event()
            self._connection.send(("meet", request, keys))
        met.wait()
        self._connected.update((request.communicator, key) for key in keys)

    def wait(self, communicator: str, index: int, flight: Flight) -> None:
        """Wait until the numbers of an operation have moved. `RuntimeError` where they never will."""
        if not flight.done.is_set():
            with self._lock:
                if not flight.done.is_set():
                    self._connection.send(("wait", threading.current_thread().name, communicator, index, self.where()))
            flight.done.wait()
        if flight.problem is not None:
            raise RuntimeError(flight.problem)

    def init_process_group(self, **options: Any) -> None:
        """Begin a job: `dist.init_process_group` with the backend of the device, eagerly, as with `device_id`."""
        dist.init_process_group(DEVICE, **options)
        world: Any = dist.group.WORLD
        # What makes `torch` split it. It must be an accelerator; nothing is put there.
        world.bound_device_id = torch.device("cuda", 0)

    def finish(self) -> None:
        """End a job together with all ranks. `RuntimeError` where something of it never ends, or broke a rule."""
        self._idle.clear()
        with self._lock:
            self._connection.send(("finish",))
        self._idle.wait()
        with self._lock:
            problem, self._broken = self._broken, None
            self._connected.clear()
            self.takes_as_connected = False
            self._issued.clear()
            self._flights.clear()
        if problem:
            raise RuntimeError(problem)

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The gloo group that moves the numbers of all communicators of these ranks. For the thread that moves."""
        if ranks not in self._groups:
            store = dist.PrefixStore(f"moves {ranks}/", self._store)
            self._groups[ranks] = dist.ProcessGroupGloo(
                store, ranks.index(self.rank), len(ranks), timedelta(seconds=600)
            )
        return self._groups[ranks]

    def where(self) -> str:
        """What the calling thread is doing: the action, if any, and the innermost line of the program."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_foreign(frame.f_code.co_filename):
            frame = frame.f_back
        place = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        described = getattr(self.actions, "described", None)
        return place if described is None else f"{described().rstrip(',')} ({place})"

    def _listen(self) -> None:
        torch.set_num_threads(1)
        # Moves what two ranks send each other, on any communicator; the others would not come to make it later.
        self.group(self.ranks)
        while True:
            try:
                what, *rest = self._connection.recv()
            except (EOFError, OSError):
                self._break("the coordinator has gone")
                return self._idle.set()
            match what:
                case "met":
                    self._meetings.pop(rest[0]).set()
                case "move":
                    for move in rest[0]:
                        self._move(move)
                case "broken":
                    self._break(rest[0])
                case "idle":
                    self._idle.set()

    def _move(self, move: Move) -> None:
        flight = self._flights[move.communicator, move.index]
        try:
            with torch.no_grad():
                if flight.moves:
                    flight.moves[move.transfer or 0]()
        except Exception as error:
            flight.problem = f"{type(error).__name__}: {error}"
        flight.left -= 1
        if flight.left <= 0:
            del self._flights[move.communicator, move.index]
            flight.done.set()

    def _break(self, text: str) -> None:
        with self._lock:
            self._broken = text
            flights, meetings = list(self._flights.values()), list(self._meetings.values())
            self._meetings.clear()
        for met in meetings:
            met.set()
        for flight in flights:
            flight.problem = flight.problem or text
            flight.done.set()


def _is_foreign(file: str) -> bool:
    """Whether a file is a library's, or of this folder."""
    return file.startswith(HERE) or "site-packages" in file or file == contextlib.__file__


class Work(dist.Work):
    """What an operation returns."""

    def __init__(self, client: Client, communicator: str, index: int, flight: Flight):
        super().__init__()
        self._client, self._flight, self._place = client, flight, (communicator, index)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """What is issued afterwards begins when the operation has ended."""
        self._client.wait(*self._place, self._flight)
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended."""
        return self._flight.done.is_set()


def request(
    client: Client, communicator: str, name: str, ranks: tuple[int, ...], *, on_device: bool, **details: Any
) -> Request:
    """A request of the calling thread."""
    thread = threading.current_thread().name
    return Request(communicator, name, ranks, thread or MAIN, client.where(), on_device=on_device, **details)
