"""Both ownerships of a boundary from the ids that each of its ranks knows. Pure.

A boundary for a training loop of your own: planned from what each rank knows, and crossed as a function
(docs/library.md, "Without stages: autograd").

A crossing is a collective in both directions, but autograd goes back only through what it reaches from a loss: a rank
without a loss, or whose loss uses no row, would leave the others waiting. `micro_batch` therefore ends the graph at
each crossing. Backward passes inside it accumulate the gradients of the rows that arrived; at its end all crossings go
back on all ranks, the last one first, and each continues into the module that made its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.communicator import BoundaryCommunicator
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
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.layout.graph import Edge, as_edge

PADDING = -1
"""The id of a held row that does not cross."""


class Known(NamedTuple):
    """What one rank knows of a crossing of `boundary`: ids of rows, int64, in order, `PADDING` among those held, and
    how gradients of needed rows are held. `terms`: with which the rank has opened the boundary, by name.
    """

    boundary: str
    held: np.ndarray
    needed: np.ndarray
    gradient: Gradient
    terms: Mapping[str, str] = {}

    @classmethod
    def of(
        cls,
        boundary: str,
        rank: int,
        held: Any,
        needed: Any,
        gradient: Gradient,
        terms: Mapping[str, str] = MappingProxyType({}),
    ) -> Self:
        """Those of `rank`, checked. Raises `UserError`."""
        where = f"boundary {boundary} on rank {rank}"
        if gradient not in ("invariant", "partial"):
            expected = "'invariant' or 'partial'"
            raise UserError.at(f"{where}: gradient", found=repr(gradient), expected=expected, fix="correct it")
        own = _ids(f"{where}: held", held, least=PADDING), _ids(f"{where}: needed", needed)
        return cls(boundary, *own, gradient, dict(terms))


Sides = tuple[Sequence[int], Sequence[int]]
"""The ranks that rows leave, and those that they enter."""


def ownerships_of(
    ranks: Sequence[int], known: Sequence[Known], sides: Sides | None = None
) -> tuple[Ownership, Ownership]:
    """Who holds and who needs the rows of a crossing, from what the ranks of its boundary know. Rows are numbered from
    0 in the order of their ids, padding after them. `sides`: default: all ranks. Raises `UserError`, see
    `Boundary.plan`.
    """
    sources, targets = sides or (ranks, ranks)
    boundary = known[0].boundary
    require_alike("plan", [{"boundary": k.boundary} for k in known], ranks, "plan boundaries in one order on all ranks")
    facts = [{**each.terms, "gradient": each.gradient} for each in known]
    require_alike(f"boundary {boundary}", facts, ranks, "open and plan it alike on all ranks")
    numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.held[each.held != PADDING] for each in known)]))
    for rank, each in zip(ranks, known, strict=True):
        if len(missing := np.setdiff1d(each.needed, numbers)):
            raise UserError.at(
                f"boundary {boundary}: needed",
                found=f"row {missing[0]} on rank {rank}",
                expected=f"one of the {len(numbers)} rows that ranks hold",
                fix="give the rows the same ids on both sides, of the same batch",
            )
    _require_none(boundary, "held", {r: each.held for r, each in zip(ranks, known, strict=True) if r not in sources})
    _require_none(
        boundary, "needed", {r: each.needed for r, each in zip(ranks, known, strict=True) if r not in targets}
    )
    own = dict(zip(ranks, known, strict=True))
    held = _grouped(boundary, "held", sources, [_numbered(own[r].held, numbers) for r in sources], numbers)
    needed = _grouped(boundary, "needed", targets, [np.searchsorted(numbers, own[r].needed) for r in targets], numbers)
    return Ownership.of(_with_numbered_padding(held, len(numbers))), Ownership.of(needed, known[0].gradient)


def _require_none(boundary: str, what: str, ids: Mapping[int, np.ndarray]) -> None:
    """Check that ranks of the other side alone have no rows."""
    for rank, found in ids.items():
        if len(found):
            raise UserError.at(
                f"boundary {boundary}: {what}",
                found=f"{len(found)} rows on rank {rank}",
                expected="none",
                because=f"rows {'leave' if what == 'held' else 'enter'} a stage that is not on that rank",
                fix=f"leave `{what}` out there",
            )


def _numbered(ids: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The place of each id in `numbers`; padding as it is."""
    return np.where(ids == PADDING, PADDING, np.searchsorted(numbers, ids))


def _with_numbered_padding(held: Mapping[tuple[int, ...], np.ndarray], first: int) -> dict[tuple[int, ...], np.ndarray]:
    """Padding as rows of their own, numbered from `first`, which nobody needs."""
    found = {}
    for ranks, rows in held.items():
        padding = rows == PADDING
        found[ranks] = np.where(padding, first - 1 + np.cumsum(padding), rows)
        first += int(padding.sum())
    return found


def _ids(what: str, values: Any, least: int = 0) -> np.ndarray:
    """The ids as an array, each once but for `PADDING`. Raises `UserError`."""
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
    boundary: str, what: str, ranks: Sequence[int], rows: Sequence[np.ndarray], numbers: np.ndarray
) -> dict[tuple[int, ...], np.ndarray]:
    """Rows by the ranks that have the same ones, in the same order. Raises `UserError` if two groups share a row."""
    by_rows: dict[bytes, list[int]] = {}
    for place, mine in enumerate(rows):
        by_rows.setdefault(mine.tobytes() if len(mine) else b"of rank %d" % place, []).append(place)
    groups = list(by_rows.values())
    owner = np.full(len(numbers), -1, np.int64)
    for number, group in enumerate(groups):
        mine = rows[group[0]][rows[group[0]] != PADDING]
        if len(taken := mine[owner[mine] >= 0]):
            other = ranks[groups[int(owner[taken[0]])][0]]
            raise UserError.at(
                f"boundary {boundary}: {what}",
                found=f"row {numbers[taken[0]]} on ranks {other} and {ranks[group[0]]}, which differ in rows or order",
                expected="ranks with a common row to have the same rows in the same order",
                fix="give such ranks the union of their rows, and index what arrives",
            )
        owner[mine] = number
    return {tuple(ranks[place] for place in group): rows[group[0]] for group in groups}


Ids = Sequence[int] | np.ndarray | Tensor


class Rows(NamedTuple):
    """What a rank holds and needs of the rows of a crossing, see `Boundary.plan`."""

    held: Ids = ()
    needed: Ids = ()
    gradient: Gradient = "invariant"


class Boundary:
    """The boundary along one edge, on one of its ranks; made by `open`."""

    def __init__(
        self,
        edge: Edge,
        communicator: BoundaryCommunicator,
        hosts: dist.ProcessGroup,
        sides: Sides,
        watchdog: Watchdog,
    ):
        self.edge, self.communicator, self._sides = edge, communicator, sides
        self._hosts, self._watchdog = hosts, watchdog
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
        timeout_s: float = 300.0,
    ) -> Boundary:
        """The boundary from module `source` to `target`, on a rank of either.

        The topology was made by `build`, or with the edge in `edges` and in `planned`. `width`: elements of a row;
        `transport`, `check`: as for `BoundaryCommunicator`; without checks gradients of all crossings in grad mode go
        back, also where no rank's rows require them. What is left out is that of the topology's graph. A plan or
        crossing to which other ranks have not come after `timeout_s` seconds ends the process with a message; 0: never.

        Raises:
            UserError: the topology has no such edge on this rank, or no graph that has what is left out.
        """
        edge = as_edge((source, target), topology.layouts)
        watchdog = Watchdog.of_world(timeout_s, topology.platform)
        return cls.of(topology, edge, watchdog, width=width, dtype=dtype, transport=transport, check=check)

    @classmethod
    def of(
        cls,
        topology: Topology,
        edge: Edge,
        watchdog: Watchdog,
        *,
        width: int | None = None,
        dtype: torch.dtype | None = None,
        transport: torch.dtype | None = None,
        check: bool = True,
    ) -> Boundary:
        """As `open`, along any edge, with the rank's own `watchdog`."""
        if topology.graph and edge in topology.graph.edges and edge not in topology.planned:
            problem, fix = "the rank is on neither side of it", f"open it where {edge.source} or {edge.target} is"
            raise UserError.at(f"boundary {edge} on rank {topology.rank}", problem=problem, fix=fix)
        if edge not in topology.planned:
            declared = edge in topology.boundaries
            raise UserError.at(
                f"boundary {edge} on rank {topology.rank}",
                found="an edge that is not planned" if declared else "no such edge",
                expected=f"one of {', '.join(map(str, topology.planned)) or 'none'}",
                fix="add it to the graph"
                if topology.graph
                else "give it to `Topology.build` in `edges` and `planned`, and open it on ranks of either module",
            )
        if graph := topology.graph:
            of_edge = len(graph.outputs_of(edge)) * graph.width_of(edge)
            width, dtype, transport = width or of_edge, dtype or graph.dtype, transport or graph.transport
        if width is None or dtype is None:
            expected = "both, where the topology has no graph"
            raise UserError.at(
                f"boundary {edge}",
                found=f"width {width}, dtype {dtype}",
                expected=expected,
                fix="give `width` and `dtype`",
            )
        groups = topology.boundaries[edge]
        device = topology.platform.device
        communicator = BoundaryCommunicator(
            groups.forward,
            device,
            width,
            dtype,
            transport=transport,
            check=check,
            backward=groups.backward,
            name=str(edge),
        )
        source, target = (topology.layouts[name] for name in (edge.source, edge.target))
        sides = edge.source_ranks(source), edge.target_ranks(target)
        return cls(edge, communicator, topology.planned[edge], sides, watchdog)

    @_disable_dynamo
    def plan(self, *, held: Ids = (), needed: Ids = (), gradient: Gradient = "invariant") -> LoadedPlan:
        """The plan of a crossing, from what each rank knows. All ranks of the boundary call it, with their own rows.

        Args:
            held: ids of the rows that this rank passes to the crossing, in that order; int64, from 0. Ranks that hold
                the same rows, such as those along `tp`, give the same ids. -1, as often as needed, is a row that does
                not cross: a class token, padding.
            needed: ids of the rows that this rank wants, in the order in which they arrive.
            gradient: of rows that several ranks need, the same on all ranks. `invariant`: each of them computes the
                whole gradient, as Megatron's layers do along `tp`, with or without sequence parallelism. `partial`:
                each computes a part, as ranks do that share the tokens of a sample. Where ranks do both (`tp` with
                `cp`), let each need the rows of its own tokens only, which makes gradients `invariant`.

        Raises:
            UserError: on all ranks. A row is held or needed twice, or needed and not held; or ranks that hold a common
                row do not hold the same rows; or ranks differ in `gradient`, plan different boundaries, or have opened
                this one differently. On its own rank, at once: amid a backward pass, see `__call__`.
        """
        return self.plans([Rows(held, needed, gradient)])[0]

    @_disable_dynamo
    def plans(self, crossings: Sequence[Rows]) -> list[LoadedPlan]:
        """As `plan`, of several crossings at once, with one exchange between the hosts."""
        require_no_backward(self._micro_batch)
        mine, name, terms = dist.get_rank(), str(self.edge), self.communicator.terms
        with self._doing("a plan"):
            everyone = on_every(self._hosts, lambda: [Known.of(name, mine, *rows, terms) for rows in crossings])
        ranks = dist.get_process_group_ranks(self._hosts)
        fix = "give each rank its part of every micro-batch"
        require_alike(f"boundary {self.edge}", [{"crossings": str(len(known))} for known in everyone], ranks, fix)
        sides = (ownerships_of(ranks, known, self._sides) for known in zip(*everyone, strict=True))
        plans = (plan_boundary(*each, self.communicator.row_bytes) for each in sides)
        return [load_plan(plan.rank(mine), self.communicator.device, edge=name) for plan in plans]

    @_disable_dynamo
    def __call__(self, plan: LoadedPlan, rows: Tensor | None = None) -> Tensor:
        """Rows that this rank holds, [held, width], to those that it needs, [needed, width]; differentiable. All ranks
        of the boundary call it; one that holds none may leave `rows` out. Rows of a narrower floating dtype (under
        autocast) are converted to the boundary's.

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
        """Around what waits for the other ranks of the boundary."""
        return self._watchdog.doing(lambda: f"{what} of boundary {self.edge}, with all its ranks,")

    def __repr__(self) -> str:
        return f"Boundary({self.edge}, rows of {self.communicator.width} {self.communicator.dtype})"


@contextlib.contextmanager
def micro_batch(*boundaries: Boundary) -> Iterator[None]:
    """Around the forward and backward passes of a micro-batch: gradients of all rows that cross one of the boundaries
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
            current.end()  # All ranks learn it there.
        raise
    else:
        current.end()
    finally:
        current.close()
        for boundary in boundaries:
            boundary._micro_batch = None
