"""Megatron's own loop on one side of a boundary: rows cross before it, their gradients after it."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor, nn

from megatron_hetero.boundary.boundary import Boundary, micro_batch
from megatron_hetero.groups.topology import Topology
from megatron_hetero.step.library_optimizers import build_optimizers
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running

PIXELS, SAMPLES, ROWS, RATE = 6, 8, 3, 1.0
PLACEMENTS = [
    ("dp:4", "tp:2,pp:2"),
    ("dp:2@0-1", "pp:2@2-3"),
    ("dp:3@0,2-3", "tp:2,pp:2"),
    ("dp:4", "pp:2,dp:2"),
    ("dp:1@0", "pp:2,dp:1@1-2"),
    ("dp:4", "tp:4"),
]
WRAPPED = [("dp:4", "tp:2,dp:2"), ("dp:2@0-1", "dp:2@2-3")]


def encoder() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(PIXELS, gpt.HIDDEN)


def pictures(index: int, rows: int) -> Tensor:
    """Of a sample, [rows, PIXELS]."""
    return torch.randn(rows, PIXELS, generator=torch.Generator().manual_seed(index))


def ids(batch: list[gpt.Sample], indices: list[int]) -> list[int]:
    return [index * 10 + place for index in indices for place in batch[index].places]


@pytest.mark.parametrize("images, text", thinned(PLACEMENTS, 2))
@on_ranks(4, timeout_s=40)
def test_rows_from_other_ranks_enter_megatrons_loop(images: str, text: str) -> None:
    train(images, text)


@pytest.mark.parametrize("images, text", thinned(PLACEMENTS[:3], 2))
@on_ranks(4, timeout_s=60, fixture="rules_pools")
def test_the_same_under_nccls_rules(images: str, text: str) -> None:
    train(images, text)


@pytest.mark.parametrize("placement, wrapper", thinned(product(WRAPPED, ["fsdp", "ddp", "megatron"]), 2))
@on_ranks(4, timeout_s=40)
def test_rows_enter_a_model_in_a_wrapper(placement: tuple[str, str], wrapper: str) -> None:
    """PyTorch's reduce in each backward pass of a micro-batch, Megatron's once."""
    train(*placement, wrapper)


def train(images: str, text: str, wrapper: str = "plain") -> None:
    """A step of plain SGD, so that weights show gradients."""
    topology, batch = running.topology_of(vision=images, text=text), gpt.samples(SAMPLES, rows=ROWS)
    tokens = sum(sample.supervised for sample in batch)
    own_encoder, reference = encoder(), gpt.whole(topology.rank, tied=True)
    expected = step_alone(own_encoder, reference, batch, tokens)

    modules: dict[str, Any] = {"vision": encoder()} if topology.has("vision") else {}
    part: Any = None
    if topology.has("text"):
        layout = topology.layouts["text"]
        config = gpt.configuration(layout, sequence_parallel=layout.tp > 1)
        modules["text"] = gpt.model(config, topology.collection("text"), tied=True, rows=True)
        gpt.fill(modules["text"], gpt.whole(topology.rank, tied=True), tied=True)
        part = modules["text"]
        wrapping = gpt.WithRows(part) if wrapper == "fsdp" else part
        modules["text"] = running.wrapped(wrapping, wrapper, topology)
    plain = OptimizerConfig(optimizer="sgd", lr=RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    optimizer = build_optimizers(
        topology, modules, plain if wrapper == "megatron" else partial(torch.optim.SGD, lr=RATE)
    )
    loss, mine = step(topology, modules, batch)
    counted = running.tokens_of(topology, mine)
    assert counted.item() == tokens
    optimizer.step(tokens=counted)
    assert abs(running.total_loss(topology, loss, counted) - expected) < 1e-6 * expected
    if topology.has("text"):
        for name, (own, theirs) in gpt.counterparts(part, reference, tied=True).items():
            found = own.full_tensor() if hasattr(own, "full_tensor") else own
            assert gpt.apart(found, gpt.shard(theirs, own, part.pg_collection)) < 1e-5, name
    if topology.has("vision"):
        assert gpt.apart(modules["vision"].weight, own_encoder.weight) < 1e-5
        assert gpt.apart(own_encoder.weight, encoder().weight) > 1e-3, "the encoder learns"


def step_alone(encode: nn.Linear, reference: gpt.GPTModel, batch: list[gpt.Sample], tokens: int) -> float:
    total = torch.zeros(())
    for index, sample in enumerate(batch):
        rows = encode(pictures(index, len(sample.places)))
        total = total + gpt.loss_of(reference, sample, rows) / tokens
    total.backward()
    with torch.no_grad():
        for p in (*encode.parameters(), *reference.parameters()):
            p -= RATE * cast("Tensor", p.grad)
    return total.item()


def step(topology: Topology, modules: dict[str, Any], batch: list[gpt.Sample]) -> tuple[Tensor, int]:
    """All rows cross before the loop, micro-batch by micro-batch, and go back when the block ends."""
    text, vision = topology.layouts["text"], topology.layouts["vision"]
    first = topology.has("text") and text.coordinate(topology.rank).pp == 0
    link = None
    if first or topology.has("vision"):
        link = Boundary.open(topology, "vision", "text", width=gpt.HIDDEN, dtype=torch.float32)
    loss, tokens = torch.zeros(()), 0
    with micro_batch(*([link] if link else [])):
        rows: list[Tensor | None] = []
        for number in range(SAMPLES // text.dp):
            of_all = list(range(number * text.dp, (number + 1) * text.dp))
            needed = [of_all[text.replica_of(topology.rank)]] if first else []
            encoded = of_all[vision.replica_of(topology.rank) :: vision.dp] if topology.has("vision") else []
            if link is not None:
                plan = link.plan(held=ids(batch, encoded), needed=ids(batch, needed))
                inputs = [pictures(index, len(batch[index].places)) for index in encoded]
                made = modules["vision"](torch.cat([torch.empty(0, PIXELS), *inputs])) if "vision" in modules else None
                arrived = link(plan, made)
                rows.append(arrived if first else None)
            else:
                rows.append(None)
        if topology.has("text"):
            loss, tokens = running.backward(topology, modules["text"], batch, rows)
    return loss, tokens
