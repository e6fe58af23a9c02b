"""Loss and exact match of held-out data equal plain `transformers`' in any layout, and training does not notice."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from megatron_hetero.base.errors import UserError
from megatron_hetero.train.held_out import HeldOutEvaluation
from tests.functional.train.checks import evaluated, loss_of_record, mean_loss, trained_and_exported
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import long, thinned
from tests.support.oracle import Oracle, TwoTowers
from tests.support.pool import Pools
from tests.support.runs import MakeFlags, build, stored

SAMPLES = {"many": 7, "one": 1}
"""Samples of the data sets: the first fills one batch of four and a part of the next, the second part of one."""
DEEP = ModelChoice(vision_layers=2, text_layers=4, tied=True, seed=3)
QWEN3 = replace(DEEP, family="qwen3_vl", vision_layers=4, head_dim=16, text_hidden=48, deepstack=(0, 1, 2))
MOE = replace(QWEN3, family="qwen3_vl_moe", seed=31)


KNOWN, ALTERED = (0, 1, 2), {3: 0, 5: 2}
"""Of the first data set: samples that the model is trained on, and samples that are one of these but for a word."""


@dataclass(frozen=True)
class Measured:
    """A sample according to plain transformers: its tokens, the sum of the losses of its supervised tokens, their
    number, and whether greedy generation answers it.
    """

    tokens: int
    loss: float
    supervised: int
    right: bool


class Material:
    """A model that knows some samples and two data sets on disk, and what plain transformers says of them."""

    def __init__(self, folder: Path, two_towers: bool, model: ModelChoice = DEEP):
        self.folder = folder
        write_model(folder / "model", model)
        write_model(folder / "detail", ModelChoice(vision_layers=1, vision_heads=2, full_layers=(0,), seed=8))
        details, load = ((1, 0, 0, 2), TwoTowers.load) if two_towers else ((0,), Oracle.load)
        for seed, (name, samples) in enumerate(SAMPLES.items()):
            write_data(folder / name, samples, seed, turns=2, details=details)
        _alter(folder / "many/data.jsonl")
        _teach(load(folder / "model", folder / "many/data.jsonl"), folder / "model")
        self.samples = {name: _measured(load(folder / "model", folder / name / "data.jsonl")) for name in SAMPLES}
        right = [sample.right for sample in self.samples["many"]]
        assert all(right[known] for known in KNOWN) and not any(right[altered] for altered in ALTERED)

    def flags(self, more: str) -> str:
        """Flags that evaluate both data sets."""
        registry = " ".join(
            f"--data.registry.{name}.annotations {self.folder}/{name}/data.jsonl "
            f"--data.registry.{name}.images {self.folder}/{name}/images"
            for name in SAMPLES
        )
        return f"--model.hf_path {self.folder}/model {registry} --eval.datasets many one --eval.interval 5 {more}"


def _alter(path: Path) -> None:
    """Put a known sample with another word in an answer, once in the last one and once in the first, in the place of
    some samples.
    """
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for (number, original), turn in zip(ALTERED.items(), (3, 1), strict=True):
        records[number] = copy.deepcopy(records[original])
        answer = records[number]["conversations"][turn]
        *words, last = answer["value"].split()
        answer["value"] = " ".join([*words, "it" if last == "above" else "above"])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _teach(oracle: Oracle, folder: Path) -> None:
    """Train the model on the known samples, into `folder`."""
    oracle.fit(KNOWN, 40, 1e-2)
    model: Any = oracle.model
    if isinstance(oracle, TwoTowers):
        del model.detail  # it was not trained, and has a folder of its own
    model.save_pretrained(folder)


@torch.no_grad()
def _measured(oracle: Oracle) -> list[Measured]:
    return [
        Measured(len(oracle._logits(record)[0]), *loss_of_record(oracle, record), oracle.answers_exactly(record))
        for record in oracle.records
    ]


def trained(flags: list[str]) -> dict[str, Any]:
    """Losses, weights, random state and evaluations of a run as the program does it."""
    run = build(flags)
    evaluation, losses, found, idle = HeldOutEvaluation.build(run), [], [], []
    for step, batch, waited in run.batches():
        metrics = run.trainer.train_step(step, batch, waited)
        losses.append(metrics.loss)
        idle.append(metrics.extra["encoder_idle_share"])
        found += evaluation.after(step)
    weights, state = stored(run), torch.get_rng_state().numpy().tobytes()
    return {"losses": losses, "weights": weights, "state": state, "found": found, "idle": idle}


def refused(flags: list[str]) -> str:
    """The message with which the evaluation stops."""
    try:
        evaluated(flags)
    except UserError as error:
        return str(error)
    return ""


def refused_at_once(flags: list[str]) -> tuple[str, int]:
    """The message with which the building of a run stops, and the process groups that it has made by then."""
    before = dist.get_pg_count()
    try:
        build(flags)
    except UserError as error:
        return str(error), dist.get_pg_count() - before
    return "", -1


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("one-tower"), two_towers=False)


@pytest.fixture(scope="module")
def two_towers(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("two-towers"), two_towers=True)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("qwen3"), two_towers=False, model=QWEN3)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("moe"), two_towers=False, model=MOE)


@pytest.fixture(scope="module")
def qwen3_two_towers(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("qwen3-two-towers"), two_towers=True, model=QWEN3)


@pytest.mark.parametrize("vision, text, ranks, more", thinned([
    ("dp:1", "dp:1", 1, "--train.micro_batch_size 4"),
    ("sp:2", "tp:2", 2, "--text-recompute full"),
    ("sp:2", "tp:2", 2, "--text-recompute selective --text-chunk 4 --vision-chunk 8"),
    ("sp:2,dp:2", "cp:2,dp:2", 4, ""),
    ("tp:2,dp:2", "sp:2,tp:2", 4, "--text-sequence_parallel false --train.micro_batch_size 2"),
    ("sp:2", "pp:2", 2, "--schedule.kind recompute"),
    ("sp:2", "pp:2", 2, "--schedule.virtual_stages 2 --data.workers 1"),
    ("sp:2@0-1", "pp:2@1-2", 3, ""),
    ("pp:2@0-1", "tp:2@2-3", 4, "--schedule.run_ahead 0"),
    ("sp:2", "dp:2", 2, "--train.tokens_per_micro_batch 256 --data.max_seq_length 256"),
], 3))  # fmt: skip
def test_numbers_equal_transformers(
    vision: str, text: str, ranks: int, more: str, material: Material, make_flags: MakeFlags, pools: Pools
) -> None:
    check(material, pools(ranks).run(evaluated, make_flags(vision, text, material.flags(more))))


SPLIT = "--text-layers 1 3"


@pytest.mark.parametrize("vision, text, ranks, more", thinned([
    ("sp:2", "pp:2", 2, SPLIT),
    ("sp:2", "tp:2", 2, "--train.micro_batch_size 4"),
    ("dp:2,sp:2", "cp:2,dp:2", 4, ""),
    ("pp:2", "pp:2", 2, f"{SPLIT} --schedule.kind recompute"),
    ("dp:2", "pp:2", 2, "--schedule.virtual_stages 2"),
    ("dp:1@0", "pp:4@1-4", 5, "--text-layers 1 1 1 1 --schedule.run_ahead 0"),
    ("sp:2@0-1", "pp:2@1-2", 3, SPLIT),
], 3))  # fmt: skip
def test_numbers_of_qwen3_vl_equal_transformers(
    vision: str, text: str, ranks: int, more: str, qwen3: Material, make_flags: MakeFlags, pools: Pools
) -> None:
    check(qwen3, pools(ranks).run(evaluated, make_flags(vision, text, qwen3.flags(more))))


BALANCED = "--model.router_aux_loss_coef 0.5"


@pytest.mark.parametrize("vision, text, ranks, more", thinned([
    ("sp:4", "dp:4,ep:4", 4, BALANCED),
    ("dp:2", "tp:2,ep:2", 2, f"{BALANCED} --train.micro_batch_size 2"),
    ("sp:4", "pp:2,dp:2,ep:2", 4, f"{BALANCED} {SPLIT}"),
    ("dp:2", "dp:2,ep:2", 2, f"{BALANCED} --train.tokens_per_micro_batch 256 --data.max_seq_length 256"),
], 4))  # fmt: skip
def test_numbers_of_experts_equal_transformers(
    vision: str, text: str, ranks: int, more: str, moe: Material, make_flags: MakeFlags, pools: Pools
) -> None:
    """Without the loss that balances them, which is for training."""
    check(moe, pools(ranks).run(evaluated, make_flags(vision, text, moe.flags(more))))


@pytest.mark.parametrize("vision, detail, text, ranks", thinned([
    ("sp:2", "tp:2", "pp:2", 2),
    ("dp:1@0", "dp:1@1", "pp:2@0-1", 2),
], 2))  # fmt: skip
def test_numbers_of_two_encoders_of_two_families(
    vision: str, detail: str, text: str, ranks: int, qwen3_two_towers: Material, make_flags: MakeFlags, pools: Pools
) -> None:
    test_numbers_of_two_encoders(vision, detail, text, ranks, qwen3_two_towers, make_flags, pools)


@pytest.mark.parametrize(
    "vision, detail, text, ranks", long([("sp:2", "dp:2", "tp:2", 2), ("dp:1@0", "dp:1@1", "pp:2", 2)])
)
def test_numbers_of_two_encoders(
    vision: str, detail: str, text: str, ranks: int, two_towers: Material, make_flags: MakeFlags, pools: Pools
) -> None:
    more = f"--detail-hf_path {two_towers.folder}/detail --detail-parallel {detail}"
    flags = two_towers.flags(f"{more} --detail-token <|video_pad|>")
    check(two_towers, pools(ranks).run(evaluated, make_flags(vision, text, flags)))


@pytest.mark.parametrize("vision, text, ranks", [("dp:4", "cp:2,dp:2", 4), ("dp:2", "dp:2", 2)])
def test_samples_that_are_too_long_are_not_asked(
    vision: str, text: str, ranks: int, material: Material, make_flags: MakeFlags, pools: Pools
) -> None:
    longest = sorted(sample.tokens for sample in material.samples["many"])[-3]
    more = f"--data.max_seq_length {longest} --data.too_long skip --train.micro_batch_size 2 --eval.datasets many"
    results = pools(ranks).run(evaluated, make_flags(vision, text, material.flags(more)))
    check(material, results, longest, ["many"])


def check(material: Material, results: list, longest: int = 10**6, names: Sequence[str] = tuple(SAMPLES)) -> None:
    """Compare what all ranks found with plain transformers, on samples of up to `longest` tokens."""
    for found, kept in results:
        assert kept == 0, "something was kept for a backward pass"
        assert [metrics.dataset for metrics in found] == list(names)
        for metrics in found:
            samples = [sample for sample in material.samples[metrics.dataset] if sample.tokens <= longest]
            supervised = sum(sample.supervised for sample in samples)
            assert metrics.loss == pytest.approx(sum(sample.loss for sample in samples) / supervised, rel=1e-5)
            assert metrics.supervised_tokens == supervised
            assert metrics.samples == metrics.asked == len(samples)
            assert metrics.exact_match == sum(sample.right for sample in samples) / len(samples)


@pytest.mark.parametrize("vision, text, ranks, more", thinned([
    ("pp:2", "pp:2", 2, SPLIT),
    ("sp:2", "tp:2", 2, ""),
    ("pp:2@0-1", "pp:2@2-3", 4, SPLIT),
], 3))  # fmt: skip
def test_an_export_says_the_same_in_transformers(
    vision: str, text: str, ranks: int, more: str, qwen3: Material, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    """What was trained in a layout, exported and loaded strictly, has the loss that the run measured of it."""
    more = f"{more} --optimizer.name adamw --optimizer.lr 1e-3 --eval.datasets many --eval.interval 1"
    target, before = tmp_path / "out", Oracle.load(qwen3.folder / "model", qwen3.folder / "many/data.jsonl")
    line = make_flags(vision, text, qwen3.flags(more))
    loss, weights = pools(ranks).run(trained_and_exported, line, target)[0]
    after = Oracle.load(target, qwen3.folder / "many/data.jsonl")
    assert loss == pytest.approx(mean_loss(after)[0], rel=1e-5)
    assert abs(loss - mean_loss(before)[0]) > 1e-3 * loss, "nothing was learnt, so that equal losses say little"
    kind: Any = AutoModelForImageTextToText
    assert not any(kind.from_pretrained(target, output_loading_info=True)[1].values())
    assert after.weights().keys() == weights.keys()
    for name, weight in after.weights().items():
        np.testing.assert_array_equal(weight.numpy(), weights[name], err_msg=name)


@pytest.mark.parametrize("vision, text, ranks", [("dp:1@0", "pp:2@1-2", 3)])
def test_training_does_not_notice(
    vision: str, text: str, ranks: int, material: Material, make_flags: MakeFlags, pools: Pools
) -> None:
    more = "--optimizer.name adamw --optimizer.lr 1e-3 --data.shuffle true --data.workers 2 --train.iters 3"
    off, on = (
        pools(ranks).run(trained, make_flags(vision, text, material.flags(f"{more} --eval.interval {interval}")))
        for interval in (100, 1)
    )
    for a, b in zip(off, on, strict=True):
        assert a["losses"] == b["losses"] and a["state"] == b["state"]
        assert [m.step for m in a["found"]] == [3, 3] and [m.step for m in b["found"]] == [1, 1, 2, 2, 3, 3]
        assert all(0 <= share <= 1 for share in b["idle"]), "times of evaluations count as the step's"
        assert [m.loss for m in a["found"]] == [m.loss for m in b["found"][-2:]]
    for name, weight in off[0]["weights"].items():
        np.testing.assert_array_equal(weight, on[0]["weights"][name], err_msg=name)


def test_nothing_to_measure_is_refused(material: Material, make_flags: MakeFlags, pools: Pools) -> None:
    """Samples that are too long are not counted; where none is left every rank says so."""
    short = "--data.max_seq_length 1 --data.too_long"
    for message in pools(2).run(refused, make_flags("dp:2", "tp:2", material.flags(f"{short} skip"))):
        assert "eval.datasets: many: no supervised token" in message
    for message in pools(2).run(refused, make_flags("dp:2", "tp:2", material.flags(f"{short} error"))):
        assert "evaluation of many, batch 1, data of rank 0" in message and "at most data.max_seq_length" in message


def test_a_data_set_that_does_not_load_is_refused_first(make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("{")
    data = f"--data.registry.held.annotations {tmp_path}/broken.jsonl --eval.datasets held --eval.interval 2"
    flags = make_flags("sp:2", "tp:2", data)
    for message, groups in pools(2).run(refused_at_once, flags):
        assert "broken.jsonl" in message and groups == 0
