"""The optimizer of a module that keeps a share of the states on each rank, as flat tensors.

AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): each rank of the module's data- and context-parallel group updates
an equal share of the buffers, of which it alone keeps master weights and moments (ZeRO stage 1, Rajbhandari et al.
2020, arXiv 1910.02054). Biases and all other one-dimensional parameters (norms) are exempt from weight decay. SGD is
plain: w -= lr * g, replicated.

On a GPU that compiles, an update is one pass over what is kept (`fused_update`). Elsewhere, and with moments of 8
bits, it is PyTorch's kernel, and numbers kept in less than fp32, or in host memory, are unpacked some at a time: a
module is never in fp32 as a whole. What is not a matter of single parameters is done to all numbers of a batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.optimizers import OPTIMIZERS, OptimizerKind
from megatron_hetero.groups.platform import Platform, compiled, on_device
from megatron_hetero.step.fused import (
    Batch,
    Brought,
    CallRates,
    SegmentRates,
    batches_of,
    ends_on,
    is_fused,
    numbers_of,
    update_,
)
from megatron_hetero.step.gradients import scale_gradients, squares_of
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.number_formats import PIECE, Fp32Weights, Noise, Stored, batch_elements, unpacked, write_all
from megatron_hetero.step.optimizer_state import Numbers, OptimizerShard, OptimizerState, build_states


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW whose states each rank keeps a share of, for a module whose gradients are in flat buffers.

    Attributes:
        lr: learning rate, or a function that gives it for the name of a parameter.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: of parameters of two or more dims.
        master: of bfloat16 weights: fp32 copies; "split", the same in a 16-bit remainder; "none", stochastic rounding.
        moments: their numbers, "8bit" with a scale per 256 elements.
        gradients: dtype in which they are accumulated over micro-batches and summed over ranks.
        zero: ZeRO stage: 1, or with `units()` of the model (docs/library.md) 2 or 3.
        offload: whether masters and moments are in host memory.
        seed: of stochastic rounding.

    Raises:
        UserError: a setting has a value that it cannot have.
    """

    lr: float | Callable[[str], float] = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    master: Literal["float32", "split", "none"] = "float32"
    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    gradients: Literal["float32", "bfloat16"] = "float32"
    zero: Literal[1, 2, 3] = 1
    offload: bool = False
    seed: int = 0

    kind: ClassVar[OptimizerKind] = OPTIMIZERS["adamw"]

    def __post_init__(self) -> None:
        _require_possible(self)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Plain SGD, w -= lr * g, replicated. Attributes as those of `AdamW`."""

    lr: float | Callable[[str], float] = 1e-3
    master: Literal["float32", "split", "none"] = "float32"
    gradients: Literal["float32", "bfloat16"] = "float32"
    zero: Literal[1, 2, 3] = 1
    offload: bool = False
    seed: int = 0

    kind: ClassVar[OptimizerKind] = OPTIMIZERS["sgd"]
    betas: ClassVar[tuple[float, float]] = (0.0, 0.0)
    eps: ClassVar[float] = 0.0
    weight_decay: ClassVar[float] = 0.0
    moments: ClassVar[Literal["float32"]] = "float32"

    def __post_init__(self) -> None:
        _require_possible(self)


def _require_possible(settings: AdamW | SGD) -> None:
    """Check the values of settings. Raises `UserError`."""
    kinds, lr = get_type_hints(type(settings)), 0.0 if callable(settings.lr) else settings.lr
    expected = {name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal}
    problems = {
        name: f"one of {', '.join(map(repr, known))}"
        for name, known in expected.items()
        if getattr(settings, name) not in known
    }
    for name, value in {"lr": lr, "eps": settings.eps, "weight_decay": settings.weight_decay}.items():
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            problems[name] = "a finite number of 0 or more"
    if not (len(settings.betas) == 2 and all(0 <= beta < 1 for beta in settings.betas)):
        problems["betas"] = "two numbers in [0, 1)"
    for name, possible in problems.items():
        where, found = f"{type(settings).__name__}: {name}", repr(getattr(settings, name))
        raise UserError.at(where, found=found, expected=possible, fix="correct it")


Algorithm = AdamW | SGD


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of an `OptimizerState`, all of parameter `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ShardOptimizer:
    """Updates what this rank updates of one module's weights.

    Attributes:
        module: what it updates.
        algorithm: with its settings.
        states: of the parameters of which this rank updates any elements; none where there are none.
        param_groups: of these, as those of PyTorch's optimizers; with the `names` of the parameters.
        platform: where this rank computes.
        streams: of the device, where states in host memory are streamed: one batch is copied while the next is
            computed.
    """

    module: TrainedModule
    algorithm: Algorithm
    states: tuple[OptimizerState, ...]
    param_groups: list[dict[str, Any]]
    platform: Platform
    streams: Sequence[torch.cuda.Stream] = ()

    @cached_property
    def shards(self) -> Mapping[str, OptimizerShard]:
        """Of the states, by the names of parameters."""
        return {name: shard for state in self.states for name, shard in state.shards.items()}

    def squares(self) -> Tensor:
        """What this rank adds to the square of the norm of the module's gradients, fp64 []."""
        return squares_of(self.module)

    @torch.no_grad()
    def update(self, scale: float | Tensor, step: int | None = None) -> None:
        """Update with the gradients times `scale`; then every rank has all weights. Collective over the ranks that have
        the same weights. Gradients are undefined afterwards. `step`: a number that no other update has; None for how
        many there were.
        """
        if step is None:
            step = 1 + max((int(state.updates.max()) for state in self.states), default=0)
        self.module.data_parallel.wait_for_weights()
        fused = self.platform.compiles and all(map(is_fused, self.states))
        if isinstance(scale, Tensor) or (scale != 1.0 and not fused):
            scale_gradients([self.module], scale)
            scale = 1.0
        if fused:
            self._update_fused(step, scale)
        else:
            for place, (state, pieces) in enumerate(self._batches):
                with self._on(place):
                    self._update(state, pieces, step)
        for stream in self._used_streams:
            torch.cuda.current_stream().wait_stream(stream)
        for state in self.states:
            state.updates.add_(1)
        self.share_weights()

    def share_weights(self) -> None:
        """Give all ranks that hold the same weights those that each has updated."""
        self.module.data_parallel.share_weights()

    def reload_model_params(self) -> None:
        """Take the masters from the weights, where these were loaded."""
        self.module.data_parallel.wait_for_weights()
        for name, shard in self.shards.items():
            weights = self.module.weight(name)
            write_all(shard.master, weights, weights.device)

    def zero(self) -> None:
        """Forget gradients: the module zeroes them."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps, by parameter: copies in fp32."""
        shards = {
            name: {kind: unpacked(stored, 0, shard.stop - shard.start) for kind, stored in shard.stored.items()}
            | {"updates": shard.updates.clone()}
            for name, shard in self.shards.items()
        }
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"shards": shards, "param_groups": settings}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave on this rank, and the weights from it. Collective as `update`."""
        for name, shard in self.shards.items():
            for kind, stored in shard.stored.items():
                write_all(stored, state["shards"][name][kind], self.platform.device)
            shard.updates.copy_(state["shards"][name]["updates"])
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update(saved)
        self.renew_weights()

    @torch.no_grad()
    def renew_weights(self) -> None:
        """Make the weights those of the masters, where these were loaded."""
        self.module.data_parallel.wait_for_weights()
        for state, pieces in self._batches:
            if not isinstance(state.master, Fp32Weights):
                start, stop = pieces[0].start, pieces[-1].stop
                state.master.write(start, state.master.read(start, stop))
        self.share_weights()

    def _update_fused(self, step: int, scale: float) -> None:
        device, calls, ends = self.platform.device, list[CallRates](), list[Tensor | None]()
        own = {
            name: self._segment(self._group_of[name], count)
            for state in self.states
            for name, count in zip(state.shards, (state.updates + 1).tolist(), strict=True)
        }
        for state, batch in self._fused_batches:
            (rates, of_rates), group = batch.segments(own), self._group_of[batch.names[0]]
            noise = self._noise(state, batch.names[0], batch.start, step)
            first, second = (1 - beta for beta in group["betas"])
            calls.append(CallRates(scale, first, second, group["eps"], noise, rates))
            ends.append(ends_on(device, of_rates))
        numbers = numbers_of(calls, device) if calls else ()
        for place, (state, batch) in enumerate(self._fused_batches):
            with self._on(place):
                brought = Brought.of(state, batch)
                compiled(update_)(*brought.arguments(), numbers[place], ends[place])
                brought.put_back()

    def _segment(self, group: Mapping[str, Any], count: float) -> SegmentRates:
        """Those of a parameter of `group` at its update number `count`."""
        rate = group["lr"]
        if not self.algorithm.kind.moments:
            return SegmentRates(rate)
        first, second = (1 - beta**count for beta in group["betas"])
        return SegmentRates(rate / first, second**-0.5, 1 - rate * group["weight_decay"])

    @cached_property
    def _group_of(self) -> dict[str, dict[str, Any]]:
        return {name: group for group in self.param_groups for name in group["names"]}

    @cached_property
    def _fused_batches(self) -> tuple[tuple[OptimizerState, Batch], ...]:
        tied, most, streamed = self.module.tied, self._share, self.algorithm.offload
        return tuple((each, batch) for each in self.states for batch in batches_of(each, tied, most, streamed=streamed))

    def _update(self, state: OptimizerState, pieces: Sequence[_Piece], step: int) -> None:
        master, gradients = _Unpacked.of(state.master, pieces), _gradients(state, pieces)
        moments = [_Unpacked.of(state.moments[name], pieces) for name in self.algorithm.kind.moments]
        # Copies: a parameter in several pieces is counted once.
        counts: Sequence[Tensor] = ()
        if moments:
            stacked = torch.stack([self.shards[p.name].updates for p in pieces])
            counts = on_device(stacked, self.platform.device).unbind()
        for group in self.param_groups:
            places = [place for place, piece in enumerate(pieces) if self._group_of[piece.name] is group]
            if not places:
                continue

            def chosen(of_pieces: Sequence[Tensor], places: list[int] = places) -> list[Tensor]:
                return [of_pieces[place] for place in places]

            if not moments:
                torch._foreach_add_(chosen(master.pieces), chosen(gradients), alpha=-group["lr"])
                continue
            first, second = (chosen(moment.pieces) for moment in moments)
            adamw(
                chosen(master.pieces),
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
        noise = None
        if not self._is_plain(state):
            noise = self._noise(state, pieces[0].name, pieces[0].start, step)
        for number, moment in enumerate(moments):
            moment.pack(noise and noise.draw(number))
        master.pack(noise and noise.draw(2))

    @cached_property
    def _batches(self) -> tuple[tuple[OptimizerState, tuple[_Piece, ...]], ...]:
        """The pieces that are updated together."""
        most = [math.inf if self._is_plain(state) else self._share for state in self.states]
        return tuple(
            (state, pieces)
            for state, size in zip(self.states, most, strict=True)
            for pieces in _together(state.shards, size, self.module.tied)
        )

    @property
    def _share(self) -> int:
        """Elements that are unpacked, or brought together, at a time."""
        size = sum(shard.stop - shard.start for shard in self.shards.values())
        return batch_elements(size)

    def _is_plain(self, state: OptimizerState) -> bool:
        """Whether all numbers are kept as, and where, they are computed with."""
        return state.is_plain and not self.algorithm.offload

    def _noise(self, state: OptimizerState, first: str, start: int, step: int) -> Noise:
        """What elements of a state from `start` on, the first of them of parameter `first`, are rounded with: the
        same on all ranks that hold them, after a resume, and however many are updated at a time. By the name of a
        stored tensor: parameters are named as torch modules happen to be.
        """
        name, shard = next(iter(state.shards.items()))
        name = self.module.own_map[name][0].name
        if first == self.module.tied:
            # Its copies have other names, and other places, on other stages.
            name, shard = "tied", state.shards[first]
            start += shard.start - shard.at
        return Noise.of(f"{self.algorithm.seed}/{self.module.name}/{name}/{shard.start}/{step}").at(start)

    @property
    def _used_streams(self) -> Sequence[torch.cuda.Stream]:
        return self.streams if self.algorithm.offload else ()

    def _on(self, place: int) -> AbstractContextManager[object]:
        """Inside, a batch is updated in the stream of its place."""
        if not (streams := self._used_streams):
            return nullcontext()
        stream = streams[place % len(streams)]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


@dataclass(frozen=True, eq=False)
class _Unpacked:
    """Numbers in fp32, from `start` on in an `OptimizerState`: `whole`, and its `pieces`. Weights that are kept in
    fp32 are updated where they lie: they have no `whole`.
    """

    stored: Stored
    start: int
    whole: Tensor | None
    pieces: Sequence[Tensor]

    @classmethod
    def of(cls, stored: Stored, pieces: Sequence[_Piece]) -> _Unpacked:
        """Of all `pieces`, which follow each other."""
        start, stop = pieces[0].start, pieces[-1].stop
        if isinstance(stored, Fp32Weights):
            return cls(stored, start, None, [stored.read(piece.start, piece.stop) for piece in pieces])
        whole = stored.read(start, stop)
        return cls(stored, start, whole, whole.split(_sizes(pieces)))

    def pack(self, noise: Noise | None) -> None:
        """Keep the numbers, rounded with `noise`."""
        if self.whole is not None:
            self.stored.write(self.start, self.whole, noise)


def _gradients(state: OptimizerState, pieces: Sequence[_Piece]) -> Sequence[Tensor]:
    """Fp32; views where they are that."""
    if state.gradients.dtype == torch.float32:
        return [state.gradients.read(piece.start, piece.stop) for piece in pieces]
    return state.gradients.read(pieces[0].start, pieces[-1].stop).float().split(_sizes(pieces))


def _sizes(pieces: Sequence[_Piece]) -> list[int]:
    return [piece.stop - piece.start for piece in pieces]


def _together(shards: Mapping[str, OptimizerShard], most: float, tied: str | None) -> Iterator[tuple[_Piece, ...]]:
    """All elements in pieces, as many together as have at most `most` elements. They are cut alike whatever the numbers
    are kept in, so that the vectors of a kernel end at the same elements. What is `tied` is by itself: on other stages
    it has other neighbours, and is rounded alike.
    """
    batch, size = list[_Piece](), 0
    for name, shard in shards.items():
        stop = shard.at + shard.stop - shard.start
        for start in range(shard.at, stop, PIECE):
            piece = _Piece(name, start, min(start + PIECE, stop))
            apart = bool(batch) and (name == tied) != (batch[-1].name == tied)
            if batch and (apart or size + piece.stop - piece.start > most):
                yield tuple(batch)
                batch, size = [], 0
            batch.append(piece)
            size += piece.stop - piece.start
    if batch:
        yield tuple(batch)


def build_shard_optimizer(
    module: TrainedModule, algorithm: Algorithm, streams: Sequence[torch.cuda.Stream] = ()
) -> ShardOptimizer:
    """The optimizer of a module of which something trains. `streams`: for states in host memory."""
    platform = module.topology.platform
    numbers = Numbers(algorithm.kind.moments, algorithm.master, algorithm.moments, algorithm.offload)
    states = build_states(module, numbers, platform)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name in (each for state in states for each in state.shards):
        lr = algorithm.lr(name) if callable(algorithm.lr) else algorithm.lr
        decay = algorithm.weight_decay if module.parameters[name].dim() > 1 else 0.0
        settings = {"lr": lr, "weight_decay": decay, "betas": algorithm.betas, "eps": algorithm.eps}
        group = groups.setdefault((lr, decay), {"params": [], "names": [], **settings})
        group["params"].append(module.parameters[name])
        group["names"].append(name)
    return ShardOptimizer(module, algorithm, states, list(groups.values()), platform, streams)


def learning_rate(
    step: int,
    *,
    peak: float,
    minimum: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup: int,
    total: int,
) -> float:
    """The learning rate of a step.

    In warm-up it rises linearly from ``peak / warmup`` at step 1 to `peak` at step `warmup`. Then it stays, or falls
    along a line or half a cosine wave (SGDR, arXiv 1608.03983, without restarts) to `minimum` at step `total`,
    where it stays.

    Args:
        step: counted from 1.
        peak: highest value.
        minimum: value at the end; unused by the constant schedule.
        schedule: how it decays after warm-up, if at all.
        warmup: number of warm-up steps, may be 0.
        total: number of steps of the run.
    """
    assert step >= 1, f"steps count from 1, not {step}"
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    # Without warm-up, step 0 would be the peak: the first step already falls, and the last reaches the minimum.
    progress = min(1.0, (step - warmup) / (total - warmup)) if total > warmup else 1.0
    share = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return minimum + (peak - minimum) * share
