"""The loader on real groups: who decodes what, errors that reach every rank, and work in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_hetero.job import BatchShape
from tests.support.folders import write_data
from tests.support.pool import Pool
from tests.unit.train import jobs_run as jobs
from tests.unit.train.jobs_run import MakeFlags

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("replicas, micro_batches, samples", [(1, 1, 1), (2, 3, 2), (4, 1, 2), (3, 2, 1)])
def test_steps_take_the_samples_in_order(replicas: int, micro_batches: int, samples: int) -> None:
    shape = BatchShape(replicas, micro_batches, samples)
    total = replicas * micro_batches * samples
    assert shape.step_samples == total
    for step in (1, 2, 7):
        taken = [n for m in range(micro_batches) for r in range(replicas) for n in shape.numbers(step, r, m)]
        assert taken == list(range((step - 1) * total, step * total))


@pytest.mark.parametrize(
    "vision, text", [("sp:4", "tp:4"), ("cp:2,sp:2", "cp:4"), ("dp:4", "tp:2,dp:2"), ("tp:2,dp:2", "dp:4")]
)
def test_an_image_is_decoded_once(vision: str, text: str, make_flags: MakeFlags, pools: Pools) -> None:
    by_rank = pools(4).run(
        jobs.decoded, make_flags(vision, text, "--train.iters 3 --train.global_batch_size 8 --train.micro_batch_size 2")
    )
    busy = 0
    for of_ranks in zip(*by_rank, strict=True):
        everything = [image for found in of_ranks for image in found["decoded"]]
        assert len(everything) == len(set(everything)) == of_ranks[0]["images"]
        busy += sum(bool(found["decoded"]) for found in of_ranks)
    assert busy >= 10, "most ranks leave the decoding to others"


def test_ranks_without_images_decode_none(make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    data = write_data(tmp_path, 4, pictures=(0, 0, 0, 1))
    by_rank = pools(4).run(jobs.decoded, make_flags("dp:4", "tp:4", data=data))
    assert sorted(len(found["decoded"]) for [found] in by_rank) == [0, 0, 0, 1]


def test_work_in_the_background_changes_nothing(make_flags: MakeFlags, pools: Pools) -> None:
    flags = make_flags("sp:2,dp:2", "tp:2,dp:2", "--train.iters 4")
    ahead = make_flags("sp:2,dp:2", "tp:2,dp:2", "--train.iters 4 --data.workers 2")
    assert pools(4).run(jobs.batches, flags) == pools(4).run(jobs.batches, ahead)


def test_loading_ahead_while_training_does_not_mix_up_messages(make_flags: MakeFlags, pools: Pools) -> None:
    """The loader's thread and the training thread talk to other ranks at once, each rank in an order of its own."""
    more = "--train.iters 12 --train.micro_batch_size 2 --optimizer.lr 1e-3"
    found = pools(4).run(jobs.losses, make_flags("sp:4", "tp:2,dp:2", f"{more} --data.workers 2"))
    expected = pools(4).run(jobs.losses, make_flags("sp:4", "tp:2,dp:2", more))
    assert found == expected and found.count(found[0]) == 4


BAD = {
    "missing image": (lambda images: (images / "4_0.png").unlink(), "4_0.png"),
    "truncated image": (lambda images: truncate(images / "4_0.png"), "4_0.png"),
}


def truncate(path: Path) -> None:
    """Leave the header, so that only decoding finds out."""
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BAD)
def test_bad_data_of_one_rank_stops_all_with_one_message(
    kind: str, workers: int, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    data = write_data(tmp_path, 8, pictures=(1,))
    spoil, name = BAD[kind]
    spoil(data.parent / "images")
    more = f"--train.iters 3 --data.workers {workers}"
    told = pools(4).run(jobs.error_of, make_flags("dp:4", "tp:2,dp:2", more, data=data))
    assert len(set(told)) == 1, "ranks disagree"
    steps, message = told[0]
    assert steps == 1 and message.startswith("step 2, data of rank ") and name in message


def test_a_long_sample_is_an_error_unless_skipped(make_flags: MakeFlags, pools: Pools) -> None:
    told = set(pools(4).run(jobs.error_of, make_flags("sp:4", "tp:4", "--data.max_seq_length 20")))
    assert len(told) == 1 and "data.max_seq_length = 20" in told.pop()[1]
