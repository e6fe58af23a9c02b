"""What layers with experts exchange and compute in a step, under uniform routing. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_hetero.estimate.shards import AssumedBatch
from megatron_hetero.layout.axes import EXPERTS, Fold
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT
from megatron_hetero.layout.pipeline import stages_of_rank
from megatron_hetero.models.layers.dispatch import Sizes, block
from megatron_hetero.models.layers.experts import ExpertMLP
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.parts import MLPPart

FORWARD, BACKWARD = 5, 3
"""All-to-alls of a layer: sizes, choices, weights, rows and results; gradients of results, rows and weights."""
_SIZE, _CHOICE = 8, 4
"""Bytes of a number of rows or pairs, and of a choice."""


@dataclass(frozen=True)
class ExpertTraffic:
    """What a rank receives from the others that have experts.

    Attributes:
        rows: of a layer in a micro-batch, on average.
        received: bytes in a step, on average.
        exchanges: all-to-alls in a step.
        waits: how often the host waits for the device in a step, for sizes of exchanges and of products in parts.
    """

    rows: int
    received: int
    exchanges: int
    waits: int


def expert_mlps(layers: Iterable[Layer]) -> list[ExpertMLP]:
    """The MLPs with experts of `layers`."""
    return [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertMLP)]


def experts_of_ranks(experts: int, ranks: int) -> tuple[int, int]:
    """The fewest and the most experts of one of `ranks`."""
    sizes = [stop - start for start, stop in (block(experts, rank, ranks) for rank in range(ranks))]
    return min(sizes), max(sizes)


def ranks_of_experts(layout: Layout) -> int:
    """The number of ranks that experts are divided over."""
    return layout.ways("experts", view=EXPERTS) if EXPERTS in layout.views else 1


def with_experts_over(layout: Layout, ranks: int) -> Layout:
    """The layout with experts divided over `ranks`, a divisor of the ranks of a stage."""
    return replace(layout, folds=tuple(Fold(v, (ranks,) if v == EXPERTS else stated) for v, stated in layout.folds))


def tokens_of(mlp: MLPPart, tokens: float, layout: Layout) -> float:
    """Tokens that pass through an MLP on a rank with `tokens`, which tp ranks share: of experts those it routes."""
    return tokens / layout.ways("weights") if isinstance(mlp, ExpertMLP) else tokens


def operations_above_mean(layers: Iterable[Layer], layout: Layout, imbalance: float) -> float:
    """Operations per token of a forward pass that the rank computes whose experts get `imbalance` times the mean, and
    others do not. On average each rank computes as much as its own tokens need, wherever experts are.
    """
    routed = sum(6 * mlp.top_k * mlp.ffn * mlp.hidden for mlp in expert_mlps(layers))
    return routed * (imbalance - 1) * (ranks_of_experts(layout) > 1)


def expert_traffic(assumed: AssumedBatch, at: int) -> ExpertTraffic | None:
    """The traffic of a rank of the text module at pipeline coordinate `at`; None if its host does not wait."""
    job = assumed.job
    layout, layers = job.layouts[TEXT], job.shapes.text.architecture.layers
    stages = stages_of_rank(job.stages[TEXT], at, layout.pp)
    sparse = expert_mlps(layers[number] for stage in stages for number in stage.layers)
    ranks, recompute = ranks_of_experts(layout), job.text.recompute
    tokens = sum(assumed.lengths) / layout.ways("weights", "tokens")
    reads = recompute.chunks(round(tokens)) or job.config.model.dtype != "bfloat16"
    if not sparse or not (waits := (ranks > 1) + reads):
        return None
    whole = (number for stage in stages for number in stage.layers[: recompute.whole_layers(len(stage.layers))])
    again = expert_mlps(layers[number] for number in whole)
    passes = 1 + job.schedule.module[TEXT].backward
    mlp, itemsize = sparse[0], job.dtype.itemsize
    rows = sum(Sizes.expected(round(tokens), mlp.top_k, ranks, 1.0).received[1:])
    passed = rows * (2 * mlp.hidden + mlp.top_k) * itemsize
    chosen = rows * mlp.top_k * _CHOICE + (ranks - 1) * 2 * _SIZE
    times = job.batch.micro_batches
    return ExpertTraffic(
        rows,
        times * (len(sparse) * (passed * passes + chosen) + len(again) * passed),
        times * (ranks > 1) * (len(sparse) * (FORWARD + BACKWARD * (passes - 1)) + len(again) * BACKWARD),
        times * len(sparse) * waits,
    )
