"""Whole training steps of all modules, on data that section `plan` describes."""

from __future__ import annotations

import torch

from benchmarks.measuring.trial import assumed_step, drawn_trainer
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import CPU, Platform


def train(flags: list[str], steps: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Loss and gradient norm of each step on the data that a plan assumes, and this rank's weights after them."""
    trainer = drawn_trainer(load_config(flags), Platform(CPU, "gloo"))
    metrics = [trainer.train_step(step, assumed_step(trainer)) for step in range(1, steps + 1)]
    weights = {
        f"{module.name} {name}": module.weights.values(name).float()
        for module in trainer.optimizer.modules
        for name in module.parameters
    }
    return [(found.loss, found.grad_norm) for found in metrics], weights
