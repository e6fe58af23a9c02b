"""From records to what ranks train on, one record or item at a time: in this process, or in others, which take little
time from the threads that train, where threads of one process take turns with them for Python's lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import finalize

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.data import reader_process
from megatron_hetero.data.dealing import SampleMetadata
from megatron_hetero.data.packing import TokenizedSample, check_length, check_patches, check_text
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.reader_process import receive, send
from megatron_hetero.data.records import Record
from megatron_hetero.models.items.types import ItemShape, Piece

# Not in the processes, which are to start fast.
if TYPE_CHECKING:
    from megatron_hetero.job import JobSpec

_ENDS_S = 5.0
"""How long a process may take to end once its socket has closed."""
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a group of processes is sent: a rank decides how its processes end."""


class Wanted(NamedTuple):
    """Some pieces of item `number` of a record."""

    record: Record
    number: int
    pieces: Sequence[Piece]


class Reader(Protocol):
    """Reads, from any thread. What is wrong with the data is a `UserError`."""

    def tokenise(self, record: Record) -> TokenizedSample | None:
        """A record as tokens; None where it is too long, and such are skipped."""
        ...

    def patches(self, wanted: Wanted) -> np.ndarray:
        """Pieces as their encoder takes them, one after the other, fp32 [patches, elements of a patch]."""
        ...


@dataclass(frozen=True, eq=False)
class SampleReader:
    """The `Reader` of this process. Can be pickled.

    `encoders`: by name. `max_seq_length`, `most_patches`: of a sample, for each encoder; None: any number. `too_long`:
    what is done with a longer one.
    """

    processor: Processor
    encoders: Mapping[str, ItemShape]
    max_seq_length: int
    too_long: Any
    most_patches: int | None = None

    def tokenise(self, record: Record) -> TokenizedSample | None:
        """See `Reader`."""
        if not check_text(record, self.max_seq_length, self.too_long):
            return None
        sample = self.processor.tokenize(record)
        if not check_length(sample, self.max_seq_length, self.too_long):
            return None
        most = self.most_patches
        return sample if most is None or check_patches(sample, self._patches_of(sample), most, self.too_long) else None

    def patches(self, wanted: Wanted) -> np.ndarray:
        """See `Reader`."""
        return self.processor.patches(*wanted)

    def _patches_of(self, sample: TokenizedSample) -> int:
        """The patches of a sample's items, of the encoder for which it has most."""
        return max(SampleMetadata.of(sample, list(self.encoders)).patches(self.encoders))


class ReaderProcesses:
    """Does what `reader` does, in `count` processes: as many threads as that find one free."""

    def __init__(self, reader: Reader, count: int):
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        processes = [_Process(reader) for _ in range(count)]
        for each in processes:
            self._idle.put(each)
        self.close = finalize(self, _close, processes)
        """Ends the processes; so does the end of this one."""

    def tokenise(self, record: Record) -> TokenizedSample | None:
        """See `Reader`."""
        return self._ask("tokenise", record, record)

    def patches(self, wanted: Wanted) -> np.ndarray:
        """See `Reader`."""
        return self._ask("patches", wanted, wanted.record)

    def _ask(self, method: str, argument: Any, record: Record) -> Any:
        free = self._idle.get()
        try:
            return free.ask(method, argument, record)
        finally:
            self._idle.put(free)


class _Process:
    """One process, once it is needed. For one thread at a time."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, method: str, argument: Any, record: Record) -> Any:
        """The result of a call there. Raises what that raises, and `UserError` where the process has ended."""
        try:
            to = self._socket or self._start()
            send(to, (method, argument))
            value, refusal, trace = receive(to)
        except (EOFError, OSError) as error:
            raise self._ended(record) from error
        if refusal is not None:
            raise UserError(refusal)
        if trace is not None:
            raise RuntimeError(f"in a process of data.workers:\n{trace}")
        return value

    def _start(self) -> socket.socket:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", reader_process.__name__, str(theirs.fileno())]
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)  # Which it inherits.
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env=_environment(), stdin=subprocess.DEVNULL
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        send(self._socket, self._reader)
        return self._socket

    def _ended(self, record: Record) -> UserError:
        code = self._status()
        self.close()
        how = f"was ended by signal {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"
        return UserError.at(
            "data.worker_type process (--data.worker_type)",
            problem=f"a worker process {how} while it read {record.where}",
            because="that is how the system ends processes where memory runs out" if code == -signal.SIGKILL else "",
            fix="look at its output above and at the system's log; with too little memory lower data.workers",
        )

    def _status(self) -> int | None:
        """That of the process, which is ending."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(_ENDS_S)
        return None

    def close(self) -> None:
        """End the process, if it was started. It writes nothing, so that it can be ended at any time."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _close(processes: Iterable[_Process]) -> None:
    for each in processes:
        each.close()


def _environment() -> dict[str, str]:
    """This process's, with its modules, one thread, and without GPUs."""
    modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | alone | {"PYTHONPATH": modules}


def reader_of(job: JobSpec, processor: Processor) -> Reader:
    """What reads samples for a job, in this process or in others."""
    data, budget = job.config.data, job.budget
    most_patches = None if budget is None else budget.patches
    here = SampleReader(processor, job.shapes.encoders, data.max_seq_length, data.too_long, most_patches)
    return ReaderProcesses(here, data.workers) if data.worker_type == "process" else here
