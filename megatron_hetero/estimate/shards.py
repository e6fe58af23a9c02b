"""Builds the assumed micro-batch of an estimate, and each rank's shards, with the partitioner of training. Pure.

All samples are equal, with square images of one size; more text fills up a token budget. All replicas of the text
module therefore have equal packs, and encoder replicas with pieces of equal sizes have equal shards, which are computed
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
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.partition import Packs, StepPartitioner, sides
from megatron_hetero.data.token_shards import SequenceShard, TokenShards
from megatron_hetero.job.job import BatchShape, Budget, JobSpec, micro_batch_setting
from megatron_hetero.layout.axes import axes_of
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.shapes import AssumedSample, ModelShapes, assumed_sample

MAX_ROWS = 1 << 22
"""Maximum number of rows in a micro-batch over all replicas. A pack has at most twice as many tokens."""

_ASSUMED = "plan.images, plan.image_side, plan.videos, plan.frames, plan.tokens"
"""The settings on which the size of a sample depends most."""


@dataclass(frozen=True, eq=False)
class AssumedBatch:
    """The micro-batch that all micro-batches of a step of `job` are assumed to equal.

    `partitioner`: the partitioner of rank 0, of which only results that are equal on all ranks are used. `packs`: the
    pack of each replica of the text module. `calls`: by module, the micro-batches of each call.
    """

    job: JobSpec
    sample: AssumedSample
    partitioner: StepPartitioner
    packs: Packs
    calls: Mapping[str, tuple[range, ...]]

    @classmethod
    def of(cls, job: JobSpec) -> AssumedBatch:
        """Return the batch that section `plan` describes. Raises `UserError` if the batch is too large to count."""
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
        encoders = partitioner.call_ranges([packs] * batch.micro_batches)
        return cls(job, sample, partitioner, packs, {TEXT: text, **encoders})

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each sample in a pack."""
        return self.packs[0].lengths

    @property
    def predicts(self) -> np.ndarray:
        """Whether each token of a pack has a label, which is the next token: bool [tokens]."""
        labels = np.zeros((len(self.lengths), self.sample.tokens), bool)
        labels[:, self.sample.tokens - 1 - self.sample.supervised : -1] = True
        return labels.ravel()

    def sizes_of_calls(self, module: str) -> tuple[int, ...]:
        """Return the distinct numbers of micro-batches in a call of `module`, largest first."""
        return tuple(sorted({len(call) for call in self.calls[module]}, reverse=True))

    # Shards have an entry for each row. Only shards of the last batch are cached, because a search has many batches.
    @lru_cache(maxsize=1)  # noqa: B019
    def token_shards(self) -> TokenShards:
        """Return the shards of a micro-batch's packs on the ranks of the text module."""
        return self.partitioner.token_shards(self.packs)

    @lru_cache(maxsize=4)  # noqa: B019
    def encoder_shards(self, encoder: str, micro_batches: int) -> EncoderShards:
        """Return the shards of the images in a call of `micro_batches` on the ranks of an encoder."""
        return self.partitioner.encoder_shards(encoder, [self.packs] * micro_batches)

    def sides(self, edge: Edge, micro_batches: int) -> list[tuple[Ownership, Ownership]]:
        """Return the source and destination ownership of an edge's rows, for each micro-batch of a call."""
        return sides(edge, self.encoder_shards(edge.source, micro_batches), [self.token_shards()] * micro_batches)


def _pack(sample: AssumedSample, samples: int) -> PackMetadata:
    """Return the metadata of a pack of `samples` samples, all equal to `sample`."""
    starts = sample.tokens * np.arange(samples)[:, None]
    return PackMetadata(
        lengths=(sample.tokens,) * samples,
        sizes=tuple(sizes * samples for sizes in sample.sizes.values()),
        places=tuple((starts + sample.positions(name)).tobytes() for name in sample.sizes),
        supervised=sample.supervised * samples,
    )


def _filling(plan: EstimateConfig, shapes: ModelShapes, batch: BatchShape, budget: Budget) -> EstimateConfig:
    """Return `plan` with samples that fill a micro-batch. Raises `UserError` if one sample exceeds the budget."""
    sample = assumed_sample(plan, shapes)
    patches = max(_pack(sample, 1).patches(shapes.encoders))
    limits = {"tokens": (sample.tokens, budget.tokens), "patches": (patches, budget.patches)}
    for what, (number, limit) in limits.items():
        if limit is not None and number > limit:
            raise UserError.at(
                f"section plan ({_ASSUMED})",
                found=f"samples of {number} {what}",
                expected=f"at most train.{what}_per_micro_batch = {limit}",
                because="samples are never cut",
                fix=f"lower {_ASSUMED}, or raise train.{what}_per_micro_batch",
            )
    return replace(plan, tokens=plan.tokens + max(0, budget.tokens // batch.samples - sample.tokens))


Work = tuple[SequenceShard, ...]
"""The work of one rank of a module in a call of one or more micro-batches: the shard of each chunk."""


@dataclass(frozen=True, eq=False)
class ModuleShards:
    """The distinct `shards` of a module, none if it is idle, and the index of each rank's shards in layout order."""

    shards: tuple[Work, ...]
    of_rank: np.ndarray

    @property
    def used(self) -> bool:
        """Whether any rank of the module has work in the micro-batch."""
        return len(self.shards) > 0


def text_shards(assumed: AssumedBatch) -> ModuleShards:
    """Return the work of the text module's ranks in a micro-batch."""
    shards, predicts = assumed.token_shards(), assumed.predicts

    def work_of(rank: int) -> Work:
        shard = shards.shard(rank)
        return (replace(shard, supervised=int(predicts[shard.positions].sum())),)

    return _distinct(shards.layout, [0] * shards.layout.dp, work_of)


def encoder_shards(assumed: AssumedBatch, encoder: str, micro_batches: int) -> ModuleShards:
    """Return the work of an encoder's ranks in a call of `micro_batches`."""
    shards = assumed.encoder_shards(encoder, micro_batches)
    if not shards.sizes:
        return ModuleShards((), np.full(shards.layout.size, -1))
    sizes = [tuple(shards.sizes[piece] for piece in pieces) for pieces in shards.assigned]
    return _distinct(shards.layout, sizes, shards.shards)


def _distinct(layout: Layout, replicas: Sequence[Hashable], work_of: Callable[[int], Work]) -> ModuleShards:
    """Return the work of all ranks; `work_of(rank)` is called for only one replica of each kind in `replicas`."""
    numbers, numbers_by_kind = dict[Work, int](), dict[Hashable, list[int]]()
    for replica, kind in enumerate(replicas):
        if kind not in numbers_by_kind:
            ranks = layout.group_of(layout.rank_at(dp=replica), *axes_of("tokens"))
            works = [tuple(_measured_as(shard, layout) for shard in work_of(rank)) for rank in ranks]
            numbers_by_kind[kind] = [numbers.setdefault(work, len(numbers)) for work in works]
    # In the order of ranks tp, sp and cp vary fastest, then dp, then pp.
    of_stage = np.repeat([numbers_by_kind[kind] for kind in replicas], layout.tp)
    return ModuleShards(tuple(numbers), np.tile(of_stage, layout.pp))


def _measured_as(shard: SequenceShard, layout: Layout) -> SequenceShard:
    """Return an equivalent shard of the first rank of its groups: the second sp member has all other tokens. Memory
    depends neither on the rank's position in its groups nor on indices, which are dropped.
    """
    keys = sum(shard.segments.keys)
    return replace(
        shard,
        sp_lengths=(shard.tokens, shard.member - shard.tokens, *(0,) * layout.sp)[: layout.sp],
        cp_lengths=(shard.member,) * layout.cp,
        segments=replace(shard.segments, key_index=np.zeros(keys, np.int64) if layout.cp > 1 else None),
        positions=np.zeros(0, np.int64),
        rows_at={},
    )
