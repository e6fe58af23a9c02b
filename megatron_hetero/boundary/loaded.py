"""Boundary plans whose indices are on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_hetero.boundary.buffers import RowIndex, load_index
from megatron_hetero.boundary.plan import RankPlan
from megatron_hetero.boundary.routes import DirectionPlan, Exchange, Phase
from megatron_hetero.errors import UserError


@dataclass(frozen=True, eq=False)
class LoadedExchange:
    """An `Exchange` on the device."""

    phase: Phase
    send: RowIndex
    send_counts: list[int]
    receive: RowIndex
    receive_counts: list[int]


@dataclass(frozen=True, eq=False)
class LoadedDirection:
    """A `DirectionPlan` on the device."""

    held: int
    needed: int
    kept_from: RowIndex
    kept_to: RowIndex
    reduce: LoadedExchange | None
    scatter: LoadedExchange | None
    gather: LoadedExchange | None
    complete: bool


@dataclass(frozen=True, eq=False)
class LoadedPlan:
    """A `RankPlan` whose indices are on the device. `edge`: of the boundary that planned it, if one did."""

    rank: int
    ranks: tuple[int, ...]
    digest: int
    point_to_point: bool
    copies: tuple[int, ...]
    summed: bool
    forward: LoadedDirection
    backward: LoadedDirection | None
    edge: str = ""


def load_plan(plan: RankPlan, device: torch.device, *, edge: str = "") -> LoadedPlan:
    """Copy the indices of `plan` to the device, asynchronously. `edge`: the only one whose rows it is for; else any.

    Raises:
        UserError: `plan` is not one rank's part.
    """
    if not isinstance(plan, RankPlan):
        raise UserError.at(
            "load_plan: plan",
            found=f"a {type(plan).__name__}",
            expected="the part of this rank, a RankPlan",
            fix="give it `plan.rank(rank)`",
        )
    forward = _load_direction(plan.forward, device)
    backward = None if plan.backward is None else _load_direction(plan.backward, device)
    return LoadedPlan(
        plan.rank, plan.ranks, plan.digest, plan.point_to_point, plan.copies, plan.summed, forward, backward, edge
    )


def _load_direction(plan: DirectionPlan, device: torch.device) -> LoadedDirection:
    return LoadedDirection(
        plan.held,
        plan.needed,
        load_index(plan.kept_from, device),
        load_index(plan.kept_to, device),
        _load_exchange(plan.exchange("reduce"), device),
        _load_exchange(plan.exchange("scatter"), device),
        _load_exchange(plan.exchange("gather"), device),
        plan.complete,
    )


def _load_exchange(exchange: Exchange | None, device: torch.device) -> LoadedExchange | None:
    if exchange is None:
        return None
    return LoadedExchange(
        exchange.phase,
        load_index(exchange.send, device),
        exchange.send_counts.tolist(),
        load_index(exchange.receive, device),
        exchange.receive_counts.tolist(),
    )
