"""The optimizer of a module, with the learning rates of our parameter groups.

AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101; PyTorch's kernel): each rank of the module's data- and
context-parallel group updates an equal share of Megatron's buffer, of which it alone keeps master weights and moments
(ZeRO stage 1, Rajbhandari et al. 2020, arXiv 1910.02054). Biases and all other one-dimensional parameters (norms) are
exempt from weight decay. SGD is plain: w -= lr * g, replicated.

Numbers kept in less than fp32, or in host memory, are unpacked some at a time: a module is never in fp32 as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_hetero.config.optimizers import OPTIMIZERS
from megatron_hetero.config.schema import FP32, OptimizerConfig, PrecisionConfig
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.engine.learning_rate import learning_rate
from megatron_hetero.engine.module import TrainedModule
from megatron_hetero.engine.number_formats import PIECE
from megatron_hetero.engine.optimizer_state import OptimizerShard, build_shards
from megatron_hetero.models.weights import group_of
from megatron_hetero.names import TEXT, parts_of


@dataclass(frozen=True)
class Rates:
    """Peak and final learning rate, and weight decay, of a parameter."""

    peak: float
    minimum: float
    weight_decay: float


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of the shard of parameter `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ModuleOptimizer:
    """Updates the weights of one module on this rank.

    Attributes:
        module: what it updates.
        shards: of the parameters of which this rank updates any elements, by name.
        rates: of these.
        updates: how often each was updated, fp32 [shards]; theirs are views of it.
        config: of all optimizers.
        seed: of stochastic rounding.
        platform: where this rank computes.
        streamed: whether states lie in host memory.
        streams: of the device, where they are streamed: one batch is copied while the next is computed.
    """

    module: TrainedModule
    shards: Mapping[str, OptimizerShard]
    rates: Mapping[str, Rates]
    updates: Tensor
    config: OptimizerConfig
    seed: int
    platform: Platform
    streamed: bool
    streams: Sequence[torch.cuda.Stream] = ()

    @torch.no_grad()
    def update(self, step: int, total: int) -> None:
        """Update with the gradients as they are, at the rates of `step` (from 1) of `total`; then every rank has all
        weights. Collective over the ranks that hold the same weights.
        """
        streams = self.streams if self.streamed else ()
        for place, pieces in enumerate(self._batches):
            with self._on(streams[place % len(streams)] if streams else None):
                self._update(pieces, step, total)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        self.updates.add_(1)
        self.share_weights()

    def share_weights(self) -> None:
        """Give all ranks that hold the same weights those that each has updated."""
        self.module.data_parallel.share_weights()

    @torch.no_grad()
    def renew_weights(self) -> None:
        """Make the weights those of the masters, where these were loaded."""
        for pieces in self._batches:
            for piece in pieces:
                master = self.shards[piece.name].master
                master.write(piece.start, master.read(piece.start, piece.stop))
        self.share_weights()

    def _update(self, pieces: Sequence[_Piece], step: int, total: int) -> None:
        shards, spans = [self.shards[p.name] for p in pieces], [(p.start, p.stop) for p in pieces]
        names = OPTIMIZERS[self.config.name].moments
        weights = [shard.master.read(*span) for shard, span in zip(shards, spans, strict=True)]
        gradients = [shard.gradient[slice(*span)].float() for shard, span in zip(shards, spans, strict=True)]
        moments = {name: [s.moments[name].read(*span) for s, span in zip(shards, spans, strict=True)] for name in names}
        # Copies: a parameter in several pieces is counted once.
        counts = torch.stack([shard.updates for shard in shards]).unbind() if names else ()
        for rates, places in self._by_rates(pieces).items():

            def chosen(of_pieces: Sequence[Tensor], places: list[int] = places) -> list[Tensor]:
                return [of_pieces[place] for place in places]

            rate = rate_of(rates.peak, rates.minimum, step, self.config, total)
            if not names:
                torch._foreach_add_(chosen(weights), chosen(gradients), alpha=-rate)
                continue
            first, second = (chosen(moments[name]) for name in names)
            adamw(
                chosen(weights),
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
        for place, (piece, shard) in enumerate(zip(pieces, shards, strict=True)):
            random = self._random(piece, shard, step)
            shard.master.write(piece.start, weights[place], random)
            for name in names:
                shard.moments[name].write(piece.start, moments[name][place], random)

    @cached_property
    def _batches(self) -> tuple[tuple[_Piece, ...], ...]:
        """The pieces that are updated together."""
        return tuple(_together(self.shards, math.inf if self._is_plain else PIECE))

    @cached_property
    def _is_plain(self) -> bool:
        """Whether all numbers are kept as they are computed with."""
        stored = [s for shard in self.shards.values() for s in (shard.master, *shard.moments.values())]
        kept = [tensor for each in stored for tensor in (each.values, *each.tensors)]
        kept += [shard.gradient for shard in self.shards.values()]
        return not self.streamed and all(t is not None and t.dtype == torch.float32 for t in kept)

    def _by_rates(self, pieces: Sequence[_Piece]) -> dict[Rates, list[int]]:
        """Places of the pieces of each kind of rates."""
        found: dict[Rates, list[int]] = {}
        for place, piece in enumerate(pieces):
            found.setdefault(self.rates[piece.name], []).append(place)
        return found

    def _random(self, piece: _Piece, shard: OptimizerShard, step: int) -> torch.Generator:
        """What a piece is rounded with: the same on all ranks that hold it, and after a resume."""
        # Copies of a tied weight have other names on other stages.
        name = "tied" if piece.name == self.module.tied else piece.name
        text = f"{self.seed}/{self.module.name}/{name}/{shard.start + piece.start}/{step}"
        digest = blake2b(text.encode(), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    @cached_property
    def _generator(self) -> torch.Generator:
        return self.platform.generator()

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)


def _together(shards: Mapping[str, OptimizerShard], most: float) -> Iterator[tuple[_Piece, ...]]:
    """All elements in pieces, as many together as have at most `most` elements. They are cut alike whatever the numbers
    are kept in, so that the vectors of a kernel end at the same elements.
    """
    batch, size = list[_Piece](), 0
    for name, shard in shards.items():
        length = shard.stop - shard.start
        for start in range(0, length, PIECE):
            piece = _Piece(name, start, min(start + PIECE, length))
            if batch and size + piece.stop - piece.start > most:
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
    shards, updates = build_shards(module, OPTIMIZERS[config.name], precision, on_host=on_host, platform=platform)
    rates = {name: _rates(module, name, config) for name in shards}
    return ModuleOptimizer(module, shards, rates, updates, config, seed, platform, on_host, streams)


def _rates(module: TrainedModule, name: str, config: OptimizerConfig) -> Rates:
    encoder, *projector = parts_of(module.name)
    own = dict.fromkeys(projector, config.lr_projector)
    own |= {} if module.name == TEXT else {encoder: config.lr_vision}
    peak = own.get(group_of(module.name, name))
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
