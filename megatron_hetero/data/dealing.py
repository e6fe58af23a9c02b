"""Dealing the samples of a step to replicas of the text module and micro-batches, and the integers about samples and
packs that ranks exchange for it.

A *pack* is the micro-batch of one replica of the text module. A step trains the same samples of the stream in every
layout; dealing them out changes rounding only, since losses are summed over all tokens of a step (docs/gradients.md).
All ranks deal for themselves, by pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from megatron_hetero.data.balance import UNLIMITED, fill_bins, into_rounds
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.job.job import BatchShape, Budget, JobSpec, samples_of
from megatron_hetero.models.items.types import ItemShape, Size


class PieceSource(NamedTuple):
    """Source of a piece: numbers of the sample in the stream, of the item in the sample, of the piece in the item."""

    sample: int
    item: int
    piece: int


@dataclass(frozen=True)
class Pieces:
    """The pieces of a pack for one encoder: the size of each, and the bytes of `positions`. Hashable."""

    sizes: tuple[Size, ...]
    places: bytes

    @property
    def positions(self) -> np.ndarray:
        """Positions of the rows among the tokens of the pack, int64 [rows]."""
        return np.frombuffer(self.places, np.int64)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.positions)


@dataclass(frozen=True)
class PackShape:
    """Everything that determines how a pack is cut: the tokens of each sample, and the pieces of each encoder in the
    order of the encoders. Hashable.
    """

    lengths: tuple[int, ...]
    pieces: tuple[Pieces, ...]


@dataclass(frozen=True)
class PackMetadata:
    """What other ranks need to know about a pack: its shape, the sources of each encoder's pieces, and the number of
    its supervised tokens.
    """

    shape: PackShape
    sources: tuple[tuple[PieceSource, ...], ...]
    supervised: int

    @classmethod
    def of_sample(cls, number: int, sample: TokenizedSample, encoders: Sequence[str]) -> PackMetadata:
        """The metadata of sample `number` of the stream, as a pack of its own."""
        assert sample.rows.sum() == len(sample.row_positions), "a sample has one token for each row of its items"
        pieces, sources = [], []
        for encoder in encoders:
            mine = np.array([ref.field.encoder == encoder for ref in sample.record.items], bool)
            of_encoder = [
                PieceSource(number, item, piece)
                for item in np.flatnonzero(mine).tolist()
                for piece in range(len(sample.pieces[item]))
            ]
            sizes = tuple(sample.pieces[source.item][source.piece] for source in of_encoder)
            places = sample.row_positions[np.repeat(mine, sample.rows)].astype(np.int64).tobytes()
            pieces.append(Pieces(sizes, places))
            sources.append(tuple(of_encoder))
        # A label is the token that follows.
        supervised = int(sample.supervised[1:].sum())
        return cls(PackShape((len(sample),), tuple(pieces)), tuple(sources), supervised)

    @classmethod
    def joined(cls, packs: Sequence[PackMetadata], encoders: int) -> PackMetadata:
        """One pack of the samples of `packs`, in a model with so many encoders."""
        starts = np.cumsum([0, *(pack.tokens for pack in packs)])
        pieces, sources = [], []
        for i in range(encoders):
            of_encoder = [pack.shape.pieces[i] for pack in packs]
            places = [(each.positions + start).tobytes() for each, start in zip(of_encoder, starts, strict=False)]
            pieces.append(Pieces(tuple(size for each in of_encoder for size in each.sizes), b"".join(places)))
            sources.append(tuple(source for pack in packs for source in pack.sources[i]))
        lengths = tuple(length for pack in packs for length in pack.shape.lengths)
        return cls(PackShape(lengths, tuple(pieces)), tuple(sources), sum(pack.supervised for pack in packs))

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(self.shape.lengths)

    def patches(self, encoders: Mapping[str, ItemShape]) -> list[int]:
        """Number of patches for each of the encoders."""
        shapes = zip(encoders.values(), self.shape.pieces, strict=True)
        return [pieces.rows * shape.unit for shape, pieces in shapes]

    def cost(self, encoders: Mapping[str, ItemShape]) -> float:
        """Predicted forward flops of all encoders."""
        shapes = zip(encoders.values(), self.shape.pieces, strict=True)
        return sum(shape.cost(size) for shape, pieces in shapes for size in pieces.sizes)


Deal = Sequence[Sequence[Sequence[int]]]
"""The numbers of the samples of each micro-batch and replica, ascending; at least one micro-batch."""
FLOPS = 1 << 20
"""Unit of costs: integers whose sums are exact in float64."""


@dataclass(frozen=True)
class InOrder(BatchShape):
    """Deals the same number of samples to every micro-batch, in the order of the stream."""

    def foreseen(self, step: int, replica: int) -> list[int]:
        """The samples of a replica in `step`, which do not depend on their lengths."""
        return [n for m in range(self.micro_batches) for n in self.numbers(step, replica, m)]

    def deal(self, step: int, samples: Mapping[int, PackMetadata]) -> Deal:
        """Deals out `samples` of `step`, skipped ones excluded: their packs are shorter."""
        return [
            [[n for n in self.numbers(step, r, m) if n in samples] for r in range(self.replicas)]
            for m in range(self.micro_batches)
        ]


@dataclass(frozen=True)
class ByBudget:
    """Deals samples to as few micro-batches as the budget allows, with even loads, see `fill_bins`.

    `replicas`: number of replicas of the text module. `encoders`: shapes by name. `text_work`: predicted flops of a
    sample of so many tokens. `end`: number of samples in the stream; None for an infinite one.
    """

    replicas: int
    step_samples: int
    budget: Budget
    encoders: Mapping[str, ItemShape]
    text_work: Callable[[int], float]
    end: int | None = None

    def step(self, step: int) -> range:
        """See `BatchShape.step`."""
        return samples_of(step, self.step_samples, self.end)

    def foreseen(self, step: int, replica: int) -> None:
        """Return None: the samples of a replica depend on the lengths of all."""
        return

    def deal(self, step: int, samples: Mapping[int, PackMetadata]) -> Deal:
        """Deals out `samples` of `step`, skipped ones excluded. Raises `ValueError` if one exceeds the budget alone."""
        numbers = sorted(samples)
        ordered = [samples[number] for number in numbers]
        sizes = [[sample.tokens, *sample.patches(self.encoders)] for sample in ordered]
        patches = UNLIMITED if self.budget.patches is None else self.budget.patches
        costs = [int(sample.cost(self.encoders)) // FLOPS for sample in ordered]
        table = np.array(sizes, np.int64).reshape(len(numbers), 1 + len(self.encoders))
        budgets = [self.budget.tokens, *(patches for _ in self.encoders)]
        bins = fill_bins(table, budgets, np.array(costs, np.int64), self.replicas)
        work = [sum(self.text_work(ordered[i].tokens) for i in items) for items in bins]
        return [
            [[numbers[i] for i in bins[number]] for number in of_round] for of_round in into_rounds(work, self.replicas)
        ]

    def once(self, samples: int) -> ByBudget:
        """See `BatchShape.once`."""
        return replace(self, end=samples)


Dealing: TypeAlias = InOrder | ByBudget
"""Deals out the samples of a step. Frozen, the same on all ranks."""


def dealing_of(job: JobSpec) -> Dealing:
    """The dealing that a job's configuration selects."""
    if job.budget is None:
        return InOrder(*astuple(job.batch))
    samples = job.config.train.global_batch_size
    return ByBudget(job.batch.replicas, samples, job.budget, job.shapes.encoders, job.text_work)
