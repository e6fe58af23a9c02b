"""Operations of each stage in a micro-batch, which stand for its time. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_hetero.base.errors import TEXT
from megatron_hetero.estimate.shards import AssumedBatch
from megatron_hetero.models.layers.parts import FORWARD, Tokens
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.schedule.simulator import DurationKey

COPIED = 8000
"""Operations per byte copied to or from the host: some 400 TFLOP/s and 50 GB/s on H100, half of both on A100."""


def durations(assumed: AssumedBatch, copied: Mapping[tuple[str, int], int]) -> dict[DurationKey, float]:
    """Operations of one rank by module, kind of work and stage, or those that fit in the time of the copies beside
    them where that is longer. `copied`: bytes copied to the host, and back, by module and stage.

    A backward pass costs a forward pass each for the gradients of inputs and of weights, where they are computed, and
    the forward pass of fully recomputed layers. Selective recomputation repeats no matrix product and costs nothing;
    chunked MLPs recompute their first product.
    """
    job, found = assumed.job, dict[DurationKey, float]()
    for name, stages in job.stages.items():
        architecture, ways = job.shapes[name].architecture, job.layouts[name].ways
        tokens, times = _of_replica(assumed, name)
        on_rank = times * tokens.total / ways("tokens")
        passes = job.frozen.passes(name, inputs=name == TEXT or job.frozen.trains(name))
        recompute = Recompute.of(job.config.model, name)
        for number, stage in enumerate(stages):
            forward = times * architecture.operations(tokens, stage, FORWARD) / ways("weights", "tokens")
            again = forward * recompute.whole_layers(len(stage.layers)) / len(stage.layers)
            if passes.linear > 1 and recompute.chunks(math.ceil(on_rank)):
                per_token = sum(layer.mlp.first_product for layer in architecture.layers[stage.first : stage.last])
                again += on_rank * per_token / ways("weights")
            copies = COPIED * copied.get((name, number), 0)
            saves = not job.schedule.module[name].recomputes  # else F saves nothing yet
            found[name, "F", number] = max(forward, copies * saves)
            found[name, "R", number] = max(forward, copies)
            found[name, "B", number] = max(forward * (passes.linear - 1) + again, copies)
    return found


def _of_replica(assumed: AssumedBatch, module: str) -> tuple[Tokens, float]:
    """Tokens of a replica's micro-batch: those of the text module, or those of one image, and how many images the
    replica with the most has in a micro-batch, averaged over the calls of a step.
    """
    if module == TEXT:
        return Tokens(assumed.lengths, supervised=assumed.sample.supervised * len(assumed.lengths)), 1
    calls = assumed.calls[module]
    most = {n: max(map(len, assumed.assigned(module, n))) for n in assumed.sizes_of_calls(module)}
    images = sum(most[len(call)] for call in calls) / sum(map(len, calls))
    return assumed.job.shapes.encoders[module].tokens(assumed.sample.sizes[module][:1]), images
