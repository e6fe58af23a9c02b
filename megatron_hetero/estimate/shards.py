"""The assumed micro-batch of an estimate, and the shard of it that each rank's layers work on. Pure.

Every sample is the same, with square images of one size; a token budget is used up by more text. All replicas of the
text module therefore have equal packs, and encoder replicas with pieces of equal sizes equal shards, which are computed
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.config.sections import EstimateConfig
from megatron_hetero.data.balance import assign, assign_in_order, cut_calls
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.token_shards import TokenShards
from megatron_hetero.job.job import BatchShape, Budget, JobSpec, micro_batch_setting
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.items.types import Size, padded_patches
from megatron_hetero.models.shapes import AssumedSample, ModelShapes, assumed_sample

MOST_ROWS = 1 << 22
"""Limit on the rows of a micro-batch over all replicas. Packs have at most twice as many tokens."""

_ASSUMED = "plan.images, plan.image_side, plan.videos, plan.frames, plan.tokens"
"""Settings of which a sample's size depends most."""


@dataclass(frozen=True, eq=False)
class AssumedBatch:
    """The micro-batch that all micro-batches of a step of `job` are assumed to equal. `calls`: by module, the
    micro-batches of each call.
    """

    job: JobSpec
    sample: AssumedSample
    calls: Mapping[str, tuple[range, ...]]

    @classmethod
    def of(cls, job: JobSpec) -> AssumedBatch:
        """The batch that section `plan` describes. Raises `UserError` where it is too large to count."""
        shapes, batch = job.shapes, job.batch
        plan = job.config.plan if job.budget is None else _filling(job.config.plan, shapes, batch, job.budget)
        sample = assumed_sample(plan, shapes)
        rows, tokens = sum(sample.rows.values()) * batch.samples * batch.replicas, sample.tokens * batch.samples
        if rows > MOST_ROWS or tokens > 2 * MOST_ROWS:
            raise UserError.at(
                f"section plan ({_ASSUMED})",
                found=f"{rows} rows of images in a micro-batch, and {tokens} tokens in a pack",
                expected=f"{MOST_ROWS} and {2 * MOST_ROWS} at most",
                because="the estimate counts each of them",
                fix=f"lower {_ASSUMED} or {micro_batch_setting(job.config)}",
            )
        return cls(job, sample, _calls(job, sample))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample of a pack."""
        return (self.sample.tokens,) * self.job.batch.samples

    def sizes_of_calls(self, module: str) -> tuple[int, ...]:
        """The distinct numbers of micro-batches per call, largest first."""
        return tuple(sorted({len(call) for call in self.calls[module]}, reverse=True))

    def assigned(self, encoder: str, micro_batches: int = 1) -> list[list[int]]:
        """Image indices of each encoder replica in a call of `micro_batches`."""
        sizes, dp = self.pieces(encoder, micro_batches), self.job.layouts[encoder].dp
        if self.job.config.data.balance != "replica":
            return assign_in_order(len(sizes), dp)
        costs = {size: self.job.shapes.encoders[encoder].cost(size) for size in self.sample.sizes[encoder]}
        return assign([costs[size] for size in sizes], dp)

    def pieces(self, encoder: str, micro_batches: int = 1) -> tuple[Size, ...]:
        """The sizes of all pieces in a call of `micro_batches`."""
        return self.sample.sizes[encoder] * (self.job.batch.samples * self.job.batch.replicas * micro_batches)

    def token_shards(self, layout: Layout) -> TokenShards:
        """The packs of the replicas of `layout`, a stage of the text module."""
        places = {name: (self.places(name),) * layout.dp for name in self.job.shapes.encoders}
        return TokenShards(layout, self.job.sequence_parallel[TEXT], (self.lengths,) * layout.dp, places)

    def places(self, encoder: str) -> np.ndarray:
        """Positions of the encoder's rows in a pack, int64."""
        starts = np.arange(self.job.batch.samples)[:, None] * self.sample.tokens
        return (starts + self.sample.positions(encoder)).ravel()

    def sides(self, edge: Edge, micro_batches: int = 1) -> list[tuple[Ownership, Ownership]]:
        """Source and destination ownership of the rows of an edge, for each micro-batch of a call."""
        encoder, layout, text = edge.source, self.job.layouts[edge.source], self.job.layouts[TEXT]
        needed = self.token_shards(text.stage(edge.target_coordinate(text))).ownership(encoder)
        assigned = tuple(map(tuple, self.assigned(encoder, micro_batches)))
        held = EncoderShards(
            self.job.shapes.encoders[encoder],
            layout.stage(edge.source_coordinate(layout)),
            self.job.sequence_parallel[encoder],
            self.pieces(encoder, micro_batches),
            assigned,
            self.job.patch_limits.get(encoder),
        )
        ends = [len(needed.ids) * m for m in range(micro_batches + 1)]
        return [(of_micro_batch, needed) for of_micro_batch in held.ownership().cut(ends)]


def _calls(job: JobSpec, sample: AssumedSample) -> dict[str, tuple[range, ...]]:
    batch, together = job.batch, job.encoder_calls(job.batch.micro_batches)
    found = {TEXT: tuple(range(m, m + 1) for m in range(batch.micro_batches))}
    for name, shape in job.shapes.encoders.items():
        patches = shape.unit * sample.rows[name] * batch.samples * batch.replicas
        limit = job.patch_limits.get(name)
        found[name] = cut_calls([patches] * batch.micro_batches, together[name], job.layouts[name], limit)
    return found


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


def one_replica(layout: Layout) -> Layout:
    """The layout of one replica and one stage, on ranks from 0."""
    size = layout.ways("weights", "tokens")
    return Layout(tp=layout.tp, sp=layout.sp, cp=layout.cp, dp=1, pp=1, ranks=tuple(range(size)))


Spans = tuple[tuple[int, int], ...]
"""Query and key lengths of attention segments."""


@dataclass(frozen=True)
class SequenceShard:
    """What one rank of a module works on in one micro-batch or call; lengths in tokens (patches for an encoder).

    `tokens`: length of the shard, shared by the tp group; `padded`: with padding; `local`: length between layers, a
    part of `padded` with sequence-parallel activations. `member`: tokens of the cp member, over its sp ranks.
    `segments`, `windows`: of full and of local attention. `supervised`: tokens with a loss. `parts`: the shards of the
    calls that it takes, where an encoder takes several.
    """

    tokens: int
    padded: int
    local: int
    member: int
    segments: Spans
    windows: Spans = ()
    supervised: int = 0
    parts: tuple[SequenceShard, ...] = ()

    @classmethod
    def in_parts(cls, parts: Sequence[SequenceShard]) -> SequenceShard:
        """The shard of one call or several."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            tokens=sum(part.tokens for part in parts),
            padded=sum(part.padded for part in parts),
            local=sum(part.local for part in parts),
            member=sum(part.member for part in parts),
            segments=tuple(chain.from_iterable(part.segments for part in parts)),
            windows=tuple(chain.from_iterable(part.windows for part in parts)),
            parts=tuple(parts),
        )


@dataclass(frozen=True, eq=False)
class ModuleShards:
    """The distinct shards of a module, and the index of each rank's, in layout order. Empty for an idle module."""

    shards: tuple[SequenceShard, ...]
    of_rank: np.ndarray

    @property
    def used(self) -> bool:
        """Whether the module has any work."""
        return len(self.shards) > 0


def text_shards(assumed: AssumedBatch) -> ModuleShards:
    """The shards of the text module."""
    layout, ends = assumed.job.layouts[TEXT], np.cumsum(assumed.lengths)
    labels = np.zeros(ends[-1], bool)
    for end in ends:
        labels[end - 1 - assumed.sample.supervised : end - 1] = True
    one = one_replica(layout)
    shards = assumed.token_shards(one)
    shares = [shards.share(rank) for rank in range(0, one.size, layout.tp)]
    split = layout.tp if assumed.job.sequence_parallel[TEXT] else 1
    found = [
        SequenceShard(
            len(share.tokens),
            share.padded,
            share.padded // split,
            sum(share.sp_lengths),
            _spans(share.segments),
            supervised=int(labels[share.tokens].sum()),
        )
        for share in shares
    ]
    return _numbered([found], layout, np.zeros(layout.dp, np.int64))


def encoder_shards(assumed: AssumedBatch, encoder: str, micro_batches: int) -> ModuleShards:
    """The shards of an encoder in a call of `micro_batches`."""
    layout, sizes = assumed.job.layouts[encoder], assumed.pieces(encoder, micro_batches)
    if not sizes:
        return ModuleShards((), np.full(layout.size, -1))
    of_replicas = [tuple(sizes[i] for i in mine) for mine in assumed.assigned(encoder, micro_batches)]
    kinds = {kind: number for number, kind in enumerate(sorted(set(of_replicas), key=len))}
    found = [_of_replica(assumed.job, encoder, kind) for kind in kinds]
    # Replicas with fewer calls make empty ones.
    number, empty = max(map(len, found)), _of_replica(assumed.job, encoder, ())
    calls = [[*of_kind, *empty * (number - len(of_kind))] for of_kind in found]
    each = [[SequenceShard.in_parts(parts) for parts in zip(*of_kind, strict=True)] for of_kind in calls]
    return _numbered(each, layout, np.array([kinds[kind] for kind in of_replicas]))


def _of_replica(job: JobSpec, encoder: str, sizes: tuple[Size, ...]) -> list[list[SequenceShard]]:
    """Shards of the tp groups of a replica whose pieces have these sizes, for each call."""
    shape, layout, sharded = job.shapes.encoders[encoder], job.layouts[encoder], job.sequence_parallel[encoder]
    assigned, limit = (tuple(range(len(sizes))),), job.patch_limits.get(encoder)
    shards = EncoderShards(shape, one_replica(layout), sharded, sizes, assigned, limit)
    return [_of_part(part, layout.tp if sharded else 1) for part in shards.parts]


def _of_part(shards: EncoderShards, split: int) -> list[SequenceShard]:
    found = list[SequenceShard]()
    for rank in range(0, shards.layout.size, shards.layout.tp):
        share = shards.share(rank)
        patches = share.positions.shape[1]
        padded = padded_patches(patches, shards.shape.unit, split)
        windows = tuple((n, n) for n in share.windows)
        member = sum(share.sp_lengths)
        found.append(SequenceShard(patches, padded, padded // split, member, _spans(share.segments), windows))
    return found


def _spans(segments: AttentionSegments) -> Spans:
    return tuple(zip(segments.queries, segments.keys, strict=True))


def _numbered(kinds: list[list[SequenceShard]], layout: Layout, kind_of_replica: np.ndarray) -> ModuleShards:
    """Number the distinct shards. `kinds`: the shards of one replica's tp groups, for each kind of replica."""
    number: dict[SequenceShard, int] = {}
    table = np.array([[number.setdefault(shard, len(number)) for shard in kind] for kind in kinds])
    of_stage = np.repeat(table[kind_of_replica], layout.tp)  # tp, sp and cp vary fastest, then dp, then pp
    return ModuleShards(tuple(number), np.tile(of_stage, layout.pp))
