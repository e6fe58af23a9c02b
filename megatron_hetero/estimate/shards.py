"""What a micro-batch is assumed to look like: every sample the same, with square images of one size.

A token budget is assumed to be used up: samples get as much more text.

What each rank's layers work on in an assumed micro-batch, or call of an encoder: a few different shards, and which
rank has which. Pure.

All replicas of the text module work on packs that are alike, and so do all encoder replicas with pieces of the same
sizes, so that shards are computed for one of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_hetero.base.errors import TEXT, UserError
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.config.sections import EstimateConfig
from megatron_hetero.data.balance import assign, assign_in_order, cut_calls
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.token_shards import TokenShards
from megatron_hetero.job import BatchShape, Budget, JobSpec, micro_batch_setting
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.items.types import Size, padded_patches
from megatron_hetero.models.shapes import AssumedSample, ModelShapes, assumed_sample, assumed_sizes, lengthened

MOST_IMAGES, MOST_ROWS, MOST_TOKENS = 1 << 16, 1 << 22, 1 << 23
"""Of an assumed micro-batch, over all replicas; tokens of one of them."""


@dataclass(frozen=True, eq=False)
class AssumedBatch:
    """A micro-batch of such samples. All micro-batches of a step are alike, and so are all replicas of the text module.

    `sharded`: by module, whether activations are split along the sequence over tp. `calls`: by encoder, the
    micro-batches of a step, in runs that it encodes in one call.
    """

    sample: AssumedSample
    shapes: ModelShapes
    layouts: Mapping[str, Layout]
    batch: BatchShape
    sharded: Mapping[str, bool]
    balance: str
    calls: Mapping[str, tuple[range, ...]]

    @classmethod
    def of(cls, job: JobSpec) -> AssumedBatch:
        """The assumption of section `plan` of the configuration. Raises `UserError` where it is too large to plan."""
        shapes, batch = job.shapes, job.batch
        plan = job.config.plan if job.budget is None else _filling(job.config.plan, shapes, batch, job.budget)
        _require_size(plan, shapes, batch, micro_batch_setting(job.config))
        sample, balance = assumed_sample(plan, shapes), job.config.data.balance
        return cls(sample, shapes, job.layouts, batch, job.sequence_parallel, balance, _calls(job, sample))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample of a pack."""
        return (self.sample.tokens,) * self.batch.samples

    def sizes_of_calls(self, encoder: str) -> tuple[int, ...]:
        """The different numbers of micro-batches of a call, the largest first."""
        return tuple(sorted({len(call) for call in self.calls[encoder]}, reverse=True))

    def assigned(self, encoder: str, micro_batches: int = 1) -> list[list[int]]:
        """The images of a call of so many micro-batches that each replica of the encoder gets."""
        sizes, dp = self.pieces(encoder, micro_batches), self.layouts[encoder].dp
        if self.balance != "replica":
            return assign_in_order(len(sizes), dp)
        costs = {size: self.shapes.encoders[encoder].cost(size) for size in self.sample.sizes[encoder]}
        return assign([costs[size] for size in sizes], dp)

    def pieces(self, encoder: str, micro_batches: int = 1) -> tuple[Size, ...]:
        """The sizes of all pieces in a call of so many micro-batches."""
        return self.sample.sizes[encoder] * (self.batch.samples * self.batch.replicas * micro_batches)

    def token_shards(self, layout: Layout) -> TokenShards:
        """The packs of the replicas of `layout`, a stage of the text module."""
        places = {name: (self.places(name),) * layout.dp for name in self.shapes.encoders}
        return TokenShards(layout, self.sharded[TEXT], (self.lengths,) * layout.dp, places)

    def places(self, encoder: str) -> np.ndarray:
        """Where the encoder's rows go in a pack, int64."""
        starts = np.arange(self.batch.samples)[:, None] * self.sample.tokens
        return (starts + self.sample.positions(encoder)).ravel()

    def encoder_shards(self, encoder: str, coordinate: int, micro_batches: int = 1) -> EncoderShards:
        """The images of a call of so many micro-batches as a stage of the encoder holds them."""
        shape, stage = self.shapes.encoders[encoder], self.layouts[encoder].stage(coordinate)
        assigned = tuple(map(tuple, self.assigned(encoder, micro_batches)))
        return EncoderShards(shape, stage, self.sharded[encoder], self.pieces(encoder, micro_batches), assigned)

    def sides(self, edge: Edge, micro_batches: int = 1) -> list[tuple[Ownership, Ownership]]:
        """Who holds the rows that cross along an edge, and who needs them, for each of the micro-batches of a call."""
        encoder, text = edge.source, self.layouts[TEXT]
        needed = self.token_shards(text.stage(edge.target_coordinate(text))).ownership(encoder)
        shards = self.encoder_shards(encoder, edge.source_coordinate(self.layouts[encoder]), micro_batches)
        ends = [len(needed.ids) * m for m in range(micro_batches + 1)]
        return [(held, needed) for held in shards.ownership().cut(ends)]


def _calls(job: JobSpec, sample: AssumedSample) -> dict[str, tuple[range, ...]]:
    """Of all encoders."""
    batch, together = job.batch, job.together(job.batch.micro_batches)
    found = {}
    for name, shape in job.shapes.encoders.items():
        patches = shape.unit * sample.rows[name] * batch.samples * batch.replicas
        layout = job.layouts[name]
        found[name] = cut_calls([patches] * batch.micro_batches, together[name], layout.size // layout.pp)
    return found


def _filling(plan: EstimateConfig, shapes: ModelShapes, batch: BatchShape, budget: Budget) -> EstimateConfig:
    """`plan` with samples that fill a micro-batch. Raises `UserError` where one alone is larger."""
    sample = assumed_sample(plan, shapes)
    patches = {name: sample.rows[name] * e.unit for name, e in shapes.encoders.items()}
    limits = {"tokens": (sample.tokens, budget.tokens), "patches": (max(patches.values()), budget.patches)}
    for what, (number, most) in limits.items():
        if most is not None and number > most:
            raise UserError.at(
                "section plan (--plan.images, --plan.image_side, --plan.tokens)",
                found=f"samples of {number} {what}",
                expected=f"at most train.{what}_per_micro_batch = {most}",
                because="samples are never cut",
                fix=f"lower plan.images, plan.image_side or plan.tokens, or raise train.{what}_per_micro_batch",
            )
    return lengthened(plan, budget.tokens // batch.samples, shapes)


def _require_size(plan: EstimateConfig, shapes: ModelShapes, batch: BatchShape, setting: str) -> None:
    """Check that the images and tokens of a micro-batch are few enough to be counted one by one."""
    packs = batch.samples * batch.replicas
    images = plan.images * len(shapes.encoders) * packs
    of_image = sum(shapes.encoders[name].rows(size) for name, size in assumed_sizes(plan, shapes).items())
    # Every image counts, and so does a pack's every token.
    rows, pack = plan.images * of_image * packs, (plan.images * of_image + plan.tokens) * batch.samples
    found = {
        "images": (images, MOST_IMAGES),
        "rows of images": (max(rows, of_image), MOST_ROWS),
        "tokens of a pack": (pack, MOST_TOKENS),
    }
    for what, (number, most) in found.items():
        if number > most:
            raise UserError.at(
                "section plan (--plan.images, --plan.image_side, --plan.tokens)",
                found=f"{number} {what} in a micro-batch of {packs} samples",
                expected=f"{most} at most",
                because="the plan covers each of them",
                fix=f"lower plan.images, plan.image_side, plan.tokens or {setting}",
            )


def one_replica(layout: Layout) -> Layout:
    """A layout of one replica and one stage with the other degrees, on ranks from 0."""
    size = layout.ways("weights", "tokens")
    return Layout(tp=layout.tp, sp=layout.sp, cp=layout.cp, dp=1, pp=1, ranks=tuple(range(size)))


Spans = tuple[tuple[int, int], ...]
"""Queries and keys of segments of attention, in order."""


@dataclass(frozen=True)
class SequenceShard:
    """What one rank of a module works on in one micro-batch or call; lengths in tokens (patches for an encoder).

    `tokens`: of its shard, which its tp group shares; `padded`: with padding; `local`: those that it holds between
    layers, a part of `padded` with sequence-parallel activations. `member`: tokens of its cp member, over all of its sp
    members. `segments`: of full attention; `windows`: of local attention. `supervised`: tokens that predict.
    """

    tokens: int
    padded: int
    local: int
    member: int
    segments: Spans
    windows: Spans = ()
    supervised: int = 0


@dataclass(frozen=True, eq=False)
class ModuleShards:
    """The different shards of a module, and for each of its layout's ranks, in order, the number of its own. There are
    none where the module has nothing to do.
    """

    shards: tuple[SequenceShard, ...]
    of_rank: np.ndarray

    @property
    def used(self) -> bool:
        """Whether the module has anything to do at all."""
        return len(self.shards) > 0


def text_shards(assumed: AssumedBatch) -> ModuleShards:
    """The shards of the text module."""
    layout, sharded = assumed.layouts[TEXT], assumed.sharded[TEXT]
    one = one_replica(layout)
    shards = assumed.token_shards(one)
    labels = np.zeros(sum(assumed.lengths), bool)
    for end in np.cumsum(assumed.lengths):
        labels[end - 1 - assumed.sample.supervised : end - 1] = True
    found = []
    for rank in range(0, one.size, layout.tp):
        share = shards.share(rank)
        shard = SequenceShard(
            tokens=len(share.tokens),
            padded=share.padded,
            local=share.padded // (layout.tp if sharded else 1),
            member=sum(share.sp_lengths),
            segments=_spans(share.segments),
            supervised=int(labels[share.tokens].sum()),
        )
        found += [shard] * layout.tp
    return _numbered([found], layout, np.zeros(layout.dp, np.int64))


def encoder_shards(assumed: AssumedBatch, encoder: str, micro_batches: int) -> ModuleShards:
    """The shards of an encoder in a call of so many micro-batches; none where the assumed samples have no images."""
    layout, sizes = assumed.layouts[encoder], assumed.pieces(encoder, micro_batches)
    if not sizes:
        return ModuleShards((), np.full(layout.size, -1))
    of_replicas = [tuple(sizes[i] for i in mine) for mine in assumed.assigned(encoder, micro_batches)]
    kinds = {kind: number for number, kind in enumerate(sorted(set(of_replicas), key=len))}
    found = [_of_replica(assumed, encoder, kind) for kind in kinds]
    return _numbered(found, layout, np.array([kinds[kind] for kind in of_replicas]))


def _of_replica(assumed: AssumedBatch, encoder: str, sizes: tuple[Size, ...]) -> list[SequenceShard]:
    """The shards of the ranks of a replica with pieces of these sizes."""
    shape, layout, sharded = assumed.shapes.encoders[encoder], assumed.layouts[encoder], assumed.sharded[encoder]
    shards = EncoderShards(shape, one_replica(layout), sharded, sizes, (tuple(range(len(sizes))),))
    found = []
    for rank in range(0, shards.layout.size, layout.tp):
        share = shards.share(rank)
        patches, split = share.positions.shape[1], layout.tp if sharded else 1
        padded = padded_patches(patches, shape.unit, split)
        windows = tuple((n, n) for n in share.windows)
        shard = SequenceShard(patches, padded, padded // split, sum(share.sp_lengths), _spans(share.segments), windows)
        found += [shard] * layout.tp
    return found


def _spans(segments: AttentionSegments) -> Spans:
    return tuple(zip(segments.queries, segments.keys, strict=True))


def _numbered(kinds: list[list[SequenceShard]], layout: Layout, kind_of_replica: np.ndarray) -> ModuleShards:
    """`kinds`: the shards of the ranks of one replica, for each kind of replica."""
    number: dict[SequenceShard, int] = {}
    table = np.array([[number.setdefault(shard, len(number)) for shard in kind] for kind in kinds])
    of_stage = table[kind_of_replica].ravel()  # tp, sp and cp vary fastest, then dp, then pp
    return ModuleShards(tuple(number), np.tile(of_stage, layout.pp))
