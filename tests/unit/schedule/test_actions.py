"""Texts of actions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.measuring.actions import parsed
from megatron_hetero.layout.graph import Edge
from megatron_hetero.schedule.actions import Action, finish, irecv, run, send, start, wait

_NAMES = st.sampled_from(["vision", "text", "vision2", "a", "F", "audio-in", "B_3"])
_KINDS = st.sampled_from(["F", "R", "B"])
_NUMBERS = st.integers(0, 999)
_STAGES = _NUMBERS
_TRANSFERS = st.sampled_from([send, irecv, wait]).flatmap(
    lambda make: st.builds(make, _KINDS, _NAMES, _STAGES, _STAGES, _NUMBERS)
)
_EDGES = st.builds(Edge, _NAMES, _NAMES, st.none(), st.none()) | st.builds(Edge, _NAMES, _NAMES, _STAGES, _STAGES)
_CROSSINGS = st.sampled_from([start, finish]).flatmap(
    lambda make: st.builds(make, st.sampled_from("FB"), _EDGES, _NUMBERS)
)
_ACTIONS = st.builds(run, _KINDS, _NAMES, _NUMBERS, _NUMBERS) | _TRANSFERS | _CROSSINGS


@given(_ACTIONS)
@settings(max_examples=200)
def test_text_round_trip(action: Action) -> None:
    assert parsed(str(action)) == action


def test_texts() -> None:
    assert [
        str(run("F", "text", 1, 3)),
        str(send("F", "text", 1, 2, 3)),
        str(irecv("B", "text", 1, 2, 3)),
        str(wait("B", "text", 1, 2, 3)),
        str(start("F", Edge("vision", "text"), 3)),
        str(finish("B", Edge("vision", "text"), 3)),
        str(start("B", Edge("vision", "text", 0, 2), 3)),
    ] == [
        "text.1.F3", "text.1>2.F3", "text.1<2.B3", "text.1<2.B3!", "vision>text.F3", "text>vision.B3!",
        "text.2>vision.0.B3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        "text.F3",
        "text.1.X3",
        "text.1>2.F3!",
        "1text.0.F0",
        "text.1.F",
        "vision>text.R3",
        "text.1.F3!",
        "vision.0>text.F3",
    ],
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="expected an action such as"):
        parsed(text)
