"""Computes the time of work, in operations of one rank: the cost model of `--plan`. Pure.

A forward pass takes the operations of its matrix products and attention. A backward pass takes the operations of the
gradients of inputs and of weights that are computed, and repeats the forward pass of fully recomputed layers and of
encoders that take several calls for a micro-batch. Selective recomputation repeats no matrix product and costs nothing;
chunked MLPs, and experts with the level `experts`, recompute their first product. Experts take the time of the rank
whose experts get the most tokens. Where activations are copied to the host, work takes at least the time of the
concurrent copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_hetero.estimate.experts import expert_mlps, ranks_of_experts
from megatron_hetero.estimate.shards import AssumedBatch
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.layers.experts import ExpertMLP
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.parts import FORWARD, MLPPart, Tokens
from megatron_hetero.schedule.simulator import DurationKey

COPIED = 8000
"""Operations in the time of copying a byte to or from the host (H100: 400 TFLOP/s, 50 GB/s; A100: half of both)."""


def module_durations(
    assumed: AssumedBatch, module: ModuleJob, host_bytes: Sequence[int], *, several_calls: bool
) -> dict[DurationKey, float]:
    """Return the operations of one rank in a micro-batch by module, kind of work and stage.

    `host_bytes`: the bytes that each stage copies to the host, and back. `several_calls`: whether the module takes
    several calls for a micro-batch.
    """
    job, name, layout = assumed.job, module.name, module.layout
    architecture, recompute = module.shape.architecture, module.recompute
    passes = job.frozen.passes(name, inputs=module.passes_gradients)
    forward_saves = not job.schedule.module[name].recomputes
    tokens, times = _replica_tokens(assumed, name)
    local_tokens = times * tokens.total / layout.ways("tokens")
    local_share = times / layout.ways("weights", "tokens")
    durations = dict[DurationKey, float]()
    for number, stage in enumerate(module.stages):
        layers = architecture.layers[stage.first : stage.last]
        uneven = tokens.total * _operations_above_mean(layers, layout, job.config.plan.expert_imbalance)
        forward = local_share * (architecture.operations(tokens, stage, FORWARD) + uneven)
        step = local_share * (job.frozen.operations(name, job.shapes, tokens, stage) + uneven * passes.linear)
        again = forward * recompute.whole_layers(len(stage.layers)) / len(stage.layers)
        if passes.linear > 1:
            mlps = (layer.mlp for layer in layers)
            chunked = [mlp for mlp in mlps if recompute.chunks(math.ceil(_mlp_tokens(mlp, local_tokens, layout)))]
            products = sum(mlp.first_product for mlp in chunked)
            if recompute.experts:
                # What other ranks than the busiest repeat is shorter.
                most = job.config.plan.expert_imbalance if ranks_of_experts(layout) > 1 else 1.0
                products += most * sum(mlp.first_of_experts for mlp in expert_mlps(layers) if mlp not in chunked)
            again += local_tokens * products / layout.ways("weights")
        if several_calls:
            again += forward
        copies = COPIED * host_bytes[number]
        is_last = number == len(module.stages) - 1
        durations[name, "F", number] = max(forward, copies if forward_saves else 0)
        # With several calls, the last stage runs forward again only within its backward pass, not as R.
        durations[name, "R", number] = 0.0 if several_calls and is_last else max(forward, copies)
        durations[name, "B", number] = max(step - forward + again, copies)
    return durations


def _replica_tokens(assumed: AssumedBatch, module: str) -> tuple[Tokens, float]:
    """Return tokens and a multiplier that together give the work of a replica in a micro-batch: for the text module all
    its tokens and 1; for an encoder the tokens of one image, and the images on the fullest replica, a mean over calls.
    """
    if module == TEXT:
        return Tokens(assumed.lengths, supervised=assumed.sample.supervised * len(assumed.lengths)), 1
    calls = assumed.calls[module]
    largest = {n: max(map(len, assumed.encoder_shards(module, n).assigned)) for n in assumed.sizes_of_calls(module)}
    images = sum(largest[len(call)] for call in calls) / sum(map(len, calls))
    return assumed.job.shapes.encoders[module].tokens(assumed.sample.sizes[module][:1]), images


def _mlp_tokens(mlp: MLPPart, tokens: float, layout: Layout) -> float:
    """Return the number of tokens that pass through an MLP on a rank: all `tokens`, or for an MLP with experts the
    share of the tokens that the rank routes.
    """
    return tokens / layout.ways("weights") if isinstance(mlp, ExpertMLP) else tokens


def _operations_above_mean(layers: Iterable[Layer], layout: Layout, imbalance: float) -> float:
    """Return the operations per token by which the forward pass of the rank with most expert tokens, `imbalance` times
    the mean, exceeds the mean over ranks; 0 if experts are not divided over ranks.
    """
    if ranks_of_experts(layout) == 1:
        return 0.0
    return sum(6 * mlp.top_k * mlp.ffn * mlp.hidden for mlp in expert_mlps(layers)) * (imbalance - 1)
