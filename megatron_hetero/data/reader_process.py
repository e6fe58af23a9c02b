"""A process that reads for a rank: `python -m megatron_hetero.data.reader_process DESCRIPTOR`, started by `readers`,
and the messages between the two. It ends with its rank, however that ends, since the socket between them closes.
Pickles come from processes of this run alone.

An array arrives in the memory in which it is used: 24 MB of patches in 4 ms, for which the rank's Python lock is hardly
taken. `concurrent.futures` takes 48 ms, as long as decoding takes, and torch's workers take shared memory, of which
containers have little.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import traceback
from typing import Any

from megatron_hetero.base.errors import UserError

_NUMBER = struct.Struct("<Q")


def send(to: socket.socket, value: Any) -> None:
    """Send a value: the number of parts, their lengths, a pickle, and the arrays in it. Raises `OSError` where nobody
    receives any more.
    """
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    parts = [memoryview(data), *(array.raw() for array in arrays)]
    to.sendall(struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)))
    for part in parts:
        to.sendall(part)


def receive(come_from: socket.socket) -> Any:
    """The value that was sent. Raises `EOFError` or `OSError` where nobody sends any more."""
    (count,) = _NUMBER.unpack(_exactly(come_from, _NUMBER.size))
    lengths = struct.unpack(f"<{count}Q", _exactly(come_from, _NUMBER.size * count))
    data, *arrays = (_exactly(come_from, length) for length in lengths)
    return pickle.loads(data, buffers=arrays)


def _exactly(come_from: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = come_from.recv_into(view[done:])
        if not got:
            raise EOFError("the other process has ended")
        done += got
    return data


def main(descriptor: int) -> None:
    """Receive a reader, then calls of its methods (name, argument) until the rank ends, and answer each."""
    with socket.socket(fileno=descriptor) as rank:
        try:
            reader = receive(rank)
            while True:
                send(rank, _answer(reader, *receive(rank)))
        except (EOFError, ConnectionError):  # It has.
            return


def _answer(reader: Any, method: str, argument: Any) -> tuple[Any, str | None, str | None]:
    """What a call returned; or the message of its `UserError`, or the trace of another error."""
    try:
        return getattr(reader, method)(argument), None, None
    except UserError as error:
        return None, str(error), None
    except Exception:
        return None, None, traceback.format_exc()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # There is nothing to save, and taking the libraries down may take a second.
