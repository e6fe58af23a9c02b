"""What a rank asks of the coordinator, and what it is told to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Key = str | tuple[int, int]
"""What ranks connect for: an algorithm of all ranks, by the collective's name, or messages from one rank to another."""


@dataclass(frozen=True)
class Transfer:
    """One side of a point-to-point transfer: elements of a type to or from a rank of the world."""

    sends: bool
    peer: int
    elements: int
    dtype: str

    def __str__(self) -> str:
        return f"{'send to' if self.sends else 'receive from'} rank {self.peer} of {self.elements} {self.dtype}"


@dataclass(frozen=True)
class Request:
    """An operation as one rank issues it.

    `communicator` names it to the coordinator, `name` to people; `ranks` are those of the world in its order. A
    collective has a `signature`, equal on all ranks; `sent` and `received` are its elements by member, where they
    differ; `colour` the ranks that a split puts this rank with. A point-to-point operation has `transfers` instead.
    """

    communicator: str
    name: str
    ranks: tuple[int, ...]
    thread: str
    where: str
    signature: tuple[Any, ...] = ()
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    colour: tuple[int, ...] | None = None
    transfers: tuple[Transfer, ...] = ()
    on_device: bool = True

    def connects(self, rank: int) -> frozenset[Key]:
        """What `rank` must have connected for before this. An all-to-all is messages, a barrier an all-reduce."""
        if not self.on_device:
            return frozenset()
        if self.transfers:
            return frozenset((rank, t.peer) if t.sends else (t.peer, rank) for t in self.transfers)
        to = [(rank, other) for other, n in zip(self.ranks, self.sent, strict=False) if n]
        back = [(other, rank) for other, n in zip(self.ranks, self.received, strict=False) if n]
        name = str(self.signature[0])
        collective = [] if name == "all_to_all" else ["all_reduce" if name == "barrier" else name]
        return frozenset((*collective, *(pair for pair in (*to, *back) if pair != (rank, rank))))

    def __str__(self) -> str:
        return f"{self.what} on {self.name!r} ({', '.join(map(str, self.ranks))})"

    @property
    def what(self) -> str:
        """The operation, in words."""
        if self.transfers:
            return " and ".join(map(str, self.transfers))
        if self.signature == SPLIT:
            return f"split with ranks {list(self.colour)}" if self.colour else "split with no colour"
        sizes = f" of {list(self.sent)}, {list(self.received)}" if self.sent or self.received else ""
        return " ".join(map(str, self.signature)) + sizes


SPLIT = ("split",)
"""The signature of a split: its colours differ by rank."""


@dataclass(frozen=True)
class Move:
    """Tells a rank that an operation, or one transfer of it, has ended and its numbers may move."""

    communicator: str
    index: int
    transfer: int | None = None
