"""What the ranks of a boundary check together before a crossing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.distributed.collective import raise_first, require_alike
from megatron_hetero.errors import UserError
from megatron_hetero.layout.grammar import format_ranks

_SAME = 1e-3
"""How far projections of equal gradients may be apart, relative to the sum of absolute values: sums differ in order."""
_FEW = 8
"""So few values may be equal by chance where they are parts."""


class Copy(NamedTuple):
    """What a rank says of its gradients of rows that other ranks need, too: their sum, with weights that depend on the
    place, and that of their absolute values; the first of these ranks, itself, whether gradients are parts, and whether
    all rows have the same one.
    """

    projection: float
    size: float
    leader: int
    rank: int
    summed: bool
    pooled: bool

    @classmethod
    def of(cls, stated: Sequence[float]) -> Copy:
        """From a statement."""
        projection, size, leader, rank, summed, pooled = stated
        return cls(projection, size, int(leader), int(rank), bool(summed), bool(pooled))


def can_compare(plan: LoadedPlan, grads: Tensor) -> bool:
    """Whether copies of `grads` tell if they are what the plan says."""
    return len(plan.copies) > 1 and not (plan.summed and grads.numel() <= _FEW)


def state(plan: LoadedPlan, grads: Tensor) -> Tensor:
    """The fields of this rank's `Copy`, fp64 [6] on the device."""
    size = torch.linalg.vector_norm(grads, 1, dtype=torch.float64)
    pooled = (grads == grads[:1]).all().to(size)
    return torch.stack([_projection(grads), size, *size.new_tensor([min(plan.copies), plan.rank, plan.summed]), pooled])


def require_agreement(
    title: str,
    name: str,
    problem: str | None,
    plan: LoadedPlan,
    rows: Tensor,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Check that no rank has a `problem`, that all have parts of one plan, and that gradients of rows on several ranks
    (`name` is "backward") are what it says: whole and so equal, or parts and so not. Raises the same `UserError` on
    every rank, at the price of one small gather.
    """
    mine = torch.tensor([problem is not None, plan.digest, 0, 0, -1, 0, 0, 0], dtype=torch.float64, device=device)
    if name == "backward" and problem is None and can_compare(plan, rows):
        mine[2:] = state(plan, rows)
    everyone = mine.new_empty(group.size() * len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    stated = everyone.view(group.size(), -1).tolist()
    if any(has_problem for has_problem, *_ in stated):
        raise_first(group, problem)
    plans = [{"plan": f"{int(digest):08x}"} for _, digest, *_ in stated]
    ranks = dist.get_process_group_ranks(group)
    require_alike(f"{title} {name}", plans, ranks, "plan with ownerships of the same batch on all ranks")
    copies = [Copy.of(copy) for _, _, *copy in stated]
    for first in sorted({copy.leader for copy in copies} - {-1}):
        require_fit(title, [copy for copy in copies if copy.leader == first])


def require_fit(title: str, copies: Sequence[Copy]) -> None:
    """Check the copies of one leader. Raises `UserError`."""
    if problem := _misfit(copies):
        raise UserError(f"{title} backward: found gradients of rows {problem}")


def _projection(grads: Tensor) -> Tensor:
    """A weighted sum, fp64, that tells apart gradients with the same values in other places."""
    rows, columns = (torch.arange(1, n + 1, device=grads.device, dtype=torch.float32) for n in grads.shape)
    # Fractions of multiples of an irrational number are spread evenly.
    by_row = torch.mv(grads, (columns * 0.618034 % 1 - 0.3).to(grads.dtype))
    return torch.dot(by_row.double(), (rows * 0.414214 % 1 - 0.3).double())


def _misfit(copies: Sequence[Copy]) -> str:
    """What is wrong with the gradients that several ranks have of the same rows; empty if nothing is."""
    ranks = format_ranks(copy.rank for copy in copies)
    projections, sizes = [copy.projection for copy in copies], [copy.size for copy in copies]
    apart = max(projections) - min(projections) + max(sizes) - min(sizes)
    if not copies[0].summed and apart > _SAME * max(sizes):
        return (
            f"that differ on ranks {ranks}, expected equal ones, because the plan has them as `invariant`: each rank "
            "computes the whole gradient; plan with gradient='partial' if each computes a part"
        )
    for number, copy in enumerate(copies if copies[0].summed else ()):
        same = [other.rank for other in copies[number:] if other[:2] == copy[:2]]
        if copy.size > 0 and len(same) > 1:
            problem = (
                f"that are equal on ranks {format_ranks(same)}, expected parts, because the plan has them as `partial` "
                "and adds them up; plan with gradient='invariant' if each rank computes the whole gradient, and let "
                "ranks with other tokens need other rows"
            )
            if not copy.pooled:
                return problem
            # Equal parts of a mean over rows look like this, too.
            warnings.warn(f"found gradients of rows {problem}", stacklevel=2)
    return ""
