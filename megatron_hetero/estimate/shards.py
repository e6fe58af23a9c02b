"""The assumed micro-batch of an estimate, and the shard of it that each rank's layers work on. Pure.

Every sample is the same, with square images of one size; a token budget is used up by more text. All replicas of the
text module therefore have equal packs, and encoder replicas with pieces of equal sizes equal shards, which are computed
once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.config.sections import EstimateConfig
from megatron_hetero.data.dealing import PackShape, Pieces
from megatron_hetero.data.encoder_shards import EncoderShards, EncoderShare
from megatron_hetero.data.partition import Packs, StepPartitioner, sides
from megatron_hetero.data.token_shards import TokenShards
from megatron_hetero.job.job import BatchShape, Budget, JobSpec, micro_batch_setting
from megatron_hetero.layout.axes import axes_of
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.shapes import AssumedSample, ModelShapes, assumed_sample

MAX_ROWS = 1 << 22
"""Limit on the rows of a micro-batch over all replicas. Packs have at most twice as many tokens."""

_ASSUMED = "plan.images, plan.image_side, plan.videos, plan.frames, plan.tokens"
"""Settings of which a sample's size depends most."""


@dataclass(frozen=True, eq=False)
class AssumedBatch:
    """The micro-batch that all micro-batches of a step of `job` are assumed to equal.

    `partitioner`: a run's, of which only what is the same on all ranks is used. `packs`: of the replicas of the text
    module. `calls`: by module, the micro-batches of each call.
    """

    job: JobSpec
    sample: AssumedSample
    partitioner: StepPartitioner
    packs: Packs
    calls: Mapping[str, tuple[range, ...]]

    @classmethod
    def of(cls, job: JobSpec) -> AssumedBatch:
        """The batch that section `plan` describes. Raises `UserError` where it is too large to count."""
        shapes, batch = job.shapes, job.batch
        plan = job.config.plan if job.budget is None else _filling(job.config.plan, shapes, batch, job.budget)
        sample = assumed_sample(plan, shapes)
        rows, tokens = sum(sample.rows.values()) * batch.samples * batch.replicas, sample.tokens * batch.samples
        if rows > MAX_ROWS or tokens > 2 * MAX_ROWS:
            raise UserError.at(
                f"section plan ({_ASSUMED})",
                found=f"{rows} rows of images in a micro-batch, and {tokens} tokens in a pack",
                expected=f"{MAX_ROWS} and {2 * MAX_ROWS} at most",
                because="the estimate counts each of them",
                fix=f"lower {_ASSUMED} or {micro_batch_setting(job.config)}",
            )
        partitioner, packs = StepPartitioner.of(job, rank=0), (_pack(sample, batch.samples),) * batch.replicas
        text = tuple(range(m, m + 1) for m in range(batch.micro_batches))
        return cls(job, sample, partitioner, packs, {TEXT: text, **partitioner.calls([packs] * batch.micro_batches)})

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample of a pack."""
        return self.packs[0].lengths

    def sizes_of_calls(self, module: str) -> tuple[int, ...]:
        """The distinct numbers of micro-batches per call, largest first."""
        return tuple(sorted({len(call) for call in self.calls[module]}, reverse=True))

    # Shards have an entry for each row. Those of the last batch alone are stored, as a search holds many batches.
    @lru_cache(maxsize=1)  # noqa: B019
    def token_shards(self) -> TokenShards:
        """What the text module reads in a micro-batch."""
        return self.partitioner.token_shards(self.packs)

    @lru_cache(maxsize=4)  # noqa: B019
    def encoder_shards(self, encoder: str, micro_batches: int) -> EncoderShards:
        """What an encoder encodes in a call of `micro_batches`."""
        return self.partitioner.encoder_shards(encoder, [self.packs] * micro_batches)

    def sides(self, edge: Edge, micro_batches: int) -> list[tuple[Ownership, Ownership]]:
        """Source and destination ownership of the rows of an edge, for each micro-batch of a call."""
        return sides(edge, self.encoder_shards(edge.source, micro_batches), [self.token_shards()] * micro_batches)


def _pack(sample: AssumedSample, samples: int) -> PackShape:
    """A pack of so many equal samples."""
    starts = sample.tokens * np.arange(samples)[:, None]
    pieces = (
        Pieces(sizes * samples, (starts + sample.positions(name)).tobytes()) for name, sizes in sample.sizes.items()
    )
    return PackShape((sample.tokens,) * samples, tuple(pieces))


def _filling(plan: EstimateConfig, shapes: ModelShapes, batch: BatchShape, budget: Budget) -> EstimateConfig:
    """Return `plan` with samples that fill a micro-batch. Raises `UserError` where one sample is larger."""
    sample = assumed_sample(plan, shapes)
    patches = {name: sample.rows[name] * e.unit for name, e in shapes.encoders.items()}
    limits = {"tokens": (sample.tokens, budget.tokens), "patches": (max(patches.values()), budget.patches)}
    for what, (number, most) in limits.items():
        if most is not None and number > most:
            raise UserError.at(
                f"section plan ({_ASSUMED})",
                found=f"samples of {number} {what}",
                expected=f"at most train.{what}_per_micro_batch = {most}",
                because="samples are never cut",
                fix=f"lower {_ASSUMED}, or raise train.{what}_per_micro_batch",
            )
    return replace(plan, tokens=plan.tokens + max(0, budget.tokens // batch.samples - sample.tokens))


Spans = tuple[tuple[int, int], ...]
"""Query and key lengths of attention segments."""


@dataclass(frozen=True)
class SequenceShard:
    """What one rank of a module works on in one call of its layers; lengths in tokens (patches for an encoder).

    `tokens`: length of the shard, shared by the tp group; `padded`: with padding; `local`: length between layers, a
    part of `padded` with sequence-parallel activations. `member`: tokens of the cp member, over its sp ranks.
    `segments`, `windows`: of full and of local attention. `supervised`: tokens with a loss. `lengths`: tokens of each
    whole sequence, for layers that run along them.
    """

    tokens: int
    padded: int
    local: int
    member: int
    segments: Spans
    windows: Spans = ()
    supervised: int = 0
    lengths: tuple[int, ...] = ()


Work = tuple[SequenceShard, ...]
"""What one rank of a module works on in a micro-batch or call of several: the shard of each call of its layers, more
than one for an encoder with a limit of patches.
"""


@dataclass(frozen=True, eq=False)
class ModuleShards:
    """The distinct work of a module's ranks, and the index of each rank's, in layout order. Empty for idle modules."""

    shards: tuple[Work, ...]
    of_rank: np.ndarray

    @property
    def used(self) -> bool:
        """Whether the module has any work."""
        return len(self.shards) > 0


def text_shards(assumed: AssumedBatch) -> ModuleShards:
    """The shards of the text module."""
    sample, shards = assumed.sample, assumed.token_shards()
    labels = np.zeros((len(assumed.lengths), sample.tokens), bool)
    labels[:, sample.tokens - 1 - sample.supervised : -1] = True
    split = shards.layout.tp if shards.sharded else 1

    def work_of(rank: int) -> Work:
        share = shards.share(rank)
        tokens, spans, supervised = len(share.tokens), _spans(share.segments), int(labels.ravel()[share.tokens].sum())
        local, member = share.padded // split, sum(share.sp_lengths)
        whole = assumed.lengths
        return (SequenceShard(tokens, share.padded, local, member, spans, supervised=supervised, lengths=whole),)

    return _distinct(shards.layout, [0] * shards.layout.dp, work_of)


def encoder_shards(assumed: AssumedBatch, encoder: str, micro_batches: int) -> ModuleShards:
    """The shards of an encoder in a call of `micro_batches`."""
    shards = assumed.encoder_shards(encoder, micro_batches)
    if not shards.sizes:
        return ModuleShards((), np.full(shards.layout.size, -1))
    split = shards.layout.tp if shards.sharded else 1

    def shard_of(share: EncoderShare) -> SequenceShard:
        local, windows = share.embedded + share.padding, tuple((n, n) for n in share.windows)
        tokens, spans = share.positions.shape[1], _spans(share.segments)
        return SequenceShard(tokens, local * split, local, sum(share.sp_lengths), spans, windows)

    sizes = [tuple(shards.sizes[piece] for piece in pieces) for pieces in shards.assigned]
    return _distinct(shards.layout, sizes, lambda rank: tuple(map(shard_of, shards.shares(rank))))


def _spans(segments: AttentionSegments) -> Spans:
    return tuple(zip(segments.queries, segments.keys, strict=True))


def _distinct(layout: Layout, replicas: Sequence[Hashable], work_of: Callable[[int], Work]) -> ModuleShards:
    """Compute the work of the ranks of one of each kind of `replicas`. `work_of`: returns a rank's."""
    numbers, by_kind = dict[Work, int](), dict[Hashable, list[int]]()
    for replica, kind in enumerate(replicas):
        if kind not in by_kind:
            ranks = layout.group_of(layout.rank_at(dp=replica), *axes_of("tokens"))
            by_kind[kind] = [numbers.setdefault(work_of(rank), len(numbers)) for rank in ranks]
    of_stage = np.repeat([by_kind[kind] for kind in replicas], layout.tp)  # tp, sp, cp vary fastest, then dp, then pp
    return ModuleShards(tuple(numbers), np.tile(of_stage, layout.pp))
