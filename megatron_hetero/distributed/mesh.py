"""A module's ranks as a `DeviceMesh` of PyTorch, over process groups that are there already."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_hetero.distributed.local_group import LocalGroup
from megatron_hetero.layout.axes import AXES
from megatron_hetero.layout.layout import Layout

NAMES = AXES[::-1]
"""Of the dimensions, from the slowest among ranks to the fastest."""


def mesh_of(layout: Layout | None, device: torch.device, group: Callable[..., dist.ProcessGroup]) -> DeviceMesh:
    """The mesh of a layout. `group`: of this rank, by axis; it raises where there is no layout."""
    groups = [group(axis) for axis in NAMES]
    assert layout is not None, "`group` raises"
    for each in groups:
        if isinstance(each, LocalGroup):
            each.register()  # A mesh knows its groups by name.
    ranks = torch.tensor(layout.ranks, dtype=torch.int).view([layout.degrees[axis] for axis in NAMES])
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=NAMES)
