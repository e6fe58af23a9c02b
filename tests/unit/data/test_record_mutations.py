"""Records that were damaged in any way are read or refused with one message: never another exception."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.processor import Processor
from tests.support.items import annotated, whole

RECORD = {
    "id": "7",
    "image": ["56x56.png", "100x40.png"],
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>\nWhat is <image>?"},
        {"from": "gpt", "value": "A disc."},
        {"from": "human", "value": "Sure?"},
        {"from": "gpt", "value": "Yes, it is 3.5 m wide. 🎨"},
    ],
}
ODD_TEXTS = [
    "", " ", "\x1b[2J", "\ud83d", "a\0b", "\u202e", "../x", "/etc/passwd", "~", "56x56.png/", "x" * 5000, "<image>",
    "<image", "<video>", "<|im_end|>", "<|image_pad|>", "{{ 1 / 0 }}", "\r\n", "2024-13-45", "NaN", "56x56.PNG\n",
    "n\u0303", ".", "human",
]  # fmt: skip
ODD_VALUES = [
    None, True, -1, 0, 10**30, 10**400, 1e308, float("nan"), float("inf"), [], {}, [[]], [{}], {"": None},
]  # fmt: skip
# Copies: what is drawn later may change what was drawn before.
ODD = st.sampled_from(ODD_TEXTS) | st.sampled_from(ODD_VALUES).map(copy.deepcopy) | st.text(max_size=20)
RAW = [
    "{", "}", "[", "]", ",", ":", '"', "\\", "\\u", "\\ud83d", "\n", "\0", "\x1b", "9" * 5000, "[" * 3000,
    '{"a":' * 3000, "NaN", "-Infinity", "1e999", "\ufeff", "\u2028", '"image": 1,',
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, inner in items for place in places(inner, (*at, key)))]


@st.composite
def damaged_values(draw: st.DrawFn) -> Any:
    """The record with a few values replaced, removed, wrapped or said twice."""
    value: Any = json.loads(json.dumps(RECORD))
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([place for place in places(value) if place] or [("x",)]))
        owner = value
        for key in path:
            owner = owner[key]
        match draw(st.sampled_from(["replace", "remove", "wrap", "insert"])):
            case "remove":
                owner.pop(last) if not isinstance(owner, dict) or last in owner else None
            case "wrap":
                owner[last] = [owner[last]] if last != "x" else None
            case "insert" if isinstance(owner, list):
                owner.insert(int(last), draw(ODD))
            case "insert":
                owner[draw(st.sampled_from(ODD_TEXTS))] = draw(ODD)
            case _:
                owner[last] = draw(ODD)
    return value


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """An annotation file, in one form or the other, of a damaged record; its text may be damaged too."""
    records = [draw(damaged_values()), *([RECORD] if draw(st.booleans()) else [])]
    ascii_only = draw(st.booleans())
    as_list = draw(st.booleans())
    texts = [json.dumps(record, ensure_ascii=ascii_only) for record in records]
    text = "[" + ",".join(texts) + "]" if as_list else "\n".join(texts)
    content = text.encode("utf-8", "surrogatepass")
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(content)))
        more = draw(st.sampled_from(RAW).map(str.encode) | st.binary(max_size=4))
        content = content[:at] + more + content[draw(st.integers(at, min(len(content), at + 9))) :]
    return content


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(content=damaged_files())
def test_damaged_records_are_read_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, processor: Processor, pictures: Path
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(content)
    try:
        for record in annotated("damaged", path, pictures):
            sample = processor.tokenize(record)
            for k, grid in enumerate(sample.sizes):
                processor.patches(record, k, whole(grid))
    except UserError as error:
        assert str(error).startswith(str(path)) and str(error).isprintable() and len(str(error)) < 2000
