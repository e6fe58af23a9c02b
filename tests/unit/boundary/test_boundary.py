"""Boundaries in loops of one's own: planned from local knowledge, and gradients that come back from every rank.

Values are integers, so that sums are exact; the reference computes the same from all rows in one process.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from transformers.modeling_outputs import BaseModelOutput

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.boundary import Boundary, micro_batch
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.layout import Layout
from tests.support.pool import platform
from tests.support.ranks import on_ranks

WIDTH = 3
COLOCATED = {"vision": "dp:4", "sound": "dp:2,sp:2", "text": "tp:2,dp:2"}
DISJOINT = {"vision": "dp:1@0", "sound": "dp:1@1", "text": "dp:2@2-3"}
MIXED = {"vision": "dp:3@0-2", "sound": "dp:1@0", "text": "dp:2@2-3"}
PLACEMENTS = {"colocated": COLOCATED, "disjoint": DISJOINT, "mixed": MIXED}
EDGES = [("vision", "text"), ("sound", "text")]


def topology(texts: Mapping[str, str], edges: list[tuple[str, str]] = EDGES) -> Topology:
    layouts = {name: Layout.parse(text, 4) for name, text in texts.items()}
    return Topology.build(layouts, platform(), edges=edges, planned=edges)


def opened(places: Topology, source: str, check: bool = True) -> Boundary:
    return Boundary.open(places, source, "text", width=WIDTH, dtype=torch.float64, check=check)


class Scale(nn.Module):
    """A module with one weight, which scales what it is given; it counts its backward passes."""

    def __init__(self, value: float):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value, dtype=torch.float64))
        self.passes = 0

    def forward(self, values: Tensor) -> Tensor:
        scaled = values * self.weight
        if scaled.requires_grad:
            scaled.register_hook(self._count)
        return scaled

    def _count(self, _: Tensor) -> None:
        self.passes += 1


def values(ids: list[int]) -> Tensor:
    return torch.tensor([[id, id % 3, 1 - id % 2] for id in ids], dtype=torch.float64).view(-1, WIDTH)


def total(number: Tensor | None) -> float:
    """The sum over all ranks."""
    summed = torch.zeros((), dtype=torch.float64) if number is None else number.detach().clone()
    dist.all_reduce(summed)
    return summed.item()


def samples_of(places: Topology, module: str) -> list[int]:
    """The samples, of eight, that this rank's replica of a module reads."""
    layout, rank = places.layouts[module], places.rank
    return list(range(layout.replica_of(rank), 8, layout.dp)) if rank in layout else []


def ids_of(samples: list[int]) -> list[int]:
    """One or two rows of each sample; every fourth has none."""
    return [10 * sample + row for sample in samples for row in range((sample + 1) % 4 and 1 + sample % 2)]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_rows_arrive_and_gradients_return_whatever_a_rank_uses(placement: str, check: bool) -> None:
    train(placement, check)


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4, fixture="rules_pools")
def test_the_same_under_nccls_rules(placement: str) -> None:
    train(placement, True)


@on_ranks(4)
def test_without_checks_only_rows_are_exchanged() -> None:
    """No small collective, for which the host would wait."""
    places = topology(COLOCATED)
    link, ids = opened(places, "vision", check=False), ids_of(samples_of(places, "vision"))
    plan = link.plan(held=ids, needed=ids_of(samples_of(places, "text")))
    with CommDebugMode() as counted, micro_batch(link):
        link(plan, Scale(2.0)(values(ids))).sum().backward()
    assert {str(op).rpartition(".")[2] for op in counted.get_comm_counts()} == {"alltoall_base_"}


def train(placement: str, check: bool) -> None:
    """Ranks draw which of two boundaries their loss uses, or that there is no loss at all."""
    places = topology(PLACEMENTS[placement])
    links = {name: opened(places, name, check) for name, _ in EDGES if places.rank in ranks_of(places, name)}
    for seed in range(8):
        modules = {"vision": Scale(2.0), "sound": Scale(-3.0)}
        used = {rank: set(random.Random(f"{seed}/{rank}").sample(list(modules), seed % 3)) for rank in range(4)}
        with micro_batch(*links.values()):
            arrived, mine = {}, ids_of(samples_of(places, "text"))
            for name, link in links.items():
                held = ids_of(samples_of(places, name))
                plan = link.plan(held=held, needed=mine)
                arrived[name] = link(plan, modules[name](values(held)) if places.rank in places.layouts[name] else None)
                weight = {"vision": 2.0, "sound": -3.0}[name]
                assert torch.equal(arrived[name], weight * values(mine))
            # All ranks of a replica of the text draw what its first rank does.
            replica = places.layouts["text"].group_of(places.rank, "tp")[0] if mine else places.rank
            if parts := [(rows * rows).sum() for name, rows in arrived.items() if name in used[replica]]:
                torch.stack(parts).sum().backward()
        replicas = [places.layouts["text"].rank_at(dp=dp) for dp in range(places.layouts["text"].dp)]
        for name, module in modules.items():
            layout, weight = places.layouts[name], module.weight.item()
            expected = sum(
                float((2 * weight * values(ids_of(list(range(dp, 8, len(replicas))))) ** 2).sum())
                for dp, rank in enumerate(replicas)
                if name in used[rank]
            )
            # The ranks along `sp` have the same rows here, and each of them the whole gradient.
            assert total(module.weight.grad) / (layout.size // layout.dp) == expected


def ranks_of(places: Topology, name: str) -> set[int]:
    return {*places.layouts[name].ranks, *places.layouts["text"].ranks}


@on_ranks(4)
def test_backward_passes_accumulate_until_the_end_of_the_micro_batch() -> None:
    """Several losses, one of them twice, and one by `autograd.grad`; the encoder's backward pass runs once."""
    places = topology(COLOCATED)
    link, module = opened(places, "vision"), Scale(2.0)
    ids = ids_of(list(range(places.rank, 8, 4)))
    with micro_batch(link):
        rows = link(link.plan(held=ids, needed=ids), module(values(ids)))
        loss = (rows * values(ids)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        rows.sum().backward()
        (seen,) = torch.autograd.grad((rows * rows).sum(), rows)
        assert torch.equal(seen, 4 * values(ids)) and module.weight.grad is None
    expected = 2 * values(ids) ** 2 + values(ids)
    assert module.weight.grad is not None and torch.equal(module.weight.grad, expected.sum()) and module.passes == 1


@on_ranks(4)
def test_rows_that_cross_twice_go_back_into_their_module_once() -> None:
    """Fan-out: the same rows to two modules, one of which uses none."""
    texts = {"vision": "dp:4", "text": "dp:4", "head": "dp:4"}
    places = topology(texts, [("vision", "text"), ("vision", "head")])
    module, ids = Scale(3.0), [places.rank]
    links = [Boundary.open(places, "vision", name, width=WIDTH, dtype=torch.float64) for name in ("text", "head")]
    with micro_batch(*links):
        rows = module(values(ids))
        to_text, _ = (link(link.plan(held=ids, needed=[(ids[0] + 1) % 4]), rows) for link in links)
        to_text.sum().backward()
    assert module.weight.grad is not None and torch.equal(module.weight.grad, values(ids).sum()) and module.passes == 1


@on_ranks(4)
def test_rows_that_depend_on_rows_that_arrived() -> None:
    """A chain: what crosses second is made of what has crossed first."""
    texts = {"vision": "dp:4", "text": "dp:4", "talker": "dp:4"}
    places = topology(texts, [("vision", "text"), ("text", "talker")])
    first, second, mine, other = Scale(2.0), Scale(5.0), [places.rank], [(places.rank + 1) % 4]
    to_text = Boundary.open(places, "vision", "text", width=WIDTH, dtype=torch.float64)
    to_talker = Boundary.open(places, "text", "talker", width=WIDTH, dtype=torch.float64)
    with micro_batch(to_text, to_talker):
        seen = to_text(to_text.plan(held=mine, needed=other), first(values(mine)))
        heard = to_talker(to_talker.plan(held=other, needed=mine), second(seen))
        if places.rank % 2:
            heard.sum().backward()
    expected = 5 * values(mine).sum() if places.rank % 2 else torch.zeros((), dtype=torch.float64)
    assert first.weight.grad is not None and torch.equal(first.weight.grad, expected)


@on_ranks(4)
def test_nothing_goes_back_without_gradients() -> None:
    """Frozen modules and evaluations, in a micro-batch and outside; the boundary is free again afterwards."""
    places = topology(COLOCATED)
    link, ids = opened(places, "vision"), [places.rank]
    plan = link.plan(held=ids, needed=ids)
    for inside in (True, False):
        with torch.no_grad(), micro_batch(*[link] * inside):
            assert not link(plan, Scale(1.0)(values(ids))).requires_grad
        with micro_batch(*[link] * inside):
            assert not link(plan, values(ids)).requires_grad


@on_ranks(4)
def test_outside_a_micro_batch_nothing_crosses_that_would_go_back() -> None:
    """Gradients of one rank are enough."""
    places = topology(COLOCATED)
    link, module, ids = opened(places, "vision"), Scale(2.0), [places.rank]
    plan = link.plan(held=ids, needed=[(ids[0] + 1) % 4])
    with pytest.raises(UserError, match=r"vision>text: .* outside of a `micro_batch`, .*`micr"):
        link(plan, module(values(ids)) if places.rank == 1 else values(ids))
    assert torch.equal(link(plan, values(ids)), values([(ids[0] + 1) % 4]))


@on_ranks(4)
def test_errors_reach_all_ranks() -> None:
    places = topology(COLOCATED)
    link, rank = opened(places, "vision"), places.rank
    with pytest.raises(UserError, match=r"vision>text: needed: found row 99 on rank 2"):
        link.plan(held=[rank], needed=[99 if rank == 2 else rank])
    with pytest.raises(UserError, match="held: found row 7 twice"):
        link.plan(held=[7, 7] if rank == 1 else [rank], needed=[])
    plan = link.plan(held=[rank], needed=[rank])
    with pytest.raises(ValueError, match=r"rank 3: found 2 rows, expected the 1 "):
        link(plan, values([rank, 0][: 2 if rank == 3 else 1]))
    with pytest.raises(UserError, match="held: found a list"):
        link.plan(held=[[1], [2, 3]] if rank == 1 else [rank], needed=[])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="is inside a micro-batch already"), micro_batch(link), micro_batch(link):
        pass
    with micro_batch(link):  # An error leaves it usable.
        assert torch.equal(link(plan, values([rank])), values([rank]))


@on_ranks(4)
def test_ranks_that_plan_two_boundaries_in_other_orders_learn_it() -> None:
    places = topology(COLOCATED)
    links = [opened(places, name) for name, _ in EDGES]
    with pytest.raises(UserError, match="boundary: found vision>text on rank 0 and sound>text on rank 1"):
        links[places.rank == 1].plan(held=[places.rank], needed=[])


@on_ranks(4)
def test_a_backward_pass_after_the_end_is_refused() -> None:
    """Its gradients would be lost. A block that ends with an error is refused, too, and leaves the boundary usable."""
    places = topology(COLOCATED)
    link, module, ids = opened(places, "vision"), Scale(2.0), [places.rank]
    plan = link.plan(held=ids, needed=ids)
    with micro_batch(link):
        loss = link(plan, module(values(ids))).sum()
    with pytest.raises(UserError, match="a backward pass after its end"):
        loss.backward()
    with contextlib.suppress(KeyError), micro_batch(link):
        loss = link(plan, module(values(ids))).sum()
        raise KeyError
    with pytest.raises(UserError, match="a backward pass after its end"):
        loss.backward()
    module.weight.grad = None
    with micro_batch(link):
        link(plan, module(values(ids))).sum().backward()
    assert module.weight.grad is not None and torch.equal(module.weight.grad, values(ids).sum())


@pytest.mark.parametrize("transport", [None, torch.bfloat16])
@on_ranks(4)
def test_ranks_that_share_the_tokens_of_a_sample_have_parts_of_gradients(transport: torch.dtype | None) -> None:
    """`sp:2`: both ranks of a replica need all of its rows, and each reads every other one."""
    places = topology({"vision": "dp:4", "text": "sp:2,dp:2"}, [("vision", "text")])
    link = Boundary.open(places, "vision", "text", width=WIDTH, dtype=torch.float64, transport=transport)
    module, mine = Scale(2.0), [places.rank]
    needed = [0, 1] if places.rank < 2 else [2, 3]
    with micro_batch(link):
        rows = link(link.plan(held=mine, needed=needed, gradient="partial"), module(values(mine)))
        (rows[places.rank % 2 :: 2] * (1 + places.rank)).sum().backward()
    assert total(module.weight.grad) == sum((1 + rank) * float(values([rank]).sum()) for rank in range(4))


@on_ranks(4)
def test_parts_are_not_whole_gradients() -> None:
    places = topology({"vision": "dp:4", "text": "sp:2,dp:2"}, [("vision", "text")])
    link, needed = opened(places, "vision"), [0, 1] if places.rank < 2 else [2, 3]

    def train() -> None:
        with micro_batch(link):
            rows = link(link.plan(held=[places.rank], needed=needed), Scale(2.0)(values([places.rank])))
            rows[places.rank % 2 :: 2].sum().backward()

    with pytest.raises(ValueError, match="rows that differ on ranks 0-1"):
        train()


@on_ranks(4)
def test_parts_that_two_of_four_ranks_share_are_refused() -> None:
    """`tp:2` with `cp:2`: parts along one axis, copies along the other. They would be counted twice."""
    places = topology({"vision": "dp:4", "text": "tp:2,cp:2"}, [("vision", "text")])
    link, mine = opened(places, "vision"), [places.rank]

    def train() -> None:
        with micro_batch(link):
            rows = link(link.plan(held=mine, needed=[0, 1, 2, 3], gradient="partial"), Scale(2.0)(values(mine)))
            rows[places.rank // 2 :: 2].sum().backward()

    with pytest.raises(ValueError, match="equal on ranks 0-1, expected partial sums"):
        train()


@on_ranks(4)
def test_planned_edges_are_edges_in_an_order() -> None:
    layouts = {name: Layout.parse(text, 4) for name, text in COLOCATED.items()}
    places = Topology.build(layouts, platform(), edges=EDGES[:1], planned=set(EDGES))
    assert list(map(str, places.boundaries)) == ["vision>text", "sound>text"]
    assert list(map(str, places.planned)) == ["sound>text", "vision>text"]


@on_ranks(4)
def test_ranks_of_one_side_alone_have_no_rows_of_the_other() -> None:
    places = topology({"vision": "dp:2@0-1", "text": "dp:2@2-3"}, [("vision", "text")])
    link = opened(places, "vision")
    assert not link.plan(held=[places.rank] if places.rank < 2 else []).forward.needed
    with pytest.raises(UserError, match="vision>text: held: found 1 rows on rank 2, expected none"):
        link.plan(held=[places.rank])
    with pytest.raises(UserError, match="vision>text: needed: found 1 rows on rank 0, expected none"):
        link.plan(held=[places.rank] if places.rank < 2 else [], needed=[places.rank % 2])


@on_ranks(4)
def test_an_edge_that_is_not_there_is_named() -> None:
    places = topology(COLOCATED, [("vision", "text")])
    for source, target in (("text", "vision"), ("sound", "text")):
        with pytest.raises(UserError, match=rf"boundary {source}>{target} .* expected one of vision>text"):
            Boundary.open(places, source, target, width=WIDTH, dtype=torch.float64)
    with pytest.raises(UserError, match=r"edge visoin>text: found no module `visoin` \(did you mean `vision`\?\)"):
        Boundary.open(places, "visoin", "text", width=WIDTH, dtype=torch.float64)


@on_ranks(4)
def test_an_edge_between_modules_that_are_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="edge film>text: found no module `film`, .*vision, sound"):
        topology(COLOCATED, [("film", "text")])


@on_ranks(4)
def test_what_does_not_fit_a_boundary_is_named_on_all_ranks() -> None:
    """On rank 2 only; the boundary works afterwards."""
    places = topology(COLOCATED)
    link, other, rank = opened(places, "vision"), opened(places, "sound"), places.rank
    plan, held = link.plan(held=[rank], needed=[rank]), values([rank])
    another = other.plan(held=[rank], needed=[rank])
    wrong: dict[str, tuple[Any, Any]] = {
        "found a plan of .*sound>text": (another, held),
        r"found a BaseModelOutput": (plan, BaseModelOutput(held)),
        r"found rows of shape \(1, 1, 3\), expected \[rows, 3\]": (plan, held[None]),
        r"found rows of torch.int64, expected torch.float64, .*`dtype`": (
            plan, held.long(),
        ),
    }  # fmt: skip
    for said, (plan_there, rows) in wrong.items():
        with pytest.raises(UserError, match=rf"boundary vision>text forward on rank 2: {said}"):
            link(*((plan_there, rows) if rank == 2 else (plan, held)))
    with pytest.raises(UserError, match=r"boundary vision>text: plan: found a Tensor, .*`Boundary.plan`"):
        link(held, plan)  # pyright: ignore[reportArgumentType]
    assert torch.equal(link(plan, held), held)
