"""The process group: `torch.distributed` calls it, and `Client` does what it says."""

# `torch` calls these methods by position; their parameters have the names that are used here.
# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false, reportAssignmentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.nccl_rules.client import DEVICE, HOST, Client, Work, request
from tests.support.nccl_rules.requests import SPLIT, Transfer

CPU = torch.device("cpu")
WORLD = "world"


class RulesGroup(dist.ProcessGroup):
    """A communicator. `parent`: what it is split from; None for the default group and for groups of the host.

    It stands for its own backend too, as `torch` asks a process group for one.
    """

    supports_coalescing = True
    supports_time_estimate = False
    options = None

    def __init__(
        self,
        client: Client,
        key: str,
        ranks: tuple[int, ...],
        store: dist.Store,
        *,
        on_device: bool = True,
        parent: RulesGroup | None = None,
    ):
        super().__init__(ranks.index(client.rank), len(ranks))  # pyright: ignore[reportCallIssue]
        self.client, self.key, self.ranks, self.store = client, key, ranks, store
        self.on_device, self.parent = on_device, parent
        self._name, self._description = key, "undefined"
        self._splits = 0
        self._batch: list[tuple[Transfer, Callable[[], None]]] | None = None

    # ------------------------------------------------------------------------------------------- as torch sees it

    @property
    def group_name(self) -> str:
        """As `torch` names it; C++ keeps names for its own classes only."""
        return self._name

    @property
    def group_desc(self) -> str:
        """As whoever made it describes it."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    @property
    def supports_splitting(self) -> bool:
        """Whether communicators come from it by splits."""
        return self.on_device

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> RulesGroup:
        return self

    def _get_backend_name(self) -> str:
        return DEVICE if self.on_device else HOST

    def getBackendName(self) -> str:
        """As C++ asks."""
        return self._get_backend_name()

    def get_group_store(self) -> dist.Store:
        """Of the group."""
        return self.store

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        """Nothing to shut down: the gloo groups serve later communicators."""

    def abort(self) -> None:
        """As `shutdown`."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing here waits for a time."""

    # ------------------------------------------------------------------------------------------------------- splits

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Become a communicator: `torch` calls this on the ranks of a new group, when it has made the object."""
        assert self.parent is not None
        self.key = self.parent.enter_split(self.ranks)

    def make(self) -> RulesGroup:
        """Meet the other ranks, as the groups of the host do."""
        self._issue("make", ()).wait()
        return self

    def perform_nocolor_split(self, device: torch.device) -> None:
        """`torch` calls this on the ranks outside a new group, whatever its backend."""
        self.enter_split(None)

    def enter_split(self, colour: tuple[int, ...] | None) -> str:
        """Enter the next split of this communicator; gives the name of the new one. The host waits."""
        key = f"{self.key}/{self._splits}:{','.join(map(str, colour or ()))}"
        self._splits += 1
        self._issue(None, (), signature=SPLIT, colour=colour, on_device=False).wait()
        return key

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> RulesGroup | None:
        """As `dist.split_group` calls it, on all ranks."""
        ranks = tuple(self.ranks[rank] for rank in new_ranks)
        if self.client.rank not in ranks:
            self.enter_split(None)
            return None
        store = dist.PrefixStore(f"{group_name}/", self.store)
        child = RulesGroup(self.client, self.enter_split(ranks), ranks, store, parent=self)
        child._set_group_name(str(group_name))
        child._set_group_desc(group_desc or "undefined")
        return child

    # -------------------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """In place."""
        (tensor,) = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = opts or dist.AllreduceOptions()
        return self._issue("all_reduce", [tensor], lambda gloo: gloo.allreduce([tensor], opts), _name(opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        """In place, all at once."""
        single = dist.AllreduceOptions()
        single.reduceOp = opts.reduceOp
        return self._issue(
            "all_reduce", tensors, lambda gloo: _all(gloo.allreduce([t], single) for t in tensors), _name(opts)
        )

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        """From member `opts.rootRank`."""
        return self._issue(
            "broadcast", tensors, lambda gloo: gloo.broadcast(tensors, opts), f"from member {opts.rootRank}"
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """To member `opts.rootRank`."""
        return self._issue(
            "reduce", tensors, lambda gloo: gloo.reduce(tensors, opts), _name(opts), f"to member {opts.rootRank}"
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Into lists of tensors."""
        return self._issue("all_gather", inputs, lambda gloo: gloo.allgather(outputs, inputs))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """To member `opts.rootRank`."""
        to = f"to member {opts.rootRank}"
        return self._issue("gather", inputs, lambda gloo: gloo.gather(outputs, inputs, opts), to)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        """From member `opts.rootRank`."""
        source = f"from member {opts.rootRank}"
        return self._issue("scatter", outputs, lambda gloo: gloo.scatter(outputs, inputs, opts), source)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Into one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Into one tensor each, all at once."""
        opts = opts or dist.distributed_c10d.AllgatherOptions()
        pairs = list(zip(outputs, inputs, strict=True))
        for output, input in pairs:
            _require_size(output, input.numel() * len(self.ranks), "all_gather")
        return self._issue("all_gather", inputs, lambda gloo: _all(gloo._allgather_base(o, i, opts) for o, i in pairs))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """From one tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """From one tensor each, all at once."""
        opts = opts or dist.ReduceScatterOptions()
        pairs = list(zip(outputs, inputs, strict=True))
        for output, input in pairs:
            _require_size(input, output.numel() * len(self.ranks), "reduce_scatter")
        return self._issue(
            "reduce_scatter",
            outputs,
            lambda gloo: _all(gloo._reduce_scatter_base(o, i, opts) for o, i in pairs),
            _name(opts),
        )

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        """With even or uneven parts."""
        opts = opts or dist.AllToAllOptions()
        sent = _elements(input, input_splits, len(self.ranks))
        received = _elements(output, output_splits, len(self.ranks))
        _require_dense(input, output)
        return self._issue(
            None,
            (),
            lambda gloo: gloo.alltoall_base(output, input, output_splits, input_splits, opts),
            signature=("all_to_all", _dtype(input)),
            sent=sent,
            received=received,
        )

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """The host of NCCL's waits for it too."""
        work = self._issue("barrier", ())
        work.wait()
        return work

    # ---------------------------------------------------------------------------------------------- point to point

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> Work | None:
        """To a member; inside a batch, with it."""
        (tensor,), peer = tensors, self.ranks[destination]
        return self._transfer(
            Transfer(True, peer, tensor.numel(), _dtype(tensor)), tensor, lambda world: world.send([tensor], peer, 0)
        )

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work | None:
        """From a member; inside a batch, with it."""
        (tensor,), peer = tensors, self.ranks[source]
        return self._transfer(
            Transfer(False, peer, tensor.numel(), _dtype(tensor)), tensor, lambda world: world.recv([tensor], peer, 0)
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work | None:
        batch, self._batch = self._batch, None
        return self._issue_transfers(batch) if batch else None

    def _transfer(self, transfer: Transfer, tensor: Tensor, move: Callable[[Any], Any]) -> Work | None:
        _require_dense(tensor)
        own = transfer, lambda: _all([move(self.client.group(self.client.ranks))])
        if self._batch is None:
            return self._issue_transfers([own])
        self._batch.append(own)
        return None

    def _issue_transfers(self, batch: Sequence[tuple[Transfer, Callable[[], None]]]) -> Work:
        transfers = tuple(transfer for transfer, _ in batch)
        asked = request(
            self.client, self.key, self.group_desc, self.ranks, on_device=self.on_device, transfers=transfers
        )
        return self.client.issue(asked, [move for _, move in batch])

    def _issue(
        self,
        what: str | None,
        tensors: Sequence[Tensor],
        move: Callable[[Any], Any] | None = None,
        *more: object,
        on_device: bool | None = None,
        **details: Any,
    ) -> Work:
        """Issue a collective whose signature is its name, sizes and types, and `more`; or the one in `details`."""
        _require_dense(*tensors)
        if what is not None:
            sizes = [f"of {t.numel()} {_dtype(t)}" for t in tensors]
            details["signature"] = (what, *sizes, *(str(part) for part in more))
        asked = request(
            self.client,
            self.key,
            self.group_desc,
            self.ranks,
            on_device=self.on_device if on_device is None else on_device,
            **details,
        )
        moves = [] if move is None else [lambda: _all([move(self.client.group(self.ranks))])]
        return self.client.issue(asked, moves)


def _all(works: Any) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _name(opts: Any) -> str:
    """Of a reduction."""
    return opts.reduceOp.op.name


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _elements(tensor: Tensor, splits: list[int], members: int) -> tuple[int, ...]:
    """Elements of a tensor by member."""
    if not splits:
        return (tensor.numel() // members,) * members
    row = tensor.numel() // len(tensor) if len(tensor) else 0
    return tuple(rows * row for rows in splits)


def _require_dense(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"found a tensor of strides {tensor.stride()}, expected a contiguous one, as NCCL does")


def _require_size(tensor: Tensor, elements: int, what: str) -> None:
    if tensor.numel() != elements:
        raise ValueError(f"{what}: found a tensor of {tensor.numel()} elements, expected {elements}")
