"""A module with a loss of its own whose rows another module reads: one backward pass from both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_hetero import Boundary, Graph, UserError, build, micro_batch
from megatron_hetero.groups.topology import Topology
from tests.support.ranks import on_ranks

WIDTH, SAMPLES = 4, 6
GRAPH = Graph({"vision": ["text"], "text": ["generator"]}, width=WIDTH, dtype=torch.float32)
PLACEMENTS = {
    "colocated": {"vision": "dp:4", "text": "dp:4", "generator": "dp:4"},
    "disjoint": {"vision": "dp:1@0", "text": "dp:2@1-2", "generator": "dp:1@3"},
    "mixed": {"vision": "dp:3@0-2", "text": "dp:2@2-3", "generator": "dp:4"},
}


class Layer(nn.Module):
    """Rows to rows; it counts its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.passes = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 0

    def forward(self, rows: Tensor) -> Tensor:
        middle = self.inner[0](rows)
        if middle.requires_grad:
            middle.register_hook(self._count)
        return self.inner[2](self.inner[1](middle))

    def _count(self, _: Tensor) -> None:
        self.passes += 1


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: Layer() for name in GRAPH.modules}


def pictures() -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))


def alone() -> dict[str, Any]:
    """In one process."""
    found = models()
    read = found["text"](found["vision"](pictures()))
    (read.square().sum() + found["generator"](read).sin().sum()).backward()
    return found


def train(topology: Topology, held: dict[str, Any], loss_first: bool = False, plain: str = "") -> None:
    """A micro-batch. `plain`: whose loss is back-propagated at once, or `sum`."""
    to_text, to_generator = (Boundary.open(topology, *ends) for ends in (("vision", "text"), ("text", "generator")))
    with micro_batch(to_text, to_generator):
        made = held["vision"](topology.shard("vision", pictures())) if "vision" in held else None
        rows = to_text(to_text.plan(samples=SAMPLES, rows_per_sample=1), made)
        read = held["text"](rows) if "text" in held else None
        loss = None if read is None else read.square().sum()
        if loss is not None and loss_first:
            to_generator.backward(loss)
        heard = to_generator(to_generator.plan(samples=SAMPLES, rows_per_sample=1), read)
        other = held["generator"](heard).sin().sum() if "generator" in held else None
        if plain == "sum":
            assert loss is not None and other is not None
            return to_generator.backward(loss + other)
        if loss is not None and not loss_first:
            loss.backward() if plain else to_generator.backward(loss)
        if other is not None:
            other.backward()
    return None


@pytest.mark.parametrize("loss_first", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_a_loss_and_rows_in_one_backward_pass(placement: str, loss_first: bool) -> None:
    compare(placement, "plain", loss_first)


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4, fixture="rules_pools")
def test_the_same_under_nccls_rules(placement: str) -> None:
    compare(placement, "plain")


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@on_ranks(4)
def test_the_same_in_a_wrapper(wrapper: str) -> None:
    """They reduce gradients in each backward pass, and expect one for each forward pass."""
    compare("mixed", wrapper)


def compare(placement: str, wrapper: str, loss_first: bool = False) -> None:
    topology = build(GRAPH, PLACEMENTS[placement])
    plain = {name: each for name, each in models().items() if topology.has(name)}
    held = dict(plain)
    if "text" in held and wrapper == "ddp":
        held["text"] = DistributedDataParallel(held["text"], process_group=topology.group("text", "dp"))
    if "text" in held and wrapper == "fsdp":
        held["text"] = fully_shard(held["text"], mesh=topology.mesh("text")["dp"])
    train(topology, held, loss_first)
    assert all(each.passes == 1 for each in plain.values())
    for name, whole in alone().items():
        for own, expected in zip(plain[name].parameters() if name in plain else (), whole.parameters(), strict=False):
            grad: Any = own.grad.full_tensor() if hasattr(own.grad, "full_tensor") else own.grad
            if name == "text" and wrapper != "plain":
                grad = grad * topology.layouts["text"].dp
            else:
                dist.all_reduce(grad, group=topology.group(name, "dp"))
            torch.testing.assert_close(grad, expected.grad)


@on_ranks(4)
def test_a_loss_alone_where_no_gradients_come_back() -> None:
    """Rows without gradients, and a block without a crossing."""
    topology = build(Graph({"text": ["generator"]}, width=WIDTH, dtype=torch.float32), text="dp:4", generator="dp:4")
    boundary, text, given = Boundary.open(topology, "text", "generator"), models()["text"], pictures()
    for crosses in (True, False):
        text.zero_grad()
        with micro_batch(boundary):
            read = text(given)
            if crosses:
                boundary(boundary.plan(samples=4, rows_per_sample=1), read[:1].detach())
            boundary.backward(read.square().sum())
            assert text.inner[0].weight.grad is None
        grad = text.inner[0].weight.grad
        assert grad is not None and grad.any()


@on_ranks(4)
def test_what_the_plain_mistake_says() -> None:
    """On all ranks of the crossing before; without one on those of the module."""
    for placement in PLACEMENTS:
        topology = build(GRAPH, PLACEMENTS[placement])
        held = {name: each for name, each in models().items() if topology.has(name)}
        freed = r"has freed the graph .*`boundary.backward\(loss\)`"
        if topology.has("vision") or topology.has("text"):
            with pytest.raises(UserError, match=freed):
                train(topology, held, plain="text")
        else:
            train(topology, held, plain="text")
    topology = build(GRAPH, PLACEMENTS["colocated"])
    with pytest.raises(UserError, match="a loss given to `Boundary.backward` "):
        train(topology, models(), plain="sum")
    boundary = Boundary.open(topology, "text", "generator")
    with pytest.raises(UserError, match=r"backward: found a tensor .*`micro_batch`"):
        boundary.backward(torch.zeros((), requires_grad=True))
    for loss, found in ((torch.zeros(2, requires_grad=True), r"shape \(2,\)"), (torch.zeros(()), "shape.*grad=False")):
        with pytest.raises(UserError, match=f"backward: found a tensor of {found}"), micro_batch(boundary):
            boundary.backward(loss)
