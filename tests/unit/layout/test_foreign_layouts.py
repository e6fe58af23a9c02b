"""Layouts of PyTorch's meshes and Megatron's grids, and meshes of layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.layout import Layout
from tests.support.pool import platform
from tests.support.ranks import on_ranks


@pytest.mark.parametrize(
    "shape, names, offset, expected",
    [
        ([2, 2, 2], ["tp", "dp", "pp"], 0, "tp:2,dp:2,pp:2@0-7"),
        ([2, 1, 3], ["tp", "ep", "pp"], 2, "tp:2,pp:3@2-7"),
        ([1, 2, 2, 1], ["pp", "cp", "dp", "tp"], 1, "cp:2,dp:2@1-4"),
    ],
)
def test_grids(shape: list[int], names: list[str], offset: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert str(Layout.from_grid(HyperCommGrid(shape, names, rank_offset=offset))) == expected


@pytest.mark.parametrize(
    "shape, names, message",
    [
        (
            [2, 2],
            ["dp", "tp"],
            r"along tp:2, dp:2, the last fastest, expected ascending ranks along dp, tp, because",
        ),
        ([2, 2], ["tp", "ep"], r"found dimension `ep` of size 2, expected one of tp, sp, cp, dp, pp"),
    ],
)
def test_grids_that_no_layout_expresses(
    shape: list[int], names: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match=message):
        Layout.from_grid(HyperCommGrid(shape, names))


@on_ranks(8)
def test_meshes() -> None:
    assert str(Layout.from_mesh(init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "tp")))) == "tp:4,pp:2@0-7"
    names = {"replicate": "dp", "shard": "dp"}
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "cp"))
    assert str(Layout.from_mesh(mesh, axes=names)) == "cp:2,dp:4@0-7"
    some = DeviceMesh("cpu", [[1, 3], [4, 6]], mesh_dim_names=("dp", "tp"))
    assert str(Layout.from_mesh(some)) == "tp:2,dp:2@1,3-4,6"
    with pytest.raises(UserError, match="found a slice, expected a mesh"):
        Layout.from_mesh(mesh["cp"])
    with pytest.raises(UserError, match="found a mesh without names"):
        Layout.from_mesh(init_device_mesh("cpu", (8,)))
    with pytest.raises(UserError, match="found dimension `replicate` of size 2"):
        Layout.from_mesh(mesh)
    with pytest.raises(UserError, match="along tp:2, dp:4, the last fastest"):
        Layout.from_mesh(init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "dp")))


@pytest.mark.parametrize("text", ["tp:2,dp:2", "dp:4", "tp:2@1,3", "sp:2,pp:2", "dp:1@2"])
@on_ranks(4)
def test_meshes_of_layouts(text: str) -> None:
    """All axes can be indexed, and the mesh is the layout again."""
    topology = Topology.build({"vision": Layout.parse(text, 4)}, platform())
    layout = topology.layouts["vision"]
    if not topology.has("vision"):
        with pytest.raises(KeyError, match="has no part of `vision`"):
            topology.mesh("vision")
        return
    mesh = topology.mesh("vision")
    assert Layout.from_mesh(mesh) == layout
    for axis, degree in layout.degrees.items():
        along = mesh[axis]
        assert along.size() == degree and tuple(along.mesh.tolist()) == layout.group_of(topology.rank, axis)
        assert along.get_local_rank() == getattr(layout.coordinate(topology.rank), axis)
        total = torch.ones(())
        dist.all_reduce(total, group=along.get_group())
        assert total == degree
    model: Any = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp"])
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.full_tensor().eq(2).all()


@on_ranks(2)
def test_what_a_topology_has() -> None:
    topology = Topology.build({"vision": Layout.parse("dp:1@0"), "text": Layout.parse("dp:1@1")}, platform())
    assert topology.has("vision") == (topology.rank == 0) and topology.has("text") == (topology.rank == 1)
    for wrong in (topology.has, topology.mesh, topology.collection):
        with pytest.raises(KeyError, match="no module `audio`; there are vision, text"):
            wrong("audio")
    mine = "vision" if topology.rank == 0 else "text"
    with pytest.raises(UserError, match="found axis `ep`.*expected one of tp, sp, cp, dp, pp"):
        topology.group(mine, "ep")
