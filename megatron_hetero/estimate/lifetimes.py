"""Activation memory of a pipeline stage, and its peak over the actions of a rank. Pure.

A stage runs its parts in order and back in reverse, each after the saved tensors of later ones are freed. Fully
recomputed layers save their input, and the rest during their own backward pass. With offloaded activations
(`models.layers.offload`) two neighbouring layers are on the device at a time; tensors too small to copy, rotary tables
and received inputs stay there.

What each action allocates and frees, as `step.execution` executes it:

    irecv      hidden states of a neighbouring stage, or their gradients
    finish F   the token embedding, on the first text stage; freed by its forward
    start F    received rows, on the text stage that they enter; freed when their gradients leave (`start B`), or by the
               forward where none do
    run F, R   saved activations (of several calls: the input), on device and host, freed by the backward, and so are
               sent hidden states and rows; tensors on their way to the host; workspace
    run B      one recomputed layer or call, or tensors fetched from the host, and workspace. On text stages that rows
               enter, gradients of rows, until they have left (`finish B`)
    start B    gradients of rows, on the encoder's side, freed by its backward

A call of an encoder over several micro-batches runs with the forward of its first and the backward of its last one,
which concatenates their gradients. Where a micro-batch takes several calls, the forwards save their input alone, and
the backwards run call by call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise

from megatron_hetero.data.token_shards import SequenceShard
from megatron_hetero.estimate.measured import (
    FIRST,
    FP32,
    LAST,
    Measured,
    ModulePart,
    PartBytes,
    is_merged,
    measure,
)
from megatron_hetero.estimate.shards import Work
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.layers.offload import OffloadSizes, offloaded_layers
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Role, Schedule


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage for one micro-batch on one rank.

    `saved`: from forward to backward on the device; `host`: on the host. `passing`, `again`: the most besides in a
    forward and in a backward pass, for layers on their way to the host and back and for a recomputed layer. `forward`:
    the most besides `saved` in a forward pass, workspace included; `backward`: besides `saved` and `again` in a
    backward pass. `left`: hidden states sent on. `rows`: of one encoder output. `message`: hidden states of a transfer.
    `in_parts`: whether it takes several calls; `saved` is then its input, and `again` the most that a call saves.
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
    in_parts: bool = False


def combined(
    layers: Sequence[Sequence[PartBytes]],
    before: Sequence[PartBytes] = (),
    after: Sequence[PartBytes] = (),
    offload: OffloadSizes | None = None,
) -> StageBytes:
    """Combine the parts of a stage: of each layer, and `before` and `after` all layers, which are never offloaded.

    `offload`: block sizes of copies to the host, if activations are offloaded.
    """
    starts = [*accumulate(map(len, layers), initial=len(before))]
    moved = offloaded_layers(len(layers)) if offload else 0
    parts = [*before, *chain(*layers), *after]
    saved = [0, *accumulate(part.saved for part in parts)]
    stays = [0, *accumulate([*(part.saved for part in before), *(part.stays for part in parts[len(before) :])])]
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
def stage_bytes(measured: Measured, stage: PipelineStage, work: Work, *, offload: bool = False) -> StageBytes:
    """Memory of a stage on a rank with this work, without the rows that enter it. `offload`: whether its activations
    are offloaded.
    """
    if len(work) != 1:
        return _in_parts(measured, stage, work, offload=offload)
    [shard] = work
    module, shape, itemsize = measured.module, measured.shape, measured.module.dtype.itemsize
    message, trains = itemsize * shard.local * shape.hidden, module.passes_gradients
    whole = stage.first + module.recompute.whole_layers(len(stage.layers)) * trains
    layers = [_layer(measured, number, shard, whole=number < whole) for number in stage.layers]
    for one, following in pairwise(layers):
        if len(one) > 1 and trains:  # A merger's input is the input of the next layer, saved once.
            following[0] = replace(following[0], saved=following[0].saved - message)
    before = [measure(measured, FIRST, shard)] if stage.is_first else []
    after = [measure(measured, LAST, shard)] if stage.is_last else []
    if not stage.is_last:  # The gradient of the output is received.
        last = layers[-1][-1]
        layers[-1][-1] = replace(last, forward=last.forward - message, backward=last.backward - message)
    if not stage.is_first and trains:
        layers[0][0] = replace(layers[0][0], stays=min(layers[0][0].saved, layers[0][0].stays + message))
    found = combined(layers, before, after, OffloadSizes.of(measured.gpu) if offload else None)
    # Also the rotary tables, which all layers share, and the input of a stage whose layers need not save it.
    table = 2 * FP32 * shard.tokens * shape.rotary.width * trains
    held = message * (not stage.is_first and not trains)
    rows = 0 if measured.is_text else itemsize * shard.local // shape.unit * shape.out_hidden
    left = 0 if stage.is_last else message
    return replace(found, saved=found.saved + table + held, left=left, rows=rows, message=message)


def _in_parts(measured: Measured, stage: PipelineStage, work: Work, *, offload: bool) -> StageBytes:
    """Memory of a stage that takes several calls: its whole input, and on top of it one call after the other."""
    each = [stage_bytes(measured, stage, (shard,), offload=offload) for shard in work]
    if stage.is_first:
        size = measured.module.dtype.itemsize * measured.shape.patch_elements
        given = [size * shard.local for shard in work]
        # Frozen embeddings do not save them.
        shared = [n * (measure(measured, FIRST, shard).saved >= n) for n, shard in zip(given, work, strict=True)]
    else:
        given = shared = [of.message for of in each]
    own = [of.saved - n for of, n in zip(each, shared, strict=True)]
    again = max(n + max(of.again, of.passing) for n, of in zip(own, each, strict=True))
    most = max(n + max(of.forward, of.again + of.backward) for n, of in zip(own, each, strict=True))
    left, rows, message = sum(of.left for of in each), sum(of.rows for of in each), sum(of.message for of in each)
    outputs = stage.is_last + sum(is_merged(measured, layer) for layer in stage.layers)
    return StageBytes(
        saved=sum(given),
        passing=0,
        again=again,
        host=max(of.host for of in each),
        # Outputs of all calls are there twice when they are concatenated.
        forward=max(left + outputs * rows, *(of.forward for of in each)),
        # Gradients of hidden states wait for those of all calls.
        backward=max(0, most - again) + message * (not stage.is_first),
        left=left,
        rows=rows,
        message=message,
        in_parts=True,
    )


def _layer(measured: Measured, number: int, shard: SequenceShard, *, whole: bool) -> list[PartBytes]:
    """A layer, and the merger of its output, if any. `whole`: whether the layer is fully recomputed."""
    layer = measure(measured, ModulePart("layer", number), shard)
    passed = layer.passed
    if whole:
        # The recomputed output lives until the backward pass has ended.
        work = max(layer.forward, layer.backward + passed)
        saved = passed + layer.memo
        layer = replace(layer, saved=saved, stays=layer.memo, again=layer.saved - saved, backward=work)
    if not is_merged(measured, number):
        return [layer]
    merger = measure(measured, ModulePart("merger", number), shard)
    return [layer, replace(merger, forward=merger.forward + passed, backward=merger.backward + passed)]


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank: `stages`, by module, stage and number of micro-batches in a call; `held`, `needed`, by edge
    and micro-batch, of the rows that it encodes and that it receives. Idle stages and edges are missing. `outputs`:
    number of encoder outputs per edge. `calls`: by module, the micro-batches of each call.
    """

    stages: Mapping[tuple[str, int, int], StageBytes]
    held: Mapping[Edge, Sequence[int]]
    needed: Mapping[Edge, Sequence[int]]
    outputs: Mapping[Edge, int]
    calls: Mapping[str, Sequence[range]]


def peak_activations(schedule: Schedule, role: Role, of_rank: RankBytes) -> tuple[int, int, int]:
    """Peak bytes of activations on a rank of `role`, of workspace above it, and of activations on the host."""
    ledger = _Ledger(schedule, of_rank)
    for action in role.actions:
        ledger.execute(action)
    return ledger.peak, ledger.busiest - ledger.peak, ledger.host_peak


class _Ledger:
    """Live allocations, by name."""

    def __init__(self, schedule: Schedule, of_rank: RankBytes):
        self.schedule, self.of_rank = schedule, of_rank
        self.calls = {(name, m): call for name, calls in of_rank.calls.items() for call in calls for m in call}
        self.live: dict[object, int] = {}
        self.total = self.peak = self.busiest = 0
        self.on_host = self.host_peak = 0

    def _make(self, name: object, size: int) -> None:
        self.live[name] = size
        self.total += size
        self.peak = max(self.peak, self.total)
        self.busiest = max(self.busiest, self.peak)

    def _work(self, size: int) -> None:
        """Account for workspace, which is freed at once."""
        self.busiest = max(self.busiest, self.total + size)

    def _end(self, name: object) -> None:
        self.total -= self.live.pop(name, 0)

    def _move(self, size: int) -> None:
        """Account for bytes copied to the host, or freed there."""
        self.on_host += size
        self.host_peak = max(self.host_peak, self.on_host)

    def execute(self, action: Action) -> None:
        """Account for one action."""
        m, stages = action.micro_batch, self.of_rank.stages
        match action.op, action.kind:
            case "irecv", kind:
                if stage := stages.get((action.module, action.own_stage, 1)):
                    self._make(("arriving", kind, action.module, action.own_stage, m), stage.message)
            case "run", kind:
                call = self.calls[action.module, m]
                stage = stages.get((action.module, action.own_stage, len(call)))
                if stage is not None and m == call[-1 if kind == "B" else 0]:
                    (self._backward if kind == "B" else self._forward)(action, stage, call)
            case "start", "F":
                if action.edge in self.of_rank.needed:
                    self._make(("rows", action.edge, m), self.of_rank.needed[action.edge][m])
            case "start", _:
                self._end(("rows", action.edge, m))
                if action.edge in self.of_rank.held:
                    self._make(("returned", action.edge, m), self.of_rank.held[action.edge][m])
            case "finish", "F":
                self._finish(action)
            case "finish", _:
                self._end(("leaving", action.edge, m))

    def _finish(self, action: Action) -> None:
        edge, m, module = action.edge, action.micro_batch, self.schedule.module[action.module]
        text = self.of_rank.stages.get((self.schedule.text.name, 0, 1))
        enters_first = self.schedule.stages_of(edge)[1] == 0
        if text is not None and enters_first and ("embedded", m) not in self.live:
            self._make(("embedded", m), text.message)
        call = self.calls[action.module, m]
        encoder = self.of_rank.stages.get((action.module, self.schedule.stages_of(edge)[0], len(call)))
        in_parts = encoder is not None and encoder.in_parts
        if (not module.backward or module.recomputes or in_parts) and m == call[-1]:
            # No backward pass needs the rows, which those of a call share.
            self._end(("encoded", edge, call[0]))

    def _forward(self, action: Action, stage: StageBytes, call: range) -> None:
        key, module = (action.module, action.own_stage, call[0]), self.schedule.module[action.module]
        if action.module == self.schedule.text.name and action.stage == 0:
            self._end(("embedded", action.micro_batch))
        self._end(("arriving", action.kind, *key))
        saves = module.backward and (action.kind == "R" or not module.recomputes)
        self._make(("saved", *key), stage.saved * saves)
        self._make("passing", stage.passing * saves)
        self._end("passing")
        self._move(stage.host * (saves and not stage.in_parts))
        sends = saves or action.kind == "F"
        self._make(("left", *key), stage.left * sends)
        for edge in self._leaving(action):
            crosses = sends and not (stage.in_parts and action.kind == "R")
            self._make(("encoded", edge, action.micro_batch), stage.rows * self.of_rank.outputs[edge] * crosses)
        self._work(stage.forward)
        for edge in self._entering(action):
            if not (module.backward and self.schedule.module[edge.source].backward):
                self._end(("rows", edge, action.micro_batch))
        if not saves or stage.in_parts:
            self._end(("left", *key))

    def _backward(self, action: Action, stage: StageBytes, call: range) -> None:
        key = action.module, action.own_stage, call[0]
        if len(call) > 1:
            self._work(sum(self.of_rank.held[edge][m] for edge in self._leaving(action) for m in call))
        self._make(("again", *key), stage.again)
        self._move(stage.host * stage.in_parts)
        self._work(stage.backward)
        for what in ("again", "saved", "left"):
            self._end((what, *key))
        self._move(-stage.host)
        self._end(("arriving", "B", *key))
        for edge in self._leaving(action):
            self._end(("encoded", edge, call[0]))
            for m in call:
                self._end(("returned", edge, m))
        for edge in self._entering(action):
            if self.schedule.module[edge.source].backward:
                needed = self.of_rank.needed[edge][action.micro_batch]
                self._make(("leaving", edge, action.micro_batch), needed)

    def _leaving(self, work: Action) -> list[Edge]:
        """Edges along which rows of a stage leave this rank."""
        edges = self.schedule.leaving.get((work.module, work.own_stage), ())
        return [edge for edge in edges if edge in self.of_rank.held]

    def _entering(self, work: Action) -> list[Edge]:
        """Edges along which rows enter a stage on this rank."""
        edges = self.schedule.entering.get((work.module, work.own_stage), ())
        return [edge for edge in edges if edge in self.of_rank.needed]
