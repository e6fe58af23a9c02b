"""Errors of one rank that all ranks raise, at the price of one small all-reduce where there are none."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_hetero.distributed.collective import on_every
from megatron_hetero.distributed.communicators import GRADIENT_AXES
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import UserError
from megatron_hetero.recipe.held import HeldModule, HeldParameter

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


def _raise(problem: UserError | None) -> None:
    if problem is not None:
        raise problem


def require_alike(held: Sequence[HeldModule]) -> None:
    """Check that the replicas of each module train the same parameters, and that its ranks along `tp` sum the same over
    `tp`. The ranks of a module call it; those that differ raise `UserError`, all of them.
    """
    differ = []
    for module in held:
        along = {
            GRADIENT_AXES: [
                f"{_sums(each)}{tuple(each.parameter.shape)}{each.parameter.dtype}" for each in module.parameters
            ],
            ("tp",): [_sums(each) for each in module.parameters if each.over_tp is not None],
        }
        differ += [(module, axes) for axes, facts in along.items() if not _is_alike(module, axes, facts)]
    for module, axes in differ:
        raise UserError.at(
            f"module `{module.name}`",
            found=f"other trainable parameters than on another rank along {', '.join(axes)}",
            expected="the same",
            because="their gradients are summed together",
            fix="build, freeze and wrap the module alike on all its ranks",
        )


def _sums(each: HeldParameter) -> str:
    return f"{each.name} {each.over_tp} {each.axes}"


def _is_alike(module: HeldModule, axes: tuple[str, ...], facts: Sequence[str]) -> bool:
    """Whether all ranks of the group have the same facts."""
    group = module.topology.group(module.name, *axes)
    digest = zlib.crc32("\n".join(facts).encode())
    extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=module.topology.platform.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return extremes.tolist() == [digest, -digest]
