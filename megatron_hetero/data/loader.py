"""Loads the next step while the current one runs.

Per step and rank, on one background thread with a pool of `data.workers` threads below it, which may leave the work of
1, 3 and 5 to as many processes (`worker_process`):

  1. tokenise this rank's share of the step's samples: of its text replica's, where these are known before lengths are,
     else of all;
  2. exchange the samples' integers (and any error) among all ranks, once, on the host;
  3. deal the samples to text replicas and micro-batches, tokenise the others of this rank's replica, and pack them;
  4. compute this rank's share of all micro-batches: what it decodes and encodes, in which calls, which rows go where;
  5. decode this rank's share of its encoder replica's pieces of items, each once in the replica;
  6. exchange any error among all ranks, and send each rank of the replica the patches that it embeds.

With `data.bad_records: skip` a bad record is no error. Ranks report it in 2, or in 6 if only decoding finds it: then
all do 3 to 6 again without its sample, and read what they have not read yet.

An error of any rank reaches all ranks in the next exchange, so that all stop with the same message.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
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
from megatron_hetero.data.dealing import Deal, Dealing, PackMetadata, dealing_of
from megatron_hetero.data.encoder_shards import EncoderShare
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.packing import PackedBatch, SampleLimits, TokenizedSample, pack
from megatron_hetero.data.partition import MicroBatchShare, StepPartitioner
from megatron_hetero.data.processor import Processor, ReaderProcesses
from megatron_hetero.data.token_ids import modules_with_dropout, token_ids
from megatron_hetero.groups.collective import on_every, require_same_facts
from megatron_hetero.groups.platform import CPU
from megatron_hetero.groups.topology import Topology
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.items.types import Piece, Size

T = TypeVar("T")


Run = Callable[..., Iterable[Any]]
"""`map`, or another function that does the work in parallel."""


READ_AHEAD_STEPS = 4
"""How many steps ahead of loading a step's samples are asked for from formats that can read ahead."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch on the host: this rank's pack, its share, and the patches that it embeds.

    `pack`: None on ranks outside the text module. `samples`: numbers of its samples in the stream; empty outside the
    text module. `patches`: by encoder, for each part, fp32 [patches of this rank, padding included, elements of a
    patch]; for the first micro-batch of a call the patches of all its micro-batches; without encoders for which nobody
    has an item, and outside an encoder's first stage. `ids`: see `token_ids`.
    """

    pack: PackedBatch | None
    share: MicroBatchShare
    patches: Mapping[str, Sequence[Tensor]]
    samples: tuple[int, ...] = ()
    ids: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict[str, Sequence[np.ndarray]])


@dataclass(frozen=True)
class StepBatch:
    """One step on the host, with figures over all replicas.

    `supervised`, `tokens`: their numbers. `sizes`: by encoder, the sizes of its pieces. `sample_lengths`: tokens of
    each sample. `encoder_loads`: for each call of an encoder, `text_loads`: for each micro-batch, the predicted forward
    flops of each replica. `skipped`: number of samples left out as too long. `bad`: those left out as bad.
    """

    micro_batches: tuple[MicroBatch, ...]
    supervised: int
    tokens: int
    sizes: Mapping[str, tuple[Size, ...]]
    sample_lengths: tuple[int, ...]
    encoder_loads: tuple[tuple[float, ...], ...]
    text_loads: tuple[tuple[float, ...], ...] = ()
    skipped: int = 0
    bad: tuple[BadSample, ...] = ()


class _Own(NamedTuple):
    """What a rank has read of a step: samples by number, None if too long and skipped, and patches by number of the
    sample, of the item in it, and pieces. `run`: see `StepLoader.load`.
    """

    run: Run
    samples: dict[int, TokenizedSample | BadSample | None]
    patches: dict[tuple[int, int, tuple[Piece, ...]], np.ndarray | BadSample]


@dataclass(frozen=True, eq=False)
class StepLoader:
    """Loads `StepBatch`es for one rank. `text_work`: predicted flops of a sample of so many tokens. `what`: name of a
    step in messages. `skips_bad`: whether samples with bad records are left out, rather than errors. `with_ids`:
    modules whose tokens get ids.
    """

    mixture: Mixture
    reader: Processor | ReaderProcesses
    topology: Topology
    partitioner: StepPartitioner
    dealing: Dealing
    limits: SampleLimits
    text_work: Callable[[int], float]
    what: str = "step"
    skips_bad: bool = False
    with_ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: JobSpec, mixture: Mixture, processor: Processor, topology: Topology) -> StepLoader:
        """The loader of a job, which reads in processes of its own if `data.worker_type` says so."""
        data, patches = job.config.data, None if job.budget is None else job.budget.patches
        reader = ReaderProcesses(processor, data.workers) if data.worker_type == "process" else processor
        limits = SampleLimits(data.max_seq_length, patches, data.too_long)
        partitioner, skips_bad = StepPartitioner.of(job, topology.rank), data.bad_records == "skip"
        more = {"skips_bad": skips_bad, "with_ids": modules_with_dropout(job)}
        return cls(mixture, reader, topology, partitioner, dealing_of(job), limits, job.text_work, **more)

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

    def load(self, step: int, run: Run) -> StepBatch:
        """Loads the batch of `step` (from 1); `run` maps functions over samples and items."""
        self.mixture.read_ahead(self._samples_to_read(step + READ_AHEAD_STEPS)[0])
        early, reported = self._samples_to_read(step)
        own = _Own(run, {}, {})
        by_rank = self._exchange(f"{self.what} {step}", lambda: self._read(early, reported, own))
        return self._load(step, own, dict(sorted(item for of_rank in by_rank for item in of_rank.items())))

    def _load(self, step: int, own: _Own, found: Mapping[int, PackMetadata | BadSample]) -> StepBatch:
        """Loads the batch of `step` from the good samples that were `found`."""
        where, samples = f"{self.what} {step}", {n: each for n, each in found.items() if isinstance(each, PackMetadata)}
        deal = self.dealing.deal(step, samples)
        encoders = self.partitioner.encoders
        gathered = [
            [PackMetadata.joined([samples[n] for n in numbers], len(encoders)) for numbers in of_round]
            for of_round in deal
        ]
        shares = self.partitioner.step_shares([[pack.shape for pack in packs] for packs in gathered])
        packs, decoded = list[PackedBatch | None](), list[dict[str, list[np.ndarray]]]()

        def read_own() -> tuple[dict[str, str], dict[int, BadSample]]:
            packs.extend(self._packs(deal, samples, own))
            decoded.extend(self._decode(shares, gathered, own))
            bad = {n: each for (n, *_), each in own.patches.items() if isinstance(each, BadSample)}
            return _digests(shares, deal), bad

        fix = "run the same versions of program and NumPy with the same model on all nodes"
        because, ranks = "every rank computes shares from the same integers", range(self.topology.world_size)
        of_ranks = self._exchange(where, read_own)
        require_same_facts(where, [facts for facts, _ in of_ranks], ranks, fix, because, absent=None)
        bad = {n: each for _, of_rank in of_ranks for n, each in of_rank.items() if n in samples}
        if bad:
            return self._load(step, own, {**found, **bad})
        patches = [
            {
                name: self._exchange_patches(name, part.exchange, share.encoders[name], parts.get(name, []))
                for name, part in share.patches.items()
            }
            for share, parts in zip(shares, decoded, strict=True)
        ]
        numbers = [() if self._replica is None else tuple(of_round[self._replica]) for of_round in deal]
        ids = token_ids(self.partitioner, self.with_ids, deal, gathered, shares)
        everything = [pack for packs_of in gathered for pack in packs_of]
        return StepBatch(
            micro_batches=tuple(MicroBatch(*parts) for parts in zip(packs, shares, patches, numbers, ids, strict=True)),
            supervised=sum(pack.supervised for pack in everything),
            tokens=sum(pack.tokens for pack in everything),
            sizes={
                name: tuple(size for pack in everything for size in pack.shape.pieces[i].sizes)
                for i, name in enumerate(encoders)
            },
            sample_lengths=tuple(n for pack in everything for n in pack.shape.lengths),
            encoder_loads=tuple(loads for share in shares for loads in share.loads.values()),
            text_loads=tuple(
                tuple(float(sum(map(self.text_work, pack.shape.lengths))) for pack in packs_of) for packs_of in gathered
            ),
            skipped=len(self.dealing.step(step)) - len(found),
            bad=tuple(each for each in found.values() if isinstance(each, BadSample)),
        )

    @cached_property
    def _replica(self) -> int | None:
        """This rank's replica of the text module."""
        layout = self.topology.layouts[TEXT]
        return layout.replica_of(self.topology.rank) if self.topology.rank in layout else None

    def _samples_to_read(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        """The samples that this rank reads before lengths are known, and those that it reports to all ranks. One rank
        reports each sample.
        """
        rank, layout = self.topology.rank, self.topology.layouts[TEXT]
        if self._replica is not None and (own := self.dealing.foreseen(step, self._replica)) is not None:
            peers = [peer for peer in layout.ranks if layout.replica_of(peer) == self._replica]
            return own, own[peers.index(rank) :: len(peers)]
        if self.dealing.foreseen(step, 0) is not None:
            return (), ()
        share = self.dealing.step(step)[rank :: self.topology.world_size]
        return share, share

    def _read(self, early: Sequence[int], reported: Sequence[int], own: _Own) -> dict[int, PackMetadata | BadSample]:
        """The metadata of the samples `reported`, without skipped ones. Samples that are `early` go into `own`."""
        own.samples.update(zip(early, own.run(self._tokenise, early), strict=True))
        encoders, samples = list(self.partitioner.encoders), {number: own.samples[number] for number in reported}
        return {
            number: sample if isinstance(sample, BadSample) else PackMetadata.of_sample(number, sample, encoders)
            for number, sample in samples.items()
            if sample is not None
        }

    def _packs(self, deal: Deal, samples: Mapping[int, PackMetadata], own: _Own) -> list[PackedBatch | None]:
        """This rank's pack of each micro-batch; None outside the text module."""
        if self._replica is None:
            return [None] * len(deal)
        mine = [of_round[self._replica] for of_round in deal]
        missing = [number for numbers in mine for number in numbers if number not in own.samples]
        own.samples.update(zip(missing, own.run(self._tokenise, missing), strict=True))
        return [pack([self._unchanged(n, own.samples[n], samples[n]) for n in numbers]) for numbers in mine]

    def _unchanged(
        self, number: int, sample: TokenizedSample | BadSample | None, reported: PackMetadata
    ) -> TokenizedSample:
        """The sample, if it is the one that a rank reported to all. Raises `UserError`."""
        encoders = list(self.partitioner.encoders)
        if not isinstance(sample, TokenizedSample) or PackMetadata.of_sample(number, sample, encoders) != reported:
            raise UserError.at(
                self.mixture[number].where,
                found="a sample of other tokens or items" if sample is not None else "a sample that is too long",
                expected=f"{reported.tokens} tokens, as another rank has read it",
                fix="do not change pictures while training reads them, and give all nodes the same ones",
            )
        return sample

    def _tokenise(self, number: int) -> TokenizedSample | BadSample | None:
        """Sample `number` of the stream as tokens; None if it is too long and skipped."""
        sample = self._unless_bad(lambda: self.reader.tokenize(self.mixture[number]))
        is_in = isinstance(sample, BadSample) or self.limits.admits(sample, self.partitioner.encoders)
        return sample if is_in else None

    def _unless_bad(self, work: Callable[[], T]) -> T | BadSample:
        """The result of `work` on a sample, or what is wrong with its record, unless that stops the run."""
        try:
            return work()
        except BadRecord as error:
            if not self.skips_bad:
                raise
            return error.found

    def _decode(
        self, shares: Sequence[MicroBatchShare], gathered: Sequence[Sequence[PackMetadata]], own: _Own
    ) -> list[dict[str, list[Any]]]:
        """Decodes this rank's pieces, but for those that it has. Returns, for each micro-batch, by encoder, fp32
        [patches, elements] of each item; for the first of a call those of all. Consecutive pieces of one item are
        decoded in one call.
        """
        numbers, wanted = {name: i for i, name in enumerate(self.partitioner.encoders)}, []
        for m, share in enumerate(shares):
            for name, part in share.patches.items():
                i, call = numbers[name], share.calls.get(name, range(m, m + 1))
                packs = [pack for of_one in call for pack in gathered[of_one]]
                pieces = [pair for p in packs for pair in zip(p.sources[i], p.shape.pieces[i].sizes, strict=True)]
                chosen = [pieces[k] for k in part.decodes]
                for (sample, item), of_item in groupby(chosen, lambda pair: pair[0][:2]):
                    of_one = tuple(Piece(source.piece, size) for source, size in of_item)
                    wanted.append((m, name, (sample, item, of_one)))

        def patches(sample: int, item: int, pieces: Sequence[Piece]) -> np.ndarray | BadSample:
            return self._unless_bad(lambda: self.reader.patches(self.mixture[sample], item, pieces))

        missing = [each for *_, each in wanted if each not in own.patches]
        own.patches.update(zip(missing, own.run(lambda each: patches(*each), missing), strict=True))
        decoded: list[dict[str, list[Any]]] = [{} for _ in shares]
        for m, name, each in wanted:
            decoded[m].setdefault(name, []).append(own.patches[each])
        return decoded

    def _exchange(self, where: str, work: Callable[[], T]) -> list[T]:
        """The results of `work` on every rank, by rank. The first rank's error is raised on every rank, as a
        `SharedError`: the message of what the user can fix, or the trace of an error of the program.
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

    def _exchange_patches(
        self, encoder: str, exchange: RankPlan, shares: Sequence[EncoderShare], decoded: Sequence[np.ndarray]
    ) -> list[Tensor]:
        """Sends the patches that this rank decoded, fp32 [patches, elements] each, to the ranks that embed them.
        Returns the patches that this rank embeds in each part, with zeros for padding after them; in pinned memory for
        a GPU.
        """
        shape, pinned = self.partitioner.encoders[encoder], self.topology.platform.is_cuda
        width, elements, direction = shape.unit_width, shape.unit_width // shape.unit, exchange.forward
        own = [torch.from_numpy(patches).view(-1, width) for patches in decoded]
        units = own[0] if len(own) == 1 else torch.cat([torch.zeros(0, width), *own])
        if direction.exchanges:
            units = self._communicators[encoder].start_forward(load_plan(exchange, CPU), units).wait()
        elif not is_identity(direction):
            kept = units[torch.from_numpy(direction.local_from)]
            units = kept.new_zeros(direction.needed, width).index_copy_(0, torch.from_numpy(direction.local_to), kept)
        parts = units.view(-1, elements).split([share.embedded for share in shares])
        return [_padded(part, share.padding, pinned) for part, share in zip(parts, shares, strict=True)]

    @cached_property
    def _communicators(self) -> dict[str, BoundaryCommunicator]:
        """Communicators for patches by encoder; a row is the patches of one unit."""
        encoders = self.partitioner.encoders
        return {
            name: BoundaryCommunicator(group, CPU, encoders[name].unit_width, torch.float32, check=False)
            for name, group in self.topology.host_replicas.items()
        }


def _padded(patches: Tensor, padding: int, pinned: bool) -> Tensor:
    if not padding and not pinned:
        return patches
    out = torch.empty(len(patches) + padding, patches.shape[1], pin_memory=pinned)
    out[: len(patches)] = patches
    out[len(patches) :] = 0
    return out


def _digests(shares: Sequence[MicroBatchShare], deal: Deal) -> dict[str, str]:
    """What ranks must agree on: for each micro-batch the samples of all text replicas, and the plans of the boundaries
    that this rank takes part in.
    """
    found = {"number of micro-batches": f"{len(shares)}"}
    for m, (share, dealt) in enumerate(zip(shares, deal, strict=True)):
        found[f"samples of micro-batch {m}"] = f"{hash(tuple(map(tuple, dealt))):x}"
        found |= {f"plan of {edge}, micro-batch {m}": f"{part.digest:x}" for edge, part in share.boundaries.items()}
    return found


def _parallel(pool: Executor) -> Run:
    return lambda function, items: pool.map(function, items)
