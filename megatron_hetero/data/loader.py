"""Reads, tokenises, plans and decodes the next step while the current one runs.

Per step and rank, on one background thread with a pool of `data.workers` threads below it, which may leave the work of
1, 3 and 5 to as many processes (`readers`):

  1. tokenise this rank's share of the step's samples: of those of its text replica, where these are known before
     lengths are, else of all;
  2. exchange the samples' integers (and any error) among all ranks, once, on the host;
  3. deal the samples to text replicas and micro-batches, tokenise the others of this rank's replica, and pack them;
  4. plan all micro-batches: who decodes and encodes what, in which calls, which rows go where;
  5. decode this rank's share of its encoder replica's pieces of items, each once in the replica;
  6. exchange any error among all ranks, and send each rank of the replica the patches that it embeds.

An error of any rank reaches all ranks in the next exchange, so that all stop with the same message.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.base.errors import TEXT, UserError
from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.loaded import RowIndex, load_index, load_plan
from megatron_hetero.boundary.routes import DirectionPlan, is_identity
from megatron_hetero.data.dealing import Deal, Dealing, PackMetadata, SampleMetadata, pack_metadata
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.packing import PackedBatch, TokenizedSample, pack
from megatron_hetero.data.readers import Reader, Wanted
from megatron_hetero.data.step_plan import MicroBatchPlan, PatchPlan, StepPlanner
from megatron_hetero.groups.collective import on_every, require_alike
from megatron_hetero.groups.platform import CPU
from megatron_hetero.groups.topology import Topology
from megatron_hetero.models.items.types import ItemShape, Piece, Size
from megatron_hetero.schedule.program import Schedule

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch on the host: this rank's pack, its plan, and the patches that it embeds.

    `pack`: None on ranks outside the text module. `samples`: the numbers in the stream of its samples, in turn; none
    outside the text module. `patches`: by encoder, fp32 [patches of this rank, padding included, elements of a patch],
    of the first micro-batch of a call those of all; not of encoders for which nobody has an item, nor outside an
    encoder's first stage.
    """

    pack: PackedBatch | None
    plan: MicroBatchPlan
    patches: Mapping[str, Tensor]
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepBatch:
    """One step on the host.

    Over all replicas: `supervised` and `tokens`, `sizes`, by encoder those of its pieces, `sample_lengths`, the
    tokens of each sample, `encoder_loads`, for each call of an encoder the predicted forward flops of each replica,
    `text_loads`, for each micro-batch those of each replica of the text module, and `skipped`, how many samples were
    left out as too long.
    """

    micro_batches: tuple[MicroBatch, ...]
    supervised: int
    tokens: int
    sizes: Mapping[str, tuple[Size, ...]]
    sample_lengths: tuple[int, ...]
    encoder_loads: tuple[tuple[float, ...], ...]
    text_loads: tuple[tuple[float, ...], ...] = ()
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class StepLoader:
    """Makes `StepBatch`es for one rank. `text_work`: predicted flops of a sample of so many tokens. `what`: a step, in
    messages.
    """

    mixture: Mixture
    reader: Reader
    topology: Topology
    planner: StepPlanner
    dealing: Dealing
    text_work: Callable[[int], float]
    what: str = "step"

    def with_schedule(self, schedule: Schedule) -> StepLoader:
        """The same for steps of another schedule, of as many micro-batches as that has."""
        together = {name: schedule.in_one_call(name) for name in self.planner.encoders}
        return replace(self, planner=self.planner.with_calls(lambda _: together))

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
        early, told = self._shares(step)
        where, read = f"{self.what} {step}", dict[int, TokenizedSample | None]()
        samples = _joined(self._exchange(where, lambda: self._read(early, told, run, read)))
        deal = self.dealing.deal(step, samples)
        encoders = self.planner.encoders
        gathered = [[pack_metadata(numbers, samples, len(encoders)) for numbers in of_round] for of_round in deal]
        plans = self.planner.plan_step([[pack.shape for pack in packs] for packs in gathered])
        packs, decoded = list[PackedBatch | None](), list[dict[str, list[np.ndarray]]]()

        def make() -> dict[str, str]:
            packs.extend(self._packs(deal, read, samples, run))
            decoded.extend(self._decode(plans, gathered, run))
            return _digests(plans, deal)

        fix = "run the same versions of program and NumPy with the same model on all nodes"
        because, ranks = "every rank plans from the same integers", range(self.topology.world_size)
        require_alike(where, self._exchange(where, make), ranks, fix, because, absent=None)
        patches = [
            {name: self._patches.share_out(name, part, parts.get(name, [])) for name, part in plan.patches.items()}
            for plan, parts in zip(plans, decoded, strict=True)
        ]
        numbers = [() if self._replica is None else tuple(of_round[self._replica]) for of_round in deal]
        everything = [pack for packs_of in gathered for pack in packs_of]
        return StepBatch(
            micro_batches=tuple(MicroBatch(*parts) for parts in zip(packs, plans, patches, numbers, strict=True)),
            supervised=sum(pack.supervised for pack in everything),
            tokens=sum(pack.tokens for pack in everything),
            sizes={
                name: tuple(size for pack in everything for size in pack.shape.pieces[i].sizes)
                for i, name in enumerate(encoders)
            },
            sample_lengths=tuple(n for pack in everything for n in pack.shape.lengths),
            encoder_loads=tuple(loads for plan in plans for loads in plan.loads.values()),
            text_loads=tuple(
                tuple(float(sum(map(self.text_work, pack.shape.lengths))) for pack in packs_of) for packs_of in gathered
            ),
            skipped=len(self.dealing.step(step)) - len(samples),
        )

    @cached_property
    def _patches(self) -> PatchSharing:
        return PatchSharing(self.topology, self.planner.encoders)

    @cached_property
    def _replica(self) -> int | None:
        """This rank's replica of the text module."""
        layout = self.topology.layouts[TEXT]
        return layout.replica_of(self.topology.rank) if self.topology.rank in layout else None

    @cached_property
    def _peers(self) -> list[int]:
        """The ranks of that replica."""
        layout = self.topology.layouts[TEXT]
        return [rank for rank in layout.ranks if layout.replica_of(rank) == self._replica]

    def _shares(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        """The samples that this rank reads before lengths are known, and those of them that it tells others of. Each is
        told of by one rank.
        """
        rank = self.topology.rank
        if self._replica is not None and (own := self.dealing.foreseen(step, self._replica)) is not None:
            return own, own[self._peers.index(rank) :: len(self._peers)]
        if self.dealing.foreseen(step, 0) is not None:
            return (), ()
        share = self.dealing.step(step)[rank :: self.topology.world_size]
        return share, share

    def _read(
        self,
        early: Sequence[int],
        told: Sequence[int],
        run: Callable[..., Iterable[Any]],
        read: dict[int, TokenizedSample | None],
    ) -> dict[int, SampleMetadata]:
        """What others are told of the samples `told`. Those that are `early` go into `read` by number, None for those
        that are skipped.
        """
        read.update(zip(early, run(self._tokenise, early), strict=True))
        kept = {number: sample for number in told if (sample := read[number]) is not None}
        encoders = list(self.planner.encoders)
        return {number: SampleMetadata.of(sample, encoders) for number, sample in kept.items()}

    def _packs(
        self,
        deal: Deal,
        read: Mapping[int, TokenizedSample | None],
        samples: Mapping[int, SampleMetadata],
        run: Callable[..., Iterable[Any]],
    ) -> list[PackedBatch | None]:
        """This rank's pack of each micro-batch; None outside the text module."""
        if self._replica is None:
            return [None] * len(deal)
        mine = [of_round[self._replica] for of_round in deal]
        missing = [number for numbers in mine for number in numbers if number not in read]
        known = {**read, **dict(zip(missing, run(self._tokenise, missing), strict=True))}
        return [pack([self._as_told(number, known[number], samples[number]) for number in numbers]) for numbers in mine]

    def _as_told(self, number: int, sample: TokenizedSample | None, told: SampleMetadata) -> TokenizedSample:
        """The sample, if it is the one that its reader told all ranks of. Raises `UserError`."""
        if sample is None or (len(sample), len(sample.sizes)) != (told.tokens, told.items):
            raise UserError.at(
                self.mixture[number].where,
                found="a sample of another length" if sample is not None else "a sample that is too long",
                expected=f"{told.tokens} tokens, as another rank has read it",
                fix="do not change pictures while training reads them, and give all nodes the same ones",
            )
        return sample

    def _tokenise(self, number: int) -> TokenizedSample | None:
        return self.reader.tokenise(self.mixture[number])

    def _decode(
        self,
        plans: Sequence[MicroBatchPlan],
        gathered: Sequence[Sequence[PackMetadata]],
        run: Callable[..., Iterable[Any]],
    ) -> list[dict[str, list[np.ndarray]]]:
        """For each micro-batch, by encoder, the patches of the pieces that this rank decodes, fp32 [patches, elements]:
        for the first of a call those of all. Pieces of one item that follow each other are decoded together.
        """
        numbers, wanted = {name: i for i, name in enumerate(self.planner.encoders)}, []
        for m, plan in enumerate(plans):
            for name, planned in plan.patches.items():
                i, call = numbers[name], plan.calls.get(name, range(m, m + 1))
                packs = [pack for of_one in call for pack in gathered[of_one]]
                pieces = [pair for p in packs for pair in zip(p.sources[i], p.shape.pieces[i].sizes, strict=True)]
                chosen = [pieces[k] for k in planned.decodes]
                for (sample, item), of_item in groupby(chosen, lambda pair: pair[0][:2]):
                    of_one = [Piece(source.piece, size) for source, size in of_item]
                    wanted.append((m, name, Wanted(self.mixture[sample], item, of_one)))
        decoded: list[dict[str, list[np.ndarray]]] = [{} for _ in plans]
        of_items = run(self.reader.patches, [each for *_, each in wanted])
        for (m, name, _), patches in zip(wanted, of_items, strict=True):
            decoded[m].setdefault(name, []).append(patches)
        return decoded

    def _exchange(self, where: str, work: Callable[[], T]) -> list[T]:
        """What `work` gives on every rank, by rank. The first rank's error is raised on every rank, as a `SharedError`:
        the message of what the user can mend, or the trace of what is ours.
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


def _joined(by_rank: Sequence[Mapping[int, SampleMetadata]]) -> dict[int, SampleMetadata]:
    """What all ranks told of samples, by number, ascending."""
    found = {number: sample for of_rank in by_rank for number, sample in of_rank.items()}
    return {number: found[number] for number in sorted(found)}


def _digests(plans: Sequence[MicroBatchPlan], deal: Deal) -> dict[str, str]:
    """What ranks must agree on: for each micro-batch the samples of all text replicas, and the plans of the boundaries
    that this rank takes part in.
    """
    found = {"number of micro-batches": f"{len(plans)}"}
    for m, (plan, dealt) in enumerate(zip(plans, deal, strict=True)):
        found[f"samples of micro-batch {m}"] = f"{hash(tuple(map(tuple, dealt))):x}"
        found |= {f"plan of {edge}, micro-batch {m}": f"{part.digest:x}" for edge, part in plan.boundaries.items()}
    return found


def _parallel(pool: Executor) -> Callable[..., Iterable[Any]]:
    return lambda function, items: pool.map(function, items)


# ---------------------------------------------------------------------------------------------------------
# Patches from the ranks that decode them to those that embed them
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PatchSharing:
    """Between the hosts of each encoder's replica that this rank is in. `encoders`: by name."""

    topology: Topology
    encoders: Mapping[str, ItemShape]

    def share_out(self, encoder: str, plan: PatchPlan, decoded: Sequence[np.ndarray]) -> Tensor:
        """Patches of the items that this rank decoded, fp32 [patches, elements] each, to those that it embeds, with
        zeros for padding after them; in pinned memory where a GPU fetches them.
        """
        width, pinned = self.encoders[encoder].unit_width, self.topology.platform.is_cuda
        direction, elements = plan.exchange.forward, width // self.encoders[encoder].unit
        parts = [torch.from_numpy(patches).view(-1, width) for patches in decoded]
        if direction.exchanges:
            own = parts[0] if len(parts) == 1 else torch.cat([torch.zeros(0, width), *parts])
            parts = [self._communicators[encoder].forward(load_plan(plan.exchange, CPU), own)]
        as_it_is = len(parts) == 1 and (direction.exchanges or is_identity(direction))
        if as_it_is and not plan.padding and not pinned:
            return parts[0].view(-1, elements)
        out = torch.empty(direction.needed * width // elements + plan.padding, elements, pin_memory=pinned)
        end = len(out) - plan.padding
        out[end:].zero_()
        units = out[:end].view(-1, width)
        if as_it_is:
            units.copy_(parts[0])
        else:
            place_rows(direction, parts, units)
        return out

    @cached_property
    def _communicators(self) -> dict[str, BoundaryCommunicator]:
        """By encoder: a row is the patches of one unit."""
        return {
            name: BoundaryCommunicator(group, CPU, self.encoders[name].unit_width, torch.float32, check=False)
            for name, group in self.topology.host_replicas.items()
        }


def place_rows(direction: DirectionPlan[np.ndarray], parts: Sequence[Tensor], out: Tensor) -> None:
    """What a direction without exchanges makes of `parts`, the rows held, one part after the other: into `out`
    [needed, width], each row in one copy.
    """
    if not direction.complete:
        out.zero_()
    for part, (origin, target) in zip(parts, _runs(direction, [len(part) for part in parts]), strict=True):
        if isinstance(target, Tensor):
            out.index_copy_(0, target, part[origin])
        elif isinstance(origin, Tensor):
            torch.index_select(part, 0, origin, out=out[target])
        else:
            out[target].copy_(part[origin])


def _runs(direction: DirectionPlan[np.ndarray], lengths: Sequence[int]) -> Iterator[tuple[RowIndex, RowIndex]]:
    """For each part the rows of it that stay, and where they go."""
    starts = np.cumsum([0, *lengths])
    part_of_row = np.searchsorted(starts, direction.local_from, side="right") - 1
    for number, start in enumerate(starts[:-1]):
        chosen = part_of_row == number
        yield load_index(direction.local_from[chosen] - start, CPU), load_index(direction.local_to[chosen], CPU)
