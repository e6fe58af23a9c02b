"""Tokens of each expert in the steps of a run, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.axes import MAIN
from megatron_hetero.layout.names import TEXT
from megatron_hetero.step.module import TrainedModule


def take_loads(modules: Iterable[TrainedModule], topology: Topology, layers: Sequence[int]) -> list[float]:
    """Return for each of `layers` the tokens of its busiest expert relative to the mean of all its experts, since the
    last call; 0 for layers that are not on this rank, or without tokens. Collective over each stage of the text module.
    """
    chunks = next((module.chunks for module in modules if module.name == TEXT), ())
    loads = {number: load for chunk in chunks for number, load in chunk.take_loads().items()}
    if not loads:
        return [0.0] * len(layers)
    total = torch.stack(list(loads.values()))
    for axes in (("tp",), MAIN.sum_axes):
        group = topology.group(TEXT, *axes)
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    ratios = total.amax(dim=1) / total.double().mean(dim=1).clamp(min=1e-9)
    found = dict(zip(loads, ratios.tolist(), strict=True))
    return [found.get(number, 0.0) for number in layers]
