"""Patterns of files, mappings of fields, forms of text, and object stores."""

from __future__ import annotations

import glob
import json
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import known_implementations

from megatron_hetero.base.contents import STORES, StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.load import convert
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources.mapping import FieldMap
from megatron_hetero.data.sources.patterns import files_of, require_matches
from megatron_hetero.data.validation import item_fields, validate_record
from tests.unit.data.conftest import MemoryStore

FIELDS = item_fields({"vision": ("image", "video")})


@pytest.mark.parametrize(
    "pattern, names",
    [
        ("s-{00..02}.tar", ["s-00.tar", "s-01.tar", "s-02.tar"]),
        ("s-{8..11}", ["s-8", "s-9", "s-10", "s-11"]),
        ("{a,b}/{1..2}", ["a/1", "a/2", "b/1", "b/2"]),
        ("{a{1..2},b}.json", ["a1.json", "a2.json", "b.json"]),
        ("x{}y", ["xy"]),
    ],
)
def test_braces(pattern: str, names: list[str]) -> None:
    assert [file.name for file in files_of(f"/none/{pattern}", "s")] == [f"/none/{name}" for name in names]


def test_wildcards_match_in_order(tmp_path: Path) -> None:
    for name in ("b2.json", "b10.json", "a[1].json", "c.txt"):
        (tmp_path / name).touch()
    names = [Path(file.name).name for file in files_of(f"{tmp_path}/*.json", "s")]
    assert names == ["a[1].json", "b10.json", "b2.json"]
    assert [Path(file.name).name for file in files_of(f"{tmp_path}/a[1].json", "s")] == ["a[1].json"]


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("/none/*.tar", "no file matches"),
        ("/none/{a,a}", "named twice"),
        ("/none/{5..2}", "ascending range"),
        ("/none/{0..99999999999}", "ascending range"),
        ("/none/{0..9999}{0..9999}", "more than 1,000,000 files"),
        ("/none/{0..%s}" % ("9" * 5000), "ascending range"),
        ("/none/{%s..1}" % ("0" * 5000), "ascending range"),
        ("/none/" + "{" * 3000 + "a" + "}" * 3000, "at most 16 braces"),
        ("/none/" + "{a}" * 3000, "at most 16 braces"),
        ("/none/{a,b}" + "x" * 5000, "4,096 characters of a name"),
        ("/none/{0..999999}" + "x" * 4000, "or 268,435,456 of all"),
        ("/none/a\0b", "without NUL"),
        ("/none/\0*", "without NUL"),
        ("/none/\ud800", "in UTF-8"),
    ],
)
def test_bad_patterns(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^data.registry.d.files: .*{message}"):
        files_of(pattern, "data.registry.d.files")


VALUE = {"qa": [{"q.text": "Why?", "a": ["So."]}], "img1.png": "i", "img1": {"png": "wrong"}, "messages": [], "fps": 2}


def mapped(**fields: str) -> Any:
    return FieldMap.parse(fields, FIELDS, "f").apply(VALUE, "d:1")


def test_paths_of_fields() -> None:
    found = mapped(question="qa.0.q.text", answer="qa[0][a]", image="img1.png")
    assert found["question"] == "Why?" and found["answer"] == ["So."] and found["image"] == "i"
    assert "messages" not in found and found["fps"] == 2
    assert "image" not in mapped(image="img2.png")
    with pytest.raises(UserError, match=r"d:1: field 'answer': found nothing at qa\.1\.a, expected a text.*qa, img1"):
        mapped(answer="qa.1.a")
    with pytest.raises(UserError, match="f: found 'imgs', expected one of image, video, "):
        mapped(imgs="a")
    with pytest.raises(UserError, match="f.image: found '..'"):
        mapped(image="..")


def turns_of(value: dict[str, Any]) -> tuple[list[tuple[str, str]], list[Any]]:
    found = validate_record(value, "d:1", folder=Path("/images"), fields=FIELDS)
    return [(turn.role, turn.text) for turn in found.turns], [item.file for item in found.items]


ANSWER = {"role": "assistant", "content": "It."}
PARTS = [{"type": "text", "text": "See "}, {"type": "image", "image": "b.png", "text": None}, {"type": "image"}]


@pytest.mark.parametrize(
    "value, texts, items",
    [
        ({"messages": [{"role": "user", "content": "<image>Q"}, ANSWER], "images": ["a.png"]}, ["<image>Q", "It."],
         ["a.png"]),
        ({"messages": [{"role": "user", "content": "Q"}, ANSWER], "images": ["a.png", "b.png"]},
         ["<image><image>Q", "It."], ["a.png", "b.png"]),
        ({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, ANSWER], "video": "a.mp4",
          "image": "a.png"}, ["S", "<image><video>Q", "It."], ["a.png", "a.mp4"]),
        ({"messages": [{"role": "user", "content": [*PARTS[:2], "?"]}, ANSWER]}, ["See <image>?", "It."], ["b.png"]),
        ({"messages": [{"role": "user", "content": [PARTS[2]]}, ANSWER], "image": "c.png"}, ["<image>", "It."],
         ["c.png"]),
        ({"texts": [{"user": "Q", "assistant": "A", "source": "x"}, {"user": "R", "assistant": "B"}], "images": ["a"]},
         ["<image>Q", "A", "R", "B"], ["a"]),
        ({"question": "Q", "answer": ["A", "B"], "image": "a"}, ["<image>Q", "A"], ["a"]),
        ({"answer": "A caption.", "image": "a", "system": "S"}, ["S", "<image>", "A caption."], ["a"]),
        ({"conversations": None, "answer": "A"}, ["", "A"], []),
    ],
)  # fmt: skip
def test_forms_of_text(value: dict[str, Any], texts: list[str], items: list[str]) -> None:
    turns, files = turns_of(value)
    assert [text for _, text in turns] == texts and files == items
    assert [role for role, _ in turns][-2:] == ["user", "assistant"]


@pytest.mark.parametrize(
    "value, message",
    [
        ({"messages": [ANSWER]}, r"'messages\[0\]': found a turn of assistant, expected a turn of user"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            r"'messages\[0\]': found a turn of tool, expected a turn of user",
        ),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "a number for 'content'"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, ANSWER]}, "an entry of type 'audio'"),
        ({"messages": [{"role": "user", "content": PARTS[:2]}, ANSWER], "image": "a"}, "images in both"),
        ({"messages": {}}, "field 'messages': found an object"),
        ({"texts": [{"user": "Q", "assistant": None}]}, r"'texts\[0\]': found null for 'assistant'"),
        ({"texts": ["Q"]}, r"'texts\[0\]': found a string"),
        ({"texts": [{"user": "Q", "assistant": " "}]}, r"'texts\[0\]': empty answer"),
        ({"question": "Q"}, "field 'answer': found null for 'answer'"),
        ({"question": 3, "answer": "A"}, "field 'question': found a number"),
        ({"question": "Q", "answer": ""}, "field 'answer': empty answer"),
        ({"answer": "A", "system": 1}, "field 'system': found a number"),
        ({"question": "<image>", "answer": "A"}, "1 <image> placeholders for 0 images"),
        (
            {"messages": [{"role": "system", "content": "<image>"}, {"role": "user", "content": "Q"}, ANSWER]},
            r"<image> in a turn of system",
        ),
    ],
)
def test_bad_forms_of_text(value: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^d:1: .*{message}"):
        turns_of(value)


def opened(files: str, **more: Any) -> Dataset:
    return Dataset("d", DatasetConfig(files=Pattern(files), **more), Reading(FIELDS))


def test_several_json_files_are_one_data_set(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        rows = [{"question": f"{name} {k}?", "answer": "It."} for k in range(3)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "empty.jsonl").touch()
    data = opened(f"{tmp_path}/*.jsonl")
    assert [record.turns[0].text for record in data] == [f"{n}.jsonl {k}?" for n in "ab" for k in range(3)]
    assert data[4].where == f"{tmp_path}/b.jsonl:2"
    with pytest.raises(UserError, match=r"c\.jsonl: no such file.*`files` of data.registry.d"):
        opened(f"{tmp_path}/{{a,c}}.jsonl")


def test_objects_of_a_store_are_read_in_ranges(memory_store: MemoryStore) -> None:
    rows = [{"question": f"{k}?", "answer": "It."} for k in range(5)]
    memory_store.pipe("/bucket/a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    memory_store.pipe("/bucket/b.json", json.dumps(rows).encode())
    data = opened("s3://bucket/*.json*")
    assert [record.turns[0].text for record in data] == 2 * [f"{k}?" for k in range(5)]
    assert data[0].where == "s3:///bucket/a.jsonl:1"
    with pytest.raises(UserError, match=r"s3://bucket/none.jsonl: no such file"):
        opened("s3://bucket/none.jsonl")


def test_stores_without_a_driver_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ossfs", None)
    with pytest.raises(UserError, match=r"oss://a/b\.jsonl: cannot be read \(.*ossfs.*pip install s3fs"):
        opened("oss://a/b.jsonl")


NO_STORES = [
    *(f"{scheme}://127.0.0.1/*" for scheme in known_implementations if scheme not in STORES),
    *("S3://b/a", "://a", "reference://*::data:,{}", "tar://*::file:///etc/passwd", "zip::s3://b/a.zip"),
    *("s3://b/a::b", "s3://*::s3://b/a", "simplecache::s3://b/a", "{s3,file}://b/a", "{file}:///etc/*", "s3{:,}://b/a"),
]


@pytest.mark.parametrize("files", NO_STORES)
def test_other_urls_reach_no_file_system(monkeypatch: pytest.MonkeyPatch, files: str) -> None:
    monkeypatch.delattr(fsspec.core, "url_to_fs")
    monkeypatch.delattr(glob, "glob")
    for reach in (opened, lambda files: require_matches(files, "data.registry.d.files")):
        with pytest.raises(UserError, match=r"^data\.registry\.d\.files: found .*\(s3, "):
            reach(files)
    for read in (StoredFile.open, StoredFile.version, lambda file: file.read(0, 1)):
        with pytest.raises(UserError, match="object in a store"):
            read(StoredFile(files))


def test_braces_hide_no_url(tmp_path: Path) -> None:
    for files in ("{s3://b/a,/etc/passwd}", f"{{{tmp_path}/a,s3://b/a}}"):
        with pytest.raises(UserError, match=r"^data\.registry\.d\.files: .* both URLs and files"):
            opened(files)
    # Not taken for a path in the configuration's folder.
    assert convert("{s3,file}://b/a", Pattern, tmp_path) == "{s3,file}://b/a"
    assert DatasetConfig(files=Pattern("{s3,file}://b/a")).folder_of_files is None
