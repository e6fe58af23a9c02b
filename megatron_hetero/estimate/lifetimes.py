"""Computes the activation memory of a pipeline stage, and its peak over the actions of a rank. Pure.

A stage runs its submodules (`measured`) forward in order and backward in reverse; saved tensors are freed as the
backward pass proceeds. Fully recomputed layers save their input, and other tensors only during their backward pass.
With offloaded activations (`models.layers.offload`) two neighbouring layers are on the device at a time; tensors too
small to copy, rotary tables and received inputs stay on the device.

What each action allocates and frees, as `step.execution` executes it:

    irecv      hidden states of a neighbouring stage, or their gradients
    finish F   the token embedding, on the first text stage; freed by the stage's forward
    start F    received rows, on the text stage that they enter; freed when their gradients are sent (`start B`), or by
               the forward if there are no gradients
    run F, R   saved activations (with several calls: only the input) on device and host, and sent hidden states and
               rows, all freed by the backward; tensors in transit to the host; workspace
    run B      one recomputed layer or call, or tensors fetched from the host, and workspace. On text stages that rows
               enter, gradients of rows, freed when they have been sent (`finish B`)
    start B    gradients of rows, on the encoder's side, freed by the encoder's backward

A call of an encoder over several micro-batches runs with the forward of the first micro-batch and the backward of the
last, which concatenates their gradients. Where a micro-batch takes several calls, the forwards save only their inputs,
and the backwards run call by call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise

from megatron_hetero.data.token_shards import SequenceShard
from megatron_hetero.estimate.allocations import FP32, SubmoduleBytes
from megatron_hetero.estimate.measured import FIRST, LAST, Measured, Submodule, is_merged, measure
from megatron_hetero.estimate.shards import Work
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.layers.offload import OffloadSizes, offloaded_layers
from megatron_hetero.schedule.actions import Action
from megatron_hetero.schedule.program import Role, Schedule


@dataclass(frozen=True)
class StageBytes:
    """Bytes of a stage for one micro-batch on one rank.

    `saved`, `host`: tensors saved from forward to backward on the device, and on the host. `passing`, `again`: the peak
    above `saved` in a forward and in a backward pass, of layers in transit to or from the host, or of a recomputed
    layer. `forward`: the peak above `saved` in a forward pass, workspace included; `backward`: the peak above `saved`
    and `again` in a backward pass. `left`: hidden states sent to the next stage. `rows`: rows of one encoder output.
    `message`: hidden states of a transfer. `several_calls`: whether the stage takes several calls for a micro-batch;
    then `saved` is its input, and `again` the peak of the tensors that one call saves.
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
    several_calls: bool = False


def combined(
    layers: Sequence[Sequence[SubmoduleBytes]],
    before: Sequence[SubmoduleBytes] = (),
    after: Sequence[SubmoduleBytes] = (),
    offload: OffloadSizes | None = None,
) -> StageBytes:
    """Return the memory of a stage from the memory of its submodules: of each layer, and `before` and `after` all
    layers. Only layers are offloaded.

    `offload`: the block sizes of copies to the host, if activations are offloaded.
    """
    starts = [*accumulate(map(len, layers), initial=len(before))]
    moved = offloaded_layers(len(layers)) if offload else 0
    submodules = [*before, *chain(*layers), *after]
    # Bytes of the first n submodules: all saved tensors, and the tensors that stay on the device with offloading.
    saved = [0, *accumulate(each.saved for each in submodules)]
    stays = [each.saved if number < len(before) else each.stays for number, each in enumerate(submodules)]
    stays = [0, *accumulate(stays)]
    on_device = stays[starts[moved]] + saved[-1] - saved[starts[moved]]
    # Number of submodules offloaded to the host while each submodule runs: all before the previous layer.
    away = [0] * len(before)
    for layer, layer_submodules in enumerate(layers):
        away += [starts[min(moved, max(0, layer - 1))]] * len(layer_submodules)
    away += [starts[moved]] * len(after)
    levels = [stays[gone] + saved[number + 1] - saved[gone] - on_device for number, gone in enumerate(away)]
    again = forward = backward = 0
    for level, each in zip(levels, submodules, strict=True):
        again = max(again, level + each.again)
        forward = max(forward, level + each.forward)
        backward = max(backward, level + each.again + each.backward)
    backward = max(backward, again) - again
    host = 0
    if offload:
        host = sum(offload.on_host(sum(each.saved - each.stays for each in layer)) for layer in layers[:moved])
    return StageBytes(on_device, max([0, *levels]), again, host, forward, backward)


@lru_cache(maxsize=4096)
def stage_bytes(measured: Measured, stage: PipelineStage, work: Work, *, offload: bool = False) -> StageBytes:
    """Return the memory of a stage on a rank with this work, without the rows that enter the stage. `offload`: whether
    activations are offloaded.
    """
    if len(work) != 1:
        return _several_calls(measured, stage, work, offload=offload)
    [shard] = work
    module, shape, itemsize = measured.module, measured.shape, measured.module.dtype.itemsize
    message, trains = itemsize * shard.local * shape.hidden, module.passes_gradients
    recomputed = stage.first + (module.recompute.whole_layers(len(stage.layers)) if trains else 0)
    layers = [_layer(measured, number, shard, recomputed=number < recomputed) for number in stage.layers]
    for layer, following in pairwise(layers):
        has_merger = len(layer) > 1
        if has_merger and trains:  # The merger and the next layer have the same input, which is saved once.
            following[0] = replace(following[0], saved=following[0].saved - message)
    before = [measure(measured, FIRST, shard)] if stage.is_first else []
    after = [measure(measured, LAST, shard)] if stage.is_last else []
    if not stage.is_last:  # The output and its gradient are counted as messages, not as workspace.
        last = layers[-1][-1]
        layers[-1][-1] = replace(last, forward=last.forward - message, backward=last.backward - message)
    if not stage.is_first and trains:
        layers[0][0] = replace(layers[0][0], stays=min(layers[0][0].saved, layers[0][0].stays + message))
    result = combined(layers, before, after, OffloadSizes.of(measured.gpu) if offload else None)
    saved = result.saved
    if trains:  # Add the rotary tables, which all layers share.
        saved += 2 * FP32 * shard.tokens * shape.rotary.width
    elif not stage.is_first:  # Add the received input, which the layers do not save.
        saved += message
    rows = 0 if measured.is_text else itemsize * shard.local // shape.unit * shape.out_hidden
    left = 0 if stage.is_last else message
    return replace(result, saved=saved, left=left, rows=rows, message=message)


def _several_calls(measured: Measured, stage: PipelineStage, work: Work, *, offload: bool) -> StageBytes:
    """Return the memory of a stage that takes several calls: its whole input, and the largest memory of one call."""
    calls = [stage_bytes(measured, stage, (shard,), offload=offload) for shard in work]
    if stage.is_first:
        size = measured.module.dtype.itemsize * measured.shape.patch_elements
        inputs = [size * shard.local for shard in work]
        # Trained embeddings save their inputs, frozen embeddings do not.
        shared = [n if measure(measured, FIRST, shard).saved >= n else 0 for n, shard in zip(inputs, work, strict=True)]
    else:
        inputs = shared = [call.message for call in calls]
    # Bytes that a call saves above the inputs of all calls, and its peak in each pass of the backward action.
    saved = [call.saved - n for call, n in zip(calls, shared, strict=True)]
    again = max(n + max(call.again, call.passing) for n, call in zip(saved, calls, strict=True))
    peak = max(n + max(call.forward, call.again + call.backward) for n, call in zip(saved, calls, strict=True))
    left, rows, message = (sum(getattr(call, field) for call in calls) for field in ("left", "rows", "message"))
    outputs = stage.is_last + sum(is_merged(measured, layer) for layer in stage.layers)
    return StageBytes(
        saved=sum(inputs),
        passing=0,
        again=again,
        host=max(call.host for call in calls),
        # Outputs of all calls exist twice while they are concatenated.
        forward=max(left + outputs * rows, *(call.forward for call in calls)),
        # Gradients of hidden states are sent when all calls have computed theirs.
        backward=max(0, peak - again) + (0 if stage.is_first else message),
        left=left,
        rows=rows,
        message=message,
        several_calls=True,
    )


def _layer(measured: Measured, number: int, shard: SequenceShard, *, recomputed: bool) -> list[SubmoduleBytes]:
    """Return the bytes of a layer, and of the merger of its output if there is a merger. `recomputed`: whether the
    layer is recomputed as a whole.
    """
    layer = measure(measured, Submodule("layer", number), shard)
    passed = layer.passed
    if recomputed:
        # The recomputed output lives until the backward pass has ended.
        work = max(layer.forward, layer.backward + passed)
        saved = passed + layer.memo
        layer = replace(layer, saved=saved, stays=layer.memo, again=layer.saved - saved, backward=work)
    if not is_merged(measured, number):
        return [layer]
    merger = measure(measured, Submodule("merger", number), shard)
    return [layer, replace(merger, forward=merger.forward + passed, backward=merger.backward + passed)]


@dataclass(frozen=True)
class RankBytes:
    """Bytes of the stages and rows of one rank.

    `stages`: the memory by module, stage and number of micro-batches in a call. `held`, `needed`: by edge and
    micro-batch, bytes of the rows that the rank encodes and that it receives. Idle stages and edges are missing.
    `outputs`: the number of encoder outputs that cross each edge. `calls`: by module, the micro-batches of each call.
    """

    stages: Mapping[tuple[str, int, int], StageBytes]
    held: Mapping[Edge, Sequence[int]]
    needed: Mapping[Edge, Sequence[int]]
    outputs: Mapping[Edge, int]
    calls: Mapping[str, Sequence[range]]


def peak_activations(schedule: Schedule, role: Role, sizes: RankBytes) -> tuple[int, int, int]:
    """Return the peak bytes on a rank of `role`: activations, workspace above them, and activations on the host."""
    ledger = _Ledger(schedule, sizes)
    for action in role.actions:
        ledger.execute(action)
    return ledger.peak, ledger.busiest - ledger.peak, ledger.host_peak


class _Ledger:
    """A record of live allocations by name, and of their peak."""

    def __init__(self, schedule: Schedule, sizes: RankBytes):
        self.schedule, self.sizes = schedule, sizes
        self.calls = {(name, m): call for name, calls in sizes.calls.items() for call in calls for m in call}
        self.live: dict[object, int] = {}
        self.total = self.peak = self.busiest = 0
        self.on_host = self.host_peak = 0

    def _allocate(self, name: object, size: int) -> None:
        self.live[name] = size
        self.total += size
        self.peak = max(self.peak, self.total)
        self.busiest = max(self.busiest, self.peak)

    def _free(self, name: object) -> None:
        self.total -= self.live.pop(name, 0)

    def _work(self, size: int) -> None:
        """Account for `size` bytes of workspace, which is freed at once."""
        self.busiest = max(self.busiest, self.total + size)

    def _move(self, size: int) -> None:
        """Account for `size` bytes copied to the host; a negative `size` is freed there."""
        self.on_host += size
        self.host_peak = max(self.host_peak, self.on_host)

    def execute(self, action: Action) -> None:
        """Account for the allocations and frees of one action."""
        m = action.micro_batch
        match action.op, action.kind:
            case "irecv", kind:
                if stage := self.sizes.stages.get((action.module, action.own_stage, 1)):
                    self._allocate(("arriving", kind, action.module, action.own_stage, m), stage.message)
            case "run", kind:
                call = self.calls[action.module, m]
                stage = self.sizes.stages.get((action.module, action.own_stage, len(call)))
                if stage is None:
                    return
                if kind == "B" and m == call[-1]:
                    self._backward(action, stage, call)
                elif kind != "B" and m == call[0]:
                    self._forward(action, stage, call)
            case "start", "F":
                if action.edge in self.sizes.needed:
                    self._allocate(("rows", action.edge, m), self.sizes.needed[action.edge][m])
            case "start", _:
                self._free(("rows", action.edge, m))
                if action.edge in self.sizes.held:
                    self._allocate(("returned", action.edge, m), self.sizes.held[action.edge][m])
            case "finish", "F":
                self._finish(action)
            case "finish", _:
                self._free(("leaving", action.edge, m))

    def _finish(self, action: Action) -> None:
        edge, m, module = action.edge, action.micro_batch, self.schedule.module[action.module]
        text = self.sizes.stages.get((self.schedule.text.name, 0, 1))
        source_stage, target_stage = self.schedule.stages_of(edge)
        if text is not None and target_stage == 0 and ("embedded", m) not in self.live:
            self._allocate(("embedded", m), text.message)
        call = self.calls[action.module, m]
        encoder = self.sizes.stages.get((action.module, source_stage, len(call)))
        runs_again = module.recomputes or (encoder is not None and encoder.several_calls)
        if (not module.backward or runs_again) and m == call[-1]:
            # Free the rows: no backward pass needs them, and rows of all micro-batches of a call are one tensor.
            self._free(("encoded", edge, call[0]))

    def _forward(self, action: Action, stage: StageBytes, call: range) -> None:
        """Account for a forward pass. In a module that recomputes, F saves nothing and R sends nothing."""
        key, module = (action.module, action.own_stage, call[0]), self.schedule.module[action.module]
        saves = module.backward and (action.kind == "R" or not module.recomputes)
        has_outputs = saves or action.kind == "F"
        if action.module == self.schedule.text.name and action.stage == 0:
            self._free(("embedded", action.micro_batch))
        self._free(("arriving", action.kind, *key))
        if saves:
            self._allocate(("saved", *key), stage.saved)
            self._allocate("passing", stage.passing)
            self._free("passing")
            if not stage.several_calls:
                self._move(stage.host)
        if has_outputs:
            self._allocate(("left", *key), stage.left)
            if not (stage.several_calls and action.kind == "R"):
                for edge in self._leaving(action):
                    self._allocate(("encoded", edge, action.micro_batch), stage.rows * self.sizes.outputs[edge])
        self._work(stage.forward)
        for edge in self._entering(action):
            if not (module.backward and self.schedule.module[edge.source].backward):
                self._free(("rows", edge, action.micro_batch))
        if not saves or stage.several_calls:
            self._free(("left", *key))

    def _backward(self, action: Action, stage: StageBytes, call: range) -> None:
        key = action.module, action.own_stage, call[0]
        if len(call) > 1:
            self._work(sum(self.sizes.held[edge][m] for edge in self._leaving(action) for m in call))
        self._allocate(("again", *key), stage.again)
        if stage.several_calls:
            self._move(stage.host)
        self._work(stage.backward)
        for what in ("again", "saved", "left"):
            self._free((what, *key))
        self._move(-stage.host)
        self._free(("arriving", "B", *key))
        for edge in self._leaving(action):
            self._free(("encoded", edge, call[0]))
            for m in call:
                self._free(("returned", edge, m))
        for edge in self._entering(action):
            if self.schedule.module[edge.source].backward:
                needed = self.sizes.needed[edge][action.micro_batch]
                self._allocate(("leaving", edge, action.micro_batch), needed)

    def _leaving(self, work: Action) -> list[Edge]:
        """Return the edges along which this rank sends rows of the stage that runs `work`."""
        edges = self.schedule.leaving.get((work.module, work.own_stage), ())
        return [edge for edge in edges if edge in self.sizes.held]

    def _entering(self, work: Action) -> list[Edge]:
        """Return the edges along which this rank receives rows of the stage that runs `work`."""
        edges = self.schedule.entering.get((work.module, work.own_stage), ())
        return [edge for edge in edges if edge in self.sizes.needed]
