"""What the workers of the pool run for the tests of the topology."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.layout import Layout
from megatron_hetero.platform import CPU, Platform
from megatron_hetero.topology import ENDS, GROUP_AXES, Topology, _self_check
from tests.support.pool import world

PLATFORM = Platform(CPU, "gloo")


def members(texts: dict[str, str]) -> dict[tuple[str, tuple[str, ...]], tuple[int, ...]]:
    """The ranks of each of this rank's groups, in the order of the group, as they answer themselves."""
    topology = _build(texts)
    found = {}
    for module, axes in product(texts, GROUP_AXES):
        if dist.get_rank() in topology.layouts[module]:
            group = topology.group(module, *axes)
            mine = torch.tensor([dist.get_rank()])
            told = torch.empty(group.size(), dtype=torch.int64)
            dist.all_gather_into_tensor(told, mine, group=group)
            found[module, axes] = tuple(told.tolist())
    return found


def ends(texts: dict[str, str], module: str) -> tuple[int, ...] | None:
    """The ranks of this rank's group of first and last stage, as they answer themselves; None where it is in none."""
    topology = _build(texts)
    group = topology.collection(module).embd if dist.get_rank() in topology.layouts[module] else None
    if group is None:
        return None
    assert group is topology.group(module, *ENDS)
    told = torch.empty(group.size(), dtype=torch.int64)
    dist.all_gather_into_tensor(told, torch.tensor([dist.get_rank()]), group=group)
    return tuple(told.tolist())


def collection(texts: dict[str, str], module: str) -> dict[str, Any]:
    """Sizes of the groups of Megatron's collection."""
    groups = _build(texts).collection(module)
    names = "tp sp context cp dp pp dp_cp mp tp_cp tp_ep_pp expt_dp intra_dist_opt ep".split()
    return {name: getattr(groups, name).size() for name in names} | {"embd": groups.embd, "pos_embd": groups.pos_embd}


def shared() -> tuple[bool, bool, bool]:
    """Whether equal sets of ranks share a group, and `host` is not `world`, and an unknown module is refused."""
    topology = _build({"vision": "sp:4", "text": "tp:4"})
    try:
        topology.group("audio", "tp")
        refused = False
    except KeyError:
        refused = True
    same = topology.group("vision", "sp", "cp") is topology.group("text", "tp") is topology.world
    return same, topology.host is not topology.world, refused


def check(kind: str) -> str:
    """What the self-check says of groups that are not what their ranks say."""
    rank, everybody = dist.get_rank(), world()
    by_ranks = {
        "sum": {(0, 1): everybody, (2, 3): everybody},
        "order": {(1, 0, 2, 3): everybody},
        "right": {(0, 1, 2, 3): everybody},
    }[kind]
    try:
        _self_check(by_ranks, rank, CPU)
    except RuntimeError as error:
        return str(error)
    return ""


def _build(texts: dict[str, str]) -> Topology:
    world_size = dist.get_world_size()
    return Topology.build({name: Layout.parse(text, world_size) for name, text in texts.items()}, PLATFORM)
