"""Values from one process to another over a socket; large arrays through memory that both map, which has no name.

    header | lengths of the arrays in that memory | pickle          and, with the header, the memory's descriptor

The receiver maps the memory and lets go of the descriptor, so that nothing outlives the two processes, however they
end. Pickles come from processes of this run alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import finalize

_HEADER = struct.Struct("<QQ")
"""The number of arrays in the memory, and bytes of the pickle."""
_LEAST = 1 << 16
"""Bytes of the smallest array that is worth it."""
_ALIGNED = 64
_SHARES_MEMORY = hasattr(os, "memfd_create")
"""Linux can."""


class Answer(NamedTuple):
    """What a call returned; or the message of its `UserError`, or the trace of another error."""

    value: Any = None
    refusal: str | None = None
    trace: str | None = None


def send(to: socket.socket, value: Any) -> None:
    """Raises `OSError` where nobody receives any more."""
    arrays: list[memoryview] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=lambda array: _stays(array, arrays))
    lengths = [len(array) for array in arrays]
    head = _HEADER.pack(len(lengths), len(data)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    if not arrays:
        to.sendall(head + data)
        return
    memory = _written(arrays)
    try:
        sent = socket.send_fds(to, [head], [memory])
    finally:
        os.close(memory)
    to.sendall(head[sent:] + data)


def receive(come_from: socket.socket) -> Any:
    """What was sent. Its large arrays can be written to, and are unmapped with the last that refers to them.

    Raises `EOFError` or `OSError` where nobody sends any more.
    """
    head, descriptors, *_ = socket.recv_fds(come_from, _HEADER.size, 1)
    try:
        count, size = _HEADER.unpack(head + _exactly(come_from, _HEADER.size - len(head)))
        lengths = struct.unpack(f"<{count}Q", _exactly(come_from, 8 * count))
        data = _exactly(come_from, size)
        return pickle.loads(data, buffers=_mapped(descriptors[0], lengths) if count else ())
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _stays(array: pickle.PickleBuffer, others: list[memoryview]) -> bool:
    """Whether an array is part of the pickle; otherwise it is added to `others`."""
    raw = array.raw()
    if not _SHARES_MEMORY or len(raw) < _LEAST:
        return True
    others.append(raw)
    return False


def _written(arrays: Sequence[memoryview]) -> int:
    """The descriptor of memory that the arrays have been written to."""
    memory = os.memfd_create("arrays")
    try:
        for array, start in zip(arrays, _starts([len(array) for array in arrays]), strict=False):
            done = 0
            while done < len(array):  # Linux writes 2 GB at a time.
                done += os.pwrite(memory, array[done:], start + done)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _mapped(memory: int, lengths: Sequence[int]) -> list[memoryview]:
    """By the system's own call: Python's `mmap` keeps a descriptor open for each map, of which a step has hundreds, and
    leaves it to the reader to wait for each page.
    """
    size, system = os.fstat(memory).st_size, _system()
    address = system.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE, memory, 0)
    if address == ctypes.c_void_p(-1).value:
        raise MemoryError(f"{size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
    block = (ctypes.c_ubyte * size).from_address(address)
    finalize(block, system.munmap, address, size).atexit = False
    view = memoryview(block)
    return [view[start : start + length] for start, length in zip(_starts(lengths), lengths, strict=False)]


@cache
def _system() -> Any:
    system: Any = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
    system.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
    return system


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where each array begins."""
    return [0, *accumulate(-(-length // _ALIGNED) * _ALIGNED for length in lengths)]


def _exactly(come_from: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = come_from.recv_into(view[done:])
        if not got:
            raise EOFError("the other process has ended")
        done += got
    return data
