"""A boundary for custom training loops: planned from the rows of each rank, and crossed as a function
(docs/library.md, "Without stages: autograd").

A crossing is a collective in both directions, but autograd runs backward only from a loss: a rank without a loss, or
whose loss uses no row, would leave other ranks waiting. `micro_batch` therefore ends the graph at each crossing.
Backward passes inside `micro_batch` accumulate the gradients of the rows that arrived. At its end all ranks send the
gradients of all crossings back, the last crossing first, and back-propagate them through the modules that computed the
rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_hetero.base.errors import UserError, one_of
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
from megatron_hetero.groups.collective import on_every, require_same_facts
from megatron_hetero.groups.platform import on_device
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.graph import Edge, as_edge
from megatron_hetero.layout.layout import Layout

PADDING = -1
"""Id of a held row that does not cross the boundary."""
Ids = Sequence[int] | np.ndarray | Tensor


class BoundaryEnd(NamedTuple):
    """One end of a boundary: its ranks and, if known, the module and its layout, no two replicas of which may have the
    same row.
    """

    ranks: Sequence[int]
    module: str = ""
    layout: Layout | None = None


def ends_of(topology: Topology, edge: Edge) -> tuple[BoundaryEnd, BoundaryEnd]:
    """Return the two ends of an edge: the end that rows leave, and the end that rows enter."""
    source, target = topology.layouts[edge.source], topology.layouts[edge.target]
    return (
        BoundaryEnd(edge.source_ranks(source), edge.source, source),
        BoundaryEnd(edge.target_ranks(target), edge.target, target),
    )


class Rows(NamedTuple):
    """The rows that a rank holds and needs in a crossing, or numbers that determine them, see `Boundary.plan`."""

    held: Ids = ()
    needed: Ids = ()
    gradient: Gradient = "invariant"
    samples: int | None = None
    rows_per_sample: int | Sequence[int] | np.ndarray | Tensor | None = None

    def counted(self, topology: Topology, edge: Edge) -> Rows:
        """Return rows with ids, computed from `samples` and `rows_per_sample` if given. Raises `UserError`."""
        if self.samples is None and self.rows_per_sample is None:
            return self
        where = f"boundary {edge} on rank {topology.rank}: samples"
        ends = ends_of(topology, edge)
        if split := [end for end in ends if end.layout and end.layout.ways("tokens") > 1]:
            because, fix = "each rank has the rows of its local tokens", "give the ids of rows, `held` and `needed`"
            found = f"`{split[0].module}` with {split[0].layout}"
            raise UserError.at(where, found=found, expected="no sp and no cp", because=because, fix=fix)
        samples, counts = self.samples, _array(self.rows_per_sample)
        are_counts = counts.shape in ((), (samples,)) and (not counts.size or counts.dtype.kind in "iu")
        has_ids = _array(self.held).size + _array(self.needed).size > 0
        if has_ids or not isinstance(samples, int) or samples < 0 or not are_counts or counts.min(initial=0) < 0:
            found = f"{samples!r}, with rows_per_sample={self.rows_per_sample!r}{' and ids of rows' * has_ids}"
            expected = "a number of samples, and the rows of all or of each, without `held` and `needed`"
            fix = "give both numbers for the whole micro-batch, or ids only"
            raise UserError.at(where, found=found, expected=expected, fix=fix)
        starts = [0, *accumulate(np.broadcast_to(counts, samples).tolist())]
        held, needed = (
            range(starts[shard.start], starts[shard.stop]) if topology.rank in ranks else ()
            for ranks, module, _ in ends
            for shard in [topology.shard(module, range(samples))]
        )
        return Rows(held, needed, self.gradient, samples, counts.tolist())


class RowIds(NamedTuple):
    """Checked `Rows`, with int64 ids. `counts`: `samples` and `rows_per_sample` as text, or "none" if not given."""

    held: np.ndarray
    needed: np.ndarray
    gradient: Gradient
    counts: str = "none"

    @classmethod
    def of(cls, boundary: str, rank: int, rows: Rows) -> RowIds:
        """Check the rows of `rank`, and return their ids as arrays. Raises `UserError`."""
        where = f"boundary {boundary} on rank {rank}"
        if rows.gradient not in ("invariant", "partial"):
            expected = "'invariant' or 'partial'"
            raise UserError.at(f"{where}: gradient", found=repr(rows.gradient), expected=expected, fix="correct it")
        held, needed = _ids(f"{where}: held", rows.held, least=PADDING), _ids(f"{where}: needed", rows.needed)
        counts = "none" if rows.samples is None else f"{rows.samples}, {rows.rows_per_sample}"
        return cls(held, needed, rows.gradient, counts)


def ownerships_of(
    boundary: str, ranks: Sequence[int], rows: Sequence[RowIds], ends: Sequence[BoundaryEnd] | None = None
) -> tuple[Ownership, Ownership]:
    """Return the ownership of held rows and that of needed rows in a crossing, from the rows of each rank. Rows are
    numbered from 0 in the order of their ids, padding rows last. `ends`: the ends of the boundary; by default both have
    all ranks. Raises `UserError`, see `Boundary.plan`.
    """
    source, target = ends or (BoundaryEnd(ranks), BoundaryEnd(ranks))
    if rows[0].gradient == "partial":  # Samples of several replicas may share a picture: each has a partial gradient.
        target = BoundaryEnd(target.ranks)
    facts = [{"gradient": each.gradient, "samples, rows_per_sample": each.counts} for each in rows]
    require_same_facts(f"boundary {boundary}", facts, ranks, "plan it equally on all ranks")
    numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.held[each.held != PADDING] for each in rows)]))
    held, needed = dict[int, np.ndarray](), dict[int, np.ndarray]()
    for rank, each in zip(ranks, rows, strict=True):
        if len(missing := np.setdiff1d(each.needed, numbers)):
            where, found = f"boundary {boundary}: needed", f"row {missing[0]} on rank {rank}"
            fix = "give the rows the same ids on both sides, of the same batch"
            raise UserError.at(where, found=found, expected=f"one of the {len(numbers)} rows that ranks hold", fix=fix)
        for what, ids, end, does in (("held", each.held, source, "leave"), ("needed", each.needed, target, "enter")):
            if len(ids) and rank not in end.ranks:
                where, found = f"boundary {boundary}: {what}", f"{len(ids)} rows on rank {rank}"
                because, fix = f"rows {does} a stage that is not on that rank", f"leave `{what}` out there"
                raise UserError.at(where, found=found, expected="none", because=because, fix=fix)
        held[rank] = np.where(each.held == PADDING, PADDING, np.searchsorted(numbers, each.held))
        needed[rank] = np.searchsorted(numbers, each.needed)
    holders = _grouped(boundary, "held", source, held, numbers)
    needing = _grouped(boundary, "needed", target, needed, numbers)
    first = len(numbers)
    for group, ids in holders.items():  # Padding rows get numbers after all other rows; no rank needs padding.
        padding = ids == PADDING
        holders[group] = np.where(padding, first - 1 + np.cumsum(padding), ids)
        first += int(padding.sum())
    return Ownership.of(holders), Ownership.of(needing, rows[0].gradient)


def _array(values: Any) -> np.ndarray:
    """Convert `values` to an array on the host, of dtype object if they form no array, such as ragged lists."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError):
        return np.zeros((), object)


def _ids(what: str, values: Any, least: int = 0) -> np.ndarray:
    """Check ids, which must be distinct except for `PADDING`, and return an int64 array. Raises `UserError`."""
    ids = _array(values)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.max()) >= 1 << 63:
        shown = f"{ids.dtype} of shape {ids.shape}" if ids.ndim else f"a {type(values).__name__}"
        raise UserError.at(what, found=shown, expected="int64 of shape [rows]", fix="give the ids of rows")
    if int(ids.min()) < least:
        expected = f"ids from 0{', or -1 of rows that do not cross' if least < 0 else ''}"
        raise UserError.at(what, found=f"row {ids.min()}", expected=expected, fix="give the ids of rows")
    distinct, counts = np.unique(ids[ids != PADDING], return_counts=True)
    if counts.max(initial=0) > 1:
        twice = distinct[counts > 1][0]
        raise UserError.at(what, found=f"row {twice} twice", expected="each row once", fix="index what arrives instead")
    return ids.astype(np.int64)


def _grouped(
    boundary: str, what: str, end: BoundaryEnd, rows: Mapping[int, np.ndarray], numbers: np.ndarray
) -> dict[tuple[int, ...], np.ndarray]:
    """Group ranks that have the same rows in the same order, and return the rows of each group. Raises `UserError` if
    two groups, or two replicas, share a row.
    """
    ranks_by_rows, where = dict[bytes, list[int]](), f"boundary {boundary}: {what}"
    for rank in end.ranks:
        # Each rank without rows forms a separate group.
        key = rows[rank].tobytes() if len(rows[rank]) else b"no rows of rank %d" % rank
        ranks_by_rows.setdefault(key, []).append(rank)
    replica_of = end.layout.replica_of if end.layout else lambda _: 0
    owner = np.full(len(numbers), -1, np.int64)
    for ranks in ranks_by_rows.values():
        local = rows[ranks[0]][rows[ranks[0]] != PADDING]
        taken = local[owner[local] >= 0]
        others = [int(owner[taken[0]])] if len(taken) else ranks[1:] if len(local) else []
        if apart := [rank for rank in others if replica_of(rank) != replica_of(ranks[0])]:
            first, last = sorted((apart[0], ranks[0]))
            row, expected = numbers[(taken if len(taken) else local)[0]], "each row in one replica"
            found = f"row {row} on ranks {first} and {last}, in two replicas of `{end.module}`"
            because = "its gradient would count twice" if what == "held" else "only one replica's gradient returns"
            shared = ', or `gradient="partial"` if their samples differ and share a picture' * (what == "needed")
            fix = f'give each replica its own samples, `topology.shard("{end.module}", samples)`{shared}'
            raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)
        if len(taken):
            on = f"ranks {owner[taken[0]]} and {ranks[0]}"
            found = f"row {numbers[taken[0]]} on {on}, which differ in rows or order"
            expected = "ranks with a common row to have the same rows in the same order"
            fix = "give such ranks the union of their rows, and index what arrives"
            raise UserError.at(where, found=found, expected=expected, fix=fix)
        owner[local] = ranks[0]
    return {tuple(ranks): rows[ranks[0]] for ranks in ranks_by_rows.values()}


class Boundary:
    """The boundary along one edge, as seen by this rank. Training loops create it with `open`."""

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
        if edge not in topology.planned_edges:
            where = f"boundary {edge} on rank {topology.rank}"
            expected = one_of(topology.planned_edges, "planned edges")
            because = "all ranks create its groups when they build the topology"
            fix = "add the edge to the graph of `build`, or to `planned` of `Topology.build`"
            raise UserError.at(where, found="an edge that is not planned", expected=expected, because=because, fix=fix)
        if graph := topology.graph:
            graph_width = len(graph.outputs_of(edge)) * graph.width_of(edge)
            width, dtype, transport = width or graph_width, dtype or graph.dtype, transport or graph.transport
        if width is None or dtype is None:
            found, expected = f"width {width}, dtype {dtype}", "both, where the topology has no graph"
            raise UserError.at(f"boundary {edge}", found=found, expected=expected, fix="give `width` and `dtype`")
        self.edge, self._topology, self._ends = edge, topology, ends_of(topology, edge)
        self._watchdog, self._timeout_s = topology.watchdog, timeout_s
        with self._doing("the opening"):
            communicators = boundary_communicators(topology, {edge: width}, dtype, transport=transport, check=check)
        self.communicator = communicators[edge]
        self._hosts = topology.planned.get(edge)  # None on a rank outside of the boundary.
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
        """Open the boundary from module `source` to `target`. On a rank with neither the last stage of `source`
        nor the first stage of `target`, plans and crossings do nothing and return no rows.

        The topology must be built by `build`, or with the edge in `planned`. Defaults come from the topology's graph.

        Args:
            topology: the topology.
            source: the module that computes the rows.
            target: the module that the rows enter.
            width: number of elements of a row.
            dtype: dtype of the rows.
            transport: see `BoundaryCommunicator`.
            check: see `BoundaryCommunicator`. Without checks, all crossings in grad mode return gradients, even if
                no rank's rows require gradients.
            timeout_s: seconds after which a plan or crossing that other ranks have not reached ends the process with a
                message; by default the timeout of `build`; 0 disables.

        Raises:
            UserError: the topology has no such edge, or an omitted setting has no default.
        """
        edge = as_edge((source, target), topology.layouts)
        options: Any = {"width": width, "dtype": dtype, "transport": transport, "check": check, "timeout_s": timeout_s}
        return cls(topology, edge, **options)

    @_disable_dynamo
    def plan(
        self,
        *,
        held: Ids = (),
        needed: Ids = (),
        gradient: Gradient = "invariant",
        samples: int | None = None,
        rows_per_sample: int | Sequence[int] | np.ndarray | Tensor | None = None,
    ) -> LoadedPlan:
        """Plan a crossing. All ranks of the boundary must call this with their local rows or, if both modules
        read their `Topology.shard` of the samples, with the numbers of samples and of rows per sample.

            plan = boundary.plan(samples=8, rows_per_sample=9)

        Args:
            held: ids of the rows that this rank passes to the crossing, in that order; int64, from 0. Ranks that hold
                the same rows, such as ranks along `tp`, give the same ids. The id -1, which may repeat, marks a row
                that does not cross, such as a class token or padding.
            needed: ids of the rows that this rank needs, in the order in which they arrive.
            gradient: form of the gradients of rows that several ranks need, the same on all ranks. `invariant`: each of
                these ranks computes the whole gradient, as Megatron's layers do along `tp`, with or without sequence
                parallelism. `partial`: each of these ranks computes a partial sum, as when ranks share the tokens of a
                sample. For both (`tp` with `cp`), let each rank need only the rows of its local tokens, which makes
                gradients `invariant`.
            samples: number of samples in the micro-batch over all replicas, in place of `held` and `needed`.
            rows_per_sample: number of rows per sample, one number for all samples or one for each.

        Raises:
            UserError: on all ranks, if a row is held or needed twice, or needed and not held; if ranks with a common
                row do not hold the same rows; if two replicas hold the same row, or need it while `gradient` is
                `invariant`, which would count gradients wrongly (under `torch.no_grad()` this is allowed, and the plan
                has a forward direction only); or if ranks differ in `gradient`, plan different boundaries, or have
                opened this one differently. On the calling rank alone, during a backward pass, see `__call__`.
        """
        return self.plans([Rows(held, needed, gradient, samples, rows_per_sample)])[0]

    @_disable_dynamo
    def plans(self, crossings: Sequence[Rows]) -> list[LoadedPlan]:
        """Plan several crossings, see `plan`, with a single exchange between hosts."""
        require_no_backward(self._micro_batch)
        rank, name = dist.get_rank(), str(self.edge)
        if self._hosts is None:
            return [self._load(Ownership.of({(rank,): ()}), Ownership.of({(rank,): ()})) for _ in crossings]
        terms = {"crossings": str(len(crossings)), **self.communicator.terms}

        def ids() -> list[RowIds]:
            return [RowIds.of(name, rank, rows.counted(self._topology, self.edge)) for rows in crossings]

        with self._doing("a plan"):
            everyone = on_every(self._hosts, lambda: (name, terms, torch.is_grad_enabled(), ids()))
        names, facts, trains, rows = zip(*everyone, strict=True)
        ranks = dist.get_process_group_ranks(self._hosts)
        fix = "plan boundaries in one order on all ranks"
        require_same_facts("plan", [{"boundary": each} for each in names], ranks, fix)
        fix = "open it equally on all ranks, and give each rank its shard of every micro-batch"
        require_same_facts(f"boundary {name}", facts, ranks, fix)
        return [self._planned(ranks, crossing_rows, any(trains)) for crossing_rows in zip(*rows, strict=True)]

    def _planned(self, ranks: Sequence[int], rows: Sequence[RowIds], trains: bool) -> LoadedPlan:
        """Return this rank's plan of a crossing, computed from the rows of all ranks."""
        name = str(self.edge)
        try:
            return self._load(*ownerships_of(name, ranks, rows, self._ends))
        except UserError:
            if trains:
                raise
        # Replicas may have the same rows if no gradients return.
        ends = [BoundaryEnd(end.ranks) for end in self._ends]
        return self._load(*ownerships_of(name, ranks, rows, ends), backward=False)

    def _load(self, source: Ownership, target: Ownership, *, backward: bool = True) -> LoadedPlan:
        plan = plan_boundary(source, target, self.communicator.row_bytes).rank(dist.get_rank(), backward=backward)
        return load_plan(plan, self.communicator.device, edge=str(self.edge))

    @_disable_dynamo
    def __call__(self, plan: LoadedPlan, rows: Tensor | None = None) -> Tensor:
        """Exchange the rows that this rank holds, [held, width], for the rows that it needs, [needed, width]. All ranks
        of the boundary must call it; a rank that holds no rows may omit `rows`. Rows of a narrower floating dtype
        (under autocast) are converted to the dtype of the boundary.

        The crossing is differentiable inside a `micro_batch`; the autograd graph ends at the rows that arrive.

        Raises:
            UserError: rows do not fit the plan, or plans differ; on all ranks, unless `open` was given `check=False`.
                Also if rows require gradients outside of a `micro_batch`, or cross during a backward pass, as under
                `torch.utils.checkpoint`.
        """
        if not isinstance(plan, LoadedPlan):
            where, found = f"boundary {self.edge}: plan", f"a {type(plan).__name__}"
            expected = "what `Boundary.plan` or `load_plan` returns"
            raise UserError.at(where, found=found, expected=expected, fix="give the plan first, then the rows")
        require_no_backward(self._micro_batch)
        rows = self.communicator.no_rows() if rows is None or self._hosts is None else rows
        with self._doing("a crossing"):
            if self._micro_batch is None:
                return self._cross_without_gradients(plan, rows)
            return self._micro_batch.cross(self.edge, self.communicator, plan, rows, self._doing)

    @_disable_dynamo
    def backward(self, loss: Tensor) -> None:
        """Back-propagate `loss`, a scalar of the module whose rows leave by this boundary, at the end of the
        micro-batch, in one backward pass with the module's rows. `loss.backward()` would free the rows' graph.

        Raises:
            UserError: outside of a `micro_batch`, or `loss` is not a scalar that requires gradients. At the end of
                the micro-batch, if `loss` depends on rows that crossed this boundary.
        """
        if self._micro_batch is None or loss.numel() != 1 or not loss.requires_grad:
            found = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            found += f", {'outside of' if self._micro_batch is None else 'inside'} a `micro_batch`"
            where, expected = f"boundary {self.edge}: backward", "a scalar that requires gradients, inside of one"
            raise UserError.at(where, found=found, expected=expected, fix="give the sum of the module's losses there")
        self._micro_batch.losses[self.edge.source].append(loss)

    def _cross_without_gradients(self, plan: LoadedPlan, rows: Tensor) -> Tensor:
        check = self.communicator.check
        if returns_gradients(self.communicator, plan, rows) if check else requires_grad(rows):
            where, problem = f"boundary {self.edge}", "rows that require gradients cross outside of a `micro_batch`"
            because = "a rank without a loss, or whose loss uses no row, would leave the others waiting"
            raise UserError.at(where, problem=problem, because=because, fix="enter `micro_batch(boundary)`")
        return self.communicator.start_forward(plan, widened(rows, self.communicator.dtype)).wait()

    def _doing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context that watches code that waits for other ranks of the boundary."""
        described = f"{what} of boundary {self.edge}, with all its ranks,"
        return self._watchdog.doing(lambda: described, self._timeout_s)

    def __repr__(self) -> str:
        return f"Boundary({self.edge}, rows of {self.communicator.width} {self.communicator.dtype})"


@contextlib.contextmanager
def micro_batch(*boundaries: Boundary) -> Iterator[None]:
    """Enclose the forward and backward passes of a micro-batch. At its end, all ranks send back the gradients of
    all rows that crossed `boundaries`. All ranks of a boundary must enter it, and cross boundaries in the same order.

    Raises:
        UserError: a boundary is already inside a micro-batch.
    """
    if busy := [boundary for boundary in boundaries if boundary._micro_batch is not None]:
        where, problem = f"boundary {busy[0].edge}", "is inside a micro-batch already"
        because = "its crossings go back at the end of that one"
        raise UserError.at(where, problem=problem, because=because, fix="give all boundaries to one `micro_batch`")
    current = MicroBatchCrossings()
    for boundary in boundaries:
        boundary._micro_batch = current
    try:
        yield
    except BaseException:
        if current.problem:
            current.end()  # This raises the problem on all ranks.
        raise
    else:
        current.end()
    finally:
        current.close()
        for boundary in boundaries:
            boundary._micro_batch = None


def place_rows(embedded: Tensor, rows: Tensor, places: Tensor, *, length_first: bool = False) -> Tensor:
    """Return `embedded` with `rows`, [rows, hidden], where the mask `places`, bool [samples, length], is true.

        hidden = place_rows(embedding(tokens), rows, tokens == picture_token)

    `embedded` is [samples, length, hidden], or [length, samples, hidden] with `length_first` as in Megatron. Rows are
    ordered by sample and then by place, and converted to the dtype of `embedded`; both inputs get gradients. With a
    mask on a GPU the host waits for the device.

    Raises:
        UserError: shapes do not fit, or the numbers of places and rows differ (a `RuntimeError` under
            `torch.compile(fullgraph=True)`).
    """
    shape = tuple(embedded.shape[1::-1] if length_first else embedded.shape[:2])
    if tuple(places.shape) != shape or places.dtype != torch.bool or rows.shape[1:] != embedded.shape[2:]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (embedded, rows, places))
        what = "[length, samples, hidden]" if length_first else "[samples, length, hidden]"
        expected = f"{what}, [rows, hidden], [samples, length] and torch.bool"
        found, fix = f"shapes {shapes} and places of {places.dtype}", "reshape them, or change `length_first`"
        raise UserError.at("place_rows", found=found, expected=expected, fix=fix)
    if torch.compiler.is_compiling():  # The number of places is unknown on the host, so the graph checks it.
        torch._assert_async(places.sum() == len(rows), f"place_rows: another number of places than {len(rows)} rows")
    sample, at = places.nonzero().unbind(1)
    if not torch.compiler.is_compiling() and len(at) != len(rows):
        problem, fix = f"{len(at)} places for {len(rows)} rows", "give the rows and the places of the same samples"
        raise UserError.at("place_rows", problem=problem, fix=fix)
    index = at * shape[0] + sample if length_first else sample * shape[1] + at
    if index.device != embedded.device:
        index = on_device(index, embedded.device)
    return embedded.flatten(0, 1).index_copy(0, index, rows.to(embedded.dtype)).view(embedded.shape)
