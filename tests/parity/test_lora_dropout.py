"""Dropout of adapters equals that of `peft` with the same elements dropped, whatever the layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import get_vision_window_index

from megatron_hetero.data.device import to_device
from megatron_hetero.models.adapters import Lora
from tests.parity import runs
from tests.parity.cases import (
    BUDGET,
    FRUGAL,
    OVERLAPPED,
    RECOMPUTE,
    RECOMPUTED,
    VIRTUAL,
    WHOLE,
    Case,
    ask_oracle,
    flags_of,
    norm_of,
    zero,
)
from tests.parity.lora_cases import initial
from tests.support.matrix import thinned
from tests.support.oracle import Oracle, stored_name
from tests.support.pool import Pools

R, P, SEED = 3, {"vision": 0.4, "text": 0.25}, 7
LORA = [
    *f"--train.seed {SEED} --vision-lora.r {R} --vision-lora.dropout {P['vision']}".split(),
    *f"--text-lora.r {R} --text-lora.dropout {P['text']}".split(),
]
EVERYWHERE = ["--vision-lora.targets", "*.blocks.*", "*merger*"]
WITHOUT_EXPERTS = ["--text-lora.targets", "*attn.*", "*.shared_expert.*"]
PER_CALL = ("--vision-patches_per_call", "24")
FIRST_OF = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"} | {
    f"in_proj_{kind}": "in_proj_qkv" for kind in "zba"
}
"""The first of several projections in one parameter, which have the same input, and the same dropout."""


# ------------------------------------------------------------------------------------------ the hash, written again


def mixed(*fields: int) -> int:
    state = 0
    for each in fields:
        state = ((state ^ each) + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state


@cache
def columns(width: int) -> np.ndarray:
    return np.array([mixed(column) >> 32 for column in range(width)], np.uint32)


def is_dropped(ids: list[int], layer: str, width: int, p: float) -> Tensor:
    digest = hashlib.sha256(f"dropout {SEED} {layer}".encode()).digest()
    key = int.from_bytes(digest[:8], "little") | 1
    rows = np.array([each * key % 2**64 >> 32 for each in ids], np.uint32)
    bits = (rows[:, None] ^ columns(width)) * np.uint32(0x7FEB352D)
    bits ^= (bits.view(np.int32) >> 15).view(np.uint32)
    bits *= np.uint32(0x846CA68B)
    return torch.from_numpy(bits.view(np.int32).astype(np.int64) + 2**31 < round(p * 2**32))


# ------------------------------------------------------------------------------------------ the oracle


@dataclass
class Now:
    """What the oracle computes at the time."""

    sample: int = 0
    patches: list[int] = field(default_factory=list)


class SameDropout(nn.Module):
    """In place of a dropout of `peft`: drops what `is_dropped` says."""

    def __init__(self, layer: str, now: Now):
        super().__init__()
        self.layer, self.now = layer, now

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        if self.layer.startswith("visual."):
            # A merger works on units of four patches.
            ids, p = self.now.patches[:: len(self.now.patches) // len(rows)], P["vision"]
        else:
            ids, p = [mixed(self.now.sample, place) for place in range(len(rows))], P["text"]
        dropped = is_dropped(ids, f"{self.layer.removeprefix('visual.')}.weight", x.shape[-1], p)
        return (rows.masked_fill(dropped, 0) / (1 - p)).view_as(x)


def patch_ids(tower: Any, sample: int, grids: Tensor) -> list[int]:
    """In the order in which the tower works: units of four patches, those of Qwen2.5-VL by windows."""
    found = []
    for item, grid in enumerate(grids.tolist()):
        places = range(math.prod(grid))
        found += [[mixed(sample, item, 0, place) for place in places[start : start + 4]] for start in places[::4]]
    if hasattr(tower, "window_size"):
        order, _ = get_vision_window_index(
            grids, spatial_merge_size=2, window_size=tower.window_size, patch_size=tower.patch_size
        )
        found = [found[unit] for unit in order]
    return [each for unit in found for each in unit]


def with_adapters(model: Any, now: Now, everywhere: bool) -> dict[str, nn.Parameter]:
    """Add adapters with `SameDropout`. Returns what trains, by stored name."""
    from megatron_hetero.models.added import generator_of

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    fit = [name for name in names if not name.endswith(".shared_expert_gate")]
    chosen = [name for name in fit if everywhere or "merger" not in name]
    inject_adapter_in_model(LoraConfig(r=R, lora_alpha=R, target_modules=chosen), model, "default")
    for name in chosen:
        stored = stored_name(f"{name}.")[:-1]
        place, _, kind = stored.rpartition(".")
        model.get_submodule(name).lora_dropout["default"] = SameDropout(f"{place}.{FIRST_OF.get(kind, kind)}", now)
    tower = model.model.visual
    tower.register_forward_pre_hook(
        lambda _, args, given: setattr(
            now, "patches", patch_ids(tower, now.sample, given.get("grid_thw", args[1] if len(args) > 1 else None))
        ),
        with_kwargs=True,
    )
    trained = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or ("merger" in name and not everywhere))
        if parameter.requires_grad:
            trained[stored_name(name.replace(".default", "").replace(".base_layer", ""))] = parameter
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_" in name:
                parameter.copy_(initial(None, name, tuple(parameter.shape), generator_of(SEED, name)))
    return trained


@dataclass
class Alone:
    """A case's model with adapters in one process."""

    folder: Path
    oracle: Oracle
    now: Now
    trained: dict[str, nn.Parameter]

    @classmethod
    def of(cls, folder: Path, case: Case, everywhere: bool) -> Alone:
        ask_oracle(folder, case)
        oracle, now = Oracle.load(folder / "model", folder / "data.jsonl"), Now()
        return cls(folder, oracle, now, with_adapters(oracle.model, now, everywhere))

    def step(self, first: int, stop: int) -> float:
        """The loss of these samples, one at a time; parameters get gradients."""
        self.oracle.model.zero_grad()
        total, supervised = 0.0, 0
        for self.now.sample in range(first, stop):
            loss, count = self.oracle._sample(self.oracle.records[self.now.sample])
            loss.backward()
            total, supervised = total + float(loss.detach()), supervised + count
        for parameter in self.trained.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / supervised
        return total / supervised


def worker(function: Callable[[list[str]], Any], flags: list[str]) -> Any:
    with mock.patch.object(Lora, "initial", initial):
        return function(flags)


CASES = [
    Case("dp:1", "dp:1", 1, micro=4),
    Case("sp:2", "tp:2", 2, micro=2),
    Case("tp:2", "tp:2", 2, micro=2, flags=WHOLE),
    Case("tp:2", "tp:2", 2, micro=2, flags=OVERLAPPED),
    Case("sp:2", "tp:2", 2, micro=2, flags=FRUGAL),
    Case("tp:2", "cp:2", 2, micro=2, flags=FRUGAL),
    Case("cp:2", "sp:2", 2, micro=2, flags=RECOMPUTE),
    Case("dp:2", "dp:2", 2, flags=BUDGET),
    Case("dp:2", "dp:2", 2, micro=2, flags=PER_CALL),
    Case("dp:2", "pp:2", 2, model="deep", flags=(*VIRTUAL, *RECOMPUTED)),
    Case("tp:2,dp:2", "pp:2,tp:2", 4, flags=RECOMPUTE),
    Case("dp:4", "dp:4", 4, flags=zero(3, 3, *FRUGAL)),
    Case("sp:4", "tp:2,cp:2", 4, model="delta", micro=2),
    Case("tp:2,dp:2", "tp:4", 4, model="delta", micro=2, flags=OVERLAPPED),
    Case("sp:4", "tp:2,dp:2", 4, model="qwen3", micro=2),
    Case("pp:2,tp:2", "tp:4", 4, model="qwen3", micro=2, flags=WHOLE),
    Case("sp:2", "tp:2", 2, model="delta-moe", micro=2, flags=FRUGAL),
    Case("tp:2", "tp:2", 2, model="qwen3", micro=2, flags=OVERLAPPED),
    Case("tp:2", "cp:2", 2, model="delta", micro=2, flags=FRUGAL),
]
Get = Callable[[Case, bool], tuple[Path, float, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Folder, loss and gradients of the first step, once for each model."""
    found: dict[tuple[object, ...], tuple[Path, float, dict[str, Tensor]]] = {}

    def get(case: Case, everywhere: bool) -> tuple[Path, float, dict[str, Tensor]]:
        key = case.model, case.batch, everywhere
        if key not in found:
            it = Alone.of(tmp_path_factory.mktemp("alone"), case, everywhere)
            loss = it.step(0, case.batch)
            found[key] = it.folder, loss, {n: p.grad for n, p in it.trained.items() if p.grad is not None}
        return found[key]

    return get


@pytest.mark.parametrize("case", thinned(CASES, 7), ids=str)
def test_gradients(case: Case, alone: Get, pools: Pools) -> None:
    everywhere = case.model != "deep"
    folder, loss, gradients = alone(case, everywhere)
    targets = [*(EVERYWHERE if everywhere else []), *(WITHOUT_EXPERTS if "moe" in case.model else [])]
    flags = flags_of(case, folder, *LORA, *targets)
    got = pools(case.ranks).run(partial(worker, runs.gradients), flags)[0]
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    wrong = {}
    for name, expected in gradients.items():
        difference = np.linalg.norm(got["gradients"][name].reshape(expected.shape) - expected.numpy())
        if not difference <= 1e-3 * float(expected.norm()):
            wrong[name] = difference / float(expected.norm())
    assert not wrong and len(gradients) > 20


UPDATED = [
    Case("tp:2", "cp:2", 2, micro=2, flags=FRUGAL),
    Case("dp:2", "tp:2", 2, micro=4, flags=("--text-tp_overlap", "true")),
    Case("pp:2", "dp:2", 2, flags=BUDGET),
    Case("sp:4", "tp:2,pp:2", 4, micro=2),
]
RATE = 1e-3


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, Tensor], float]:
    """Folder, losses, and what trains after three clipped steps of AdamW, with the norm of its change."""
    it = Alone.of(tmp_path_factory.mktemp("steps"), UPDATED[0], everywhere=False)
    before = {name: parameter.detach().clone() for name, parameter in it.trained.items()}
    optimizer, losses, batch = torch.optim.AdamW(it.trained.values(), lr=RATE, weight_decay=0.0), list[float](), 8
    for step in range(3):
        losses.append(it.step(step * batch, (step + 1) * batch))
        torch.nn.utils.clip_grad_norm_(it.trained.values(), 1.0)
        optimizer.step()
    after = {name: parameter.detach() for name, parameter in it.trained.items()}
    return it.folder, losses, after, norm_of({name: after[name] - before[name] for name in after})


@pytest.mark.parametrize("case", thinned(UPDATED, 3), ids=str)
def test_three_steps(case: Case, three_steps: tuple[Path, list[float], dict[str, Tensor], float], pools: Pools) -> None:
    """Dropout of a step does not depend on the steps before it, so that a run may go on in another layout."""
    folder, losses, after, update = three_steps
    flags = f"--train.iters 3 --optimizer.lr {RATE} --optimizer.schedule constant"
    got = pools(case.ranks).run(partial(worker, runs.train), flags_of(case, folder, *LORA, *flags.split()))[0]
    assert got["losses"] == pytest.approx(losses, rel=1e-5)
    wrong = {name: torch.from_numpy(got["weights"][name]).view_as(value) - value for name, value in after.items()}
    assert norm_of(wrong) <= 2e-3 * update


def ids_on_device(flags: list[str]) -> list[bool]:
    """Whether modules get ids, in training and in evaluation."""
    run = runs.build(flags)
    _, batch, _ = next(iter(run.batches()))
    trainer = run.trainer
    evaluated = run.loader.of_held_out({"": run.loader.mixture})[""].load(1, map)
    moved = [to_device(each.micro_batches[0], trainer.topology.platform.device).inputs for each in (batch, evaluated)]
    return [inputs[name].attention.ids is not None for inputs in moved for name in ("vision", "text")]


def test_ids_are_for_dropout_in_training_only(alone: Get, pools: Pools) -> None:
    case = CASES[0]
    folder, *_ = alone(case, True)
    text_only = ["--text-lora.r", "2", "--text-lora.dropout", "0.1", "--vision-lora.r", "2"]
    for lora, expected in ((LORA, [True, True]), (text_only, [False, True]), ([], [False, False])):
        assert pools(1).run(ids_on_device, flags_of(case, folder, *lora))[0] == [*expected, False, False]
