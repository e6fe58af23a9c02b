"""Reading in other processes: the same bits and the same errors, and nothing left behind however either side ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.reader_process import receive, send
from megatron_hetero.data.readers import ReaderProcesses, SampleReader, Wanted
from megatron_hetero.data.records import Record
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.items import whole
from tests.support.matrix import thinned
from tests.support.pool import Pool
from tests.unit.data.odd_reader import OddReader
from tests.unit.train import jobs_run as jobs
from tests.unit.train.jobs_run import MakeFlags

RECORD = Record("d", 0, "train.jsonl:1", ())


@pytest.fixture
def odd() -> Iterator[Callable[..., ReaderProcesses]]:
    """Makes processes, and ends them."""
    made: list[ReaderProcesses] = []

    def make(does: str = "", count: int = 1) -> ReaderProcesses:
        made.append(ReaderProcesses(OddReader(does), count))
        return made[-1]

    yield make
    for each in made:
        each.close()


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def ends(pid: int) -> bool:
    """Within a few seconds."""
    deadline = time.monotonic() + 20
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.zeros(0)],
        [np.arange(7)],
        [np.random.default_rng(0).standard_normal((3, 40_001))],
        [np.arange(100_000, dtype=np.uint8), np.zeros((2, 0, 3)), np.ones((500, 70), np.float32).T],
    ],
)
def test_arrays_arrive_as_they_were(arrays: list[np.ndarray]) -> None:
    here, there = socket.socketpair()
    with here, there:
        sender = Thread(target=send, args=(here, (arrays, "and text")))
        sender.start()
        got, text = receive(there)
        sender.join()
        assert text == "and text"
    for mine, theirs in zip(arrays, got, strict=True):
        assert (theirs.dtype, theirs.flags.writeable) == (mine.dtype, True)
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SampleReader, ReaderProcesses, Mixture]]:
    """Here and in another process, and what they read."""
    folder = tmp_path_factory.mktemp("readers")
    write_model(folder / "model", ModelChoice())
    data = write_data(folder, 6, turns=2)
    here = SampleReader(Processor.from_folder(folder / "model"), {}, 4096, "error")
    registry = {"d": DatasetConfig(annotations=data, images=folder / "images")}
    there = ReaderProcesses(here, 1)
    yield here, there, Mixture.parse(("d",), registry, shuffle=False, seed=0)
    there.close()


def test_another_process_reads_the_same(readers: tuple[SampleReader, ReaderProcesses, Mixture]) -> None:
    here, there, mixture = readers
    for number in range(6):
        mine, theirs = (reader.tokenise(mixture[number]) for reader in (here, there))
        assert mine is not None and theirs is not None and mine.record == theirs.record
        assert mine.sizes == theirs.sizes
        for name in ("input_ids", "supervised", "position_ids", "row_positions", "rows"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        for k, size in enumerate(mine.sizes):
            picture = Wanted(mine.record, k, whole(size))
            pixels = here.patches(picture), there.patches(picture)
            assert pixels[0].dtype == pixels[1].dtype and pixels[0].tobytes() == pixels[1].tobytes()


def test_what_is_wrong_with_data_is_said_in_the_same_words(
    readers: tuple[SampleReader, ReaderProcesses, Mixture],
) -> None:
    here, there, mixture = readers
    (mixture[0].item(0).path).write_bytes(b"no picture")
    told = []
    for reader in (here, there):
        with pytest.raises(UserError) as raised:
            reader.tokenise(mixture[0])
        told.append(str(raised.value))
    assert told[0] == told[1] and "0_0.png" in told[0]
    assert there.tokenise(mixture[2]) is not None, "it goes on"


def test_an_error_of_our_own_comes_with_its_trace(odd: Callable[..., ReaderProcesses]) -> None:
    with pytest.raises(RuntimeError, match="(?s)data.workers.*in tokenise.*ZeroDivisionError: of our own"):
        odd("wrong").tokenise(RECORD)


def test_as_many_processes_as_threads_work(odd: Callable[..., ReaderProcesses]) -> None:
    readers, found = odd(count=2), dict[int, int]()

    def read(number: int) -> None:
        found[number] = len(readers.patches(Wanted(RECORD, number, ())))

    threads = [Thread(target=read, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number for number in range(20)}


@pytest.mark.parametrize("how, said", [("exit", "status 3"), ("kill", "signal SIGKILL.*memory runs out")])
def test_a_process_that_dies_is_named(how: str, said: str, odd: Callable[..., ReaderProcesses]) -> None:
    readers = odd("exit" if how == "exit" else "")
    if how == "kill":
        pid: Any = readers.tokenise(RECORD)
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(UserError, match=rf"data.worker_type.*{said}.*"):
        readers.tokenise(RECORD)
    with pytest.raises(UserError, match="a worker process"):
        readers.tokenise(RECORD)


def test_a_process_ends_with_its_reader_and_not_by_signals_to_its_group(odd: Callable[..., ReaderProcesses]) -> None:
    readers = odd()
    pid: Any = readers.tokenise(RECORD)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert readers.tokenise(RECORD) == pid
    readers.close()
    assert not is_running(pid)


RANK = """
import time
from megatron_hetero.data.readers import ReaderProcesses
from megatron_hetero.data.records import Record
from tests.unit.data.odd_reader import OddReader
readers = ReaderProcesses(OddReader(), 1)
print(readers.tokenise(Record("d", 0, "train.jsonl:1", ())), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", thinned([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 3), ids=lambda how: how.name)
def test_nothing_outlives_a_rank(how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        rank.send_signal(how)
    assert ends(pid)


@pytest.mark.long
def test_batches_of_ranks_are_the_same(make_flags: MakeFlags, pools: Callable[[int], Pool]) -> None:
    flags = make_flags("sp:2", "dp:2", "--train.iters 4 --data.workers 2")
    other = make_flags("sp:2", "dp:2", "--train.iters 4 --data.workers 2 --data.worker_type process")
    assert pools(2).run(jobs.batches, flags) == pools(2).run(jobs.batches, other)


@pytest.mark.long
def test_a_process_that_dies_stops_all_ranks_with_one_message(
    make_flags: MakeFlags, pools: Callable[[int], Pool]
) -> None:
    flags = make_flags("sp:2", "dp:2", "--train.iters 6 --data.workers 1 --data.worker_type process")
    first, second = pools(2).run(jobs.error_of_killed_worker, flags)
    assert first == second
    assert first.startswith("step ") and "data of rank 1: data.worker_type process" in first and "SIGKILL" in first
