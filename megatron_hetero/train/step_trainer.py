"""Micro-batches from the host to what the modules read on the device.

Training steps on one rank: forward, backward and update, together with all other ranks. Where weights and batches
come from is not its business.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import TEXT, NotFiniteError, SharedError
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.data.balance import idle_share
from megatron_hetero.data.encoder_shards import EncoderShare
from megatron_hetero.data.loader import MicroBatch, StepBatch
from megatron_hetero.data.packing import IGNORED, PackedBatch
from megatron_hetero.data.partition import StepPartitioner
from megatron_hetero.data.token_shards import TokenShare
from megatron_hetero.groups.collective import on_every
from megatron_hetero.groups.platform import Platform, on_device
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Stopwatch
from megatron_hetero.job import HasJob, JobSpec
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.stages import EncoderInput, TextInput
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.step.algorithms import learning_rate
from megatron_hetero.step.gradients import GradientSummary, clip_factor
from megatron_hetero.step.interpreter import DeviceMicroBatch, Interpreter
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.runner import SUMS, Runner
from megatron_hetero.train.measures import StepProfiler, utilisation
from megatron_hetero.train.metrics import StepMetrics

PADDING_TOKEN = 0
"""What shards are filled with: any token will do, since nothing attends to it and it predicts nothing."""


def to_device(
    batch: MicroBatch, platform: Platform, dtype: torch.dtype, outputs: Mapping[str, Collection[str]]
) -> DeviceMicroBatch:
    """Move one micro-batch; patches arrive in `dtype`. `outputs`: of each encoder, those whose rows enter the text."""
    own, inputs = batch.share, {}
    for name, share in own.encoders.items():
        patches = _move(batch.patches[name], platform).to(dtype) if name in batch.patches else None
        inputs[name] = _encoder_input(share, patches, platform)
    if own.text is not None and batch.pack is not None:
        inputs[TEXT] = _text_input(batch.pack, own.text, platform, outputs)
    boundaries = {edge: load_plan(part, platform.device) for edge, part in own.boundaries.items()}
    return DeviceMicroBatch(inputs, boundaries, own.calls)


def _encoder_input(share: EncoderShare, patches: Tensor | None, platform: Platform) -> EncoderInput:
    attention = AttentionParams(
        full=PackedSegments.of_segments(share.segments, platform.device, share.cp_lengths),
        sp_lengths=share.sp_lengths,
        cp_lengths=share.cp_lengths,
        windows=PackedSegments.of(share.windows, platform.device),
    )
    return EncoderInput(patches, _move(share.positions, platform), attention, share.padding)


def _text_input(
    pack: PackedBatch, share: TokenShare, platform: Platform, outputs: Mapping[str, Collection[str]]
) -> TextInput:
    """The tokens of this rank's shard, with the labels that belong to them."""
    labels = pack.labels[share.tokens]
    supervised = np.flatnonzero(labels != IGNORED)
    padding = share.padded - len(share.tokens)
    return TextInput(
        tokens=_move(np.pad(pack.input_ids[share.tokens], (0, padding), constant_values=PADDING_TOKEN), platform),
        positions=_move(pack.position_ids[:, share.tokens], platform),
        supervised=_move(supervised, platform),
        targets=_move(labels[supervised], platform),
        rows_at={name: _move(places, platform) for name, places in _places(share, outputs).items()},
        attention=AttentionParams(
            full=PackedSegments.of_segments(share.segments, platform.device, share.cp_lengths),
            sp_lengths=share.sp_lengths,
            cp_lengths=share.cp_lengths,
        ),
    )


def _places(share: TokenShare, outputs: Mapping[str, Collection[str]]) -> dict[str, np.ndarray]:
    """Where the rows of each output go: encoder by encoder, as they are handed to a stage."""
    names = dict.fromkeys(name for each in outputs.values() for name in each)
    none = np.zeros(0, np.int64)
    return {
        name: np.concatenate([none, *(share.rows_at[encoder] for encoder, each in outputs.items() if name in each)])
        for name in names
    }


def _move(values: np.ndarray | Tensor, platform: Platform) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return on_device(tensor, platform.device)


@dataclass(frozen=True)
class _EndOfStep:
    """What all ranks know of a step before they update: the most memory of a rank, whether one was asked to stop, the
    share of the encoder ranks' time in which they wait for the slowest of their encoder, in each forward and backward
    of each micro-batch, this rank's seconds in boundaries, and the share of padding in the tokens that ranks of the
    text module compute, and in the patches that those of encoders embed.
    """

    peak_memory_bytes: int
    stopping: bool
    encoder_idle_share: float
    boundary_time_s: float
    text_padding_share: float
    encoder_padding_share: float


@dataclass(frozen=True, eq=False, kw_only=True)
class StepTrainer(HasJob):
    """Trains the parts of modules that a rank has, step by step. `optimizer`: of those parts, encoders first; `runner`:
    runs their stages. `partitioner` computes this rank's share of micro-batches.
    """

    job: JobSpec
    schedule: Schedule
    topology: Topology
    optimizer: JointOptimizer
    runner: Runner
    partitioner: StepPartitioner
    watch: Stopwatch
    profiler: StepProfiler

    @property
    def modules(self) -> tuple[TrainedModule, ...]:
        """This rank's parts of modules."""
        return self.optimizer.modules

    @property
    def interpreter(self) -> Interpreter:
        """What executes schedules on this rank."""
        return self.runner.interpreter

    @property
    def platform(self) -> Platform:
        """Where this rank computes."""
        return self.topology.platform

    def train_step(self, step: int, batch: StepBatch, waited: float = 0.0, stop: object = False) -> StepMetrics:
        """Forward, backward, and update; `waited`: seconds that the batch was waited for; `stop`: true, at the end of
        the step, where this rank was asked to stop.

        Where all samples were too long, nothing is updated. Raises `SharedError` before the update where the loss or a
        gradient is NaN or infinite.
        """
        start = time.perf_counter()
        if not batch.sample_lengths:
            return self._train_nothing(step, batch, waited, stop)
        if batch.supervised == 0:
            raise SharedError(
                f"step {step}: found no supervised token in the global batch, expected some, because the loss "
                f"divides by their number; raise the batch size, or mend the data"
            )
        with self.profiler.step(step):
            summary = self.gradients(batch)
            self._refuse_faults(step, summary)
            # Whoever has read the summary has waited for all that was measured.
            laps = self.watch.read()
            norm = summary.norm / batch.supervised
            factor = clip_factor(norm, self.config.optimizer.clip_grad) / batch.supervised
            with self.watched(f"the update of step {step}"):
                # Before weights are gathered: the host would wait for these, and the next step's kernels for the host.
                end = self._end_of_step(batch, laps, stop)
                rate = self._update(step, factor)
        return self._metrics(step, batch, summary.loss_sum / batch.supervised, norm, rate, start - waited, waited, end)

    def _train_nothing(self, step: int, batch: StepBatch, waited: float, stop: object) -> StepMetrics:
        """A step whose samples are all too long: only the learning rate advances."""
        start, nan = time.perf_counter(), float("nan")
        with self.profiler.step(step), self.watched(f"the end of step {step}"):
            end = self._end_of_step(batch, {}, stop)
        rate = self._rate(step, self.config.optimizer.lr)
        return self._metrics(step, batch, nan, nan, rate, start - waited, waited, end)

    def gradients(self, batch: StepBatch) -> GradientSummary:
        """Forward and backward of all micro-batches, then the sums over ranks; gradients are not scaled by 1/N yet."""
        self.optimizer.zero_grad()
        dtype, outputs = self.job.dtype, self.job.outputs
        result = self.runner.run(
            self._schedule_of(batch), lambda m: to_device(batch.micro_batches[m], self.platform, dtype, outputs)
        )
        with self.watched(SUMS):
            return self.optimizer.reduce(result.loss, loss_counts_here=self.counts_loss).read()

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Around what waits for other ranks between the actions of the schedule."""
        return self.interpreter.watchdog.doing(lambda: f"{what}, with all other ranks,")

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is one of those that add up to the whole: once for each tp group that has one."""
        layout, rank = self.topology.layouts[TEXT], self.topology.rank
        if rank not in layout:
            return False
        at = layout.coordinate(rank)
        return at.tp == 0 and at.pp == layout.pp - 1

    def _update(self, step: int, scale: float = 1.0) -> float:
        """Step all optimizers, with gradients times `scale`. Returns the learning rate of `optimizer.lr` (parts may
        have rates of their own).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step, group.setdefault("initial_lr", group["lr"]))
        self.optimizer.update(scale, step)
        return self._rate(step, self.config.optimizer.lr)

    def _rate(self, step: int, peak: float) -> float:
        """The learning rate of a step under the schedule that rises to `peak`; its minimum scales with that."""
        config, total = self.config.optimizer, self.config.train.iters
        minimum = config.min_lr if peak == config.lr else config.min_lr * peak / config.lr
        return learning_rate(
            step, peak=peak, minimum=minimum, schedule=config.schedule, warmup=config.warmup_iters, total=total
        )

    def _refuse_faults(self, step: int, summary: GradientSummary) -> None:
        if not summary.faults:
            return
        what, rank = summary.faults[0]
        others = f" (and {len(summary.faults) - 1} more)" if len(summary.faults) > 1 else ""
        kind = "loss" if what == "loss" else f"gradient of module {what}"
        raise NotFiniteError(
            f"step {step}: found a {kind} that is NaN or infinite on rank {rank}{others}, expected finite "
            f"numbers; the weights "
            "have not been updated. Lower optimizer.lr, add warm-up, or look for broken samples in this step."
        )

    def _schedule_of(self, batch: StepBatch) -> Schedule:
        """For as many micro-batches as a step has."""
        count = len(batch.micro_batches)
        return self.schedule if count == self.schedule.micro_batches else self.job.schedule_of(count)

    def _end_of_step(self, batch: StepBatch, laps: Mapping[str, Sequence[float]], stop: object) -> _EndOfStep:
        """What all ranks exchange, once, before they update; the host waits for it.
        `laps`: this rank's seconds of each run of its modules.
        """
        schedule = self._schedule_of(batch)
        runs = {name: self._runs(schedule, name) for name in self.shapes.encoders}
        mine = [float(self.platform.peak_memory_bytes()), float(bool(stop)), *self._padding(batch)]
        for name, count in runs.items():
            own = laps.get(name, [])
            mine += [*own, *[0.0] * (count - len(own))]
        (memory, stopping, *padding), rounds = self.all_gather(mine).T.tolist(), []
        (padded, tokens, added, patches), seconds = map(sum, padding[:4]), padding[4:]
        for name, count in runs.items():
            ranks = self.topology.layouts[name].ranks
            rounds += [[of_run[rank] for rank in ranks] for of_run in seconds[:count]]
            del seconds[:count]
        return _EndOfStep(
            peak_memory_bytes=int(max(memory)),
            stopping=bool(max(stopping)),
            encoder_idle_share=idle_share(*rounds),
            boundary_time_s=sum(laps.get("boundary", [])),
            text_padding_share=padded / max(1.0, padded + tokens),
            encoder_padding_share=added / max(1.0, added + patches),
        )

    def _padding(self, batch: StepBatch) -> list[float]:
        """Of this rank in a step: tokens of padding and of samples, patches of padding and of images."""
        own = [micro_batch.share for micro_batch in batch.micro_batches]
        shares = [each.text for each in own if each.text is not None]
        embedded = [(name, patches) for each in own for name, patches in each.patches.items()]
        encoders = self.shapes.encoders
        return [
            float(sum(share.padded - len(share.tokens) for share in shares)),
            float(sum(len(share.tokens) for share in shares)),
            float(sum(patches.padding for _, patches in embedded)),
            float(sum(patches.exchange.forward.needed * encoders[name].unit for name, patches in embedded)),
        ]

    def _runs(self, schedule: Schedule, encoder: str) -> int:
        """How often a rank of an encoder runs it in a step, forward and backward."""
        role = schedule.roles[schedule.role_index[self.topology.layouts[encoder].ranks[0]]]
        return sum(action.op == "run" and action.module == encoder for action in role.actions)

    def _metrics(
        self,
        step: int,
        batch: StepBatch,
        loss: float,
        norm: float,
        rate: float,
        start: float,
        waited: float,
        end: _EndOfStep,
    ) -> StepMetrics:
        seconds = time.perf_counter() - start
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens=batch.tokens,
            images=sum(map(len, batch.sizes.values())),
            step_time_s=seconds,
            peak_memory_bytes=end.peak_memory_bytes,
            skipped_samples=batch.skipped,
            data_time_s=waited,
            boundary_time_s=end.boundary_time_s,
            mfu=utilisation(self.shapes, self.job.frozen, batch, seconds, self.topology),
            stopping=end.stopping,
            extra={
                "patches": self._patches(batch),
                "supervised_tokens": batch.supervised,
                "encoder_idle_share": end.encoder_idle_share,
                "encoder_idle_share_predicted": idle_share(*batch.encoder_loads),
                "encoder_padding_share": end.encoder_padding_share,
                "text_idle_share_predicted": idle_share(*batch.text_loads),
                "text_padding_share": end.text_padding_share,
                **self._filled(batch),
            },
        )

    def _filled(self, batch: StepBatch) -> dict[str, float | int]:
        """With a token budget, which share of it the step's packs take, and the number of micro-batches."""
        budget, count = self.job.budget, len(batch.micro_batches)
        if budget is None:
            return {}
        packs = count * self.batch.replicas
        return {"budget_share": batch.tokens / (packs * budget.tokens), "micro_batches": count}

    def _patches(self, batch: StepBatch) -> int:
        """Patches of all images of a step."""
        encoders = self.shapes.encoders
        return sum(sum(encoders[name].sequences(size)) for name, sizes in batch.sizes.items() for size in sizes)

    def on_any_rank(self, flag: object) -> bool:
        """Whether `flag` is true on at least one rank, the same on each."""
        with self.watched("the question whether any rank was asked to stop"):
            return bool(self.all_gather([float(bool(flag))]).max())

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks have come here, however long they work. `what` is waited for, in words."""
        with self.interpreter.watchdog.waiting(lambda: what):
            on_every(self.topology.host, lambda: None)

    def all_gather(self, numbers: Sequence[float]) -> torch.Tensor:
        """All ranks' numbers, fp64 [ranks, numbers] on the host; as many on each rank."""
        mine = on_device(torch.tensor(numbers, dtype=torch.float64), self.platform.device)
        everyone = mine.new_empty(self.topology.world_size * len(mine))
        dist.all_gather_into_tensor(everyone, mine, group=self.topology.world)
        return everyone.view(self.topology.world_size, -1).cpu()

    def all_reduce(self, counts: np.ndarray) -> np.ndarray:
        """The sum of all ranks' `counts`, int64 of any shape, the same on each rank."""
        total = torch.from_numpy(counts).to(self.platform.device, copy=True)
        dist.all_reduce(total, group=self.topology.world)
        return total.cpu().numpy()
