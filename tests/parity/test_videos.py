"""Loss, every gradient and the weights after steps equal plain `transformers`, with videos, pictures and text mixed in
samples and steps, in any layout.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.functional.train.checks import evaluated
from tests.parity.cases import (
    MODELS,
    RECOMPUTED,
    WHOLE,
    Ask,
    Case,
    Expected,
    Runs,
    flags_of,
    gradients_equal,
    three_steps_equal,
    train_alone,
)
from tests.support.folders import write_model
from tests.support.matrix import thinned
from tests.support.pool import Pools
from tests.support.videos import FLAGS, VideoOracle, noise, write_video, write_video_data

ZERO3 = ("--vision-zero", "3", "--text-zero", "3")
BUDGET = ("--train.tokens_per_micro_batch", "1024", "--data.max_seq_length", "1024")


def _case(
    vision: str, text: str, ranks: int, model: str, micro: int = 2, flags: tuple[str, ...] = (), **more: object
) -> Case:
    return replace(Case(vision, text, ranks, model, micro, (*FLAGS, *flags)), **more)


CASES = [
    _case("dp:1", "dp:1", 1, "untied"),
    _case("dp:2", "dp:2", 2, "tied", 1),
    _case("sp:2", "tp:2", 2, "untied"),
    _case("cp:2", "cp:2", 2, "one-kv-head"),
    _case("dp:4", "tp:4", 4, "untied"),
    _case("sp:2,dp:2", "cp:2,dp:2", 4, "tied"),
    _case("tp:2,cp:2", "sp:2,tp:2", 4, "one-kv-head"),
    _case("dp:3", "tp:3", 3, "twelve-heads"),
    _case("sp:4", "pp:4", 4, "deep", 1, given_batch=8),
    _case("sp:4", "pp:4", 4, "deep", 1, (*RECOMPUTED,), given_batch=8),
    _case("dp:2@0-1", "tp:2@2-3", 4, "untied"),
    _case("dp:1@0", "pp:2@1-2", 3, "deep", 1, given_batch=8),
    _case("sp:2@0-1", "pp:2@1-2", 3, "deep", 1, given_batch=8),
    _case("sp:2", "pp:2", 2, "deep", 1, ("--schedule.waves", "2"), given_batch=8),
    _case("dp:2", "dp:2", 2, "untied", 2, ZERO3),
    _case("dp:4", "tp:2,dp:2", 4, "tied", 1, BUDGET),
    _case("tp:2", "dp:2", 2, "tied", 2, WHOLE),
    _case("dp:1", "dp:1", 1, "qwen3"),
    _case("dp:2", "dp:2", 2, "qwen3", 1),
    _case("sp:2", "tp:2", 2, "qwen3-tied"),
    _case("cp:2", "cp:2", 2, "qwen3-one-kv-head"),
    _case("dp:4", "tp:4", 4, "qwen3"),
    _case("sp:2,cp:2", "cp:4", 4, "qwen3-tied"),
    _case("dp:3", "tp:3", 3, "qwen3-twelve-heads"),
    _case("sp:4", "pp:2,tp:2", 4, "qwen3-deep", 1, given_batch=8),
    _case("dp:2@0-1", "tp:2@2-3", 4, "qwen3"),
    _case("dp:1@0", "pp:3@1-3", 4, "qwen3-deep", 1, given_batch=8),
    _case("sp:2@0-1", "pp:2@1-2", 3, "qwen3-deep", 1, given_batch=8),
    _case("dp:2", "dp:2", 2, "qwen3", 2, ZERO3),
    _case("dp:4", "tp:2,dp:2", 4, "qwen3", 1, BUDGET),
    _case("dp:1", "dp:1", 1, "delta"),
    _case("sp:2", "cp:2", 2, "delta"),
    _case("sp:4", "tp:2,cp:2", 4, "delta-moe", 1),
    _case("dp:4", "sp:2,dp:2", 4, "delta-tied", 1, BUDGET),
]


def _in_parts(vision: str, text: str, ranks: int, model: str, patches: int, *more: str, **given: object) -> Case:
    flags = "--vision-patches_per_call", f"{patches}", *more
    return _case(vision, text, ranks, model, 2 if "given_batch" not in given else 1, flags, **given)


PARTS = [
    _in_parts("dp:1", "dp:1", 1, "untied", 16),
    _in_parts("dp:1", "dp:1", 1, "qwen3", 64, "--vision-recompute", "full"),
    _in_parts("dp:2", "tp:2", 2, "untied", 24, "--vision-offload.activations", "true"),
    _in_parts("sp:2", "cp:2", 2, "qwen3-tied", 24),
    _in_parts("tp:2,cp:2", "sp:2,tp:2", 4, "one-kv-head", 24),
    _in_parts("dp:3", "tp:3", 3, "qwen3-twelve-heads", 40, "--data.balance", "off"),
    _in_parts("tp:2", "dp:2", 2, "tied", 40, *WHOLE),
    _in_parts("sp:4", "pp:4", 4, "deep", 20, *RECOMPUTED, given_batch=8),
    _in_parts("sp:2", "pp:2", 2, "qwen3-deep", 48, "--schedule.waves", "3", given_batch=8),
    _in_parts("pp:2,dp:2", "tp:4", 4, "qwen3-deep", 24),
    _in_parts("pp:2", "pp:2", 2, "deep", 24, *RECOMPUTED, given_batch=8),
    _in_parts("pp:2@0-1", "tp:2@2-3", 4, "qwen3-deep", 24, given_batch=8),
    _in_parts("dp:2", "dp:2", 2, "qwen3", 24, *ZERO3),
    _in_parts("dp:3", "tp:3", 3, "twelve-heads", 24, "--vision-zero", "2"),
    _in_parts(
        *("dp:4", "tp:2,dp:2", 4, "qwen3", 24, *BUDGET, "--train.patches_per_micro_batch", "2048"), given_batch=8
    ),
]
FROZEN_IN_PARTS = [
    (_in_parts("dp:1@0", "tp:2@1-2", 3, "untied", 24), ("vision",)),
    (_in_parts("pp:2", "dp:2", 2, "qwen3-deep", 24, given_batch=8), ("vision",)),
    (_in_parts("dp:2", "dp:2", 2, "qwen3", 24, *ZERO3), ("vision", "projector")),
]
"""What a rank encodes takes several calls, of few patches; replicas with fewer have empty parts."""

LIMITS = ("--data.max_seq_length", "16384")
LONG_CASES = [
    _case("dp:3@0-2", "cp:2@2-3", 4, "untied", 1, LIMITS, given_batch=2),
    _case("sp:2,cp:2", "tp:2,cp:2", 4, "qwen3", 1, LIMITS, given_batch=2),
]
"""A video of 768 frames, one row for each pair, beside short ones."""


def ask_with_videos(folder: Path, case: Case) -> Expected:
    """As `ask_oracle`, with videos; a long one in the first sample of `LONG_CASES`."""
    choice, batch = MODELS[case.model], case.batch
    write_model(folder / "model", choice)
    data = write_video_data(folder, 3 * batch, seed=choice.seed)
    if case in LONG_CASES:
        side = 28 if choice.family == "qwen2_5_vl" else 32
        write_video(folder / "images/long.mp4", noise(768, (side, side), 7), rate=2, keys_every=50)
        lines = data.read_text().splitlines()
        record = json.loads(lines[0]) | {"video": "long.mp4"}
        human = record["conversations"][0]
        human["value"] = "<video>" + human["value"].replace("<video>\n", "")
        data.write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")

    def load() -> VideoOracle:
        return VideoOracle.load(folder / "model", data)

    oracle = load()
    loss, gradients = oracle.step(range(batch))
    before = oracle.weights()
    return Expected(folder, loss, gradients, before, Runs(lambda name: train_alone(load(), name, batch)))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What the oracle found for the model and the videos of a case."""
    found: dict[tuple[object, ...], Expected] = {}

    def get(case: Case) -> Expected:
        key = case.model, case.batch, case in LONG_CASES
        if key not in found:
            found[key] = ask_with_videos(tmp_path_factory.mktemp(case.model), case)
        return found[key]

    return get


@pytest.mark.parametrize("case", thinned(CASES, 8), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


@pytest.mark.parametrize("case", thinned(PARTS, 5), ids=str)
def test_in_parts(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


@pytest.mark.parametrize("case, frozen", thinned(FROZEN_IN_PARTS, 3), ids=str)
def test_frozen_in_parts(case: Case, frozen: tuple[str, ...], expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks), frozen)


@pytest.mark.parametrize("case", thinned(LONG_CASES, 2), ids=str)
def test_a_long_video(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


@pytest.mark.parametrize("case", [CASES[4], CASES[25], PARTS[4]], ids=str)
def test_the_held_out_loss(case: Case, expected: Ask, pools: Pools) -> None:
    """Of all samples, in batches of which the last is shorter."""
    folder = expected(case).folder
    oracle = VideoOracle.load(folder / "model", folder / "data.jsonl")
    loss, _ = oracle.step(range(len(oracle.records)))
    flags = flags_of(case, folder, "--eval.datasets", "d", "--eval.interval", "1", "--train.iters", "1")
    [metrics], _ = pools(case.ranks).run(evaluated, flags)[0]
    assert metrics.loss == pytest.approx(loss, rel=1e-5) and metrics.samples == len(oracle.records)


@pytest.mark.parametrize("case", [CASES[2], CASES[20]], ids=str)
def test_three_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))
