"""JSON files that others wrote, and tables of what they may say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import UserError
from megatron_hetero.files.json_objects import (
    FLAG,
    OBJECT,
    TEXT,
    Rule,
    check,
    either,
    list_of,
    number,
    one_of,
    read_object,
    whole,
)

NAN = float("nan")
UNREADABLE = {
    "[1]": "found [1] in place of an object",
    "7": "found 7 in place of an object",
    "null": "found null in place of an object",
    '{"a": 1,\n}': ":2: found broken JSON at column 1",
    '{"a": 1, "b": {"a": 1, "a": 2}}': "found the key 'a' twice",
    '{"a": ' * 100_000: "deep in one another",
    '{"a": 1' + "0" * 5000 + "}": "found an unreadable file",
    '{"a": "' + "b" * 3000 + '"}': "found an unreadable file (3009 bytes, over the limit of 3000)",
}


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_is_no_sound_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    most = 3000 if text.endswith('bbb"}') else 10**6
    with pytest.raises(UserError, match="Restore the file") as error:
        read_object(path, most)
    assert str(error.value).startswith(str(path)) and UNREADABLE[text] in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("content", [b"\xff\xfe{", '{"a": 1}'.encode("utf-16"), b'\xef\xbb\xbf{"a": 1}', b""])
def test_other_encodings_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(path))):
        read_object(path)


def test_sound_objects_are_read(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "\U0001f3a8é"], "": {"b": {}}, "deep": [[[[]]]]}
    (tmp_path / "a.json").write_text(json.dumps(value))
    assert read_object(tmp_path / "a.json") == value


RULES: list[tuple[Rule, list[Any], list[Any]]] = [
    (whole(1, 9), [1, 9], [0, 10, 1.0, True, None, "1", [], 10**400, NAN]),
    (number(0, 1), [0, 1, 0.5], [-1e-9, 2, NAN, float("inf"), True, None, "0"]),
    (number(0, 1, above=True), [1e-9, 1], [0, -0.0, NAN]),
    (one_of("left", None), ["left", None], ["right", [], {}, 0]),
    (list_of(whole(0, 3), 2), [[0, 3]], [[0], [0, 1, 2], [0, 4], 3, None, {}]),
    (list_of(TEXT), [[], ["a"]], ["a", [1]]),
    (either(TEXT, OBJECT), ["a", {}], [1, None, []]),
    (FLAG.or_null(), [True, False, None], [0, 1, "true"]),
]


@pytest.mark.parametrize("rule, good, bad", RULES, ids=[rule.expected for rule, _, _ in RULES])
def test_rules(rule: Rule, good: list[Any], bad: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for value in good:
        check(path, {"outer": {"key": value}, "other": NAN}, {"outer": {"key": rule}})
    for value in bad:
        with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: outer\.key: found .*expected ") as error:
            check(path, {"outer": {"key": value}}, {"outer": {"key": rule}})
        assert rule.expected in str(error.value) and len(str(error.value)) < 400


def test_what_should_be_an_object_and_is_none(tmp_path: Path) -> None:
    check(tmp_path, {"outer": None}, {"outer": {"key": TEXT}})
    with pytest.raises(UserError, match=r": outer: found \['key'\], expected an object"):
        check(tmp_path, {"outer": ["key"]}, {"outer": {"key": TEXT}})
