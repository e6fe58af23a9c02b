"""The integers that ranks tell each other of samples and packs, from which all of them plan a step alike.

A *pack* is the micro-batch of one replica of the text module.

Which samples a replica of the text module trains in which micro-batch. Pure: all ranks deal for themselves, alike.

A step is the same `samples` of the stream in every layout; how they are dealt changes rounding only, since losses are
summed over all tokens of a step (docs/gradients.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from megatron_hetero.data.balance import UNLIMITED, fill_bins, into_rounds
from megatron_hetero.data.packing import TokenizedSample, check_rows
from megatron_hetero.job import BatchShape, Budget, JobSpec, samples_of
from megatron_hetero.models.items.types import ItemShape, Size


class PieceSource(NamedTuple):
    """Where a piece comes from: the number of the sample in the stream, of the item in it, and of the piece in that."""

    sample: int
    item: int
    piece: int


@dataclass(frozen=True)
class Pieces:
    """The pieces of a pack that are for one encoder. Hashable.

    `counts`: pieces of each sample; `sizes`: of all pieces. `places`: the bytes of int64 [rows], where rows go in the
    pack.
    """

    counts: tuple[int, ...]
    sizes: tuple[Size, ...]
    places: bytes

    @property
    def positions(self) -> np.ndarray:
        """Where rows go in the pack, int64 [rows]."""
        return np.frombuffer(self.places, np.int64)


@dataclass(frozen=True)
class PackShape:
    """What decides how a pack is cut: the tokens of each sample, and the pieces of each encoder, in the order of the
    encoders. Hashable.
    """

    lengths: tuple[int, ...]
    pieces: tuple[Pieces, ...]


@dataclass(frozen=True)
class PackMetadata:
    """What other ranks need to know of a pack: its shape, where the pieces of each encoder come from, and the number of
    its supervised tokens.
    """

    shape: PackShape
    sources: tuple[tuple[PieceSource, ...], ...]
    supervised: int

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.shape.lengths)


@dataclass(frozen=True)
class SampleMetadata:
    """What other ranks need to know of a sample: its tokens, how many of them are supervised, the number of its items,
    by encoder its `pieces` (as a pack of this sample alone has them), and by encoder the `sources` of these: item, and
    piece of the item.
    """

    tokens: int
    supervised: int
    items: int
    pieces: tuple[Pieces, ...]
    sources: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, sample: TokenizedSample, encoders: Sequence[str]) -> SampleMetadata:
        """The metadata of `sample` in a model with these encoders. Raises `UserError` where its items do not fit its
        tokens.
        """
        check_rows(sample)
        chosen = [np.array([name == encoder for name in sample.record.encoders], bool) for encoder in encoders]
        sources = [
            tuple((k, piece) for k in np.flatnonzero(mine).tolist() for piece in range(len(sample.pieces[k])))
            for mine in chosen
        ]
        return cls(
            tokens=len(sample),
            # A label is the token that follows.
            supervised=int(sample.supervised[1:].sum()),
            items=len(sample.sizes),
            pieces=tuple(
                Pieces(
                    counts=(len(mine),),
                    sizes=tuple(sample.pieces[k][piece] for k, piece in mine),
                    places=sample.row_positions[np.repeat(of_encoder, sample.rows)].astype(np.int64).tobytes(),
                )
                for of_encoder, mine in zip(chosen, sources, strict=True)
            ),
            sources=tuple(sources),
        )

    def patches(self, encoders: Mapping[str, ItemShape]) -> list[int]:
        """Patches of its items, for each of the encoders."""
        shapes = zip(encoders.values(), self.pieces, strict=True)
        return [sum(map(shape.rows, pieces.sizes)) * shape.unit for shape, pieces in shapes]

    def cost(self, encoders: Mapping[str, ItemShape]) -> float:
        """Predicted forward flops of all encoders."""
        return sum(
            shape.cost(size)
            for shape, pieces in zip(encoders.values(), self.pieces, strict=True)
            for size in pieces.sizes
        )


def pack_metadata(numbers: Sequence[int], samples: Mapping[int, SampleMetadata], encoders: int) -> PackMetadata:
    """The metadata of a pack of the samples of these `numbers` in the stream. `encoders`: their number."""
    of_pack = [samples[number] for number in numbers]
    starts = np.cumsum([0, *(sample.tokens for sample in of_pack)])
    pieces = tuple(
        Pieces(
            counts=tuple(count for sample in of_pack for count in sample.pieces[i].counts),
            sizes=tuple(size for sample in of_pack for size in sample.pieces[i].sizes),
            places=b"".join(
                (sample.pieces[i].positions + start).tobytes()
                for start, sample in zip(starts[:-1], of_pack, strict=True)
            ),
        )
        for i in range(encoders)
    )
    sources = tuple(
        tuple(
            PieceSource(number, *source)
            for number, sample in zip(numbers, of_pack, strict=True)
            for source in sample.sources[i]
        )
        for i in range(encoders)
    )
    shape = PackShape(tuple(sample.tokens for sample in of_pack), pieces)
    return PackMetadata(shape, sources, sum(sample.supervised for sample in of_pack))


Deal = Sequence[Sequence[Sequence[int]]]
"""For each micro-batch and replica the numbers of its samples, ascending; at least one micro-batch."""
FLOPS = 1 << 20
"""Unit of costs: integers whose sums are exact in float64."""


class Dealing(Protocol):
    """How the samples of a step are dealt out."""

    @property
    def step_samples(self) -> int:
        """Samples of one step, over all replicas: the global batch."""
        ...

    @property
    def budget(self) -> Budget | None:
        """What bounds a micro-batch, if not a number of samples."""
        ...

    def step(self, step: int) -> range:
        """The samples of `step` (from 1): their numbers in the stream (from 0). Fewer, or none, where it ends."""
        ...

    def foreseen(self, step: int, replica: int) -> Sequence[int] | None:
        """The samples of a replica in `step`; None where these depend on their lengths."""
        ...

    def deal(self, step: int, samples: Mapping[int, SampleMetadata]) -> Deal:
        """Deal out those of `step`. `samples`: without those that are skipped."""
        ...

    def once(self, samples: int) -> Dealing:
        """The same for a stream of `samples` samples that is read once."""
        ...


def dealing_of(job: JobSpec) -> Dealing:
    """As the job's configuration has it."""
    if job.budget is None:
        return InOrder(job.batch)
    samples = job.config.train.global_batch_size
    return ByBudget(job.batch.replicas, samples, job.budget, job.shapes.encoders, job.text_work)


@dataclass(frozen=True)
class InOrder:
    """As many samples in every micro-batch, in the order of the stream."""

    batch: BatchShape

    @property
    def step_samples(self) -> int:
        """Samples of one step."""
        return self.batch.step_samples

    @property
    def budget(self) -> None:
        """There is none."""
        return

    def step(self, step: int) -> range:
        """The samples of `step`."""
        return self.batch.step(step)

    def foreseen(self, step: int, replica: int) -> list[int]:
        """The samples of a replica in `step`."""
        return [n for m in range(self.batch.micro_batches) for n in self.batch.numbers(step, replica, m)]

    def deal(self, step: int, samples: Mapping[int, SampleMetadata]) -> Deal:
        """Where samples are skipped, packs are shorter."""
        return [
            [[n for n in self.batch.numbers(step, r, m) if n in samples] for r in range(self.batch.replicas)]
            for m in range(self.batch.micro_batches)
        ]

    def once(self, samples: int) -> InOrder:
        """In at most as many micro-batches a step."""
        return InOrder(self.batch.once(samples))


@dataclass(frozen=True)
class ByBudget:
    """As few micro-batches as the budget allows, with as even loads as can be found, see `fill_bins`.

    `replicas`: of the text module. `encoders`: by name. `text_work`: predicted flops of a sample of so many tokens.
    `end`: where the stream of samples ends; None: it has no end.
    """

    replicas: int
    step_samples: int
    budget: Budget
    encoders: Mapping[str, ItemShape]
    text_work: Callable[[int], float]
    end: int | None = None

    def step(self, step: int) -> range:
        """The samples of `step`."""
        return samples_of(step, self.step_samples, self.end)

    def foreseen(self, step: int, replica: int) -> None:
        """Lengths decide."""
        return

    def deal(self, step: int, samples: Mapping[int, SampleMetadata]) -> Deal:
        """Raises `ValueError` for a sample that exceeds the budget by itself."""
        numbers = sorted(samples)
        everything = [samples[number] for number in numbers]
        sizes = [[sample.tokens, *sample.patches(self.encoders)] for sample in everything]
        patches = UNLIMITED if self.budget.patches is None else self.budget.patches
        costs = [int(sample.cost(self.encoders)) // FLOPS for sample in everything]
        table = np.array(sizes, np.int64).reshape(len(numbers), 1 + len(self.encoders))
        budgets = [self.budget.tokens, *(patches for _ in self.encoders)]
        bins = fill_bins(table, budgets, np.array(costs, np.int64), self.replicas)
        work = [sum(self.text_work(everything[i].tokens) for i in items) for items in bins]
        return [
            [[numbers[i] for i in bins[number]] for number in of_round] for of_round in into_rounds(work, self.replicas)
        ]

    def once(self, samples: int) -> ByBudget:
        """With the same budget."""
        return replace(self, end=samples)
