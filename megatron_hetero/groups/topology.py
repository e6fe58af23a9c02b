"""All modules' layouts bound to a world of ranks, with the process groups that they need.

`layout.communicators` says which groups there are and which share one split. Every rank creates the groups in
the same order and checks each one by summing or sending known values. Then it calls every collective once, since with
NCCL hosts wait for each other at first use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_hetero.base.errors import UserError, one_of
from megatron_hetero.groups.collective import require_same
from megatron_hetero.groups.local_group import LocalGroup
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.layout.axes import MAIN
from megatron_hetero.layout.communicators import (
    DIRECTIONS,
    ENDS,
    Axes,
    CommunicatorKind,
    Direction,
    EdgeUse,
    GroupNeeds,
    Link,
    Ranks,
    Use,
    communicators,
    edge_peers,
    edge_ranks,
    group_of,
    max_ctas,
    replica_groups,
    require_streams,
)
from megatron_hetero.layout.grammar import format_ranks
from megatron_hetero.layout.graph import Edge, Graph, as_edge
from megatron_hetero.layout.layout import Layout

if TYPE_CHECKING:
    from megatron_hetero.groups.megatron import ModuleGroups

CONNECTING_BYTES = (2**10, 2**20, 2**26)
"""Sizes in bytes of the tensors that `_connect` communicates on a GPU; on a CPU it uses only the first."""

Links = Mapping[tuple[Direction, int], dist.ProcessGroup]
"""Process groups of this rank and a neighbouring stage, by direction and pipeline coordinate of the sender."""


class BoundaryGroups(NamedTuple):
    """The two process groups of an edge, with the same ranks: `forward` for rows, `backward` for their gradients."""

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True)
class Topology:
    """The layouts of modules, the rank of this process, and the process groups that contain this rank."""

    platform: Platform
    """The device of tensors, and the backends of their collectives."""
    rank: int
    """The rank of this process."""
    world_size: int
    """The number of ranks."""
    layouts: Mapping[str, Layout]
    """The layout of each module."""
    world: dist.ProcessGroup
    """The group of all ranks on the device's backend."""
    host: dist.ProcessGroup
    """The group of all ranks for tensors in host memory, separate from `world`, so that another thread can use it."""
    files: dist.ProcessGroup
    """A second host group of all ranks, for writing and reading checkpoints."""
    host_replicas: Mapping[str, dist.ProcessGroup]
    """For each module that decodes data, a host group of the ranks of this rank's replica, for the data thread."""
    boundaries: Mapping[Edge, BoundaryGroups]
    """The process groups of the ranks at both ends of each edge between modules."""
    planned: Mapping[Edge, dist.ProcessGroup]
    """A host group of the ranks at both ends of each edge in `planned_edges`."""
    pipelines: Mapping[str, Links]
    """Links to the neighbouring stages for each of this rank's modules with several pipeline stages."""
    _groups: Mapping[Axes, dist.ProcessGroup]
    watchdog: Watchdog
    """The watchdog that ends the process if a call of all ranks waits for too long."""
    planned_edges: tuple[Edge, ...] = ()
    """Edges whose ranks exchange which rows cross (see `Boundary.plan`); the same on all ranks."""
    graph: Graph | None = None
    """The graph of modules, if the topology was built for one."""

    @classmethod
    def build(
        cls,
        layouts: Mapping[str, Layout],
        platform: Platform,
        *,
        decoding: Collection[str] = (),
        edges: Collection[Edge | tuple[str, str]] = (),
        planned: Collection[Edge | tuple[str, str]] = (),
        needs: Mapping[str, GroupNeeds] | None = None,
        megatron: Collection[str] | None = None,
        check: bool = True,
        timeout_s: float = 300.0,
        watchdog: Watchdog | None = None,
    ) -> Topology:
        """Create all groups on the initialised default process group, and check them.

        Args:
            layouts: layouts of the modules, by name.
            platform: the device of tensors, and the backends of their collectives.
            decoding: modules whose replicas share decoded data.
            edges: edges between modules; a pair (from, to) connects the last stage of `from` to the first of `to`.
            planned: edges, in `edges` or not, whose ranks exchange which rows cross, see `Boundary.plan`.
            needs: further needs of modules: copies of a parameter, virtual stages, exchanges along `cp`.
            megatron: modules that Megatron's schedules or optimizers run, which communicate along more axes; by default
                all modules.
            check: whether to check each group. The check also connects its ranks, on which schedules rely with NCCL.
                Must be False for a backend that does not communicate.
            timeout_s: maximum seconds of each call of all ranks, here or later with this topology. A longer call ends
                the process with a message that says where each rank is. 0: no limit.
            watchdog: the rank's existing watchdog, instead of a new one with `timeout_s`.

        Raises:
            UserError: on all ranks, if layouts, modules or edges do not fit each other or the world.
            RuntimeError: the check of a group has a wrong result.
        """
        watchdog = watchdog or Watchdog.of_world(timeout_s, platform)
        with watchdog.waiting(lambda: "the creation of process groups, with all other ranks,"):
            _require_layouts(layouts, dist.get_world_size())
            _require_modules(layouts, decoding=decoding, needs=needs or ())
            rank, world, everybody = dist.get_rank(), dist.group.WORLD, tuple(range(dist.get_world_size()))
            assert world is not None, "the default process group is initialised"
            planned_edges = tuple(as_edge(edge, layouts) for edge in _ordered(planned))
            all_edges = dict.fromkeys([*(as_edge(edge, layouts) for edge in _ordered(edges)), *planned_edges])
            for_megatron = layouts if megatron is None else megatron
            kinds = communicators(layouts, edges=all_edges, needs=needs, megatron=for_megatron)
            if platform.backend == "nccl":
                require_streams(kinds, everybody)
            _equalize_counts(platform)
            # Create host groups first, while all ranks have equally many groups: PyTorch names some by that number.
            host, files = platform.host_group("host"), platform.host_group("files")
            replicas = {name: replica_groups(layouts[name]) for name in layouts if name in decoding}
            planning = {edge: (edge_ranks(layouts, edge),) for edge in planned_edges}
            hosts = _host_groups({**replicas, **planning}, everybody, host, platform)
            created = [(kind, _create(kind, everybody, platform, watchdog)) for kind in kinds]
            groups = {kind: group for kind, group in created if group is not None}
            if check:
                _check_devices(groups, layouts, world, platform)
                _check_hosts([*hosts.items(), ((everybody,), files)], rank)
            by_use = {use: group for kind, group in groups.items() for use in kind.uses_of(rank)}
            ranks_by_edge = {edge: edge_ranks(layouts, edge) for edge in all_edges}
            return cls(
                platform=platform,
                rank=rank,
                world_size=len(everybody),
                layouts=MappingProxyType(dict(layouts)),
                world=world,
                host=host,
                files=files,
                host_replicas={name: group for name, each in replicas.items() if (group := hosts[each]) is not None},
                boundaries={
                    edge: _boundary(by_use, edge, ranks, rank) for edge, ranks in ranks_by_edge.items() if rank in ranks
                },
                planned={edge: group for edge, each in planning.items() if (group := hosts[each]) is not None},
                pipelines={
                    name: _links(by_use, name) for name, layout in layouts.items() if rank in layout and layout.pp > 1
                },
                _groups=MappingProxyType({use: group for use, group in by_use.items() if isinstance(use, Axes)}),
                watchdog=watchdog,
                planned_edges=planned_edges,
            )

    def has(self, module: str) -> bool:
        """Return whether this rank belongs to `module`. Raises `KeyError` if there is no such module."""
        if module not in self.layouts:
            raise KeyError(f"no module `{module}`; there are {', '.join(self.layouts) or 'none'}")
        return self.rank in self.layouts[module]

    def shard(self, module: str, samples: Any) -> Any:
        """Return the samples of this rank's replica of `module`, or none on a rank without the module. Replicas get
        contiguous, nearly equal shares of `samples`, in order.

            pictures = topology.shard("vision", pictures)

        `samples`: a list, range, array, tensor or anything else with a length and slices, the same on all ranks. Raises
        `KeyError` if there is no such module.
        """
        if not self.has(module):
            return samples[:0]
        layout, count = self.layouts[module], len(samples)
        replica = layout.replica_of(self.rank)
        return samples[count * replica // layout.dp : count * (replica + 1) // layout.dp]

    def mesh(self, module: str, view: str = MAIN.name) -> DeviceMesh:
        """Return the ranks of `module` as a PyTorch `DeviceMesh` with the groups of this topology.

        Mesh dimensions are the axes of a view of the layout (`pp`, `dp`, `cp`, `sp`, `tp` in the main view), including
        axes of size 1: ``fully_shard(model, mesh=topology.mesh("vision")["dp"])``. Raises `KeyError` like `group`, and
        `UserError` if there is no such view.
        """
        self._require(module)
        layout = self.layouts[module]
        degrees = layout.degrees_in(layout.view(view))
        names = tuple(degrees)[::-1]  # Order axes from slowest to fastest varying among ranks.
        groups = [self.group(module, axis) for axis in names]
        for group in groups:
            if isinstance(group, LocalGroup):
                group.register()  # A mesh looks up its groups by name.
        ranks = torch.tensor(layout.ranks, dtype=torch.int).view([degrees[axis] for axis in names])
        return DeviceMesh.from_group(groups, self.platform.device.type, ranks, mesh_dim_names=names)

    def group(self, module: str, *axes: str) -> dist.ProcessGroup:
        """Return this rank's group along `axes` (in any order) of one view of `module`'s layout or, for the axes
        `ENDS`, its group of the first and the last stage.

        Groups along one axis, along all of `sp`, `cp` and `dp`, along the axes over which another view splits
        parameters or sums gradients, and along `communicators.MEGATRON_AXES` for modules in `megatron` of `build` have
        a communicator. Other groups have ranks but no communicator.

        Raises:
            KeyError: there is no such module, or the rank is not in it.
            UserError: there is no such axis, or the axes are of several views.
        """
        if (use := Axes(module, axes)) in self._groups:
            return self._groups[use]
        self._require(module)
        if axes == ENDS:
            raise KeyError(f"rank {self.rank} has no group of the first and the last stage of `{module}`")
        layout = self.layouts[module]
        if (use := Axes(module, axes, layout.view_of(*axes))) in self._groups:
            return self._groups[use]
        ranks = layout.group_of(self.rank, *axes)
        others = (group for use, group in self._groups.items() if use.module == module and _ranks(group) == ranks)
        return next(others, None) or LocalGroup(ranks, self.rank, f"group along {', '.join(axes)} of `{module}`")

    def _require(self, module: str) -> None:
        if not self.has(module):
            ranks = format_ranks(self.layouts[module].ranks)
            raise KeyError(f"rank {self.rank} is not in `{module}`, whose ranks are {ranks}")

    def collection(self, module: str) -> ModuleGroups:
        """Return this rank's process groups of `module` for Megatron-Core's layers. Raises `KeyError` like `group`."""
        self._require(module)
        from megatron_hetero.groups.megatron import module_groups  # This imports Megatron-Core.

        return module_groups(
            partial(self.group, module), self._groups.get(Axes(module, ENDS)), self.layouts[module].views
        )


def build(
    graph: Graph,
    layouts: Mapping[str, str | Layout] | None = None,
    *,
    platform: Platform | None = None,
    needs: Mapping[str, GroupNeeds] | None = None,
    megatron: Collection[str] | None = None,
    decoding: Collection[str] = (),
    planned: bool = True,
    check: bool = True,
    timeout_s: float = 300.0,
    watchdog: Watchdog | None = None,
    **named: str | Layout,
) -> Topology:
    """Build the topology for the modules of `graph`, each in the layout with its name. All ranks make the same call.

        topology = build(graph, vision="dp:8", text="tp:4,dp:2")
        topology = build(graph, {"vision": "dp:8", "text": "tp:4,dp:2"})

    Args:
        graph: the modules, and the edges between them.
        layouts, named: layouts by module; one without ranks covers all ranks.
        platform: the device of tensors; by default the current GPU if the default process group has NCCL, else the CPU.
        planned: whether ranks exchange which rows cross each edge, as a `Runner` does (see `Boundary.plan`).
        check: whether ranks compare their arguments, and check each group. Further arguments: see `Topology.build`.

    Raises:
        UserError: on all ranks, if a module has no layout, a layout has no module in the graph or does not fit the
            ranks, arguments differ between ranks, or no process group is initialised.
    """
    if not dist.is_initialized():
        fix = "call `torch.distributed.init_process_group`, or be inside `process_group()`"
        raise UserError.at("build", problem="no process group is initialised", fix=fix)
    platform = platform or _platform()
    watchdog = watchdog or Watchdog.of_world(timeout_s, platform)
    try:
        parsed = _parsed(graph, {**(layouts or {}), **named})
        graph, problem = graph.in_layouts(parsed), None
    except UserError as error:
        parsed, problem = {}, error
    if check:
        facts = _facts(graph, parsed) | {
            "problem": str(problem or "none"),
            "needs": str({name: each for name, each in sorted((needs or {}).items()) if each != GroupNeeds()}),
            "megatron": "all" if megatron is None else str(sorted(megatron)),
        }
        with watchdog.waiting(lambda: "`build`, with all other ranks,"):
            require_same(dist.group.WORLD, "build", facts, "call it with the same graph and layouts on all ranks")
    if problem is not None:
        raise problem
    topology = Topology.build(
        parsed,
        platform,
        edges=graph.edges,
        planned=graph.edges if planned else (),
        decoding=decoding,
        needs=needs,
        megatron=megatron,
        check=check,
        watchdog=watchdog,
    )
    return replace(topology, graph=graph)


def _facts(graph: Graph, layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Return the arguments that must be equal on all ranks, as texts by name."""
    return {
        "edges": ", ".join(map(str, graph.edges)) or "none",
        **{f"layout of `{name}`": str(layout) for name, layout in layouts.items()},
        "modules": ", ".join(layouts),
        **{f"width of `{edge}`": str(graph.width_of(edge)) for edge in graph.edges},
        **{f"outputs of `{edge}`": ", ".join(graph.outputs_of(edge)) for edge in graph.edges},
        "dtype": str(graph.dtype),
        "transport": str(graph.transport),
    }


def _parsed(graph: Graph, layouts: Mapping[str, str | Layout]) -> dict[str, Layout]:
    """Return the parsed layouts of the graph's modules, in the graph's order. Raises `UserError`."""
    for name in (*graph.modules, *layouts):
        if name not in layouts:
            fix = f"add {name}=..."
            raise UserError.at("build", found=f"no layout of `{name}`", expected="one for each module", fix=fix)
        if name not in graph.modules:
            expected = one_of(graph.modules, "modules in the graph")
            raise UserError.at("build", found=f"a layout of `{name}`", expected=expected, fix="remove it")
    world = dist.get_world_size()
    return {
        name: given if isinstance(given := layouts[name], Layout) else Layout.parse(given, world, module=name)
        for name in graph.modules
    }


def _platform() -> Platform:
    """Return the platform of the default process group."""
    # `init_process_group()` without arguments has a backend for the GPU and one for the host.
    backends = dist.get_backend_config()
    if torch.cuda.is_available() and "nccl" in backends:
        return Platform(torch.device("cuda", torch.cuda.current_device()), "nccl")
    return Platform(CPU, "gloo" if "gloo" in backends else dist.get_backend())


def _require_layouts(layouts: Mapping[str, Layout], world: int) -> None:
    """Check the types, names and ranks of layouts for a world of `world` ranks. Raises `UserError`."""
    for name, layout in layouts.items():
        where = f"Topology.build: layout of `{name}`"
        if "." in name:
            because, fix = "dots separate names of modules, stages and tensors", "rename the module"
            raise UserError.at(where, found="a dot in its name", expected="none", because=because, fix=fix)
        if not isinstance(layout, Layout):
            found, fix = f"a {type(layout).__name__}", "parse it with `resolve` or `Layout.parse`"
            raise UserError.at(where, found=found, expected="a Layout", fix=fix)
        if layout.ranks[-1] >= world:
            expected = f"ranks from 0 to {world - 1}, as in the default process group"
            raise UserError.at(where, found=f"`{layout}`", expected=expected, fix="start more ranks, or use fewer")


def _require_modules(layouts: Mapping[str, Layout], **collections: Collection[str]) -> None:
    """Check that all names in these arguments are modules with a layout. Raises `UserError`."""
    for argument, names in collections.items():
        if unknown := [name for name in names if name not in layouts]:
            found, expected = f"`{unknown[0]}`", one_of(layouts, "layouts")
            raise UserError.at(f"Topology.build: {argument}", found=found, expected=expected, fix="name its modules")


def _ordered(edges: Collection[Edge | tuple[str, str]]) -> Collection[Edge | tuple[str, str]]:
    """Return edges in an order that is the same in each process, unlike the order of a set."""
    return sorted(edges, key=str) if isinstance(edges, set | frozenset) else edges


def _ranks(group: dist.ProcessGroup) -> Ranks:
    return tuple(dist.get_process_group_ranks(group))


def _host_groups(
    wanted: Mapping[str | Edge, tuple[Ranks, ...]], everybody: Ranks, host: dist.ProcessGroup, platform: Platform
) -> dict[tuple[Ranks, ...], dist.ProcessGroup | None]:
    """Create host groups. Returns this rank's group, or None, by the ranks of all groups of its kind."""
    result: dict[tuple[Ranks, ...], dist.ProcessGroup | None] = {(everybody,): host}
    for name, groups in wanted.items():
        if groups not in result:  # All ranks call this, including ranks outside the module.
            result[groups] = platform.split_hosts(groups, f"hosts of {name}")
    return result


def _equalize_counts(platform: Platform) -> None:
    """Create process groups until all ranks have equally many, since a program may have created some before. PyTorch
    names a group of a subset of ranks after each rank's number of groups (from 2.14 on: number of names).
    """
    world, counts = dist.distributed_c10d._world, [(0, 0)] * dist.get_world_size()
    dist.all_gather_object(counts, (len(world.pg_names), world.group_count))
    groups, names = map(max, zip(*counts, strict=True))
    for _ in range(len(world.pg_names), groups):
        platform.split_hosts((), "filler")
    world.group_count = names + groups


def _create(
    kind: CommunicatorKind, everybody: Ranks, platform: Platform, watchdog: Watchdog
) -> dist.ProcessGroup | None:
    """Create all communicators of one kind, and return this rank's group, or None if it is in none of them."""
    if kind.is_worlds(everybody):
        return dist.group.WORLD
    with watchdog.waiting(lambda: f"the creation of process groups {kind}, with all other ranks,"):  # It may be slow.
        return platform.split(kind.groups, str(kind), max_ctas=max_ctas(kind.uses[0]), urgent=kind.is_urgent)


def _boundary(by_use: Mapping[Use, dist.ProcessGroup], edge: Edge, ranks: Ranks, rank: int) -> BoundaryGroups:
    alone = None if len(ranks) > 1 else LocalGroup(ranks, rank, f"boundary {edge}")
    return BoundaryGroups(*(alone or by_use[EdgeUse(edge, direction)] for direction in DIRECTIONS))


def _links(by_use: Mapping[Use, dist.ProcessGroup], module: str) -> Links:
    links = {use: group for use, group in by_use.items() if isinstance(use, Link) and use.module == module}
    return MappingProxyType({(use.direction, use.sender): group for use, group in links.items()})


# ---------------------------------------------------------------------------------------- the self-check


def _check_devices(
    groups: Mapping[CommunicatorKind, dist.ProcessGroup],
    layouts: Mapping[str, Layout],
    world: dist.ProcessGroup,
    platform: Platform,
) -> None:
    """Check this rank's groups for device tensors, and connect their ranks if the backend connects at first use."""
    rank = dist.get_rank()
    _check_sum(world, tuple(range(world.size())), rank, platform.device)
    for kind, group in groups.items():
        _check_kind(kind, group, layouts, rank, platform.device)
    if platform.connects_late:
        for group in dict.fromkeys([world, *(group for kind, group in groups.items() if kind.collects)]):
            _connect(group, platform.device)


def _check_hosts(groups: Collection[tuple[tuple[Ranks, ...], dist.ProcessGroup | None]], rank: int) -> None:
    """Check this rank's groups for tensors in host memory, given the ranks of all groups of each kind."""
    for ranks, group in groups:
        if group is not None and (members := group_of(ranks, rank)):
            _check_sum(group, members, rank, CPU)


def _check_kind(
    kind: CommunicatorKind, group: dist.ProcessGroup, layouts: Mapping[str, Layout], rank: int, device: torch.device
) -> None:
    """Check a communicator with the kinds of operations for which it is used.

    NCCL connects two ranks at their first message, for which both hosts wait. In a step that would hang if one of them
    has other work to do first. So all pairs that may exchange messages later do so here, and `_connect` does the same
    for collectives.
    """
    for use in kind.uses_of(rank):
        if isinstance(use, Link):
            _check_message(group, rank, layouts[use.module].coordinate(rank).pp == use.sender, device)
        elif isinstance(use, EdgeUse):
            _check_messages(group, edge_ranks(layouts, use.edge), rank, *edge_peers(layouts, use, rank), device)
    ranks = group_of(kind.groups, rank)
    if ranks is not None and isinstance(kind.uses[0], Axes):
        _check_sum(group, ranks, rank, device)
        if any(isinstance(use, Axes) and use.exchanges for use in kind.uses):
            others = tuple(r for r in ranks if r != rank)
            _check_messages(group, ranks, rank, others, others, device)


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Call all collectives that a run uses, in its dtypes and in sizes from small to large.

    NCCL chooses among algorithms (ring, tree, NVLS, PAT) by size and type. At the first use of each one, hosts wait for
    each other and allocate buffers (NCCL_RUNTIME_CONNECT). In a step this would happen during a backward pass, when
    PyTorch has taken the memory. NCCL_RUNTIME_CONNECT=0 would allocate buffers for all communicators, and hangs for PAT
    on nodes with different numbers of ranks (NVIDIA/nccl issue 2385).
    """
    for size in CONNECTING_BYTES if device.type == "cuda" else CONNECTING_BYTES[:1]:
        for dtype in (torch.bfloat16, torch.float32):
            mine = torch.zeros(-(-size // (dtype.itemsize * group.size())), dtype=dtype, device=device)
            whole = mine.repeat(group.size())
            dist.all_reduce(whole, group=group)
            dist.reduce_scatter_tensor(mine, whole, group=group)
            dist.all_gather_into_tensor(whole, mine, group=group)


def _check_sum(group: dist.ProcessGroup, ranks: Ranks, rank: int, device: torch.device) -> None:
    """Check a group by an all-reduce of known values. Raises `RuntimeError`."""
    total = torch.tensor([rank + 1], dtype=torch.int64, device=device)
    dist.all_reduce(total, group=group)
    _require(ranks, rank, f"sum {total.item()}", f"sum {sum(r + 1 for r in ranks)}", group)


def _check_message(group: dist.ProcessGroup, rank: int, sends: bool, device: torch.device) -> None:
    """Send a known value one way, as a pipeline does, for which PyTorch may use another communicator, and check it."""
    ranks = _ranks(group)
    (peer,) = (r for r in ranks if r != rank)
    value = torch.tensor([rank if sends else -1], dtype=torch.int64, device=device)
    if sends:
        dist.send(value, peer, group=group)
    else:
        dist.recv(value, peer, group=group)
    _require(ranks, rank, f"message {value.item()}", f"message {rank if sends else peer}", group)


def _check_messages(
    group: dist.ProcessGroup, ranks: Ranks, rank: int, to: Ranks, back: Ranks, device: torch.device
) -> None:
    """Send a known value to the ranks in `to`, receive one from each rank in `back`, and check the received values."""
    _require(ranks, rank, f"ranks {_ranks(group)}", f"ranks {ranks}", group)
    mine = torch.full((len(to),), rank, dtype=torch.int64, device=device)
    values = torch.full((len(back),), -1, dtype=torch.int64, device=device)
    counts = ([int(r in peers) for r in ranks] for peers in (back, to))
    dist.all_to_all_single(values, mine, *counts, group=group)
    _require(ranks, rank, f"messages {values.tolist()}", f"messages {list(back)}", group)


def _require(ranks: Ranks, rank: int, found: str, expected: str, group: dist.ProcessGroup) -> None:
    if found != expected or dist.get_rank(group) != ranks.index(rank):
        raise RuntimeError(
            f"process group of ranks {ranks}: found {found} and position {dist.get_rank(group)}, "
            f"expected {expected} and {ranks.index(rank)} on rank {rank}; the groups were created in different "
            "orders, or the ranks run different versions of the program"
        )
