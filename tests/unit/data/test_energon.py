"""Folders of Energon: their splits, a mapping by `dataset.yaml`, and no trust in either."""

from __future__ import annotations

import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from megatron_hetero.base.contents import ByteRange, StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources import patterns
from megatron_hetero.data.sources.energon import EnergonTars, Shard, open_energon
from megatron_hetero.data.validation import item_fields
from tests.support.energon import SPLIT, prepare


def opened(folder: Path | str, **entry: Any) -> Dataset:
    entry = {"format": "energon", **entry}
    return Dataset("d", DatasetConfig(files=Pattern(str(folder)), **entry), Reading(FIELDS))


FIELDS = item_fields({"vision": ("image", "video")})


def shown(data: Dataset) -> list[Any]:
    """The texts and items of all records."""
    records = [data[k] for k in range(len(data))]
    return [
        (*(turn.text for turn in record.turns), *(item.file.read().decode() for item in record.items))  # type: ignore[union-attr]
        for record in records
    ]


def test_a_split(tmp_path: Path) -> None:
    prepare(tmp_path)
    data = opened(tmp_path, format="auto")
    assert isinstance(data._format, EnergonTars)
    assert shown(data) == [("<image>", f"txt {s}{k}", f"JPG {s}{k}") for s in range(2) for k in range(3)]
    assert data[4].where == f"{tmp_path}/tars/s1.tar: x/k11"
    assert [item.file.label for item in data[4].items if isinstance(item.file, ByteRange)] == ["x/k11.jpg"]
    assert shown(opened(tmp_path, split="val")) == [("<image>", f"txt 2{k}", f"JPG 2{k}") for k in range(3)]


def test_older_files_of_a_folder(tmp_path: Path) -> None:
    meta = prepare(tmp_path / "data set {0}#?%20") / ".nv-meta"
    expected = shown(opened(meta.parent))
    (meta / ".info.yaml").write_text((meta / ".info.json").read_text().replace("{", "{ "))
    (meta / "split.json").write_text((meta / "split.yaml").read_text())
    for name in (".info.json", "split.yaml"):
        (meta / name).unlink()
    assert shown(opened(meta.parent)) == expected


def test_what_is_excluded(tmp_path: Path) -> None:
    exclude = ["tars/s0.tar", "tars/s1.tar/x/k1{0,2}", "tars/s2.tar/x/k20"]
    meta = prepare(tmp_path, split=SPLIT | {"exclude": exclude}) / ".nv-meta"
    assert [text for _, text, _ in shown(opened(tmp_path))] == ["txt 11"]
    (meta / "split.yaml").write_text(json.dumps(SPLIT | {"exclude": ["tars/s1.tar/1"]}))
    with pytest.raises(UserError, match=r"s1.tar: .*excluded samples \(1\)"):
        opened(tmp_path)


# ------------------------------------------------------------------------------------------------- dataset.yaml

TURNS = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "It."}]
MESSAGES = [{"role": "user", "content": [{"type": "image"}, "Why?"]}, {"role": "assistant", "content": "So."}]
PLAIN = [{"role": "user", "content": "Why?"}, MESSAGES[1]]
QA = json.dumps({"c": ["Where?"], "a": ["Here.", "There."]})
CHAT = "my.module.ChatMLWebdataset"

MAPPED = {
    "old class": ("CaptioningWebdataset", {"image": "png,jpg", "caption": "txt"}, {"jpg": "p", "txt": "It."},
                  ("<image>", "It.", "p")),
    "alternatives": ("CaptioningSample", {"image": "jpg,png", "caption": "json[x],json[c][0]"},
                     {"png": "p", "json": QA}, ("<image>", "Where?", "p")),
    "questions": ("VQASample", {"image": "a.JPG", "context": "json[c][0]", "answers": "json[a]", "answer_weights": "w"},
                  {"a.jpg": "p", "json": QA}, ("<image>Where?", "Here.", "p")),
    "turns by number": ("VQAWebdataset", {"image": "jpg", "context": "json[0][value]", "answers": "json[1][value]"},
                        {"jpg": "p", "json": json.dumps(TURNS)}, ("<image>What?", "It.", "p")),
    "videos": ("VidQASample", {"video": "mp4", "context": "txt", "answers": "gt.txt"},
               {"mp4": "v", "txt": "Why?", "gt.txt": "So."}, ("<video>Why?", "So.", "v")),
    "conversations": (CHAT, {"imgs": "jpg", "conversation": "json"}, {"jpg": "p", "json": json.dumps(TURNS)},
                      ("<image>What?", "It.", "p")),
    "messages": (CHAT, {"imgs": "image.jpg", "conversation": "conversation.json"},
                 {"image.jpg": "p", "conversation.json": json.dumps(MESSAGES)}, ("<image>Why?", "So.", "p")),
    "JSON in JSON": (CHAT, {"imgs": "jpg", "conversation": "json[x]"},
                     {"jpg": "p", "json": json.dumps({"x": json.dumps(MESSAGES)})}, ("<image>Why?", "So.", "p")),
    "JSON without suffix": (CHAT, {"imgs": "jpg", "conversation": "conversation"},
                            {"jpg": "p", "conversation": json.dumps({"messages": MESSAGES})},
                            ("<image>Why?", "So.", "p")),
    "no picture": (CHAT, {"imgs": "jpg", "conversation": "json"}, {"json": json.dumps({"conversation": PLAIN})},
                   ("Why?", "So.")),
    "crude": ("CrudeWebdataset", None, {"jpg": "p", "txt": "It."}, ("<image>", "It.", "p")),
    "unknown": ("my.Sample", {"x": "jpg"}, {"jpg": "p", "txt": "It."}, ("<image>", "It.", "p")),
}  # fmt: skip


def described(name: str, field_map: Any, **more: Any) -> dict[str, Any]:
    """A dataset.yaml."""
    module, _, name = name.rpartition(".")
    kind = {"__module__": module, "__class__": name}
    found = kind if name.endswith("Webdataset") else {"sample_type": kind}
    return found | ({} if field_map is None else {"field_map": field_map}) | more


def one_sample(folder: Path, parts: Mapping[str, str], dataset: Any) -> Path:
    split = {"split_parts": {"train": ["a.tar"]}}
    return prepare(folder, {"a.tar": [(f"k.{part}", text) for part, text in parts.items()]}, dataset, split)


@pytest.mark.parametrize("name, field_map, parts, expected", MAPPED.values(), ids=MAPPED)
def test_fields_of_samples(
    tmp_path: Path, name: str, field_map: Any, parts: Mapping[str, str], expected: tuple[str, ...]
) -> None:
    assert shown(opened(one_sample(tmp_path, parts, described(name, field_map)))) == [expected]


def test_the_mapping_of_a_folder(tmp_path: Path) -> None:
    prepare(tmp_path)
    entry = DatasetConfig(files=Pattern(str(tmp_path)))
    format, files, own = open_energon(tmp_path, entry, "data.registry.d.files")
    assert own == {"image": "field_map.image", "answer": "field_map.caption"}
    assert [file.name for file in files] == [f"{tmp_path}/tars/s0.tar", f"{tmp_path}/tars/s1.tar"]
    assert repr(format) == repr(open_energon(tmp_path, entry, "data.registry.d.files")[0])
    fields = {"image": "jpg", "question": "txt", "answer": "txt"}
    assert shown(opened(tmp_path, fields=fields))[0] == ("<image>txt 00", "txt 00", "JPG 00")


BAD_MAPS = {
    "code": (described("VQASample", None, sample_loader="loader.py:load", part_filter="loader.py:part"),
             "sample_loader: found 'loader.py:load', expected a field_map, .*"
             "data.registry.d.fields"),
    "pickle": (described("ChatMLWebdataset", {"imgs": "jpgs", "conversation": "json"}),
               "field_map.imgs: field 'jpgs' is never loaded, because it is a pickle.*Pack each picture"),
    "path": (described("VQASample", {"image": "jpg["}), "field_map.image: found 'jpg\\[', expected FIELD or FIELD"),
    "no path": (described("VQASample", {"image": ["jpg"]}), "field_map.image: found \"\\['jpg'\\]\""),
    "no map": (described("VQASample", None), "field_map: found null, "),
    "missing": (described("VQASample", {"image": "png,json[x]", "context": "txt"}),
                "k: field 'image': found nothing at png or json.x, .*field_map, .* with txt"),
    "no turns": (described("ChatMLSample", {"conversation": "txt"}), "k: field 'conversation': found broken JSON"),
    "one turn": (described("ChatMLSample", {"conversation": "cls"}), "'conversation': found a number, "),
    "a list": ([], "dataset.yaml: found a list, "),
}  # fmt: skip


@pytest.mark.parametrize("dataset, message", BAD_MAPS.values(), ids=BAD_MAPS)
def test_bad_mappings(tmp_path: Path, dataset: Any, message: str) -> None:
    one_sample(tmp_path, {"txt": "It.", "cls": "7"}, dataset)
    with pytest.raises(UserError, match=message):
        opened(tmp_path)
    assert shown(opened(tmp_path, fields={"answer": "txt"})) == [("", "It.")]


# ------------------------------------------------------------------------------------------------- broken folders


def meta_file(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / ".nv-meta" / name).write_text(text)


def in_split(**content: Any) -> Callable[[Path], Any]:
    return meta_file("split.yaml", json.dumps(SPLIT | content))


BOMB = "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n" + "".join(f"c{k}: &c{k} {{<<: [*b, *b]}}\n" for k in range(9))
BROKEN = {
    "no info": (lambda f: (f / ".nv-meta" / ".info.json").unlink(), r"\.info\.json: no such file. Run `energon prep"),
    "no split": (lambda f: (f / ".nv-meta" / "split.yaml").unlink(), r"split\.yaml: no such file"),
    "a folder": (lambda f: [(f / ".nv-meta" / "split.yaml").unlink(), (f / ".nv-meta" / "split.yaml").mkdir()],
                 r"split\.yaml: cannot be read \(is a directory\)"),
    "no JSON": (meta_file(".info.json", "{"), r"\.info\.json: malformed \(JSONDecodeError"),
    "no counts": (meta_file(".info.json", "{}"), r"\.info\.json: shard_counts: found null, "),
    "odd counts": (meta_file(".info.json", '{"shard_counts": {"a": "3"}}'), "'a': found a string, "),
    "another count": (meta_file(".info.json", '{"shard_counts": {"tars/s0.tar": 3, "tars/s1.tar": 4}}'),
                      "s1.tar: found 3 samples, expected 4, because `.info.json`"),
    "unknown tar": (in_split(split_parts={"train": ["tars/s9.tar"]}), "does not have 'tars/s9.tar' of split 'train'"),
    "odd tag": (meta_file("split.yaml", "!!int ''"), r"split\.yaml: malformed \(IndexError"),
    "odd time": (meta_file("split.yaml", "!!timestamp x"), r"split\.yaml: malformed \(AttributeError"),
    "a huge count": (meta_file(".info.json", json.dumps({"shard_counts": {"a": 1 << 64}})), "'a': found a number"),
    "no YAML": (meta_file("split.yaml", "a: ["), r"split\.yaml: malformed"),
    "no text": (lambda f: (f / ".nv-meta" / "split.yaml").write_bytes(b"\xff"), r"split\.yaml: malformed"),
    "aliases": (meta_file("split.yaml", BOMB), "malformed .*an alias"),
    "objects": (meta_file("split.yaml", "!!python/object/apply:os.getcwd []"), "malformed .*python/object"),
    "deep": (meta_file("split.yaml", "[" * 99_999), "malformed"),
    "no parts": (meta_file("split.yaml", "{}"), "split_parts: found null"),
    "no list": (in_split(split_parts={"train": "tars/s0.tar"}), "train: found a string, "),
    "odd list": (in_split(split_parts={"train": [["x"]]}), "train: found a list, "),
    "a store": (in_split(split_parts={"train": ["s3://b/{a,b}*"]}), "found 's3://b/"),
    "braces": (in_split(split_parts={"train": ["tars/s{3..1}.tar"]}), "train: .*ascending range"),
    "outside": (in_split(split_parts={"train": ["../a.tar"]}), r"found '\.\./a\.tar', "),
    "absolute": (in_split(split_parts={"train": ["/a.tar"]}), "found '/a.tar', "),
    "twice": (in_split(split_parts={"train": ["tars/s0.tar"] * 2}), "'tars/s0.tar' given twice"),
    "all excluded": (in_split(exclude=["tars/s{0,1}.tar"]), "all tars of split 'train' are excluded"),
    "no tar": (lambda f: (f / "tars" / "s1.tar").unlink(), r"tars/s1\.tar: no such file"),
    "compressed": (lambda f: (f / "tars" / "s1.tar").write_bytes(b"\x1f\x8b" + bytes(9999)), "Gunzip it"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", BROKEN.values(), ids=BROKEN)
def test_broken_folders(tmp_path: Path, change: Callable[[Path], Any], message: str) -> None:
    change(prepare(tmp_path))
    with pytest.raises(UserError, match=message):
        opened(tmp_path)


def linked(name: str) -> Callable[[Path], Any]:
    """Move a file out of the folder, with a link in its place."""

    def change(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return change


META = [".info.json", "split.yaml", "dataset.yaml"]


@pytest.mark.parametrize("name", ["tars/s1.tar", "tars", ".nv-meta", *(f".nv-meta/{name}" for name in META)])
def test_links_out_of_a_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = prepare(tmp_path / "data")
    expected = shown(opened(folder))
    linked(name)(folder)
    with pytest.raises(UserError, match=f"{folder}/.*: found a link to {tmp_path}/elsewhere.*cp -rL FOLDER COPY"):
        opened(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert shown(opened(tmp_path / "copy")) == expected


def test_links_inside_a_folder_and_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(tmp_path / "data")
    expected = shown(opened(folder))
    (folder / "tars").rename(folder / "moved")
    (folder / "tars").symlink_to("moved")
    (tmp_path / "link").symlink_to(folder)
    assert shown(opened(tmp_path / "link")) == expected
    monkeypatch.chdir(tmp_path)
    assert shown(opened("link")) == expected
    linked("moved/s1.tar")(folder)
    with pytest.raises(UserError, match="^link/tars/s1.tar: found a link to"):
        opened("link")
    (folder / "tars").unlink()
    (folder / "tars").symlink_to("tars")
    with pytest.raises(UserError, match="too many levels of symbolic links"):
        opened(folder)


REACHING = """
    {reference}://*::data:,{} {reference}://*::data:application/json,{} {tar}://*::file:///etc/passwd {zip,}://*::s3://b/a
    {ftp}://user:pw@127.0.0.1:9/* {http,https}://127.0.0.1:9/* {s3}://b/* s3://b/* {simplecache}::s3://b/a {://}x
    {{{a://,b}}}* {/etc}/* {/etc,tars}/s0.tar /etc/* {/etc/passwd} {file}:///etc/* {local,tars}:///etc/passwd {..}/*
    {..,tars}/s0.tar tars/{.}./../* tars/{{s0,..}/x,..} {a,b}/../../* {a\0b} a\0b {a}\0* {a,\ud800}
""".split()
REACHING += ["{" * 3000, "{a}" * 3000, "{" * 3000 + "}" * 3000]


@pytest.mark.parametrize("name", REACHING, ids=range(len(REACHING)))
@pytest.mark.parametrize("kind", ["split", "exclude"])
def test_names_reach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    monkeypatch.delattr(fsspec.core, "url_to_fs")
    for system, function in ((glob, "glob"), (glob, "iglob"), (os, "listdir"), (os, "scandir")):
        monkeypatch.delattr(system, function)
    names = {"split": ["tars/s0.tar"], "exclude": list[str]()}
    names[kind].append(name)
    prepare(tmp_path, split={"split_parts": {"train": names["split"]}, "exclude": names["exclude"]})
    with pytest.raises(UserError, match=rf"split\.yaml: {'exclude' if kind == 'exclude' else 'train'}: found ['\"]"):
        opened(tmp_path)


def test_names_are_literal_but_for_braces(tmp_path: Path) -> None:
    keys = {"a*.tar": ["k*", "k"], "b[0].tar": ["l[1]", "l1"], "c?.tar": ["m::", "m:/x"], "d::x.tar": ["n{", "n"]}
    shards = {name: [(f"{key}.txt", key) for key in own] for name, own in keys.items()}
    exclude = ["a*.tar/k*{,}", "b[0].tar/l[1]", "b[0].tar/*", "c?.tar/m::", "d::x.tar/n{", "{*,?}.tar", "a.tar/k"]
    split = {"split_parts": {"train": ["a*.tar", "{b[0],c?}.tar", "d::x.tar"]}, "exclude": exclude}
    with pytest.raises(UserError, match=r"b\[0\].tar: .*excluded samples \(\*, l\[1\]\)"):
        opened(prepare(tmp_path / "a", shards, {"__class__": "CrudeWebdataset"}, split))
    exclude.remove("b[0].tar/*")
    data = opened(prepare(tmp_path / "b", shards, {"__class__": "CrudeWebdataset"}, split))
    assert [text for _, text in shown(data)] == ["k", "l1", "m:/x", "n"]


def test_names_are_limited_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_FILES", 1000)
    prepare(tmp_path, split={"split_parts": {"train": ["tars/s0.tar", "{0..599}", "{600..999}"]}})
    with pytest.raises(UserError, match="train: found more than 1,000 files"):
        opened(tmp_path)


def test_other_folders(tmp_path: Path) -> None:
    (tmp_path / "blend.yaml").touch()
    for files, message in (
        (tmp_path, "d.files: .*nv-meta.*`energon prepare`"),
        (tmp_path / "blend.yaml", "metadataset .*data.registry.*data.datasets"),
        ("s3://bucket/folder", "s3://bucket/folder is not a folder"),
    ):
        with pytest.raises(UserError, match=message):
            opened(files)
    with pytest.raises(UserError, match=r"^data.registry.d.split: found 'test', .* of train, val"):
        opened(prepare(tmp_path), split="test")


def test_records_of_a_range(tmp_path: Path) -> None:
    path = prepare(tmp_path) / "tars" / "s1.tar"
    format, columns = EnergonTars(shards={str(path): Shard(3)}), {}
    assert len(list(format.scan(StoredFile(str(path)), columns))) == 3
    arrays = {name: np.frombuffer(column, np.uint8 if isinstance(column, bytearray) else np.int64)
              for name, column in columns.items()}  # fmt: skip
    assert [value["txt"] for value, _ in format.read(StoredFile(str(path)), arrays, range(1, 3))] == [
        "txt 11",
        "txt 12",
    ]


@pytest.mark.parametrize(
    "names, excluded, message",
    [
        (["{0..40000}", "40000"], [], "'40000' given twice"),
        (["{0..20000}"], ["{0..20000}x"], "does not have '0' of split"),
        (["{a,b}{a,b}{a,b}" * 4], [], "does not have 'aaaaaaaaaaaa' of split"),
    ],
)
def test_the_work_for_many_names_is_linear(names: list[str], excluded: list[str], message: str, tmp_path: Path) -> None:
    folder = prepare(tmp_path, split={"split_parts": {"train": names}, "exclude": excluded})
    begin = time.process_time()
    with pytest.raises(UserError, match=message):
        opened(folder)
    assert time.process_time() - begin < 20  # Minutes where it is quadratic.
