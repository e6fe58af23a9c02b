"""Errors of one rank that all ranks raise, at the price of one small all-reduce where there are none."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from megatron_hetero.distributed.collective import on_every
from megatron_hetero.distributed.communicators import GRADIENT_AXES
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import UserError
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.wrapped import Wrapped

T = TypeVar("T")


def shared(topology: Topology, work: Callable[[], T]) -> T:
    """What `work` gives on this rank, once all ranks of the world have done it. The first rank's `UserError` is raised
    on every rank. `work` may communicate, if all ranks that take part then raise or none.
    """
    done: list[T] = []
    problem: UserError | None = None
    try:
        done.append(work())
    except UserError as error:
        problem = error
    failed = torch.tensor([problem is not None], dtype=torch.int32)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=topology.host)
    if failed.item():
        on_every(topology.host, lambda: _raise(problem))
    return done[0]


def require_equal(topology: Topology, where: str, facts: Mapping[str, str | None], fix: str) -> None:
    """Check that each fact is the same on all ranks that have it: None where a rank has none. All ranks call it, with
    the same names. Raises `UserError` on all of them.
    """
    if _are_alike(list(facts.values()), topology.host, torch.device("cpu")):
        return
    raise_first_difference(where, on_every(topology.host, lambda: dict(facts)), range(topology.world_size), fix)


def raise_first_difference(
    where: str, of_ranks: Sequence[Mapping[str, str | None]], ranks: Sequence[int], fix: str
) -> NoReturn:
    """Raise a `UserError` that names the first fact in which ranks differ."""
    names = dict.fromkeys(name for facts in of_ranks for name in facts)
    for name in names:
        having = [(rank, facts.get(name)) for rank, facts in zip(ranks, of_ranks, strict=True)]
        having = [(rank, fact) for rank, fact in having if fact is not None]
        for rank, fact in having:
            if fact != having[0][1]:
                found = f"{having[0][1]} on rank {having[0][0]} and {fact} on rank {rank}"
                raise UserError.at(f"{where}: {name}", found=found, expected="the same on all ranks", fix=fix)
    raise AssertionError("facts differ")


def _raise(problem: UserError | None) -> None:
    if problem is not None:
        raise problem


def require_alike(modules: Sequence[TrainedModule]) -> None:
    """Check that the replicas of each module train the same parameters, and that its ranks along `tp` sum the same over
    `tp`. The ranks of a module call it; those that differ raise `UserError`, all of them.
    """
    differ: list[tuple[TrainedModule, dist.ProcessGroup, list[str]]] = []
    for module in modules:
        along = {
            GRADIENT_AXES: [f"{_sums(module, n)}, {tuple(p.shape)} {p.dtype}" for n, p in module.trained.items()],
            ("tp",): [_sums(module, name) for name in module.over_tp],
        }
        for axes, facts in along.items():
            group = module.topology.group(module.name, *axes)
            if not _are_alike(["\n".join(facts)], group, module.topology.platform.device):
                differ.append((module, group, facts))
    for module, group, facts in differ:
        of_ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(of_ranks, {f"parameter {n}": fact for n, fact in enumerate(facts)}, group=group)
        names = dict.fromkeys(name for own in of_ranks for name in own)
        every = [{name: own.get(name, "none") for name in names} for own in of_ranks]
        ranks = dist.get_process_group_ranks(group)
        fix = "build, freeze and wrap the module alike on all its ranks, whose gradients are summed together"
        raise_first_difference(f"module `{module.name}`: trainable parameters", every, ranks, fix)


def _sums(module: TrainedModule, name: str) -> str:
    over_tp = f", its {module.over_tp[name]} over tp" if name in module.over_tp else ""
    along = module.data_parallel.done[name].axes if isinstance(module.data_parallel, Wrapped) else ()
    return f"`{name}`{over_tp}{f', summed over {chr(183).join(along)}' if along else ''}"


def _are_alike(facts: Sequence[str | None], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether each fact is the same on all ranks of the group that have it: by the extremes of its digest."""
    lowest = torch.iinfo(torch.int64).min
    digests = [None if fact is None else zlib.crc32(fact.encode()) for fact in facts]
    ends = [[lowest, lowest] if digest is None else [digest, -digest] for digest in digests]
    extremes = torch.tensor(ends, dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return all(most in (-least, lowest) for most, least in extremes.tolist())
