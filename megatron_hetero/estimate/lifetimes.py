"""What a pipeline stage takes of the device and of the host: the parts that it runs, together. Pure.

Parts run in order, and go backward in the opposite order, each when what later ones kept is gone. Layers that are
recomputed as a whole keep their input, and all else for the time of their own backward pass. Where activations are
offloaded (`models.common.offload`), a layer is on the device with the one before it: in the forward pass until that is
copied, in the backward pass since it is fetched. On the device stay what is smaller than is worth a copy, the tables of
rotary embeddings, and what a stage received, which the interpreter holds.

What is alive on a rank at once: its actions in order, with what each of them allocates and frees. Pure.

The interpreter's rules (`execution.step`), in bytes:

    irecv      room for hidden states, or their gradients, of a neighbouring stage
    finish F   the tokens' embedding, on the first text stage; it ends in the forward
    start F    room for rows, on the text stage that they enter, which live until their gradients leave (`start B`), or
               until the forward where none do
    run F, R   what the stage keeps until its backward, where there is one, on the device and on the host; before all of
               that is there, what is on its way to the host; what it sends, and rows, live as long as what it keeps; at
               its end, workspace
    run B      ends that; for its time, what one recomputed layer makes, or comes back, and workspace. On text stages
               that rows enter, gradients of rows, until they have left (`finish B`)
    start B    room for gradients of rows, on the encoder's side, which its backward ends

Where a call of an encoder computes several micro-batches, its forward is that of the first and its backward that of the
last, which puts their gradients together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise

from megatron_hetero.estimate.measured import FIRST, FP32, LAST, MeasuredModule, Part, PartBytes, is_merged, measure
from megatron_hetero.estimate.shards import SequenceShard
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.stages import PipelineStage
from megatron_hetero.models.layers.offload import OffloadSizes, offloaded_layers
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Module, Role, Schedule, StageId


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
def stage_bytes(
    module: MeasuredModule, stage: PipelineStage, shard: SequenceShard, *, offload: bool = False
) -> StageBytes:
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


@dataclass(frozen=True)
class RankBytes:
    """What one rank makes of micro-batches: `stages`, by module, stage and the number of micro-batches in a call; by
    edge, for each micro-batch, the bytes of the rows that it holds once it has encoded (`held`), and that it needs
    (`needed`). What is missing has nothing to do. `outputs`: how many cross along each edge. `calls`: by encoder, the
    micro-batches in runs that are one call each.
    """

    stages: Mapping[tuple[str, int, int], StageBytes]
    held: Mapping[Edge, Sequence[int]]
    needed: Mapping[Edge, Sequence[int]]
    outputs: Mapping[Edge, int]
    calls: Mapping[str, Sequence[range]]


def peak_activations(schedule: Schedule, role: Role, of_rank: RankBytes) -> tuple[int, int, int]:
    """The most bytes of activations that live at once on a rank of `role` in a step; how much more there are at most
    with the workspace of the actions; and the most on the host.
    """
    ledger = _Ledger(schedule, role, of_rank)
    for action in role.actions:
        ledger.execute(action)
    return ledger.peak, ledger.busiest - ledger.peak, ledger.host_peak


class _Ledger:
    """What lives, by name."""

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
        """Something of `size` is allocated and freed at once."""
        self.busiest = max(self.busiest, self.total + size)

    def _end(self, name: object) -> None:
        self.total -= self.live.pop(name, 0)

    def _move(self, size: int) -> None:
        """So many bytes come to the host, or leave it."""
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
        """The micro-batches that are computed together with that of `work`."""
        return self.calls.get((work.module, work.micro_batch), range(work.micro_batch, work.micro_batch + 1))

    def _is_first_text(self, action: Action) -> bool:
        return action.module == self.schedule.text.name and action.stage == 0

    def _leaving(self, work: Action) -> list[Edge]:
        """The edges along which rows of a stage leave this rank."""
        return [edge for edge in self.schedule.leaving.get(_stage(work), ()) if edge in self.of_rank.held]

    def _entering(self, work: Action) -> list[Edge]:
        """The edges along which rows enter a stage on this rank."""
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
        """Rows that have left end where no backward pass needs them, those of a call all at once."""
        call = self._call(crossing)
        if (not module.backward or module.recomputes) and crossing.micro_batch == call[-1]:
            self._end(("encoded", crossing.edge, call[0]))


def _stage(work: Action) -> StageId:
    assert work.stage is not None, "work has a stage"
    return work.module, work.stage
