"""Indexes of data sets: where each record is, computed once and mapped into memory by all ranks.

An index is one file: the length of a header, the header as JSON, and arrays, each at a multiple of 64 bytes. It names
its source files with their sizes and modification times; a changed file gets a new index. It has a checksum, and is
written under a temporary name and then renamed, so that no reader sees an incomplete index.

An index decides which bytes are read as a record, so it must be trustworthy. In a shared folder each user has separate
indexes. An index is recomputed if others may write to it, if its owner is not the user, root or the owner of its folder
(on NFS possibly `nobody`), or if its numbers do not fit its files.

One process computes an index, per machine or for all machines that share the folder, while the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_hetero.base.contents import StoredFile
from megatron_hetero.base.errors import UserError, reason
from megatron_hetero.base.files import mark_used, open_own, remove_unused, replacing
from megatron_hetero.base.lock import Lock
from megatron_hetero.base.terminal import Progress
from megatron_hetero.base.worker_process import Processes
from megatron_hetero.data.keys import count_names
from megatron_hetero.data.sources.formats import Arrays, Columns, Format, finished

VERSION = 3
"""Version of the index format. Indexes of other versions are not read."""
BLOCK_BYTES = 1 << 26
"""Maximum bytes of a block of consecutive records, for formats that define no blocks."""
BLOCK_RECORDS = 1 << 10
"""Maximum number of records of a block, for formats that define no blocks."""
THREADS = 8
"""Number of files that are scanned concurrently, since scanning mostly waits for disks."""
CHUNK = 1 << 12
"""Maximum number of records that a process checks per task."""
MAX_PROCESSES = 16
"""Maximum number of processes that check records."""
RECORDS_OF_A_PROCESS = 1 << 14
"""Minimum number of records per process: starting a process takes some tenths of a second."""
MAX_VERSIONS = 16
"""Maximum stored indexes per data set, besides recently opened ones, which running jobs may have mapped."""
RETRIES_S = (0.0, 0.5, 1.0, 2.0)
"""Pauses in seconds before looking again for an index that another process has stored: NFS caches missing files."""
MAX_PROBLEMS = 20
"""Maximum number of stored messages about bad records."""
_ALIGN = 64
_LENGTH = 8

Check = Callable[[Any, str], tuple[bytes, Sequence[tuple[int, int, int]], Sequence[str]]]
"""Function that checks a record, given its value and its name in messages. Returns the bytes to digest; for each item,
a number that changes with its file and the two numbers of its header; and the names of keys that were not read. Raises
`UserError` for a bad record.
"""


class Blocks(NamedTuple):
    """Blocks of consecutive records. `starts`: first record of each block, then the number of records, int64
    [blocks + 1]. `sizes`: bytes to read for each block, int64 [blocks].
    """

    starts: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True, eq=False)
class Index:
    """The index of the records in a data set's files.

    Attributes:
        files: the files with their versions.
        starts: first record of each file, then the number of all records, int64 [files + 1].
        digest: hash of all records, independent of where the files are stored.
        scanned: whether the index contains the headers of items.
        problems: messages about the first bad records.
        unread: for each key that was not read, the number of records that have it.
    """

    files: tuple[StoredFile, ...]
    starts: np.ndarray
    digest: str
    scanned: bool
    problems: tuple[str, ...]
    unread: Mapping[str, int]
    _columns: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Columns by name: the entries of all files, and the index of each file's first entry, int64 [files + 1]."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def file_of(self, record: int) -> tuple[int, int]:
        """Return the number of a record's file, and the number of the record in that file."""
        file = int(np.searchsorted(self.starts, record, side="right")) - 1
        return file, record - int(self.starts[file])

    def columns(self, file: int) -> dict[str, np.ndarray]:
        """Return the columns of a file by name."""
        return {name: entries[starts[file] : starts[file + 1]] for name, (entries, starts) in self._columns.items()}

    @property
    def bad(self) -> int:
        """Number of bad records."""
        return len(self._columns["bad"][0])

    def bad_records(self) -> np.ndarray:
        """Return the numbers of the bad records, int64."""
        return self._numbered("bad")

    def _numbered(self, name: str) -> np.ndarray:
        """Convert a column of record numbers within files to numbers over all files, int64."""
        numbers, starts = self._columns[name]
        return numbers + np.repeat(self.starts[:-1], np.diff(starts))

    def headers(self, file: int, number: int) -> list[tuple[int, int, int]] | None:
        """Return the numbers stored for each item of a record, see `Check`; None if the index has no headers."""
        if not self.scanned:
            return None
        columns = self.columns(file)
        ends, figures = columns["item_ends"], columns["headers"].reshape(-1, 3)
        return [*map(tuple, figures[int(ends[number - 1]) if number else 0 : int(ends[number])].tolist())]

    def blocks(self) -> Blocks:
        """Return all blocks in order."""
        return Blocks(np.append(self._numbered("blocks"), len(self)), np.asarray(self._columns["block_sizes"][0]))


class Checked(NamedTuple):
    """Result of checking consecutive records of one file. `digest`: hash of the records. `bad`: numbers of bad records.
    `problems`: messages about the first bad records. `ends`, `headers`: columns about items. `unread`: see `Index`.
    """

    digest: bytes
    bad: list[int]
    problems: list[str]
    ends: np.ndarray
    headers: np.ndarray
    unread: dict[str, int]


@dataclass(frozen=True)
class Indexer:
    """Opens the stored index of a data set, or computes it.

    Attributes:
        name: name of the data set, for messages.
        files: files of the data set.
        format: format of the files.
        check: function that checks a record, see `Check`.
        key: text with everything else that the index depends on.
        folder: folder of stored indexes; None: indexes are not stored.
        scan: whether headers of items are read and stored.
        strict: whether the first bad record is an error.
    """

    name: str
    files: tuple[StoredFile, ...]
    format: Format
    check: Check
    key: str
    folder: Path | None
    scan: bool = False
    strict: bool = True

    def index(self) -> Index:
        """Return the stored index, or compute the index if no valid one is stored. Raises `UserError`."""
        files = tuple(map(self._with_version, self.files))
        path = self._path(files)
        index = None if path is None else self._open(path, files)
        if index is None:
            index = self._computed(files) if path is None else self._stored(path, files)
        if self.strict and index.problems:
            more = f" ({index.bad} records of data set {self.name!r} are bad)" if index.bad > 1 else ""
            raise UserError(f"{index.problems[0]}{more}" + (f" (from the index {path})" if path else ""))
        return index

    def _with_version(self, file: StoredFile) -> StoredFile:
        with self._reading(file):
            return replace(file, known=file.version())

    @contextlib.contextmanager
    def _reading(self, file: StoredFile) -> Iterator[None]:
        """Convert errors of reading a file inside the context to `UserError`s."""
        try:
            yield
        except OSError as error:
            problem, fix = f"cannot be read ({reason(error)})", "check path and permissions"
            if isinstance(error, FileNotFoundError):
                problem = "no such file"
                fix = f"correct its path (`annotations` or `files` of data.registry.{self.name})"
            raise UserError.at(file, problem=problem, fix=fix) from error

    # ----------------------------------------------------------------------------------------- stored indexes

    def _path(self, files: Sequence[StoredFile]) -> Path | None:
        """Return the path of the stored index, named by hashes of the data set and its files' versions, or None."""
        if self.folder is None:
            return None
        # Each version has a separate path: on NFS, replacing a file that another run has mapped invalidates its pages.
        data_set = (VERSION, self.key, self.scan, [file.name for file in files], os.getuid())
        texts = (repr(each).encode(errors="surrogatepass") for each in (data_set, [file.known for file in files]))
        return self.folder / f"{''.join(hashlib.sha256(text).hexdigest()[:20] for text in texts)}.index"

    def _stored(self, path: Path, files: tuple[StoredFile, ...]) -> Index:
        """Return the index once this or another process has computed and stored it."""
        lock, pause = None, 0.0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            while lock is None:
                try:
                    lock = Lock.take(path.with_suffix(".lock"), path, "index", mixed="two indexes", fix="wait for it")
                except UserError:
                    for _ in range(4):  # A thousand processes may poll one disk.
                        time.sleep(pause := min(1.5 * pause + 0.05, 2.0))
                        if (index := self._open(path, files)) is not None:
                            return index
        except OSError as error:
            self._warn(path, error)
            return self._computed(files)
        # If the first process stored no index (no permission, or a bad record), all others compute it at the same time.
        if pause and not lock.left:
            lock.release(remove=True)
            for seconds in RETRIES_S:
                time.sleep(seconds)
                with contextlib.suppress(OSError):
                    list(path.parent.iterdir())  # Listing the folder refreshes the NFS cache.
                if (index := self._open(path, files)) is not None:
                    return index
            return self._computed(files)
        try:
            # Another process may have stored the index meanwhile.
            if (index := self._open(path, files)) is not None:
                return index
            computed = self._computed(files)
            try:
                if self._open(path, files) is None:  # Locks may not work across machines.
                    _write(path, computed)
                    remove_unused(path.parent.glob(f"{path.stem[:20]}*.index"), MAX_VERSIONS)
                if (index := self._open(path, files)) is None:
                    raise OSError("what is written there may be changed by others")
            except OSError as error:
                self._warn(path, error)
            return index or computed
        finally:
            lock.release(remove=True)

    def _warn(self, path: Path, error: OSError) -> None:
        print(
            f"warning: the index of data set {self.name!r} cannot be stored in {path.parent} ({reason(error)}); each "
            "process computes its own, again at each start. Set data.index to a folder of your own.",
            file=sys.stderr,
            flush=True,
        )

    def _open(self, path: Path, files: Sequence[StoredFile]) -> Index | None:
        """Return the index stored at `path`; None if it is not a valid index of these files."""
        index = _read(path)
        if index is None or [each.known for each in index.files] != [each.known for each in files]:
            return None
        mark_used(path)
        # Use the given files, not the names stored in the index.
        return replace(index, files=tuple(files)) if "bad" in index._columns else None

    # ----------------------------------------------------------------------------------------------- scanning

    def _computed(self, files: tuple[StoredFile, ...]) -> Index:
        places = self._scanned(files)
        tasks = [
            (file, range(first, min(first + CHUNK, records)))
            for file, records in enumerate(np.diff(places.starts).tolist())
            for first in range(0, records, CHUNK)
        ]
        results: list[Checked] = []
        with Progress(f"checking the records of data set {self.name!r}", max(1, len(places))) as progress:
            for (_, numbers), checked in zip(tasks, self._checked(places, tasks), strict=True):
                results.append(checked)
                progress.advance(len(numbers), len(numbers))
        return _with_results(places, [file for file, _ in tasks], results, self.scan)

    def _scanned(self, files: tuple[StoredFile, ...]) -> Index:
        """Scan all files. Returns an index with the places of records, but without results of checks."""
        stop = threading.Event()
        with (
            Progress(f"finding the records of data set {self.name!r}", len(files)) as progress,
            ThreadPoolExecutor(min(THREADS, len(files)), "index") as pool,
        ):
            try:
                jobs = [pool.submit(self._scan, file, progress, stop) for file in files]
                scanned = [job.result() for job in jobs]
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
        starts = np.cumsum([0, *(records for records, _ in scanned)], dtype=np.int64)
        names = dict.fromkeys(name for _, columns in scanned for name in columns)
        columns = {name: _joined([finished(columns.get(name)) for _, columns in scanned]) for name in names}
        return Index(files, starts, "", False, (), {}, columns)

    def _scan(self, file: StoredFile, progress: Progress, stop: threading.Event) -> tuple[int, Columns]:
        """Scan a file. Returns its number of records, and its columns, including the columns of blocks."""
        columns: Columns = {}
        records, share, starts, sizes, block = 0, 0.0, array("q"), array("q"), None
        with self._reading(file):
            for place in self.format.scan(file, columns):
                is_full = bool(starts) and (
                    records - starts[-1] >= BLOCK_RECORDS or sizes[-1] + place.size > BLOCK_BYTES
                )
                if not starts or place.block != block or (block is None and is_full):
                    starts.append(records)
                    sizes.append(0)
                    block = place.block
                sizes[-1] += place.size
                records += 1
                if not records % 256:
                    progress.advance(place.share - share, 256)
                    share = place.share
                    if stop.is_set():
                        break
        progress.advance(1.0 - share, records % 256)
        return records, columns | {"blocks": starts, "block_sizes": sizes}

    def _checked(self, places: Index, tasks: Sequence[tuple[int, range]]) -> Iterator[Checked]:
        """Yield the result of each task (a file and record numbers to check), using processes for many records."""
        count = min(_processors(), MAX_PROCESSES, len(places) // RECORDS_OF_A_PROCESS)
        if count < 2:
            for file, numbers in tasks:
                yield self.check_records(places.files[file], places.columns(file), numbers)
            return
        with tempfile.TemporaryDirectory(prefix="index-") as folder:
            path = Path(folder) / "places"
            _write(path, places)
            processes = Processes(self, count, f"data.registry.{self.name}")
            pool = ThreadPoolExecutor(count, "check")
            try:
                name = f"data set {self.name!r}"
                yield from pool.map(lambda task: processes.call(name, "check_stored", path, *task), tasks)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                processes.close()

    def check_stored(self, path: Path, file: int, numbers: range) -> Checked:
        """Run `check_records` with the index of places stored at `path`, which each process reads once."""
        places = _read_once(path)
        return self.check_records(places.files[file], places.columns(file), numbers)

    def check_records(self, file: StoredFile, columns: Arrays, numbers: range) -> Checked:
        """Check consecutive records of a file. Raises `UserError`, for bad records only if `strict`."""
        digest, bad, problems = hashlib.sha256(), list[int](), list[str]()
        ends, headers, unread = array("q"), array("q"), dict[str, int]()
        with self._reading(file):
            for number, (value, where) in zip(numbers, self.format.read(file, columns, numbers), strict=True):
                try:
                    if isinstance(value, UserError):
                        raise value
                    text, items, names = self.check(value, where)
                except UserError as error:
                    if self.strict:
                        raise
                    text, items, names = b"", (), ()
                    problems += [str(error)] if len(problems) < MAX_PROBLEMS else []
                    bad.append(number)
                digest.update(b"%d " % len(text))
                digest.update(text)
                count_names(unread, dict.fromkeys(names, 1))
                if self.scan:
                    headers.extend(figure for figures in items for figure in figures)
                    ends.append(len(headers) // 3)
        return Checked(digest.digest(), bad, problems, finished(ends), finished(headers), unread)


def _processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _with_results(places: Index, files: Sequence[int], results: Sequence[Checked], scanned: bool) -> Index:
    """Return the index of places with the results of checks added. `files`: number of the file of each result."""
    by_file: list[list[Checked]] = [[] for _ in places.files]
    for file, checked in zip(files, results, strict=True):
        by_file[file].append(checked)
    columns = {"bad": _joined([np.array([n for each in runs for n in each.bad], np.int64) for runs in by_file])}
    if scanned:
        columns["headers"] = _joined([_concatenated([each.headers for each in runs]) for runs in by_file])
        item_ends = []
        for runs in by_file:
            firsts = np.cumsum([0, *(len(each.headers) // 3 for each in runs)])
            item_ends.append(_concatenated([each.ends + first for each, first in zip(runs, firsts, strict=False)]))
        columns["item_ends"] = _joined(item_ends)
    digest = hashlib.sha256(b"".join(each.digest for each in results)).hexdigest()
    problems = tuple(text for each in results for text in each.problems)[:MAX_PROBLEMS]
    unread: dict[str, int] = {}
    for each in results:
        count_names(unread, each.unread)
    columns |= places._columns
    return replace(places, digest=digest, scanned=scanned, problems=problems, unread=unread, _columns=columns)


def _joined(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries of one column over all files, and the index of each file's first entry."""
    return _concatenated(columns), np.cumsum([0, *map(len, columns)], dtype=np.int64)


def _concatenated(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate columns. Empty columns are ignored, since they may have another dtype."""
    return np.concatenate([entries for entries in columns if len(entries)] or [np.zeros(0, np.int64)])


# ----------------------------------------------------------------------------------------------------- the file


def _write(path: Path, index: Index) -> None:
    """Store an index atomically. Raises `OSError`."""
    arrays: dict[str, Any] = {"": index.starts}
    for name, (entries, starts) in index._columns.items():
        arrays |= {name: np.ascontiguousarray(entries), f"{name} of files": starts}
    checksum, places, end = 0, dict[str, Any](), 0
    for name, entries in arrays.items():
        places[name] = (end, len(entries), entries.dtype.str)
        end += -(-entries.nbytes // _ALIGN) * _ALIGN
        checksum = zlib.crc32(entries, checksum)
    header = {
        "version": VERSION,
        "files": [(file.name, file.known) for file in index.files],
        "digest": index.digest,
        "scanned": index.scanned,
        "problems": index.problems,
        "unread": index.unread,
        "arrays": places,
        "checksum": checksum,
    }
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH + len(text)) % _ALIGN)
    path.unlink(missing_ok=True)  # Replace a link instead of following it.
    with replacing(path) as new, open_own(new, "r+b") as file:
        os.fchmod(file.fileno(), 0o600)  # Regardless of the umask: an index that others may write to is not read.
        file.write(len(text).to_bytes(_LENGTH, "little") + text)
        for entries in arrays.values():
            file.write(entries)
            file.write(b"\0" * (-entries.nbytes % _ALIGN))
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Index | None:
    """Return the index stored at `path`; None if it is missing, incomplete, damaged, or writable by others."""
    try:
        with open_own(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (os.getuid(), 0, path.parent.stat().st_uid) or status.st_mode & 0o022:
                return None
            data: Any = np.memmap(file, np.uint8, "r")
        length = int.from_bytes(data[:_LENGTH].tobytes(), "little")
        header = json.loads(data[_LENGTH : _LENGTH + length].tobytes())
        if header["version"] != VERSION:
            return None
        arrays, checksum = {}, 0
        for name, (start, entries, dtype) in header["arrays"].items():
            kind = np.dtype({"<i8": np.int64, "|u1": np.uint8}[dtype])
            first = _LENGTH + length + start
            raw = data[first : first + entries * kind.itemsize]
            arrays[name] = raw.view(kind)
            checksum = zlib.crc32(raw, checksum)
            if len(arrays[name]) != entries or start < 0:
                return None
        if checksum != header["checksum"]:
            return None
        starts = arrays.pop("")
        columns = {
            name: (entries, arrays[f"{name} of files"])
            for name, entries in arrays.items()
            if f"{name} of files" in arrays
        }
        files = tuple(StoredFile(str(name), tuple(known)) for name, known in header["files"])
        problems, unread = tuple(map(str, header["problems"])), {str(k): int(n) for k, n in header["unread"].items()}
        index = Index(files, starts, str(header["digest"]), header["scanned"] is True, problems, unread, columns)
        return index if _fits(index) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None


@lru_cache(maxsize=1)
def _read_once(path: Path) -> Index:
    places = _read(path)
    assert places is not None, "the file is there as long as processes use it"
    return places


_AS_MANY = {"block_sizes": "blocks", "sizes": "starts", "fields": "starts", "item_ends": "records",
            "key_ends": "records", "field_ends": "records"}  # fmt: skip
_ENDS = {"item_ends": "headers", "key_ends": "keys", "field_ends": "starts", "name_ends": "names"}
_BELOW = {"bad": "records", "fields": "name_ends", "starts": "bytes", "sizes": "bytes"}
"""Constraints between columns: equal numbers of entries; ends of runs of another column's entries; and values less than
another column's number of entries.
"""


def _fits(index: Index) -> bool:
    """Return whether all numbers of an index are valid places in its files. May raise an exception if they are not."""
    runs = [(index.starts, len(index)), *((starts, len(entries)) for entries, starts in index._columns.values())]
    if not all(len(each) == len(index.files) + 1 and not each[0] and _ascend(each, last) for each, last in runs):
        return False
    counts = np.diff(index.starts).tolist()
    return all(
        _columns_fit(index.columns(k), records, file, index.scanned)
        for k, (file, records) in enumerate(zip(index.files, counts, strict=True))
    )


def _columns_fit(columns: Mapping[str, np.ndarray], records: int, file: StoredFile, scanned: bool) -> bool:
    """Return whether the columns of a file with `records` records are consistent with each other, see the formats."""
    size = int(file.version()[1])
    count = {name: len(entries) for name, entries in columns.items()} | {"records": records, "bytes": size + 1}
    blocks, as_many = columns["blocks"], {name: of for name, of in _AS_MANY.items() if name in columns}
    if scanned:
        count["headers"], as_many["item_ends"] = len(columns["headers"]) // 3, "records"
    if "names" in columns:
        columns["names"].tobytes().decode()
    elif "starts" in columns:  # JSON files. JSON lists have no line numbers.
        as_many |= {"starts": "records"} | ({"lines": "records"} if count.get("lines") else {})
    return (
        blocks[:1].tolist() == [0][:records]
        and bool((np.diff(blocks, append=records) > 0).all())
        and all(count[name] == count[of] for name, of in as_many.items())
        and all(_ascend(columns[name], count[of]) for name, of in _ENDS.items() if name in columns)
        and all(
            columns[name].min() >= 0 and columns[name].max() < count[of]
            for name, of in _BELOW.items()
            if count.get(name)
        )
        and bool((columns.get("starts", blocks[:0]) + columns.get("sizes", blocks[:0]) <= size).all())
    )


def _ascend(ends: np.ndarray, last: int) -> bool:
    """Return whether `ends` are ends of consecutive runs, the last of which ends at `last`."""
    return bool((np.diff(ends, prepend=0) >= 0).all()) and (int(ends[-1]) if len(ends) else 0) == last
