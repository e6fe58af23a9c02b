"""What is said once in a table agrees with what must be spelled out elsewhere."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args, get_type_hints

import torch

from megatron_hetero.config.optimizers import NONE, OPTIMIZERS, OptimizerConfig, optimizer_kind
from megatron_hetero.layout.axes import AXES, TABLE, Split, axes_of
from megatron_hetero.layout.layout import Coordinate, Layout


def test_optimizers_are_those_that_can_be_set() -> None:
    assert get_args(get_type_hints(OptimizerConfig)["name"]) == tuple(OPTIMIZERS)
    names = {field.name for field in fields(OptimizerConfig)}
    for kind in OPTIMIZERS.values():
        assert names.issuperset(kind.unused) and optimizer_kind(kind.name) is kind
    assert optimizer_kind("none") is NONE and not NONE.moments


def test_moments_are_those_of_pytorch() -> None:
    for kind, pytorch in zip(OPTIMIZERS.values(), (torch.optim.AdamW, torch.optim.SGD), strict=True):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = pytorch([weight], lr=0.1)
        weight.grad = torch.ones(2)
        optimizer.step()
        tensors = {name for name, value in optimizer.state[weight].items() if getattr(value, "shape", None) == (2,)}
        assert tensors == set(kind.moments)


def test_axes_are_those_of_layouts() -> None:
    assert (*AXES, "ranks", "folds") == tuple(field.name for field in fields(Layout)) and Coordinate._fields == AXES
    assert axes_of("tokens") == ("sp", "cp") and axes_of("weights", "layers") == ("tp", "pp")
    splits: dict[Split, None] = dict.fromkeys(axis.splits for axis in TABLE)
    assert [name for split in splits for name in axes_of(split)] == list(AXES)
    layout = Layout(tp=2, sp=3, cp=5, dp=7, pp=1, ranks=tuple(range(210)))
    assert layout.ways("weights", "tokens") == 30 and layout.ways("samples") == 7 and layout.ways() == 1
