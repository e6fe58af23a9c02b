"""Annotation files: both formats, and a clear message for every malformed input."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.base.errors import UserError
from megatron_hetero.data.sources.json_files import MAX_TEXT_BYTES
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import IMAGES
from tests.support.items import annotated, pictures, values_of

Write = Callable[[Sequence[Any]], Path]

GOOD = {"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello."}]}
PICTURE = {
    "image": "a.png",
    "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A disc."}],
}


def turns(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in pairs]}


def test_loads_records_of_both_formats(write_annotations: Write, tmp_path: Path) -> None:
    chat = turns(("system", "Be brief."), ("user", "日本 <image> <image>"), ("assistant", "naïve 🎨"))
    path = write_annotations([GOOD, PICTURE, chat | {"image": ["b/c.png", "a.png"]}])
    data = annotated("shapes", path, tmp_path)
    assert len(data) == 3
    assert data[0].turns == (Turn("user", "Hello?"), Turn("assistant", "Hello.")) and data[0].items == ()
    assert data[1].items == pictures("a.png")
    assert data[2].turns == (
        Turn("system", "Be brief."),
        Turn("user", ("日本 ", IMAGES[0], " ", IMAGES[0])),
        Turn("assistant", "naïve 🎨"),
    )
    assert data[-1] == data[2] and data[2].index == 2 and data[2].dataset == "shapes"
    assert data[2].where == (f"{path}:3" if path.suffix == ".jsonl" else f"{path} record 3")
    assert str(data[1].item(0).content) == str((tmp_path / "a.png").resolve())
    with pytest.raises(IndexError):
        data[3]


def test_blank_lines_byte_order_mark_and_suffix_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(GOOD).encode() + b"\r\n\n" + json.dumps(GOOD).encode())
    data = annotated("chat", path, None)
    assert [record.where for record in data] == [f"{path}:2", f"{path}:4"]


@given(
    st.lists(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
)
def test_lists_are_read_as_json_reads_them(tmp_path_factory: pytest.TempPathFactory, values: list[Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "values.json"
    for begin, indent in (("", None), ("", 2), ("\ufeff \n", 1)):
        path.write_text(begin + json.dumps(values, indent=indent, ensure_ascii=not begin), encoding="utf-8")
        assert values_of(path) == values


@pytest.mark.parametrize(
    "text, place",
    [("[1,\n  2 3]", ":2: found broken JSON at column 5"), ("[1]\n\n x", ":3: found broken JSON at column 2"),
     ('[1,\n"abcd', ":2: found broken JSON at column 1"), ("[1,]", "column 4"),
     ('["a",\n"abcd\xff"]', ":2: found byte 0xff")],
)  # fmt: skip
def test_what_is_broken_in_a_list_is_found_by_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=re.escape(place)):
        values_of(tmp_path / "a.json")


@pytest.mark.parametrize("begin", [b"", b"{", b" ", b'{"a": "'])
def test_files_without_end_are_refused_before_they_fill_the_memory(tmp_path: Path, begin: bytes) -> None:
    path = tmp_path / "a.json"
    text = begin + b"a" * (3 * MAX_TEXT_BYTES if b'"' in begin else 0)
    path.write_bytes(text)
    os.truncate(path, 10**9)
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as refused:
            values_of(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_TEXT_BYTES
    finally:
        tracemalloc.stop()
    assert f"more than {MAX_TEXT_BYTES}" in str(refused.value)


@pytest.mark.parametrize("image", [None, []])
def test_null_and_empty_image_mean_no_image(write_annotations: Write, image: Any) -> None:
    path = write_annotations([GOOD | {"image": image, "video": None}])
    assert annotated("chat", path, None)[0].items == ()


HUMAN, GPT = ("human", "What?"), ("gpt", "That.")
BAD_RECORDS = {
    "not an object": ([1], "a list", "a JSON object"),
    "no conversations": ({"id": 3}, "field 'conversations'", "no such field"),
    "no turns": ({"conversations": []}, "field 'conversations'", "an empty list"),
    "conversations a string": ({"conversations": "Hi"}, "field 'conversations'", "a string"),
    "turn a string": ({"conversations": ["Hi"]}, "conversations[0]", "an object with 'from' and 'value'"),
    "unknown speaker": (turns(HUMAN, ("bot", "x")), "conversations[1]", "'bot'", "human, gpt, system, observation"),
    "speaker not a string": (turns(([], "x"), GPT), "conversations[0]", "a list for 'from'"),
    "value missing": ({"conversations": [{"from": "human"}]}, "conversations[0]", "null for 'value'"),
    "value a number": (turns(("human", 3), GPT), "conversations[0]", "a number for 'value'"),
    "answer a truth": (turns(HUMAN, ("gpt", True)), "conversations[1]", "true or false for 'value'"),
    "lone surrogate": (turns(("human", "\ud83d"), GPT), "surrogate", "\\ud83d"),
    "no answer": (turns(HUMAN), "conversations[0]", "ends with user"),
    "ends with human": (turns(HUMAN, GPT, HUMAN), "conversations[2]", "ends with user"),
    "two humans": (turns(HUMAN, HUMAN, GPT), "conversations[1]", "a turn of user", "a turn of assistant"),
    "starts with gpt": (turns(GPT, HUMAN, GPT), "conversations[0]", "a turn of assistant", "a turn of user"),
    "late system": (turns(HUMAN, GPT, ("system", "x")), "conversations[2]", "a turn of system"),
    "system only": (turns(("system", "x")), "conversations[0]", "ends with system"),
    "too few placeholders": (GOOD | {"image": "a.png"}, "'image'", "0 <image> placeholders for 1 images"),
    "too many placeholders": (PICTURE | {"image": None}, "'image'", "1 <image> placeholders for 0 images"),
    "placeholder in the answer": (turns(HUMAN, ("gpt", "<image>")) | {"image": "a.png"}, "0 <image> placeholders for"),
    "video": (GOOD | {"video": "a.mp4"}, "field 'video'", "not support videos", "extract frames"),
    "videos": (GOOD | {"videos": ["a.mp4"]}, "field 'videos'", "not support videos"),
    "video placeholder": (turns(("human", "<video>\nWhat?"), GPT), "conversations[0]", "<video>", "not support videos"),
    "images": (GOOD | {"images": ["a.png"]}, "'image'", "0 <image> placeholders for 1 images"),
    "image and images": (PICTURE | {"images": ["a.png"]}, "fields 'image' and 'images'", "given both"),
    "image a number": (PICTURE | {"image": 7}, "field 'image'", "a number"),
    "image list of numbers": (PICTURE | {"image": [7]}, "field 'image'[0]", "a number"),
    "image empty": (PICTURE | {"image": ""}, "1 <image> placeholders for 0 images"),
    "image blank": (PICTURE | {"image": " "}, "field 'image'", "' '"),
    "image with NUL": (PICTURE | {"image": "a\0.png"}, "field 'image'"),
    "image with half a surrogate pair": (PICTURE | {"image": "\ud83d.png"}, "surrogate", "\\ud83d"),
    "image with an escape sequence": (PICTURE | {"image": "/\x1b[2J\x07.png"}, "'/\\x1b[2J\\x07.png'"),
    "image very long": (PICTURE | {"image": "/" + "x" * 10**6}, "more characters"),
    "speaker with a line end": (turns(HUMAN, ("a\nerror: b", "x")), "'a\\nerror: b'"),
    "empty answer": (turns(HUMAN, ("gpt", "")), "conversations[1]", ": empty answer"),
    "blank answer": (turns(HUMAN, GPT, HUMAN, ("gpt", " \n\t\u3000")), "conversations[3]", ": empty answer"),
    "huge number": (turns(("human", 10**4000), GPT), "a number for 'value'"),
    "not a number": (PICTURE | {"image": float("nan")}, "field 'image'", "a number"),
    "image absolute": (PICTURE | {"image": "/etc/passwd"}, "'/etc/passwd'", "leaves the image folder"),
    "image above": (PICTURE | {"image": "../a.png"}, "'../a.png'", "leaves the image folder"),
    "image above, hidden": (PICTURE | {"image": "x/../../a.png"}, "leaves the image folder"),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_malformed_records_are_named(write_annotations: Write, tmp_path: Path, case: str) -> None:
    record, *parts = BAD_RECORDS[case]
    path = write_annotations([GOOD, record])
    place = f"{path}:2" if path.suffix == ".jsonl" else f"{path} record 2"
    with pytest.raises(UserError, match=f"^{re.escape(place)}: ") as caught:
        annotated("shapes", path, tmp_path)
    for part in parts:
        assert part in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_broken_jsonl_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD)[:-9] + "\n" + json.dumps(GOOD))
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}:3: found broken JSON at column \d+ .*Fix or remove"):
        annotated("shapes", path, None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[\n{},\n{,}\n]", 3),
        ("[\n{},\n{}\n", 4),
        ("[\n{}\n{}]", 3),
        ("[\n{},\n]", 3),
        ("[{}]\n[{}]", 2),
        ("[", 1),
        ('[{"a": "' + "x" * 50, 1),
        ("[" * 100_000, 1),
        ("[" + "9" * 5000 + "]", 1),
        ('{"a":' * 100_000, 1),
        ("hello", 1),
        ('{\n"conversations": []\n}', 1),
    ],
)
def test_broken_json_names_the_line(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "train.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        values_of(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: found broken JSON") and "JSONL" in message


@pytest.mark.parametrize("start", ["[\n{},\n", "{}\n\n"])
def test_text_that_is_not_utf8_names_the_line(tmp_path: Path, start: str) -> None:
    path = tmp_path / "train.json"
    path.write_bytes(start.encode() + b'{"a": "caf\xe9"}')
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}:3: found byte 0xe9, which is not UTF-8.*iconv"):
        values_of(path)


@pytest.mark.parametrize("text", ["", "\n \n", "[]", " [ ] "])
def test_an_empty_data_set_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}: no records .*'shapes'"):
        annotated("shapes", path, None)


def test_missing_files_and_folders_are_named(tmp_path: Path, write_annotations: Write) -> None:
    with pytest.raises(UserError, match=r"nowhere\.json: no such file.*data\.registry"):
        annotated("shapes", tmp_path / "nowhere.json", None)
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}: cannot be read"):
        annotated("shapes", tmp_path, None)
    path = write_annotations([PICTURE])
    with pytest.raises(UserError, match=r"data\.registry\.shapes\.images: .*nowhere is not "):
        annotated("shapes", path, tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"'a\.png' .*no image folder.*`images`"):
        annotated("shapes", path, None)


def test_links_must_not_leave_the_image_folder(tmp_path: Path, write_annotations: Write) -> None:
    folder, outside = tmp_path / "images", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "inner").symlink_to(folder)
    alias = tmp_path / "alias"
    alias.symlink_to(folder)
    path = write_annotations([PICTURE | {"image": name} for name in ("link/a.png", "inner/a.png", "x/../a.png")])
    for images in (folder, alias):
        data = annotated("shapes", path, images)
        with pytest.raises(UserError, match=r"'link/a\.png', .*outside/a\.png"):
            data[0].item(0)
        assert str(data[1].item(0).content) == str(data[2].item(0).content) == str((folder / "a.png").resolve())
