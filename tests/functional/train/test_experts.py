"""Runs of models with experts: their metrics, what dispatch moves, and what is frozen, or empty on some ranks."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers.dispatch import Dispatch, RowExchange, block
from megatron_hetero.train.held_out import HeldOutEvaluation
from tests.functional.train.checks import EMPTY, assert_equal_gradients
from tests.support import runs as jobs
from tests.support.folders import ModelChoice, write_data, write_long, write_model
from tests.support.matrix import thinned
from tests.support.oracle import Oracle
from tests.support.pool import Pools
from tests.support.runs import MakeFlags, build, build_logged

COEFFICIENT = 0.05
BALANCED = f"--model.router_aux_loss_coef {COEFFICIENT}"
SPLIT = "--text-layers 1 2"
CHOICE = ModelChoice(
    family="qwen3_vl_moe", text_layers=3, vision_layers=2, text_hidden=48, head_dim=16, mlp_only_layers=(1,),
    deepstack=(0,), seed=31,
)  # fmt: skip
SPARSE = (0, 2)
"""Layers with experts."""


class Folder(NamedTuple):
    """A model with experts, and eight samples."""

    model: Path
    data: Path

    def oracle(self, balance: float = COEFFICIENT) -> Oracle:
        """The model in plain transformers."""
        return replace(Oracle.load(self.model, self.data), balance=balance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("experts")
    return Folder(write_model(root / "model", CHOICE), write_data(root, 8, seed=5, turns=2))


@contextmanager
def choices(oracle: Oracle) -> Iterator[dict[int, list[Tensor]]]:
    """Inside, note the experts that the routers of each layer choose."""
    found = defaultdict[int, list[Tensor]](list)
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *values, n=number: found[n].append(values[-1][2]))
        for number, layer in enumerate(oracle.model.model.language_model.layers)
        if number in SPARSE
    ]
    yield found
    for hook in hooks:
        hook.remove()


# ------------------------------------------------------------------------------------------------------- metrics


def trained(flags: list[str]) -> None:
    """Train and evaluate as the program does."""
    run = build_logged(flags)
    evaluation = HeldOutEvaluation.build(run)
    with run.writer:
        for step, batch, _ in run.batches():
            run.writer.write(run.trainer.train_step(step, batch))
            list(evaluation.after(step))


METRICS = [
    ("sp:4", "dp:4,ep:4", f"{BALANCED} --text-recompute full"),
    ("dp:4", "tp:2,dp:2,ep:4", "--text-sequence_parallel false"),
    ("sp:4", "pp:2,cp:2,ep:2", f"{BALANCED} {SPLIT}"),
    ("dp:2@0-1", "dp:2,ep:1@2-3", f"{BALANCED} --text-zero 3"),
]


@pytest.mark.parametrize("vision, text, more", thinned(METRICS, 2))
def test_metrics_are_those_of_transformers(
    vision: str, text: str, more: str, folder: Folder, make_flags: MakeFlags, pools: Pools, tmp_path: Path
) -> None:
    """Of each step, in every layout; an evaluation, and a recomputation, count nothing."""
    more += f" --model.hf_path {folder.model} --optimizer.lr 1e-9 --train.iters 2 --eval.datasets d --eval.interval 1"
    pools(4).run(trained, make_flags(vision, text, more, data=folder.data))
    steps = [json.loads(line) for line in (tmp_path / "log/metrics.jsonl").read_text().splitlines()]
    oracle, is_balanced = folder.oracle(), BALANCED in more
    for step, record in enumerate(record for record in steps if "loss" in record):
        with choices(oracle) as chosen, torch.no_grad():
            found = [(*oracle._sample(each), oracle._logits(each)[2]) for each in oracle.records[4 * step :][:4]]
        supervised = sum(count for _, count, _ in found)
        balance = sum(float(count * added) for _, count, added in found) / supervised
        loss = sum(float(each) for each, *_ in found) / supervised
        assert record["loss"] == pytest.approx(loss - balance * (not is_balanced), rel=1e-5)
        assert record.get("balance_loss") == (pytest.approx(balance, rel=1e-4) if is_balanced else None)
        loads = {}
        for number in SPARSE:
            counts = torch.cat(chosen[number]).flatten().bincount(minlength=CHOICE.experts).double()
            loads[f"expert_load_{number}"] = float(counts.max() / counts.mean())
        own = {name: value for name, value in record.items() if name.startswith("expert_load_")}
        assert own == pytest.approx(loads, rel=1e-9) and record["expert_load"] == max(own.values())


# ------------------------------------------------------------------------------------------- what dispatch moves


class Moved(NamedTuple):
    """Of a rank: the exchanges of its step with the experts of each token, by layer and micro-batch, and how many rows
    came from other ranks in each exchange of hidden states.
    """

    chosen: list[Tensor]
    rows: list[int]


def moved(flags: list[str]) -> Moved:
    """Compute the gradients of a step."""
    run, found = build(flags), Moved([], [])
    of, exchanged = Dispatch.of, RowExchange.run

    def note(chosen: Tensor, *more: Any) -> Dispatch:
        found.chosen.append(chosen)
        return of(chosen, *more)

    def count(exchange: RowExchange, x: Tensor) -> tuple[Tensor, Any]:
        out, work = exchanged(exchange, x)
        if x.shape[1:] == (CHOICE.hidden,):
            found.rows.append(len(out) - exchange.received[exchange.group.rank()])
        return out, work

    with mock.patch.object(Dispatch, "of", note), mock.patch.object(RowExchange, "run", count):
        _, batch, _ = next(iter(run.batches()))
        run.trainer.gradients(batch)
    return found


MOVES = [
    ("sp:4", "dp:4,ep:4", 4, ""),
    ("dp:4", "tp:4,ep:4", 4, "--text-sequence_parallel false"),
    ("sp:4", "tp:2,cp:2,ep:2", 4, BALANCED),
    ("dp:3", "dp:3,ep:3", 3, "--train.global_batch_size 6"),
]


@pytest.mark.parametrize("vision, text, ranks, more", thinned(MOVES, 2))
def test_a_row_goes_once_to_each_rank_that_needs_it(
    vision: str, text: str, ranks: int, more: str, folder: Folder, make_flags: MakeFlags, pools: Pools
) -> None:
    """Forward and backward, in all layers and micro-batches: rows received are no more than the minimum."""
    flags = make_flags(vision, text, f"--model.hf_path {folder.model} {more}", data=folder.data)
    results = pools(ranks).run(moved, flags)
    ep = Layout.parse(text, ranks, views=[EXPERTS]).groups("ep")
    for group in ep:
        of_group = [results[rank] for rank in group]
        blocks = [block(CHOICE.experts, place, len(group)) for place in range(len(group))]
        arriving, returning = np.zeros(len(group), int), np.zeros(len(group), int)
        for of_layer in zip(*(found.chosen for found in of_group), strict=True):
            for source, chosen in enumerate(of_layer):
                for target, (start, stop) in enumerate(blocks):
                    needed = int(((chosen >= start) & (chosen < stop)).any(1).sum()) * (source != target)
                    arriving[target] += needed
                    returning[source] += needed
        assert arriving.sum() > 0
        for found, least in zip(of_group, 2 * (arriving + returning), strict=True):
            assert len(found.rows) == 4 * len(found.chosen) and sum(found.rows) == least


# --------------------------------------------------------------------------------------------- frozen, and empty


FROZEN = {
    "--model.freeze model.layers.*.mlp.experts.*": r"model\.layers\.\d+\.mlp\.experts",
    "--model.freeze model.layers.*.mlp.gate.weight": r"model\.layers\.\d+\.mlp\.gate\.weight",
    "--model.train model.layers.*.mlp.experts.* projector": (
        r"(?!model\.layers\.\d+\.mlp\.experts|visual\.merger|visual\.deepst)"
    ),
    "--model.train *.mlp.gate.weight": r"(?!model\.layers\.\d+\.mlp\.gate\.weight)",
    "--model.freeze vision model.layers.0.* *.experts.*.down_proj.weight": (
        r"visual\.(?!merger|deepst)|model\.layers\.0\.|.*experts.*down"
    ),
}
"""And what they freeze, as a regular expression."""
FROZEN_IN = [
    ("sp:4", "dp:4,ep:4", ""),
    ("dp:4", "tp:2,dp:2,ep:4", "--text-zero 3 --text-recompute full"),
    ("sp:4", "pp:2,dp:2,ep:2", SPLIT),
]


@pytest.mark.parametrize("setting, layout", thinned(product(FROZEN, FROZEN_IN), 4))
def test_frozen_experts_stay_and_the_others_do_not_notice(
    setting: str, layout: tuple[str, str, str], folder: Folder, make_flags: MakeFlags, pools: Pools
) -> None:
    vision, text, more = layout
    more = f"--model.hf_path {folder.model} --optimizer.name sgd --optimizer.lr 0.1 {BALANCED} {more} {setting}"
    got = pools(4).run(jobs.step, make_flags(vision, text, more, data=folder.data, batch=8))[0]
    loss, gradients = folder.oracle().step(range(8))
    trained = {n: g for n, g in gradients.items() if not re.match(FROZEN[setting], n)}
    assert trained and len(trained) < len(gradients)
    assert_equal_gradients({n: got["gradient"][n] for n in trained}, trained)
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    for name, before in got["before"].items():
        assert (got["after"][name] == before).all() == (name not in trained), name


EMPTY_IN = [
    ("dp:4", "dp:4,ep:4", ""),
    ("sp:2,dp:2", "tp:2,dp:2,ep:4", "--text-sequence_parallel false"),
    ("sp:4", "pp:2,dp:2,ep:2", SPLIT),
]


@pytest.mark.parametrize("layouts, empty", thinned(product(EMPTY_IN, EMPTY), 5), ids=str)
def test_packs_may_be_empty_where_others_send_tokens(
    layouts: tuple[str, str, str], empty: tuple[set[int], int], folder: Folder, make_flags: MakeFlags, pools: Pools,
    tmp_path: Path,
) -> None:  # fmt: skip
    (vision, text, more), (long, micro) = layouts, empty
    micro = 1 if vision == "dp:4" else micro
    data = write_data(tmp_path, 4, seed=8, pictures=(2, 1, 0, 1))
    write_long(data, long)
    more += f" --model.hf_path {folder.model} --data.max_seq_length 200 --data.too_long skip {BALANCED}"
    line = make_flags(vision, text, f"{more} --train.micro_batch_size {micro}", data=data)
    got = pools(4).run(jobs.gradients_of_steps, line)[0][0]
    loss, gradients = folder._replace(data=data).oracle().step([i for i in range(4) if i not in long])
    assert got["loss"] == pytest.approx(loss, rel=1e-5) and len(got["lengths"]) == 2
    assert_equal_gradients(got["gradient"], gradients)
