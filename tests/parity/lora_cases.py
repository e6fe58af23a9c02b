"""Low-rank adapters as `peft` puts them into plain `transformers`, what one process computes with them, and how a
layout is compared.

Adapters have random values in both matrices, the same in both programs: B of zeros would hide A.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_hetero.models.adapters import Lora
from megatron_hetero.models.added import generator_of
from tests.parity import runs
from tests.parity.cases import Case, flags_of, norm_of, write_case
from tests.support.oracle import Oracle, stored_name
from tests.support.pool import Pool

RATE, DECAY = 1e-3, 0.3
ROUNDING = 5e-4
"""Relative difference of a gradient. Random adapters make models with delta nets worse conditioned than they are."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a module. `targets`: of our setting; `peft`: the same as a regular expression, where the names in
    `targets` are patterns. `patterns`: rank and alpha of targets. `lr_ratio`: as in LoRA+.
    """

    r: int
    alpha: float | None = None
    rslora: bool = False
    targets: tuple[str, ...] = ()
    patterns: Mapping[str, tuple[int | None, float | None]] = field(default_factory=dict)
    peft: str = ""
    lr_ratio: float = 1.0

    def flags(self, module: str) -> list[str]:
        """Our settings."""
        setting = f"--{module}-lora"
        found = [f"{setting}.r", str(self.r)]
        found += [f"{setting}.alpha", str(self.alpha)] if self.alpha else []
        found += [f"{setting}.rslora", "true"] if self.rslora else []
        found += [f"{setting}.lr_ratio", str(self.lr_ratio)] if self.lr_ratio != 1 else []
        found += [f"{setting}.targets", *self.targets] if self.targets else []
        for name, (r, alpha) in self.patterns.items():
            found += [f"{setting}.patterns.{name}.r", str(r)] if r else []
            found += [f"{setting}.patterns.{name}.alpha", str(alpha)] if alpha else []
        return found

    def inject(self, tower: torch.nn.Module) -> None:
        """Add them to a tower of `transformers` as PEFT does."""
        from peft import LoraConfig, inject_adapter_in_model

        # PEFT takes the convolution of patches for a linear layer, and the projector for a part of the encoder.
        outside = re.compile("patch_embed" if self.targets else "patch_embed|merger")
        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha or self.r,  # pyright: ignore[reportArgumentType]
            use_rslora=self.rslora,
            target_modules=self.peft or list(self.targets) or "all-linear",
            exclude_modules=[name for name, _ in tower.named_modules() if outside.search(name)] or None,
            rank_pattern={name: r for name, (r, _) in self.patterns.items() if r},
            alpha_pattern={name: alpha for name, (_, alpha) in self.patterns.items() if alpha},
        )
        inject_adapter_in_model(config, tower)


@dataclass(frozen=True)
class Choice:
    """The adapters of a model: those of modules, and the parts that train in full beside them (`projector`, the module
    without adapters, or parts of names of tensors). `flags`: what else is set.
    """

    of: Mapping[str, Adapters]
    whole: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def trains(self, name: str) -> bool:
        """Whether a stored tensor trains."""
        return "lora_" in name or any(each in name or each == part_of(name) for each in self.whole)

    def ratio(self, name: str) -> float:
        """What the rate of a stored tensor is multiplied by."""
        module = part_of(name).replace("detail_projector", "detail").replace("projector", "vision")
        return self.of[module].lr_ratio if "lora_B" in name else 1.0

    def command(self) -> list[str]:
        """Our settings."""
        return [*(flag for module, each in self.of.items() for flag in each.flags(module)), *self.flags]


@dataclass
class Trained:
    """Three steps of clipped AdamW by the oracle."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


@dataclass
class Expected:
    """What the oracle found: the folder, loss and gradients of tensors that train, weights before and three steps."""

    folder: Path
    loss: float
    gradients: dict[str, Tensor]
    before: dict[str, Tensor]
    train: Callable[[], Trained]


def part_of(name: str) -> str:
    """The part of the model that has a tensor."""
    if "visual." not in name:
        return "text"
    tower = "detail" if name.startswith("detail.") else "vision"
    return tower if "merger" not in name else "projector" if tower == "vision" else "detail_projector"


def initial(_: Lora | None, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values with which both matrices matter, in place of `Lora.initial`."""
    scale = 0.3 if "lora_B" in name else 1 / math.sqrt(shape[1])
    return torch.empty(shape).normal_(generator=generator) * scale


def gradients(flags: list[str]) -> dict[str, Any]:
    """`runs.gradients` from these values."""
    with mock.patch.object(Lora, "initial", initial):
        return runs.gradients(flags)


def train(flags: list[str]) -> dict[str, Any] | None:
    """`runs.train` from these values."""
    with mock.patch.object(Lora, "initial", initial):
        return runs.train(flags)


def tower_of(oracle: Oracle, module: str) -> torch.nn.Module:
    """The part of the model of `transformers` that a module is."""
    core: Any = oracle.model.model
    return {"text": core.language_model, "vision": core.visual}.get(module) or oracle.model.detail


def our_name(name: str) -> str:
    """The stored name of a parameter of a model with adapters of PEFT."""
    return stored_name(name.replace(".base_layer.", ".").replace(".default.", "."))


def with_peft(oracle: Oracle, choice: Choice) -> dict[str, torch.nn.Parameter]:
    """Add the adapters of a choice to the model, and return all of its parameters by our names."""
    for module, adapters in choice.of.items():
        adapters.inject(tower_of(oracle, module))
    found = {our_name(name): parameter for name, parameter in oracle.model.named_parameters()}
    for name, parameter in found.items():
        parameter.requires_grad_(choice.trains(name))
        if "lora_" in name:
            # A further encoder's tensors have its name before those that the seed is of.
            with torch.no_grad():
                parameter.copy_(initial(None, name, tuple(parameter.shape), generator_of(0, name)))
    return found


def ask_peft(folder: Path, case: Case, choice: Choice) -> Expected:
    """Write the model and the data of a case, and let one process with PEFT train on them."""
    load = write_case(folder, case)
    oracle = load()
    parameters = with_peft(oracle, choice)
    loss, _ = oracle.step(range(case.batch))
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    before = {name: each.detach().clone() for name, each in parameters.items()}
    found = {name: each.grad for name, each in trained.items() if each.grad is not None}

    def three_steps() -> Trained:
        oracle = load()
        parameters = with_peft(oracle, choice)
        trains = [each for each in parameters.values() if each.requires_grad]
        groups = [
            {"params": [each], "weight_decay": DECAY * (each.dim() > 1), "lr": RATE * choice.ratio(name)}
            for name, each in parameters.items()
            if each.requires_grad
        ]
        optimizer, result = torch.optim.AdamW(groups), Trained([], [], {})
        for step in range(3):
            loss, _ = oracle.step(range(step * case.batch, (step + 1) * case.batch))
            result.losses.append(loss)
            result.norms.append(float(torch.nn.utils.clip_grad_norm_(trains, 1.0)))
            optimizer.step()
        result.weights = {name: each.detach() for name, each in parameters.items()}
        return result

    return Expected(folder, loss, found, before, three_steps)


def gradients_equal(case: Case, choice: Choice, want: Expected, pool: Pool) -> None:
    """Loss and gradients of one step; those of frozen tensors are zero."""
    got = pool.run(gradients, flags_of(case, want.folder, *choice.command()))[0]
    assert got["loss"] == pytest.approx(want.loss, rel=1e-5)
    assert got["gradients"].keys() == want.before.keys()
    everything = norm_of(want.gradients)
    wrong = {}
    for name in want.before:
        expected = want.gradients.get(name)
        difference = np.linalg.norm(got["gradients"][name] - (0 if expected is None else expected.numpy()))
        scale = 0.0 if expected is None else float(expected.norm())
        if not difference <= ROUNDING * scale + 1e-7 * everything * (expected is not None):
            wrong[name] = f"{difference / (scale or everything):.1e}"
    assert not wrong, wrong
    assert got["norm"] == pytest.approx(everything, rel=1e-4)


def three_steps_equal(case: Case, choice: Choice, want: Expected, pool: Pool) -> None:
    """Losses, norms and weights of three steps. Frozen tensors do not change."""
    flags = f"--train.iters 3 --optimizer.lr {RATE} --optimizer.schedule constant --optimizer.weight_decay {DECAY}"
    results = pool.run(train, flags_of(case, want.folder, *choice.command(), *flags.split()))
    got, trained = results[0], want.train()
    assert all(result["replicas_equal"] for result in results)
    assert got["losses"] == pytest.approx(trained.losses, rel=1e-5)
    assert got["norms"] == pytest.approx(trained.norms, rel=ROUNDING)
    weights = {name: torch.from_numpy(values) for name, values in got["weights"].items()}
    assert weights.keys() == want.before.keys()
    for name in weights.keys() - want.gradients.keys():
        assert torch.equal(weights[name], want.before[name]), name
    update = {name: trained.weights[name] - want.before[name] for name in want.gradients}
    wrong = {name: weights[name] - trained.weights[name] for name in want.gradients}
    assert norm_of(wrong) / norm_of(update) <= 2e-3
