"""Which communicators there are: pure, and over the `fake` backend, which makes process groups of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.axes import MAIN
from megatron_hetero.layout.communicators import (
    AXES_OF_GROUPS,
    CTAS,
    GRADIENT_CTAS,
    MEGATRON_AXES,
    Axes,
    CommunicatorKind,
    Direction,
    EdgeUse,
    GroupNeeds,
    Link,
    communicators,
    edge_peers,
    edge_ranks,
    gradient_uses,
    require_streams,
)
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from tests.support.views import BLOCKS, EXPERTS

EDGE = ("vision", "text")
LARGEST = {
    8: ("sp:2,pp:2@0-3", "cp:2,pp:2@4-7"),
    64: ("sp:2,cp:2,dp:2,pp:3@0-23", "tp:2,sp:2,dp:2,pp:5@24-63"),
    1024: ("sp:4,cp:2,tp:2,dp:2,pp:3@0-95", "tp:2,sp:2,cp:2,dp:2,pp:58@96-1023"),
}
"""Layouts with every kind of communicator: all axes, and odd numbers of stages."""


def _layouts(world_size: int, vision: str, text: str) -> dict[str, Layout]:
    return {"vision": Layout.parse(vision, world_size), "text": Layout.parse(text, world_size)}


def _kinds(world_size: int, vision: str, text: str, **options: Any) -> tuple[CommunicatorKind, ...]:
    return communicators(_layouts(world_size, vision, text), edges=[EDGE], **options)


def _text(kinds: Sequence[CommunicatorKind]) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {str(kind): kind.groups for kind in kinds}


def test_the_readmes_layout() -> None:
    everybody = (tuple(range(8)),)
    assert _text(_kinds(8, "sp:8", "tp:4,dp:2")) == {
        "vision sp": everybody,
        "vision sp,cp,dp": everybody,
        "text tp": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "text sp,cp,dp": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "vision>text": everybody,
        "text>vision": everybody,
    }


def test_stages_and_a_tied_embedding() -> None:
    found = _text(_kinds(5, "dp:2@0-1", "pp:3@2-4", needs={"text": GroupNeeds(tied=True, interleaved=True)}))
    assert found == {
        "vision sp,cp,dp": ((0, 1),),
        "text first and last pp": ((2, 4),),
        "text forward from stages 0": ((2, 3),),
        "text forward from stages 1": ((3, 4),),
        "text forward from stages 2": ((2, 4),),
        "text backward from stages 1": ((2, 3),),
        "text backward from stages 2": ((3, 4),),
        "text backward from stages 0": ((2, 4),),
        "vision>text": ((0, 1, 2),),
        "text>vision": ((0, 1, 2),),
    }


def test_one_rank_needs_none() -> None:
    assert _kinds(1, "dp:1", "dp:1") == ()


DEGREES = st.sampled_from([1, 1, 2, 3])


@st.composite
def _drawn(draw: st.DrawFn) -> tuple[dict[str, Layout], dict[str, Any]]:
    layouts, world = {}, draw(st.integers(1, 3))
    for name in ("vision", "audio", "text"):
        degrees = {axis: draw(DEGREES) for axis in ("tp", "sp", "cp", "dp", "pp")}
        size = 1
        for degree in degrees.values():
            size *= degree
        first = draw(st.integers(0, world))
        step = draw(st.sampled_from([1, 1, 2]))
        views = draw(st.sampled_from([(), (), (EXPERTS,), (BLOCKS,)]))
        stage = size // degrees["pp"]
        for axis in [axis for view in views for axis in view.stated]:
            degrees[axis] = draw(st.sampled_from([d for d in range(1, stage + 1) if stage % d == 0]))
            stage //= degrees[axis]
        layouts[name] = Layout.of(degrees, tuple(range(first, first + step * size, step)), views)
    needs = st.builds(GroupNeeds, tied=st.booleans(), interleaved=st.booleans(), exchanging=st.booleans())
    megatron = draw(st.sets(st.sampled_from([*layouts])))
    return layouts, {"needs": {name: draw(needs) for name in layouts}, "megatron": megatron}


@settings(max_examples=50)
@given(_drawn())
def test_kinds_are_disjoint_and_every_use_has_its_own(drawn: tuple[dict[str, Layout], dict[str, Any]]) -> None:
    layouts, options = drawn
    kinds = communicators(layouts, edges=[("vision", "text"), ("audio", "text")], **options)
    for kind in kinds:
        ranks = [rank for group in kind.groups for rank in group]
        assert len(ranks) == len(set(ranks)), "one call makes groups that have no rank in common"
        assert all(len(group) > 1 and group == tuple(sorted(group)) for group in kind.groups)
    uses = [use for kind in kinds for use in kind.uses]
    assert len(uses) == len(set(uses))
    for one, other in combinations(kinds, 2):
        if one.groups == other.groups:
            assert not (one.is_synchronous and other.is_synchronous), "equal groups in step with the work share"
    _assert_complete(layouts, kinds, options)


def _assert_complete(layouts: dict[str, Layout], kinds: Sequence[CommunicatorKind], options: dict[str, Any]) -> None:
    """Every rank finds what it communicates over."""
    for name, layout in layouts.items():
        for rank in layout.ranks:
            mine = {use: kind for kind in kinds for use in kind.uses_of(rank)}
            for axes in (*AXES_OF_GROUPS, *(MEGATRON_AXES[:-1] if name in options["megatron"] else ())):
                ranks = layout.group_of(rank, *axes)
                assert (Axes(name, axes) in mine) == (len(ranks) > 1)
                assert len(ranks) == 1 or ranks in mine[Axes(name, axes)].groups
            for use in [Axes(name, axes, view) for view in layout.views for axes in (view.shard_axes, view.sum_axes)]:
                ranks = layout.group_of(rank, *use.axes)
                assert (use in mine) == (len(ranks) > 1) and (len(ranks) == 1 or ranks in mine[use].groups)
            at, ring = layout.coordinate(rank).pp, layout.pp if options["needs"][name].interleaved else 0
            for sender, direction, by in [
                (s, d, b) for s in range(layout.pp) for d, b in (("forward", 1), ("backward", -1))
            ]:
                receiver = (sender + by) % ring if ring > 1 else sender + by
                expected = 0 <= receiver < layout.pp and receiver != sender and at in (sender, receiver)
                assert (Link(name, direction, sender) in mine) == expected  # pyright: ignore[reportArgumentType]
    for source in ("vision", "audio"):
        sides = {*layouts[source].stage(layouts[source].pp - 1).ranks, *layouts["text"].stage(0).ranks}
        found = {r for k in kinds if EdgeUse(Edge(source, "text"), "forward") in k.uses for g in k.groups for r in g}
        assert found == (sides if len(sides) > 1 else set())


@contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@settings(max_examples=50)
@given(_drawn())
def test_ranks_that_may_exchange_rows(drawn: tuple[dict[str, Layout], dict[str, Any]]) -> None:
    """What one sends another one receives; between the sides all may meet, inside a side the ranks of a replica."""
    source, destination = drawn[0]["vision"], drawn[0]["text"]
    last, first = source.stage(source.pp - 1), destination.stage(0)
    sides: list[tuple[Direction, Layout, Layout]] = [("forward", last, first), ("backward", first, last)]
    for direction, senders, receivers in sides:
        use = EdgeUse(Edge("vision", "text"), direction)
        peers = {r: edge_peers(drawn[0], use, r) for r in edge_ranks(drawn[0], use.edge)}
        for rank, (to, back) in peers.items():
            assert all(rank in peers[other][1] for other in to) and all(rank in peers[other][0] for other in back)
            assert rank not in to and (rank not in senders or {*receivers.ranks} - {rank} <= {*to})
            for side in (last, first):
                if rank in side:
                    assert {*side.group_of(rank, "tp", "sp", "cp")} - {rank} <= {*to} & {*back}


class Recording(Platform):
    """A platform that keeps the calls that make groups."""

    calls: list[Any]

    def split(self, groups: Sequence[tuple[int, ...]], what: str, **options: Any) -> Any:
        self.calls.append(("split", what, tuple(groups), options))
        return super().split(groups, what, **options)

    def split_hosts(self, groups: Sequence[tuple[int, ...]], what: str) -> Any:
        self.calls.append(("split_hosts", what, tuple(groups)))
        return super().split_hosts(groups, what)

    def host_group(self, what: str) -> Any:
        self.calls.append(("host_group", what))
        return super().host_group(what)


def _calls(rank: int, world_size: int, **options: Any) -> list[Any]:
    platform, layouts = Recording(CPU, "fake", host_backend="fake"), _layouts(world_size, *LARGEST[world_size])
    object.__setattr__(platform, "calls", [])
    with _fake_world(rank, world_size):
        needs = {"text": GroupNeeds(tied=True, interleaved=True)}
        options |= {"decoding": ["vision"], "edges": [EDGE], "needs": needs}
        Topology.build(layouts, platform, **options, check=False)
        return platform.calls


@settings(max_examples=50)
@given(_drawn())
def test_what_runs_beside_the_computation_shares_with_nobody(drawn: tuple[dict[str, Layout], dict[str, Any]]) -> None:
    """Sums of gradients begin when each rank comes to them: another module's on the same ranks come in other orders."""
    for kind in communicators(drawn[0], edges=[EDGE], **drawn[1]):
        beside = [use for use in kind.uses if isinstance(use, Axes) and use.axes == use.view.sum_axes]
        assert len(kind.uses) == 1 or not beside or len({use.module for use in beside}) == 1
        assert len(beside) in (0, len(kind.uses)), "sums of one module's views, and nothing else"
        assert kind.is_synchronous == (isinstance(kind.uses[0], Axes) and not beside)


@settings(max_examples=50)
@given(_drawn())
def test_each_set_of_sums_has_one_communicator(drawn: tuple[dict[str, Layout], dict[str, Any]]) -> None:
    kinds = communicators(drawn[0], **drawn[1])
    for name, layout in drawn[0].items():
        own = [kind for kind in kinds if kind.uses[0] in gradient_uses(name, layout)]
        groups = {layout.groups(*view.sum_axes) for view in (MAIN, *layout.views)}
        assert len(own) == len(gradient_uses(name, layout)) == sum(len(each[0]) > 1 for each in groups)


ALL, TP, DP = (tuple(range(8)),), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
PAIRS, APART = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Each expert on one rank: nothing to sum.
        ("dp:8,ep:8", {"text sp,cp,dp": ALL, "text ep": ALL}),
        # Over some of the ranks: an exchange, and sums of their own.
        ("tp:4,dp:2,ep:2", {"text tp": TP, "text sp,cp,dp": DP, "text ep": PAIRS, "text edp": APART}),
        # As `tp`: both groups are there already.
        ("tp:4,dp:2,ep:4", {"text tp, text ep": TP, "text sp,cp,dp, text edp": DP}),
        # All experts on all ranks: they are summed over `tp` too.
        ("tp:4,dp:2,ep:1", {"text tp": TP, "text sp,cp,dp": DP, "text edp": ALL}),
        ("dp:8", {"text sp,cp,dp, text edp": ALL}),
    ],
)
def test_groups_of_a_view(text: str, expected: dict[str, Any]) -> None:
    viewed = {"text": Layout.parse(text, 8, views=[EXPERTS])}
    plain = {"text": replace(viewed["text"], folds=())}
    assert _text(communicators(viewed)) == expected
    choices: list[dict[str, Any]] = [{}, {"megatron": ["text"]}]
    for options in choices:
        main, found = communicators(plain, **options), communicators(viewed, **options)
        assert [kind.groups for kind in main] == [kind.groups for kind in found[: len(main)]]
        assert all(kind.uses == other.uses[: len(kind.uses)] for kind, other in zip(main, found, strict=False))


def test_too_many_communicators_for_the_streams() -> None:
    """PyTorch has 32 streams of high priority; a rank takes two for each edge, one for the gradients of each module and
    one for the world, which may be a module's `tp`.
    """
    names = [f"encoder{i}" for i in range(31)]
    layouts = {name: Layout.parse("dp:2", 2) for name in names} | {"text": Layout.parse("tp:2", 2)}
    require_streams(communicators(layouts, megatron=[]), (0, 1))
    found = "found 33 .*, expected at most 32"
    with pytest.raises(UserError, match=found):
        require_streams(communicators(layouts | {"text": Layout.parse("dp:2", 2)}, megatron=[]), (0, 1))
    edges = [(name, "text") for name in names]
    for backend in ("gloo", "nccl"):
        with _fake_world(0, 2), nullcontext() if backend == "gloo" else pytest.raises(UserError, match="found 94"):
            platform = Fake(CPU, backend, host_backend="fake")
            Topology.build(layouts, platform, edges=edges, megatron=[], check=False)


class Fake(Platform):
    """A platform of any backend whose groups do not communicate."""

    def split(self, groups: Sequence[tuple[int, ...]], what: str, **options: Any) -> Any:
        return self.split_hosts(groups, what)


class Options:
    """As `torch.distributed.ProcessGroupNCCL.Options`, which builds of PyTorch for CPUs lack."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.config = SimpleNamespace(blocking=-1, cga_cluster_size=-1, min_ctas=-1, max_ctas=-1)


def test_options_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and edges, which wait on the GPU, get few CTAs; what runs beside products, streams of high priority.
    Gradients over all ranks have a communicator of their own too. PyTorch warns of options with another time-out.
    """
    made: dict[str, Any] = {}
    hour = timedelta(hours=1)

    def split_group(*, split_ranks: Any, timeout: Any, pg_options: Any, group_desc: str) -> Any:
        made[group_desc] = pg_options.config.max_ctas, pg_options.is_high_priority_stream
        assert pg_options._timeout == timeout == hour
        return dist.new_group(split_ranks[0])

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "split_group", split_group)
    with _fake_world(0, 4):
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # pyright: ignore[reportOptionalMemberAccess]
        assert Platform(CPU, "nccl")._options(None, urgent=True)._timeout == timedelta(minutes=10), "PyTorch's"
        platform = Platform(CPU, "nccl", host_backend="fake", timeout=hour)
        Topology.build(_layouts(4, "sp:4", "tp:2,pp:2"), platform, edges=[EDGE], megatron=[], check=False)
    assert made == {
        "vision sp,cp,dp": (GRADIENT_CTAS, True),
        "text tp": (-1, True),
        "text forward from stages 0": (CTAS, True),
        "text backward from stages 1": (CTAS, True),
        "vision>text": (CTAS, True),
        "text>vision": (CTAS, True),
    }


@pytest.mark.parametrize("world_size", LARGEST)
def test_few_calls_the_same_on_all_ranks(world_size: int) -> None:
    first = _calls(0, world_size)
    assert len(first) <= 40
    others = range(world_size) if world_size <= 64 else range(1, world_size, 93)
    assert all(_calls(rank, world_size) == first for rank in others)


def test_encoders_with_equal_replicas_share_their_hosts() -> None:
    """Also where some ranks have no part in either: they make as many groups as the others."""
    layouts = {name: Layout.parse(text, 4) for name, text in (("a", "sp:2@0-1"), ("b", "sp:2@0-1"), ("text", "dp:4"))}
    found = []
    for rank in range(4):
        platform = Recording(CPU, "fake", host_backend="fake")
        object.__setattr__(platform, "calls", [])
        with _fake_world(rank, 4):
            Topology.build(layouts, platform, decoding=["a", "b"], check=False)
            found.append((platform.calls, len(dist.distributed_c10d._world.pg_names)))
    assert all(each == found[0] for each in found)


def test_the_number_of_calls_does_not_depend_on_the_world() -> None:
    assert len(_calls(0, 64, megatron=[])) == len(_calls(0, 1024, megatron=[]))
