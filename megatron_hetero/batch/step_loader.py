"""Reads, tokenises, plans and decodes the next step while the current one runs.

Per step and rank, on one background thread with a pool of `data.workers` threads below it:

  1. tokenise the samples of this rank's text replica, and pack them;
  2. exchange the packs' integers (and any error) among all ranks, once, on the host;
  3. plan each micro-batch: who decodes and encodes what, which rows go where;
  4. decode this rank's share of its encoder replica's images, each once in the replica;
  5. exchange any error among all ranks, and send each rank of the replica the patches that it embeds.

An error of any rank reaches all ranks in the next exchange, so that all stop with the same message.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_hetero.batch.step_plan import (
    Images,
    ImageSource,
    MicroBatchPlan,
    PackMetadata,
    PackShape,
    PixelPlan,
    StepPlanner,
)
from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.data.items import Size
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.packing import PackedBatch, check_length, check_text, pack
from megatron_hetero.data.sample import TokenizedSample
from megatron_hetero.distributed.platform import CPU
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import SharedError, UserError
from megatron_hetero.job import BatchShape
from megatron_hetero.names import TEXT
from megatron_hetero.processor.processor import Processor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch on the host: this rank's pack, its plan, and the pixels of the patches that it embeds.

    `pack`: None on ranks outside the text module. `pixels`: by encoder, fp32 [patches of this rank, padding included,
    elements of a patch]; not of encoders for which nobody has an image, nor outside an encoder's first stage.
    """

    pack: PackedBatch | None
    plan: MicroBatchPlan
    pixels: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class StepBatch:
    """One step on the host.

    Over all replicas: `supervised` and `tokens`, `sizes`, by encoder those of its images, `sample_lengths`, the
    tokens of each sample, `encoder_loads`, for each micro-batch and encoder the predicted forward flops of each
    replica, and `skipped`, how many samples were left out as too long.
    """

    micro_batches: tuple[MicroBatch, ...]
    supervised: int
    tokens: int
    sizes: Mapping[str, tuple[Size, ...]]
    sample_lengths: tuple[int, ...]
    encoder_loads: tuple[tuple[float, ...], ...]
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class StepLoader:
    """Makes `StepBatch`es for one rank. `what` messages call them."""

    mixture: Mixture
    processor: Processor
    topology: Topology
    planner: StepPlanner
    batch: BatchShape
    max_seq_length: int
    too_long: Any
    what: str = "step"

    def steps(self, first: int, last: int, workers: int) -> Iterable[StepBatch]:
        """The batches of steps `first` to `last`. With `workers` of 0 everything runs in the calling thread.

        Raises `SharedError` for data that cannot be used.
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
        by_rank = self._exchange(step, [metadata for _, metadata in packs or []], error)
        layout = self.topology.layouts[TEXT]
        first_ranks = [layout.rank_at(dp=replica) for replica in range(layout.dp)]
        gathered = [[by_rank[rank][m] for rank in first_ranks] for m in range(self.batch.micro_batches)]
        plans = [self.planner.plan([pack.shape for pack in packs_of], m) for m, packs_of in enumerate(gathered)]
        decoded, error = _attempt(lambda: self._decode(plans, gathered, run))
        _require_one_plan(f"{self.what} {step}", self._exchange(step, [_digests(plan) for plan in plans], error))
        pixels = [
            {name: self._share_out(name, part, patches.get(name, [])) for name, part in plan.pixels.items()}
            for plan, patches in zip(plans, decoded or [], strict=True)
        ]
        own = [packed for packed, _ in packs] if packs else [None] * len(plans)
        everything = [pack for packs_of in gathered for pack in packs_of]
        return StepBatch(
            micro_batches=tuple(MicroBatch(*parts) for parts in zip(own, plans, pixels, strict=True)),
            supervised=sum(pack.supervised for pack in everything),
            tokens=sum(pack.tokens for pack in everything),
            sizes={
                name: tuple(size for pack in everything for size in pack.shape.images[i].sizes)
                for i, name in enumerate(self.planner.encoders)
            },
            sample_lengths=tuple(n for pack in everything for n in pack.shape.lengths),
            encoder_loads=tuple(loads for plan in plans for loads in plan.loads.values()),
            skipped=self.batch.count(step) - sum(len(pack.shape.lengths) for pack in everything),
        )

    def _packs(self, step: int, run: Callable[..., Iterable[Any]]) -> list[tuple[PackedBatch, PackMetadata]]:
        layout = self.topology.layouts[TEXT]
        if self.topology.rank not in layout:
            return []
        replica = layout.replica_of(self.topology.rank)
        numbers = [self.batch.numbers(step, replica, m) for m in range(self.batch.micro_batches)]
        tokenised = iter(run(self._tokenise, [n for micro_batch in numbers for n in micro_batch]))
        packs = []
        for micro_batch in numbers:
            samples = [(n, sample) for n, sample in zip(micro_batch, tokenised, strict=False) if sample is not None]
            sources = [ImageSource(n, place) for n, sample in samples for place in range(len(sample.sizes))]
            packed = pack([sample for _, sample in samples])
            packs.append((packed, pack_metadata(packed, sources, list(self.planner.encoders))))
        return packs

    def _tokenise(self, number: int) -> TokenizedSample | None:
        record = self.mixture[number]
        if not check_text(record, self.max_seq_length, self.too_long):
            return None
        sample = self.processor.tokenize(record)
        return sample if check_length(sample, self.max_seq_length, self.too_long) else None

    def _decode(
        self,
        plans: Sequence[MicroBatchPlan],
        gathered: Sequence[Sequence[PackMetadata]],
        run: Callable[..., Iterable[Any]],
    ) -> list[dict[str, list[np.ndarray]]]:
        """For each micro-batch, by encoder, the patches of the images that this rank decodes, fp32 [patches,
        elements].
        """
        wanted = []
        for m, (plan, packs) in enumerate(zip(plans, gathered, strict=True)):
            for i, name in enumerate(self.planner.encoders):
                images = [pair for p in packs for pair in zip(p.sources[i], p.shape.images[i].sizes, strict=True)]
                wanted += [(m, name, *images[k]) for k in (plan.pixels[name].decodes if name in plan.pixels else ())]
        decoded: list[dict[str, list[np.ndarray]]] = [{} for _ in plans]
        for (m, name, *_), patches in zip(wanted, run(self._patches, wanted), strict=True):
            decoded[m].setdefault(name, []).append(patches)
        return decoded

    def _patches(self, wanted: tuple[int, str, ImageSource, Size]) -> np.ndarray:
        *_, source, size = wanted
        return self.processor.patches(self.mixture[source.sample], source.place, size)

    def _share_out(self, encoder: str, plan: PixelPlan, decoded: list[np.ndarray]) -> torch.Tensor:
        """Patches of the images that this rank decoded to those that it embeds, with zeros for padding after them."""
        communicator = self._pixels[encoder]
        elements = communicator.width // self.planner.encoders[encoder].unit
        own = decoded[0] if len(decoded) == 1 else np.concatenate([np.zeros((0, elements), np.float32), *decoded])
        units = torch.from_numpy(own).view(-1, communicator.width)
        embedded = communicator.forward(load_plan(plan.exchange, CPU), units).view(-1, elements)
        padded = torch.nn.functional.pad(embedded, (0, 0, 0, plan.padding)) if plan.padding else embedded
        return padded.pin_memory() if self.topology.platform.is_cuda else padded

    @cached_property
    def _pixels(self) -> dict[str, BoundaryCommunicator]:
        """By encoder, between the hosts of this rank's replica of it: a row is the patches of one unit."""
        return {
            name: BoundaryCommunicator(group, CPU, self.planner.encoders[name].unit_width, torch.float32, check=False)
            for name, group in self.topology.host_replicas.items()
        }

    def _exchange(self, step: int, mine: Any, error: str | None) -> list[Any]:
        """Everybody's `mine`, by rank. Raises the first rank's error on every rank, a `SharedError`."""
        gathered: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(gathered, (mine, error), group=self.topology.host)
        for rank, (_, problem) in enumerate(gathered):
            if problem is not None:
                raise SharedError(f"{self.what} {step}, data of rank {rank}: {problem}")
        return [content for content, _ in gathered]


def pack_metadata(packed: PackedBatch, sources: Sequence[ImageSource], encoders: Sequence[str]) -> PackMetadata:
    """What other ranks need to know of `packed`. `sources`: of all its images, in turn."""
    chosen = [np.array([name == encoder for name in packed.encoders], bool) for encoder in encoders]
    shape = PackShape(
        lengths=tuple(np.diff(packed.cu_seqlens).tolist()), images=tuple(_images_of(packed, mine) for mine in chosen)
    )
    of_encoders = tuple(tuple(source for source, own in zip(sources, mine, strict=True) if own) for mine in chosen)
    return PackMetadata(shape, of_encoders, packed.supervised_tokens)


def _images_of(packed: PackedBatch, mine: np.ndarray) -> Images:
    """Those images of a pack that are chosen: bool [images]."""
    places, starts = packed.image_positions, packed.cu_seqlens
    first_places = places[np.cumsum(packed.rows) - packed.rows]
    sample = np.searchsorted(starts[1:], first_places[mine], side="right")
    return Images(
        counts=tuple(np.bincount(sample, minlength=len(starts) - 1).tolist()),
        sizes=tuple(size for size, chosen in zip(packed.sizes, mine, strict=True) if chosen),
        places=places[np.repeat(mine, packed.rows)].astype(np.int64).tobytes(),
    )


def _digests(plan: MicroBatchPlan) -> dict[str, int]:
    return {str(edge): part.digest for edge, part in plan.boundaries.items()}


def _require_one_plan(step: str, by_rank: Sequence[Sequence[Mapping[str, int]]]) -> None:
    """Check that all ranks planned the same crossings. `by_rank`: for each micro-batch the digests of the plans of the
    boundaries in which a rank takes part, by edge. `step`: in words. Raises `RuntimeError` on every rank.
    """
    for micro_batch, digests in enumerate(zip(*by_rank, strict=True)):
        for edge in {name: None for of_rank in digests for name in of_rank}:
            found = {of_rank[edge] for of_rank in digests if edge in of_rank}
            if len(found) > 1:
                raise RuntimeError(
                    f"{step}, micro-batch {micro_batch}: found {len(found)} different plans of the boundary "
                    f"{edge}, expected one, because every rank plans from the same integers; run the same versions "
                    "of program and NumPy with the same model on all nodes"
                )


def _parallel(pool: Executor) -> Callable[..., Iterable[Any]]:
    return lambda function, items: pool.map(function, items)


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result of `work`, or what went wrong: the message of what the user can mend, or the trace of what is ours.
    All ranks learn of either, so that none is waited for.
    """
    try:
        return work(), None
    except UserError as error:
        return None, str(error)
    except Exception:
        return None, f"an error of the program's own:\n{traceback.format_exc()}"
