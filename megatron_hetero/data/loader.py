"""Loads the batch of the next step while the current step runs.

Each rank performs these stages for each step, on one background thread with a pool of `data.workers` threads, which may
run 1, 4 and 5 in as many processes (`worker_process`):

  1. tokenise samples: the samples of this rank's text replica if they do not depend on lengths, else an equal share of
     all samples;
  2. exchange the samples' integers (and any error) among all ranks, once, on the host;
  3. deal the samples to text replicas and micro-batches, and compute what this rank decodes, encodes and reads in each,
     the calls of encoders, and the plans by which rows cross between modules;
  4. tokenise the other samples of this rank's replica, and pack them;
  5. decode this rank's pieces of items: each piece is decoded by one rank of its encoder replica;
  6. exchange any error among all ranks, and send each rank of the replica the patches that it embeds.

With `data.bad_records: skip` a bad record is not an error. Ranks report it in 2, or in 6 if only decoding reveals it;
then all ranks repeat 3 to 6 without its sample, reusing what they have read.

An error of any rank reaches all ranks in the next exchange, so that all stop with the same message.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.base.errors import BadRecord, BadSample, UserError
from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.plan import RankPlan
from megatron_hetero.boundary.routes import is_identity
from megatron_hetero.data.dealing import Deal, Dealing, dealing_of
from megatron_hetero.data.device import encoder_input, micro_batch_inputs, text_input
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.packing import PackMetadata, SampleLimits, TokenizedSample
from megatron_hetero.data.partition import EncoderCall, Packs, StepPartitioner
from megatron_hetero.data.processor import Processor, ReaderProcesses
from megatron_hetero.data.token_ids import modules_with_dropout, patch_ids
from megatron_hetero.groups.collective import on_every, require_same_facts
from megatron_hetero.groups.platform import CPU
from megatron_hetero.groups.topology import Topology
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.items.types import Piece, Size
from megatron_hetero.models.layers.dropout import TokenIds
from megatron_hetero.models.stages import EncoderInput, TextInput
from megatron_hetero.schedule.contract import MicroBatchInputs

T = TypeVar("T")


Run = Callable[..., Iterable[Any]]
"""`map`, or a parallel equivalent of it."""


READ_AHEAD_STEPS = 4
"""Formats that can read ahead receive the samples of a step this number of steps before it is loaded."""


@dataclass(frozen=True)
class StepBatch:
    """The batch of one step on the host: this rank's inputs, and statistics over all replicas.

    Attributes:
        micro_batches: this rank's inputs, with boundary plans that `to_device` loads.
        supervised: number of supervised tokens.
        tokens: number of tokens.
        sizes: by encoder, the sizes of its pieces.
        sample_lengths: number of tokens of each sample.
        encoder_loads: for each call of an encoder, the predicted forward flops of each replica.
        text_loads: for each micro-batch, the predicted forward flops of each replica of the text module.
        skipped: number of samples left out because they are too long.
        bad: samples left out because their records are bad.
    """

    micro_batches: tuple[MicroBatchInputs, ...]
    supervised: int
    tokens: int
    sizes: Mapping[str, tuple[Size, ...]]
    sample_lengths: tuple[int, ...]
    encoder_loads: tuple[tuple[float, ...], ...]
    text_loads: tuple[tuple[float, ...], ...] = ()
    skipped: int = 0
    bad: tuple[BadSample, ...] = ()


class _Read(NamedTuple):
    """Samples and patches that a rank has read so far for a step.

    `run`: see `StepLoader.load`. `samples`: samples by number; None for samples skipped as too long. `patches`: patches
    by number of the sample, number of the item in the sample, and pieces.
    """

    run: Run
    samples: dict[int, TokenizedSample | BadSample | None]
    patches: dict[tuple[int, int, tuple[Piece, ...]], np.ndarray | BadSample]


@dataclass(frozen=True, eq=False)
class StepLoader:
    """Loads `StepBatch`es for one rank.

    `what`: name of a step in messages. `trains`: whether experts are balanced and adapters have dropout.
    """

    job: JobSpec
    mixture: Mixture
    reader: Processor | ReaderProcesses
    topology: Topology
    partitioner: StepPartitioner
    dealing: Dealing
    limits: SampleLimits
    what: str = "step"
    trains: bool = True

    @classmethod
    def of(cls, job: JobSpec, mixture: Mixture, processor: Processor, topology: Topology) -> StepLoader:
        """Return the loader of a job, which reads in worker processes if `data.worker_type` is `process`."""
        data, patches = job.config.data, None if job.budget is None else job.budget.patches
        reader = ReaderProcesses(processor, data.workers) if data.worker_type == "process" else processor
        limits = SampleLimits(data.max_seq_length, patches, data.too_long)
        return cls(job, mixture, reader, topology, StepPartitioner.of(job, topology.rank), dealing_of(job), limits)

    def of_held_out(self, mixtures: Mapping[str, Mixture]) -> dict[str, StepLoader]:
        """Return a loader of each held-out data set, which reads each sample once, for forward passes only. The loaders
        share a partitioner and its cache.
        """
        partitioner = replace(self.partitioner, runs=partial(self.job.encoder_calls, evaluation=True))
        return {
            name: replace(
                self,
                mixture=mixture,
                partitioner=partitioner,
                dealing=self.dealing.once(len(mixture)),
                what=f"evaluation of {name}, batch",
                trains=False,
            )
            for name, mixture in mixtures.items()
        }

    def steps(self, first: int, last: int, workers: int) -> Iterable[StepBatch]:
        """Yield the batches of steps `first` to `last`. With `workers` of 0 everything runs in the calling thread.

        Raises `SharedError` for unusable data.
        """
        if workers == 0:
            for step in range(first, last + 1):
                yield self.load(step, map)
            return
        with ThreadPoolExecutor(1, "step-loader") as ahead, ThreadPoolExecutor(workers, "worker") as pool:
            following: Future[StepBatch] = ahead.submit(self.load, first, _parallel(pool))
            for step in range(first, last + 1):
                batch = following.result()
                if step < last:
                    following = ahead.submit(self.load, step + 1, _parallel(pool))
                yield batch

    def load(self, step: int, run: Run) -> StepBatch:
        """Load the batch of `step` (from 1). `run` maps functions over samples and items."""
        self.mixture.read_ahead(self._samples_to_read(step + READ_AHEAD_STEPS)[0])
        early, reported = self._samples_to_read(step)
        read = _Read(run, {}, {})
        by_rank = self._exchange(f"{self.what} {step}", lambda: self._report(early, reported, read))
        return self._load(step, read, dict(sorted(item for reports in by_rank for item in reports.items())))

    def _load(self, step: int, read: _Read, reported: Mapping[int, PackMetadata | BadSample]) -> StepBatch:
        """Load the batch of `step` from the good samples among `reported`."""
        where, encoders = f"{self.what} {step}", self.partitioner.encoders
        samples = {n: each for n, each in reported.items() if isinstance(each, PackMetadata)}
        deal = self.dealing.deal(step, samples)
        packs = [
            tuple(PackMetadata.joined([samples[n] for n in numbers], len(encoders)) for numbers in dealt)
            for dealt in deal
        ]
        calls = self.partitioner.encoder_calls(packs)
        texts, decoded = list[TextInput | None](), list[list[np.ndarray]]()

        def read_rest() -> tuple[dict[str, str], dict[int, BadSample]]:
            texts.extend(self._texts(deal, packs, samples, read))
            decoded.extend(self._decode(calls, packs, read))
            bad = {n: each for (n, *_), each in read.patches.items() if isinstance(each, BadSample)}
            return _digests(calls, deal), bad

        fix = "run the same versions of program and NumPy with the same model on all nodes"
        because, ranks = "every rank computes shards from the same integers", range(self.topology.world_size)
        by_rank = self._exchange(where, read_rest)
        require_same_facts(where, [facts for facts, _ in by_rank], ranks, fix, because, absent=None)
        bad = {n: each for _, bad_of_rank in by_rank for n, each in bad_of_rank.items() if n in samples}
        if bad:
            return self._load(step, read, {**reported, **bad})
        chunks = [self._encoder_inputs(call, each, packs) for call, each in zip(calls, decoded, strict=True)]
        every_pack = [pack for packs_of_one in packs for pack in packs_of_one]
        return StepBatch(
            micro_batches=micro_batch_inputs(texts, calls, chunks),
            supervised=sum(pack.supervised for pack in every_pack),
            tokens=sum(pack.tokens for pack in every_pack),
            sizes={
                name: tuple(size for pack in every_pack for size in pack.sizes[i]) for i, name in enumerate(encoders)
            },
            sample_lengths=tuple(n for pack in every_pack for n in pack.lengths),
            encoder_loads=tuple(call.everyone.loads for call in calls),
            text_loads=tuple(
                tuple(float(sum(map(self.job.text_work, pack.lengths))) for pack in packs_of_one)
                for packs_of_one in packs
            ),
            skipped=len(self.dealing.step(step)) - len(reported),
            bad=tuple(each for each in reported.values() if isinstance(each, BadSample)),
        )

    def _encoder_inputs(
        self, call: EncoderCall, decoded: Sequence[np.ndarray], packs: Sequence[Packs]
    ) -> list[EncoderInput]:
        """Send the patches that this rank `decoded` to the ranks that embed them. Returns the encoder's input for each
        chunk of a call; empty outside the encoder.
        """
        patches: Sequence[Tensor | None] = [None] * len(call.shards)
        if call.exchange is not None:
            patches = self._exchange_patches(call, call.exchange, decoded)
        ids: Sequence[TokenIds | None] = [None] * len(call.shards)
        if call.encoder in self._dropout and call.shards:
            rank, sources = self.topology.rank, np.concatenate([each for each, _ in self._pieces(call, packs)])
            ids = [patch_ids(s, c, rank, sources) for s, c in zip(call.shards, call.everyone.chunks, strict=True)]
        return [encoder_input(*chunk) for chunk in zip(call.shards, patches, ids, strict=True)]

    @cached_property
    def _dropout(self) -> tuple[str, ...]:
        """Names of the modules whose tokens get ids for dropout."""
        return modules_with_dropout(self.job) if self.trains else ()

    @cached_property
    def _replica(self) -> int | None:
        """This rank's replica of the text module; None outside the text module."""
        layout = self.topology.layouts[TEXT]
        return layout.replica_of(self.topology.rank) if self.topology.rank in layout else None

    def _samples_to_read(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the samples that this rank reads before lengths are known, and the samples that it reports to all
        ranks. Each sample is reported by exactly one rank.
        """
        rank, layout = self.topology.rank, self.topology.layouts[TEXT]
        if self._replica is not None and (foreseen := self.dealing.foreseen(step, self._replica)) is not None:
            peers = [peer for peer in layout.ranks if layout.replica_of(peer) == self._replica]
            return foreseen, foreseen[peers.index(rank) :: len(peers)]
        if self.dealing.foreseen(step, 0) is not None:
            return (), ()
        share = self.dealing.step(step)[rank :: self.topology.world_size]
        return share, share

    def _report(
        self, early: Sequence[int], reported: Sequence[int], read: _Read
    ) -> dict[int, PackMetadata | BadSample]:
        """Tokenise the `early` samples. Returns the metadata of the `reported` samples, except skipped ones."""
        read.samples.update(zip(early, read.run(self._tokenise, early), strict=True))
        encoders, samples = list(self.partitioner.encoders), {number: read.samples[number] for number in reported}
        return {
            number: sample if isinstance(sample, BadSample) else PackMetadata.of_sample(number, sample, encoders)
            for number, sample in samples.items()
            if sample is not None
        }

    def _texts(
        self, deal: Deal, packs: Sequence[Packs], reported: Mapping[int, PackMetadata], read: _Read
    ) -> list[TextInput | None]:
        """Return the input of the text module in each micro-batch; None outside the text module."""
        if self._replica is None:
            return [None] * len(deal)
        dealt = [replicas[self._replica] for replicas in deal]
        missing = [number for numbers in dealt for number in numbers if number not in read.samples]
        read.samples.update(zip(missing, read.run(self._tokenise, missing), strict=True))
        texts = list[TextInput | None]()
        for numbers, packs_of_one in zip(dealt, packs, strict=True):
            samples = {n: self._unchanged(n, read.samples[n], reported[n]) for n in numbers}
            shard = self.partitioner.text_shard(packs_of_one)
            assert shard is not None, "a rank of a replica of the text module reads a shard of its packs"
            balance, dropout = self.job.balance if self.trains else 0.0, TEXT in self._dropout
            texts.append(text_input(samples, shard, self.job.outputs, balance=balance, dropout=dropout))
        return texts

    def _unchanged(
        self, number: int, sample: TokenizedSample | BadSample | None, reported: PackMetadata
    ) -> TokenizedSample:
        """Return the sample. Raises `UserError` if its metadata differ from the metadata that a rank `reported`."""
        encoders = list(self.partitioner.encoders)
        if isinstance(sample, TokenizedSample) and reported.is_same(PackMetadata.of_sample(number, sample, encoders)):
            return sample
        raise UserError.at(
            self.mixture[number].where,
            found="a sample of other tokens or items" if sample is not None else "a sample that is too long",
            expected=f"{reported.tokens} tokens, as another rank has read it",
            fix="do not change pictures while training reads them, and give all nodes the same ones",
        )

    def _tokenise(self, number: int) -> TokenizedSample | BadSample | None:
        """Return sample `number` of the stream as tokens; None if it is too long and skipped."""
        sample = self._unless_bad(lambda: self.reader.tokenize(self.mixture[number]))
        is_in = isinstance(sample, BadSample) or self.limits.admits(sample, self.partitioner.encoders)
        return sample if is_in else None

    def _unless_bad(self, work: Callable[[], T]) -> T | BadSample:
        """Return the result of `work`, or the fault of a bad record if `data.bad_records` is `skip`."""
        try:
            return work()
        except BadRecord as error:
            if self.job.config.data.bad_records != "skip":
                raise
            return error.found

    def _pieces(self, call: EncoderCall, packs: Sequence[Packs]) -> list[tuple[np.ndarray, Sequence[Size]]]:
        """Return the sources, int64 [pieces, 3], and the sizes of a call's pieces in each of its packs."""
        i = list(self.partitioner.encoders).index(call.encoder)
        return [(pack.sources[i], pack.sizes[i]) for m in call.micro_batches for pack in packs[m]]

    def _decode(self, calls: Sequence[EncoderCall], packs: Sequence[Packs], read: _Read) -> list[list[Any]]:
        """Decode this rank's pieces that are not decoded yet. Returns, for each call, the patches of each run of
        consecutive pieces of one item, fp32 [patches, elements].
        """
        wanted = list[list[tuple[int, int, tuple[Piece, ...]]]]()
        for call in calls:
            pieces = self._pieces(call, packs)
            sources = [source for each, _ in pieces for source in each.tolist()]
            sizes = [size for _, each in pieces for size in each]
            by_item = groupby(call.decodes, lambda k, sources=sources: tuple(sources[k][:2]))
            wanted.append([(*item, tuple(Piece(sources[k][2], sizes[k]) for k in group)) for item, group in by_item])

        def patches(sample: int, item: int, pieces: Sequence[Piece]) -> np.ndarray | BadSample:
            return self._unless_bad(lambda: self.reader.patches(self.mixture[sample], item, pieces))

        missing = [each for of_call in wanted for each in of_call if each not in read.patches]
        read.patches.update(zip(missing, read.run(lambda each: patches(*each), missing), strict=True))
        return [[read.patches[each] for each in of_call] for of_call in wanted]

    def _exchange(self, where: str, work: Callable[[], T]) -> list[T]:
        """Return the results of `work` on all ranks, by rank. If it fails, all ranks raise the first failing rank's
        error as a `SharedError`: with its message if the user can fix it, else with the stack trace.
        """

        def attempt() -> T:
            try:
                return work()
            except UserError as error:
                problem = str(error)
            except Exception:
                problem = f"an error of the program's own:\n{traceback.format_exc()}"
            raise UserError(f"{where}, data of rank {self.topology.rank}: {problem}")

        return on_every(self.topology.host, attempt)

    def _exchange_patches(self, call: EncoderCall, exchange: RankPlan, decoded: Sequence[np.ndarray]) -> list[Tensor]:
        """Send the patches that this rank decoded, each fp32 [patches, elements], to the ranks that embed them.

        Returns the patches that this rank embeds in each chunk, in the job's dtype, followed by zeros for padding; in
        pinned memory for a GPU.
        """
        shape, pinned = call.everyone.shape, self.topology.platform.is_cuda
        width, elements, direction = shape.unit_width, shape.unit_width // shape.unit, exchange.forward
        local = [torch.from_numpy(patches).view(-1, width) for patches in decoded]
        units = local[0] if len(local) == 1 else torch.cat([torch.zeros(0, width), *local])
        if direction.exchanges:
            units = self._communicators[call.encoder].start_forward(load_plan(exchange, CPU), units).wait()
        elif not is_identity(direction):
            units = units[torch.from_numpy(direction.local_from)]
            places = torch.from_numpy(direction.local_to)
            units = units.new_zeros(direction.needed, width).index_copy_(0, places, units)
        chunks = units.view(-1, elements).split([shard.local - shard.padding for shard in call.shards])
        paddings = [shard.padding for shard in call.shards]
        return [_padded(*each, self.job.dtype, pinned) for each in zip(chunks, paddings, strict=True)]

    @cached_property
    def _communicators(self) -> dict[str, BoundaryCommunicator]:
        """Communicators for patches, by encoder. One row has the patches of one unit."""
        encoders = self.partitioner.encoders
        return {
            name: BoundaryCommunicator(group, CPU, encoders[name].unit_width, torch.float32, check=False)
            for name, group in self.topology.host_replicas.items()
        }


def _padded(patches: Tensor, padding: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    if not padding and not pinned:
        return patches.to(dtype)
    out = torch.empty(len(patches) + padding, patches.shape[1], dtype=dtype, pin_memory=pinned)
    out[: len(patches)] = patches
    out[len(patches) :] = 0
    return out


def _digests(calls: Sequence[EncoderCall], deal: Deal) -> dict[str, str]:
    """Return facts on which ranks must agree: the samples of all text replicas in each micro-batch, and the plans of
    this rank's boundaries.
    """
    facts = {"number of micro-batches": f"{len(deal)}"}
    facts |= {f"samples of micro-batch {m}": f"{hash(tuple(map(tuple, dealt))):x}" for m, dealt in enumerate(deal)}
    for call in calls:
        for m, plans in zip(call.micro_batches, call.rows, strict=True):
            facts |= {f"plan of {edge}, micro-batch {m}": f"{plan.digest:x}" for edge, plan in plans.items()}
    return facts


def _parallel(pool: Executor) -> Run:
    return lambda function, items: pool.map(function, items)
