"""Hypothesis strategies for models' layouts, micro-batches and settings that fit them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

from hypothesis import assume
from hypothesis import strategies as st

from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.builders import build_schedule, last_entered
from megatron_hetero.schedule.check import MAX_CTAS, peak_resident
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleKind, ScheduleSettings, sharing_encoders

LARGE_AND_SMALL = {
    "stages": (
        {"vision": "sp:16384@0-16383", "text": "tp:8,pp:16@0-16383"},
        {"vision": "sp:32@0-31", "text": "tp:2,pp:16@0-31"},
        16,
    ),
    "apart": (
        {"vision": "dp:1024@0-1023", "text": "tp:8,pp:16@1024-16383"},
        {"vision": "dp:2@0-1", "text": "tp:2,pp:16@2-33"},
        17,
    ),
    "stages that do not nest": (
        {"vision": "pp:3,dp:5460@0-16379", "text": "tp:8,pp:4@0-16383"},
        {"vision": "pp:3,dp:2@0-5", "text": "tp:2,pp:4@0-7"},
        7,
    ),
}
"""Texts of layouts of 16,384 ranks, of a few with the same stages, and the number of roles of the first."""


def layouts(**texts: str) -> dict[str, Layout]:
    """Layouts by module, from their texts with ranks."""
    return {name: Layout.parse(text, module=name) for name, text in texts.items()}


@st.composite
def some_layout(draw: st.DrawFn, world: int, most_pp: int) -> Layout:
    """Any layout in a world; its ranks need not be contiguous."""
    pp = draw(st.integers(1, min(most_pp, world)))
    each = draw(st.integers(1, world // pp))
    axis = draw(st.sampled_from(["tp", "dp", "sp"]))
    in_a_row = st.integers(0, world - pp * each).map(lambda first: range(first, world))
    anywhere = st.integers(0, 2**16).map(lambda seed: Random(seed).sample(range(world), world))
    ranks = draw(in_a_row | anywhere)
    return Layout.of({axis: each, "pp": pp}, tuple(sorted(ranks[: pp * each])))


@st.composite
def models(draw: st.DrawFn, apart: bool | None = None, most_ranks: int = 16) -> dict[str, Layout]:
    """A text module and up to three encoders. `apart`: all encoders on ranks of their own; None: anything."""
    world = draw(st.integers(1, most_ranks // 2))
    text = draw(some_layout(world, 4 if most_ranks <= 16 else 8))
    found: dict[str, Layout] = {}
    for name in draw(st.sampled_from([[], ["vision"], ["vision"], ["vision", "audio"], ["a", "vision2", "b"]])):
        layout = draw(some_layout(world, 3))
        if apart if apart is not None else draw(st.booleans()):  # On ranks that the text module does not have.
            shift = (text.ranks[-1] + 1,) * layout.size
            layout = replace(layout, ranks=tuple(r + s for r, s in zip(layout.ranks, shift, strict=True)))
        found[name] = layout
    return found | {"text": text}


@st.composite
def settings_for(draw: st.DrawFn, model: dict[str, Layout]) -> ScheduleSettings:
    """Settings that fit the model."""
    sharing = sharing_encoders(model, "text")
    kind: ScheduleKind = draw(st.sampled_from(["auto", "waves", "recompute"] if sharing else ["auto", "ahead"]))
    waves = draw(st.none() | st.integers(1, 5)) if sharing and kind != "recompute" else None
    run_ahead = draw(st.none() | st.integers(0, 3)) if len(sharing) + 1 < len(model) else None
    virtual = draw(st.integers(1, 3)) if model["text"].pp > 1 else 1
    return ScheduleSettings(kind, waves, run_ahead, virtual)


@st.composite
def schedules(draw: st.DrawFn, most_batches: int = 9, most_ranks: int = 16) -> Schedule:
    """Any schedule that `build_schedule` can make, but for the rare ones that a GPU has no room for."""
    model = draw(models(most_ranks=most_ranks))
    frozen = draw(st.sets(st.sampled_from([n for n in model if n != "text"]))) if len(model) > 1 else set()
    forward_only = draw(st.sampled_from([(), (), sorted(frozen), list(model)]))
    batches, chosen = draw(st.integers(1, most_batches)), draw(settings_for(model))
    edges = draw(edges_of(model, chosen.virtual_stages))
    return with_room(build_schedule(model, batches, chosen, text="text", forward_only=forward_only, edges=edges))


def with_room(schedule: Schedule) -> Schedule:
    """The schedule; Hypothesis draws another one where it has too many edges on a rank."""
    assume(all(peak_resident(schedule, role).ctas <= MAX_CTAS for role in schedule.roles))
    return schedule


@st.composite
def graph_schedules(draw: st.DrawFn, most_batches: int = 6, most_ranks: int = 8) -> Schedule:
    """Any schedule of a graph in which several modules are fed: names are in the order of the graph."""
    names = ["a", "b", "c", "d"][: draw(st.integers(3, 4))]
    model = {name: draw(some_layout(most_ranks, 3)) for name in names}
    pairs = {("a", "b"), ("b", "c"), *draw(st.sets(st.sampled_from([*combinations(names, 2)])))}
    edges = []
    for source, target in sorted(pairs):
        own, stage = draw(st.integers(0, model[source].pp - 1)), draw(st.integers(0, model[target].pp - 1))
        edges += draw(
            st.sampled_from([[Edge(source, target)], [Edge.of(source, own, model[source].pp, target, stage)]])
        )
    frozen = names[: draw(st.sampled_from([0, 0, 0, 1, 2, len(names)]))]
    order = draw(st.permutations(names))
    micro_batches = draw(st.integers(1, most_batches))
    given = {name: model[name] for name in order}
    return with_room(build_schedule(given, micro_batches, edges=edges, forward_only=frozen))


@st.composite
def edges_of(draw: st.DrawFn, model: dict[str, Layout], virtual: int) -> list[Edge]:
    """Edges of the encoders: of each the one from its last stage to the first, and maybe others."""
    found, pp, sharing = [], model["text"].pp, sharing_encoders(model, "text")
    for name, layout in model.items():
        if name != "text":
            coordinates = range(pp if name in sharing else last_entered(virtual) + 1)
            entered = st.sampled_from([s for s in range(pp * virtual) if s % pp in coordinates])
            ends = st.tuples(st.integers(0, layout.pp - 1), entered)
            further = draw(st.sets(ends, max_size=3)) if draw(st.booleans()) else set()
            pairs = [(layout.pp - 1, 0), *sorted(further - {(layout.pp - 1, 0)})]
            found += [Edge.of(name, own, layout.pp, "text", stage) for own, stage in pairs]
    return found


def with_actions(schedule: Schedule, role: int, actions: list[Action]) -> Schedule:
    """The schedule with other actions of one role."""
    changed = replace(schedule.roles[role], actions=tuple(actions))
    return replace(schedule, roles=(*schedule.roles[:role], changed, *schedule.roles[role + 1 :]))


PIPELINE = build_schedule(layouts(vision="dp:1@0", text="pp:2@1-2"), 3, ScheduleSettings(run_ahead=0))

UNIT = {"F": 1.0, "R": 1.0, "B": 2.0}


def unit(module: str, kind: str, stage: int) -> float:
    """A forward takes one second, a backward two."""
    return UNIT[kind]
