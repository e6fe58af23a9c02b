"""What a pipeline stage takes of the device and of the host: the parts that it runs, together. Pure.

Parts run in order, and go backward in the opposite order, each when what later ones kept is gone. Layers that are
recomputed as a whole keep their input, and all else for the time of their own backward pass. Where activations are
offloaded (`models.common.offload`), a layer is on the device with the one before it: in the forward pass until that is
copied, in the backward pass since it is fetched. On the device stay what is smaller than is worth a copy, the tables of
rotary embeddings, and what a stage received, which the interpreter holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise

from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.common.offload.policy import OffloadSizes, offloaded_layers
from megatron_hetero.planning.memory.measured import FP32, PartBytes, measure
from megatron_hetero.planning.memory.parts import FIRST, LAST, MeasuredModule, Part, is_merged
from megatron_hetero.planning.shards import SequenceShard


@dataclass(frozen=True)
class StageBytes:
    """What a stage takes for one micro-batch on one rank.

    `saved`: what autograd and the interpreter keep from forward to backward, on the device; `host`: on the host.
    `passing`, `again`: what is kept besides at most in a forward, and in a backward pass: by layers on their way to the
    host and back, and by a layer that is recomputed. `forward`: the most besides `saved` in a forward pass, with its
    workspace; `backward`: besides `saved` and `again` in a backward pass.

    `left`: hidden states that go out. `rows`: of one output of an encoder. `message`: hidden states between stages.
    """

    saved: int
    passing: int
    again: int
    host: int
    forward: int
    backward: int
    left: int = 0
    rows: int = 0
    message: int = 0


@dataclass(frozen=True)
class KeptBytes:
    """What one part of a stage takes. `saved`: from its forward pass on; `stays`: of that on the device in any case.
    `again`: what it keeps besides during its backward pass, where it is recomputed as a whole. `forward`, `backward`:
    workspace besides.
    """

    saved: int
    stays: int = 0
    again: int = 0
    forward: int = 0
    backward: int = 0


def together(
    layers: Sequence[Sequence[KeptBytes]],
    before: Sequence[KeptBytes] = (),
    after: Sequence[KeptBytes] = (),
    offload: OffloadSizes | None = None,
) -> StageBytes:
    """Put the parts of a stage together: those of each layer, and those `before` and `after` all layers, all of which
    stays on the device. `offload`: of what activations are copied to the host in, if they are.
    """
    starts = [*accumulate(map(len, layers), initial=len(before))]
    moved = offloaded_layers(len(layers)) if offload else 0
    parts = [*before, *chain(*layers), *after]
    saved = [0, *accumulate(part.saved for part in parts)]
    stays = [0, *accumulate(part.stays for part in parts)]
    kept = stays[starts[moved]] + saved[-1] - saved[starts[moved]]
    # How many parts are on the host when each one runs.
    away = [0] * len(before)
    away += [starts[min(moved, max(0, layer - 1))] for layer, of_layer in enumerate(layers) for _ in of_layer]
    away += [starts[moved]] * len(after)
    levels = [stays[gone] + saved[number + 1] - saved[gone] - kept for number, gone in enumerate(away)]
    each = list(zip(levels, parts, strict=True))
    again = max([0, *(level + part.again for level, part in each)])
    forward = max([0, *(level + part.forward for level, part in each)])
    backward = max([again, *(level + part.again + part.backward for level, part in each)])
    on_host = [sum(part.saved - part.stays for part in of_layer) for of_layer in layers[:moved]]
    host = sum(map(offload.on_host, on_host)) if offload else 0
    return StageBytes(kept, max([0, *levels]), again, host, forward, backward - again)


@lru_cache(maxsize=4096)
def stage_bytes(module: MeasuredModule, stage: Stage, shard: SequenceShard, *, offload: bool = False) -> StageBytes:
    """What a stage takes on a rank that works on `shard`. The rows that enter it are not in it. `offload`: whether its
    activations are on the host.
    """
    shape, itemsize = module.shape, module.dtype.itemsize
    message, sizes = itemsize * shard.local * shape.hidden, OffloadSizes.of(module.gpu)
    whole = stage.first + module.recompute.whole_layers(len(stage.layers)) * module.trains
    layers = [_layer(module, number, shard, sizes.least, whole=number < whole) for number in stage.layers]
    for one, following in pairwise(layers):
        if len(one) > 1 and module.trains:  # What is merged is the input of the next layer, and kept once.
            following[0] = replace(following[0], saved=following[0].saved - message)
    before = [_part(measure(module, FIRST, shard))] if stage.is_first else []
    after = [_part(measure(module, LAST, shard))] if stage.is_last else []
    if not stage.is_last:  # The gradient of what the stage passes on comes from another.
        last = layers[-1][-1]
        layers[-1][-1] = replace(last, forward=last.forward - message, backward=last.backward - message)
    if not stage.is_first and module.trains:
        layers[0][0] = replace(layers[0][0], stays=min(layers[0][0].saved, layers[0][0].stays + message))
    found = together(layers, before, after, sizes if offload else None)
    # Besides: the rotary tables, which all layers share, and the input of a stage whose layers need not keep it.
    table = 2 * FP32 * shard.tokens * shape.rotary.head_dim * module.trains
    held = message * (not stage.is_first and not module.trains)
    rows = 0 if module.is_text else itemsize * shard.local // shape.unit * shape.out_hidden
    left = 0 if stage.is_last else message
    return replace(found, saved=found.saved + table + held, left=left, rows=rows, message=message)


def _layer(module: MeasuredModule, number: int, shard: SequenceShard, least: int, *, whole: bool) -> list[KeptBytes]:
    """A layer, and what merges its output. `least`: bytes of what is offloaded. `whole`: whether a layer is recomputed
    as a whole.
    """
    found = measure(module, Part("layer", number), shard)
    layer = _part(found, least)
    if whole:
        # It runs forward once more, and what it gives is there until its backward pass has ended.
        work = max(found.forward, found.backward) + found.passed
        layer = KeptBytes(found.passed, 0, layer.saved - found.passed, layer.forward, work)
    if not is_merged(module, number):
        return [layer]
    return [layer, _part(measure(module, Part("merger", number), shard), least, beside=found.passed)]


def _part(found: PartBytes, least: float = math.inf, beside: int = 0) -> KeptBytes:
    """A part, of which memories of fewer bytes than `least` stay on the device. `beside`: what else there is."""
    kept = (*found.saved, found.given)
    stays = sum(size for size in kept if size < least)
    return KeptBytes(sum(kept), stays, 0, found.forward + found.passed + beside, found.backward + beside)
