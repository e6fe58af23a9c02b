"""All modules' layouts bound to a world of ranks, with the process groups that they need.

Groups are created eagerly, by every rank, in one global order: modules in the order given, then the axes of
`GROUP_AXES` and `ENDS`, then the groups of that partition. Equal sets of ranks share one process group. Afterwards
each group is checked once by summing a known value over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hetero.layout import Layout
from megatron_hetero.platform import CPU, Platform

GROUP_AXES: tuple[tuple[str, ...], ...] = (
    ("tp",),
    ("sp",),
    ("cp",),
    ("sp", "cp"),
    ("dp",),
    ("pp",),
    ("sp", "cp", "dp"),
    ("tp", "pp"),
    ("tp", "sp", "cp"),
    ("tp", "sp", "cp", "dp", "pp"),
    (),
)
"""The partitions that each module gets. `sp` and `cp` together are Megatron's context-parallel group."""

ENDS = ("first and last pp",)
"""Besides, under `pp`: the pairs of ranks of the first and the last stage that differ in nothing else."""


@dataclass(init=False, repr=False)
class ModuleGroups(ProcessGroupCollection):
    """Megatron's collection of process groups, with the two axes of its context-parallel group `cp` by themselves.

    `sp` is the axis `sp`, `context` the axis `cp`: among ranks `sp` varies faster, so that member i of `cp` is member
    i mod sp of its `sp` group and member i // sp of its `context` group.
    """

    sp: dist.ProcessGroup = field(init=False)
    context: dist.ProcessGroup = field(init=False)


@dataclass(frozen=True)
class Topology:
    """Layouts, this process's rank and its process groups.

    `layouts` maps module to layout; `world` spans all ranks on the device's backend, `host` spans them with gloo for
    integers and messages that never leave the host, and is not `world`, so that another thread can use it meanwhile.
    `files` is one more such group, for what writes and reads checkpoints.
    `host_replicas`: for each module that decodes data, gloo groups of its replicas' ranks, for that other thread too.
    `boundaries`: for each pair of modules (from, to) the ranks of the first's last stage and the second's first stage.
    Where this rank has no part in a group, it is missing.
    `pipelines`: for each of this rank's modules with stages the groups along `pp` for activations and for gradients.
    """

    platform: Platform
    rank: int
    world_size: int
    layouts: Mapping[str, Layout]
    world: dist.ProcessGroup
    host: dist.ProcessGroup
    files: dist.ProcessGroup
    host_replicas: Mapping[str, dist.ProcessGroup]
    boundaries: Mapping[tuple[str, str], dist.ProcessGroup]
    pipelines: Mapping[str, tuple[dist.ProcessGroup, dist.ProcessGroup]]
    _groups: Mapping[tuple[str, tuple[str, ...]], dist.ProcessGroup]

    @classmethod
    def build(
        cls,
        layouts: Mapping[str, Layout],
        platform: Platform,
        *,
        decoding: Collection[str] = (),
        edges: Collection[tuple[str, str]] = (),
    ) -> Topology:
        """Create all groups on the initialised default process group, and check them.

        `decoding`: the modules whose replicas share decoded data. `edges`: (from, to), the boundaries between modules.

        Raises `RuntimeError` where a group does not reduce to the value that its ranks imply.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        world: Any = dist.group.WORLD
        by_ranks: dict[tuple[int, ...], Any] = {tuple(range(world_size)): world}
        mine: dict[tuple[str, tuple[str, ...]], dist.ProcessGroup] = {}
        for module, layout in layouts.items():
            for axes in (*GROUP_AXES, ENDS):
                for ranks in _partition(layout, axes):
                    # The order of ranks inside a group is part of what the group means.
                    group = by_ranks.get(ranks) or by_ranks.setdefault(ranks, dist.new_group(ranks, sort_ranks=False))
                    if rank in ranks:
                        mine[module, axes] = group
        # A group of its own even where `world` is gloo too: the loader's thread uses it while the training thread uses
        # `world`.
        host: Any = dist.new_group(backend="gloo")
        files: Any = dist.new_group(backend="gloo")
        hosts: dict[tuple[int, ...], Any] = {tuple(range(world_size)): host}
        replicas = {name: _host_replica(layouts[name].stage(0), rank, hosts) for name in layouts if name in decoding}
        # Groups of their own too: what crosses, and what passes along a pipeline each way, is received early, and
        # nothing else that two ranks send each other may come between or wait behind it.
        pipelines = {name: _pipelines(layout, rank) for name, layout in layouts.items()}
        crossing: dict[tuple[str, str], tuple[int, ...]] = {
            edge: boundary_ranks(layouts[edge[0]], layouts[edge[1]]) for edge in edges
        }
        boundaries: dict[tuple[str, str], Any] = {edge: dist.new_group(list(ranks)) for edge, ranks in crossing.items()}
        _self_check(by_ranks, rank, platform.device)
        for edge, ranks in crossing.items():
            _self_check({ranks: boundaries[edge]}, rank, platform.device)
        for name, groups in pipelines.items():
            for group in groups or ():
                _self_check({layouts[name].group_of(rank, "pp"): group}, rank, platform.device)
        _self_check(hosts, rank, CPU)
        _self_check({tuple(range(world_size)): files}, rank, CPU)
        frozen = MappingProxyType(dict(layouts))
        return cls(
            platform,
            rank,
            world_size,
            frozen,
            world,
            host,
            files,
            {name: group for name, group in replicas.items() if group is not None},
            {edge: group for edge, group in boundaries.items() if rank in crossing[edge]},
            {name: groups for name, groups in pipelines.items() if groups is not None},
            MappingProxyType(mine),
        )

    def group(self, module: str, *axes: str) -> dist.ProcessGroup:
        """The group of this rank along `axes` of `module`'s layout. `KeyError` where the rank is not in the module."""
        return self._groups[module, axes]

    def collection(self, module: str) -> ModuleGroups:
        """The process groups of `module`, as this rank sees them and as Megatron wants them."""
        group, alone = (lambda *axes: self.group(module, *axes)), self.group(module)
        # There are no experts: their groups are the dense ones where Megatron wants one, or this rank alone.
        return ModuleGroups(
            tp=group("tp"),
            sp=group("sp"),
            context=group("cp"),
            cp=group("sp", "cp"),
            dp=group("dp"),
            pp=group("pp"),
            dp_cp=group("sp", "cp", "dp"),
            mp=group("tp", "pp"),
            tp_cp=group("tp", "sp", "cp"),
            tp_ep_pp=group("tp", "pp"),
            expt_dp=group("sp", "cp", "dp"),
            intra_dist_opt=group("tp", "sp", "cp", "dp", "pp"),
            ep=alone,
            embd=self._groups.get((module, ENDS)),
            pos_embd=None,
        )


def _partition(layout: Layout, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks along `axes`; for `ENDS` some ranks may be in none."""
    if axes != ENDS:
        return layout.groups(*axes)
    return tuple((ranks[0], ranks[-1]) for ranks in layout.groups("pp")) if layout.pp > 1 else ()


def _host_replica(layout: Layout, rank: int, hosts: dict[tuple[int, ...], Any]) -> Any:
    """The group of this rank's replica in `hosts`, to which those that are missing are added; None outside."""
    for ranks in layout.groups("tp", "sp", "cp"):
        if ranks not in hosts:
            hosts[ranks] = dist.new_group(list(ranks), backend="gloo")
    return hosts[layout.group_of(rank, "tp", "sp", "cp")] if rank in layout else None


def _pipelines(layout: Layout, rank: int) -> tuple[Any, Any] | None:
    """The groups of this rank along `pp`, one for each direction; None without stages and outside the layout."""
    if layout.pp == 1:
        return None
    made = [{ranks: dist.new_group(list(ranks)) for ranks in layout.groups("pp")} for _ in range(2)]
    own = layout.group_of(rank, "pp") if rank in layout else ()
    return (made[0][own], made[1][own]) if own else None


def boundary_ranks(source: Layout, destination: Layout) -> tuple[int, ...]:
    """The ranks that a boundary concerns, ascending: the source's last stage and the destination's first."""
    return tuple(sorted({*source.stage(source.pp - 1).ranks, *destination.stage(0).ranks}))


def _self_check(by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup], rank: int, device: torch.device) -> None:
    for ranks, group in by_ranks.items():
        if rank not in ranks:
            continue
        total = torch.tensor([rank + 1], dtype=torch.int64, device=device)
        dist.all_reduce(total, group=group)
        expected = sum(r + 1 for r in ranks)
        if total.item() != expected or dist.get_rank(group) != ranks.index(rank):
            raise RuntimeError(
                f"process group of ranks {ranks}: found sum {total.item()} and position {dist.get_rank(group)}, "
                f"expected {expected} and {ranks.index(rank)} on rank {rank}; the groups were created in different "
                "orders, or the ranks run different versions of the program"
            )
