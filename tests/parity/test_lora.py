"""Low-rank adapters equal those of `peft` in plain `transformers` in one process, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.functional.checkpoint.runs import once
from tests.parity.cases import (
    BUDGET,
    FRUGAL,
    NOT_AHEAD,
    ONE_BY_ONE,
    OVERLAPPED,
    RECOMPUTE,
    RECOMPUTED,
    SPLIT,
    UNEVEN,
    VIRTUAL,
    WHOLE,
    Case,
    flags_of,
    zero,
)
from tests.parity.lora_cases import Adapters, Choice, Expected, ask_peft, gradients_equal, three_steps_equal, train
from tests.support.matrix import thinned
from tests.support.pool import Pools

Ask = Callable[[Case, str], Expected]
VISION = Adapters(4, alpha=6)
TEXT = Adapters(3, rslora=True, patterns={"v_proj": (2, None), "down_proj": (4, 5.0)})
OFFLOADED = ("--text-offload.activations", "true", "--vision-offload.activations", "true")
STATES = ("--text-offload.states", "true", "--vision-offload.states", "true")
FEW_PATCHES = ("--vision-patches_per_call", "64")

CHOICES = {
    "both": Choice({"vision": VISION, "text": TEXT}, whole=("projector",)),
    "text": Choice({"text": Adapters(2, targets=("q_proj", "v_proj"))}, whole=("vision", "projector")),
    "text alone": Choice({"text": TEXT}, flags=("--model.freeze", "vision", "projector")),
    "vision alone": Choice(
        {"vision": Adapters(2, targets=("attn.qkv", "gate_proj"), patterns={"qkv": (5, 2.0)})},
        whole=("projector",),
        flags=("--model.freeze", "text"),
    ),
    "faster": Choice(
        {"vision": replace(VISION, lr_ratio=4.0), "text": replace(TEXT, lr_ratio=16.0)},
        whole=("projector",),
    ),
    "projector too": Choice(
        {
            "vision": Adapters(4, alpha=2, targets=("proj", "down_proj", "mlp.0")),
            "text": Adapters(3, targets=("k_proj", "up_proj")),
        }
    ),
    "projector too of Qwen3": Choice(
        {
            "vision": Adapters(4, alpha=2, targets=("attn.proj", "linear_fc1")),
            "text": Adapters(3, targets=("v_proj", "o_proj", "up_proj")),
        }
    ),
    "projector too of Qwen3.5": Choice(
        {
            "vision": Adapters(2, targets=("merger.linear_fc2",)),
            "text": Adapters(3, targets=("q_proj", "in_proj_qkv", "in_proj_b", "out_proj"), rslora=True),
        },
    ),
    "merger alone of Qwen3": Choice(
        {"vision": Adapters(5, targets=("linear_fc2",), patterns={"linear_fc2": (2, 3.0)})},
        flags=("--model.freeze", "text"),
    ),
    "first layer": Choice(
        {
            "vision": Adapters(2, targets=("visual.blocks.[01].*",), peft=r"blocks\.[01]\..*(qkv|proj|fc1|fc2)"),
            "text": Adapters(2, targets=("*.layers.1.*proj",), peft=r"layers\.1\..*proj"),
        },
        whole=("projector",),
    ),
    "norms": Choice(
        {"vision": VISION, "text": TEXT},
        whole=("projector", "model.layers.0.input_layernorm", "model.norm."),
        flags=("--model.train", "projector", "model.layers.0.input_layernorm.*", "model.norm.*"),
    ),
    "embedding": Choice(
        {"vision": VISION, "text": TEXT},
        whole=("embed_tokens",),
        flags=("--model.train", "model.embed_tokens.weight"),
    ),
    "three encoders": Choice(
        {"vision": VISION, "detail": Adapters(2, targets=("attn.qkv", "attn.proj")), "text": TEXT},
        whole=("projector", "detail_projector"),
    ),
    "detail alone": Choice(
        {"detail": Adapters(3, targets=("attn.qkv", "down_proj", "mlp.2"))},
        flags=("--model.freeze", "vision", "projector", "text"),
    ),
}

ROWS = [
    (Case("dp:1", "dp:1", 1, micro=4), "both"),
    (Case("sp:2", "tp:2", 2, micro=2), "both"),
    (Case("tp:2", "tp:2", 2, micro=2, flags=WHOLE), "both"),
    (Case("tp:4", "tp:4", 4, model="one-kv-head", micro=2), "both"),
    (Case("tp:4", "tp:4", 4, model="one-kv-head", flags=WHOLE), "projector too"),
    (Case("tp:2,dp:2", "tp:2,dp:2", 4, micro=2, flags=OVERLAPPED), "both"),
    (Case("sp:4", "tp:4", 4, micro=2, flags=FRUGAL), "both"),
    (Case("sp:2", "pp:2", 2, model="deep", flags=("--text-recompute", "1", "--vision-recompute", "3")), "both"),
    (Case("dp:4", "dp:4", 4, micro=2, flags=zero(3, 3)), "both"),
    (Case("sp:2,dp:2", "tp:2,dp:2", 4, micro=2, flags=zero(2, 2)), "both"),
    (Case("dp:4", "cp:2,dp:2", 4, micro=2, flags=zero(3, 3, *OFFLOADED)), "both"),
    (Case("sp:2", "cp:2", 2, model="tied", micro=2), "embedding"),
    (Case("dp:2", "pp:2", 2, model="tied"), "embedding"),
    (Case("sp:4", "tp:2,cp:2", 4, micro=2), "norms"),
    (Case("tp:2,cp:2", "sp:2,tp:2", 4, model="one-kv-head", micro=2, flags=(*WHOLE, *RECOMPUTE)), "text"),
    (Case("sp:2,dp:3", "tp:3,dp:2", 6, model="twelve-heads", micro=2), "both"),
    (Case("sp:3", "tp:3", 3, model="twelve-heads", micro=2, flags=WHOLE), "first layer"),
    (Case("pp:2,sp:2", "pp:2,tp:2", 4, model="deep-tied", flags=UNEVEN), "both"),
    (Case("pp:2,sp:2", "pp:2,tp:2", 4, model="deep-tied", flags=UNEVEN), "first layer"),
    (Case("dp:1@0", "pp:2@1-2", 3, model="deep", flags=VIRTUAL), "both"),
    (Case("sp:4", "pp:4", 4, model="deep", flags=RECOMPUTED), "text alone"),
    (Case("sp:2@0-1", "tp:2,pp:2@2-5", 6, model="deep-tied"), "vision alone"),
    (Case("sp:2@0-1", "pp:2@1-2", 3, model="deep", flags=BUDGET, given_batch=8), "both"),
    (Case("dp:4", "tp:2,dp:2", 4, flags=(*BUDGET, *FEW_PATCHES)), "projector too"),
    (Case("dp:1@0", "dp:1@1", 2, micro=4, flags=NOT_AHEAD), "text"),
    (Case("sp:2", "tp:2", 2, model="two-encoders", micro=2, detail="dp:2"), "three encoders"),
    (Case("dp:2@0-1", "tp:2,pp:2@2-5", 6, model="two-encoders-deep", detail="sp:2@2-3"), "three encoders"),
    (Case("dp:1@0", "tp:2@2-3", 4, model="two-encoders", detail="dp:1@1"), "detail alone"),
    (Case("sp:4", "tp:2,dp:2", 4, model="qwen3", micro=2), "both"),
    (Case("tp:4", "tp:4", 4, model="qwen3", micro=2, flags=OVERLAPPED), "projector too of Qwen3"),
    (Case("tp:4", "tp:4", 4, model="qwen3-one-kv-head", flags=WHOLE), "both"),
    (Case("pp:2,dp:2", "pp:4", 4, model="qwen3", flags=ONE_BY_ONE), "both"),
    (Case("pp:2@0-1", "pp:2@1-2", 3, model="qwen3-deep", flags=FEW_PATCHES, given_batch=8), "projector too of Qwen3"),
    (Case("dp:4", "tp:2,sp:2", 4, model="qwen3-tied", micro=2, flags=zero(3, 3)), "merger alone of Qwen3"),
    (Case("sp:2,cp:2", "cp:4", 4, model="qwen3-tied", micro=2, flags=FRUGAL), "norms"),
    (Case("sp:2", "tp:2", 2, model="qwen3-two-qwen3-encoders", micro=2, detail="tp:2"), "three encoders"),
    (Case("tp:2,dp:2", "tp:4", 4, model="delta", micro=2, flags=OVERLAPPED), "both"),
    (Case("sp:4", "tp:2,cp:2", 4, model="delta", micro=2), "both"),
    (Case("sp:4", "sp:4", 4, model="delta-one-key-head", micro=2, flags=RECOMPUTE), "projector too of Qwen3.5"),
    (Case("dp:3", "tp:3", 3, model="delta-six-heads", micro=2, given_batch=6, flags=WHOLE), "both"),
    (Case("dp:4", "cp:2,dp:2", 4, model="delta-tied", micro=2, flags=zero(3, 3, *OFFLOADED[:2])), "both"),
    (Case("pp:2,sp:2", "pp:2,tp:2", 4, model="delta-tied", flags=(*SPLIT, *RECOMPUTE)), "norms"),
    (Case("dp:2", "pp:2", 2, model="delta", flags=(*VIRTUAL, *ONE_BY_ONE), given_batch=8), "text alone"),
]
"""Layouts, and which adapters the model has."""


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What one process with PEFT found, once for each model with its adapters."""
    found: dict[tuple[object, ...], Expected] = {}

    def get(case: Case, name: str) -> Expected:
        key = case.model, case.batch, name
        if key not in found:
            found[key] = ask_peft(tmp_path_factory.mktemp(case.model), case, CHOICES[name])
        return found[key]

    return get


@pytest.mark.parametrize("case, name", thinned(ROWS, 11), ids=str)
def test_gradients(case: Case, name: str, expected: Ask, pools: Pools) -> None:
    gradients_equal(case, CHOICES[name], expected(case, name), pools(case.ranks))


UPDATED = [
    (Case("sp:2", "tp:2", 2, micro=2), "faster"),
    (Case("dp:4", "cp:2,dp:2", 4, micro=2, flags=zero(3, 3, *OFFLOADED, *STATES)), "faster"),
    (Case("tp:4", "tp:4", 4, model="one-kv-head", micro=2, flags=STATES), "projector too"),
    *ROWS[1::2],
]


@pytest.mark.parametrize("case, name", thinned(UPDATED, 13), ids=str)
def test_three_adamw_steps(case: Case, name: str, expected: Ask, pools: Pools) -> None:
    three_steps_equal(case, CHOICES[name], expected(case, name), pools(case.ranks))


def test_split_masters_of_adapters_train_as_whole_ones(expected: Ask, pools: Pools) -> None:
    """In bfloat16, to the bit; and adapters do train."""
    case, choice, results = Case("dp:2", "tp:2", 2, micro=2), CHOICES["both"], list[dict[str, Any]]()
    folder = expected(case, "both").folder
    for master in ("float32", "split"):
        flags = f"--model.dtype bfloat16 --vision-precision.master {master} --text-precision.master {master} "
        flags += "--train.iters 3 --optimizer.lr 1e-3 --optimizer.weight_decay 0.1"
        results.append(pools(2).run(train, once([*flags_of(case, folder), *choice.command(), *flags.split()]))[0])
    whole, split = results
    assert whole["losses"] == split["losses"] and len({*split["losses"]}) == 3
    assert all(np.array_equal(whole["weights"][name], values) for name, values in split["weights"].items())
