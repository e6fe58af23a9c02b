"""Parquet files: records and items of all types of columns, the cache of row groups, and damaged files."""

from __future__ import annotations

import base64
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from megatron_hetero.base.contents import InMemory, StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.records import Dataset
from megatron_hetero.data.sources import parquet, parquet_groups
from megatron_hetero.data.sources.formats import Columns, Place, RawRecord
from megatron_hetero.data.sources.parquet import Cell, ParquetFiles
from megatron_hetero.data.sources.parquet_groups import GroupCache, page_totals
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import IMAGES
from tests.unit.data.conftest import MemoryStore

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TURNS = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A disc."}]
ITEM = pa.struct({"bytes": pa.binary(), "path": pa.string()})
"""As `datasets` writes pictures and videos."""


def save(path: Path, columns: Any, **options: Any) -> StoredFile:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, **{"compression": "zstd", **options})
    return StoredFile(str(path))


def scanned(file: StoredFile, files: ParquetFiles) -> tuple[list[Place], dict[str, np.ndarray]]:
    columns: Columns = {}
    places = list(files.scan(file, columns))
    return places, {name: np.frombuffer(column, np.int64) for name, column in columns.items()}


def read(file: StoredFile, fields: Mapping[str, str] | None = None, items: Sequence[str] = ()) -> list[RawRecord]:
    files = ParquetFiles(fields or {}, items)
    places, columns = scanned(file, files)
    return list(files.read(file, columns, range(len(places))))


def values(file: StoredFile, *arguments: Any) -> list[Any]:
    return [value for value, _ in read(file, *arguments)]


def opened(value: Any) -> Any:
    """The value with the bytes of its items."""
    if isinstance(value, Cell):
        with value.open() as file:
            return file.read()
    if isinstance(value, dict):
        return {name: opened(each) for name, each in value.items()}
    return [opened(each) for each in value] if isinstance(value, list) else value


def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of leaves that are read from now on, with their row groups."""
    found, load = [], parquet_groups.load

    def noted(group: Any, leaves: Sequence[Any]) -> Any:
        found.extend(f"{leaf.path} {group.number}" for leaf in leaves)
        return load(group, leaves)

    monkeypatch.setattr(parquet_groups, "load", noted)
    return found


# -------------------------------------------------------------------------------------------- records and items


def test_records_as_datasets_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [[], [{"bytes": b"b", "path": "x/b.png"}], [{"bytes": b"c", "path": None}, {"bytes": b"d", "path": "d"}]]
    turns = pa.list_(pa.struct({"from": pa.string(), "value": pa.string()}))
    columns = {
        "id": pa.array(["1", "2", "3"]),
        "image": pa.array([{"bytes": b"a", "path": "a/1.png"}, {"bytes": b"", "path": None}, None], ITEM),
        "images": pa.array(images, pa.list_(ITEM)),
        "conversations": pa.array([TURNS] * 3, turns),
    }
    file = save(tmp_path / "a.parquet", pa.table(columns).replace_schema_metadata({"huggingface": "{}"}))
    noted = loads(monkeypatch)
    found = read(file)
    assert [where for _, where in found] == [f"{file} row {n}" for n in (1, 2, 3)]
    assert not [leaf for leaf in noted if "bytes" in leaf or "id" in leaf]
    first, second, third = [value for value, _ in found]
    assert third["image"] is None and first["images"] == [] and first["conversations"] == TURNS
    assert opened(first["image"]) == b"a" and opened(second["image"]) == b""
    assert opened([second["images"], third["images"]]) == [[b"b"], [b"c", b"d"]]
    cell = third["images"][1]
    assert str(cell) == f"column images[1] of {file} row 3" and cell.label == "images[1] d"
    assert second["images"][0].label == "images[0] b.png" and str(first["image"]) == f"column image of {file} row 1"
    assert first["image"].label == "image 1.png" and second["image"].label == "image"
    assert cell.version() == (*file.version(), 0, 2, "images[1]")
    assert len({cell, third["images"][0], *read(file)[2].value["images"]}) == 2


def test_an_item_goes_to_other_processes_as_its_bytes(tmp_path: Path) -> None:
    file = save(tmp_path / "a.parquet", {"answer": ["A"], "image": pa.array([{"bytes": b"a", "path": "1.png"}], ITEM)})
    cell = values(file)[0]["image"]
    copy = pickle.loads(pickle.dumps(cell))
    assert copy == InMemory(b"a", str(cell), "image 1.png", cell.version())
    again = pickle.loads(pickle.dumps(ParquetFiles({"answer": "answer"}, ["depth"])))
    _, columns = scanned(file, again)
    assert opened(next(again.read(file, columns, range(1))).value) == {"answer": "A", "image": b"a"}


TWO = [b"one", b"two"]
MESSAGE = pa.struct({"role": pa.string(), "content": pa.list_(pa.struct({"type": pa.string(), "image": ITEM}))})
CELLS = {
    "binary": (pa.binary(), [b"a", b"b"]),
    "some binary": (pa.binary(), [b"a", None]),
    "no binary": (pa.binary(), [None, None]),
    "large binary": (pa.large_binary(), [b"a", b"b"]),
    "list of binary": (pa.list_(pa.binary()), [TWO, [b"", None]]),
    "list of large binary": (pa.large_list(pa.large_binary()), [[], TWO]),
    "list of two": (pa.list_(pa.binary(), 2), [TWO, None]),
    "paths": (pa.string(), ["a.png", None]),
    "lists of paths": (pa.list_(pa.string()), [["a.png", "b.png"], []]),
    "nothing": (pa.null(), [None, None]),
}


@pytest.mark.parametrize("kind, cells", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("write_statistics", [True, False])
def test_columns_without_paths(tmp_path: Path, kind: Any, cells: list[Any], write_statistics: bool) -> None:
    columns = {"answer": ["A", "B"], "image": pa.array(cells, kind)}
    file = save(tmp_path / "a.parquet", columns, write_statistics=write_statistics)
    assert opened([value["image"] for value in values(file)]) == cells


A, B = {"bytes": b"a", "path": "a.png"}, {"bytes": b"b", "path": None}
PATH, EMPTY = {"bytes": None, "path": "p.png"}, {"bytes": None, "path": None}
STRUCTS = {
    "bytes": (ITEM, [A, B], [b"a", b"b"]),
    "bytes or nothing": (ITEM, [A, None], [b"a", None]),
    "paths": (ITEM, [PATH, None], ["p.png", None]),
    "mixed": (ITEM, [A, PATH, EMPTY, None], [b"a", "p.png", None, None]),
    "no type of paths": (pa.struct({"bytes": pa.binary(), "path": pa.null()}), [B, None], [b"b", None]),
    "no type of bytes": (pa.struct({"bytes": pa.null(), "path": pa.string()}), [PATH, None], ["p.png", None]),
    "bytes alone": (pa.struct({"bytes": pa.binary()}), [{"bytes": b"a"}, None], [b"a", None]),
    "more": (pa.struct({"bytes": pa.large_binary(), "rate": pa.int64()}), [{"bytes": b"a", "rate": 1}], [b"a"]),
    "lists": (pa.list_(ITEM), [[A, PATH], [], None, [None, B]], [[b"a", "p.png"], [], None, [None, b"b"]]),
    "lists of frames": (pa.list_(pa.list_(ITEM)), [[[A, B], [A]], [[]]], [[[b"a", b"b"], [b"a"]], [[]]]),
}


@pytest.mark.parametrize("kind, cells, expected", STRUCTS.values(), ids=STRUCTS)
@pytest.mark.parametrize("write_statistics", [True, False])
def test_columns_of_structs(
    tmp_path: Path, kind: Any, cells: list[Any], expected: list[Any], write_statistics: bool
) -> None:
    columns = {"answer": ["A"] * len(cells), "image": pa.array(cells, kind)}
    file = save(tmp_path / "a.parquet", columns, write_statistics=write_statistics, row_group_size=3)
    assert opened([value["image"] for value in values(file)]) == expected
    files = ParquetFiles({})
    _, index = scanned(file, files)
    for number, each in enumerate(expected):
        assert opened(next(files.read(file, index, range(number, number + 1))).value["image"]) == each


def without_nulls(value: Any) -> Any:
    """A value without the null fields of its structs."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return list(map(without_nulls, value)) if isinstance(value, list) else value


def test_pictures_between_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*items: Any) -> list[Any]:
        return [{"role": "user", "content": [{"type": "image", "image": item} for item in items]}, None]

    file = save(tmp_path / "a.parquet", {"messages": pa.array([show(A, None, B), [], show(A)], pa.list_(MESSAGE))})
    noted = loads(monkeypatch)
    found = values(file)
    assert not [leaf for leaf in noted if "bytes" in leaf]
    assert opened(found) == [
        {"messages": without_nulls(show(b"a", None, b"b"))},
        {"messages": []},
        {"messages": show(b"a")},
    ]
    assert found[0]["messages"][0]["content"][2]["image"].label == "messages[0].content[2].image"


TEXTS = {
    "large": (pa.large_string(), ["a", None, "日本"]),
    "view": (pa.string_view(), ["a", None, "日本"]),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), ["a", None, "a"]),
    "answers": (pa.list_(pa.string()), [["a", None], [], None]),
    "numbers": (pa.float32(), [0.5, None, 2.0]),
    "map": (pa.map_(pa.string(), pa.int64()), [[("a", 1)], [], None]),
}


@pytest.mark.parametrize("kind, texts", TEXTS.values(), ids=TEXTS)
def test_types_of_texts(tmp_path: Path, kind: Any, texts: list[Any]) -> None:
    file = save(tmp_path / "a.parquet", {"answer": pa.array(texts, kind)})
    assert [value["answer"] for value in values(file)] == texts


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
CELL = st.none() | st.fixed_dictionaries({"bytes": st.none() | st.binary(max_size=3), "path": st.none() | TEXT})
ROWS = st.fixed_dictionaries(
    {
        "messages": st.none()
        | st.lists(st.fixed_dictionaries({"role": st.none() | TEXT, "content": TEXT}), max_size=3),
        "image": CELL,
        "images": st.none() | st.lists(CELL, max_size=3),
    }
)
ROW_TYPE = pa.schema(
    {
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "image": ITEM,
        "images": pa.list_(ITEM),
    }
)


def of_cell(cell: Any) -> Any:
    return None if cell is None else cell["path"] if cell["bytes"] is None else cell["bytes"]


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(ROWS, min_size=1, max_size=9), size=st.integers(1, 9), cut=st.tuples(*[st.integers(0, 9)] * 2))
def test_any_rows_are_read_as_written(rows: list[Any], size: int, cut: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = save(Path(folder) / "a", pa.Table.from_pylist(rows, ROW_TYPE), row_group_size=size)
        files = ParquetFiles({})
        places, columns = scanned(file, files)
        assert len(places) == len(rows)
        chosen = range(*sorted(min(each, len(rows)) for each in cut))
        found = list(files.read(file, columns, chosen))
        assert [where for _, where in found] == [f"{file} row {number + 1}" for number in chosen]
        for (value, _), row in zip(found, rows[chosen.start : chosen.stop], strict=True):
            images = row["images"] and list(map(of_cell, row["images"]))
            expected = {"messages": without_nulls(row["messages"]), "image": of_cell(row["image"]), "images": images}
            assert opened(value) == expected


def codecs() -> list[str]:
    return ["none", *(name for name in ("snappy", "gzip", "brotli", "lz4", "zstd") if pa.Codec.is_available(name))]


@pytest.mark.parametrize("compression", codecs())
def test_compression(tmp_path: Path, compression: str) -> None:
    images = pa.array([{"bytes": bytes(1000), "path": None}] * 5, ITEM)
    file = save(tmp_path / "a.parquet", {"answer": ["A" * 100] * 5, "image": images}, compression=compression)
    assert opened(values(file)) == [{"answer": "A" * 100, "image": bytes(1000)}] * 5


def test_files_in_a_store(memory_store: MemoryStore) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"answer": ["A"], "image": pa.array([A], ITEM)}), buffer)
    memory_store.pipe("/folder/a.parquet", buffer.getvalue())
    assert opened(values(StoredFile("s3://folder/a.parquet"))) == [{"answer": "A", "image": b"a"}]


# ----------------------------------------------------------------------------------- columns, files, row groups


def test_columns_of_other_names_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("pdf", "img", "depth", "image")
    columns = {name: pa.array([{"bytes": name.encode() * 2000, "path": None}], ITEM) for name in names}
    meta = {"a.b": [{"c": "dotted"}], "a": [{"b": {"c": "nested"}}], "qa": [[{"q": "Q", "a": "A"}]]}
    file = save(tmp_path / "a.parquet", {**columns, **meta, "embedding": [[0.5] * 100]})
    noted = loads(monkeypatch)
    fields = {"image": "img", "question": "qa[0].q", "answer": "qa.0.a", "system": "a.b.c"}
    found = values(file, fields, ["depth"])
    assert opened(found) == [
        {"img": b"img" * 2000, "depth": b"depth" * 2000, "a.b": {"c": "dotted"}, "qa": meta["qa"][0]}
    ]
    assert {leaf.partition(".")[0] for leaf in noted} == {"img", "depth", "a", "qa"}
    assert {"pdf", "embedding", "image"}.isdisjoint(leaf.partition(".")[0] for leaf in noted)
    places, _ = scanned(file, ParquetFiles(fields, ["depth"]))
    assert 16_000 < places[0].size < 18_000  # 3 and 5 letters, 2000 times.


def test_each_file_has_columns_of_its_own(tmp_path: Path) -> None:
    one = save(tmp_path / "1.parquet", {"answer": ["A"], "image": [b"a"]})
    other = save(tmp_path / "2.parquet", {"images": pa.array([[A]], pa.list_(ITEM)), "texts": ["?"], "answer": ["B"]})
    files = ParquetFiles({})
    found = [next(files.read(file, scanned(file, files)[1], range(1))).value for file in (one, other)]
    assert opened(found) == [{"answer": "A", "image": b"a"}, {"images": [b"a"], "texts": "?", "answer": "B"}]


def test_places_are_those_of_row_groups(tmp_path: Path) -> None:
    path, table = tmp_path / "a.parquet", pa.table({"answer": list("abcdefg"), "image": [bytes(1000)] * 7})
    with pq.ParquetWriter(path, table.schema) as writer:
        for start, stop in ((0, 0), (0, 3), (3, 3), (3, 7), (7, 7)):
            writer.write_table(table.slice(start, stop - start))
    file, files = StoredFile(str(path)), ParquetFiles({})
    places, columns = scanned(file, files)
    assert [(place.block, place.share) for place in places] == [(1, 3 / 7)] * 3 + [(3, 1.0)] * 4
    assert columns["groups"].tolist() == [0, 0, 3, 3, 7]
    assert "".join(value["answer"] for value, _ in files.read(file, columns, range(1, 6))) == "bcdef"
    footer = pq.read_metadata(path)
    assert footer.num_row_groups == 5
    sizes = [footer.row_group(1).column(k).total_uncompressed_size for k in range(2)]
    assert places[0].size == sum(sizes) // 3


@pytest.mark.parametrize("table", [{"answer": pa.array([], pa.string()), "image": pa.array([], ITEM)}, {}])
def test_files_without_rows(tmp_path: Path, table: Any) -> None:
    file, files = save(tmp_path / "a.parquet", table), ParquetFiles({})
    assert scanned(file, files)[0] == []
    assert list(files.read(file, scanned(file, files)[1], range(0))) == []


def test_scanning_reads_the_footer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(tmp_path / "a.parquet", {"answer": ["A"] * 1000, "image": [b"a"] * 1000}, row_group_size=100)
    data = bytearray(Path(file.name).read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[4:footer] = bytes(footer - 4)
    Path(file.name).write_bytes(data)
    assert len(scanned(file, ParquetFiles({}))[0]) == 1000
    with pytest.raises(UserError, match=r"row group 0 \(rows 1 to 100\): found data "):
        values(file)


# ---------------------------------------------------------------------------------------------------- the cache


def groups_of_items(path: Path, groups: int = 6, size: int = 10_000) -> StoredFile:
    rng = np.random.default_rng(0)
    images = pa.array([{"bytes": rng.bytes(size), "path": None} for _ in range(2 * groups)], ITEM)
    columns = {"answer": list(map(str, range(2 * groups))), "image": images}
    return save(path, columns, row_group_size=2)


def test_a_row_group_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, files = groups_of_items(tmp_path / "a.parquet"), ParquetFiles({})
    _, columns = scanned(file, files)
    noted = loads(monkeypatch)
    found = [value for value, _ in files.read(file, columns, range(4))]
    assert noted == ["answer 0", "image.path 0", "answer 1", "image.path 1"]
    assert opened(found)[3] == opened(next(files.read(file, columns, range(3, 4))).value)
    assert noted[4:] == ["image.bytes 0", "image.path 0", "image.bytes 1", "image.path 1"]


def test_least_recently_used_row_groups_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_CACHE", GroupCache(50_000))  # Two row groups.
    file, files = groups_of_items(tmp_path / "a.parquet"), ParquetFiles({})
    _, columns = scanned(file, files)
    cells = [value["image"] for value, _ in files.read(file, columns, range(12))]
    noted = loads(monkeypatch)
    for number in (0, 2, 0, 4, 0, 2):
        opened(cells[number])
    assert [leaf for leaf in noted if "bytes" in leaf] == [f"image.bytes {group}" for group in (0, 1, 2, 1)]


def test_a_row_group_that_is_too_large_for_the_cache_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_CACHE", GroupCache(10))
    file, files = groups_of_items(tmp_path / "a.parquet"), ParquetFiles({})
    _, columns = scanned(file, files)
    noted = loads(monkeypatch)
    for _ in range(3):
        opened([value for value, _ in files.read(file, columns, range(2))])
    assert noted == ["answer 0", "image.path 0", "image.bytes 0", "image.path 0"]


def test_threads_load_a_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, files = groups_of_items(tmp_path / "a.parquet", size=100_000), ParquetFiles({})
    _, columns = scanned(file, files)
    noted, start = loads(monkeypatch), threading.Barrier(8)

    def work() -> list[Any]:
        start.wait()
        return opened([value for value, _ in files.read(file, columns, range(12))])

    with ThreadPoolExecutor(8) as pool:
        results = [job.result() for job in [pool.submit(work) for _ in range(8)]]
    assert all(result == results[0] for result in results) and len(noted) == len(set(noted)) + 6
    assert results[0] == opened(values(file))


def test_an_error_of_loading_reaches_all_threads_and_is_forgotten() -> None:
    group: Any = SimpleNamespace(key=0, size=lambda _: 1)
    cache, started, go = GroupCache(100), threading.Event(), threading.Event()

    def fail() -> Any:
        started.set()
        go.wait()
        raise UserError("broken")

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(cache.get, group, "", (), fail)]
        started.wait()
        jobs.append(pool.submit(cache.get, group, "", (), fail))
        go.set()
        for job in jobs:
            with pytest.raises(UserError, match="broken"):
                job.result()
    assert cache.get(group, "", (), lambda: np.zeros(3)).tolist() == [0, 0, 0]


def test_row_groups_are_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, files = groups_of_items(tmp_path / "a.parquet"), ParquetFiles({})
    footer, noted = pq.read_metadata(file.name), list[tuple[int, int]]()
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, advice: noted.append((start, size)))
    files.read_ahead(file, {}, np.array([5, 4, 2]))
    chunks = [footer.row_group(group).column(k) for group in (2, 1) for k in range(footer.num_columns)]
    starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
    assert noted == list(zip(starts, [chunk.total_compressed_size for chunk in chunks], strict=True))
    # Whoever reads meets the error.
    Path(file.name).write_bytes(b"PAR1" + bytes(1000))
    files.read_ahead(file, {}, np.array([0]))


# -------------------------------------------------------------------------------------------------- damaged files


def damaged(tmp_path: Path, change: Callable[[bytearray], None]) -> StoredFile:
    images = pa.array([{"bytes": bytes(1000), "path": None}] * 4, ITEM)
    file = save(tmp_path / "a.parquet", {"answer": ["A"] * 4, "image": images}, row_group_size=2)
    data = bytearray(Path(file.name).read_bytes())
    change(data)
    Path(file.name).write_bytes(data)
    return file


DAMAGES: dict[str, Callable[[bytearray], None]] = {
    "empty": lambda data: data.clear(),
    "cut": lambda data: data.__delitem__(slice(len(data) // 2, None)),
    "one byte missing": lambda data: data.__delitem__(-1),
    "beginning missing": lambda data: data.__delitem__(slice(0, len(data) - 100)),
    "another format": lambda data: data.__setitem__(slice(0, None), b'{"answer": "A"}\n' * 9),
    "footer too long": lambda data: data.__setitem__(slice(-8, -4), b"\xff\xff\xff\x7f"),
    "footer of zeros": lambda data: data.__setitem__(slice(-500, -8), bytes(492)),
}


@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_what_is_no_parquet_file_is_refused(tmp_path: Path, change: Callable[[bytearray], None]) -> None:
    file = damaged(tmp_path, change)
    with pytest.raises(UserError) as refused:
        values(file)
    assert str(refused.value).startswith(f"{file}: found data ")
    assert "\n" not in str(refused.value) and "Copy the file again" in str(refused.value)


def test_damaged_bytes_are_found_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    images = pa.array([{"bytes": bytes(1000), "path": None}] * 4, ITEM)
    options = {"row_group_size": 2, "write_page_checksum": True, "compression": "none", "use_dictionary": False}
    file = save(path, {"answer": ["A"] * 4, "image": images}, **options)
    chunk = pq.read_metadata(path).row_group(1).column(1)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 5] ^= 1
    path.write_bytes(data)
    found = values(file)
    assert opened(found[:2]) == [{"answer": "A", "image": bytes(1000)}] * 2
    place = rf"{path} row group 1 \(rows 3 to 4\): found data .*\(.*CRC"
    for _ in range(2):
        with pytest.raises(UserError, match=place):
            found[2]["image"].open()
    with pytest.raises(UserError, match=place):
        pickle.dumps(found[3]["image"])


def test_no_byte_of_a_footer_can_end_the_process(tmp_path: Path) -> None:
    file = save(tmp_path / "a.parquet", {"answer": ["A", "B"], "images": pa.array([[A], [B]], pa.list_(ITEM))})
    data = Path(file.name).read_bytes()
    footer = range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), data.rindex(b"ARROW:schema"))
    for at in footer:
        Path(file.name).write_bytes(data[:at] + bytes([(data[at] + 1) % 256]) + data[at + 1 :])
        try:
            opened(values(file))
        except UserError as error:
            assert str(file) in str(error)


def test_a_footer_that_lies(tmp_path: Path) -> None:
    file = save(tmp_path / "a.parquet", {"answer": ["A"] * 1000}, use_dictionary=False)
    data = Path(file.name).read_bytes()
    # Thrift writes 1000 as these two bytes, and 1001 as d2 0f. The last one is of the row group.
    at = data.rindex(b"\xd0\x0f")
    Path(file.name).write_bytes(data[:at] + b"\xd2\x0f" + data[at + 2 :])
    with pytest.raises(UserError, match=r"row group 0 \(rows 1 to 1001\): found 1,000 rows, expected 1,001"):
        values(file)


@pytest.mark.parametrize("limit, value", [("MAX_GROUP_ROWS", 3), ("MAX_GROUP_BYTES", 30_000)])
def test_large_row_groups_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(parquet_groups, limit, value)
    columns = {"answer": ["A"] * 4, "image": [bytes(10_000)] * 4}
    assert len(values(save(tmp_path / "a.parquet", columns, row_group_size=1))) == 4
    file = save(tmp_path / "b.parquet", columns, use_dictionary=False)
    with pytest.raises(UserError, match=r"row group 0 .*found 4 rows with 40,\d{3} bytes.* 100 to 1,000 rows"):
        values(file)


def test_large_row_groups_are_decompressed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_groups, "BATCH_BYTES", 3000)
    monkeypatch.setattr(parquet, "BATCH_ROWS", 7)
    rng = np.random.default_rng(0)
    columns = {
        "answer": [str(k) * 50 for k in range(100)],
        "images": pa.array([[{"bytes": rng.bytes(k), "path": None}] * (k % 4) for k in range(100)], pa.list_(ITEM)),
        "image": pa.array([None if k % 3 else {"bytes": rng.bytes(k), "path": f"{k}"} for k in range(100)], ITEM),
    }
    file = save(tmp_path / "a.parquet", columns, write_statistics=["answer", "images.list.element.bytes"])
    expected = pq.read_table(file.name).to_pylist()
    for row in expected:
        row.update(image=of_cell(row["image"]), images=list(map(of_cell, row["images"])))
    assert opened(values(file)) == expected


READ_LITTLE = """
import resource, sys
from megatron_hetero.base.contents import StoredFile
from megatron_hetero.data.sources.parquet import ParquetFiles
from megatron_hetero.data.sources.formats import finished
import pyarrow.parquet
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
for name in sys.argv[1:]:
    file, files, columns = StoredFile(name), ParquetFiles({}), {}
    rows = len(list(files.scan(file, columns)))
    try:
        [found, *_] = files.read(file, {key: finished(column) for key, column in columns.items()}, range(rows))
        found.value.get("image", found.value.get("images", [None])[0]).open()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_dictionary_that_is_repeated_takes_no_memory(tmp_path: Path) -> None:
    # 20 GiB in columns of 1 MiB: texts, lists of them, pictures, and lists of them.
    many, one = 20 << 10, "x" * (1 << 20)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * many, pa.int32()), pa.array([one]))
    items = pa.DictionaryArray.from_arrays(texts.indices, pa.array([one.encode()]))
    items = pa.StructArray.from_arrays([items, pa.nulls(many, pa.string())], ["bytes", "path"])
    columns: list[dict[str, Any]] = [
        {"answer": texts},
        {"answer": pa.ListArray.from_arrays([0, many], texts)},
        {"answer": ["A"] * many, "image": items},
        {"answer": ["A"], "images": pa.ListArray.from_arrays([0, many], items)},
    ]
    options = {"store_schema": False, "dictionary_pagesize_limit": 1 << 30, "data_page_size": 1 << 30}
    files = [save(tmp_path / f"{k}.parquet", each, **options) for k, each in enumerate(columns)]
    assert all(Path(file.name).stat().st_size < 100_000 for file in files)
    argv = [sys.executable, "-c", READ_LITTLE, *(file.name for file in files)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == len(files)
    for file, message in zip(files, said, strict=True):
        start = rf"UserError: {file} row group 0 .*: found [\d,]+ rows with 2\d,\d{{3}},\d{{3}},\d{{3}} bytes, expected"
        assert re.match(start, message), message


PREFIXES: dict[str, Any] = {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}
REPEATED = {
    "a list of prefixes": (pa.ListArray.from_arrays([0, 1000], pa.array(["x" * 2000] * 1000)), PREFIXES),
    "a list of nulls": (pa.ListArray.from_arrays([0, 50_000], pa.nulls(50_000, pa.string())), {}),
    "nulls of a fixed size": (pa.array([None] * 3, pa.list_(pa.string(), 50_000)), {}),
    "bytes of a fixed size": (pa.array([b"x" * 2000] + [None] * 1000, pa.binary(2000)), {}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_other_values_that_are_stored_small_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(parquet_groups, "MAX_GROUP_BYTES", 1_000_000)
    monkeypatch.setattr(parquet_groups, "_batches", None)  # Nothing is decoded.
    column, options = REPEATED[name]
    file = save(tmp_path / "a.parquet", {"answer": column}, **options)
    assert Path(file.name).stat().st_size < 10_000
    with pytest.raises(
        UserError, match=r"row group 0 .*: found [\d,]+ rows with \d+,\d{3},\d{3} bytes, expected at most"
    ):
        values(file)


def noted_batches(monkeypatch: pytest.MonkeyPatch, most: int) -> list[tuple[int, list[int]]]:
    """Rows in a batch and leaves by dictionary, from now on, with a limit of decoded bytes and caches of their own."""
    noted, batches = [], parquet_groups._batches
    monkeypatch.setattr(parquet_groups, "_batches", lambda *each: noted.append(each[-2:]) or batches(*each))
    monkeypatch.setattr(parquet_groups, "MAX_GROUP_BYTES", most)
    monkeypatch.setattr(parquet, "_CACHE", GroupCache(1 << 20))
    monkeypatch.setattr(parquet, "_TEXT_CACHE", GroupCache(1 << 20))
    return noted


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "list", "struct", "map"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_dictionary_counts_by_the_values_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, version: str
) -> None:
    texts = ["x" * 5000, *"abcdefgh" * 50, *(f"{k:050}" for k in range(100))]  # The last ones are not in a dictionary.
    answers: dict[str, Any] = {
        "list": pa.array([[text, None, text] for text in texts]),
        "struct": pa.array([[{"a": {"b": text}}, {}] for text in texts]),
        "binary": pa.array([text.encode() for text in texts]),
        "map": pa.array([[(text, text[::-1])] for text in texts], pa.map_(pa.string(), pa.string())),
    }
    column = answers.get(kind, pa.array(texts, "large_string" if kind == "large_string" else "string"))
    options = {"data_page_version": version, "dictionary_pagesize_limit": 5000, "write_batch_size": 200}
    file = save(tmp_path / "a.parquet", {"answer": ["A"] * len(texts), "image": column}, **options)
    expected, noted = opened(values(file)), noted_batches(monkeypatch, 200_000)
    assert opened(values(file)) == expected
    assert any(by_dictionary for _, by_dictionary in noted)
    repeated = pa.concat_arrays([column[:1]] * 50)
    file = save(tmp_path / "b.parquet", {"answer": ["A"] * 50, "image": repeated}, **options)
    with pytest.raises(UserError, match=r"row group 0 .*: found 50 rows with [25]\d\d,\d{3} bytes, expected at most"):
        opened(values(file))


@pytest.mark.parametrize("kind", ["string", "binary", "extension"])
def test_prefixes_count_while_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    texts, options = [f"{k:04}" * 10 for k in range(1000)], PREFIXES
    if kind == "extension":  # As dictionaries they would be decoded, too.
        options = {"dictionary_pagesize_limit": 1 << 20}

    def stored(texts: list[str], name: str) -> StoredFile:
        column = pa.array(texts, pa.binary() if kind == "binary" else pa.string())
        column = pa.ExtensionArray.from_storage(pa.json_(pa.string()), column) if kind == "extension" else column
        return save(tmp_path / name, {"answer": ["A"] * len(texts), "image": column}, **options)

    file = stored(texts, "a.parquet")
    expected, noted = opened(values(file)), noted_batches(monkeypatch, 200_000)
    monkeypatch.setattr(parquet_groups, "BATCH_BYTES", 1_000_000)
    assert opened(values(file)) == expected
    assert 5 < noted[-1][0] < 30 and 1 not in noted[-1][1]
    # 2 MB in all: the rest is not decoded.
    with pytest.raises(
        UserError, match=r"row group 0 .*: found 1,000 rows with [2-6]\d\d,\d{3} bytes, expected at most"
    ):
        opened(values(stored(["x" * 2000] * 1000, "b.parquet")))


def test_four_megabytes_of_prefixes_are_read(tmp_path: Path) -> None:
    texts = [np.random.default_rng(k).bytes(200).hex() for k in range(10_000)]
    assert [each["answer"] for each in values(save(tmp_path / "a.parquet", {"answer": texts}, **PREFIXES))] == texts


def test_no_byte_of_a_page_can_hide_what_it_decodes_to(tmp_path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 20, pa.int32()), pa.array(["a" * 9, "b"]))
    for options in ({}, {"data_page_version": "2.0"}, {"use_dictionary": False}):
        file = save(tmp_path / "a.parquet", {"answer": texts}, store_schema=False, compression="none", **options)
        data, expected = Path(file.name).read_bytes(), values(file)
        chunk = pq.read_metadata(file.name).row_group(0).column(0)
        for at in range(4, 4 + chunk.total_compressed_size):
            change = 1 if at % 2 else 128
            Path(file.name).write_bytes(data[:at] + bytes([(data[at] + change) % 256]) + data[at + 1 :])
            parquet._TEXT_CACHE._entries.clear()
            try:
                found = values(file)
            except UserError as error:
                assert "row group 0" in str(error)
            else:
                assert len(found) == len(expected)


LARGE: dict[str, tuple[Any, Any]] = {
    "text": (pa.string(), "x" * (1 << 23)),
    "large text": (pa.large_string(), "x" * (1 << 23)),
    "text of a dictionary": (pa.dictionary(pa.int32(), pa.string()), "x" * (1 << 23)),
    "list": (pa.list_(pa.string()), ["x" * 1000] * 9000),
    "list of nothing": (pa.list_(pa.struct({"a": pa.bool_(), "b": pa.null()})), [{}] * 3_000_000),
    "map": (pa.map_(pa.string(), pa.string()), [("x" * (1 << 22), "y" * (1 << 22))]),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_texts_are_errors_of_their_rows(tmp_path: Path, name: str) -> None:
    kind, large = LARGE[name]
    small = large[:1]
    if name == "map":
        small = [("x", "y")]
    found = values(save(tmp_path / "a.parquet", {"answer": pa.array([small, small, large, small], kind)}))
    assert [isinstance(value, UserError) for value in found] == [False, False, True, False]
    message = rf"{tmp_path}/a.parquet row 3: found [\d,]+ bytes of text, expected .* 8,388,608 bytes"
    assert re.match(message, str(found[2])), "another message"
    assert found[0] == found[3], "rows beside it changed"


BAD = {
    "missing": ({"caption": ["x"]}, {"answer": "caption", "image": "jpg.0"}, "columns caption", "a column jpg for"),
    "no text": ({"jpg": [b"x"], "txt": ["x"]}, {}, "columns jpg, txt", "conversations, messages", "in `fields`"),
    "bytes for texts": ({"answer": [b"x"]}, {}, "found bytes in column answer, expected texts"),
    "mapped bytes": ({"jpg": [b"x"]}, {"question": "jpg"}, "found bytes in column jpg, expected texts"),
}


@pytest.mark.parametrize("columns, fields, parts", [(each[0], each[1], each[2:]) for each in BAD.values()], ids=BAD)
def test_unfit_columns(tmp_path: Path, columns: Any, fields: Any, parts: Sequence[str]) -> None:
    file = save(tmp_path / "a.parquet", columns)
    with pytest.raises(UserError) as refused:
        values(file, fields)
    assert str(refused.value).startswith(f"{file}: ") and all(part in str(refused.value) for part in parts)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], ["answer", "answer"])
    with pytest.raises(UserError, match="two columns answer"):
        values(save(tmp_path / "a.parquet", table))


def test_a_text_that_is_not_utf_8_is_an_error_of_its_row(tmp_path: Path) -> None:
    ends = pa.py_buffer(struct.pack("<4i", 0, 1, 3, 4))
    texts = pa.Array.from_buffers(pa.string(), 3, [None, ends, pa.py_buffer(b"a\xff\xfec")])
    file = save(tmp_path / "a.parquet", {"answer": texts})
    first, bad, last = values(file)
    assert (first, last) == ({"answer": "a"}, {"answer": "c"})
    assert isinstance(bad, UserError) and str(bad).startswith(f"{file} row 2: found a value ")


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_files(tmp_path: Path, plaintext_footer: bool) -> None:
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def __init__(self, config: Any) -> None:
            super().__init__()

        def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
            return base64.b64encode(key_bytes)

        def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
            return base64.b64decode(wrapped_key)

    settings = encryption.EncryptionConfiguration(
        footer_key="f", column_keys={"c": ["answer"]}, plaintext_footer=plaintext_footer
    )
    factory = encryption.CryptoFactory(Keys)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
    file = save(tmp_path / "a.parquet", {"answer": ["A"]}, encryption_properties=properties)
    with pytest.raises(UserError, match=r"a\.parquet: encrypted \(.*without encryption"):
        values(file)


def test_files_that_are_not_there_are_left_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        values(StoredFile(str(tmp_path / "a.parquet")))
    with pytest.raises(IsADirectoryError):
        values(StoredFile(str(tmp_path)))


def test_a_file_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    file, files = groups_of_items(tmp_path / "a.parquet"), ParquetFiles({})
    _, columns = scanned(file, files)
    cell = list(files.read(file, columns, range(12)))[11].value["image"]
    for rows in (12, 1, 0):
        save(tmp_path / "a.parquet", {"answer": ["A"] * rows, "image": [b""] * rows}, row_group_size=3)
        for numbers in (range(3, 4), range(20, 21)):
            with pytest.raises(UserError, match="not what the index"):
                next(files.read(file, columns, numbers))
        with pytest.raises(UserError, match="not what the index"):
            cell.open()


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        ParquetFiles({})


# ------------------------------------------------------------------------------------------------- as a data set


def dataset(file: StoredFile, fields: Mapping[str, str] | None = None) -> Dataset:
    return Dataset("shapes", DatasetConfig(files=Pattern(file.name), fields=fields or {}))


def test_a_data_set_of_pictures(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4)).save(buffer, "PNG")
    picture = {"bytes": buffer.getvalue(), "path": "disc.png"}
    pairs = [[{"user": "What?", "assistant": "A disc.", "source": "shapes"}], [{"user": "And?", "assistant": "Two."}]]
    columns = {"images": pa.array([[picture], [picture] * 2], pa.list_(ITEM)), "texts": pairs}
    data = dataset(save(tmp_path / "a.parquet", columns))
    assert data[0].turns == (Turn("user", (IMAGES[0], "What?")), Turn("assistant", "A disc."))
    assert len(data[1].items) == 2 and data[1].where == f"{tmp_path / 'a.parquet'} row 2"
    with data[1].item(1).content.open() as file, Image.open(file) as image:
        assert image.size == (6, 4)
    moved = save(tmp_path / "b.parquet", columns, row_group_size=1, compression="none")
    assert dataset(moved).digest == data.digest


@pytest.mark.parametrize(
    "image, found",
    [(pa.array([7]), "a number"), (pa.array([{"url": "a"}]), "an object"), (pa.array([[7]]), "a number")],
)
def test_a_column_of_items_of_another_type(tmp_path: Path, image: Any, found: str) -> None:
    file = save(tmp_path / "a.parquet", {"answer": ["A"], "image": image})
    with pytest.raises(UserError, match=rf"a\.parquet row 1: field 'image'.*: found {found}"):
        dataset(file)


def test_pages_that_are_not_compressed_count_as_stored(tmp_path: Path) -> None:
    """pyarrow does not read what their headers say of the size when decompressed."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 10, pa.int32()), pa.array(["x" * (1 << 16)]))
    file = Path(save(tmp_path / "a.parquet", {"answer": texts}, store_schema=False, compression="none").name)
    data, chunk = file.read_bytes(), pq.ParquetFile(file).metadata.row_group(0).column(0)
    start, size = chunk.dictionary_page_offset, bytes([0x88, 0x80, 0x08])  # 65,540, twice: as stored, and before
    assert data[start:].index(size) == 3
    forged = data[: start + 3] + bytes([0x82, 0x80, 0x00]) + data[start + 6 :]
    found, expected = (page_totals(each[start:][: chunk.total_compressed_size]) for each in (forged, data))
    assert found == expected and found.repeated > 10 << 16
