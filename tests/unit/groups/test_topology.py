"""Process groups of layouts: who is in them, in which order, and what happens where they are not as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology, _check_message, _check_messages, _check_sum
from megatron_hetero.layout.communicators import AXES_OF_GROUPS, ENDS, GroupNeeds
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.support.views import BLOCKS, EXPERTS

PLATFORM = Platform(CPU, "gloo")
PAIRS = [
    ("sp:4", "tp:4"),
    ("dp:4", "tp:2,dp:2"),
    ("sp:2,dp:2", "tp:4"),
    ("tp:2,sp:2", "dp:4"),
    ("tp:2,dp:2", "tp:2,dp:2"),
    ("sp:2,cp:2", "tp:2,pp:2"),
    ("dp:2@0,2", "tp:2@1,3"),
]


def build(texts: dict[str, str], **options: Any) -> Topology:
    world_size = dist.get_world_size()
    return Topology.build({name: Layout.parse(text, world_size) for name, text in texts.items()}, PLATFORM, **options)


def answered(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks of a group, in its order, as they answer themselves."""
    found = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(found, torch.tensor([dist.get_rank()]), group=group)
    return tuple(found.tolist())


def require_ranks_of_the_layouts(texts: dict[str, str]) -> None:
    topology, rank = build(texts), dist.get_rank()
    for module, layout in topology.layouts.items():
        for axes in AXES_OF_GROUPS if rank in layout else ():
            assert answered(topology.group(module, *axes)) == layout.group_of(rank, *axes), (module, axes)


@pytest.mark.parametrize("vision, text", PAIRS)
@on_ranks(4)
def test_groups_have_the_ranks_of_the_layout(vision: str, text: str) -> None:
    require_ranks_of_the_layouts({"vision": vision, "text": text})


@on_ranks(8)
def test_groups_of_eight_ranks() -> None:
    require_ranks_of_the_layouts({"vision": "tp:2,sp:2,dp:2", "text": "tp:4,dp:2"})


@pytest.mark.parametrize(
    "text, expected",
    [
        ("pp:4", {0: (0, 3), 3: (0, 3)}),
        ("tp:2,pp:2", {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}),
        ("pp:3@0,2-3", {0: (0, 3), 3: (0, 3)}),
        ("tp:4", {}),
    ],
)
@on_ranks(4)
def test_first_and_last_stage(text: str, expected: dict[int, tuple[int, ...]]) -> None:
    topology, rank = build({"vision": "dp:4", "text": text}, needs={"text": GroupNeeds(tied=True)}), dist.get_rank()
    group = topology.collection("text").embd if rank in topology.layouts["text"] else None
    if rank in expected:
        assert group is not None and group is topology.group("text", *ENDS)
        assert answered(group) == expected[rank]
    else:
        assert group is None


@on_ranks(8)
def test_megatrons_collection() -> None:
    groups = build({"vision": "tp:2,sp:2,dp:2", "text": "tp:8"}).collection("vision")
    sizes = {
        "tp": 2, "sp": 2, "context": 1, "cp": 2, "dp": 2, "pp": 1, "dp_cp": 4, "mp": 2, "tp_cp": 4, "tp_ep_pp": 2,
        "expt_dp": 4, "intra_dist_opt": 8, "ep": 1,
    }  # fmt: skip
    assert {name: getattr(groups, name).size() for name in sizes} == sizes
    assert groups.embd is groups.pos_embd is None


def build_with_experts(text: str, **options: Any) -> Topology:
    layouts = {"text": Layout.parse(text, dist.get_world_size(), views=[EXPERTS, BLOCKS])}
    return Topology.build(layouts, PLATFORM, **options)


@pytest.mark.parametrize(
    "text", ["tp:2,dp:2,ep:4", "dp:4,ep:2,wp:2,xp:2", "tp:4,xp:2", "tp:2,pp:2,ep:2", "sp:2,dp:2,wp:2"]
)
@on_ranks(4)
def test_groups_of_further_views_reduce_to_known_values(text: str) -> None:
    topology, rank = build_with_experts(text, megatron=[]), dist.get_rank()
    layout = topology.layouts["text"]
    for view in layout.views:
        for axes in (view.shard_axes, view.shard_axes[:1], view.sum_axes):
            group, ranks = topology.group("text", *axes), layout.group_of(rank, *axes)
            assert answered(group) == answered(topology.group("text", *axes[::-1])) == ranks
            value = torch.tensor([1 << rank])
            dist.all_reduce(value, group=group)
            assert value.item() == sum(1 << other for other in ranks)
        mesh = topology.mesh("text", view.name)
        assert mesh.mesh_dim_names == ("pp", *view.names[::-1])
        assert mesh.get_coordinate() == tuple(layout.indices(rank, view).values())[::-1]
        assert mesh[view.rest].get_group().size() == layout.degrees_in(view)[view.rest]
    with pytest.raises(UserError, match="axes tp, ep, expected axes of one view"):
        topology.group("text", "tp", "ep")


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("tp:2,dp:2,ep:2", True),
        ("tp:2,dp:2,ep:4", False),
        ("tp:2,dp:2,ep:1", False),
        ("tp:2,dp:2", True),
        ("dp:4", True),
        ("dp:4,ep:2", False),
    ],
)
@on_ranks(4)
def test_sums_of_two_views_share_a_communicator_where_the_same_ranks_sum(text: str, shared: bool) -> None:
    topology = build_with_experts(text, megatron=[])
    main, experts = topology.group("text", "sp", "cp", "dp"), topology.group("text", "edp")
    assert (main is experts) == shared
    assert topology.world not in (main, experts), "sums run beside the computation"


@on_ranks(8)
def test_megatrons_groups_of_experts() -> None:
    """As Megatron's `expert_model_parallel_size` folds them: consecutive ranks, whatever the dense layers do."""
    groups = build_with_experts("tp:2,dp:2,pp:2,ep:4").collection("text")
    names = ("ep", "expt_tp", "tp_ep", "expt_dp", "intra_expt_dp", "tp_ep_pp", "tp", "dp_cp")
    sizes = (4, 1, 4, 1, 1, 8, 2, 2)
    assert tuple(getattr(groups, name).size() for name in names) == sizes
    first = dist.get_rank() // 4 * 4
    assert answered(groups.ep) == answered(groups.tp_ep) == tuple(range(first, first + 4))


@on_ranks(4)
def test_equal_sets_share_a_group_but_the_loader_and_gradients_have_their_own() -> None:
    topology = build({"vision": "sp:4", "text": "tp:4"})
    assert topology.group("vision", "sp", "cp", "dp") is not topology.world, "its sums run beside the computation"
    assert topology.group("vision", "sp", "cp") is topology.group("text", "tp") is topology.world
    assert topology.host is not topology.world
    assert topology.files not in (topology.host, topology.world)
    assert topology.group("vision", "cp", "sp") is topology.world
    with pytest.raises(KeyError, match="no module `audio`; there are vision, text"):
        topology.group("audio", "tp")


def sockets() -> int:
    """How many this process has open."""
    return sum(link.exists() and link.is_socket() for link in Path("/proc/self/fd").iterdir())


@on_ranks(4)
def test_a_host_group_takes_a_socket_for_each_rank() -> None:
    """What `raise_open_files` counts: those of a topology are two, whatever its modules."""
    before = sockets()
    kept = PLATFORM.host_group("one more")
    assert 3 <= sockets() - before <= 4, kept


@on_ranks(4)
def test_a_group_that_this_rank_lacks_is_explained() -> None:
    topology = build({"vision": "sp:2@0-1", "text": "tp:2@2-3"})
    mine, other = ("vision", "text") if topology.rank < 2 else ("text", "vision")
    with pytest.raises(KeyError, match=rf"rank {topology.rank} is not in `{other}`, whose ranks are \d-\d"):
        topology.group(other, "tp")
    with pytest.raises(KeyError, match=f"no group .* stage of `{mine}`"):
        topology.group(mine, *ENDS)


@on_ranks(4)
def test_groups_without_a_communicator() -> None:
    """Of one rank they copy, of several they say where they are and refuse to communicate."""
    topology = build({"vision": "sp:2,dp:2", "text": "tp:2,pp:2"}, megatron=[])
    alone, rank = topology.group("text", "cp"), dist.get_rank()
    assert (alone.size(), dist.get_rank(alone), dist.get_process_group_ranks(alone)) == (1, 0, [rank])
    mine, out = torch.full((3,), float(rank)), torch.empty(3)
    dist.all_reduce(mine, group=alone)
    dist.all_gather_into_tensor(out, mine, group=alone)
    assert torch.equal(out, torch.full((3,), float(rank)))
    dist.reduce_scatter_tensor(out.zero_(), mine, group=alone)
    dist.all_to_all_single(mine, out + 1, [3], [3], group=alone)
    dist.broadcast(mine, rank, group=alone)
    dist.barrier(group=alone)
    assert torch.equal(mine, torch.full((3,), float(rank) + 1))
    several = topology.group("text", "tp", "pp")
    assert (several.size(), dist.get_rank(several)) == (4, rank)
    with pytest.raises(RuntimeError, match=r"found a collective over ranks \(0, 1, 2, 3\), expected none"):
        dist.all_reduce(mine, group=several)


@on_ranks(4)
def test_a_topology_next_to_other_groups() -> None:
    """In a program whose ranks have made different numbers of groups before."""
    for ranks in ([0, 1], [0, 2], [0, 3]):
        dist.new_group(ranks)
    dist.new_group([1, 2], use_local_synchronization=True)
    topology = build({"vision": "sp:2,dp:2", "text": "tp:2,pp:2"}, decoding=["vision"])
    assert answered(topology.group("text", "tp")) == topology.layouts["text"].group_of(dist.get_rank(), "tp")


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
@on_ranks(4)
def test_links(text: str, interleaved: bool, expected: dict[int, dict[tuple[str, int], tuple[int, ...]]]) -> None:
    """By direction and sending stage. Messages go over all of them at once: receives first, which must not hold up
    sends.
    """
    topology = build({"text": text}, needs={"text": GroupNeeds(interleaved=interleaved)})
    layout, rank = topology.layouts["text"], dist.get_rank()
    if rank not in layout:
        assert "text" not in topology.pipelines
        return
    groups = topology.pipelines["text"]
    members = {link: tuple(dist.get_process_group_ranks(group)) for link, group in groups.items()}
    assert members == expected.get(rank, members)
    mine, stage = torch.tensor([rank]), layout.coordinate(rank).pp
    peers = {link: next(r for r in ranks if r != rank) for link, ranks in members.items()}
    arriving, works = {}, []
    for (direction, sender), group in groups.items():
        if sender != stage:
            arriving[direction, sender] = buffer = torch.empty(1, dtype=torch.int64)
            works.append(dist.irecv(buffer, peers[direction, sender], group))
    for (direction, sender), group in groups.items():
        if sender == stage:
            works.append(dist.isend(mine, peers[direction, sender], group))
    for work in works:
        work.wait()
    assert {link: int(buffer) for link, buffer in arriving.items()} == {link: peers[link] for link in arriving}


@pytest.mark.parametrize(
    "vision, text, members",
    [
        ("dp:2@0-1", "tp:2@2-3", (0, 1, 2, 3)),
        ("pp:2@0-1", "pp:2@1,3", (1,)),
        ("sp:4", "pp:4", (0, 1, 2, 3)),
    ],
)
@on_ranks(4)
def test_boundaries_have_a_group_for_each_direction(vision: str, text: str, members: tuple[int, ...]) -> None:
    """One group for both where a rank is alone, none on ranks that are on no side."""
    topology = build({"vision": vision, "text": text}, edges=[("vision", "text")])
    groups = topology.boundaries.get(Edge("vision", "text"))
    if dist.get_rank() not in members:
        assert groups is None
        return
    assert groups is not None
    assert tuple(dist.get_process_group_ranks(groups.forward)) == members
    assert tuple(dist.get_process_group_ranks(groups.backward)) == members
    assert (groups.forward is not groups.backward) == (len(members) > 1)


# ------------------------------------------------------------- the self-check, of groups that ranks tell apart wrongly


@on_ranks(4)
def test_the_self_check_finds_a_wrong_sum() -> None:
    rank = dist.get_rank()
    ranks, expected = ((0, 1), 3) if rank < 2 else ((2, 3), 7)
    with pytest.raises(RuntimeError) as error:
        _check_sum(world(), ranks, rank, CPU)
    message = str(error.value)
    assert message.startswith(f"process group of ranks {ranks}: found sum 10 and position {rank}")
    assert f"expected sum {expected} and {rank % 2} on rank {rank}" in message and "different orders" in message


@on_ranks(4)
def test_the_self_check_finds_a_wrong_order() -> None:
    rank = dist.get_rank()
    if rank < 2:
        with pytest.raises(RuntimeError, match=f"position {rank}, expected sum 10 and {1 - rank} on rank {rank}"):
            _check_sum(world(), (1, 0, 2, 3), rank, CPU)
    else:
        _check_sum(world(), (1, 0, 2, 3), rank, CPU)


@on_ranks(4)
def test_the_self_check_finds_wrong_ranks_of_messages() -> None:
    with pytest.raises(RuntimeError, match=r"found ranks \(0, 1, 2, 3\)"):
        _check_messages(world(), (1, 0, 2, 3), dist.get_rank(), (), (), CPU)


@on_ranks(4)
def test_the_self_check_passes_groups_that_are_right() -> None:
    rank = dist.get_rank()
    _check_sum(world(), (0, 1, 2, 3), rank, CPU)
    others = tuple(r for r in range(4) if r != rank)
    _check_messages(world(), (0, 1, 2, 3), rank, others, others, CPU)
    pairs: list[Any] = [dist.new_group(list(pair)) for pair in ((0, 1), (2, 3))]
    _check_message(pairs[rank // 2], rank, sends=rank % 2 == 0, device=CPU)
