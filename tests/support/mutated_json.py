"""Good JSON with something wrong in it, as hypothesis draws it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

ODD: tuple[Any, ...] = (
    0, 1, -1, 2, 0.5, -0.0, 10**9, -(10**9), 10**30, 1e308, float("nan"), float("inf"), True, False, None,
    "", "x", "3", "qwen2", "\u0000", "\u202e", "a" * 5000, "\ud800", [], {}, [[]], [None], ["x"], [0] * 50, [1e9],
    {"x": {}}, {"": None},
)  # fmt: skip
NESTED = "\0nested\0"
TWICE = "\0twice\0"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a value, its own first."""
    yield path
    if isinstance(value, dict | list):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inside, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path."""
    for key in path:
        value = value[key]
    return value


@st.composite
def mutated(draw: st.DrawFn, good: str) -> str:
    """The text of a JSON file with one to three things changed: values, keys, or the text itself."""
    root = {"": json.loads(good)}
    for _ in range(draw(st.integers(1, 3))):
        *above, key = draw(st.sampled_from(list(places(root))[1:]))
        holder = at(root, tuple(above))
        _change(draw, root, holder, key)
    text = json.dumps(root[""], indent=1)
    text = text.replace(
        json.dumps(NESTED), "[" * 100_000 + "]" * 100_000 if draw(st.booleans()) else "[" * 40 + "]" * 40
    )
    text = text.replace(json.dumps(TWICE), '"twice", "model_type": "qwen2_5_vl", "size": 1, "size": 1')
    if draw(st.integers(0, 19)) == 0:
        cut = draw(st.integers(0, len(text)))
        text = text[:cut] + draw(st.sampled_from(["", "}", "\x00", '"', "\ud800".encode("utf-8", "replace").decode()]))
    return text


def _change(draw: st.DrawFn, root: Any, holder: Any, key: Any) -> None:
    kind = draw(st.sampled_from(["odd", "odd", "odd", "leave out", "wrap", "list", "elsewhere", "nested", "twice"]))
    old = holder[key]
    if kind == "leave out" and holder is not root:
        del holder[key]
    elif kind == "list" and isinstance(old, list) and old:
        holder[key] = draw(st.sampled_from([old[:-1], [*old, old[-1]], old[::-1], old * 100]))
    elif kind == "wrap":
        holder[key] = draw(st.sampled_from([[old], {"x": old}, {str(key): old}, json.dumps(old)]))
    elif kind == "elsewhere":
        holder[key] = copy.deepcopy(at(root, draw(st.sampled_from(list(places(root))[1:]))))
    elif kind == "nested":
        holder[key] = NESTED
    elif kind == "twice":
        holder[key] = TWICE
    else:
        holder[key] = draw(st.sampled_from(ODD))
