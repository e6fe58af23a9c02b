"""Compiled layers (`model.compile layers`) equal plain `transformers` in one process, whatever the layout; and they are
compiled once, whatever the lengths of samples and the sizes of pictures.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.parity.cases import (
    BALANCE,
    FRUGAL,
    RECOMPUTE,
    RECOMPUTED,
    WHOLE,
    Ask,
    Case,
    flags_of,
    gradients_equal,
    three_steps_equal,
)
from tests.parity.runs import build
from tests.support.matrix import long
from tests.support.pool import Pools


def compiled(*flags: str) -> tuple[str, ...]:
    """Flags that say so, and what else is set."""
    return ("--model.compile", "layers", *flags)


WAVES_OF_TWO = ("--schedule.waves", "2")
OFFLOADED = ("--vision-offload.activations", "true", "--text-offload.activations", "true")
CASES = [
    Case("dp:1", "dp:1", 1, flags=compiled(), micro=2),
    Case("sp:2", "tp:2", 2, flags=compiled(*WHOLE), model="tied"),
    Case("sp:4", "tp:2,dp:2", 4, flags=compiled(), model="one-kv-head", micro=2),
    Case("tp:2,cp:2", "sp:2,cp:2", 4, flags=compiled(), micro=2),
    Case("tp:4", "tp:4", 4, flags=compiled(*RECOMPUTE)),
    Case("dp:2", "dp:2", 2, flags=compiled(*FRUGAL), micro=2),
    Case("sp:4", "pp:2,dp:2", 4, flags=compiled(*WAVES_OF_TWO), model="deep-tied"),
    Case("sp:2@0-1", "tp:2@2-3", 4, flags=compiled()),
    Case("sp:2", "pp:2", 2, flags=compiled(*RECOMPUTED), model="deep"),
    Case("sp:2", "tp:2", 2, flags=compiled(), model="qwen3", micro=2),
    Case("sp:2,tp:2", "cp:2,tp:2", 4, flags=compiled(*FRUGAL), model="qwen3-one-kv-head"),
    Case("dp:2@0-1", "pp:2@1-2", 3, flags=compiled(*WAVES_OF_TWO), model="qwen3-tied"),
    Case("sp:2", "dp:2", 2, flags=compiled("--vision-zero", "3", "--text-zero", "3"), micro=2),
    Case("dp:2", "dp:2", 2, flags=compiled("--vision-zero", "2", "--text-zero", "3", *OFFLOADED), model="qwen3"),
    Case("sp:2", "tp:2", 2, flags=compiled(*OFFLOADED), micro=2),
    Case("dp:2", "dp:2", 2, flags=compiled(), pictures=(0, 0, 3, 0)),
    Case("sp:2", "dp:2,ep:2", 2, model="moe", flags=compiled(BALANCE, "0.05"), micro=2),
    Case("dp:2", "tp:2,ep:2", 2, model="moe-tied", flags=compiled(*FRUGAL)),
    Case("sp:2", "cp:2", 2, model="delta", flags=compiled(), micro=2),
    Case("dp:2", "tp:2", 2, model="delta-tied", flags=compiled(*FRUGAL)),
]


@pytest.mark.parametrize("case", long(CASES), ids=str)
def test_gradients(case: Case, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, expected(case), pools(case.ranks))


@pytest.mark.parametrize("case", long(CASES[2:8:3]), ids=str)
def test_three_steps(case: Case, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, "adamw", expected(case), pools(case.ranks))


def graphs(flags: list[str]) -> tuple[list[int], int]:
    """How many graphs have been compiled, of none before, after each of its steps, and of how many different numbers of
    tokens micro-batches were.
    """
    run, made, lengths = build(flags), list[int](), set[int]()
    torch._dynamo.reset()
    counters.clear()
    for step, batch, _ in run.batches():
        run.trainer.train_step(step, batch)
        made.append(counters["stats"]["unique_graphs"])
        lengths |= {len(each.inputs["text"].tokens) for each in batch.micro_batches if "text" in each.inputs}
    return made, len(lengths)


FUNCTIONS = 4
"""That a layer compiles: norm, heads, addition and norm, activation."""


@pytest.mark.long
@pytest.mark.parametrize("model", ["untied", "qwen3"])
def test_each_function_is_compiled_once_for_all_layers_of_a_module(model: str, expected: Ask, pools: Pools) -> None:
    case = Case("dp:1", "dp:1", 1, model=model, flags=compiled("--train.iters", "3"))
    [(made, lengths)] = pools(1).run(graphs, flags_of(case, expected(case).folder))
    assert lengths > 3
    assert made == [2 * FUNCTIONS] * 3, "no length and no size of a picture is compiled again"
