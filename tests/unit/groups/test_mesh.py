"""Dimensions of one rank of a topology's mesh: PyTorch's wrappers and collectives take them as any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from megatron_hetero import Graph, build
from tests.support.ranks import on_ranks

PLACEMENTS: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]


def values() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


WRAPPERS: dict[str, Callable[[DeviceMesh], Any]] = {
    "parallelize_module": tensor_parallel,
    "fully_shard": lambda mesh: fully_shard(net(), mesh=mesh["dp"]),
    "both": lambda mesh: fully_shard(tensor_parallel(mesh), mesh=mesh["dp"]),
    "hybrid": lambda mesh: fully_shard(net(), mesh=mesh["dp", "tp"]),
    "DDP": lambda mesh: DistributedDataParallel(net(), process_group=mesh["tp"].get_group()),
    "DDP over the mesh": lambda mesh: DistributedDataParallel(net(), device_mesh=mesh["tp"]),
}


@pytest.mark.parametrize("layout", ["dp:2", "tp:2", "pp:2"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@on_ranks(2)
def test_wrappers_over_dimensions_of_one_rank(wrapper: str, layout: str) -> None:
    if "DDP" in wrapper and layout == "tp:2":
        return
    mesh = build(Graph({"text": []}, width=4, dtype=torch.float32), text=layout).mesh("text")
    wrapped, expected = WRAPPERS[wrapper](mesh), net()
    for model in (wrapped, expected):
        model(values()).square().sum().backward()
    for own, whole in zip(wrapped.parameters(), expected.parameters(), strict=True):
        grad: Any = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        torch.testing.assert_close(grad, whole.grad)


@on_ranks(2)
def test_tensors_and_collectives_over_one_rank() -> None:
    mesh = build(Graph({"text": []}, width=4, dtype=torch.float32), text="dp:2").mesh("text")["tp"]
    given, group, rank = values(), mesh.get_group(), dist.get_rank()
    for before in PLACEMENTS:
        for after in PLACEMENTS:
            assert torch.equal(distribute_tensor(given, mesh, before).redistribute(mesh, after).full_tensor(), given)
    assert torch.equal(DTensor.from_local(given, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).full_tensor(), given)
    found, objects = [torch.zeros_like(given) for _ in range(4)], [None]
    dist.all_gather([found[0]], given, group=group)
    dist.gather(given, [found[1]], dst=rank, group=group)
    dist.scatter(found[2], [given], src=rank, group=group)
    dist.all_to_all([found[3]], [given], group=group)
    dist.all_gather_object(objects, "here", group=group)
    assert all(torch.equal(each, given) for each in found) and objects == ["here"]
    in_place, summed = given.clone(), torch.zeros_like(given)
    dist.reduce(in_place, rank, group=group)
    dist.all_reduce(in_place, group=group)
    dist.broadcast(in_place, rank, group=group)
    dist.reduce_scatter(summed, [given], group=group)
    dist.barrier(group=group)
    assert torch.equal(in_place, given) and torch.equal(summed, given)
    assert torch.equal(functional.all_reduce(given, "sum", group), given)
    assert torch.equal(functional.all_gather_tensor(given, 0, group), given)
    assert torch.equal(functional.reduce_scatter_tensor(given, "sum", 0, group), given)
