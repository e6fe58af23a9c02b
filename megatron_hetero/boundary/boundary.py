"""A boundary for a training loop of your own: planned from what each rank knows, and crossed as a function
(docs/library.md, "Without stages: autograd").

A crossing is a collective in both directions, but autograd goes back only through what it reaches from a loss: a rank
without a loss, or whose loss uses no row, would leave the others waiting. `micro_batch` therefore ends the graph at
each crossing. Backward passes inside it accumulate the gradients of the rows that arrived; at its end all crossings go
back on all ranks, the last one first, and each continues into the module that computed its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.communicator import boundary_communicators
from megatron_hetero.boundary.crossings import (
    MicroBatchCrossings,
    require_no_backward,
    requires_grad,
    returns_gradients,
    widened,
)
from megatron_hetero.boundary.loaded import LoadedPlan, load_plan
from megatron_hetero.boundary.ownership import Gradient, Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.groups.collective import on_every, require_alike
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.graph import Edge, as_edge

PADDING = -1
"""The id of a row that is held and does not cross."""
Ids = Sequence[int] | np.ndarray | Tensor
Sides = tuple[Sequence[int], Sequence[int]]
"""The ranks that rows leave, and those that they enter."""


class Rows(NamedTuple):
    """What a rank holds and needs of the rows of a crossing, see `Boundary.plan`."""

    held: Ids = ()
    needed: Ids = ()
    gradient: Gradient = "invariant"


class RowIds(NamedTuple):
    """Checked `Rows`, int64."""

    held: np.ndarray
    needed: np.ndarray
    gradient: Gradient

    @classmethod
    def of(cls, boundary: str, rank: int, rows: Rows) -> RowIds:
        """Check the rows of `rank`. Raises `UserError`."""
        where = f"boundary {boundary} on rank {rank}"
        if rows.gradient not in ("invariant", "partial"):
            expected = "'invariant' or 'partial'"
            raise UserError.at(f"{where}: gradient", found=repr(rows.gradient), expected=expected, fix="correct it")
        held, needed = _ids(f"{where}: held", rows.held, least=PADDING), _ids(f"{where}: needed", rows.needed)
        return cls(held, needed, rows.gradient)


def ownerships_of(
    boundary: str, ranks: Sequence[int], rows: Sequence[RowIds], sides: Sides | None = None
) -> tuple[Ownership, Ownership]:
    """Find who holds and who needs the rows of a crossing, from the rows of each rank of its boundary. Rows are
    numbered from 0 in the order of their ids, padding after them. `sides`: default: all ranks. Raises `UserError`, see
    `Boundary.plan`.
    """
    sources, targets = sides or (ranks, ranks)
    facts = [{"gradient": each.gradient} for each in rows]
    require_alike(f"boundary {boundary}", facts, ranks, "plan it alike on all ranks")
    numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.held[each.held != PADDING] for each in rows)]))
    held, needed = dict[int, np.ndarray](), dict[int, np.ndarray]()
    for rank, each in zip(ranks, rows, strict=True):
        if len(missing := np.setdiff1d(each.needed, numbers)):
            raise UserError.at(
                f"boundary {boundary}: needed",
                found=f"row {missing[0]} on rank {rank}",
                expected=f"one of the {len(numbers)} rows that ranks hold",
                fix="give the rows the same ids on both sides, of the same batch",
            )
        for what, ids, side, does in (("held", each.held, sources, "leave"), ("needed", each.needed, targets, "enter")):
            if len(ids) and rank not in side:
                raise UserError.at(
                    f"boundary {boundary}: {what}",
                    found=f"{len(ids)} rows on rank {rank}",
                    expected="none",
                    because=f"rows {does} a stage that is not on that rank",
                    fix=f"leave `{what}` out there",
                )
        held[rank] = np.where(each.held == PADDING, PADDING, np.searchsorted(numbers, each.held))
        needed[rank] = np.searchsorted(numbers, each.needed)
    holders = _grouped(boundary, "held", {rank: held[rank] for rank in sources}, numbers)
    needing = _grouped(boundary, "needed", {rank: needed[rank] for rank in targets}, numbers)
    first = len(numbers)
    for group, ids in holders.items():  # Padding rows have numbers of their own, which nobody needs.
        padding = ids == PADDING
        holders[group] = np.where(padding, first - 1 + np.cumsum(padding), ids)
        first += int(padding.sum())
    return Ownership.of(holders), Ownership.of(needing, rows[0].gradient)


def _ids(what: str, values: Any, least: int = 0) -> np.ndarray:
    """Return the ids as an array, each once but for `PADDING`. Raises `UserError`."""
    try:
        found = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError):  # Ragged lists, dtypes that NumPy lacks.
        found = np.zeros((), object)
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or int(found.max()) >= 1 << 63:
        shown = f"{found.dtype} of shape {found.shape}" if found.ndim else f"a {type(values).__name__}"
        raise UserError.at(what, found=shown, expected="int64 of shape [rows]", fix="give the ids of rows")
    if int(found.min()) < least:
        expected = f"ids from 0{', or -1 of rows that do not cross' if least < 0 else ''}"
        raise UserError.at(what, found=f"row {found.min()}", expected=expected, fix="give the ids of rows")
    ids, counts = np.unique(found[found != PADDING], return_counts=True)
    if counts.max(initial=0) > 1:
        twice = ids[counts > 1][0]
        raise UserError.at(what, found=f"row {twice} twice", expected="each row once", fix="index what arrives instead")
    return found.astype(np.int64)


def _grouped(
    boundary: str, what: str, rows: Mapping[int, np.ndarray], numbers: np.ndarray
) -> dict[tuple[int, ...], np.ndarray]:
    """Group ranks that have the same rows in the same order. Raises `UserError` if two groups share a row."""
    by_rows: dict[bytes, list[int]] = {}
    for rank, mine in rows.items():
        by_rows.setdefault(mine.tobytes() if len(mine) else b"of rank %d" % rank, []).append(rank)
    owner = np.full(len(numbers), -1, np.int64)
    for ranks in by_rows.values():
        mine = rows[ranks[0]][rows[ranks[0]] != PADDING]
        if len(taken := mine[owner[mine] >= 0]):
            raise UserError.at(
                f"boundary {boundary}: {what}",
                found=f"row {numbers[taken[0]]} on ranks {owner[taken[0]]} and {ranks[0]}, which differ in rows or "
                "order",
                expected="ranks with a common row to have the same rows in the same order",
                fix="give such ranks the union of their rows, and index what arrives",
            )
        owner[mine] = ranks[0]
    return {tuple(ranks): rows[ranks[0]] for ranks in by_rows.values()}


class Boundary:
    """The boundary along one edge, on one of its ranks. Loops of users call `open`."""

    def __init__(
        self,
        topology: Topology,
        edge: Edge,
        *,
        width: int | None = None,
        dtype: torch.dtype | None = None,
        transport: torch.dtype | None = None,
        check: bool = True,
        timeout_s: float | None = None,
    ):
        if edge not in topology.planned:
            raise UserError.at(
                f"boundary {edge} on rank {topology.rank}",
                found="no such boundary",
                expected=f"one of {', '.join(map(str, topology.planned)) or 'none'}",
                because=f"a boundary is opened where {edge.source} or {edge.target} is, and declared beforehand",
                fix="open it on those ranks, and add the edge to the graph, or to `planned` of `Topology.build`",
            )
        if graph := topology.graph:
            of_edge = len(graph.outputs_of(edge)) * graph.width_of(edge)
            width, dtype, transport = width or of_edge, dtype or graph.dtype, transport or graph.transport
        if width is None or dtype is None:
            raise UserError.at(
                f"boundary {edge}",
                found=f"width {width}, dtype {dtype}",
                expected="both, where the topology has no graph",
                fix="give `width` and `dtype`",
            )
        self.edge, self._watchdog, self._timeout_s = edge, topology.watchdog, timeout_s
        with self._doing("the opening"):
            communicators = boundary_communicators(topology, {edge: width}, dtype, transport=transport, check=check)
        source, target = (topology.layouts[name] for name in (edge.source, edge.target))
        self.communicator = communicators[edge]
        self._sides: Sides = edge.source_ranks(source), edge.target_ranks(target)
        self._hosts = topology.planned[edge]
        self._micro_batch: MicroBatchCrossings | None = None

    @classmethod
    def open(
        cls,
        topology: Topology,
        source: str,
        target: str,
        *,
        width: int | None = None,
        dtype: torch.dtype | None = None,
        transport: torch.dtype | None = None,
        check: bool = True,
        timeout_s: float | None = None,
    ) -> Boundary:
        """Open the boundary from module `source` to `target`, on a rank of either.

        The topology was built by `build`, or with the edge in `planned`. `width`: elements of a row;
        `transport`, `check`: see `BoundaryCommunicator`; without checks gradients of all crossings in grad mode go
        back, also where no rank's rows require them. Defaults are those of the topology's graph. A plan or crossing
        that other ranks have not reached after `timeout_s` seconds (by default those of `build`) ends the process with
        a message; 0: never.

        Raises:
            UserError: the topology has no such edge on this rank, or no graph that has a default.
        """
        edge = as_edge((source, target), topology.layouts)
        options: Any = {"width": width, "dtype": dtype, "transport": transport, "check": check, "timeout_s": timeout_s}
        return cls(topology, edge, **options)

    @_disable_dynamo
    def plan(self, *, held: Ids = (), needed: Ids = (), gradient: Gradient = "invariant") -> LoadedPlan:
        """Plan a crossing from what each rank knows. All ranks of the boundary call it, with their own rows.

        Args:
            held: ids of the rows that this rank passes to the crossing, in that order; int64, from 0. Ranks that hold
                the same rows, such as those along `tp`, give the same ids. -1, as often as needed, is a row that does
                not cross: a class token, padding.
            needed: ids of the rows that this rank needs, in the order in which they arrive.
            gradient: how ranks hold the gradients of rows that several of them need, the same on all ranks.
                `invariant`: each of them computes the whole gradient, as Megatron's layers do along `tp`, with or
                without sequence parallelism. `partial`: each computes a part, as ranks do that share the tokens of a
                sample. Where ranks do both (`tp` with `cp`), let each need the rows of its own tokens only, which makes
                gradients `invariant`.

        Raises:
            UserError: on all ranks. A row is held or needed twice, or needed and not held; or ranks that hold a common
                row do not hold the same rows; or ranks differ in `gradient`, plan different boundaries, or have opened
                this one differently. On its own rank, at once: amid a backward pass, see `__call__`.
        """
        return self.plans([Rows(held, needed, gradient)])[0]

    @_disable_dynamo
    def plans(self, crossings: Sequence[Rows]) -> list[LoadedPlan]:
        """Plan several crossings, see `plan`, with one exchange between the hosts."""
        require_no_backward(self._micro_batch)
        mine, name = dist.get_rank(), str(self.edge)
        terms = {"crossings": str(len(crossings)), **self.communicator.terms}
        with self._doing("a plan"):
            everyone = on_every(self._hosts, lambda: (name, terms, [RowIds.of(name, mine, rows) for rows in crossings]))
        names, facts, rows = zip(*everyone, strict=True)
        ranks = dist.get_process_group_ranks(self._hosts)
        fix = "plan boundaries in one order on all ranks"
        require_alike("plan", [{"boundary": each} for each in names], ranks, fix)
        fix = "open it alike on all ranks, and give each rank its part of every micro-batch"
        require_alike(f"boundary {name}", facts, ranks, fix)
        sides = (ownerships_of(name, ranks, of_ranks, self._sides) for of_ranks in zip(*rows, strict=True))
        plans = (plan_boundary(*each, self.communicator.row_bytes) for each in sides)
        return [load_plan(plan.rank(mine), self.communicator.device, edge=name) for plan in plans]

    @_disable_dynamo
    def __call__(self, plan: LoadedPlan, rows: Tensor | None = None) -> Tensor:
        """Turn the rows that this rank holds, [held, width], into those that it needs, [needed, width]; differentiable.
        All ranks of the boundary call it; one that holds none may leave `rows` out. Rows of a narrower floating dtype
        (under autocast) are converted to the boundary's.

        Inside a `micro_batch`, where the graph ends at what arrives; outside only without gradients.

        Raises:
            UserError: rows do not fit the plan, or plans differ; on all ranks, unless `open` was given `check=False`.
                Also if rows require gradients outside of a `micro_batch`, or cross amid a backward pass, as under
                `torch.utils.checkpoint`.
        """
        if not isinstance(plan, LoadedPlan):
            raise UserError.at(
                f"boundary {self.edge}: plan",
                found=f"a {type(plan).__name__}",
                expected="what `Boundary.plan` or `load_plan` returns",
                fix="give the plan first, then the rows",
            )
        require_no_backward(self._micro_batch)
        rows = self.communicator.no_rows() if rows is None else rows
        with self._doing("a crossing"):
            if self._micro_batch is None:
                return self._cross_without_gradients(plan, rows)
            return self._micro_batch.cross(self.edge, self.communicator, plan, rows, self._doing)

    def _cross_without_gradients(self, plan: LoadedPlan, rows: Tensor) -> Tensor:
        check = self.communicator.check
        if returns_gradients(self.communicator, plan, rows) if check else requires_grad(rows):
            raise UserError.at(
                f"boundary {self.edge}",
                problem="rows that require gradients cross outside of a `micro_batch`",
                because="a rank without a loss, or whose loss uses no row, would leave the others waiting",
                fix="enter `micro_batch(boundary)`",
            )
        return self.communicator.forward(plan, widened(rows, self.communicator.dtype))

    def _doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Watch what waits for the other ranks of the boundary."""
        described = f"{what} of boundary {self.edge}, with all its ranks,"
        return self._watchdog.doing(lambda: described, self._timeout_s)

    def __repr__(self) -> str:
        return f"Boundary({self.edge}, rows of {self.communicator.width} {self.communicator.dtype})"


@contextlib.contextmanager
def micro_batch(*boundaries: Boundary) -> Iterator[None]:
    """Enclose the forward and backward passes of a micro-batch: gradients of all rows that cross one of the boundaries
    go back at the end, on all ranks. All ranks of a boundary enter it, and cross its boundaries in the same order.

    Raises:
        UserError: a boundary is inside a micro-batch already.
    """
    if busy := [boundary for boundary in boundaries if boundary._micro_batch is not None]:
        raise UserError.at(
            f"boundary {busy[0].edge}",
            problem="is inside a micro-batch already",
            because="its crossings go back at the end of that one",
            fix="give all boundaries to one `micro_batch`",
        )
    current = MicroBatchCrossings()
    for boundary in boundaries:
        boundary._micro_batch = current
    try:
        yield
    except BaseException:
        if current.problem:
            current.end()  # It raises the problem on all ranks.
        raise
    else:
        current.end()
    finally:
        current.close()
        for boundary in boundaries:
            boundary._micro_batch = None
