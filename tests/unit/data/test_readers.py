"""Reading in other processes: the same bits and the same errors, and nothing left behind however either side ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.worker_process import receive, send
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.processor import Processor, ReaderProcesses
from megatron_hetero.data.records import Reading, Record
from megatron_hetero.models.items.types import Piece
from tests.support.folders import ModelChoice, write_model
from tests.support.matrix import thinned
from tests.support.videos import write_video_data
from tests.unit.data.odd_reader import OddReader

RECORD = Record("d", 0, "train.jsonl:1", ())


@pytest.fixture
def odd() -> Iterator[Callable[..., ReaderProcesses]]:
    """Makes processes, and ends them."""
    made: list[ReaderProcesses] = []

    def make(does: str = "", count: int = 1) -> ReaderProcesses:
        made.append(ReaderProcesses(cast(Any, OddReader(does)), count))
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
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Processor, ReaderProcesses, Mixture]]:
    """Here and in another process, and what they read."""
    folder = tmp_path_factory.mktemp("readers")
    write_model(folder / "model", ModelChoice())
    data = write_video_data(folder, 6, pictures=(1, 2, 0, 1))
    here = Processor.from_folder(folder / "model")
    registry = {"d": DatasetConfig(annotations=data, images=folder / "images")}
    there = ReaderProcesses(here, 1)
    yield here, there, Mixture.parse(("d",), registry, shuffle=False, seed=0, reading=Reading(here.fields))
    there.close()


def test_another_process_reads_the_same(readers: tuple[Processor, ReaderProcesses, Mixture]) -> None:
    here, there, mixture = readers
    for number in range(6):
        mine, theirs = (reader.tokenize(mixture[number]) for reader in (here, there))
        assert mine.record == theirs.record
        assert mine.sizes == theirs.sizes
        for name in ("input_ids", "supervised", "position_ids", "row_positions", "rows"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        for k, sizes in enumerate(mine.pieces):
            pieces = [Piece(number, size) for number, size in enumerate(sizes)]
            pixels = [reader.patches(mine.record, k, pieces) for reader in (here, there)]
            assert pixels[0].dtype == pixels[1].dtype and pixels[0].tobytes() == pixels[1].tobytes()


def test_what_is_wrong_with_data_is_said_in_the_same_words(
    readers: tuple[Processor, ReaderProcesses, Mixture],
) -> None:
    here, there, mixture = readers
    Path(str(mixture[0].item(0).content)).write_bytes(b"no picture")
    told = []
    for reader in (here, there):
        with pytest.raises(UserError) as raised:
            reader.tokenize(mixture[0])
        told.append(str(raised.value))
    assert told[0] == told[1] and "0_0.png" in told[0]
    assert len(there.tokenize(mixture[2])) > 0, "it goes on"


def test_an_error_of_our_own_comes_with_its_trace(odd: Callable[..., ReaderProcesses]) -> None:
    with pytest.raises(RuntimeError, match="(?s)worker process.*in tokenize.*ZeroDivisionError: of our own"):
        odd("wrong").tokenize(RECORD)


def test_as_many_processes_as_threads_work(odd: Callable[..., ReaderProcesses]) -> None:
    readers, found = odd("number", count=2), dict[int, int]()

    def read(number: int) -> None:
        array: Any = readers.tokenize(replace(RECORD, index=number))
        found[number] = len(array)

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
        pid: Any = readers.tokenize(RECORD)
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(UserError, match=rf"data.worker_type.*{said}.*"):
        readers.tokenize(RECORD)
    with pytest.raises(UserError, match="a worker process"):
        readers.tokenize(RECORD)


def test_a_process_ends_with_its_reader_and_not_by_signals_to_its_group(odd: Callable[..., ReaderProcesses]) -> None:
    readers = odd()
    pid: Any = readers.tokenize(RECORD)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert readers.tokenize(RECORD) == pid
    readers.close()
    assert not is_running(pid)


RANK = """
import time
from megatron_hetero.data.processor import ReaderProcesses
from megatron_hetero.data.records import Reading, Record
from tests.unit.data.odd_reader import OddReader
readers = ReaderProcesses(OddReader(), 1)
print(readers.tokenize(Record("d", 0, "train.jsonl:1", ())), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", thinned([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 3), ids=lambda how: how.name)
def test_nothing_outlives_a_rank(how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        rank.send_signal(how)
    assert ends(pid)
