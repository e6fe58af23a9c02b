"""What the workers of the pool run for the tests of the topology."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.distributed.communicators import AXES_OF_GROUPS, ENDS
from megatron_hetero.distributed.platform import CPU, Platform
from megatron_hetero.distributed.topology import Topology, _check_message, _check_messages, _check_sum
from megatron_hetero.layout.edge import Edge
from megatron_hetero.layout.layout import Layout
from tests.support.pool import world

PLATFORM = Platform(CPU, "gloo")


def members(texts: dict[str, str]) -> dict[tuple[str, tuple[str, ...]], tuple[int, ...]]:
    """The ranks of each of this rank's groups, in the order of the group, as they answer themselves."""
    topology = _build(texts)
    found = {}
    for module, layout in topology.layouts.items():
        for axes in AXES_OF_GROUPS if dist.get_rank() in layout else ():
            found[module, axes] = _told(topology.group(module, *axes))
    return found


def ends(texts: dict[str, str], module: str) -> tuple[int, ...] | None:
    """The ranks of this rank's group of first and last stage, as they answer themselves; None where it is in none."""
    topology = _build(texts, tied=[module])
    group = topology.collection(module).embd if dist.get_rank() in topology.layouts[module] else None
    if group is None:
        return None
    assert group is topology.group(module, *ENDS)
    return _told(group)


def links(text: str, interleaved: bool) -> dict[tuple[str, int], tuple[int, ...]]:
    """The ranks of this rank's links, by direction and sending stage, after messages over all of them at once: receives
    first, which must not hold up sends.
    """
    topology = _build({"text": text}, interleaved=["text"] if interleaved else [])
    layout, rank = topology.layouts["text"], dist.get_rank()
    if rank not in layout:
        assert "text" not in topology.pipelines
        return {}
    groups = topology.pipelines["text"]
    mine = torch.tensor([rank])
    peers = {link: next(r for r in dist.get_process_group_ranks(group) if r != rank) for link, group in groups.items()}
    arriving, works = {}, []
    for (direction, sender), group in groups.items():
        if sender != layout.coordinate(rank).pp:
            arriving[direction, sender] = buffer = torch.empty(1, dtype=torch.int64)
            works.append(dist.irecv(buffer, peers[direction, sender], group))
    for (direction, sender), group in groups.items():
        if sender == layout.coordinate(rank).pp:
            works.append(dist.isend(mine, peers[direction, sender], group))
    for work in works:
        work.wait()
    assert {link: int(buffer) for link, buffer in arriving.items()} == {link: peers[link] for link in arriving}
    return {link: tuple(dist.get_process_group_ranks(group)) for link, group in groups.items()}


def boundary(texts: dict[str, str]) -> tuple[tuple[int, ...], bool] | None:
    """The ranks of the boundary between the two modules, and whether its directions have a group each."""
    topology = _build(texts, edges=[("vision", "text")])
    groups = topology.boundaries.get(Edge("vision", "text"))
    if groups is None:
        return None
    assert dist.get_process_group_ranks(groups.forward) == dist.get_process_group_ranks(groups.backward)
    return tuple(dist.get_process_group_ranks(groups.forward)), groups.forward is not groups.backward


def collection(texts: dict[str, str], module: str) -> dict[str, Any]:
    """Sizes of the groups of Megatron's collection."""
    groups = _build(texts).collection(module)
    names = "tp sp context cp dp pp dp_cp mp tp_cp tp_ep_pp expt_dp intra_dist_opt ep".split()
    return {name: getattr(groups, name).size() for name in names} | {"embd": groups.embd, "pos_embd": groups.pos_embd}


def shared() -> tuple[bool, bool, bool]:
    """Whether equal sets of ranks share a group, and `host` is not `world`, and an unknown module is refused."""
    topology = _build({"vision": "sp:4", "text": "tp:4"})
    with pytest.raises(KeyError):
        topology.group("audio", "tp")
    same = topology.group("vision", "sp", "cp") is topology.group("text", "tp") is topology.world
    return same, topology.host is not topology.world, topology.files not in (topology.host, topology.world)


def without_communicator() -> None:
    """Groups that have none: of one rank they copy, of several they say where they are and refuse to communicate."""
    topology = _build({"vision": "sp:2,dp:2", "text": "tp:2,pp:2"})
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


def after_other_groups() -> None:
    """A topology in a program whose ranks have made different numbers of groups before."""
    for ranks in ([0, 1], [0, 2], [0, 3]):
        dist.new_group(ranks)
    topology = _build({"vision": "sp:2,dp:2", "text": "tp:2,pp:2"}, decoding=["vision"])
    assert _told(topology.group("text", "tp")) == topology.layouts["text"].group_of(dist.get_rank(), "tp")


def check(kind: str) -> str:
    """What the self-check says of groups that are not what their ranks say."""
    rank, everybody = dist.get_rank(), world()
    try:
        if kind == "sum":
            _check_sum(everybody, (0, 1) if rank < 2 else (2, 3), rank, CPU)
        elif kind == "order":
            _check_sum(everybody, (1, 0, 2, 3), rank, CPU)
        elif kind == "ranks":
            _check_messages(everybody, (1, 0, 2, 3), rank, (), (), CPU)
        elif kind == "message":
            pairs: list[Any] = [dist.new_group(list(pair)) for pair in ((0, 1), (2, 3))]
            _check_message(pairs[rank // 2], rank, sends=rank % 2 == 0, device=CPU)
        else:
            _check_sum(everybody, (0, 1, 2, 3), rank, CPU)
            others = tuple(r for r in range(4) if r != rank)
            _check_messages(everybody, (0, 1, 2, 3), rank, others, others, CPU)
    except RuntimeError as error:
        return str(error)
    return ""


def _told(group: dist.ProcessGroup) -> tuple[int, ...]:
    told = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(told, torch.tensor([dist.get_rank()]), group=group)
    return tuple(told.tolist())


def _build(texts: dict[str, str], **options: Any) -> Topology:
    world_size = dist.get_world_size()
    return Topology.build({name: Layout.parse(text, world_size) for name, text in texts.items()}, PLATFORM, **options)
