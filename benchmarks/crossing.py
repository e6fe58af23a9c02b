"""Ways over a boundary, from a rank's rows to its shard of the embedding, and gradients back.

ours         plans afresh each time, loads the plan, crosses; rows are put straight into the shard
bridge       `BridgeCommunicator` of Megatron-Core, for modules on different ranks; every tensor-parallel rank gets all
             rows of its replica and keeps those of its shard. Back, the shards' gradients are gathered over tp, as
             Megatron does where it splits activations (`scatter_to_sequence_parallel_region`)
colocated    `ColocatedBridgeCommunicator` of Megatron-Core from 0.18 on, for modules on the same ranks; likewise
all-gather   every rank gets all rows, padded to equal portions, and keeps those of its shard; back, all gradients
             likewise. Replicas contribute different portions, and all indices are made beforehand
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.edges import SAMPLES, Edge
from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import LoadedPlan, load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.groups.megatron import prepare
from megatron_hetero.groups.platform import Platform
from megatron_hetero.layout.layout import Layout

RowIndex = slice | Tensor


@dataclass(frozen=True)
class Case:
    """One rank's part in one edge: `rows` of them in all, each of `width` elements of `dtype`."""

    edge: Edge
    rows: int
    width: int
    dtype: torch.dtype
    rank: int

    @cached_property
    def sides(self) -> tuple[Ownership, Ownership]:
        """Source and destination; not those that ours makes while the clock runs."""
        return self.edge.ownerships(self.rows)

    @property
    def held(self) -> np.ndarray:
        """Ids of the rows that this rank holds."""
        return self.sides[0].held_by(self.rank)

    @property
    def needed(self) -> np.ndarray:
        """Ids of the rows that this rank needs."""
        return self.sides[1].held_by(self.rank)

    @cached_property
    def places(self) -> RowIndex:
        """Where in its shard of the embedding the rows go that this rank needs."""
        return _index(self.edge.token_places(self.rows)[1][self.needed])

    @property
    def tokens(self) -> int:
        """Of this rank's shard of the embedding."""
        group = self.sides[1].members.group_of(self.rank)
        return int(self.edge.token_places(self.rows)[2][group]) if group >= 0 else 0

    @property
    def row_bytes(self) -> int:
        """On the wire."""
        return self.width * self.dtype.itemsize

    def values(self, ids: np.ndarray) -> Tensor:
        """Rows that any rank can make: small integers, which bf16 holds exactly, and no two rows alike."""
        digits = np.stack([ids % 127, ids // 127 % 127, ids // 127**2], axis=1).astype(np.float32)
        column = torch.arange(self.width)
        rows = torch.from_numpy(digits).to(self.dtype).index_select(1, column % 3)
        return rows.add_((column % 61).to(self.dtype))


class System(Protocol):
    """A way over the boundary."""

    def forward(self, rows: Tensor, embedding: Tensor) -> None:
        """From the rows that this rank holds into its shard of the embedding."""

    def backward(self, gradient: Tensor) -> Tensor | None:
        """From the gradient of its shard to that of the rows that this rank holds."""


# ------------------------------------------------------------------------------------------------- ours


class Ours:
    """Plans and crosses."""

    def __init__(self, case: Case, group: dist.ProcessGroup, platform: Platform):
        self._case, self._device = case, platform.device
        # As the program has it: what crosses is counted on the host.
        self._communicator = BoundaryCommunicator(group, platform.device, case.width, case.dtype, check=False)
        self._plan: LoadedPlan | None = None

    def forward(self, rows: Tensor, embedding: Tensor) -> None:
        """See `System`."""
        sides = self._case.edge.ownerships(self._case.rows)
        self._plan = load_plan(plan_boundary(*sides, self._case.row_bytes).rank(self._case.rank), self._device)
        _put(embedding, self._case.places, self._communicator.start_forward(self._plan, rows).wait())

    def backward(self, gradient: Tensor) -> Tensor:
        """See `System`."""
        assert self._plan is not None
        return self._communicator.start_backward(self._plan, _take(gradient, self._case.places)).wait()


# ---------------------------------------------------------------------------- communicators of Megatron-Core


class _Megatron:
    """What both communicators do: rows of whole replicas arrive, of which a rank keeps those of its shard."""

    module: str
    name: str

    def __init__(self, case: Case, group: dist.ProcessGroup, platform: Platform):
        del group
        self._case = case
        self._communicator, self._tp = _communicator(self.module, self.name, case.edge, platform.backend)
        self._sends, self._receives = (case.rank in side.ranks for side in case.sides)
        if self._receives:
            self._find_shard()

    def _find_shard(self) -> None:
        """Which of the rows of its replica are this rank's, and the rows of each tp rank."""
        case = self._case
        peers = case.edge.destination_layout.group_of(case.rank, "tp") if case.edge.sharded else (case.rank,)
        self._counts = [case.sides[1].num_rows(peer) for peer in peers]
        before = sum(self._counts[: peers.index(case.rank)])
        self._own = slice(before, before + len(case.needed))

    def _put(self, embedding: Tensor, received: Tensor) -> None:
        _put(embedding, self._case.places, received.detach().view(-1, self._case.width)[self._own])

    def _gathered(self, gradient: Tensor) -> Tensor:
        """The gradients of all rows of the replica."""
        own = _take(gradient, self._case.places)
        if len(self._counts) == 1:
            return own
        most = max(self._counts)
        padded = own.new_empty(len(self._counts) * most, own.shape[1])
        dist.all_gather_into_tensor(padded, _padded(own, most), group=self._tp)
        return torch.cat([part[:count] for part, count in zip(padded.split(most), self._counts, strict=True)])


class Bridge(_Megatron):
    """For modules on different ranks."""

    module, name = "megatron.core.pipeline_parallel.bridge_communicator", "BridgeCommunicator"

    def forward(self, rows: Tensor, embedding: Tensor) -> None:
        """See `System`."""
        self._communicator.comm_dtype = self._case.dtype
        if self._sends:
            self._communicator.send_forward(self._samples(rows))
        if self._receives:
            self._put(embedding, self._communicator.recv_forward())

    def backward(self, gradient: Tensor) -> Tensor | None:
        """See `System`."""
        if self._receives:
            self._communicator.send_backward(self._samples(self._gathered(gradient)))
        return self._communicator.recv_backward().view(-1, self._case.width) if self._sends else None

    def _samples(self, rows: Tensor) -> Tensor:
        return rows.view(-1, self._case.rows // SAMPLES, self._case.width)


class Colocated(_Megatron):
    """For modules on the same ranks."""

    module, name = "megatron.core.models.mimo.comm.colocated_communicator", "ColocatedBridgeCommunicator"

    def forward(self, rows: Tensor, embedding: Tensor) -> None:
        """See `System`."""
        self._rows = rows.detach().requires_grad_()
        self._received = self._communicator.communicate(self._rows)
        self._put(embedding, self._received)

    def backward(self, gradient: Tensor) -> Tensor:
        """See `System`."""
        return torch.autograd.grad(self._received, self._rows, self._gathered(gradient))[0]


@cache
def _communicator(module: str, name: str, edge: Edge, backend: str) -> tuple[Any, Any]:
    """A communicator, and the destination's group over tp. Built once for an edge: groups last as long as processes."""
    from megatron.core.hyper_comm_grid import HyperCommGrid

    def on_backend(create: Any) -> Any:
        return lambda ranks, **options: create(ranks, **options | {"backend": backend})  # in place of a literal "nccl"

    def grid(layout: Layout) -> HyperCommGrid:
        degrees = {"tp": layout.tp, "cp": layout.sp * layout.cp, "dp": layout.dp, "pp": layout.pp}  # It has no sp.
        return HyperCommGrid(list(degrees.values()), list(degrees), rank_offset=layout.ranks[0])

    creators = ("new_group", "new_subgroups_by_enumeration")
    source, destination = grid(edge.source_layout), grid(edge.destination_layout)
    with mock.patch.multiple(dist, **{create: on_backend(getattr(dist, create)) for create in creators}):
        communicator = getattr(importlib.import_module(module), name)(source, destination)
        return communicator, destination.create_pg("tp")


# ------------------------------------------------------------------------------------------- all-gather


class AllGather:
    """Everything to everybody."""

    def __init__(self, case: Case, group: dist.ProcessGroup, platform: Platform):
        del platform
        self._case, self._group = case, group
        source, destination = case.sides
        self._out = _Portions(source, destination, case, group)
        self._back = _Portions(destination, source, case, group)

    def forward(self, rows: Tensor, embedding: Tensor) -> None:
        """See `System`."""
        _put(embedding, self._case.places, self._out.exchange(rows))

    def backward(self, gradient: Tensor) -> Tensor:
        """See `System`."""
        return self._back.exchange(_take(gradient, self._case.places))


class _Portions:
    """An equal portion of rows from every rank, padded; each row in one portion."""

    def __init__(self, held: Ownership, needed: Ownership, case: Case, group: dist.ProcessGroup):
        self._group, self._own, self._most = group, slice(0, 0), 0
        place, ranks = np.zeros(case.rows, np.int64), case.edge.ranks
        bounds = {}
        for members, ids in zip(held.groups, held.rows, strict=True):
            edges = [len(ids) * i // len(members) for i in range(len(members) + 1)]
            bounds |= {rank: (ids, edges[i], edges[i + 1]) for i, rank in enumerate(members)}
        self._most = max(end - begin for _, begin, end in bounds.values())
        for rank, (ids, begin, end) in bounds.items():
            place[ids[begin:end]] = ranks.index(rank) * self._most + np.arange(end - begin)
            if rank == case.rank:
                self._own = slice(begin, end)
        self._wanted = _index(place[needed.held_by(case.rank)])

    def exchange(self, rows: Tensor) -> Tensor:
        """The rows that this rank needs, from those that it holds."""
        everything = rows.new_empty(self._group.size() * self._most, rows.shape[1])
        dist.all_gather_into_tensor(everything, _padded(rows[self._own], self._most), group=self._group)
        return _take(everything, self._wanted)


MEGATRON = {"bridge": Bridge, "colocated": Colocated}
SYSTEMS = {"ours": Ours, **MEGATRON, "all-gather": AllGather}


def _padded(rows: Tensor, length: int) -> Tensor:
    if len(rows) == length:
        return rows.contiguous()
    padded = rows.new_empty(length, rows.shape[1])
    padded[: len(rows)] = rows
    return padded


def _index(places: np.ndarray) -> RowIndex:
    """A slice where the places are a run: nobody pays for copies that are not needed."""
    if not len(places):
        return slice(0, 0)
    run = np.array_equal(places, np.arange(places[0], places[0] + len(places)))
    return slice(int(places[0]), int(places[-1]) + 1) if run else torch.from_numpy(places)


def _take(rows: Tensor, index: RowIndex) -> Tensor:
    return rows[index] if isinstance(index, slice) else rows.index_select(0, index)


def _put(target: Tensor, index: RowIndex, rows: Tensor) -> None:
    if isinstance(index, slice):
        target[index] = rows
    else:
        target.index_copy_(0, index, rows)


# ---------------------------------------------------------------------------------------------- measuring


class ReceivedBytes(TorchDispatchMode):
    """Inside, counts the bytes that really reach this rank from others, whoever asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            self.bytes += _RECEIVED[name](args, _group(args)) if name in _RECEIVED else _none(name)
        return func(*args, **(kwargs or {}))


def _none(name: str) -> int:
    assert name in ("send", "barrier", "allreduce"), f"nobody counts the bytes of {name}"
    return 0


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))


def _of_all_to_all(args: Sequence[Any], group: dist.ProcessGroup) -> int:
    output, splits = args[0], args[3]
    return output.nbytes // max(1, len(output)) * (sum(splits) - splits[group.rank()])


_RECEIVED = {
    "alltoall_base": _of_all_to_all,
    "recv": lambda args, group: sum(tensor.nbytes for tensor in args[0]),
    "broadcast": lambda args, group: sum(t.nbytes for t in args[0]) * (group.rank() != args[2]),
    "allgather_base": lambda args, group: args[0].nbytes - args[1].nbytes,
}
"""Bytes that reach this rank; barriers are left out."""


def _least(held: Ownership, needed: Ownership, rank: int) -> int:
    """The fewest rows that a rank can receive of those that it needs."""
    return len(np.setdiff1d(np.intersect1d(needed.held_by(rank), held.ids), held.held_by(rank)))


class CrossingBench:
    """What each process runs."""

    def __init__(self, platform: Platform):
        prepare(platform)
        self._platform, self._rank = platform, dist.get_rank()
        self._groups: dict[tuple[int, ...], Any] = {}

    def prepare(self, edge: Edge, rows: int, width: int, dtype: str, names: Sequence[str]) -> tuple[int, int]:
        """Get ready for a case; the least bytes that this rank must receive, and all ranks together, both ways."""
        group = self._group(edge.ranks)
        self._takes_part = self._rank in edge.ranks
        case = self._case = Case(edge, rows, width, getattr(torch, dtype), self._rank)
        self._systems = {}
        for name in names:  # Megatron's make groups, so that all processes must ask for them.
            if self._takes_part or name in MEGATRON:
                self._systems[name] = SYSTEMS[name](case, group, self._platform)
        plan = plan_boundary(*case.sides, case.row_bytes)
        least = sum(direction.minimum_total for direction in plan.directions.values()) * case.row_bytes
        if not self._takes_part:
            return 0, least
        self._rows, self._gradient = case.values(case.held), torch.zeros(case.tokens, width, dtype=case.dtype)
        self._embedding = torch.zeros_like(self._gradient)
        _put(self._gradient, case.places, case.values(case.needed))
        source, destination = case.sides
        own = _least(source, destination, self._rank) + _least(destination, source, self._rank)
        return own * case.row_bytes, least

    def _group(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks))
        return self._groups[ranks]

    def check(self, name: str) -> int:
        """Cross both ways; what arrives must be right on every rank, to the bit. The bytes that this rank received."""
        if not self._takes_part:
            return 0
        case = self._case
        with ReceivedBytes() as received:
            self._embedding.zero_()
            self._systems[name].forward(self._rows, self._embedding)
            gradient = self._systems[name].backward(self._gradient)
        assert torch.equal(self._embedding, self._gradient), f"{name}: wrong rows"
        if gradient is not None:  # What crosses back are the same values, so that they must be those that crossed.
            assert torch.equal(gradient, self._rows) or not len(case.held), f"{name}: wrong gradients"
        else:
            assert not len(case.held), f"{name}: no gradients"
        return received.bytes

    def measure(self, name: str) -> tuple[float, float]:
        """Seconds forward and backward of this rank; all start together."""
        return (
            self._seconds(lambda: self._systems[name].forward(self._rows, self._embedding)),
            self._seconds(lambda: self._systems[name].backward(self._gradient)),
        )

    def _seconds(self, work: Any) -> float:
        dist.barrier()
        begin = time.perf_counter()
        if self._takes_part:
            work()
            self._platform.synchronize()
        return time.perf_counter() - begin

    def forget(self) -> None:
        """Give the memory of the case back."""
        self._systems = {}
        self._takes_part = False
        self._rows = self._gradient = self._embedding = torch.zeros(0)
