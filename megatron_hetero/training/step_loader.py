"""Reads, tokenises, plans and decodes the next step while the current one runs.

Per step and rank, on one background thread with a pool of `data.workers` threads below it:

  1. tokenise the samples of this rank's text replica, and pack them;
  2. tell all ranks the packs' integers (and any error), with one exchange on the host;
  3. plan each micro-batch: who encodes which windows, which rows go where;
  4. decode the images that this rank encodes, and no others.

An error of any rank reaches all ranks in the next exchange, so that all stop with the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.packing import IGNORED, PackedBatch, check_length, pack
from megatron_hetero.data.processing import Processor, TokenizedSample
from megatron_hetero.errors import UserError
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.topology import Topology
from megatron_hetero.training.step_plan import (
    EncoderShare,
    ImageSource,
    MicroBatchPlan,
    PackMetadata,
    plan_micro_batch,
)

T = TypeVar("T")


@dataclass(frozen=True)
class BatchShape:
    """How a step's samples are shared out: `replicas` of the text module, each with `micro_batches` of `samples`."""

    replicas: int
    micro_batches: int
    samples: int

    @property
    def step_samples(self) -> int:
        """Samples of one step: the global batch."""
        return self.replicas * self.micro_batches * self.samples

    def numbers(self, step: int, replica: int, micro_batch: int) -> range:
        """Samples of the stream (from 0) that a replica trains in a micro-batch of `step` (from 1)."""
        first = (step - 1) * self.step_samples + (micro_batch * self.replicas + replica) * self.samples
        return range(first, first + self.samples)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch on the host: this rank's pack, its plan, and the pixels of the patches that it embeds."""

    pack: PackedBatch
    plan: MicroBatchPlan
    pixels: np.ndarray


@dataclass(frozen=True)
class StepBatch:
    """One step on the host.

    Over all replicas: `supervised` and `tokens` (padding not counted), `grids`, the patches of each image, and
    `sample_lengths`, the tokens of each sample.
    """

    micro_batches: tuple[MicroBatch, ...]
    supervised: int
    tokens: int
    grids: tuple[tuple[int, int, int], ...]
    sample_lengths: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StepLoader:
    """Makes `StepBatch`es for one rank. `pad_multiple`: what padded packs are a multiple of."""

    mixture: Mixture
    processor: Processor
    topology: Topology
    shape: VisionShape
    batch: BatchShape
    sequence_parallel: dict[str, bool]
    max_seq_length: int
    too_long: Any
    pad_multiple: int
    pad_token_id: int

    def steps(self, first: int, last: int, workers: int) -> Iterable[StepBatch]:
        """The batches of steps `first` to `last`. With `workers` of 0 everything runs in the calling thread.

        Raises `UserError`, on every rank, for data that cannot be used.
        """
        if workers == 0:
            for step in range(first, last + 1):
                yield self.load(step, map)
            return
        with ThreadPoolExecutor(1, "step-loader") as ahead, ThreadPoolExecutor(workers, "worker") as pool:
            coming: Future[StepBatch] = ahead.submit(self.load, first, _parallel(pool))
            for step in range(first, last + 1):
                batch = coming.result()
                if step < last:
                    coming = ahead.submit(self.load, step + 1, _parallel(pool))
                yield batch

    def load(self, step: int, run: Callable[..., Iterable[Any]]) -> StepBatch:
        """Make the batch of `step` (from 1), with `run` in place of `map` where work can be done side by side."""
        packs, error = _attempt(lambda: self._packs(step, run))
        metadata = [(pack_metadata(*p), p[0].cu_seqlens) for p in packs or []]
        by_rank = self._exchange(step, metadata, error)
        layout = self.topology.layouts["text"]
        first_ranks = [layout.rank_at(dp=replica) for replica in range(layout.dp)]
        told = [[by_rank[rank][m] for rank in first_ranks] for m in range(self.batch.micro_batches)]
        plans = [self._plan([pack for pack, _ in packs_of]) for packs_of in told]
        pixels, error = _attempt(lambda: list(run(self._pixels, [plan.encoder for plan in plans])))
        self._exchange(step, [], error)
        micro_batches = tuple(
            MicroBatch(p[0], plan, px) for p, plan, px in zip(packs or [], plans, pixels or [], strict=True)
        )
        everything = [pack for packs_of in told for pack, _ in packs_of]
        return StepBatch(
            micro_batches=micro_batches,
            supervised=sum(pack.supervised for pack in everything),
            tokens=sum(pack.length for pack in everything),
            grids=tuple(grid for pack in everything for grid in pack.grids),
            sample_lengths=tuple(int(n) for packs_of in told for _, cu in packs_of for n in np.diff(cu)),
        )

    def _packs(self, step: int, run: Callable[..., Iterable[Any]]) -> list[tuple[PackedBatch, list[ImageSource]]]:
        replica = self.topology.layouts["text"].replica_of(self.topology.rank)
        numbers = [self.batch.numbers(step, replica, m) for m in range(self.batch.micro_batches)]
        tokenised = iter(run(self._tokenise, [n for micro_batch in numbers for n in micro_batch]))
        packs = []
        for micro_batch in numbers:
            samples = [(n, sample) for n, sample in zip(micro_batch, tokenised, strict=False) if sample is not None]
            sources = [ImageSource(n, place) for n, sample in samples for place in range(len(sample.grids))]
            packs.append((pack([s for _, s in samples], self.pad_multiple, self.pad_token_id), sources))
        return packs

    def _tokenise(self, number: int) -> TokenizedSample | None:
        sample = self.processor.tokenize(self.mixture[number])
        return sample if check_length(sample, self.max_seq_length, self.too_long) else None

    def _plan(self, packs: Sequence[PackMetadata]) -> MicroBatchPlan:
        topology = self.topology
        return plan_micro_batch(
            packs, self.shape, topology.layouts, self.sequence_parallel, topology.rank, topology.world_size
        )

    def _pixels(self, share: EncoderShare | None) -> np.ndarray:
        """Float32 [patches of this rank, padding included, elements of a patch]."""
        width = self.shape.patch_elements
        if share is None:
            return np.zeros((0, width), np.float32)
        blocks = [
            self.processor.patches(self.mixture[part.source.sample], part.source.place, part.grid)[part.patches]
            for part in share.parts
        ]
        return np.concatenate([*blocks, np.zeros((share.padding, width), np.float32)])

    def _exchange(self, step: int, mine: Any, error: str | None) -> list[Any]:
        """Everybody's `mine`, by rank. Raises the first rank's error on every rank."""
        told: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(told, (mine, error), group=self.topology.host)
        for rank, (_, problem) in enumerate(told):
            if problem is not None:
                raise UserError(f"step {step}, data of rank {rank}: {problem}")
        return [content for content, _ in told]


def pack_metadata(packed: PackedBatch, sources: Sequence[ImageSource]) -> PackMetadata:
    """What other ranks need to know of `packed`."""
    return PackMetadata(
        length=packed.length,
        padded_length=len(packed.input_ids),
        supervised=packed.supervised_tokens,
        grids=tuple((int(t), int(h), int(w)) for t, h, w in packed.grids),
        sources=tuple(sources),
        positions=packed.image_positions,
    )


def supervised_positions(packed: PackedBatch) -> np.ndarray:
    """Positions of the pack that predict something, int64 [supervised tokens]."""
    return np.flatnonzero(packed.labels != IGNORED)


def _parallel(pool: Executor) -> Callable[..., Iterable[Any]]:
    return lambda function, items: pool.map(function, items)


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of `work`, or the message of what the user can mend. Other errors are ours, and fly."""
    try:
        return work(), None
    except UserError as error:
        return None, str(error)
