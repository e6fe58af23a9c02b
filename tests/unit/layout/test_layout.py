"""Layouts: the text and its round trip, coordinates, groups, and checks whose suggestions pass."""

from __future__ import annotations

import re
from contextlib import suppress
from math import prod

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.layout.axes import Limit, problem_of
from megatron_hetero.layout.layout import AXES, Coordinate, Layout, ModuleShape
from megatron_hetero.layout.modules import resolve, validate

VISION = ModuleShape("vision", 16, 16, 1280, 32, "encoder")
TEXT = ModuleShape("text", 28, 4, 3584, 28, "text")
# How long an example takes depends on what else the machine does.
unhurried = settings(deadline=None)

SHAPES = {"vision": VISION, "text": TEXT}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    degrees = [draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in AXES]
    while prod(degrees) > 96:
        degrees[degrees.index(max(degrees))] = 1
    size = prod(degrees)
    first = draw(st.integers(0, 5))
    gaps = draw(st.sets(st.integers(first, first + size + 5), max_size=4))
    ranks = [rank for rank in range(first, first + size + 5) if rank not in gaps][:size]
    ranks += range(first + size + 6, first + 2 * size + 6 - len(ranks))
    return Layout(*degrees, ranks=tuple(ranks))


@st.composite
def shapes(draw: st.DrawFn, name: str = "text") -> ModuleShape:
    kv = draw(st.integers(1, 8))
    heads = kv * draw(st.integers(1, 6))
    of_kinds = st.builds(Limit, st.sampled_from([("tp", "sp"), ("tp",), ("tp", "sp", "cp")]), st.integers(1, 24))
    limits = draw(st.none() | st.lists(of_kinds, max_size=3).map(tuple))
    kind = "text" if name == "text" else "encoder"
    return ModuleShape(name, heads, kv, 8 * heads, draw(st.integers(1, 8)), kind, limits=limits)


def suggestion(error: pytest.ExceptionInfo[UserError]) -> tuple[str, str]:
    """The module and layout that a message suggests."""
    found = re.search(r"[Tt]ry `--(\S+)-parallel (\S+)`", str(error.value))
    assert found, str(error.value)
    return found[1], found[2]


# ----------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("sp:8", 8, Layout(1, 8, 1, 1, 1, tuple(range(8)))),
        ("tp:2", 8, Layout(2, 1, 1, 4, 1, tuple(range(8)))),
        ("tp:4,pp:2@8-15", 16, Layout(4, 1, 1, 1, 2, tuple(range(8, 16)))),
        ("pp:2,tp:4@8-15", None, Layout(4, 1, 1, 1, 2, tuple(range(8, 16)))),
        ("dp:2,tp:4@0-3,8-11", 12, Layout(4, 1, 1, 2, 1, (0, 1, 2, 3, 8, 9, 10, 11))),
        ("cp:1@3", 4, Layout(1, 1, 1, 1, 1, (3,))),
        (" sp : 2 , dp : 2 @ 0 - 2 , 3 ", 4, Layout(1, 2, 1, 2, 1, (0, 1, 2, 3))),
    ],
)
def test_parse(text: str, world: int | None, expected: Layout) -> None:
    assert Layout.parse(text, world) == expected


@unhurried
@given(layouts())
def test_texts_round_trip(layout: Layout) -> None:
    world = layout.ranks[-1] + 1
    assert Layout.parse(str(layout), world) == Layout.parse(str(layout)) == layout
    assert Layout.parse(layout.short(world), world) == layout
    assert eval(repr(layout)) == layout  # The other text: for machines.


def test_short_text_leaves_out_the_whole_world() -> None:
    layout = Layout.parse("tp:2", 4)
    assert (str(layout), layout.short(4), layout.short(8)) == ("tp:2,dp:2@0-3", "tp:2,dp:2", "tp:2,dp:2@0-3")
    assert str(Layout.parse("tp:1", 1)) == "dp:1@0"


FAULTY = [
    ("xp:2", "axis `xp`"),
    ("tpp:2", "did you mean `tp`?"),
    ("TP:2", "did you mean `tp`?"),
    ("tp:0", "degree `0` for tp"),
    ("tp:-2", "degree `-2` for tp"),
    ("tp:2.5", "degree `2.5` for tp"),
    ("tp:two", "degree `two` for tp"),
    ("tp:", "degree `` for tp"),
    ("tp:²", "degree `²` for tp"),
    ("tp:2,tp:4", "tp twice (tp:2 and tp:4)"),
    ("tp", "found `tp`"),
    ("tp=2", "found `tp=2`"),
    ("tp:2,", "found ``"),
    ("", "found ``"),
    ("@0-3", "found ``"),
    ("tp:2@", "ranks ``"),
    ("tp:2@a-b", "ranks `a-b`"),
    ("tp:2@-1", "ranks `-1`"),
    ("tp:2@3-0", "the lower rank first"),
    ("tp:2@0-3,3", "ranks `3` after rank 3"),
    ("tp:2@4-7,0-3", "each rank once, ascending"),
    ("tp:2@0-99999999", "no world is that large"),
    ("tp:2@4-11", "ranks 8-11"),
    ("tp:3", "degrees that multiply to 3 on 8 ranks (0-7)"),
    ("tp:16", "a divisor of 8"),
    ("tp:2,dp:2", "expected 8"),
    ("tp:4@0-5", "on 6 ranks (0-5)"),
]


@pytest.mark.parametrize(("text", "part"), FAULTY)
def test_faulty_text_is_an_error_whose_suggestion_passes(text: str, part: str) -> None:
    with pytest.raises(UserError) as error:
        Layout.parse(text, 8, module="text", shape=TEXT, flags=True)
    assert part in str(error.value)
    assert "text layout" in str(error.value) and "--text-parallel" in str(error.value)
    module, better = suggestion(error)
    assert module == "text"
    require_suits(TEXT, Layout.parse(better, 8), 8)


@pytest.mark.parametrize("text", [text for text, _ in FAULTY] + ["sp:2@0,0"])
@pytest.mark.parametrize("other", ["tp:2@0-1", "tp:1@7", "dp:2@0,0", "tp:4@2-5"])
def test_following_the_suggestions_ends_at_legal_texts(text: str, other: str) -> None:
    texts = {"vision": text, "text": other}
    for _ in range(3):  # Both texts, idle ranks; then all is well.
        with pytest.raises(UserError) as error:
            resolve(texts, SHAPES, 8, flags=True)
        module, better = suggestion(error)
        texts[module] = better
        with suppress(UserError):
            resolve(texts, SHAPES, 8)
            return
    raise AssertionError("the suggestions do not lead anywhere")


def require_suits(shape: ModuleShape, layout: Layout, world: int) -> None:
    """The layout passes the checks, beside a module that covers the ranks which it leaves."""
    validate({"text": shape, "rest": shape}, {"text": layout, "rest": Layout.parse(f"dp:{world}", world)}, world)


@unhurried
@given(st.text(alphabet="tpscd:,@-0123456789x ", max_size=20), st.integers(1, 64), shapes())
@example("tp:9999999,pp:9999999@9", 3, TEXT)
def test_any_text_parses_or_suggests_what_does(text: str, world: int, shape: ModuleShape) -> None:
    try:
        layout = Layout.parse(text, world, module="text", shape=shape, flags=True)
    except UserError as error:
        found = re.search(r"Try `--text-parallel (\S+)`", str(error))
        assert found
        layout = Layout.parse(found[1], world)
        require_suits(shape, layout, world)
        if more := re.search(r"or start (\d+) ranks with python -m megatron_hetero.run or torchrun", str(error)):
            assert problem_of(shape, Layout.parse(text, int(more[1])).degrees) is None
    assert Layout.parse(str(layout), world) == layout


@pytest.mark.parametrize(
    ("text", "world", "ranks"),
    [("tp:4", 1, 4), ("tp:2,pp:2@4-7", 4, 8), ("tp:3", 8, 0), ("tp:64", 8, 0), ("dp:20001", 8, 0)],
)
def test_a_layout_for_more_ranks_says_how_they_are_started(text: str, world: int, ranks: int) -> None:
    with pytest.raises(UserError) as error:
        Layout.parse(text, world, module="text", shape=TEXT, flags=True)
    assert (f"or start {ranks} ranks with python -m megatron_hetero.run" in str(error.value)) == bool(ranks)
    assert ("torchrun" in str(error.value)) == bool(ranks)


def test_without_a_world_ranks_are_needed() -> None:
    with pytest.raises(UserError, match="found no ranks") as error:
        Layout.parse("tp:2,pp:2", module="text", flags=True)
    assert Layout.parse(suggestion(error)[1]) == Layout(2, 1, 1, 1, 2, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("degrees", "ranks", "part"),
    [
        ((0, 1, 1, 1, 1), (), "degrees tp:0"),
        ((True, 1, 1, 1, 1), (0,), "degrees tp:True"),
        ((2, 1, 1, 1, 1), (1, 0), "sort the ranks"),
        ((2, 1, 1, 1, 1), (-1, 0), "larger than the one before"),
        ((2, 1, 1, 1, 1), (0,), "degrees that multiply to 2 on 1 ranks (0), expected 1"),
    ],
)
def test_impossible_values_are_errors(degrees: tuple[int, ...], ranks: tuple[int, ...], part: str) -> None:
    with pytest.raises(UserError, match=re.escape(part).replace("sort", "[Ss]ort")):
        Layout(*degrees, ranks=ranks)


# ---------------------------------------------------------------- coordinates and groups


def test_the_table_in_the_source() -> None:
    layout = Layout.parse("tp:2,dp:2,pp:2@4-11")
    assert [layout.coordinate(rank) for rank in layout.ranks] == [
        Coordinate(tp=tp, dp=dp, pp=pp) for pp in (0, 1) for dp in (0, 1) for tp in (0, 1)
    ]
    assert layout.groups("tp") == ((4, 5), (6, 7), (8, 9), (10, 11))
    assert layout.groups("dp") == ((4, 6), (5, 7), (8, 10), (9, 11))
    assert layout.groups("pp") == ((4, 8), (5, 9), (6, 10), (7, 11))
    assert layout.groups("tp", "dp") == layout.groups("dp", "tp") == ((4, 5, 6, 7), (8, 9, 10, 11))
    assert [layout.replica_of(rank) for rank in layout.ranks] == [0, 0, 1, 1] * 2


@unhurried
@given(layouts())
def test_coordinates_are_a_bijection(layout: Layout) -> None:
    coordinates = [layout.coordinate(rank) for rank in layout.ranks]
    assert len(set(coordinates)) == layout.size
    assert [layout.rank_at(**c._asdict()) for c in coordinates] == list(layout.ranks)
    # The first axis varies fastest: reading the indices backwards counts up.
    assert sorted(coordinates, key=lambda c: c[::-1]) == coordinates


@unhurried
@given(layouts(), st.sets(st.sampled_from(AXES)))
def test_groups_part_the_ranks(layout: Layout, axes: set[str]) -> None:
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(layout.ranks)
    assert {len(group) for group in groups} == {prod(layout.degrees[axis] for axis in axes)}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert {layout.group_of(rank, *axes) for rank in group} == {group}
        fixed = {tuple(i for a, i in layout.coordinate(r)._asdict().items() if a not in axes) for r in group}
        assert len(fixed) == 1


def test_unknown_ranks_axes_and_indices_are_errors() -> None:
    layout = Layout.parse("tp:2@2-3,6-7")
    assert 6 in layout and 5 not in layout
    with pytest.raises(UserError, match="found rank 5"):
        layout.coordinate(5)
    with pytest.raises(UserError, match="tp index 2, expected 0 to 1"):
        layout.rank_at(tp=2)
    with pytest.raises(UserError, match="axis `ttp`"):
        layout.groups("ttp")


# ------------------------------------------------------------------- checks across modules


def test_resolve_fills_in_data_parallelism() -> None:
    assert resolve({"text": "tp:4"}, SHAPES, 8) == {
        "vision": Layout.parse("dp:8", 8),
        "text": Layout.parse("tp:4,dp:2", 8),
    }


def test_fewer_key_value_heads_than_ranks_are_legal() -> None:
    shape = ModuleShape("text", 16, 2, 2048, 36, "text")
    assert resolve({"text": "tp:8"}, {"text": shape}, 8)["text"].tp == 8


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (
            {"text": "tp:8"},
            ["28 attention heads and tp:8", "axis tp", "--text-parallel tp:4,dp:2"],
        ),
        ({"text": "tp:4,sp:2"}, ["28 attention heads, tp:4 and sp:2", "axis sp", "--text-parallel tp:4,dp:2"]),
        ({"visoin": "sp:8"}, ["module `visoin` (did you mean `vision`?)", "--visoin-parallel"]),
        ({"vision": "sp:4@0-3", "text": "tp:2@2-5"}, ["ranks 6-7", "start 6 ranks only", "--text-parallel"]),
        ({"vision": "sp:4@2-5", "text": "tp:2@2-5"}, ["ranks 0-1,6-7"]),
    ],
)
def test_unfit_layouts_are_errors(texts: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        resolve(texts, SHAPES, 8, flags=True)
    for part in parts:
        assert part in str(error.value)


BY_LAYER = (
    Limit(("tp", "sp"), 16, layers=(3, 7, 11, 15, 19)),
    Limit(("tp",), 24, "delta net", "value heads", tuple(layer for layer in range(20) if layer % 4 < 3)),
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tp:2,sp:12", ["axis sp): found attention of layers 3, 7, 11, 15, … has 16 heads, tp:2 and sp:12",
                        "expected tp·sp to divide 16", "Try `--text-parallel tp:2,sp:8,dp:3`"]),
        ("tp:16", ["axis tp): found delta net of layers 0, 1, 2, 4, … has 24 value heads and tp:16",
                   "expected tp to divide 24", "Try `--text-parallel tp:8,dp:6`"]),
    ],
)  # fmt: skip
def test_the_kind_of_layer_that_a_layout_does_not_suit_is_named(text: str, found: list[str]) -> None:
    shape = ModuleShape("text", 16, 4, 2048, 20, "text", limits=BY_LAYER)
    with pytest.raises(UserError) as error:
        resolve({"text": text}, {"text": shape}, 48, flags=True)
    assert all(each in str(error.value) for each in found)
    assert resolve({"text": suggestion(error)[1]}, {"text": shape}, 48)
    only = ModuleShape("text", 16, 4, 2048, 20, "text", limits=BY_LAYER[1:])
    assert resolve({"text": "sp:48"}, {"text": only}, 48)["text"].sp == 48, "a kind without a limit on sp"


def test_more_stages_than_layers_is_an_error() -> None:
    shape = ModuleShape("text", 8, 8, 64, 3, "text")
    with pytest.raises(UserError, match="3 layers and pp:4") as error:
        resolve({"text": "pp:4"}, {"text": shape}, 4, flags=True)
    assert suggestion(error)[1] == "dp:2,pp:2"


@unhurried
@given(shapes("vision"), shapes("text"), layouts(), layouts(), st.integers(0, 3))
def test_following_the_suggestions_ends_at_a_legal_pair(
    vision: ModuleShape, text: ModuleShape, first: Layout, second: Layout, more: int
) -> None:
    modules = {"vision": vision, "text": text}
    found = {"vision": first, "text": second}
    world = max(first.ranks[-1], second.ranks[-1]) + 1 + more
    for _ in range(4):  # Both modules' shapes, idle ranks; then all is well.
        try:
            validate(modules, found, world, flags=True)
            return
        except UserError as error:
            match = re.search(r"[Tt]ry `--(\w+)-parallel (\S+)`", str(error))
            assert match, error
            found[match[1]] = Layout.parse(match[2], world)
    raise AssertionError("the suggestions do not lead anywhere")


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ({"text": "tp:8"}, r'text layout `tp:8` \(axis tp\): .* Try `text="tp:4,dp:2"`'),
        ({"visoin": "sp:8"}, r"layout of `visoin`: found module `visoin` \(did you mean `vision`\?\), expected one of"),
        ({"text": "dp:9"}, r'Try `text="dp:8"`, or start 9 ranks\.$'),
        ({"vision": "sp:3"}, r'vision layout `sp:3`: .* Try `vision="sp:2,dp:4"`'),
        ({"vision": "sp:4@0-3", "text": "tp:2@2-5"}, r'found no module .* try `text="tp:2,dp:3@2-7"`'),
    ],
)
def test_a_program_that_calls_the_library_is_told_no_flags(texts: dict[str, str], found: str) -> None:
    """Unless its users give flags."""
    with pytest.raises(UserError, match=found) as error:
        resolve(texts, SHAPES, 8)
    assert "--" not in str(error.value)


def test_a_layout_of_no_module() -> None:
    with pytest.raises(UserError, match=r"^layout `xp:2` \(axis xp\): found axis `xp`.* Try `dp:8`"):
        Layout.parse("xp:2", 8)


def test_stages_are_layouts_of_their_own() -> None:
    layout = Layout.parse("tp:2,dp:2,pp:2@4-11")
    assert [str(layout.stage(i)) for i in range(2)] == ["tp:2,dp:2@4-7", "tp:2,dp:2@8-11"]
    with pytest.raises(UserError, match="found pp index 2, expected 0 to 1"):
        layout.stage(2)


def test_large_worlds_are_quick() -> None:
    layout = Layout.parse("tp:8,pp:16,dp:128", 16384)
    assert len(layout.groups("dp")) == 128
    with pytest.raises(UserError, match="28 attention heads and tp:8"):
        resolve({"text": "tp:8,pp:16,dp:128"}, SHAPES, 16384)
