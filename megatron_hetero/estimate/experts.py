"""Computes how experts are divided over ranks, and their traffic in a step with uniform routing. Pure."""

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

FORWARD, BACKWARD, AGAIN = 4, 3, 2
"""Number of all-to-alls of a layer: forward (sizes, choices with weights, rows, results), backward (gradients of
results, weights and rows), and in a recomputation (rows, results)."""
_SIZE = 8
"""Bytes of a transferred count of rows or pairs."""


@dataclass(frozen=True)
class ExpertTraffic:
    """Expert traffic that a rank receives from other ranks.

    Attributes:
        rows: the average number of rows received for a layer in a micro-batch.
        received: the average number of bytes received in a step.
        exchanges: the number of all-to-alls in a step.
        waits: the number of host waits for the device in a step, for the sizes of exchanges and of chunked products.
    """

    rows: int
    received: int
    exchanges: int
    waits: int


def expert_mlps(layers: Iterable[Layer]) -> list[ExpertMLP]:
    """Return the MLPs of `layers` that have experts."""
    return [layer.mlp for layer in layers if isinstance(layer.mlp, ExpertMLP)]


def experts_of_ranks(experts: int, ranks: int) -> tuple[int, int]:
    """Return the minimum and the maximum number of experts per rank when `ranks` share a layer's experts."""
    sizes = [stop - start for start, stop in (block(experts, rank, ranks) for rank in range(ranks))]
    return min(sizes), max(sizes)


def ranks_of_experts(layout: Layout) -> int:
    """Return the number of ranks over which a layout divides the experts of a layer."""
    return layout.ways("experts", view=EXPERTS) if EXPERTS in layout.views else 1


def with_experts_over(layout: Layout, ranks: int) -> Layout:
    """Return the layout with experts divided over `ranks`, a divisor of the number of ranks of a stage."""
    folds = (Fold(view, (ranks,) if view == EXPERTS else stated) for view, stated in layout.folds)
    return replace(layout, folds=tuple(folds))


def expert_traffic(assumed: AssumedBatch, coordinate: int) -> ExpertTraffic | None:
    """Return the expert traffic of a rank of the text module at a pipeline coordinate; None if its host never waits."""
    job = assumed.job
    layout, layers = job.layouts[TEXT], job.shapes.text.architecture.layers
    stages = stages_of_rank(job.stages[TEXT], coordinate, layout.pp)
    sparse = expert_mlps(layers[number] for stage in stages for number in stage.layers)
    ranks, recompute = ranks_of_experts(layout), job.text.recompute
    tokens = round(sum(assumed.lengths) / layout.ways("weights", "tokens"))
    reads_sizes = recompute.chunks(tokens) or job.config.model.dtype != "bfloat16"
    waits = (ranks > 1) + reads_sizes
    if not sparse or not waits:
        return None
    recomputed_layers = (
        number for stage in stages for number in stage.layers[: recompute.whole_layers(len(stage.layers))]
    )
    recomputed = len(expert_mlps(layers[number] for number in recomputed_layers))
    passes = 1 + job.schedule.module[TEXT].backward
    mlp = sparse[0]
    rows = sum(Sizes.expected(tokens, mlp.top_k, ranks, 1.0).received[1:])
    row_bytes, weight_bytes = (rows * each * job.dtype.itemsize for each in (2 * mlp.hidden, mlp.top_k))
    # A chosen expert has as many bytes as its weight.
    of_choices = weight_bytes + (ranks - 1) * 2 * _SIZE
    received = len(sparse) * ((row_bytes + weight_bytes) * passes + of_choices) + recomputed * row_bytes
    exchanges = len(sparse) * (FORWARD + BACKWARD * (passes - 1)) + recomputed * AGAIN
    times = job.batch.micro_batches
    return ExpertTraffic(
        rows=rows,
        received=times * received,
        exchanges=times * exchanges if ranks > 1 else 0,
        waits=times * len(sparse) * waits,
    )
