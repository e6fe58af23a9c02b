"""Indexes: computed once, stored whole, and never used for other files than they were computed from."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources import index
from megatron_hetero.data.sources.index import Indexer
from megatron_hetero.models.items import pictures
from megatron_hetero.models.items.types import Piece
from tests.support.items import annotated
from tests.support.mutations import changed_index


def write(path: Path, count: int, bad: tuple[int, ...] = ()) -> Path:
    with open(path, "w") as file:
        for k in range(count):
            turns = [
                {"from": "human", "value": f"<image>What {k}?"},
                {"from": "gpt", "value": "" if k in bad else "It."},
            ]
            file.write(json.dumps({"image": f"{k}.png", "conversations": turns}) + "\n")
    return path


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """Opens `d.jsonl` with a stored index; `opened.computed` counts."""
    real = Indexer._computed

    def computed(self: Indexer, files: Any) -> Any:
        calls.append(self.name)
        return real(self, files)

    def open_(cache: Path | None = None, **options: Any) -> Dataset:
        entry = DatasetConfig(annotations=tmp_path / "d.jsonl", images=tmp_path)
        return Dataset("d", entry, Reading(cache=cache or tmp_path / "cache", **options))

    calls: list[str] = []
    open_.calls = calls  # type: ignore[attr-defined]
    monkeypatch.setattr(Indexer, "_computed", computed)
    return open_


def computed(opened: Any) -> int:
    return len(opened.calls)


def stored(tmp_path: Path) -> Path:
    [path] = (tmp_path / "cache").glob("*.index")
    return path


def test_an_index_is_computed_once_and_anew_if_its_file_changes(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d.jsonl", 30)
    first = opened()
    again = opened()
    assert computed(opened) == 1
    assert [again[k] for k in range(30)] == [first[k] for k in range(30)] and again.digest == first.digest
    assert again[7].items[0].file == "7.png" and again[7].where.endswith("d.jsonl:8")
    write(tmp_path / "d.jsonl", 31)
    assert len(opened()) == 31 and computed(opened) == 2
    os.utime(tmp_path / "d.jsonl", ns=(1, 1))
    assert opened().digest != first.digest and computed(opened) == 3
    # As copies on two nodes, which share a cache: neither replaces what the other has mapped.
    for at, count in ((2, 4), (1, 4), (2, 4)):
        os.utime(tmp_path / "d.jsonl", ns=(at, at))
        assert len(opened()) == 31 and computed(opened) == count
    (tmp_path / "cache/f.index").touch()
    write(tmp_path / "other.jsonl", 3)
    Dataset(
        "other", DatasetConfig(annotations=tmp_path / "other.jsonl", images=tmp_path), Reading(cache=tmp_path / "cache")
    )
    monkeypatch.setattr(index, "MAX_VERSIONS", 2)
    os.utime(tmp_path / "d.jsonl", ns=(3, 3))
    assert len(opened()) == 31 and computed(opened) == 6
    assert len([*(tmp_path / "cache").iterdir()]) == 7, "jobs may have mapped each of the five of these data"
    # A month later they are no longer used, but for those that a job opens.
    month_ago = time.time() - 31 * 86_400
    for path in (tmp_path / "cache").iterdir():
        os.utime(path, (month_ago, month_ago))
    for at, count in ((1, 6), (2, 6), (3, 6), (4, 7)):
        os.utime(tmp_path / "d.jsonl", ns=(at, at))
        assert len(opened()) == 31 and computed(opened) == count
    assert len([*(tmp_path / "cache").iterdir()]) == 6, "these four, that of other data, and a file of somebody"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-70],
        lambda data: b"",
        lambda data: data[:900] + b"!" + data[901:],
        lambda data: b"\xff" * 64 + data[64:],
    ],
)
def test_damaged_indexes_are_not_used(tmp_path: Path, opened: Any, damage: Callable[[bytes], bytes]) -> None:
    write(tmp_path / "d.jsonl", 30)
    expected = opened().digest
    path = stored(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert opened().digest == expected and computed(opened) == 2
    assert opened()[29].where.endswith(":30") and computed(opened) == 2


def put(name: str, at: int, value: int) -> Callable[..., None]:
    return lambda arrays, header: arrays[name].__setitem__(at, value)


FORGED: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    **{f"{name}[{at}] = {value}": put(name, at, value)
       for name in ("", "starts", "sizes", "blocks", "starts of files", "bad of files", "lines of files")
       for at in (0, -1) for value in (-1, 1 << 40, -(1 << 63))},
    "fewer records": lambda arrays, header: arrays.update({"": np.array([0, 7])}),
    "no column": lambda arrays, header: arrays.pop("blocks"),
    "no starts of a column": lambda arrays, header: arrays.pop("blocks of files"),
    "other files": lambda arrays, header: header["files"].append(["/etc/passwd", ["/etc/passwd", 1, 1]]),
    "texts for numbers": lambda arrays, header: header.update(last={"": ["0", [], None]}),
    "objects": lambda arrays, header: header.update(last={"": [0, 1, "|O"]}),
    "a place before the file": lambda arrays, header: header.update(last={"": [-8, 1, "<i8"]}),
    "a large number": lambda arrays, header: header.update(last={"": [1e400, 1 << 80, "<i8"]}),
    "no files": lambda arrays, header: header.update(files=None),
    "problems that are none": lambda arrays, header: header.update(problems=7),
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
def test_figures_that_do_not_fit_are_not_used(tmp_path: Path, opened: Any, forged: str) -> None:
    write(tmp_path / "d.jsonl", 30)
    expected = opened()
    path = stored(tmp_path)
    changed_index(path, lambda arrays, header: None)
    assert opened()[29] == expected[29] and computed(opened) == 1
    changed_index(path, FORGED[forged])
    again = opened()
    assert [again[k] for k in range(30)] == [expected[k] for k in range(30)] and computed(opened) == 2


def test_figures_of_tars_and_headers_that_do_not_fit_are_not_used(tmp_path: Path, opened: Any) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for k in range(5):
            info = tarfile.TarInfo(f"{k}.txt")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))

    def data() -> Dataset:
        return Dataset(
            "t", DatasetConfig(files=Pattern(f"{tmp_path}/a.tar")), Reading(cache=tmp_path / "cache", readers={})
        )

    expected = [*data()]
    for name in ("starts", "sizes", "fields", "key_ends", "field_ends", "name_ends", "item_ends"):
        for at, value in ((0, -1), (0, 1 << 40), (-1, -1), (-1, 1 << 40)):
            before = computed(opened)
            changed_index(stored(tmp_path), put(name, at, value))
            assert [*data()] == expected and computed(opened) == before + 1, (name, at, value)


def test_an_index_reads_the_files_that_were_asked_for(tmp_path: Path, opened: Any) -> None:
    write(tmp_path / "d.jsonl", 30)
    secret = write(tmp_path / "secret.jsonl", 30, bad=(3,))
    opened()
    changed_index(stored(tmp_path), lambda arrays, header: header["files"][0].__setitem__(0, str(secret)))
    assert opened()[3].where == f"{tmp_path}/d.jsonl:4"


def other_owner(path: Path) -> None:
    os.chown(path, 12345, -1)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".other"))
    path.symlink_to(path.with_suffix(".other"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


OTHERS = {
    "others may write": lambda path: path.chmod(0o666),
    "a group may write": lambda path: path.chmod(0o664),
    "a link": link,
    "a pipe": pipe,
    "another owner": pytest.param(other_owner, marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root")),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_an_index_that_is_not_our_own_is_not_used(tmp_path: Path, opened: Any, change: Callable[[Path], None]) -> None:
    write(tmp_path / "d.jsonl", 30)
    umask = os.umask(0)
    try:
        opened()
    finally:
        os.umask(umask)
    assert len(opened()) == 30 and computed(opened) == 1
    change(stored(tmp_path))
    assert len(opened()) == 30 and computed(opened) == 2
    assert len(opened()) == 30 and computed(opened) == 2, "it has been replaced"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_an_index_of_the_owner_of_its_folder_is_used(tmp_path: Path, opened: Any) -> None:
    # As on NFS with root_squash.
    write(tmp_path / "d.jsonl", 30)
    opened()
    other_owner(stored(tmp_path))
    other_owner(tmp_path / "cache")
    assert len(opened()) == 30 and computed(opened) == 1


def test_indexes_that_cannot_be_ones_own_are_said(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "d.jsonl", 30)
    change = os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: change(descriptor, 0o666))
    assert len(opened()) == 30
    assert "index of data set 'd'" in (said := capfd.readouterr().err)
    assert "changed by others)" in said


def test_users_of_a_shared_folder_have_indexes_of_their_own(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "d.jsonl", 30)
    opened()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    opened()
    assert computed(opened) == 2 and len(list((tmp_path / "cache").glob("*.index"))) == 2


def test_settings_that_records_depend_on_have_indexes_of_their_own(tmp_path: Path, opened: Any) -> None:
    write(tmp_path / "d.jsonl", 3)
    opened()
    (tmp_path / "e.jsonl").write_text("")
    entry = DatasetConfig(annotations=tmp_path / "d.jsonl", images=None)
    with pytest.raises(UserError, match="no image folder"):
        Dataset("d", entry, Reading(cache=tmp_path / "cache"))


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, opened: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "d.jsonl", 3)
    (tmp_path / "file").touch()
    assert len(opened(tmp_path / "file")) == 3
    error = capsys.readouterr().err
    assert error.startswith("warning: the index of data set 'd' ") and "data.index" in error


def test_bad_records_are_counted_or_refused(tmp_path: Path, opened: Any) -> None:
    write(tmp_path / "d.jsonl", 9, bad=(4, 6))
    with pytest.raises(UserError, match=r"d\.jsonl:5: field 'conversations\[1\]': empty answer"):
        opened()
    assert not list((tmp_path / "cache").glob("*.index"))
    data = opened(strict=False)
    assert data.bad == 2 and data.good_records.tolist() == [0, 1, 2, 3, 5, 7, 8]
    assert len(data.problems) == 2 and "d.jsonl:7" in data.problems[1]
    with pytest.raises(UserError, match=rf"d\.jsonl:5: .*\(2 records of .*bad\) \(from the index {stored(tmp_path)}\)"):
        opened()
    assert computed(opened) == 2, "the second time it is known"


def test_a_record_that_changes_after_it_was_indexed_is_refused(tmp_path: Path, opened: Any) -> None:
    write(tmp_path / "d.jsonl", 9)
    data = opened()
    with open(tmp_path / "d.jsonl", "r+b") as file:
        file.truncate(700)
    with pytest.raises(UserError, match=r"d\.jsonl:9: not what the index"):
        data[8]


def test_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "d.jsonl", 3000)
    monkeypatch.setattr(index, "CHUNK", 256)
    alone = annotated("d", path, tmp_path)
    monkeypatch.setattr(index, "RECORDS_OF_A_PROCESS", 1000)
    monkeypatch.setattr(index, "_processors", lambda: 2)
    used = list[int]()
    real = index.Processes.__init__
    monkeypatch.setattr(index.Processes, "__init__", lambda self, *args: used.append(args[1]) or real(self, *args))
    together = annotated("d", path, tmp_path)
    assert used == [2] and together.digest == alone.digest
    write(path, 3000, bad=(777, 2222))
    with pytest.raises(UserError, match=r"d\.jsonl:778: .*empty answer"):
        annotated("d", path, tmp_path)


def test_headers_of_items_are_stored(tmp_path: Path, processor: Processor) -> None:
    write(tmp_path / "d.jsonl", 3)
    for k, size in enumerate([(30, 60), (56, 28), (84, 84)]):
        Image.new("RGB", size).save(tmp_path / f"{k}.png")
    entry = DatasetConfig(annotations=tmp_path / "d.jsonl", images=tmp_path)
    reading = Reading(processor.fields, tmp_path / "cache", processor.readers)
    scanned, plain = Dataset("d", entry, reading), Dataset("d", entry, reading._replace(readers=None))
    assert scanned.digest == plain.digest
    assert [scanned[k].item(0).header for k in range(3)] == [(30, 60), (56, 28), (84, 84)]
    expected = [processor.tokenize(plain[k]).sizes for k in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "picture_size", lambda *_: pytest.fail("it is stored"))
        assert [processor.tokenize(scanned[k]).sizes for k in range(3)] == expected
    (tmp_path / "cache").rename(tmp_path / "other")
    (tmp_path / "0.png").unlink()
    with pytest.raises(UserError, match=r"d\.jsonl:1: image .*0\.png: cannot be read"):
        Dataset("d", entry, reading)


@pytest.fixture
def scan(tmp_path: Path, processor: Processor) -> Callable[..., Dataset]:
    """Opens `d.jsonl`, of three pictures in `folder`, with the sizes of these in the index."""
    write(tmp_path / "d.jsonl", 3)

    def scan(folder: Path, strict: bool = True) -> Dataset:
        entry = DatasetConfig(annotations=tmp_path / "d.jsonl", images=folder)
        return Dataset("d", entry, Reading(processor.fields, tmp_path / "cache", processor.readers, strict))

    return scan


def drawn(folder: Path, width: int, *numbers: int) -> Path:
    folder.mkdir(exist_ok=True)
    for k in numbers:
        Image.new("RGB", (width, 56)).save(folder / f"{k}.png")
    return folder


def widths(processor: Processor, data: Dataset) -> list[int]:
    """Patches in a row of each picture: of its header, and decoded."""
    for record in data:
        [size] = processor.tokenize(record).sizes
        processor.patches(record, 0, [Piece(0, size)])
    return [cast(pictures.ImageSize, processor.tokenize(record).sizes[0]).columns for record in data]


def test_sizes_of_pictures_that_are_replaced_are_read_again(tmp_path: Path, processor: Processor, scan: Any) -> None:
    folder = drawn(tmp_path / "images", 56, 0, 1, 2)
    data = scan(folder)
    assert widths(processor, data) == [4, 4, 4]
    drawn(folder, 112, 1)
    for found in (data, scan(folder)):
        assert widths(processor, found) == [4, 8, 4]
    (folder / "2.png").unlink()
    with pytest.raises(UserError, match=r"d\.jsonl:3: image .*2\.png: cannot be read \(no such file"):
        processor.tokenize(scan(folder)[2])


def test_a_picture_that_is_replaced_with_its_time_is_an_error_with_a_way_out(
    tmp_path: Path, processor: Processor, scan: Any
) -> None:
    folder = drawn(tmp_path / "images", 56, 0, 1, 2)
    for width in (56, 112):
        (folder / "1.png").write_bytes((drawn(tmp_path / "other", width, 1) / "1.png").read_bytes().ljust(999))
        os.utime(folder / "1.png", (1, 1))
        data = scan(folder)
    with pytest.raises(UserError, match=r"touch .* data\.index"):
        widths(processor, data)
    (folder / "1.png").touch()
    assert widths(processor, scan(folder)) == [4, 8, 4]


def test_folders_of_pictures_share_no_sizes(tmp_path: Path, processor: Processor, scan: Any) -> None:
    one, two = drawn(tmp_path / "one", 56, 0, 1, 2), drawn(tmp_path / "two", 112, 0, 1, 2)
    (tmp_path / "link").symlink_to(one)
    for folder, width in ((one, 4), (two, 8), (tmp_path / "link", 4)):
        assert widths(processor, scan(folder)) == [width] * 3
        for path in folder.iterdir():
            os.utime(path, (1, 1))
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(two)
    assert widths(processor, scan(tmp_path / "link")) == [8, 8, 8]


@pytest.mark.parametrize("strict", [True, False])
def test_folders_of_pictures_share_no_digest_and_verdict(tmp_path: Path, opened: Any, strict: bool) -> None:
    one, two = drawn(tmp_path / "one", 56, 0), drawn(tmp_path / "two", 56, 0)
    path = write(tmp_path / "d.jsonl", 1)
    path.write_text(path.read_text().replace("0.png", f"{one}/0.png"))

    def reads(folder: Path, cache: str, strict: bool) -> Dataset:
        entry = DatasetConfig(annotations=path, images=folder)
        return Dataset("d", entry, Reading(cache=tmp_path / cache, strict=strict))

    with pytest.raises(UserError, match="leaves the image folder") if strict else nullcontext():
        assert reads(two, "one", strict).bad == 1
    inside = reads(one, "one", True)
    assert not inside.bad and Path(str(inside[0].item(0).content)) == one / "0.png"
    assert reads(tmp_path, "one", True).digest == reads(tmp_path, "two", True).digest != inside.digest
    with pytest.raises(UserError, match="leaves the image folder"):
        reads(two, "one", True)


def test_what_a_lenient_reader_missed_is_found_when_it_is_back(tmp_path: Path, processor: Processor, scan: Any) -> None:
    folder = drawn(tmp_path / "images", 56, 0, 2)
    lenient = scan(folder, strict=False)
    assert lenient.bad == 0, "the record is as it should be"
    assert [record.headers for record in scan(folder, strict=False)] == [((56, 56),), None, ((56, 56),)]
    with pytest.raises(UserError, match=r"1\.png: cannot be read"):
        widths(processor, lenient)
    for _ in range(2):
        with pytest.raises(UserError, match=r"d\.jsonl:2: image .*1\.png: cannot be read"):
            scan(folder)
    drawn(folder, 112, 1)
    assert widths(processor, scan(folder)) == widths(processor, lenient) == [4, 8, 4]
    assert scan(folder).digest == lenient.digest


OPENS = """
import sys, time
from pathlib import Path
from megatron_hetero.config.fields import Pattern
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources import index
from megatron_hetero.data.sources.index import Indexer
real = Indexer._computed
def computed(self, files):
    print("computes", flush=True)
    time.sleep(float(sys.argv[2]))
    return real(self, files)
Indexer._computed = computed
folder = Path(sys.argv[1])
def full(*_):
    raise OSError(28, "No space left on device")
if "full" in sys.argv:
    index._write = full
if "tell" in sys.argv:
    print("opens", flush=True)
data = Dataset("d", DatasetConfig(annotations=folder / "d.jsonl", images=folder), Reading(cache=folder / "cache"))
print(data.digest, flush=True)
"""


def open_elsewhere(folder: Path, seconds: float, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OPENS, str(folder), str(seconds), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.long)])
def test_one_process_computes_while_others_wait(count: int, tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", 30)
    outputs = [each.communicate(timeout=60)[0] for each in [open_elsewhere(tmp_path, 1.0) for _ in range(count)]]
    assert sum("computes" in output for output in outputs) == 1
    assert len({output.split()[-1] for output in outputs}) == 1


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> list[index.Lock]:
    """The locks that this process has."""
    held, take, release = list[index.Lock](), index.Lock.take, index.Lock.release

    def taken(*arguments: Any, **options: Any) -> index.Lock:
        held.append(take(*arguments, **options))
        return held[-1]

    monkeypatch.setattr(index.Lock, "take", taken)
    monkeypatch.setattr(index.Lock, "release", lambda lock, **how: (held.remove(lock), release(lock, **how)))
    return held


@pytest.mark.parametrize("stored", [True, False])
def test_who_has_waited_does_not_keep_others_waiting(
    stored: bool, tmp_path: Path, opened: Any, locks: list[index.Lock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while it opens the index, nor while it computes its own since there is none on a full disk."""
    write(tmp_path / "d.jsonl", 30)
    works = {
        name: getattr(*place) for name, place in (("_read", (index, "_read")), ("_computed", (Indexer, "_computed")))
    }

    def alone(name: str) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            if name == "_computed" or arguments[0].exists():
                seen.append((name, len(locks)))
            return works[name](*arguments)

        return work

    seen = list[tuple[str, int]]()
    with open_elsewhere(tmp_path, 0.5, *([] if stored else ["full"])) as first:
        assert first.stdout is not None and first.stdout.readline() == "computes\n"
        monkeypatch.setattr(index, "_read", alone("_read"))
        monkeypatch.setattr(index, "RETRIES_S", (0.0,))
        monkeypatch.setattr(Indexer, "_computed", alone("_computed"))
        assert len(opened()) == 30
    assert seen == [("_read" if stored else "_computed", 0)] and not locks
    assert computed(opened) == (0 if stored else 1) and bool([*(tmp_path / "cache").iterdir()]) == stored


def test_who_has_waited_asks_anew_for_a_file_that_was_missing(
    tmp_path: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS answers from memory, for up to a minute, that there is no file, until its folder is listed."""
    write(tmp_path / "d.jsonl", 30)
    read, iterdir, listed = index._read, Path.iterdir, list[bool]()
    with open_elsewhere(tmp_path, 0.5) as first:
        assert first.stdout is not None and first.stdout.readline() == "computes\n"
        monkeypatch.setattr(index, "_read", lambda path: read(path) if any(listed) else None)
        monkeypatch.setattr(Path, "iterdir", lambda path: listed.append(bool(stored(tmp_path))) or iterdir(path))
        assert len(opened()) == 30 and not computed(opened) and len(listed) == 1


@pytest.mark.parametrize("waits", [False, True])
def test_an_index_that_was_left_halfway_is_computed_by_the_next(waits: bool, tmp_path: Path, opened: Any) -> None:
    write(tmp_path / "d.jsonl", 30)
    with open_elsewhere(tmp_path, 60.0) as first:
        assert first.stdout is not None and first.stdout.readline() == "computes\n"
        if waits:
            with open_elsewhere(tmp_path, 0.0, "tell") as second:
                assert second.stdout is not None and second.stdout.readline() == "opens\n"
                time.sleep(0.3)
                first.send_signal(signal.SIGKILL)
                assert second.communicate(timeout=60)[0].startswith("computes")
            assert stored(tmp_path) and len(opened()) == 30 and not computed(opened)
            return
        first.send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert len(opened()) == 30 and computed(opened) == 1
    assert time.monotonic() - began < 30


def test_blocks_are_cut_by_records_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "BLOCK_RECORDS", 4)
    data = annotated("d", write(tmp_path / "d.jsonl", 10), tmp_path)
    assert data.blocks.starts.tolist() == [0, 4, 8, 10]
    assert data.blocks.sizes.sum() == (tmp_path / "d.jsonl").stat().st_size
    monkeypatch.setattr(index, "BLOCK_BYTES", 250)
    data = annotated("d", tmp_path / "d.jsonl", tmp_path)
    assert np.diff(data.blocks.starts).max() == 2
