"""Patches of items from the ranks that decode them to those that embed them, on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.boundary.buffers import RowIndex, load_index
from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.routes import DirectionPlan
from megatron_hetero.data.step_plan import PatchPlan
from megatron_hetero.distributed.platform import CPU
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.models.items.types import ItemShape


@dataclass(frozen=True, eq=False)
class PatchSharing:
    """Between the hosts of each encoder's replica that this rank is in. `encoders`: by name."""

    topology: Topology
    encoders: Mapping[str, ItemShape]

    def share_out(self, encoder: str, plan: PatchPlan, decoded: Sequence[np.ndarray]) -> Tensor:
        """Patches of the items that this rank decoded, fp32 [patches, elements] each, to those that it embeds, with
        zeros for padding after them; in pinned memory where a GPU fetches them.
        """
        width, pinned = self.encoders[encoder].unit_width, self.topology.platform.is_cuda
        direction, elements = plan.exchange.forward, width // self.encoders[encoder].unit
        parts = [torch.from_numpy(patches).view(-1, width) for patches in decoded]
        if direction.exchanges:
            own = parts[0] if len(parts) == 1 else torch.cat([torch.zeros(0, width), *parts])
            parts = [self._communicators[encoder].forward(load_plan(plan.exchange, CPU), own)]
        as_it_is = len(parts) == 1 and (direction.exchanges or direction.keeps_all)
        if as_it_is and not plan.padding and not pinned:
            return parts[0].view(-1, elements)
        out = torch.empty(direction.needed * width // elements + plan.padding, elements, pin_memory=pinned)
        end = len(out) - plan.padding
        out[end:].zero_()
        units = out[:end].view(-1, width)
        if as_it_is:
            units.copy_(parts[0])
        else:
            place_rows(direction, parts, units)
        return out

    @cached_property
    def _communicators(self) -> dict[str, BoundaryCommunicator]:
        """By encoder: a row is the patches of one unit."""
        return {
            name: BoundaryCommunicator(group, CPU, self.encoders[name].unit_width, torch.float32, check=False)
            for name, group in self.topology.host_replicas.items()
        }


def place_rows(direction: DirectionPlan, parts: Sequence[Tensor], out: Tensor) -> None:
    """What a direction without exchanges makes of `parts`, the rows held, one part after the other: into `out`
    [needed, width], each row in one copy.
    """
    if not direction.complete:
        out.zero_()
    for part, (origin, target) in zip(parts, _runs(direction, [len(part) for part in parts]), strict=True):
        if isinstance(target, Tensor):
            out.index_copy_(0, target, part[origin])
        elif isinstance(origin, Tensor):
            torch.index_select(part, 0, origin, out=out[target])
        else:
            out[target].copy_(part[origin])


def _runs(direction: DirectionPlan, lengths: Sequence[int]) -> Iterator[tuple[RowIndex, RowIndex]]:
    """For each part the rows of it that stay, and where they go."""
    starts = np.cumsum([0, *lengths])
    part_of_row = np.searchsorted(starts, direction.kept_from, side="right") - 1
    for number, start in enumerate(starts[:-1]):
        chosen = part_of_row == number
        yield load_index(direction.kept_from[chosen] - start, CPU), load_index(direction.kept_to[chosen], CPU)
