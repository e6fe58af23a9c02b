"""Further views of a layout's ranks: text, indices, groups, and errors whose suggestions pass."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.axes import AXES, MAIN, Axis, Fold, View
from megatron_hetero.layout.layout import Coordinate, Layout, ModuleShape, closest_layout
from megatron_hetero.layout.modules import resolve, validate
from tests.support.views import BLOCKS, EXPERTS

VIEWS = (EXPERTS, BLOCKS)
VISION = ModuleShape("vision", 16, 16, 1280, 32, "encoder")
TEXT = ModuleShape("text", 32, 4, 2048, 48, "text", (EXPERTS,), {"experts": 6})
SHAPES = {"vision": VISION, "text": TEXT}
unhurried = settings(deadline=None)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def viewed(draw: st.DrawFn) -> Layout:
    """A layout with two further views."""
    degrees = {axis: draw(st.sampled_from([1, 1, 2, 3])) for axis in AXES}
    stage = prod(degrees.values()) // degrees["pp"]
    degrees["ep"] = draw(st.sampled_from(divisors(stage)))
    degrees["wp"] = draw(st.sampled_from(divisors(stage)))
    degrees["xp"] = draw(st.sampled_from(divisors(stage // degrees["wp"])))
    step, first = draw(st.sampled_from([1, 2])), draw(st.integers(0, 3))
    return Layout.of(degrees, tuple(range(first, first + step * stage * degrees["pp"], step)), VIEWS)


def test_what_a_view_says_of_its_axes() -> None:
    assert (MAIN.shard_axes, MAIN.sum_axes, MAIN.rest) == (("tp",), ("sp", "cp", "dp"), "dp")
    assert (EXPERTS.shard_axes, EXPERTS.sum_axes, EXPERTS.stated) == (("ep",), ("edp",), ("ep",))
    assert (BLOCKS.shard_axes, BLOCKS.sum_axes, BLOCKS.stated) == (("wp", "xp"), ("xdp",), ("wp", "xp"))
    for axes in ((), (Axis("a", "samples"), Axis("b", "samples"))):
        with pytest.raises(AssertionError, match="one axis of samples"):
            View("x", axes)
    with pytest.raises(AssertionError, match="dots separate names"):
        View("a.b", EXPERTS.axes)


def test_the_table_in_the_source() -> None:
    layout = Layout.parse("tp:2,dp:2,pp:2,ep:2@4-11", views=[EXPERTS])
    assert layout.groups("ep") == ((4, 5), (6, 7), (8, 9), (10, 11))
    assert layout.groups("edp") == ((4, 6), (5, 7), (8, 10), (9, 11))
    assert [layout.indices(rank, EXPERTS)["ep"] for rank in layout.ranks] == [0, 1] * 4
    assert [layout.indices(rank, EXPERTS)["edp"] for rank in layout.ranks] == [0, 0, 1, 1] * 2


@pytest.mark.parametrize(
    ("text", "folds", "short"),
    [
        ("tp:4,dp:2,ep:8", (8,), "tp:4,dp:2,ep:8"),
        ("tp:4,ep:2", (2,), "tp:4,dp:2,ep:2"),
        ("ep:4,edp:2,tp:8", (4,), "tp:8,ep:4"),
        ("edp:8", (1,), "dp:8"),
        ("pp:2,ep:4", (4,), "dp:4,pp:2,ep:4"),
        ("ep:1", (1,), "dp:8"),
        # Without `ep`, experts are split as weights are, or as `edp` says.
        ("tp:4", (4,), "tp:4,dp:2,ep:4"),
        ("tp:2,pp:2", (2,), "tp:2,dp:2,pp:2,ep:2"),
        ("sp:4", (1,), "sp:4,dp:2"),
        ("tp:4,ep:1", (1,), "tp:4,dp:2,ep:1"),
        ("tp:4,edp:1", (8,), "tp:4,dp:2,ep:8"),
        ("tp:4,edp:8", (1,), "tp:4,dp:2,ep:1"),
        ("pp:4,edp:1", (2,), "dp:2,pp:4,ep:2"),
    ],
)
def test_degrees_of_views_are_written_beside_the_others(text: str, folds: tuple[int, ...], short: str) -> None:
    layout = Layout.parse(text, 8, views=[EXPERTS])
    assert layout.folds == (Fold(EXPERTS, folds),) and layout.short(8) == short
    assert prod(layout.degrees.values()) == layout.size == 8 and "ep" not in layout.degrees
    assert layout.ways("experts", view=EXPERTS) * layout.ways("samples", view=EXPERTS) == layout.stage_size


@pytest.mark.parametrize(
    ("text", "experts", "ep"),
    [("tp:8", 6, 4), ("tp:4", 6, 4), ("tp:4,dp:2", 3, 2), ("tp:8", 1, 1), ("tp:3@0-11", 128, 3), ("tp:6@0-11", 5, 4)],
)
def test_a_default_of_no_more_parts_than_there_are(text: str, experts: int, ep: int) -> None:
    shape = replace(TEXT, attention_heads=24, counts={"experts": experts})
    texts, shapes = {"text": text, "rest": "dp:12"}, {"text": shape, "rest": replace(VISION, name="rest")}
    layout = resolve(texts if "@" in text else {"text": f"{text}@0-7"}, shapes, 12)["text"]
    assert layout.stated["ep"] == ep and f"ep:{ep}" in str(layout)
    assert Layout.parse(str(layout), views=[EXPERTS]) == layout == Layout.parse(str(layout), shape=shape)


@unhurried
@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))
def test_the_default_of_a_split_of_experts(tp: int, dp: int, pp: int, experts: int) -> None:
    """The largest legal one of no more than `tp` parts, which a suggestion keeps."""
    shape = replace(TEXT, attention_heads=12, counts={"experts": experts})
    degrees = {"tp": tp, "dp": dp, "pp": pp}
    layout = Layout.parse(",".join(f"{axis}:{n}" for axis, n in degrees.items()), tp * dp * pp, shape=shape)
    assert layout.stated["ep"] == max(n for n in divisors(tp * dp) if n <= min(tp, experts))
    assert closest_layout(degrees, layout.ranks, shape, [EXPERTS]) == layout
    assert Layout.parse(str(layout), views=[EXPERTS]) == layout == Layout.parse(str(layout), shape=shape)


@unhurried
@given(viewed())
def test_texts_round_trip(layout: Layout) -> None:
    world = layout.ranks[-1] + 1
    assert Layout.parse(str(layout), world, views=layout.views) == layout
    assert Layout.parse(layout.short(world), world, views=layout.views) == layout
    assert eval(repr(layout)) == layout
    plain = replace(layout, folds=())
    assert "folds" not in repr(plain) and Layout.parse(str(plain)) == plain != layout
    assert resolve({"text": str(layout)}, {"text": replace(TEXT, layers=99, attention_heads=36, views=VIEWS, counts={}),
                   "rest": replace(VISION, name="rest")}, world)["text"] == layout  # fmt: skip


@unhurried
@given(viewed())
def test_a_view_folds_the_ranks_of_each_stage(layout: Layout) -> None:
    for view in layout.views:
        degrees = layout.degrees_in(view)
        assert prod(degrees.values()) == layout.size and degrees["pp"] == layout.pp
        indices = [layout.indices(rank, view) for rank in layout.ranks]
        assert len({tuple(each.values()) for each in indices}) == layout.size
        # The first axis varies fastest: reading the indices backwards counts up.
        assert sorted(indices, key=lambda each: tuple(each.values())[::-1]) == indices
        assert [each["pp"] for each in indices] == [layout.coordinate(rank).pp for rank in layout.ranks]
        # One rank of each set of parts and one of each sum are the stage, and every stage alone is folded alike.
        assert layout.ways("weights", "experts", view=view) * layout.ways("tokens", "samples", view=view) == (
            layout.stage_size
        )
        for axes in ((view.names[0],), view.shard_axes, view.sum_axes):
            stages = [layout.stage(at).groups(*axes) for at in range(layout.pp)]
            assert layout.groups(*axes) == tuple(group for stage in stages for group in stage)


@unhurried
@given(viewed(), st.data())
def test_groups_part_the_ranks(layout: Layout, data: st.DataObject) -> None:
    view = data.draw(st.sampled_from([MAIN, *layout.views]))
    axes = data.draw(st.sets(st.sampled_from([*view.names, "pp"])))
    groups, degrees = layout.groups(*axes), layout.degrees_in(view)
    assert sorted(rank for group in groups for rank in group) == list(layout.ranks)
    assert {len(group) for group in groups} == {prod(degrees[axis] for axis in axes)}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert {layout.group_of(rank, *axes) for rank in group} == {group}
        fixed = {tuple(i for a, i in layout.indices(r, view).items() if a not in axes) for r in group}
        assert len(fixed) == 1


@unhurried
@given(viewed())
def test_without_degrees_a_stage_is_one_sum(layout: Layout) -> None:
    folds = tuple(Fold(view, (1,) * len(view.stated)) for view in layout.views)
    layout = replace(layout, folds=folds)
    assert Layout.parse(str(layout), views=layout.views) == layout
    for view in layout.views:
        assert layout.groups(*view.sum_axes) == tuple(layout.stage(at).ranks for at in range(layout.pp))
        assert layout.groups(*view.shard_axes) == tuple((rank,) for rank in layout.ranks)
    assert all(axis not in str(layout) for axis in ("wp", "xp")) and ("ep:1" in str(layout)) == (layout.tp > 1)


def test_the_main_view_is_untouched_by_others() -> None:
    plain, layout = Layout.parse("tp:2,sp:2,dp:2", 8), Layout.parse("tp:2,sp:2,dp:2,ep:4", 8, views=[EXPERTS])
    assert layout.coordinate(5) == plain.coordinate(5) == Coordinate(tp=1, dp=1)
    assert layout.degrees == plain.degrees and layout.ways("tokens", "samples") == 4
    assert layout.groups("sp", "dp") == plain.groups("sp", "dp") and repr(plain) == (
        "Layout(tp=2, sp=2, cp=1, dp=2, pp=1, ranks=(0, 1, 2, 3, 4, 5, 6, 7))"
    )


FAULTY = [
    ("ep:3", "ep:3 on 8 ranks, expected a divisor of 8, because ep, edp divide the same 8 ranks of a pipeline stage"),
    ("pp:2,ep:8", "ep:8 on 4 ranks, expected a divisor of 4"),
    ("ep:4,edp:4", "ep:4,edp:4 on 8 ranks, expected degrees "),
    ("ep:2,edp:2", "ep:2,edp:2 on 8 ranks, expected degrees "),
    ("EP:4", "did you mean `ep`?"),
    ("ep:4,ep:2", "ep twice (ep:4 and ep:2)"),
    ("ep:0", "degree `0` for ep"),
    ("tp:3,ep:2", "degrees that multiply to 3 on 8 ranks (0-7)"),
    ("ep:16", "a divisor of 8"),
    ("edp:3", "edp:3 on 8 ranks, expected a divisor of 8"),
    ("edp:1", "6 experts and ep:8, expected ep of at most 6"),
    ("tp:4,pp:2,edp:8", "edp:8 on 4 ranks, expected a divisor of 4"),
    ("tp:4,etp:4", "found axis `etp`, expected one of tp, sp, cp, dp, pp, ep, edp"),
]


@pytest.mark.parametrize(("text", "part"), FAULTY)
def test_faulty_text_is_an_error_whose_suggestion_passes(text: str, part: str) -> None:
    with pytest.raises(UserError) as error:
        resolve({"text": text}, SHAPES, 8, flags=True)
    assert part in str(error.value)
    found = re.search(r"[Tt]ry `--text-parallel (\S+)`", str(error.value))
    assert found
    resolve({"text": found[1]}, SHAPES, 8)


@unhurried
@given(st.text(alphabet="tpedp:,:@-0123456789", max_size=20), st.integers(1, 64))
@example("tp:16,edp:1", 8)
@example("tp:4,pp:4,ep:3", 8)
@example("tp:4,ep:7", 7)
def test_any_text_parses_or_suggests_what_does(text: str, world: int) -> None:
    texts = {"text": text, "vision": f"dp:{world}"}
    for _ in range(3):
        try:
            layout = resolve(texts, SHAPES, world, flags=True)["text"]
            assert Layout.parse(str(layout), world, views=[EXPERTS]) == layout
            return
        except UserError as error:
            found = re.search(r"[Tt]ry `--text-parallel (\S+)`", str(error))
            assert found, error
            texts["text"] = found[1]
            if more := re.search(r"or start (\d+) ranks", str(error)):
                resolve({"text": text}, SHAPES, int(more[1]))
    raise AssertionError("the suggestions do not lead anywhere")


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (
            {"text": "tp:4,ep:8"},
            ["text layout `tp:4,dp:2,ep:8` (--text-parallel, axis ep)", "6 experts and ep:8", "ep of at most 6",
             "--text-parallel tp:4,dp:2,ep:4"],
        ),
        (
            {"vision": "sp:4,ep:2"},
            ["vision layout `sp:4,ep:2` (--vision-parallel, axis ep): found axis `ep`",
             "expected one of tp, sp, cp, dp, pp",
             "no experts", "--vision-parallel sp:4,dp:2"],
        ),
        ({"vision": "edp:2"}, ["found axis `edp`, expected one of", "no experts", "-parallel dp:8"]),
        ({"vision": "tp:2,etp:2"}, ["found axis `etp`, expected", "no experts", "tp:2,dp:4"]),
        (
            {"text": "tp:4,etp:2"},
            ["found axis `etp`, expected one of tp, sp, cp, dp, pp, ep, edp", "tp ranks ",
             "--text-parallel tp:4,dp:2,ep:4"],
        ),
        ({"text": "tp:32"}, ["divisor of 8", "Try `--text-parallel tp:8,ep:4`, or start 32 ranks"]),
    ],
)  # fmt: skip
def test_unfit_degrees_are_errors(texts: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        resolve(texts, SHAPES, 8, flags=True)
    for part in parts:
        assert part in str(error.value)


def test_layouts_of_the_wrong_views_are_errors() -> None:
    vision = Layout.parse("dp:8", 8)
    with pytest.raises(UserError, match=r'found views main, expected main, experts, .*[Tt]ry `text="dp:8"`'):
        validate(SHAPES, {"vision": vision, "text": vision}, 8)
    with pytest.raises(UserError, match="found axes tp, ep, expected axes of one view"):
        Layout.parse("ep:8", 8, views=[EXPERTS]).groups("tp", "ep")
    with pytest.raises(UserError, match=r"axis `eep` \(did you mean `ep`\?\), expected one of tp, sp, cp, dp, pp, ep"):
        Layout.parse("ep:8", 8, views=[EXPERTS]).groups("eep")
    with pytest.raises(UserError, match="found axis `ep`, expected one of .*no experts"):
        vision.groups("ep")
    with pytest.raises(
        UserError, match=r"no view `expert` \(did you mean `experts`\?\), expected one of main, experts"
    ):
        Layout.parse("ep:8", 8, views=[EXPERTS]).view("expert")
    with pytest.raises(AssertionError, match="tp, sp, cp, dp, pp, tp, y"):
        Layout.parse("dp:8", 8, views=[View("x", (Axis("tp", "weights"), Axis("y", "samples")))])
    with pytest.raises(UserError, match="ep:3 on 8 ranks, expected a divisor of 8"):
        Layout.of({"dp": 8, "pp": 2, "ep": 3}, tuple(range(16)), [EXPERTS])
    with pytest.raises(UserError, match="degrees ep:0"):
        Layout.of({"ep": 0}, (0,), [EXPERTS])
