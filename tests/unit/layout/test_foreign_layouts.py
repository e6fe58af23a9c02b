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
from megatron_hetero.layout.axes import EXPERTS
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
            r"along tp:2, dp:2, .*expected ascending ranks along dp, tp",
        ),
        (
            [2, 2],
            ["tp", "ep"],
            r"found dimension `ep` of size 2, expected one of tp, sp, cp, dp, pp\. .*`experts=`",
        ),
    ],
)
def test_grids_that_no_layout_expresses(
    shape: list[int], names: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match=message):
        Layout.from_grid(HyperCommGrid(shape, names))


def experts_of(shape: list[int], *names: str, offset: int = 0) -> Layout:
    """The layout of a grid of tp:2,dp:2,pp:2 from rank 0 on, and this one for experts."""
    main = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    experts = HyperCommGrid(shape, list(names), rank_offset=offset)
    return Layout.from_grid(main, axes={"expt_dp": "edp", "expt_tp": "etp"}, experts=experts)


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ([4, 1, 2], ["ep", "edp", "pp"], "tp:2,dp:2,pp:2,ep:4@0-7"),
        ([1, 2, 2, 2], ["expt_tp", "ep", "expt_dp", "pp"], "tp:2,dp:2,pp:2,ep:2@0-7"),
        ([4, 2], ["dp", "pp"], "tp:2,dp:2,pp:2,ep:1@0-7"),
    ],
)
def test_a_second_grid_for_experts(
    shape: list[int], names: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    layout = experts_of(shape, *names)
    assert str(layout) == expected and layout == Layout.parse(expected, views=[EXPERTS])


@pytest.mark.parametrize(
    ("shape", "names", "offset", "message"),
    [
        ([4, 2], ["ep", "pp"], 8, "found pp:2 over ranks 8-15, expected pp:2 over ranks 0-7"),
        ([2, 4], ["ep", "pp"], 0, "found pp:4 over ranks 0-7, expected pp:2 over ranks 0-7"),
        ([2, 2], ["ep", "pp"], 0, "found pp:2 over ranks 0-3, expected pp:2 over ranks 0-7"),
        ([2, 2, 2], ["edp", "ep", "pp"], 0, "expected ascending .* along pp, edp, ep, .* ep, edp and pp"),
        ([2, 2, 2], ["expt_tp", "ep", "pp"], 0, "`expt_tp` of size 2, expected one of ep, edp, pp, .*`ep`"),
        ([2, 2, 2], ["tp", "ep", "pp"], 0, "found dimension `tp` of size 2, "),
    ],
)
def test_grids_for_experts_that_do_not_fit(
    shape: list[int], names: list[str], offset: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(UserError, match=r"Layout\.from_grid \(experts\): .*" + message):
        experts_of(shape, *names, offset=offset)


@on_ranks(8)
def test_a_second_mesh_for_experts() -> None:
    """Both are made from one mesh of the world, as torchtitan does."""
    names = {"dp_replicate": "dp", "fsdp": "dp", "efsdp": "edp"}
    world = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
    dims = ("pp", "dp_replicate", "fsdp", "cp", "tp"), ("pp", "dp_replicate", "efsdp", "ep", "etp")
    # Older releases of PyTorch have no `_unflatten`.
    made = getattr(world, "_unflatten", lambda _, sizes, names: init_device_mesh("cpu", sizes, mesh_dim_names=names))
    main, experts = made(0, (1, 2, 1, 2, 2), dims[0]), made(0, (1, 2, 1, 4, 1), dims[1])
    layout = Layout.from_mesh(main, axes=names, experts=experts)
    assert str(layout) == "tp:2,cp:2,dp:2,ep:4@0-7" and layout == Layout.parse(str(layout), views=[EXPERTS])
    with pytest.raises(UserError, match=r"Layout\.from_mesh: found a slice, expected a mesh"):
        Layout.from_mesh(main, axes=names, experts=experts["ep"])
    topology = Topology.build({"text": layout}, platform())
    meshes = topology.mesh("text"), topology.mesh("text", EXPERTS.name)
    assert Layout.from_mesh(meshes[0], experts=meshes[1]) == layout


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
        with pytest.raises(KeyError, match="`vision`"):
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
