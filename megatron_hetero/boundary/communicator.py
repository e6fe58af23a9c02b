"""Executes a boundary plan: packs rows by index, one uneven all-to-all per stage, unpacks by index. No decisions
here.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.boundary.plan import BoundaryPlan, DirectionPlan, Moves


class BoundaryCommunicator:
    """Moves rows of `width` elements between the ranks of `group`, whose members are the ranks that plans speak of."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, width: int):
        self.group = group
        self.device = device
        self.width = width

    def forward(self, plan: BoundaryPlan, rows: Tensor) -> Tensor:
        """Source rows of this rank, [held, width], to the rows that it needs, [needed, width]. Not differentiable."""
        return self._execute(plan.forward, rows)

    def backward(self, plan: BoundaryPlan, grads: Tensor) -> Tensor:
        """The adjoint: gradients of the rows that this rank needed to gradients of those that it held."""
        return self._execute(plan.backward, grads)

    @torch.no_grad()
    def _execute(self, plan: DirectionPlan, rows: Tensor) -> Tensor:
        if rows.dim() != 2 or rows.shape[1] != self.width:
            raise ValueError(f"boundary: found rows of shape {tuple(rows.shape)}, expected [rows, {self.width}]")
        result = rows.new_empty(plan.rows, self.width)
        if len(plan.kept_from):
            result.index_copy_(0, self._index(plan.kept_to), rows.index_select(0, self._index(plan.kept_from)))
        if plan.scatter is not None:
            self._exchange(plan.scatter, rows, result)
        if plan.gather is not None:
            self._exchange(plan.gather, result, result)
        return result

    def _exchange(self, moves: Moves, source: Tensor, result: Tensor) -> None:
        sent = source.index_select(0, self._index(moves.send))
        received = source.new_empty(len(moves.receive), self.width)
        dist.all_to_all_single(
            received, sent, list(moves.receive_counts), list(moves.send_counts), group=self.group
        )  # fmt: skip
        result.index_copy_(0, self._index(moves.receive), received)

    def _index(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self.device, non_blocking=True)
