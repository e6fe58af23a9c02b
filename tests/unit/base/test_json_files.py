"""JSON files that others wrote, and values that cannot be carried out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import Only, check, read_object

UNREADABLE = {
    "[1]": "found [1] ",
    "7": "found 7 ",
    "null": "found null ",
    '{"a": 1,\n}': ":2: found broken JSON at column 1",
    '{"a": ' * 100_000: "(maximum recursion depth",
    '{"a": 1' + "0" * 5000 + "}": "found an unreadable file",
    '{"a": "' + "b" * 3000 + '"}': "(3009 bytes, over the limit of 3000)",
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


ONLY = {
    "key": Only((0, None), because="it is so", fix="set it to 0"),
    "flag": Only((True,), because="it is so"),
    "settings": Only((None, {}), because="there are none"),
}
GOOD = [{"key": 0}, {"key": 0.0}, {"key": None}, {"flag": True}, {"settings": {}}, {"other": float("nan")}]
BAD = {"key": [0.5, "0", [], {}, float("nan")], "flag": [False, None, "true"], "settings": [{"key": 0}, [], 0]}


def test_values_of_keys_anywhere_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for values in GOOD:
        check(path, values, ONLY)
        check(path, {"outer": values}, ONLY)
    for key, value in [(key, value) for key, values in BAD.items() for value in values]:
        with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: outer\.{key}: found .*expected ") as error:
            check(path, {"outer": {key: value}}, ONLY)
        assert ONLY[key].because in str(error.value) and len(str(error.value)) < 400
    with pytest.raises(UserError, match=r": key: found 0\.5, expected 0 or null, because it is so\. Set it to 0"):
        check(path, {"key": 0.5}, ONLY)
