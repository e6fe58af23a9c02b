"""Lists the communicators of a topology, grouped by creation call. Pure; `Topology.build` creates the communicators.

An NCCL communicator is one queue: a receive that was posted early blocks all later operations. So each communicator
has one use and, if operations are posted early, one direction (docs/schedules.md, "How deadlocks are excluded"):

    use                    ranks                                          communicates
    axes of a module       a group of the layout along `tp`, `sp`, `cp`   inside layers, synchronous with computation
                           first and last stage                           gradients of a tied embedding
                           other groups of `MEGATRON_AXES`                Megatron's own schedules and optimizers
                           shards of a further view                       exchanges inside its layers
    gradients of a module  along `sp`, `cp` and `dp`; in a further view,  sums of gradients and gathers of weights,
                           its `sum_axes`                                 concurrent with computation
    link of a pipeline     a stage and the stage that it sends to         activations, or gradients, one way
    edge                   a stage of one module and a stage of another   rows, or their gradients, one way

Uses that are synchronous with computation share a communicator, possibly the world's, if their groups are equal: a rank
runs their operations one by one anyway. Gradients, links and edges have separate communicators, except that two views
of a module share one if the same ranks sum their gradients.

Each communicator takes one of the 32 streams of a PyTorch pool (c10/cuda/CUDAStream.cpp); with more than 32, two
communicators share a stream and thus a queue. The highest-priority pool is for kernels that must get multiprocessors
before a running matrix product finishes: all kernels that run concurrently with computation, including exchanges along
`tp`.

All ranks create groups without a common rank in one call (`ncclCommSplit`, one color per group). These groups form
one *kind*, so that the number of calls does not grow with ranks or degrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.axes import AXES, MAIN, View, axes_of
from megatron_hetero.layout.graph import Edge, as_edge
from megatron_hetero.layout.layout import Layout

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
Ranks = tuple[int, ...]

REPLICA_AXES = axes_of("weights", "tokens")
"""Axes along which ranks work on the same samples."""

GRADIENT_AXES = MAIN.sum_axes
"""Axes along which ranks hold the same parameters and different tokens, in the main view."""

ENDS = ("first and last pp",)
"""Stands for the pairs of a first-stage and a last-stage rank whose other coordinates are equal."""

CTAS = 4
"""Maximum CTAs of a kernel that is posted early. One CTA moves about 20 GB/s over NVLink and two saturate a network
card: enough for activations and rows during computation. A power of two, as NCCL's point-to-point channels are.
"""

GRADIENT_CTAS = 16
"""Maximum CTAs of a kernel that sums gradients or gathers weights. 16 CTAs move about 320 GB/s over NVLink, of which
messages of 30 to 60 MB reach 220 to 300 GB/s, and six times the bandwidth of a network card.
"""

POOL_STREAMS = 32
"""Number of streams in a PyTorch stream pool."""

AXES_OF_GROUPS: tuple[tuple[str, ...], ...] = (("tp",), *((axis,) for axis in axes_of("tokens")), GRADIENT_AXES)
"""The groups of axes along which every module communicates."""

MEGATRON_AXES: tuple[tuple[str, ...], ...] = (
    axes_of("layers"),  # pipeline schedules
    axes_of("tokens"),  # attention under context parallelism
    axes_of("samples"),  # metrics of layers
    REPLICA_AXES,  # load balancing of experts
    axes_of("weights", "tokens", "samples"),
    axes_of("weights", "layers"),  # gradient norms
    AXES,
    ENDS,
)
"""Further groups of axes along which Megatron-Core's schedules, expert layers and optimizers communicate."""


class Axes(NamedTuple):
    """A use of a communicator: communication of a module along `axes` of a `view` of its layout, or between `ENDS`.
    `by_heads`: whether the module also exchanges tokens for heads.
    """

    module: str
    axes: tuple[str, ...]
    view: View = MAIN
    by_heads: bool = False

    @property
    def is_beside(self) -> bool:
        """Whether this communication runs concurrently with computation, as sums of gradients do."""
        return self.axes == self.view.sum_axes

    @property
    def exchanges(self) -> bool:
        """Whether this communication includes all-to-alls, as in attention under `sp` and layers of a further view."""
        return self.by_heads or self.axes == ("sp",) or (self.view != MAIN and self.axes == self.view.shard_axes)

    def __str__(self) -> str:
        return f"{self.module} {','.join(self.axes)}{' by heads' * self.by_heads}"


class Link(NamedTuple):
    """A use of a communicator: messages from pipeline coordinate `sender` of a module to the next (`forward`) or the
    previous coordinate. With virtual stages the first coordinate follows the last.
    """

    module: str
    direction: Direction
    sender: int

    def __str__(self) -> str:
        return f"{self.module} {self.direction} from stage {self.sender}"


class EdgeUse(NamedTuple):
    """A use of a communicator: rows that cross an edge (`forward`), or gradients that return (`backward`)."""

    edge: Edge
    direction: Direction

    def __str__(self) -> str:
        return ">".join(self.edge.ends if self.direction == "forward" else self.edge.ends[::-1])


Use = Axes | Link | EdgeUse


@dataclass(frozen=True)
class GroupNeeds:
    """Communication that a module's layers need beyond the groups along the axes of its layout."""

    tied: bool = False
    """Whether the module's first and last stages share a parameter, whose gradients are summed between `ENDS`."""

    interleaved: bool = False
    """Whether the module has virtual stages, so that its last stage sends to its first."""

    exchanging: bool = False
    """Whether the module's layers exchange tokens for heads along `cp` too, as gated delta nets do."""


@dataclass(frozen=True)
class CommunicatorKind:
    """Communicators that one call creates. `members`: each use with its groups of at least two ranks, ascending.
    Several uses in a kind have the same groups, or are links of one direction without a common rank.
    """

    members: tuple[tuple[Use, tuple[Ranks, ...]], ...]

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses of these communicators."""
        return tuple(use for use, _ in self.members)

    @cached_property
    def groups(self) -> tuple[Ranks, ...]:
        """The ranks of each communicator; no rank is in two communicators."""
        return tuple(dict.fromkeys(ranks for _, groups in self.members for ranks in groups))

    @property
    def is_synchronous(self) -> bool:
        """Whether all operations of these communicators are synchronous with computation."""
        return all(isinstance(use, Axes) and not use.is_beside for use in self.uses)

    @property
    def is_urgent(self) -> bool:
        """Whether these communicators run concurrently with matrix products and must not wait for the products."""
        return not self.is_synchronous or any(isinstance(use, Axes) and use.axes == ("tp",) for use in self.uses)

    @property
    def collects(self) -> bool:
        """Whether these communicators run collectives other than the all-to-alls of attention under `sp`."""
        return any(isinstance(use, Axes) and use.axes != ("sp",) for use in self.uses)

    def is_worlds(self, everybody: Ranks) -> bool:
        """Return whether the world's communicator can serve all uses: they are synchronous and span all ranks."""
        return self.is_synchronous and self.groups == (everybody,)

    def uses_of(self, rank: int) -> tuple[Use, ...]:
        """Return the uses of the communicator that contains `rank`; empty if no communicator does."""
        return tuple(use for use, groups in self.members if group_of(groups, rank) is not None)

    def __str__(self) -> str:
        if isinstance(first := self.uses[0], Link):
            senders = ", ".join(str(use.sender) for use in self.uses if isinstance(use, Link))
            return f"{first.module} {first.direction} from stages {senders}"
        return ", ".join(map(str, self.uses))


def max_ctas(use: Use) -> int | None:
    """Return the maximum number of CTAs of a kernel that communicates for `use`; None leaves the choice to NCCL."""
    if isinstance(use, Axes):
        return GRADIENT_CTAS if use.is_beside else None
    return CTAS


def require_streams(kinds: Collection[CommunicatorKind], everybody: Ranks) -> None:
    """Check that no two urgent communicators of a rank, including the world's, share a stream of PyTorch's
    highest-priority pool. FSDP2's streams are in another pool on GPUs with more than two priorities. Raises
    `UserError`.
    """
    urgent = [kind for kind in kinds if kind.is_urgent and not kind.is_worlds(everybody)]
    counts = Counter((*everybody, *(rank for kind in urgent for ranks in kind.groups for rank in ranks)))
    rank, count = max(counts.items(), key=itemgetter(1))
    if count > POOL_STREAMS:
        where, fix = f"communicators of rank {rank}", "give modules ranks of their own, or use fewer modules"
        found = f"{count} for the world, `tp`, links of pipelines, edges and gradients"
        because = "PyTorch has that many streams, and two on one would wait for each other"
        raise UserError.at(where, found=found, expected=f"at most {POOL_STREAMS}", because=because, fix=fix)


def group_of(groups: Sequence[Ranks], rank: int) -> Ranks | None:
    """Return the group that contains `rank`, or None."""
    return next((ranks for ranks in groups if rank in ranks), None)


def communicators(
    layouts: Mapping[str, Layout],
    *,
    edges: Collection[Edge | tuple[str, str]] = (),
    needs: Mapping[str, GroupNeeds] | None = None,
    megatron: Collection[str] = (),
) -> tuple[CommunicatorKind, ...]:
    """Return all communicators other than the world's, in the order in which they are created.

    Args:
        layouts: layouts of the modules by name.
        edges: edges of the graph of modules.
        needs: further communication needs by module; omitted modules have none.
        megatron: modules that Megatron's own schedules or optimizers run.
    """
    by_module = {name: (needs or {}).get(name, GroupNeeds()) for name in layouts}
    kinds = (
        *_axis_kinds(layouts, by_module, megatron),
        *(kind for name, layout in layouts.items() for kind in _link_kinds(name, layout, by_module[name].interleaved)),
        *(_edge_kind(layouts, as_edge(edge, layouts), direction) for edge in edges for direction in DIRECTIONS),
    )
    return tuple(kind for kind in kinds if kind.groups)


def gradient_uses(name: str, layout: Layout) -> tuple[Axes, ...]:
    """Return the uses that sum a module's gradients in separate communicators, the main view's sum first."""
    uses = [
        Axes(name, view.sum_axes, view)
        for view in (MAIN, *layout.views)
        if layout.ways("tokens", "samples", view=view) > 1
    ]
    if len(uses) < 2:
        return tuple(uses)
    return tuple({layout.groups(*use.axes): use for use in reversed(uses)}.values())[::-1]


def replica_groups(layout: Layout) -> tuple[Ranks, ...]:
    """Return the first-stage ranks of each replica of a module, which share the data that one of them decodes."""
    return layout.stage(0).groups(*REPLICA_AXES)


def edge_ranks(layouts: Mapping[str, Layout], edge: Edge) -> Ranks:
    """Return the ranks of both ends of an edge, ascending."""
    return tuple(sorted({*edge.source_ranks(layouts[edge.source]), *edge.target_ranks(layouts[edge.target])}))


def edge_peers(layouts: Mapping[str, Layout], use: EdgeUse, rank: int) -> tuple[Ranks, Ranks]:
    """Return the ranks to which `rank` may send, and the ranks from which it may receive, in one direction of an
    edge; both ascending.

    Rows go from any rank of one end to any rank of the other, and between ranks of a replica that need the same rows.
    """
    edge, direction = use
    source, target = layouts[edge.source], layouts[edge.target]
    sides = source.stage(edge.source_coordinate(source)), target.stage(edge.target_coordinate(target))
    senders, receivers = sides if direction == "forward" else sides[::-1]
    replica = {r for side in sides if rank in side for r in side.group_of(rank, *REPLICA_AXES)}
    to = replica.union(receivers.ranks if rank in senders else ())
    back = replica.union(senders.ranks if rank in receivers else ())
    return tuple(sorted(to - {rank})), tuple(sorted(back - {rank}))


def _axis_kinds(
    layouts: Mapping[str, Layout], needs: Mapping[str, GroupNeeds], megatron: Collection[str]
) -> Iterator[CommunicatorKind]:
    found: dict[tuple[Any, ...], list[Use]] = {}
    for name, layout in layouts.items():
        own = (*AXES_OF_GROUPS, *([ENDS] if needs[name].tied else []))
        main = [Axes(name, axes) for axes in dict.fromkeys((*own, *MEGATRON_AXES) if name in megatron else own)]
        main += [Axes(name, ("cp",), by_heads=True)] * needs[name].exchanging
        for use in (*main, *(use for view in layout.views for use in _view_uses(name, view, name in megatron))):
            along = layout.groups("pp") if use.axes == ENDS else layout.groups(*use.axes)
            groups = tuple((ranks[0], ranks[-1]) if use.axes == ENDS else ranks for ranks in along if len(ranks) > 1)
            if groups:
                found.setdefault((groups, name if use.is_beside else None), []).append(use)
    return (CommunicatorKind(tuple((use, groups) for use in uses)) for (groups, _), uses in found.items())


def _view_uses(name: str, view: View, megatron: bool) -> Iterator[Axes]:
    """Yield a further view's uses: exchanges between shards, sums of gradients, and Megatron's gradient norms."""
    alone = [(axis,) for axis in view.shard_axes]
    norms = [(*view.shard_axes, "pp")] if megatron else []
    return (Axes(name, axes, view) for axes in dict.fromkeys([*alone, view.shard_axes, view.sum_axes, *norms]))


def _link_kinds(name: str, layout: Layout, interleaved: bool) -> Iterator[CommunicatorKind]:
    """Yield two kinds per direction, links from even and from odd stages, and a third if an odd ring needs it."""
    for direction in DIRECTIONS:
        kinds: list[list[tuple[int, int]]] = []
        for link in _links(layout.pp, direction, interleaved):
            for kind in kinds:
                if not {stage for other in kind for stage in other}.intersection(link):
                    kind.append(link)
                    break
            else:
                kinds.append([link])
        for kind in kinds:
            yield CommunicatorKind(tuple((Link(name, direction, link[0]), _pairs(layout, *link)) for link in kind))


def _links(pp: int, direction: Direction, interleaved: bool) -> Sequence[tuple[int, int]]:
    """Return the pairs of sending and receiving pipeline coordinates."""
    by = 1 if direction == "forward" else -1
    links = [(sender, sender + by) for sender in range(pp) if 0 <= sender + by < pp]
    return [*links, ((pp - 1, 0) if by == 1 else (0, pp - 1))] if interleaved and pp > 1 else links


def _pairs(layout: Layout, sender: int, receiver: int) -> tuple[Ranks, ...]:
    ends = zip(layout.stage(sender).ranks, layout.stage(receiver).ranks, strict=True)
    return tuple((min(pair), max(pair)) for pair in ends)


def _edge_kind(layouts: Mapping[str, Layout], edge: Edge, direction: Direction) -> CommunicatorKind:
    ranks = edge_ranks(layouts, edge)
    return CommunicatorKind(((EdgeUse(edge, direction), (ranks,) if len(ranks) > 1 else ()),))
