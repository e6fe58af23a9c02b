"""Process groups of layouts: who is in them, in which order, and what happens where they are not as planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_hetero.layout.layout import Layout
from tests.support.pool import Pool
from tests.unit import jobs_topology as jobs

PAIRS = [
    ("sp:4", "tp:4"),
    ("dp:4", "tp:2,dp:2"),
    ("sp:2,dp:2", "tp:4"),
    ("tp:2,sp:2", "dp:4"),
    ("tp:2,dp:2", "tp:2,dp:2"),
    ("sp:2,cp:2", "tp:2,pp:2"),
    ("dp:2@0,2", "tp:2@1,3"),
]


@pytest.mark.parametrize("vision, text", PAIRS)
def test_groups_have_the_ranks_of_the_layout(vision: str, text: str, pools: Callable[[int], Pool]) -> None:
    texts = {"vision": vision, "text": text}
    for rank, found in enumerate(pools(4).run(jobs.members, texts)):
        for (module, axes), ranks in found.items():
            assert ranks == Layout.parse(texts[module], 4).group_of(rank, *axes)


def test_groups_of_eight_ranks(pools: Callable[[int], Pool]) -> None:
    texts = {"vision": "tp:2,sp:2,dp:2", "text": "tp:4,dp:2"}
    for rank, found in enumerate(pools(8).run(jobs.members, texts)):
        for (module, axes), ranks in found.items():
            assert ranks == Layout.parse(texts[module], 8).group_of(rank, *axes)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("pp:4", {0: (0, 3), 1: None, 2: None, 3: (0, 3)}),
        ("tp:2,pp:2", {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}),
        ("pp:3@0,2-3", {0: (0, 3), 1: None, 2: None, 3: (0, 3)}),
        ("tp:4", {0: None, 1: None, 2: None, 3: None}),
    ],
)
def test_first_and_last_stage(text: str, expected: dict, pools: Callable[[int], Pool]) -> None:
    found = pools(4).run(jobs.ends, {"vision": "dp:4", "text": text}, "text")
    assert dict(enumerate(found)) == expected


def test_megatrons_collection(pools: Callable[[int], Pool]) -> None:
    for found in pools(8).run(jobs.collection, {"vision": "tp:2,sp:2,dp:2", "text": "tp:8"}, "vision"):
        assert found == {
            "tp": 2, "sp": 2, "context": 1, "cp": 2, "dp": 2, "pp": 1, "dp_cp": 4, "mp": 2, "tp_cp": 4, "tp_ep_pp": 2,
            "expt_dp": 4, "intra_dist_opt": 8, "ep": 1, "embd": None, "pos_embd": None,
        }  # fmt: skip


def test_equal_sets_share_a_group_but_the_loader_has_its_own(pools: Callable[[int], Pool]) -> None:
    assert set(pools(4).run(jobs.shared)) == {(True, True, True)}


def test_groups_without_a_communicator(pools: Callable[[int], Pool]) -> None:
    pools(4).run(jobs.without_communicator)


def test_a_topology_beside_other_groups(pools: Callable[[int], Pool]) -> None:
    pools(4).run(jobs.after_other_groups)


@pytest.mark.parametrize(
    "text, interleaved, expected",
    [
        ("pp:2@1-2", False, {1: {("forward", 0): (1, 2), ("backward", 1): (1, 2)}}),
        (
            "pp:2@1-2",
            True,
            {1: {(d, s): (1, 2) for d in ("forward", "backward") for s in (0, 1)}},
        ),
        (
            "pp:3@0-2",
            True,
            {
                0: {("forward", 0): (0, 1), ("forward", 2): (0, 2), ("backward", 1): (0, 1), ("backward", 0): (0, 2)},
                1: {("forward", 0): (0, 1), ("forward", 1): (1, 2), ("backward", 1): (0, 1), ("backward", 2): (1, 2)},
            },
        ),
        ("tp:2,pp:2", False, {1: {("forward", 0): (1, 3), ("backward", 1): (1, 3)}}),
    ],
)
def test_links(text: str, interleaved: bool, expected: dict, pools: Callable[[int], Pool]) -> None:
    found = pools(4).run(jobs.links, text, interleaved)
    assert {rank: found[rank] for rank in expected} == expected


@pytest.mark.parametrize(
    "vision, text, expected",
    [
        ("dp:2@0-1", "tp:2@2-3", {0: ((0, 1, 2, 3), True), 3: ((0, 1, 2, 3), True)}),
        ("pp:2@0-1", "pp:2@1,3", {0: None, 1: ((1,), False), 3: None}),
        ("sp:4", "pp:4", {3: ((0, 1, 2, 3), True)}),
    ],
)
def test_boundaries_have_a_group_for_each_direction(
    vision: str, text: str, expected: dict, pools: Callable[[int], Pool]
) -> None:
    found = pools(4).run(jobs.boundary, {"vision": vision, "text": text})
    assert {rank: found[rank] for rank in expected} == expected


def test_the_self_check_finds_wrong_groups(pools: Callable[[int], Pool]) -> None:
    pool = pools(4)
    for rank, message in enumerate(pool.run(jobs.check, "sum")):
        ranks, expected = ((0, 1), 3) if rank < 2 else ((2, 3), 7)
        assert message.startswith(f"process group of ranks {ranks}: found sum 10 and position {rank}")
        assert f"expected sum {expected} and {rank % 2} on rank {rank}" in message and "different orders" in message
    by_rank = pool.run(jobs.check, "order")
    assert "position 0, expected sum 10 and 1 on rank 0" in by_rank[0] and by_rank[2] == by_rank[3] == ""
    assert "found ranks (0, 1, 2, 3)" in pool.run(jobs.check, "ranks")[0]
    assert set(pool.run(jobs.check, "message")) == {""}
    assert set(pool.run(jobs.check, "right")) == {""}
