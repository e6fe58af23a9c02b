"""The optimizer of a module, with the learning rates of our parameter groups.

AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): each rank of the module's data- and
context-parallel group updates an equal share of Megatron's buffer, of which it alone keeps master weights and moments
(ZeRO stage 1, Rajbhandari et al. 2020, arXiv 1910.02054). Biases and all other one-dimensional parameters (norms) are
exempt from weight decay. SGD is plain: w -= lr * g, replicated.

On a GPU that compiles, an update is one pass over what is kept (`fused_update`). Elsewhere, and with moments of 8
bits, it is PyTorch's kernel, and numbers kept in less than fp32, or in host memory, are unpacked some at a time: a
module is never in fp32 as a whole. What is not a matter of single parameters is done to all numbers of a batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_hetero.config.optimizers import OPTIMIZERS
from megatron_hetero.config.schema import FP32, OptimizerConfig, PrecisionConfig
from megatron_hetero.distributed.platform import Platform, compiled, on_device
from megatron_hetero.engine.fused_batches import Batch, Brought, batches_of, ends_on, is_fused, numbers_of
from megatron_hetero.engine.fused_update import CallRates, SegmentRates, update_
from megatron_hetero.engine.gradients import scale_gradients
from megatron_hetero.engine.module import TrainedModule
from megatron_hetero.engine.noise import Noise
from megatron_hetero.engine.number_formats import PIECE, Fp32Master, Fp32Weights, Plain, Stored, batch_elements
from megatron_hetero.engine.optimizer_state import OptimizerShard, OptimizerState, build_state
from megatron_hetero.names import TEXT, parts_of


@dataclass(frozen=True)
class Rates:
    """Peak and final learning rate, and weight decay, of a parameter."""

    peak: float
    minimum: float
    weight_decay: float


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of the states of a module, all of parameter `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ModuleOptimizer:
    """Updates the weights of one module on this rank.

    Attributes:
        module: what it updates.
        state: of the parameters of which this rank updates any elements.
        rates: of these, by name.
        config: of all optimizers.
        seed: of stochastic rounding.
        platform: where this rank computes.
        streamed: whether states lie in host memory.
        streams: of the device, where they are streamed: one batch is copied while the next is computed.
    """

    module: TrainedModule
    state: OptimizerState
    rates: Mapping[str, Rates]
    config: OptimizerConfig
    seed: int
    platform: Platform
    streamed: bool
    streams: Sequence[torch.cuda.Stream] = ()

    @property
    def shards(self) -> Mapping[str, OptimizerShard]:
        """Of the state, by the names of parameters."""
        return self.state.shards

    @property
    def updates(self) -> Tensor:
        """How often each of them was updated, fp32 [shards] on the host."""
        return self.state.updates

    @torch.no_grad()
    def update(self, step: int, total: int, scale: float = 1.0) -> None:
        """Update with the gradients times `scale`, at the rates of `step` (from 1) of `total`; then every rank has all
        weights. Collective over the ranks that hold the same weights. Gradients are undefined afterwards.
        """
        self.module.data_parallel.wait_for_weights()
        if self.platform.compiles and is_fused(self.state):
            self._update_fused(step, total, scale)
        else:
            if scale != 1.0:
                scale_gradients([self.module], scale)
            for place, pieces in enumerate(self._batches):
                with self._on(place):
                    self._update(pieces, step, total)
        for stream in self._used_streams:
            torch.cuda.current_stream().wait_stream(stream)
        self.updates.add_(1)
        self.share_weights()

    def share_weights(self) -> None:
        """Give all ranks that hold the same weights those that each has updated."""
        self.module.data_parallel.share_weights()

    @torch.no_grad()
    def renew_weights(self) -> None:
        """Make the weights those of the masters, where these were loaded."""
        master = self.state.master
        self.module.data_parallel.wait_for_weights()
        for pieces in () if isinstance(master, Fp32Weights) else self._batches:
            start, stop = pieces[0].start, pieces[-1].stop
            master.write(start, master.read(start, stop))
        self.share_weights()

    def _update_fused(self, step: int, total: int, scale: float) -> None:
        device, (beta1, beta2) = self.platform.device, self.config.betas
        own = {
            name: self._segment(rates, step, total, count)
            for (name, rates), count in zip(self.rates.items(), (self.updates + 1).tolist(), strict=True)
        }
        segments = [batch.segments(own) for batch in self._fused_batches]
        calls = [
            CallRates(
                scale, 1 - beta1, 1 - beta2, self.config.eps, self._noise(batch.names[0], batch.start, step), rates
            )
            for batch, (rates, _) in zip(self._fused_batches, segments, strict=True)
        ]
        numbers, ends = numbers_of(calls, device), [ends_on(device, each) for _, each in segments]
        for place, batch in enumerate(self._fused_batches):
            with self._on(place):
                brought = Brought.of(self.state, batch)
                compiled(update_)(*brought.arguments(), numbers[place], ends[place])
                brought.put_back()

    def _segment(self, rates: Rates, step: int, total: int, count: float) -> SegmentRates:
        """Those of a parameter at its update number `count`."""
        rate = rate_of(rates.peak, rates.minimum, step, self.config, total)
        if not self.state.moments:
            return SegmentRates(rate)
        first, second = (1 - beta**count for beta in self.config.betas)
        return SegmentRates(rate / first, second**-0.5, 1 - rate * rates.weight_decay)

    @cached_property
    def _fused_batches(self) -> tuple[Batch, ...]:
        return tuple(batches_of(self.state, self.module.tied, self._share, streamed=self.streamed))

    def _update(self, pieces: Sequence[_Piece], step: int, total: int) -> None:
        master, moments = _Unpacked.of(self.state.master, pieces), self._moments(pieces)
        gradients = self._gradients(pieces)
        # Copies: a parameter in several pieces is counted once.
        counts: Sequence[Tensor] = ()
        if moments:
            stacked = torch.stack([self.shards[p.name].updates for p in pieces])
            counts = on_device(stacked, self.platform.device).unbind()
        for rates, places in self._by_rates(pieces).items():

            def chosen(of_pieces: Sequence[Tensor], places: list[int] = places) -> list[Tensor]:
                return [of_pieces[place] for place in places]

            rate = rate_of(rates.peak, rates.minimum, step, self.config, total)
            if not moments:
                torch._foreach_add_(chosen(master.pieces), chosen(gradients), alpha=-rate)
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
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=rate,
                weight_decay=rates.weight_decay,
                eps=self.config.eps,
                maximize=False,
            )
        noise = None
        if not self._is_plain:
            noise = self._noise(pieces[0].name, pieces[0].start, step)
        for number, moment in enumerate(moments):
            moment.pack(noise and noise.draw(number))
        master.pack(noise and noise.draw(2))

    def _moments(self, pieces: Sequence[_Piece]) -> list[_Unpacked]:
        names = OPTIMIZERS[self.config.name].moments
        return [_Unpacked.of(self.state.moments[name], pieces) for name in names]

    def _gradients(self, pieces: Sequence[_Piece]) -> Sequence[Tensor]:
        """Fp32; views where they are that."""
        gradients = self.state.gradients
        if gradients.dtype == torch.float32:
            return [gradients.read(piece.start, piece.stop) for piece in pieces]
        return gradients.read(pieces[0].start, pieces[-1].stop).float().split(_sizes(pieces))

    @cached_property
    def _batches(self) -> tuple[tuple[_Piece, ...], ...]:
        """The pieces that are updated together."""
        return tuple(_together(self.shards, math.inf if self._is_plain else self._share, self.module.tied))

    @property
    def _share(self) -> int:
        """Elements that are unpacked, or brought together, at a time."""
        size = sum(shard.stop - shard.start for shard in self.shards.values())
        return batch_elements(size)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether all numbers are kept as they are computed with."""
        stored = [self.state.master, *self.state.moments.values()]
        kept = [*self.state.gradients.tensors, *(tensor for each in stored for tensor in each.tensors)]
        return (
            not self.streamed
            and all(isinstance(each, Fp32Weights | Fp32Master | Plain) for each in stored)
            and all(tensor.dtype == torch.float32 for tensor in kept)
        )

    def _by_rates(self, pieces: Sequence[_Piece]) -> dict[Rates, list[int]]:
        """Places of the pieces of each kind of rates."""
        found: dict[Rates, list[int]] = {}
        for place, piece in enumerate(pieces):
            found.setdefault(self.rates[piece.name], []).append(place)
        return found

    def _noise(self, first: str, start: int, step: int) -> Noise:
        """What elements of the states from `start` on, the first of them of parameter `first`, are rounded with: the
        same on all ranks that hold them, after a resume, and however many are updated at a time.
        """
        name, shard = next(iter(self.shards.items()))
        if first == self.module.tied:
            # Its copies have other names, and other places, on other stages.
            name, shard = "tied", self.shards[first]
            start += shard.start - shard.at
        return Noise.of(f"{self.seed}/{self.module.name}/{name}/{shard.start}/{step}").at(start)

    @property
    def _used_streams(self) -> Sequence[torch.cuda.Stream]:
        return self.streams if self.streamed else ()

    def _on(self, place: int) -> AbstractContextManager[object]:
        """Inside, a batch is updated in the stream of its place."""
        if not (streams := self._used_streams):
            return nullcontext()
        stream = streams[place % len(streams)]
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


@dataclass(frozen=True, eq=False)
class _Unpacked:
    """Numbers in fp32, from `start` on in the states of a module: `whole`, and its `pieces`. Weights that are kept in
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


def build_optimizer(
    module: TrainedModule,
    config: OptimizerConfig,
    platform: Platform,
    precision: PrecisionConfig = FP32,
    *,
    on_host: bool = False,
    streams: Sequence[torch.cuda.Stream] = (),
    seed: int = 0,
) -> ModuleOptimizer | None:
    """The optimizer of `module`, or None where everything in it is frozen.

    Args:
        module: of this rank.
        config: the same for all modules.
        platform: where this rank computes.
        precision: the numbers of its states.
        on_host: whether these lie in host memory.
        streams: in which these are then copied.
        seed: of stochastic rounding.
    """
    if not module.trained:
        return None
    state = build_state(module, OPTIMIZERS[config.name], precision, on_host=on_host, platform=platform)
    rates = {name: _rates(module, name, config) for name in state.shards}
    return ModuleOptimizer(module, state, rates, config, seed, platform, on_host, streams)


def _rates(module: TrainedModule, name: str, config: OptimizerConfig) -> Rates:
    encoder, *projector = parts_of(module.name)
    own = dict.fromkeys(projector, config.lr_projector)
    own |= {} if module.name == TEXT else {encoder: config.lr_vision}
    peak = own.get(module.parts[name])
    decays = module.parameters[name].dim() > 1 and "weight_decay" not in OPTIMIZERS[config.name].unused
    decay = config.weight_decay if decays else 0.0
    if peak is None:
        return Rates(config.lr, config.min_lr, decay)
    return Rates(peak, config.min_lr * peak / config.lr, decay)


def rate_of(peak: float, minimum: float, step: int, config: OptimizerConfig, total: int) -> float:
    """The rate of `step` of `total` under the schedule of `config`, from `peak` to `minimum`."""
    return learning_rate(
        step, peak=peak, minimum=minimum, schedule=config.schedule, warmup=config.warmup_iters, total=total
    )


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
