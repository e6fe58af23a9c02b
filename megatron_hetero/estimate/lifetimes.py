"""Activation memory of a pipeline stage, and its peak over the actions of a rank. Pure.

A stage runs its parts in order and back in reverse, each after the saved tensors of later ones are freed. Fully
recomputed layers save their input, and the rest during their own backward pass. With offloaded activations
(`models.layers.offload`) two neighbouring layers are on the device at a time; tensors too small to copy, rotary tables
and received inputs stay there.

What each action allocates and frees, as `step.interpreter` executes it:

    irecv      hidden states of a neighbouring stage, or their gradients
    finish F   the token embedding, on the first text stage; freed by its forward
    start F    received rows, on the text stage that they enter; freed when their gradients leave (`start B`), or by the
               forward where none do
    run F, R   saved activations, on device and host, freed by the backward, and so are sent hidden states and rows;
               tensors on their way to the host; workspace
    run B      one recomputed layer, or tensors fetched from the host, and workspace. On text stages that rows enter,
               gradients of rows, until they have left (`finish B`)
    start B    gradients of rows, on the encoder's side, freed by its backward

A call of an encoder over several micro-batches runs with the forward of its first and the backward of its last one,
which concatenates their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise

from megatron_hetero.estimate.measured import (
    FIRST,
    FP32,
    LAST,
    MeasuredModule,
    ModulePart,
    PartBytes,
    is_merged,
    measure,
)
from megatron_hetero.estimate.shards import SequenceShard
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.layers.offload import OffloadSizes, offloaded_layers
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Module, Role, Schedule, StageId


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage for one micro-batch on one rank.

    `saved`: from forward to backward on the device; `host`: on the host. `passing`, `again`: the most besides in a
    forward and in a backward pass, for layers on their way to the host and back and for a recomputed layer. `forward`:
    the most besides `saved` in a forward pass, workspace included; `backward`: besides `saved` and `again` in a
    backward pass. `left`: hidden states sent on. `rows`: of one encoder output. `message`: hidden states of a transfer.
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
class PartMemory:
    """Bytes of one part of a stage. `saved`: from its forward pass on; `stays`: the share of it that is never
    offloaded. `again`: recomputed activations during its backward pass. `forward`, `backward`: workspace.
    """

    saved: int
    stays: int = 0
    again: int = 0
    forward: int = 0
    backward: int = 0


def combined(
    layers: Sequence[Sequence[PartMemory]],
    before: Sequence[PartMemory] = (),
    after: Sequence[PartMemory] = (),
    offload: OffloadSizes | None = None,
) -> StageBytes:
    """Combine the parts of a stage: of each layer, and `before` and `after` all layers, which are never offloaded.

    `offload`: block sizes of copies to the host, if activations are offloaded.
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
def stage_bytes(
    module: MeasuredModule, stage: PipelineStage, shard: SequenceShard, *, offload: bool = False
) -> StageBytes:
    """Memory of a stage on a rank that works on `shard`, without the rows that enter it. `offload`: whether its
    activations are offloaded.
    """
    shape, itemsize = module.shape, module.dtype.itemsize
    message, sizes = itemsize * shard.local * shape.hidden, OffloadSizes.of(module.gpu)
    whole = stage.first + module.recompute.whole_layers(len(stage.layers)) * module.trains
    layers = [_layer(module, number, shard, sizes.least, whole=number < whole) for number in stage.layers]
    for one, following in pairwise(layers):
        if len(one) > 1 and module.trains:  # A merger's input is the input of the next layer, saved once.
            following[0] = replace(following[0], saved=following[0].saved - message)
    before = [_part(measure(module, FIRST, shard))] if stage.is_first else []
    after = [_part(measure(module, LAST, shard))] if stage.is_last else []
    if not stage.is_last:  # The gradient of the output is received.
        last = layers[-1][-1]
        layers[-1][-1] = replace(last, forward=last.forward - message, backward=last.backward - message)
    if not stage.is_first and module.trains:
        layers[0][0] = replace(layers[0][0], stays=min(layers[0][0].saved, layers[0][0].stays + message))
    found = combined(layers, before, after, sizes if offload else None)
    # Also the rotary tables, which all layers share, and the input of a stage whose layers need not save it.
    table = 2 * FP32 * shard.tokens * shape.rotary.head_dim * module.trains
    held = message * (not stage.is_first and not module.trains)
    rows = 0 if module.is_text else itemsize * shard.local // shape.unit * shape.out_hidden
    left = 0 if stage.is_last else message
    return replace(found, saved=found.saved + table + held, left=left, rows=rows, message=message)


def _layer(module: MeasuredModule, number: int, shard: SequenceShard, least: int, *, whole: bool) -> list[PartMemory]:
    """A layer, and the merger of its output, if any. `least`: the smallest offloaded tensor, in bytes. `whole`: whether
    the layer is fully recomputed.
    """
    found = measure(module, ModulePart("layer", number), shard)
    layer = _part(found, least)
    if whole:
        # The recomputed output lives until the backward pass has ended.
        work = max(found.forward, found.backward) + found.passed
        layer = PartMemory(found.passed, 0, layer.saved - found.passed, layer.forward, work)
    if not is_merged(module, number):
        return [layer]
    return [layer, _part(measure(module, ModulePart("merger", number), shard), least, beside=found.passed)]


def _part(found: PartBytes, least: float = math.inf, beside: int = 0) -> PartMemory:
    """Memory of a part. Tensors below `least` bytes stay on the device. `beside`: further bytes while it runs."""
    kept = (*found.saved, found.given)
    stays = sum(size for size in kept if size < least)
    return PartMemory(sum(kept), stays, 0, found.forward + found.passed + beside, found.backward + beside)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank: `stages`, by module, stage and number of micro-batches in a call; `held`, `needed`, by edge
    and micro-batch, of the rows that it encodes and that it receives. Idle stages and edges are missing. `outputs`:
    number of encoder outputs per edge. `calls`: by encoder, the micro-batches of each call.
    """

    stages: Mapping[tuple[str, int, int], StageBytes]
    held: Mapping[Edge, Sequence[int]]
    needed: Mapping[Edge, Sequence[int]]
    outputs: Mapping[Edge, int]
    calls: Mapping[str, Sequence[range]]


def peak_activations(schedule: Schedule, role: Role, of_rank: RankBytes) -> tuple[int, int, int]:
    """Peak bytes of activations on a rank of `role`, of workspace above it, and of activations on the host."""
    ledger = _Ledger(schedule, role, of_rank)
    for action in role.actions:
        ledger.execute(action)
    return ledger.peak, ledger.busiest - ledger.peak, ledger.host_peak


class _Ledger:
    """Live allocations, by name."""

    def __init__(self, schedule: Schedule, role: Role, of_rank: RankBytes):
        self.schedule, self.role, self.of_rank = schedule, role, of_rank
        self.calls = {(name, m): call for name, calls in of_rank.calls.items() for call in calls for m in call}
        self.live: dict[object, int] = {}
        self.total = self.peak = self.busiest = 0
        self.on_host = self.host_peak = 0
        self._handlers: dict[str, Callable[[Action], None]] = {
            "run": self._run, "irecv": self._irecv, "start": self._start, "finish": self._finish,
        }  # fmt: skip

    def execute(self, action: Action) -> None:
        """Account for one action."""
        if handler := self._handlers.get(action.op):
            handler(action)

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

    def _irecv(self, action: Action) -> None:
        assert action.stage is not None, "transfers and work have a stage"
        if stage := self.of_rank.stages.get((action.module, action.stage, 1)):
            self._make(("arriving", action.kind, action.module, action.stage, action.micro_batch), stage.message)

    def _run(self, action: Action) -> None:
        assert action.stage is not None, "transfers and work have a stage"
        call = self._call(action)
        stage = self.of_rank.stages.get((action.module, action.stage, len(call)))
        if stage is None or action.micro_batch != call[-1 if action.kind == "B" else 0]:
            return
        key = action.module, action.stage, call[0]
        if action.kind == "B":
            if len(call) > 1:
                self._work(sum(self.of_rank.held[edge][m] for edge in self._leaving(action) for m in call))
            self._make(("again", *key), stage.again)
            self._work(stage.backward)
            for what in ("again", "kept", "left"):
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
            return
        if self._is_first_text(action):
            self._end(("embedded", action.micro_batch))
        self._end(("arriving", action.kind, *key))
        module = self.schedule.module[action.module]
        keeps = module.backward and (action.kind == "R" or not module.recomputes)
        self._make(("kept", *key), stage.saved * keeps)
        self._make("passing", stage.passing * keeps)
        self._end("passing")
        self._move(stage.host * keeps)
        self._make(("left", *key), stage.left * (keeps or action.kind == "F"))
        for edge in self._leaving(action):
            rows = stage.rows * self.of_rank.outputs[edge]
            self._make(("encoded", edge, action.micro_batch), rows * (keeps or action.kind == "F"))
        self._work(stage.forward)
        for edge in self._entering(action):
            if not (module.backward and self.schedule.module[edge.source].backward):
                self._end(("rows", edge, action.micro_batch))
        if not keeps:
            self._end(("left", *key))

    def _call(self, work: Action) -> range:
        """The micro-batches of the call that `work` belongs to."""
        return self.calls.get((work.module, work.micro_batch), range(work.micro_batch, work.micro_batch + 1))

    def _is_first_text(self, action: Action) -> bool:
        return action.module == self.schedule.text.name and action.stage == 0

    def _leaving(self, work: Action) -> list[Edge]:
        """Edges along which rows of a stage leave this rank."""
        return [edge for edge in self.schedule.leaving.get(_stage(work), ()) if edge in self.of_rank.held]

    def _entering(self, work: Action) -> list[Edge]:
        """Edges along which rows enter a stage on this rank."""
        return [edge for edge in self.schedule.entering.get(_stage(work), ()) if edge in self.of_rank.needed]

    def _start(self, action: Action) -> None:
        edge, name = action.edge, (action.edge, action.micro_batch)
        arriving, kind = (self.of_rank.needed, "rows") if action.kind == "F" else (self.of_rank.held, "returned")
        if action.kind == "B":
            self._end(("rows", *name))
        if edge in arriving:
            self._make((kind, *name), arriving[edge][action.micro_batch])

    def _finish(self, action: Action) -> None:
        if action.kind == "B":
            self._end(("leaving", action.edge, action.micro_batch))
            return
        text = self.of_rank.stages.get((self.schedule.text.name, 0, 1))
        enters_first = self.schedule.stages_of(action.edge)[1] == 0
        if text is not None and enters_first and ("embedded", action.micro_batch) not in self.live:
            self._make(("embedded", action.micro_batch), text.message)
        self._let_go(self.schedule.module[action.module], action)

    def _let_go(self, module: Module, crossing: Action) -> None:
        """Free sent rows that no backward pass needs, those of a call at once."""
        call = self._call(crossing)
        if (not module.backward or module.recomputes) and crossing.micro_batch == call[-1]:
            self._end(("encoded", crossing.edge, call[0]))


def _stage(work: Action) -> StageId:
    assert work.stage is not None, "work has a stage"
    return work.module, work.stage
