"""Shapes of hidden states, compared before they are sent: a receive buffer of another shape with as many bytes would be
filled without an error, and one of another size would hang or abort.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

_POLL_S = 0.005


class AnnouncedShapes:
    """Compares the first hidden states on each link of this rank, through a store. The receiver announces the shape of
    its buffer, the sender its verdict.

    `name`: the same on all ranks, and of no others. Waits have no time-out of their own: a watchdog ends those that
    take too long.
    """

    def __init__(self, name: str):
        self._store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._seen: set[tuple[str, str]] = set()

    def announce(self, link: str, shape: Sequence[int]) -> None:
        """State what this rank expects first."""
        if self._first(link, "announce"):
            self._store.set(f"{link} expects", str(tuple(shape)))

    def misfit_to_send(self, link: str, shape: Sequence[int]) -> str:
        """What the receiver expects where this rank sends something else first; else empty. Waits for the receiver."""
        if not self._first(link, "send"):
            return ""
        expected = self._get(f"{link} expects")
        fits = expected == str(tuple(shape))
        self._store.set(f"{link} gets", "" if fits else str(tuple(shape)))
        return "" if fits else expected

    def misfit_to_receive(self, link: str) -> str:
        """What the sender has instead of what this rank expects first; else empty. Waits for the sender."""
        return self._get(f"{link} gets") if self._first(link, "receive") else ""

    def _first(self, link: str, what: str) -> bool:
        first = (link, what) not in self._seen
        self._seen.add((link, what))
        return first

    def _get(self, key: str) -> str:
        while not self._store.check([key]):
            time.sleep(_POLL_S)
        return self._store.get(key).decode()
