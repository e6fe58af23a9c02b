"""The library with modules that are not ours: the example in all placements, against the same modules in one process
(it compares losses and gradients itself), and started as a user starts it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.custom_modules import Options
from megatron_hetero.schedule.settings import ScheduleSettings
from tests.functional import library_jobs as jobs
from tests.support.pool import Pool

Pools = Callable[[int], Pool]

ROOT = Path(__file__).parents[2]
# Encoder, decoder.
PLACEMENTS = [
    ("dp:4", "sp:2,dp:2"),  # colocated, gradients of rows in parts
    ("dp:2@0-1", "sp:2@2-3"),  # disjoint
    ("dp:3@0-2", "sp:2@2-3"),  # mixed
    ("dp:4", "sp:2,pp:2"),  # stages: colocated, disjoint, mixed
    ("dp:2@0-1", "pp:2@2-3"),
    ("dp:3@0-2", "pp:2@2-3"),
]


@pytest.mark.parametrize("encoder, decoder", PLACEMENTS)
def test_losses_and_gradients_are_those_of_one_process(encoder: str, decoder: str, pools: Pools) -> None:
    options = Options(encoder, decoder, steps=2, micro_batches=5, samples=5, check=True)
    (first, said), *others = pools(4).run(jobs.trained, options)
    assert len(first) == 2 and all(losses == first for losses, _ in others)
    assert said[0].startswith("encoder dp:")
    assert "from one process" in said[-1]


def test_more_replicas_than_samples(pools: Pools) -> None:
    pools(4).run(jobs.trained, Options("dp:4", "dp:4", steps=1, micro_batches=4, samples=2, check=True))


def test_it_learns(pools: Pools) -> None:
    (losses, _), *_ = pools(4).run(jobs.trained, Options(steps=12))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    "options, found",
    [
        (Options("tp:4"), "found 1 attention heads and tp:4"),
        (Options(decoder_parallel="cp:4"), "axis cp): found cp:4, expected cp:1"),
        (Options("dp:2@0-1", "dp:1@2"), "ranks 3: found no module that covers them"),
        (Options(decoder_parallel="pp:4"), "found 2 layers and pp:4"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(options: Options, found: str, pools: Pools) -> None:
    [message] = set(pools(4).run(jobs.refusal, options))
    assert found in message


def test_a_decoder_may_ignore_its_rows(pools: Pools) -> None:
    assert pools(4).run(jobs.run_decoder, "uses rows") == [(12.0, 12.0)] * 4
    assert pools(4).run(jobs.run_decoder, "ignores rows") == [(4.0, 0.0)] * 4


def test_what_models_return_and_where_they_are_must_fit(pools: Pools) -> None:
    for message in pools(4).run(jobs.misfit, "no scalar"):
        assert message.startswith("micro-batch 0 of `decoder`, stage 0: found a loss of shape (2,), expected a scalar")
    said = pools(4).run(jobs.misfit, "other type")
    assert said[:2] == ["", ""] and "found hidden states of torch.float64, expected torch.float32" in said[2]
    said = pools(4).run(jobs.misfit, "other stage")
    for message in said:
        assert "on rank 3: found stages [0] of `decoder`, expected stage 1 of `decoder`" in message
    assert "on rank 0: found `audio`, expected some of encoder, decoder" in pools(4).run(jobs.misfit, "unknown")[0]


@pytest.mark.parametrize(
    "vision, text",
    [("dp:4", "dp:4"), ("dp:4", "dp:2@0-1"), ("dp:3@0-2", "dp:1@3"), ("dp:1@0", "dp:3@1-3"), ("dp:3@0-2", "dp:3@1-3")],
)
def test_the_plain_loop_trains_as_one_process_does(vision: str, text: str, pools: Pools) -> None:
    for found in pools(4).run(jobs.differences_of_plain_loop, vision, text):
        assert found and max(found) < 1e-5


@pytest.mark.parametrize("text, generator", [("dp:4", "dp:4"), ("pp:2,dp:2", "dp:4"), ("pp:2@0-1", "dp:2@2-3")])
def test_a_text_module_that_feeds_a_generator_trains_as_in_one_process(text: str, generator: str, pools: Pools) -> None:
    for found in pools(4).run(jobs.difference_of_generator, text, generator):
        assert found < 1e-5


@pytest.mark.parametrize("rows", [1, 3])
def test_an_encoder_returns_the_rows_of_the_plan(rows: int, pools: Pools) -> None:
    assert pools(4).run(jobs.encoded, 2) == [""] * 4
    for message in pools(4).run(jobs.encoded, rows):
        found = f"found rows of shape ({rows}, 1), expected (2, 1), what this rank holds in the plan"
        assert message.startswith(f"micro-batch 0 of `encoder`, stage 0: {found}")


@pytest.mark.parametrize("shape", [(2, 3), (6, 1), (4, 3), (1, 2), (3, 2)])
def test_hidden_states_have_the_shape_of_the_next_stage(shape: tuple[int, int], pools: Pools) -> None:
    """As many bytes or not: both ranks learn it before any are sent."""
    *encoders, first, last = pools(4).run(jobs.sent, shape)
    found = f"found hidden states of shape {shape} from rank 2, expected (3, 2), the `hidden_shape` of the next stage"
    assert encoders == ["", ""]
    for stage, message in enumerate((first, last)):
        expected = "" if shape == (3, 2) else f"micro-batch 0 of `decoder`, stage {stage}: {found}"
        assert message.split(".")[0] == expected


def test_outputs_of_two_stages_arrive_by_name(pools: Pools) -> None:
    first, last, *decoders = pools(4).run(jobs.several_outputs, "all")
    # In each of two micro-batches, of each row: 1 * 2 of `near`, 2 * 3 of `far`, 3 * 5 of `rows`.
    assert [loss for loss, *_ in decoders] == [2 * (2 + 6 + 15)] * 2
    assert first == (0.0, 2 * 2 * (2 + 6 + 15), "") and last[2] == ""


NAMES = "expected a tensor by each of the names hidden, near, far. Correct what the model of the stage returns."
HELD = "expected (2, 1), what this rank holds in the plan"


@pytest.mark.parametrize(
    "kind, said",
    [
        ("too few", f"outputs hidden, near, {NAMES}"),
        ("unknown", f"outputs hidden, near, far, farther, {NAMES}"),
        ("hidden states alone", f"outputs hidden, {NAMES}"),
        ("nothing", f"no outputs, {NAMES}"),
        ("a tuple", f"a tuple, {NAMES}"),
        ("none", f"a NoneType, {NAMES}"),
        ("no tensor", f"far of type NoneType, {NAMES}"),
        ("too many rows", f"far of shape (4, 1), {HELD}"),
        ("too wide", f"near of shape (2, 2), {HELD}"),
        ("no dims", f"near of shape (), {HELD}"),
    ],
)
def test_a_stage_returns_the_outputs_of_its_edges(kind: str, said: str, pools: Pools) -> None:
    message = pools(4).run(jobs.several_outputs, kind)[0][2]
    assert message.startswith(f"micro-batch 0 of `encoder`, stage 0: found {said}"), message
    assert message.count("found") == message.count("expected") == 1


def test_edges_are_those_of_the_topology(pools: Pools) -> None:
    for kind, edge in (("graph", "encoder.0>decoder.1"), ("no module", "audio>decoder")):
        for message in pools(4).run(jobs.other_edges, kind):
            found = f"found a graph with the edges `{edge}`, `encoder>decoder`, expected `encoder>decoder`, because"
            assert message.startswith(f"interpreter on rank 0: {found}"), message
    said = pools(4).run(jobs.other_edges, "schedule")
    assert said[2] == "" and "with the edges `encoder.0>decoder.1`, expected none" in said[3]
    for message in said[:2]:
        assert (
            "found a schedule with the edges `encoder.0>decoder.1`, `encoder>decoder`, expected `encoder>dec" in message
        )


def test_a_forward_pass_that_is_made_again_drops_the_same(pools: Pools) -> None:
    settings = ScheduleSettings(kind="waves", waves=3), ScheduleSettings(kind="recompute")  # in one order of draws
    once, twice = (pools(4).run(jobs.with_dropout, kind) for kind in settings)
    for (*kept, first, after), (*made_again, both, after_both) in zip(once, twice, strict=True):
        assert both == [*first, *first] and len({tuple(rows) for rows in first}) == 3
        assert made_again == kept and after_both == after


def test_the_first_action_that_the_device_has_not_ended_is_named(pools: Pools) -> None:
    encoder, _, first, last = pools(4).run(jobs.oldest_on_the_device)
    assert encoder[0] == "action encoder.0.F0 of micro-batch 0, with the other ranks of its stage,"
    assert encoder[1] == "action encoder>decoder.F0 of micro-batch 0, with ranks 1-2 over encoder>decoder,"
    assert any(what.startswith("action decoder>encoder.B0! ") and "over decoder>encoder" in what for what in encoder)
    assert "action decoder.0>1.F0 of micro-batch 0, with rank 3 over decoder forward from stage 0," in first
    assert "action decoder.1>0.B0 of micro-batch 0, with rank 2 over decoder backward from stage 1," in last


def launched(program: str, *flags: str, ranks: int, folder: Path) -> list[str]:
    """The lines that an example prints, run in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    finished = subprocess.run(
        [*command, str(ROOT / "examples" / program), *flags],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def test_under_torchrun(tmp_path: Path) -> None:
    layouts = ("--encoder-parallel", "dp:1@0", "--decoder-parallel", "dp:1@1")
    lines = launched("custom_modules.py", "--check", "--steps", "2", *layouts, ranks=2, folder=tmp_path)
    first, *schedule, before, last = lines
    assert first == "encoder dp:1@0, decoder dp:1@1"
    assert [line.split()[:2] for line in schedule] == [["0", "encoder.0"], ["1", "decoder.0"]]
    assert before.startswith("step 1/2: loss ") and last.startswith("step 2/2: loss ")


def losses(lines: list[str]) -> dict[int, float]:
    """By step."""
    found = [re.fullmatch(r"step (\d+): loss (\d+\.\d+)", line) for line in lines]
    return {int(match[1]): float(match[2]) for match in found if match}


def test_the_recipe_to_copy_learns_and_resumes(tmp_path: Path) -> None:
    assert len((ROOT / "examples/recipe.py").read_text(encoding="utf-8").splitlines()) <= 60
    first = losses(launched("recipe.py", ranks=2, folder=tmp_path))
    assert list(first) == list(range(1, 21))
    shutil.rmtree(tmp_path / "runs/recipe/00000020")
    second = losses(launched("recipe.py", ranks=2, folder=tmp_path))
    assert list(second) == list(range(11, 31))
    assert {step: second[step] for step in range(11, 21)} == {step: first[step] for step in range(11, 21)}
    assert sum(second[step] for step in range(26, 31)) < 0.85 * sum(first[step] for step in range(1, 6))
