"""Adapters of experts equal those of `peft` (`target_parameters`) in one process, whatever ranks experts are on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_hetero.models.added import generator_of
from tests.parity.cases import (
    BALANCE,
    BUDGET,
    FRUGAL,
    ONE_BY_ONE,
    OVERLAPPED,
    RECOMPUTE,
    SPLIT,
    VIRTUAL,
    WHOLE,
    Ask,
    Case,
    flags_of,
    zero,
)
from tests.parity.lora_cases import gradients, initial
from tests.support.matrix import thinned
from tests.support.oracle import Oracle, stored_name
from tests.support.pool import Pools

peft = pytest.importorskip("peft")


@dataclass(frozen=True)
class Targets:
    """What has adapters in the text module: flags of ours, and names of modules and of parameters for `peft`."""

    flags: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def config(self, model: Any) -> Any:
        """Return `peft`'s configuration. Names of modules are those of the language model."""
        linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "language_model" in n]
        chosen = [n for n in linear if n.endswith(self.modules) and not n.endswith("shared_expert_gate")]
        parameters = [f"mlp.experts.{name}" for name in self.parameters]
        return peft.LoraConfig(target_modules=chosen, target_parameters=parameters, **dict(self.options))


FUSED = "gate_up_proj", "down_proj"
TARGETS = {
    "all": Targets("--text-lora.r 3 --text-lora.alpha 5", ("",), FUSED, (("r", 3), ("lora_alpha", 5))),
    "first": Targets(
        "--text-lora.r 8 --text-lora.targets gate_up_proj q_proj",
        ("q_proj",), FUSED[:1], (("r", 8), ("lora_alpha", 8)),
    ),
    "second": Targets(
        "--text-lora.r 4 --text-lora.rslora true --text-lora.targets *.experts.down_proj",
        ("no module",), FUSED[1:], (("r", 4), ("lora_alpha", 4), ("use_rslora", True)),
    ),
    "ranks": Targets(
        "--text-lora.r 4 --text-lora.patterns.down_proj.r 9 --text-lora.patterns.down_proj.alpha 2",
        ("",), FUSED,
        (("r", 4), ("lora_alpha", 4), ("rank_pattern", {"down_proj": 9}), ("alpha_pattern", {"down_proj": 2})),
    ),
}  # fmt: skip


def _adapters(model: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield the A's and B's of `peft` by stored name, and for those of experts their number."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            path, of_parameter = name.replace(".base_layer", ""), getattr(module, "parameter_name", None)
            experts = module.num_experts if of_parameter else 0
            place = f"{path}.{of_parameter}" if of_parameter else path
            for kind in ("lora_A", "lora_B"):
                yield stored_name(f"{place}.{kind}.weight"), getattr(module, kind)["default"].weight, experts


def _ours(name: str, tensor: Tensor, experts: int) -> Tensor:
    """Turn `peft`'s B of experts, [out, r * experts] with the expert fastest, to [experts * out, r]."""
    if not experts or "lora_A" in name:
        return tensor
    return tensor.view(len(tensor), -1, experts).permute(2, 0, 1).flatten(0, 1)


def _theirs(name: str, tensor: Tensor, experts: int) -> Tensor:
    if not experts or "lora_A" in name:
        return tensor
    return tensor.view(experts, -1, tensor.shape[1]).permute(1, 2, 0).flatten(1)


def ask_peft(oracle: Oracle, targets: Targets, batch: int) -> tuple[float, dict[str, Tensor]]:
    """Loss, and gradients of adapters and of what else trains, the encoder and its projector."""
    model: Any = oracle.model
    with warnings.catch_warnings():  # It looks for patterns in names of modules alone.
        warnings.filterwarnings("ignore", "The following .*_pattern keys", RuntimeWarning)
        peft.inject_adapter_in_model(targets.config(model), model, "default")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "visual" in name)
    adapters = list(_adapters(model))
    with torch.no_grad():
        for name, parameter, experts in adapters:
            whole = _ours(name, parameter, experts).shape
            parameter.copy_(_theirs(name, initial(None, name, tuple(whole), generator_of(0, name)), experts))
    loss, _ = oracle.step(range(batch))
    found = {name: _ours(name, parameter.grad, experts) for name, parameter, experts in adapters}
    visual = {stored_name(n): p.grad for n, p in model.named_parameters() if "visual" in n}
    return loss, found | visual


@pytest.fixture(scope="session")
def by_peft(expected: Ask) -> Callable[[Case, str], tuple[list[str], float, dict[str, Tensor]]]:
    """Flags of a case, and what `peft` gives for it."""
    known: dict[tuple[Any, ...], tuple[float, dict[str, Tensor]]] = {}

    def get(case: Case, name: str) -> tuple[list[str], float, dict[str, Tensor]]:
        key, want = (case.model, case.batch, case.pictures, case.balance, name), expected(case)
        if key not in known:
            oracle = Oracle.load(*want.paths)
            oracle.balance = case.balance
            known[key] = ask_peft(oracle, TARGETS[name], case.batch)
        return flags_of(case, want.folder, *TARGETS[name].flags.split()), *known[key]

    return get


BALANCED = (BALANCE, "0.05")
CASES = [
    ("all", Case("dp:1", "dp:1", 1, model="moe", micro=2)),
    ("all", Case("sp:4", "dp:4,ep:4", 4, model="moe", flags=BALANCED, micro=2)),
    ("all", Case("dp:4", "tp:2,cp:2,ep:4", 4, model="delta-moe", micro=2)),
    ("ranks", Case("sp:4", "tp:4,ep:4", 4, model="moe", flags=(*FRUGAL, *BALANCED))),
    ("first", Case("sp:4", "dp:4,ep:2", 4, model="moe", flags=zero(3, 3), micro=2)),
    ("second", Case("dp:4", "cp:2,dp:2,ep:4", 4, model="moe-eight", flags=(*BUDGET, "--text-chunk", "7"))),
    ("all", Case("sp:2,tp:2", "tp:2,sp:2,ep:4", 4, model="moe", flags=OVERLAPPED, micro=2)),
    ("all", Case("dp:4", "tp:4,ep:2", 4, model="moe", flags=(*WHOLE, *BALANCED))),
    ("all", Case("dp:4", "pp:2,dp:2,ep:2", 4, model="moe-mixed", flags=(*RECOMPUTE, "--text-layers", "3", "2"))),
    ("ranks", Case("sp:4", "cp:2,dp:2,ep:4", 4, model="delta-moe", micro=2, flags=(*zero(3, 3), *BALANCED))),
    ("ranks", Case("dp:4", "tp:2,dp:2,ep:4", 4, model="moe-tied", flags=zero(2, 2), micro=2)),
    ("second", Case("sp:4", "sp:4,ep:4", 4, model="delta-moe-tied", micro=2, flags=(*FRUGAL, *BALANCED))),
    ("first", Case("dp:4", "pp:2,dp:2,ep:2", 4, model="delta-moe-tied", flags=(*VIRTUAL, *ONE_BY_ONE))),
    ("all", Case("sp:2@0-1", "tp:2,pp:2,ep:2@2-5", 6, model="moe", flags=SPLIT)),
    ("all", Case("sp:4", "dp:4,ep:4", 4, model="moe-one", flags=zero(3, 3), micro=2)),
    ("ranks", Case("dp:4", "tp:4,ep:2", 4, model="delta-moe-tied", flags=(*WHOLE, "--text-chunk", "5"))),
]


@pytest.mark.parametrize("name, case", thinned(CASES, 5), ids=str)
def test_gradients(name: str, case: Case, by_peft: Any, pools: Pools) -> None:
    flags, loss, wanted = by_peft(case, name)
    got = pools(case.ranks).run(gradients, flags)[0]
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    everything, wrong = math.sqrt(sum(float(g.double().square().sum()) for g in wanted.values())), {}
    for tensor, gradient in wanted.items():
        difference = np.linalg.norm(got["gradients"][tensor].reshape(gradient.shape) - gradient.numpy())
        if not difference <= 1e-4 * gradient.norm() + 1e-7 * everything:
            wrong[tensor] = f"{difference / float(gradient.norm() or everything):.1e}"
    assert not wrong
    assert sum("experts" in tensor for tensor in wanted) >= 2
    assert {n for n, gradient in got["gradients"].items() if gradient.any()} <= wanted.keys(), "the rest is frozen"
