"""What the ranks of a boundary check together before a crossing."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.loaded import LoadedPlan
from megatron_hetero.errors import UserError
from megatron_hetero.layout.grammar import format_ranks


class _RankCheck(NamedTuple):
    """A rank's view of a crossing: its error, if any, and the digest of its plan."""

    rank: int
    problem: str | None
    digest: int


def require_agreement(
    name: str, problem: str | None, digest: int, copied: bool, group: dist.ProcessGroup, device: torch.device
) -> bool:
    """Raise the same `UserError` on every rank if any has a problem or the digests differ. Returns whether any rank's
    rows are `copied`.
    """
    # The largest and the smallest digest in one reduction.
    flags = torch.tensor([problem is not None, digest, -digest, copied], dtype=torch.int64, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    problems, largest, smallest, any_copied = flags.tolist()
    if problems or largest != -smallest:
        checks: list[Any] = [None] * group.size()
        dist.all_gather_object(checks, _RankCheck(dist.get_rank(), problem, digest), group=group)
        raise UserError(_disagreement(name, checks))
    return bool(any_copied)


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
    """The fields of this rank's `Copy`, fp64 on the device; its leader is -1 where it cannot be compared."""
    leader = min(plan.copies) if can_compare(plan, grads) else -1
    size = torch.linalg.vector_norm(grads, 1, dtype=torch.float64)
    pooled = (grads == grads[:1]).all().to(size)
    return torch.stack([_projection(grads), size, *size.new_tensor([leader, plan.rank, plan.summed]), pooled])


def require_fitting_copies(title: str, plan: LoadedPlan, grads: Tensor, group: dist.ProcessGroup) -> None:
    """Check that gradients of rows on several ranks are what the plan says: whole and so equal, or parts and so not.
    Raises the same `UserError` on every rank.
    """
    mine = state(plan, grads)
    everyone = mine.new_empty(group.size() * len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    copies = [Copy.of(stated) for stated in everyone.view(group.size(), -1).tolist()]
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


def _disagreement(name: str, checks: Sequence[_RankCheck]) -> str:
    """The problems of all ranks, and which ranks have the same plan."""
    lines = [check.problem for check in checks if check.problem is not None]
    ranks: dict[int, list[int]] = {}
    for check in checks:
        ranks.setdefault(check.digest, []).append(check.rank)
    if len(ranks) > 1:
        listed = "; ".join(f"one on ranks {format_ranks(alike)}" for alike in ranks.values())
        lines.append(
            f"{name}: found plans of {len(ranks)} different batches ({listed}), expected parts of one plan "
            "on all ranks; plan with ownerships of the same batch"
        )
    return "\n".join(lines)
