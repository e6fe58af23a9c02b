"""Samples of replicas: `Topology.shard`, plans from counts, and rows that replicas share, which are refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hetero import (
    Boundary,
    Graph,
    Layout,
    MicroBatchInputs,
    Rows,
    Runner,
    Stage,
    UserError,
    build,
    micro_batch,
)
from megatron_hetero.groups.topology import Topology
from tests.support.pool import platform
from tests.support.ranks import on_ranks

WIDTH = 2
GRAPH = Graph({"vision": ["text"]}, width=WIDTH, dtype=torch.float64)
PLACEMENTS = {
    "colocated": {"vision": "dp:4", "text": "tp:2,dp:2"},
    "disjoint": {"vision": "dp:2@0-1", "text": "dp:2@2-3"},
    "mixed": {"vision": "dp:3@0-2", "text": "dp:2@2-3"},
}


def rows_of(ids: Any) -> Tensor:
    return torch.as_tensor(np.asarray(ids), dtype=torch.float64)[:, None].expand(-1, WIDTH).clone().requires_grad_()


@pytest.mark.parametrize("count", [0, 1, 3, 8, 9])
@on_ranks(4)
def test_a_shard_is_the_replicas_part_in_order(count: int) -> None:
    layouts = {
        name: Layout.parse(text, 4) for name, text in {"a": "dp:3@0-2", "b": "tp:2,dp:2", "c": "pp:2,dp:2"}.items()
    }
    topology = Topology.build(layouts, platform())
    for name, layout in layouts.items():
        kinds: list[Any] = [
            list(range(count)),
            range(count),
            torch.arange(count),
            np.arange(count),
            tuple(range(count)),
        ]
        mine = [list(topology.shard(name, each)) for each in kinds]
        assert all(mine[0] == list(map(int, each)) for each in mine)
        assert [type(topology.shard(name, each)) for each in kinds] == [type(each) for each in kinds]
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, mine[0])
        by_replica = {layout.replica_of(rank): everyone[rank] for rank in layout.ranks}
        assert [n for replica in range(layout.dp) for n in by_replica[replica]] == list(range(count))
        assert all(everyone[rank] == by_replica[layout.replica_of(rank)] for rank in layout.ranks)
        assert all(everyone[rank] == [] for rank in range(4) if rank not in layout)
        sizes = [len(each) for each in by_replica.values()]
        assert max(sizes) - min(sizes) <= 1
    with pytest.raises(KeyError, match="no module `d`; there are a, b, c"):
        topology.shard("d", [])


@pytest.mark.parametrize("counts", [3, [2, 0, 5, 1, 1, 0, 4], torch.tensor([0] * 7), np.array([1, 2] * 3 + [0])])
@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_a_plan_from_counts_is_that_of_the_ids(placement: str, counts: Any) -> None:
    """With fewer samples than replicas too."""
    topology = build(GRAPH, PLACEMENTS[placement])
    boundary = Boundary.open(topology, "vision", "text")
    for samples in (7, 1, 0):
        given = counts if isinstance(counts, int) else counts[:samples]
        each = [given] * samples if isinstance(given, int) else [int(count) for count in given]
        ids = [10 * n + row for n in range(samples) for row in range(each[n])]
        held, needed = (
            [i for i in ids if i // 10 in topology.shard(name, range(samples))] for name in ("vision", "text")
        )
        plan, expected = boundary.plan(samples=samples, rows_per_sample=given), boundary.plan(held=held, needed=needed)
        assert plan.digest == expected.digest
        with micro_batch(boundary):
            arrived = boundary(plan, rows_of(held) if topology.has("vision") else None)
            assert torch.equal(arrived, rows_of(needed))


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4)
def test_a_runner_takes_counts(placement: str) -> None:
    topology = build(GRAPH, PLACEMENTS[placement])
    seen = list[Tensor]()

    def text(samples: range, rows: Tensor) -> Tensor:
        seen.append(rows.detach())
        return rows.sum() / topology.layouts["text"].tp

    modules = {"vision": nn.Identity(), "text": text}
    run = Runner(topology, {name: each for name, each in modules.items() if topology.has(name)})
    inputs: dict[str, Any] = {}
    if topology.has("vision"):
        inputs["vision"] = rows_of(topology.shard("vision", range(5)))
    if topology.has("text"):
        inputs["text"] = topology.shard("text", range(5))
    rows = {("vision", "text"): Rows(samples=5, rows_per_sample=1)}
    run([MicroBatchInputs(inputs, rows)])
    if topology.has("text"):
        assert torch.equal(seen[0], rows_of(inputs["text"]))
    nothing = MicroBatchInputs({name: each for name, each in inputs.items() if name != "text"}, rows)
    with pytest.raises(UserError, match="found none of `text`, .*`vision>text`"):
        run([nothing])


WRONG_COUNTS: list[tuple[dict[str, Any], str]] = [
    ({"samples": 4}, "found 4, with rows_per_sample=None"),
    ({"rows_per_sample": 4}, "found None, with rows_per_sample=4"),
    ({"samples": -1, "rows_per_sample": 4}, "found -1"),
    ({"samples": 2.0, "rows_per_sample": 4}, "found 2.0"),
    ({"samples": 2, "rows_per_sample": [4]}, r"rows_per_sample=\[4\]"),
    ({"samples": 2, "rows_per_sample": [4, -1]}, r"rows_per_sample=\[4, -1\]"),
    ({"samples": 2, "rows_per_sample": 1.5}, "rows_per_sample=1.5"),
    ({"samples": 2, "rows_per_sample": [[1], [2, 3]]}, "rows_per_sample="),
    ({"samples": 2, "rows_per_sample": 1, "held": [0]}, "and ids of rows, .* without `held` and `needed`. Give"),
    ({"samples": 2, "rows_per_sample": 1, "needed": torch.tensor(3)}, "and ids of rows"),
]


@on_ranks(4)
def test_counts_that_do_not_fit_are_refused_on_all_ranks() -> None:
    topology = build(GRAPH, PLACEMENTS["colocated"])
    good: dict[str, Any] = {"samples": 4, "rows_per_sample": 1}
    boundary = Boundary.open(topology, "vision", "text")
    for wrong, said in WRONG_COUNTS:
        with pytest.raises(UserError, match=f"boundary vision>text on rank 2: samples: .*{said}"):
            boundary.plan(**wrong if topology.rank == 2 else good)
    others: list[dict[str, Any]] = [{"samples": 5}, {"rows_per_sample": 2}]
    for other in others:
        with pytest.raises(UserError, match="vision>text: samples, rows_per_sample: found 4, 1 on rank 0 and"):
            boundary.plan(**good | other if topology.rank == 2 else good)
    with pytest.raises(UserError, match="samples, rows_per_sample: found none on rank 0 and 4, 1 on rank 2"):
        boundary.plan(**good) if topology.rank == 2 else boundary.plan(held=[topology.rank])
    for axis in ("sp", "cp"):
        split = build(GRAPH, vision=f"{axis}:2,dp:2", text="dp:4")
        with pytest.raises(
            UserError,
            match=rf"found `vision` with {axis}:2,dp:2.*, expected no sp and no cp.*`held`",
        ):
            Boundary.open(split, "vision", "text").plan(**good)


SHARED: list[tuple[dict[str, str], str, Any, Any, str]] = [
    # Layouts, then by rank what is held and needed.
    (PLACEMENTS["colocated"], "vision", [[0, 1]] * 4, [[0], [0], [1], [1]], "row 0 on ranks 0 and 1"),
    (PLACEMENTS["colocated"], "text", [[0], [1], [2], [3]], [[0, 1, 2, 3]] * 4, "row 0 on ranks 0 and 2"),
    (PLACEMENTS["colocated"], "vision", [[0], [1, 2], [3], [2]], [[0], [0], [1], [1]], "row 2 on ranks 1 and 3"),
    (PLACEMENTS["disjoint"], "vision", [[7, -1], [7, -1], [], []], [[], [], [7], []], "row 7 on ranks 0 and 1"),
    (PLACEMENTS["disjoint"], "text", [[0], [1], [], []], [[], [], [0, 1], [1]], "row 1 on ranks 2 and 3"),
    (PLACEMENTS["mixed"], "vision", [[0], [1], [0], []], [[], [], [0], [1]], "row 0 on ranks 0 and 2"),
    ({"vision": "tp:2,dp:2", "text": "dp:4"}, "vision", [[0]] * 4, [[0], [], [], []], "row 0 on ranks 0 and 2"),
    ({"vision": "sp:2,dp:2", "text": "dp:4"}, "vision", [[0], [1]] * 2, [[0], [], [], []], "row 0 on ranks 0 and 2"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(SHARED)))
@on_ranks(4)
def test_rows_that_replicas_share_are_refused_with_what_shards(at: int) -> None:
    """What the message suggests is right, and the boundary works afterwards."""
    layouts, module, held, needed, found = SHARED[at]
    topology = build(GRAPH, layouts)
    boundary, rank = Boundary.open(topology, "vision", "text"), topology.rank
    with pytest.raises(UserError, match=rf"vision>text: (held|needed): found {found}, in two replicas") as caught:
        boundary.plan(held=held[rank], needed=needed[rank])
    [suggested] = re.findall(r"`(topology\.shard\(.*?\))`", str(caught.value))
    assert suggested == f'topology.shard("{module}", samples)'
    samples = [0, 1, 2, 3]
    shards = {"vision": topology.shard("vision", samples), "text": topology.shard("text", samples)}
    shards[module] = eval(suggested)
    boundary.plan(held=shards["vision"], needed=shards["text"])
    inputs = {name: () for name in layouts if topology.has(name)}
    run, rows = Runner(topology, {name: nn.Identity() for name in inputs}), Rows(held[rank], needed[rank])
    with pytest.raises(UserError, match=rf"vision>text: (held|needed): found {found}"):
        run([MicroBatchInputs(inputs, {("vision", "text"): rows})])


@on_ranks(4)
def test_rows_that_replicas_may_share() -> None:
    """Along other axes; parts of gradients of one picture in several samples; padding; without gradients."""
    topology = build(GRAPH, vision="dp:4", text="tp:2,dp:2")
    boundary, rank, mine = Boundary.open(topology, "vision", "text"), topology.rank, [-1, topology.rank]
    boundary.plan(held=mine, needed=[0, 1] if rank < 2 else [2, 3])
    boundary.plan(held=mine, needed=[0, 1, 2, 3], gradient="partial")
    everything = [0, 1, 2, 3]
    with torch.no_grad():
        plan = boundary.plan(held=everything, needed=everything)
        assert torch.equal(boundary(plan, rows_of(everything)), rows_of(everything))
    with pytest.raises(UserError, match="a plan of the forward direction only"), micro_batch(boundary):
        boundary(plan, rows_of(everything))


@on_ranks(4)
def test_a_picture_in_samples_of_two_replicas() -> None:
    """As the message suggests: each has a part of its gradient."""
    topology = build(GRAPH, vision="dp:4", text="dp:4")
    boundary, rank = Boundary.open(topology, "vision", "text"), topology.rank
    rows = rows_of([rank])
    with micro_batch(boundary):
        arrived = boundary(boundary.plan(held=[rank], needed=[0], gradient="partial"), rows)
        ((1 + rank) * arrived).sum().backward()
    assert rows.grad is not None and torch.equal(rows.grad, torch.full_like(rows, 10.0 if rank == 0 else 0.0))


@on_ranks(4)
def test_a_rank_outside_an_edge_takes_no_part() -> None:
    """Also on a later stage of the module; what is not planned is refused there as elsewhere."""
    topology = build(GRAPH, vision="dp:1@0", text="pp:2@1-2")
    boundary = Boundary.open(topology, "vision", "text")
    rows = rows_of(range(3)) if topology.has("vision") else None
    with micro_batch(boundary):
        plan = boundary.plan(
            held=[0, 1, 2] if rows is not None else [],
            needed=topology.shard("text", [2, 1]) if topology.rank != 0 else [],
        )
        arrived = boundary(plan, rows)
        by_count = boundary(boundary.plan(samples=3, rows_per_sample=1), rows)
        if topology.rank == 1:
            (arrived.sum() + by_count.sum()).backward()
    assert arrived.shape == (2 if topology.rank == 1 else 0, WIDTH) and arrived.dtype == torch.float64
    assert by_count.shape == (3 if topology.rank == 1 else 0, WIDTH)
    if rows is not None:
        assert rows.grad is not None and rows.grad[:, 0].tolist() == [1.0, 2.0, 2.0]
    with pytest.raises(UserError, match=rf"text>vision on rank {topology.rank}: .*expected one of vision>text"):
        Boundary.open(topology, "text", "vision")
    with pytest.raises(UserError, match=r"no module `txet` \(did you mean `text`"):
        Boundary.open(topology, "vision", "txet")
    unplanned = build(GRAPH, vision="dp:1@0", text="pp:2@1-2", planned=False)
    with pytest.raises(UserError, match="an edge that is not planned, expected none"):
        Boundary.open(unplanned, "vision", "text")


@on_ranks(4)
def test_metrics_are_a_dictionary_of_all_modules_everywhere() -> None:
    """Ranks with the last stage, another one, and none; modules with metrics and without."""
    topology = build(GRAPH, vision="dp:1@0", text="pp:2@1-2")
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    first = lambda _, rows: rows * weight  # noqa: E731
    last = Stage(lambda _, hidden: {"loss": (hidden * weight).sum(), "metrics": {"rows": len(hidden)}}, (2, WIDTH))
    modules: dict[str, Any] = {"vision": nn.Identity()} if topology.rank == 0 else {}
    modules |= {"text": first if topology.rank == 1 else last} if topology.has("text") else {}
    inputs = {name: rows_of(range(2)) for name in modules}
    result = Runner(topology, modules)(
        [MicroBatchInputs(inputs, {("vision", "text"): Rows(samples=2, rows_per_sample=1)})]
    )
    assert type(result.metrics) is dict and {name: list(each) for name, each in result.metrics.items()} == {
        "vision": [], "text": ["rows"] if topology.rank == 2 else [],
    }  # fmt: skip
