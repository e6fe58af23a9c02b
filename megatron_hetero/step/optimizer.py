"""An optimizer whose states are sharded over the ranks of a module, as flat tensors.

Each rank of the module's data- and context-parallel group updates an equal share of the buffers, and only this rank
stores the share's masters and moments (ZeRO stage 1, Rajbhandari et al. 2020, arXiv 1910.02054). SGD is replicated.

On a GPU with a compiler, an update is one pass over all numbers (`fused`). Otherwise, and with 8-bit moments, PyTorch's
kernel computes the update, and numbers in less than fp32 or in host memory are unpacked in batches, so that a module is
never entirely in fp32. Operations that do not depend on a parameter's settings process a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from typing_extensions import override

from megatron_hetero.groups.platform import compiled, on_device
from megatron_hetero.step.algorithms import Algorithm
from megatron_hetero.step.fused import (
    Batch,
    CallRates,
    SegmentRates,
    batches_of,
    ends_on,
    is_fused,
    numbers_of,
    tensors_of,
    update_,
)
from megatron_hetero.step.gradients import scale_gradients, squares_of
from megatron_hetero.step.module import ModuleOptimizer, TrainedModule
from megatron_hetero.step.number_formats import (
    PIECE,
    FlatTensors,
    Master,
    Noise,
    Stored,
    batch_elements,
    unpacked,
    write_all,
)
from megatron_hetero.step.optimizer_state import OptimizerShard, OptimizerState, build_states


@dataclass(frozen=True, eq=False)
class ShardOptimizer(ModuleOptimizer):
    """An optimizer that updates this rank's share of a module's weights.

    Attributes:
        module: the module.
        algorithm: AdamW or SGD, with its settings.
        states: states of the parameters that this rank updates, at least in part, one state for each dtype of weights.
        param_groups: parameter groups as in PyTorch's optimizers, with the `names` of the parameters.
        streams: device streams for states in host memory: copies of a batch overlap with the update of another.
    """

    module: TrainedModule
    algorithm: Algorithm
    states: tuple[OptimizerState, ...]
    param_groups: list[dict[str, Any]]
    streams: Sequence[torch.cuda.Stream] = ()

    @cached_property
    def shards(self) -> Mapping[str, OptimizerShard]:
        """The shards of all states, by the names of parameters."""
        return {name: shard for state in self.states for name, shard in state.shards.items()}

    @override
    def squares(self) -> Tensor:
        return squares_of(self.module)

    @torch.no_grad()
    @override
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        """Update this rank's weights, and begin to gather all updated weights. Collective over the ranks with the same
        weights. Gradients are undefined afterwards.
        """
        if isinstance(scale, Tensor):
            scale_gradients([self.module], scale)
            scale = 1.0
        self.update_unless_nan(scale, step)

    @property
    def is_fused(self) -> bool:
        """Whether an update is one pass over all numbers."""
        return self.module.topology.platform.compiles and all(map(is_fused, self.states))

    @torch.no_grad()
    def update_unless_nan(self, scale: float | Tensor, step: int | None = None) -> None:
        """Like `update`, but leave weights, masters and moments unchanged if `scale` is NaN. The update is counted all
        the same. The host waits for `scale` unless the optimizer `is_fused`.
        """
        if step is None:
            step = 1 + max((int(state.updates.max()) for state in self.states), default=0)
        self.module.weights.wait()
        if self.is_fused:
            self._update_fused(step, scale)
        elif not math.isnan(factor := float(scale)):
            if factor != 1.0:
                scale_gradients([self.module], factor)
            for place, (state, batch) in enumerate(self._batches):
                with self._on(place):
                    self._update(state, batch, step)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        for state in self.states:
            state.updates.add_(1)
        self.module.weights.publish()

    @override
    def masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, shard in self.shards.items():
            if shard.master.beside is not None and shard.master.beside.dtype == torch.float32:
                yield self.module.weight(name), shard.master.beside

    @override
    def reload_model_params(self) -> None:
        self.module.weights.wait()
        for name, shard in self.shards.items():
            weights = self.module.weight(name)
            write_all(shard.master, weights, weights.device)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of each parameter in fp32, and the settings of the parameter groups."""
        shards = {
            name: {kind: unpacked(stored, 0, shard.stop - shard.start) for kind, stored in shard.stored.items()}
            | {"updates": shard.updates.clone()}
            for name, shard in self.shards.items()
        }
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"shards": shards, "param_groups": settings}

    @torch.no_grad()
    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load states, and compute weights from loaded masters. Collective over the ranks with the same weights."""
        for name, shard in self.shards.items():
            for kind, stored in shard.stored.items():
                write_all(stored, state["shards"][name][kind], self.module.topology.platform.device)
            shard.updates.copy_(state["shards"][name]["updates"])
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        self.renew_weights()

    @torch.no_grad()
    def renew_weights(self) -> None:
        """Compute the weights from the masters, and begin to gather them. Collective."""
        self.module.weights.wait()
        for state, batch in self._batches:
            if not state.master.are_weights:
                state.master.write(batch.start, state.master.read(batch.start, batch.stop))
        self.module.weights.publish()

    def _update_fused(self, step: int, scale: float | Tensor) -> None:
        device = self.module.topology.platform.device
        factor = scale.float() if isinstance(scale, Tensor) else torch.full((), scale, device=device)
        rates = dict[str, SegmentRates]()
        for state in self.states:
            for name, count in zip(state.shards, (state.updates + 1).tolist(), strict=True):
                rates[name] = self._segment(self._group_by_name[name], count)
        calls, ends = list[CallRates](), list[Tensor | None]()
        for state, batch in self._fused_batches:
            segments, segment_ends = batch.segments(rates)
            group = self._group_by_name[batch.names[0]]
            noise = self._noise(state, batch.names[0], batch.start, step)
            first, second = (1 - beta for beta in group["betas"])
            calls.append(CallRates(first, second, group["eps"], noise, segments))
            ends.append(ends_on(device, segment_ends))
        numbers = numbers_of(calls, device) if calls else ()
        for place, (state, batch) in enumerate(self._fused_batches):
            with self._on(place), tensors_of(state, batch) as tensors:
                compiled(update_)(*tensors, numbers[place], ends[place], factor)

    def _segment(self, group: Mapping[str, Any], count: float) -> SegmentRates:
        """Return the rates of a parameter in `group` at its update number `count`, counted from 1."""
        rate = group["lr"]
        if not self.algorithm.kind.moments:
            return SegmentRates(rate)
        first, second = (1 - beta**count for beta in group["betas"])
        return SegmentRates(rate / first, second**-0.5, 1 - rate * group["weight_decay"])

    @cached_property
    def _group_by_name(self) -> dict[str, dict[str, Any]]:
        return {name: group for group in self.param_groups for name in group["names"]}

    @cached_property
    def _fused_batches(self) -> tuple[tuple[OptimizerState, Batch], ...]:
        tied, limit, streamed = self.module.tied, self._batch_elements, self.algorithm.offload
        return tuple(
            (state, batch) for state in self.states for batch in batches_of(state, tied, limit, streamed=streamed)
        )

    def _update(self, state: OptimizerState, batch: Batch, step: int) -> None:
        _, gradients = _fp32(state.gradients, batch)
        stored = [state.master, *(state.moments[name] for name in self.algorithm.kind.moments)]
        wholes, (masters, *moments) = zip(*(_fp32(each, batch) for each in stored), strict=True)
        # The stack copies the counts: the kernel increments a count for each piece of a parameter.
        counts: Sequence[Tensor] = ()
        if moments:
            stacked = torch.stack([self.shards[name].updates for name in batch.names])
            counts = on_device(stacked, self.module.topology.platform.device).unbind()
        for group in self.param_groups:
            places = [place for place, name in enumerate(batch.names) if self._group_by_name[name] is group]
            if not places:
                continue

            def chosen(pieces: Sequence[Tensor], places: list[int] = places) -> list[Tensor]:
                return [pieces[place] for place in places]

            if not moments:
                torch._foreach_add_(chosen(masters), chosen(gradients), alpha=-group["lr"])
                continue
            first, second = map(chosen, moments)
            adamw(
                chosen(masters),
                chosen(gradients),
                first,
                second,
                [],
                chosen(counts),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        noise = None if self._is_plain(state) else self._noise(state, batch.names[0], batch.start, step)
        for draw, numbers, whole in zip((2, 0, 1), stored, wholes, strict=False):  # Use the fused update's draws.
            if whole is not None:
                numbers.write(batch.start, whole, noise and replace(noise, number=draw))

    @cached_property
    def _batches(self) -> tuple[tuple[OptimizerState, Batch], ...]:
        """The state and the batch of each call of PyTorch's kernel."""
        batches = list[tuple[OptimizerState, Batch]]()
        for state in self.states:
            limit = math.inf if self._is_plain(state) else self._batch_elements
            batches += [(state, batch) for batch in _batches(state.shards, limit, self.module.tied)]
        return tuple(batches)

    @property
    def _batch_elements(self) -> int:
        """The number of elements that are unpacked or copied at a time."""
        return batch_elements(sum(shard.stop - shard.start for shard in self.shards.values()))

    def _is_plain(self, state: OptimizerState) -> bool:
        """Return whether all numbers of a state are fp32 on the device, so that updates need no conversions."""
        dtypes = {state.gradients.dtype, state.master.dtype}
        dtypes |= {None if moment.values is None else moment.values.dtype for moment in state.moments.values()}
        return dtypes == {torch.float32} and not self.algorithm.offload

    def _noise(self, state: OptimizerState, first: str, start: int, step: int) -> Noise:
        """Return the random bits for a state's elements from `start` on. `first`: the parameter of the first element.

        The bits are the same on all ranks that store the elements, after a resume, and in batches of any size. The key
        includes the name of a stored tensor, since parameter names depend on the implementation of the model.
        """
        name, shard = next(iter(state.shards.items()))
        name = self.module.local_map[name][0].name
        if first == self.module.tied:
            # The copies of a tied parameter have different names and offsets on different stages.
            name, shard = "tied", state.shards[first]
            start += shard.start - shard.at
        return Noise.of(f"{self.algorithm.seed}/{self.module.name}/{name}/{shard.start}/{step}", start)

    def _on(self, place: int) -> AbstractContextManager[object]:
        """Return a context in which the stream for the batch number `place` is current."""
        if not self.streams:
            return nullcontext()
        stream = self.streams[place % len(self.streams)]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


def _fp32(numbers: Stored | FlatTensors, batch: Batch) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Return the fp32 numbers of a batch as one tensor, and split by parameter. For `FlatTensors` that are in fp32, the
    first result is None, and the others are views to update in place if each is in one tensor.
    """
    flat = numbers.weights if isinstance(numbers, Master) and numbers.are_weights else numbers
    if isinstance(flat, FlatTensors) and flat.dtype == torch.float32:
        return None, [flat.read(*span) for span in pairwise(accumulate(batch.lengths, initial=batch.start))]
    whole = flat.read(batch.start, batch.stop).float()
    return whole, whole.split(batch.lengths)


def _batches(shards: Mapping[str, OptimizerShard], limit: float, tied: str | None) -> Iterator[Batch]:
    """Cut all elements into pieces, and yield batches of pieces with at most `limit` elements. Pieces are the same in
    all formats, so that vectorized kernels give the same results. The `tied` parameter has separate batches, since it
    must be rounded in the same way on another stage, which has other parameters.
    """
    names, lengths, start, end = list[str](), list[int](), 0, 0
    for name, shard in shards.items():
        for first in range(shard.start, shard.stop, PIECE):
            size = min(PIECE, shard.stop - first)
            apart = bool(names) and (name == tied) != (names[-1] == tied)
            if names and (apart or end + size - start > limit):
                yield Batch(start, end, tuple(names), tuple(lengths))
                names, lengths, start = [], [], end
            names.append(name)
            lengths.append(size)
            end += size
    if names:
        yield Batch(start, end, tuple(names), tuple(lengths))


def build_shard_optimizer(
    module: TrainedModule, algorithm: Algorithm, streams: Sequence[torch.cuda.Stream] = ()
) -> ShardOptimizer:
    """Build the optimizer of a module with trained parameters. `streams`: device streams for states in host memory."""
    states = build_states(module, algorithm)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name in (name for state in states for name in state.shards):
        lr = algorithm.lr(name) if callable(algorithm.lr) else algorithm.lr
        decay = algorithm.weight_decay if module.parameters[name].dim() > 1 else 0.0
        settings = {"lr": lr, "weight_decay": decay, "betas": algorithm.betas, "eps": algorithm.eps}
        group = groups.setdefault((lr, decay), {"params": [], "names": [], **settings})
        group["params"].append(module.parameters[name])
        group["names"].append(name)
    return ShardOptimizer(module, algorithm, states, list(groups.values()), streams if algorithm.offload else ())
