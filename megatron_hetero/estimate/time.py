"""Operations of each stage in a micro-batch, which stand for its time. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatron_hetero.base.errors import TEXT
from megatron_hetero.config.schema import Config
from megatron_hetero.estimate.shards import AssumedBatch
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.layers.parts import FORWARD, Tokens
from megatron_hetero.models.layers.recompute import Recompute
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.simulator import DurationKey

COPIED = 8000
"""Operations per byte copied to or from the host: some 400 TFLOP/s and 50 GB/s on H100, half of both on A100."""


def text_forward(assumed: AssumedBatch, stage: PipelineStage) -> float:
    """Operations of one rank in the forward pass of a text stage."""
    t, layout = assumed.shapes.text, assumed.layouts[TEXT]
    tokens = Tokens(assumed.lengths, supervised=assumed.sample.supervised * len(assumed.lengths))
    return t.architecture.operations(tokens, stage, FORWARD) / layout.ways("weights", "tokens")


def encoder_forward(assumed: AssumedBatch, encoder: str, stage: PipelineStage, images: float) -> float:
    """Operations of one rank in the forward pass of an encoder's stage, in a replica with `images` images."""
    v, layout, sizes = assumed.shapes.encoders[encoder], assumed.layouts[encoder], assumed.sample.sizes[encoder]
    if not sizes:
        return 0.0
    of_image = v.architecture.operations(v.tokens(sizes[:1]), stage, FORWARD)
    return images * of_image / layout.ways("weights", "tokens")


def durations(
    config: Config,
    assumed: AssumedBatch,
    stages: Mapping[str, Sequence[PipelineStage]],
    images: Mapping[str, float],
    frozen: Frozen,
) -> dict[DurationKey, float]:
    """Operations of one rank by module, kind of work and stage. `images`: of an encoder's replica.

    A backward pass costs a forward pass each for the gradients of inputs and of weights, where they are computed, and
    the forward pass of fully recomputed layers. Selective recomputation repeats no matrix product and costs nothing.
    """
    found: dict[DurationKey, float] = {}
    for name, of_module in stages.items():
        for number, stage in enumerate(of_module):
            text = name == TEXT
            forward = text_forward(assumed, stage) if text else encoder_forward(assumed, name, stage, images[name])
            passes = frozen.passes(name, inputs=text or frozen.trains(name))
            recompute = Recompute.of(config.model, name)
            again = forward * recompute.whole_layers(len(stage.layers)) / len(stage.layers)
            if passes.linear > 1:
                again += _chunks_again(assumed, name, stage, 0 if text else images[name], recompute)
            found[name, "F", number] = found[name, "R", number] = forward
            found[name, "B", number] = forward * (passes.linear - 1) + again
    return found


def with_copies(
    work: Mapping[DurationKey, float], copied: Mapping[tuple[str, int], int], schedule: Schedule
) -> dict[DurationKey, float]:
    """`work`, or the time of the copies to and from the host beside it where that is longer. `copied`: bytes by module
    and stage.
    """

    def found(name: str, kind: str, stage: int) -> float:
        alone = kind == "F" and schedule.module[name].recomputes  # saves nothing yet
        return 0.0 if alone else COPIED * copied.get((name, stage), 0)

    return {key: max(operations, found(*key)) for key, operations in work.items()}


def _chunks_again(assumed: AssumedBatch, name: str, stage: PipelineStage, images: float, recompute: Recompute) -> float:
    """Operations of one rank to recompute the first product of chunked MLPs. `images`: of an encoder's replica."""
    shape, layout = assumed.shapes[name], assumed.layouts[name]
    on_rank = _tokens(assumed, name, images) / layout.ways("tokens")
    if not recompute.chunks(math.ceil(on_rank)):
        return 0.0
    per_token = sum(layer.mlp.first_product for layer in shape.architecture.layers[stage.first : stage.last])
    return on_rank * per_token / layout.ways("weights")


def _tokens(assumed: AssumedBatch, name: str, images: float) -> float:
    """Tokens of a replica in a micro-batch, or patches of its `images`."""
    if name == TEXT:
        return sum(assumed.lengths)
    sizes = assumed.sample.sizes[name]
    return images * sum(assumed.shapes.encoders[name].sequences(sizes[0])) if sizes else 0
