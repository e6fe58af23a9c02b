"""Arguments of public names that do not fit: errors in the library's words, with what there is instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import megatron_hetero as mh
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.communicators import GroupNeeds
from megatron_hetero.layout.graph import Edge, as_edge
from megatron_hetero.layout.modules import resolve
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.contract import ModuleOnRank
from tests.support.pool import platform
from tests.support.ranks import on_ranks

EDGES = [("vision", "text")]
LAYOUTS = {"vision": mh.Layout.parse("dp:4", 4), "text": mh.Layout.parse("tp:2,dp:2", 4)}
SOURCE, TARGET = Ownership.of({(0,): [0, 1], (1,): [2]}), Ownership.of({(0, 1): [2]})

PURE: dict[str, Callable[[], Any]] = {
    r"plan_boundary: found 2 rows .*row 0, needed by ranks 0": (lambda: plan_boundary(TARGET, SOURCE, row_bytes=4)),
    r"load_plan: plan: found a BoundaryPlan, .*`plan.rank\(rank\)`": (
        lambda: load_plan(plan_boundary(SOURCE, TARGET, row_bytes=4), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    ),
    r"Ownership.of: found 0 ": lambda: Ownership.of({0: [0]}),  # pyright: ignore[reportArgumentType]
    r"Ownership.of: gradient: found 'whole', expected 'invariant' or 'partial'": (
        lambda: Ownership.of({(0,): [0]}, "whole")  # pyright: ignore[reportArgumentType]
    ),
    r"edge a to b: .* `source_stage` and `target_stage`": lambda: Edge("a", "b", 1),
    r"layouts: found no layout .*`decoder` among vision, text": (lambda: build_schedule(LAYOUTS, 2, text="decoder")),
    "layouts: found no layout .*`text`": lambda: build_schedule({}, 2),
    "forward_only: found `x`, .*text": (
        lambda: build_schedule({"text": mh.Layout.parse("dp:1", 1)}, 2, forward_only=["x"])
    ),
    "layout of `text`: found module `text`, expected none": (lambda: resolve({"text": "dp:1"}, {}, 1)),
    "edge a>b: found no module `a`, expected none": lambda: as_edge(("a", "b"), {}),
    "Graph: width: found `a>b`, expected none": (
        lambda: mh.Graph({"text": []}, width={("a", "b"): 2}, dtype=torch.float32)
    ),
    "ownership: found rows 5 ": (lambda: plan_boundary(SOURCE, Ownership.of({(0,): [5, 5]}), row_bytes=4)),
    r"layout `xp:2`.*: found axis `xp`, expected one of tp, sp, cp, dp, pp": lambda: mh.Layout.parse("xp:2", 4),
}
MISSING: dict[str, Callable[[], Any]] = {
    "rank 7 holds no module; ranks 0-3 do": lambda: build_schedule(LAYOUTS, 2).actions_of(7),
}


@pytest.mark.parametrize("said", PURE)
def test_what_plans_says_what_it_expects(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PURE[said]()


@pytest.mark.parametrize("said", MISSING)
def test_what_is_missing_is_a_key_error_that_lists_what_there_is(said: str) -> None:
    with pytest.raises(KeyError, match=said):
        MISSING[said]()


TOPOLOGIES: dict[str, dict[str, Any]] = {
    "layout of `audio`: found `dp:8@0-7`, expected ranks from 0 to 3": {"audio": mh.Layout.parse("dp:8", 8)},
    "layout of `audio`: found a str, expected a Layout. Parse it": {"audio": "dp:4"},
    "needs: found `audio`, expected one of vision, text": {"needs": {"audio": GroupNeeds(tied=True)}},
    "decoding: found `audio`, expected one of vision, text": {"decoding": ["audio"]},
    r"edges: found 'vision', expected pairs of modules": {"edges": ("vision", "text")},
    r"edges: found \('vision', 'text', 'talker'\), expected pairs": {"edges": [("vision", "text", "talker")]},
    r"edge vision>txet: found no module `txet` \(did you mean `text`\?\), .*vision, text": {
        "edges": [("vision", "txet")]
    },
}


@pytest.mark.parametrize("said", TOPOLOGIES)
@on_ranks(4)
def test_a_topology_says_what_it_expects(said: str) -> None:
    """Before any group is made: the next one is."""
    options = dict(TOPOLOGIES[said])
    layouts = LAYOUTS | ({"audio": options.pop("audio")} if "audio" in options else {})
    with pytest.raises(mh.UserError, match=said):
        Topology.build(layouts, platform(), **options)
    Topology.build(LAYOUTS, platform(), edges=EDGES)


@on_ranks(4)
def test_what_rows_are_is_checked_when_a_boundary_is_opened() -> None:
    topology = Topology.build(LAYOUTS, platform(), edges=EDGES, planned=EDGES)
    options: dict[str, Any] = {"width": 4, "dtype": torch.float32}
    wrongs: list[dict[str, Any]] = [{"width": 0}, {"width": "4"}, {"dtype": torch.int32}, {"transport": torch.int8}]
    for wrong in wrongs:
        [(name, found)] = wrong.items()
        with pytest.raises(mh.UserError, match=f"boundary vision>text: {name}: found {found!r}, expected a"):
            mh.Boundary.open(topology, "vision", "text", **options | wrong)


TERMS = {
    "transport": "transport: found torch.bfloat16 on rank 0 and torch.float32 on rank 1",
    "check": "check: found False on rank 0 and True on rank 1",
    "width": "vision>text: width: found 5 on rank 0 and 4 on rank 1",
}


@pytest.mark.parametrize("term", TERMS)
@on_ranks(4)
def test_ranks_that_opened_a_boundary_differently_learn_it_when_they_plan(term: str) -> None:
    others = {"transport": torch.bfloat16, "check": False, "width": 5}
    topology = Topology.build(LAYOUTS, platform(), edges=EDGES, planned=EDGES)
    options = {"width": 4, "dtype": torch.float32} | ({term: others[term]} if topology.rank == 0 else {})
    boundary = mh.Boundary.open(topology, "vision", "text", **options)
    with pytest.raises(mh.UserError, match=TERMS[term]):
        boundary.plan(held=[topology.rank], needed=[topology.rank])


@on_ranks(4)
def test_ranks_that_build_a_runner_differently_learn_it() -> None:
    topology = mh.build(mh.Graph(EDGES, width=4, dtype=torch.float32), LAYOUTS, platform=platform(), planned=False)
    held = {name: ModuleOnRank({0: nn.Linear(1, 1)}) for name in LAYOUTS if topology.has(name)}
    with pytest.raises(mh.UserError, match="Runner: check: found False on rank 0 and .*on rank 1"):
        mh.Runner(topology, held, check=topology.rank > 0)
