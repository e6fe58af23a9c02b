"""Worker processes, which slow down training less than threads would, since threads compete for Python's lock. Each
worker runs `python -m megatron_hetero.base.worker_process DESCRIPTOR`. It ends when its rank ends for any reason,
because the socket between the two closes. Pickles come from processes of the same run only.

Arrays are received directly into the memory in which they are used, almost without Python's lock: 24 MB of patches
arrive in 4 ms and do not slow down another thread. `concurrent.futures` needs 41 ms and takes 40 % of the other
thread's time meanwhile; torch's workers need shared memory, which containers limit.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any
from weakref import finalize

from megatron_hetero.base.errors import UserError

_NUMBER = struct.Struct("<Q")
_ENDS_S = 5.0
"""Seconds to wait for a process to end after its socket has closed."""
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals sent to a whole process group, which a worker ignores because its rank decides when it ends."""


class Processes:
    """A pool of `count` processes that call methods of a picklable `target`, for any number of threads. Each process is
    started when it is first needed.
    """

    def __init__(self, target: Any, count: int, setting: str):
        """`setting`: name of the user's setting for these processes, for messages."""
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        processes = [_Process(target, setting) for _ in range(count)]
        for each in processes:
            self._idle.put(each)
        self.close = finalize(self, _close, processes)
        """Function that ends the worker processes; it also runs when this process ends."""

    def call(self, what: str, method: str, *arguments: Any) -> Any:
        """Return the result of a method. Raises its errors, and a `UserError` naming `what` if the process ended."""
        free = self._idle.get()
        try:
            return free.call(what, method, *arguments)
        finally:
            self._idle.put(free)


class _Process:
    """A worker process, used by one thread at a time."""

    def __init__(self, target: Any, setting: str):
        self._target, self._setting = target, setting
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, what: str, method: str, *arguments: Any) -> Any:
        """Call a method in this process, as described in `Processes.call`."""
        try:
            to = self._socket or self._start()
            send(to, (method, *arguments))
            answer = receive(to)
        except (EOFError, OSError) as error:
            raise self._ended(what) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> socket.socket:
        self._socket, theirs = socket.socketpair()
        modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"PYTHONPATH": modules, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", __name__, str(theirs.fileno())]
        usual = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # The worker inherits the blocked signals.
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | environment | {"TOKENIZERS_PARALLELISM": "false"},
                    stdin=subprocess.DEVNULL,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, usual)
        send(self._socket, self._target)
        return self._socket

    def _ended(self, what: str) -> UserError:
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_ENDS_S)
        self.close()
        how = f"was ended by signal {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"
        problem = f"a worker process {how} while it read {what}"
        because = "the system kills processes when memory runs out" if code == -signal.SIGKILL else ""
        fix = "look at its output above and at the system's log; with too little memory use fewer workers"
        return UserError.at(self._setting, problem=problem, because=because, fix=fix)

    def close(self) -> None:
        """Kill the process, if it was started. It writes no files, so that it can end at any time."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _close(processes: Iterable[_Process]) -> None:
    for each in processes:
        each.close()


def send(to: socket.socket, value: Any) -> None:
    """Send the number of buffers, their lengths, a pickle of `value`, and the arrays in it. Raises `OSError` if the
    other end is closed.
    """
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    buffers = [memoryview(data), *(array.raw() for array in arrays)]
    to.sendall(struct.pack(f"<{1 + len(buffers)}Q", len(buffers), *map(len, buffers)))
    for buffer in buffers:
        to.sendall(buffer)


def receive(source: socket.socket) -> Any:
    """Receive a value that `send` has sent. Raises `EOFError` or `OSError` if the other end is closed."""
    (count,) = _NUMBER.unpack(_receive_bytes(source, _NUMBER.size))
    lengths = struct.unpack(f"<{count}Q", _receive_bytes(source, _NUMBER.size * count))
    data, *arrays = (_receive_bytes(source, length) for length in lengths)
    return pickle.loads(data, buffers=arrays)


def _receive_bytes(source: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        received = source.recv_into(view[done:])
        if not received:
            raise EOFError("the other process has ended")
        done += received
    return data


def main(descriptor: int) -> None:
    """Receive an object, then answer calls of its methods (name, arguments) until the rank ends."""
    with socket.socket(fileno=descriptor) as rank:
        try:
            target = receive(rank)
            while True:
                send(rank, _answer(target, *receive(rank)))
        except (EOFError, ConnectionError):
            return


def _answer(target: Any, method: str, *arguments: Any) -> Any:
    """Call a method and return its result, or the error for the rank to raise."""
    try:
        return getattr(target, method)(*arguments)
    except UserError as error:
        return error
    except Exception:
        return RuntimeError(f"in a worker process:\n{traceback.format_exc()}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # Unloading libraries may take a second, and there is nothing to save.
