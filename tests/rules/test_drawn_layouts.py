"""Layouts of 2 to 8 ranks, placements, schedules and micro-batches that a user could configure, drawn at random: a step
of each runs on the process group with NCCL's rules. `make nccl-rules`, SEED=N for others.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.adapters import Lora
from megatron_hetero.schedule import gathering
from pretrain_vlm import build_run
from tests.parity.cases import norm_of
from tests.parity.lora_cases import Adapters, Choice, initial, with_peft
from tests.rules.drawn import BATCH, Drawn, draw
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.oracle import Oracle, TwoTowers
from tests.support.pool import Pools, platform

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

MODEL = ModelChoice(
    heads=12,
    kv_heads=4,
    head_dim=8,
    vision_heads=12,
    vision_head_dim=4,
    text_layers=4,
    vision_layers=4,
    full_layers=(1, 3),
    seed=11,
)
MODELS = {
    MODEL.family: MODEL,
    "qwen3_vl": (QWEN3 := replace(MODEL, family="qwen3_vl", text_hidden=48, deepstack=(0, 1, 2))),
    "qwen3_vl_moe": replace(QWEN3, family="qwen3_vl_moe", experts=9, seed=176),
    "qwen3_5": (DELTA := replace(QWEN3, family="qwen3_5", delta_heads=(3, 12), delta_dims=(24, 16), head_dim=16)),
    "qwen3_5_moe": replace(DELTA, family="qwen3_5_moe", experts=9, seed=13),
}
"""By family; rows of the second and third enter several layers of the language model, on several stages where it has
these. The third and the last have experts, which they choose by more than 1e-3. The last two have delta nets.
"""
DETAIL = replace(MODEL, vision_layers=2, full_layers=(0,), seed=12)
ALONE, SHARED, ADAPTED = "", "one connection", "adapters"
ROWS = [(MODEL.family, 200, ALONE), (MODEL.family, 60, SHARED), ("qwen3_vl", 100, ALONE), ("qwen3_vl_moe", 70, ALONE)]
ROWS += [("qwen3_5", 60, ALONE), ("qwen3_5_moe", 40, ALONE), (MODEL.family, 40, ADAPTED), ("qwen3_5", 20, ADAPTED)]
"""Families, how many layouts, and whether all streams of a GPU share one hardware queue or the model has adapters."""
ADAPTERS = Choice(
    {
        "vision": Adapters(3, alpha=2, targets=("attn.qkv", "attn.proj")),
        "text": Adapters(2, targets=("q_proj", "k_proj", "down_proj"), patterns={"down_proj": (4, None)}),
    },
    whole=("projector", "detail", "detail_projector"),
)
SEED = int(os.environ.get("SEED", "0"))
LOSS, NORM = 1e-5, 1e-4
"""Relative differences that are rounding."""


SIZES = range(2, 9)
"""Numbers of ranks."""
MAX_IN_VAIN = 1000


def draws(seed: int, ranks: int, folder: Path, experts: int = 0) -> Iterator[Drawn]:
    """Runs without end, none twice, none that the program refuses. `RuntimeError` where there are no more."""
    rng, seen, in_vain = random.Random(f"{seed} {ranks}"), set(), 0
    while in_vain < MAX_IN_VAIN:
        drawn = draw(rng, ranks, experts)
        in_vain += 1
        if str(drawn) in seen or not _is_legal(drawn, folder):
            continue
        seen.add(str(drawn))
        in_vain = 0
        yield drawn
    raise RuntimeError(f"found no run of {ranks} ranks besides {len(seen)} in {MAX_IN_VAIN} draws")


def _is_legal(drawn: Drawn, folder: Path) -> bool:
    try:
        config = load_config(drawn.command(folder))
        JobSpec.of(config, drawn.ranks).schedule  # noqa: B018 (it is checked)
    except UserError:
        return False
    return True


class Reference(NamedTuple):
    """A model and data, and what one process with plain `transformers` computes of them, whatever the layout."""

    folder: Path
    loss: float
    norm: float


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """By family, number of encoders, coefficient of the loss that balances experts, and whether there are adapters."""

    @cache
    def reference(family: str, encoders: int, balance: float, adapted: bool = False) -> Reference:
        folder, model = tmp_path_factory.mktemp(f"{family}-{encoders}"), MODELS[family]
        write_model(folder / "model", model)
        if encoders == 2:
            write_model(folder / "detail", DETAIL)
        write_data(folder, BATCH, seed=model.seed, turns=2, details=(1, 0, 0, 2) if encoders == 2 else (0,))
        oracle = (TwoTowers if encoders == 2 else Oracle).load(folder / "model", folder / "data.jsonl")
        oracle.balance = balance
        every = with_peft(oracle, ADAPTERS).values() if adapted else oracle.model.parameters()
        trained = [each for each in every if each.requires_grad]
        loss, _ = oracle.step(range(BATCH))
        gradients = {str(number): each.grad for number, each in enumerate(trained) if each.grad is not None}
        return Reference(folder, loss, norm_of(gradients))

    return reference


def first_step(flags: list[str]) -> tuple[float, float]:
    """Loss and gradient norm of one step with small buckets: it begins while weights are gathered, and sums of
    gradients amid backward passes.
    """
    with mock.patch.object(gathering, "BUCKET", 1000), mock.patch.object(Lora, "initial", initial):
        run = build_run(load_config(flags), platform())
    run.writer.close()  # Workers outlive their runs: those of another pool could not write to the same log.dir.
    _, batch, _ = next(iter(run.batches()))
    for optimizer in run.trainer.optimizer.sharded.values():
        optimizer.module.weights.publish()
    summary = run.trainer.gradients(batch)
    return summary.loss_sum / batch.supervised, summary.norm / batch.supervised


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("family, layouts, kind", ROWS)
def test_drawn_layouts_end_with_the_numbers_of_one_process(
    family: str,
    layouts: int,
    kind: str,
    ranks: int,
    references: Callable[..., Reference],
    rules_pools: Pools,
    one_connection_pools: Pools,
) -> None:
    pools, wrong, adapted = one_connection_pools if kind == SHARED else rules_pools, [], kind == ADAPTED
    experts = MODELS[family].experts if "moe" in family else 0
    some = draws(SEED, ranks, references(family, 2, 0.0).folder, experts)
    for drawn in islice(some, math.ceil(layouts / len(SIZES))):
        folder, loss, norm = references(family, len(drawn.layouts) - 1, drawn.balance, adapted)
        more = ADAPTERS.command() if adapted else []
        try:
            found = pools(ranks).run(first_step, [*drawn.command(folder), *more], timeout_s=600)[0]
        except (AssertionError, TimeoutError) as error:
            wrong.append(f"{drawn}: {error}")
            continue
        if found != (pytest.approx(loss, rel=LOSS), pytest.approx(norm, rel=NORM)):
            wrong.append(f"{drawn}: loss and norm {found}, expected {(loss, norm)}")
    assert not wrong, "\n".join(wrong)
