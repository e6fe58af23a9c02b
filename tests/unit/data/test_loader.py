"""The loader on real groups: who decodes what, errors that reach every rank, and work in the background."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.job.job import BatchShape
from megatron_hetero.models.items.types import Item
from megatron_hetero.schedule.contract import MicroBatchInputs, chunks_of
from tests.support import runs as jobs
from tests.support.folders import write_data
from tests.support.items import IMAGE
from tests.support.ranks import on_ranks
from tests.support.runs import MakeFlags, build, error_of
from tests.unit.data.packs import by_rank


@pytest.mark.parametrize("replicas, micro_batches, samples", [(1, 1, 1), (2, 3, 2), (4, 1, 2), (3, 2, 1)])
def test_steps_take_the_samples_in_order(replicas: int, micro_batches: int, samples: int) -> None:
    shape = BatchShape(replicas, micro_batches, samples)
    total = replicas * micro_batches * samples
    assert shape.step_samples == total
    for step in (1, 2, 7):
        taken = [n for m in range(micro_batches) for r in range(replicas) for n in shape.numbers(step, r, m)]
        assert taken == list(range((step - 1) * total, step * total))


def decoded_images(flags: list[str]) -> list[tuple[list[list[tuple[str, str]]], int]]:
    """For each step, the images that each rank decodes, and the number of images that are encoded."""
    run = build(flags)
    seen: list[tuple[str, str]] = []
    processor: Any = run.loader.reader
    reader, steps = processor.readers[IMAGE], []
    real = reader.patches

    def spy(item: Item, pieces: Any) -> np.ndarray:
        seen.append((item.where, Path(str(item.content)).name))
        return real(item, pieces)

    with mock.patch.object(type(reader), "patches", staticmethod(spy)):
        for _, batch, _ in run.batches():
            steps.append((by_rank(seen), len(batch.sizes["vision"])))
            seen.clear()
    return steps


SEVERAL = "--train.iters 3 --train.global_batch_size 8 --train.micro_batch_size 2"


@pytest.mark.parametrize(
    "flags",
    [("sp:4", "tp:4", SEVERAL), ("cp:2,sp:2", "cp:4", SEVERAL), ("dp:4", "tp:2,dp:2", SEVERAL),
     ("tp:2,dp:2", "dp:4", SEVERAL)],
    ids=str,
    indirect=True,
)  # fmt: skip
@on_ranks(4)
def test_an_image_is_decoded_once(flags: list[str]) -> None:
    busy = 0
    for of_ranks, images in decoded_images(flags):
        everything = [image for of_rank in of_ranks for image in of_rank]
        assert len(everything) == len(set(everything)) == images
        busy += sum(map(bool, of_ranks))
    assert busy >= 10, "most ranks leave the decoding to others"


@pytest.fixture
def one_image(make_flags: MakeFlags, tmp_path: Path) -> list[str]:
    """A command line for four samples, the last with a picture."""
    return make_flags("dp:4", "tp:4", data=write_data(tmp_path, 4, pictures=(0, 0, 0, 1)))


@on_ranks(4)
def test_ranks_without_images_decode_none(one_image: list[str]) -> None:
    [(of_ranks, _)] = decoded_images(one_image)
    assert sorted(map(len, of_ranks)) == [0, 0, 0, 1]


def batches(flags: list[str]) -> list[list[tuple[list[int], bytes, int]]]:
    """Tokens, patches and supervised tokens of every micro-batch of every step."""
    return [
        [(m.inputs["text"].tokens.tolist(), _bytes(m), b.supervised) for m in b.micro_batches if "text" in m.inputs]
        for _, b, _ in build(flags).batches()
    ]


def _bytes(micro_batch: MicroBatchInputs) -> bytes:
    chunks = chunks_of(micro_batch.inputs["vision"]) if "vision" in micro_batch.inputs else []
    return b"".join(chunk.patches.numpy().tobytes() for chunk in chunks)


WORKERS = "--data.workers 2"


@pytest.mark.parametrize(
    "flags, more",
    [
        (("sp:2,dp:2", "tp:2,dp:2", "--train.iters 4"), WORKERS),
        pytest.param(
            ("sp:2,dp:2", "tp:2,dp:2", "--train.iters 4"), f"{WORKERS} --data.worker_type process",
            marks=pytest.mark.long,
        ),
    ],
    indirect=["flags"],
)  # fmt: skip
@on_ranks(4)
def test_work_in_the_background_changes_nothing(flags: list[str], more: str) -> None:
    assert batches(flags) == batches([*without(flags, "--data.workers"), *more.split()])


def without(flags: list[str], name: str) -> list[str]:
    """The command line without a flag of one value."""
    at = flags.index(name)
    return flags[:at] + flags[at + 2 :]


@pytest.mark.parametrize(
    "flags", [("sp:4", "tp:2,dp:2", "--train.iters 12 --train.micro_batch_size 2 --optimizer.lr 1e-3")], indirect=True
)
@on_ranks(4)
def test_loading_ahead_while_training_does_not_mix_up_messages(flags: list[str]) -> None:
    """The loader's thread and the training thread exchange messages at once, each rank in an order of its own."""
    ahead = jobs.losses([*without(flags, "--data.workers"), *WORKERS.split()])
    assert ahead == jobs.losses(flags) and by_rank(ahead) == [ahead] * 4


BAD = {
    "missing image": (lambda images: (images / "4_0.png").unlink(), "4_0.png"),
    "truncated image": (lambda images: truncate(images / "4_0.png"), "4_0.png"),
}


def truncate(path: Path) -> None:
    """Leave the header, so that only decoding finds out."""
    path.write_bytes(path.read_bytes()[:200])


@pytest.fixture
def with_bad_data(kind: str, workers: int, make_flags: MakeFlags, tmp_path: Path) -> list[str]:
    """A command line for data whose second step cannot be read."""
    data = write_data(tmp_path, 8, pictures=(1,))
    BAD[kind][0](data.parent / "images")
    return make_flags("dp:4", "tp:2,dp:2", f"--train.iters 3 --data.workers {workers}", data=data)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BAD)
@on_ranks(4)
def test_bad_data_of_one_rank_stops_all_with_one_message(kind: str, with_bad_data: list[str]) -> None:
    [(steps, message)] = set(by_rank(error_of(with_bad_data)))
    assert steps == 1 and message.startswith("step 2, data of rank ") and BAD[kind][1] in message


@pytest.mark.parametrize("flags", [("sp:4", "tp:4", "--data.max_seq_length 20")], indirect=True)
@on_ranks(4)
def test_a_long_sample_is_an_error_unless_skipped(flags: list[str]) -> None:
    [(_, message)] = set(by_rank(error_of(flags)))
    assert "data.max_seq_length = 20" in message


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [("sp:2", "dp:2", "--train.iters 6 --data.workers 1 --data.worker_type process")], indirect=True
)
@on_ranks(2)
def test_a_process_that_dies_stops_all_ranks_with_one_message(flags: list[str]) -> None:
    run, message = build(flags), ""
    try:
        for number, _, _ in run.batches():
            if number == 1 and run.trainer.topology.rank == 1:
                _kill_worker_processes()
    except UserError as error:
        message = str(error)
    assert by_rank(message) == [message] * 2
    assert message.startswith("step ") and "data of rank 1: data.worker_type process" in message
    assert "SIGKILL" in message


def _kill_worker_processes() -> None:
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            if b"worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
