"""Every row of the table of docs/library.md, "What a loop may do", against one process."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_hetero.groups.topology import Topology
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.boundary.plain_loop import PLACEMENTS, Case, Loop, Modules, alone, compare, replicated

# ----------------------------------------------------------------------------------------- backward passes


def by_tensor(losses: Tensor, rows: Tensor, text: nn.Module) -> None:
    losses.backward(torch.full_like(losses, 2.0))


def by_several_losses(losses: Tensor, rows: Tensor, text: nn.Module) -> None:
    losses.sum().backward(retain_graph=True)
    (losses**2).sum().backward(retain_graph=True)
    (rows**2).sum().backward()


def again(losses: Tensor, rows: Tensor, text: nn.Module) -> None:
    loss = losses.sum()
    loss.backward(retain_graph=True)
    loss.backward()


def by_grad(losses: Tensor, rows: Tensor, text: nn.Module) -> None:
    parameters = list(text.parameters())
    gradient, *others = torch.autograd.grad(losses.sum(), [rows, *parameters])
    rows.backward(gradient)
    for parameter, grad in zip(parameters, others, strict=True):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def with_penalty(losses: Tensor, rows: Tensor, text: nn.Module) -> None:
    loss = losses.sum()
    (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
    (loss + (gradient**2).sum()).backward()


def in_place(losses: Tensor, rows: Tensor, text: nn.Module) -> None:
    """`rows` are no leaf of the graph, as they would not be in one process."""
    rows *= 2.0
    (losses.sum() + rows.sum()).backward()


# ------------------------------------------------------------------------------------------------ modules


def frozen(*parts: str) -> Case:
    """`parts` of the modules, such as ``vision.embed``, do not train."""

    def freeze(modules: Modules) -> None:
        for name in parts:
            module, _, part = name.partition(".")
            modules[module].get_submodule(part).requires_grad_(False)

    return Case(alike=freeze)


def checkpointed(reentrant: bool) -> Case:
    def set_reentrant(modules: Modules) -> None:
        for module in modules.values():
            module.block.reentrant = reentrant  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]

    return Case(alike=set_reentrant, dropout=0.3, by_sample=True)


def compiled(module: nn.Module, topology: Topology, name: str) -> nn.Module:
    return torch.compile(module, backend="eager" if name == "vision" else "aot_eager")  # pyright: ignore[reportReturnType]


def sharded(module: nn.Module, topology: Topology, name: str) -> Any:
    mesh = DeviceMesh.from_group(topology.group(name, "sp", "cp", "dp"), "cpu", mesh_dim_names=("dp",))
    for part in (module.get_submodule("block"), module):
        fully_shard(part, mesh=mesh)
    return module


CASES = {
    "`loss.backward()`": Case(),
    "`tensor.backward(gradient)`": Case(by_tensor),
    "several losses": Case(by_several_losses),
    "`retain_graph=True`, and backward again": Case(again),
    "`torch.autograd.grad(loss, rows)`, then `rows.backward(gradient)`": Case(by_grad),
    "a penalty on `torch.autograd.grad(loss, rows, create_graph=True)`": Case(with_penalty),
    "rows written in place": Case(in_place),
    "encoder frozen": frozen("vision"),
    "text frozen": frozen("text"),
    "submodules of both frozen": frozen("vision.embed", "vision.block", "text.embed", "text.head"),
    "several micro-batches per step": Case(),
    "`torch.utils.checkpoint(use_reentrant=False)` in both, with dropout": checkpointed(reentrant=False),
    "the same with `use_reentrant=True`": checkpointed(reentrant=True),
    "`torch.compile` of either module": Case(wrap={"vision": compiled, "text": compiled}),
    "`torch.autocast` to bfloat16": Case(
        by_sample=True, forward=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    ),
    "evaluation between steps, `torch.no_grad()`": Case(evaluate=torch.no_grad),
    "the same with `torch.inference_mode()`": Case(evaluate=torch.inference_mode),
    "`torch.optim`, `lr_scheduler`, clipping by the joint norm": Case(
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
        most_norm=0.1,
    ),
    "FSDP2 (`fully_shard`) on the encoder": Case(wrap={"vision": sharded}, scale={"vision": float}),
    "FSDP2 on the text module": Case(wrap={"text": sharded}, scale={"text": float}),
    "FSDP2 on both, clipping by the joint norm": Case(
        wrap={"vision": sharded, "text": sharded}, scale={"vision": float, "text": float}, most_norm=0.1
    ),
    "`DistributedDataParallel` on the encoder": Case(wrap={"vision": replicated}, scale={"vision": float}),
    "the same with several losses": Case(by_several_losses, wrap={"vision": replicated}, scale={"vision": float}),
    "`DistributedDataParallel` on the text module": Case(wrap={"text": replicated}, scale={"text": float}),
    "`DistributedDataParallel` on both": Case(
        wrap={"vision": replicated, "text": replicated}, scale={"vision": float, "text": float}
    ),
}
"""By the row of the table."""


def test_the_table_lists_what_is_tested() -> None:
    guide = (Path(__file__).parents[3] / "docs/library.md").read_text(encoding="utf-8")
    table = re.search(r"^\| in a `micro_batch`.*?\n\n", guide, re.MULTILINE | re.DOTALL)
    assert table is not None
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[0].strip().splitlines())
    assert head[1:] == list(PLACEMENTS)
    assert {row: cells for row, *cells in lines} == {row: ["yes"] * len(PLACEMENTS) for row in CASES}


@pytest.mark.parametrize("row, placement", thinned(product(CASES, PLACEMENTS), 10))
@on_ranks(4)
def test_a_loop_gives_what_one_process_gives(row: str, placement: str) -> None:
    compare(Loop(CASES[row], placement).run(), alone(CASES[row]))


@pytest.mark.parametrize("row", ["`loss.backward()`", "FSDP2 on both, clipping by the joint norm"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_the_same_without_checks(row: str, placement: str) -> None:
    compare(Loop(CASES[row], placement, check=False).run(), alone(CASES[row]))


@pytest.mark.parametrize("row", ["several losses", "encoder frozen", "evaluation between steps, `torch.no_grad()`"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4, fixture="rules_pools")
def test_the_same_under_nccls_rules(row: str, placement: str) -> None:
    compare(Loop(CASES[row], placement).run(), alone(CASES[row]))
