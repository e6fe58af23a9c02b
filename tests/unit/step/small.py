"""A small model of two modules, its batches, and its optimizers."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor, nn

from megatron_hetero.step.joint import JointOptimizer
from tests.unit.step import gpt

STEPS, CLIP, RATE, DECAY = 3, 0.05, 0.02, 0.1
INPUTS, ROWS = 12, 8


def adam(**options: Any) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam", lr=RATE, min_lr=0.0, weight_decay=DECAY, adam_eps=1e-3, clip_grad=CLIP, **options
    )


def of_pytorch(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE, eps=1e-3)


def vision(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.GELU(), nn.Linear(16, 4))


def pictures(step: int) -> Tensor:
    """[ROWS, INPUTS]."""
    return torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(step)).float()


def loss_of_rows(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) ** 2).sum()


def batch_of(step: int) -> list[gpt.Sample]:
    return gpt.samples(8)[step % 2 :][:4] + gpt.samples(4)


def whole(own: Any, optimizer: JointOptimizer) -> Tensor:
    """A parameter, whoever shards it."""
    for module in optimizer.modules if hasattr(own, "full_tensor") else ():
        for name, parameter in module.parameters.items():
            if parameter is own and module.weights.sharded:
                return module.whole_weight(name)
    return own.full_tensor() if hasattr(own, "full_tensor") else own
