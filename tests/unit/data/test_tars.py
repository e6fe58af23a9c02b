"""WebDataset tars: every part is found at its place, and nothing but whole tars of plain files is read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.base.contents import ByteRange, StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources import tar_headers
from megatron_hetero.data.sources.formats import Arrays, Columns, RawRecord
from megatron_hetero.data.sources.json_files import MAX_TEXT_BYTES
from megatron_hetero.data.sources.tars import TarFiles
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import IMAGES, item_fields
from tests.support.formats import pack
from tests.unit.data.conftest import MemoryStore

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
TURNS = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "It."}]


def scanned(path: Path | str) -> tuple[int, Arrays]:
    """The number of samples in a file, and its columns."""
    columns: Columns = {}
    samples = len(list(TarFiles().scan(StoredFile(str(path)), columns)))
    kinds = {name: np.uint8 if isinstance(column, bytearray) else np.int64 for name, column in columns.items()}
    return samples, {name: np.frombuffer(column, kinds[name]) for name, column in columns.items()}


def records(path: Path | str, format: TarFiles | None = None) -> list[RawRecord]:
    """All records of a file."""
    samples, columns = scanned(path)
    return list((format or TarFiles()).read(StoredFile(str(path)), columns, range(samples)))


def raw(value: Any) -> bytes:
    """What a part was written from."""
    return value.read() if isinstance(value, ByteRange) else value.encode()


Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_(data: bytes) -> Path:
        (tmp_path / "a.tar").write_bytes(data)
        return tmp_path / "a.tar"

    return write_


# ------------------------------------------------------------------------------------------------------ members

WORD = st.text(st.characters(exclude_characters="./\\", exclude_categories=("C",)), min_size=1, max_size=9)
KEYS = st.lists(WORD | st.text("long", min_size=90, max_size=120), min_size=1, max_size=3).map("/".join)
PARTS = st.dictionaries(st.sampled_from(["jpg", "img2.png", "txt", "npy"]), st.binary(max_size=1500), min_size=1)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(KEYS.filter(lambda key: key[:2] != "__"), PARTS, min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from(FORMATS),
    st.sampled_from([0, 1.5]),
)
def test_parts_are_found_at_random(
    tmp_path_factory: pytest.TempPathFactory, samples: dict[str, Any], random: Any, format: int, mtime: float
) -> None:
    if format == tarfile.USTAR_FORMAT:  # It does not have long names.
        samples = {f"folder/{number}": parts for number, parts in enumerate(samples.values())}
    members = [(key, part, b"text" if part == "txt" else data)
               for key, parts in samples.items() for part, data in parts.items()]  # fmt: skip
    random.shuffle(members)
    path = tmp_path_factory.getbasetemp() / "random.tar"
    path.write_bytes(pack([(f"{key}.{part}", data) for key, part, data in members], format, mtime=mtime))
    keys = list(dict.fromkeys(key for key, _, _ in members))
    count, columns = scanned(path)
    assert count == len(keys)
    for number in random.sample(range(count), count):
        [(value, where)] = TarFiles().read(StoredFile(str(path)), columns, range(number, number + 1))
        assert where == f"{path}: {keys[number]}"
        own = {part: data for key, part, data in members if key == keys[number]}
        assert {part: raw(value[part]) for part in value if part in own} == own
        assert [part for part in value if part in own] == list(own)
        assert all(value[part].label == f"{keys[number]}.{part}" for part in own if part != "txt")


def test_samples_are_in_the_order_of_their_first_parts(write: Write) -> None:
    names = ["b.PNG", "a.txt", "c/d.e.Json", "b.txt", "a.png"]
    path = write(pack([(name, "{}" if "J" in name else name) for name in names]))
    found = records(path)
    assert [where for _, where in found] == [f"{path}: b", f"{path}: a", f"{path}: c/d"]
    assert [[*value] for value, _ in found] == [
        ["image", "png", "txt", "answer"],
        ["image", "txt", "png", "answer"],
        ["e.json"],
    ]
    assert raw(found[0].value["png"]) == b"b.PNG" and found[1].value["txt"] == "a.txt"
    assert pickle.loads(pickle.dumps(found[0])) == found[0]


def test_places(write: Write) -> None:
    path = write(pack([("a.txt", "x" * 100), ("a.jpg", "y" * 600), ("b.txt", "z")], tarfile.USTAR_FORMAT))
    places = list(TarFiles().scan(StoredFile(str(path)), {}))
    whole = path.stat().st_size
    assert [(size, block) for size, _, block in places] == [(700, None), (1, None)]
    assert [share for _, share, _ in places] == [(1536 + 600) / whole, (3072 + 1) / whole]


def test_other_members_are_skipped(write: Write) -> None:
    file = io.BytesIO(pack([("__meta__/a.txt", "x"), ("__b__", ""), ("nodot", ""), (".hidden", ""), ("d/._a.txt", "")]))
    with tarfile.open(fileobj=file, mode="a") as tar:
        folder = tarfile.TarInfo("folder.d")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        tar.addfile(tarfile.TarInfo("old/"))
        tar.addfile(tarfile.TarInfo("__key.txt"))
    [(value, where)] = records(write(file.getvalue()))
    assert where.endswith(": __key") and value["txt"] == ""


def test_sizes_of_long_members(write: Write) -> None:
    data = pack([("a.txt", "x" * 30)])
    block = bytearray(data[:512])
    block[124:136] = b"\x80" + (30).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert records(write(bytes(block) + data[512:]))[0].value["txt"] == "x" * 30
    assert records(write(pack([("b.jpg", "y" * 9)], pax_headers={"size": "9"})))[0].value["jpg"].size == 9


def test_a_store(memory_store: MemoryStore) -> None:
    memory_store.pipe("/tars/a.tar", pack([("a.jpg", "picture"), ("a.txt", "text")]))
    [(value, where)] = records("s3://tars/a.tar")
    assert value["txt"] == "text" and raw(value["jpg"]) == b"picture" and where == "s3://tars/a.tar: a"


def test_a_scan_takes_little_memory(write: Write) -> None:
    path = write(pack([(f"{number:06}.{part}", "x") for number in range(20_000) for part in ("jpg", "txt")]))
    tracemalloc.start()
    try:
        scanned(path)
        assert tracemalloc.get_traced_memory()[1] < 2 * tar_headers._MAX_BEHIND + 20_000 * 300
    finally:
        tracemalloc.stop()


# ----------------------------------------------------------------------------------------------------- refusals

GOOD = pack([("a.txt", "x" * 600), ("a.json", "{}")], tarfile.USTAR_FORMAT)
ZEROS = bytes(1024)


def of_type(kind: bytes, name: str = "b.txt", **fields: Any) -> bytes:
    return pack([("a.txt", "x"), (name, "")], type=kind, **fields)


def with_pax(record: bytes) -> bytes:
    """A member with this in its extended header."""
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, len(record)
    return header.tobuf() + record + bytes(-len(record) % 512) + pack([("a.txt", "x")])


BAD = {
    "empty": (b"", "an empty file"),
    "text": (b"version https://git-lfs", "a file that begins with 'version https://git-lfs'"),
    "short text": (b"x", "begins with 'x'"),
    "gzip": (gzip.compress(GOOD), "Gunzip it"),
    "bzip2": (bz2.compress(GOOD), "Bunzip2 it"),
    "xz": (lzma.compress(GOOD), "Unxz it"),
    "zstd": (b"\x28\xb5\x2f\xfd" + GOOD, "Unzstd it"),
    "cut within a header": (GOOD[:700], "ends within member 'a.txt'"),
    "cut between members": (GOOD[:1536], r"two blocks of zeros.*truncate -s \+1024"),
    "cut in a header": (GOOD[:1700], "two blocks of zeros"),
    "one block of zeros": (GOOD[: 512 * 5 + 512], "two blocks of zeros"),
    "joined": (GOOD + GOOD, "data behind its end.*tar --concatenate"),
    "damaged": (GOOD[:1540] + b"?" + GOOD[1541:], "damaged header at byte 1536"),
    "no samples": (pack([("nodot", "x")]), "no samples.*KEY.FIELD"),
    "nothing": (ZEROS, "no samples"),
    "symbolic link": (of_type(tarfile.SYMTYPE, linkname="/etc/passwd"), "'a.txt' is a symbolic link.*--dereference"),
    "hard link": (of_type(tarfile.LNKTYPE, linkname="a.txt"), "a hard link"),
    "pipe": (of_type(tarfile.FIFOTYPE), "a pipe"),
    "device": (of_type(tarfile.CHRTYPE), "a device"),
    "sparse": (of_type(tarfile.GNUTYPE_SPARSE), "a sparse file"),
    "pax sparse": (pack([("a.txt", "x")], pax_headers={"GNU.sparse.major": "1"}), "a sparse file"),
    "unknown": (of_type(b"M"), "of type 'M'"),
    "outside": (pack([("x/../../b.txt", "x")]), r"a member 'x/\.\./\.\./b.txt', expected names inside"),
    "absolute": (pack([("/b.txt", "x")]), "a member '/b.txt'"),
    "twice": (pack([("a.jpg", "x"), ("b.jpg", ""), ("a.JPG", "y")]), "'a': field 'jpg' given twice"),
    "negative size": (pack([("a.txt", "x")], pax_headers={"size": "-1"}), "damaged header at byte 1024"),
    "endless size": (pack([("a.txt", "x")], pax_headers={"size": "9" * 5000}), "damaged header"),
    "large size": (pack([("a.txt", "x")], pax_headers={"size": "9" * 15}), "ends within member 'a.txt'"),
    "pax length": (with_pax(b"99 path=b.txt\n"), "damaged header at byte 0"),
    "pax without length": (with_pax(b"3 x=1\n0 path=b.txt\n"), "damaged header at byte 0"),
    "long pax": (pack([("a.txt", "x")], pax_headers={"path": "a" * (1 << 20)}), "damaged header at byte 0"),
}


@pytest.mark.parametrize("data, message", BAD.values(), ids=BAD)
def test_bad_files(write: Write, data: bytes, message: str) -> None:
    path = write(data)
    with pytest.raises(UserError, match=f"^{path}: .*{message}"):
        scanned(path)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(FORMATS))
def test_damage_is_an_error_or_changes_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, format: int
) -> None:
    whole = bytearray(
        pack([("ä" * (60 if format else 40) + ".jpg", "x"), ("b.txt", "y"), ("b.json", "{}")], format, mtime=0.5)
    )
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))])
    try:
        found = records(path)
    except UserError as error:
        assert str(path) in str(error)
        return
    assert all(isinstance(value, dict | UserError) for value, _ in found)


# ------------------------------------------------------------------------------------------------------ records

PICTURES = [("a.img2.png", b"2"), ("a.img1.png", b"1")]
CLIP = ("a.mp4", b"v")


def sample(given: Any, *members: tuple[str, bytes | str]) -> list[tuple[str, bytes | str]]:
    return [*members, ("a.json", json.dumps(given))]


def shown(value: Any) -> Any:
    """A record with what parts were written from."""
    if isinstance(value, ByteRange):
        return value.read().decode()
    if isinstance(value, list):
        return [shown(each) for each in value]
    return {key: shown(each) for key, each in value.items()} if isinstance(value, dict) else value


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": "It."}]


RECORDS = {
    "caption": ([("a.jpg", b"p"), ("a.txt", "It.")], {"image": "p", "answer": "It."}),
    "captions": ([("a.jpg", b"p"), ("a.caption", "It."), ("a.cls", "7")], {"answer": "It.", "cls": "7"}),
    "byte order mark": ([("a.txt", b"\xef\xbb\xbfIt."), ("a.json", b"\xef\xbb\xbf{}")], {"txt": "It.", "json": {}}),
    "one picture": (sample({"conversations": TURNS}, ("a.gif", b"p")), {"image": "p", "conversations": TURNS}),
    "text beside turns": (sample({"conversations": TURNS}, ("a.txt", "x")), {"answer": None}),
    "null turns": (sample({"conversations": None}, ("a.txt", "x")), {"answer": "x"}),
    "list of turns": (sample(TURNS, *PICTURES), {"conversations": TURNS, "image": ["2", "1"]}),
    "list of messages": (sample(user("x")), {"messages": user("x"), "conversations": None}),
    "another JSON part": ([("a.b.json", json.dumps({"answer": "x"}))], {"answer": "x", "b.json": {"answer": "x"}}),
    "parts win": (sample({"txt": "json", "jpg": 3}, ("a.txt", "part"), ("a.jpg", b"p")), {"txt": "part", "jpg": "p"}),
    "own order": (sample({"image": ["img1.png", "x/a.img2.png"]}, *PICTURES), {"image": ["1", "2"]}),
    "own choice": (sample({"images": ["a.IMG1.png"]}, *PICTURES), {"images": ["1"], "image": None}),
    "in the JSON, too": (sample({"images": ["a.img1.png"]}, *PICTURES), {"json": {"images": ["1"]}}),
    "other names": (sample({"image": ["y.png", "x.png"]}, *PICTURES), {"image": ["2", "1"]}),
    "names of files": (sample({"image": "b/c.png", "video": "d.mp4"}), {"image": "b/c.png", "video": "d.mp4"}),
    "null image": (sample({"image": None, "images": []}, *PICTURES), {"image": ["2", "1"]}),
    "videos": (sample({}, CLIP, ("a.x.webm", b"w")), {"video": ["v", "w"], "image": None}),
    "video of pictures": (sample({"video": [["img1.png", "img2.png"]]}, *PICTURES, ("a.jpg", b"p")),
                          {"video": [["1", "2"]], "image": "p"}),
    "messages": (sample({"messages": user({"type": "image"}, {"type": "text", "text": "?"})}, ("a.jpg", b"p")),
                 {"image": "p"}),
    "messages with names": (sample(user({"type": "image", "image": "img1.png"}, "?", {"type": "video", "video": "x"}),
                                   *PICTURES, CLIP),
                            {"messages": user({"type": "image", "image": "1"}, "?", {"type": "video", "video": "v"}),
                             "image": None, "video": None}),
    "names in addresses": (sample(user({"type": "image_url", "image_url": {"url": "img1.png"}})
                                  [0:1] + user({"type": "image", "path": "img2.png"})[0:1], *PICTURES),
                           {"messages": [{"role": "user", "content": [part]} for part in (
                               {"type": "image_url", "image_url": {"url": "1"}}, {"type": "image", "path": "2"})]}),
    "a number": (sample(5, ("a.txt", "x")), {"json": 5, "answer": "x"}),
    "not a number": ([("a.json", '{"answer": "x", "y": NaN}')], {"answer": "x"}),
}  # fmt: skip


@pytest.mark.parametrize("members, expected", RECORDS.values(), ids=RECORDS)
def test_records(write: Write, members: Any, expected: dict[str, Any]) -> None:
    [(value, _)] = records(write(pack(members)))
    found = shown(value)
    assert {name: found.get(name) for name in expected} == expected


BAD_SAMPLES = {
    "broken JSON": ([("a.json", '{"x":\n,}')], "a field json: found broken JSON (Expecting value: line 2 column 1"),
    "JSON in another encoding": ([("a.json", b'"\xff"')], "a field json: found byte 0xff, which is not UTF-8"),
    "lone surrogate": ([("a.json", b'"\\ud83d"')], "a field json: lone surrogate (\\ud83d)"),
    "deep JSON": ([("a.json", "[" * 10**6)], "a field json: found broken JSON"),
    "text in another encoding": ([("a.x.txt", b"caf\xe9")], "a field x.txt: found byte 0xe9, which is not UTF-8"),
    "long text": ([("a.txt", "x" * (MAX_TEXT_BYTES + 1))], f"found {MAX_TEXT_BYTES + 1} bytes, expected a text"),
    "two names": (sample({"image": ["x.png", "y.png"]}, ("a.jpg", b"p")),
                  "a: field 'image': found 'x.png', 'y.png' in its JSON, and the fields jpg, expected names of fields"),
    "one of two names": (sample({"image": ["img1.png", "y.png"]}, *PICTURES), "found 'img1.png', 'y.png'"),
}  # fmt: skip


@pytest.mark.parametrize("members, message", BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_bad_samples_are_errors_in_their_place(write: Write, members: Any, message: str) -> None:
    path = write(pack([*members, ("b.txt", "good")]))
    bad, good = records(path)
    assert isinstance(bad.value, UserError) and str(bad.value).startswith(f"{path}: a") and message in str(bad.value)
    assert good.value["answer"] == "good"
    if "field 'image'" in message:
        assert records(path, TarFiles(mapped=True))[0].value["image"] == ["x.png", "y.png"]


def test_a_file_that_changed_is_an_error(write: Write) -> None:
    path = write(pack([("a.txt", "one"), ("b.jpg", "x")], tarfile.USTAR_FORMAT))
    _, columns = scanned(path)
    for changed in ([("a.txt", "four"), ("b.jpg", "x")], [("c.txt", "one")]):
        path.write_bytes(pack(changed, tarfile.USTAR_FORMAT))
        with pytest.raises(UserError, match=f"{path}: a field txt: not what the index of its file says"):
            list(TarFiles().read(StoredFile(str(path)), columns, range(2)))
    os.truncate(path, 600)
    with pytest.raises(UserError, match="not what the index"):
        list(TarFiles().read(StoredFile(str(path)), columns, range(1)))


@pytest.mark.parametrize(
    "headers", [{"path": "a.txt"}, {"path": "a.txt", "size": "3"}, {"path": "a.txt", "comment": "x" * 3000}]
)
def test_a_short_name_in_an_extended_header_is_read(write: Write, headers: dict[str, str]) -> None:
    data = pack([("b.txt", "two"), ("PaxHeader.0", "one"), ("c.txt", "three")], pax_headers={})
    at = data.index(b"PaxHeader.0")
    member = bytearray(data[at : at + 512])
    if "size" in headers:
        member[124:136] = b"00000000000\0"
        member[148:156] = b"%06o\0 " % (256 + sum(member[:148]) + sum(member[156:]))
    path = write(data[:at] + extended(headers, b"x") + bytes(member) + data[at + 512 :])
    assert [found.value["answer"] for found in records(path)] == ["two", "one", "three"]
    _, columns = scanned(path)
    write(path.read_bytes().replace(b"path=a.txt", b"path=d.txt"))
    with pytest.raises(UserError, match="a field txt: not what the index"):
        list(TarFiles().read(StoredFile(str(path)), columns, range(3)))


def extended(headers: dict[str, str], kind: bytes) -> bytes:
    """An extended header of pax."""
    data = bytearray(tarfile.TarInfo.create_pax_global_header(headers))
    data[156:157] = kind
    data[148:156] = b"%06o\0 " % (256 + sum(data[:148]) + sum(data[156:512]))
    return bytes(data)


def test_the_work_of_extended_headers_is_linear(write: Write) -> None:
    """Their records are many, or they are given to many members, or they only begin like some that matter."""
    members = [(f"{k}.txt", "x") for k in range(3000)]
    small = pack(members)
    odd = b"1 GNU.sparse" * 80_000
    many = [
        extended({f"k{k}": "v" for k in range(50_000)}, b"g"),
        extended({"comment": odd.decode()}, b"g"),
        *(extended({f"k{k}": "v", "size": "1"}, b"g") for k in range(3000)),
    ]
    began = time.process_time()
    assert scanned(write(small))[0] == 3000
    usual = time.process_time() - began
    for headers in (*many[:2], b"".join(many[2:])):
        began = time.process_time()
        assert scanned(write(headers + small))[0] == 3000
        assert time.process_time() - began < 5 * usual + 1


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_that_no_system_has_are_refused(write: Write, format: int) -> None:
    assert len(records(write(pack([("x" * 4000 + ".txt", "one")], format)))) == 1
    with pytest.raises(UserError, match="damaged header at byte 0"):
        records(write(pack([("x" * 5000 + ".txt", "one")], format)))


def test_neighbours_are_read_ahead_together(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(pack([("a.jpg", "x"), ("b.jpg", bytes(300_000)), ("c.jpg", "y"), ("a.txt", "z")]))
    _, columns = scanned(path)
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, __: advised.append((start, size)))
    for numbers, expected in (([2, 0], [(0, 513), (301_568, 512 + 1 + 511 + 512 + 1)]), ([1], [(1024, 300_512)])):
        advised.clear()
        TarFiles().read_ahead(StoredFile(str(path)), columns, np.array(numbers))
        assert advised == expected
    TarFiles().read_ahead(StoredFile(str(path / "none")), columns, np.array([0]))
    TarFiles().read_ahead(StoredFile(str(path)), columns, np.zeros(0, np.int64))


# ---------------------------------------------------------------------------------------------------- data sets


def opened(path: Path | str, **fields: str) -> Dataset:
    entry = DatasetConfig(files=Pattern(str(path)), fields=fields)
    return Dataset("d", entry, Reading(item_fields({"vision": ("image", "video")})))


def test_data_sets(tmp_path: Path) -> None:
    for shard in range(2):
        own = {"qa": [{"q": f"Why {shard}?", "a": ["So."]}], "chat": TURNS}
        members = [("k1.jpg", f"p{shard}"), ("k1.json", json.dumps(own)), ("k1.txt", "A caption.")]
        (tmp_path / f"s{shard}.tar").write_bytes(pack(members))
    path = tmp_path / "s{0..1}.tar"
    data = opened(path)
    assert len(data) == 2 and data[1].where == f"{tmp_path}/s1.tar: k1"
    assert data[1].turns == (Turn("user", (IMAGES[0],)), Turn("assistant", "A caption."))
    assert raw(data[1].items[0].file) == b"p1"
    data = opened(path, image="jpg", question="json.qa.0.q", answer="json[qa][0][a]")
    assert data[1].turns == (Turn("user", (IMAGES[0], "Why 1?")), Turn("assistant", "So."))
    data = opened(path, conversations="json.chat")
    assert (
        data[0].turns == (Turn("user", (IMAGES[0], "What?")), Turn("assistant", "It."))
        and raw(data[0].items[0].file) == b"p0"
    )
    assert opened(path, answer="txt").digest == opened(path, answer="txt").digest != data.digest


def test_the_digest_does_not_depend_on_files(tmp_path: Path) -> None:
    members = [("k1.jpg", "p"), ("k1.txt", "x"), ("k2.jpg", "q"), ("k2.txt", "y")]
    (tmp_path / "all.tar").write_bytes(pack(members, tarfile.USTAR_FORMAT))
    (tmp_path / "b.tar").write_bytes(pack(members))
    assert opened(tmp_path / "all.tar").digest == opened(tmp_path / "b.tar").digest


def test_errors_name_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(pack([("k1.jpg", "p"), ("k1.json", "[1]")]))
    with pytest.raises(UserError, match=r"a\.tar: k1: field 'conversations\[0\]': found a number"):
        opened(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(GOOD[:700])
    with pytest.raises(UserError, match=r"^.*/a\.tar: ends within member"):
        opened(tmp_path / "a.tar")
