"""Training steps on one rank: forward, backward and update, in step with all other ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.errors import SharedError
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.config.schema import Config
from megatron_hetero.data.balance import idle_share
from megatron_hetero.data.encoder_shards import EncoderShare
from megatron_hetero.data.loader import MicroBatch, StepBatch
from megatron_hetero.data.packing import IGNORED, PackedBatch, bad_counts
from megatron_hetero.data.partition import StepPartitioner
from megatron_hetero.data.token_shards import TokenShare
from megatron_hetero.groups.collective import on_every
from megatron_hetero.groups.platform import Platform, on_device
from megatron_hetero.groups.topology import Topology
from megatron_hetero.groups.watchdog import Stopwatch
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.balance_loss import BalancedSamples
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.stages import EncoderInput, TextInput
from megatron_hetero.schedule.contract import DeviceMicroBatch, InParts, StepResult
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.step.algorithms import learning_rate
from megatron_hetero.step.execution import SUMS
from megatron_hetero.step.gradients import GradientSummary, clip_factor, require_finite
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.runner import Runner
from megatron_hetero.train.expert_load import take_loads
from megatron_hetero.train.measures import StepProfiler, utilisation
from megatron_hetero.train.metrics import StepMetrics

PADDING_TOKEN = 0
"""Fills shards: any token will do, since nothing attends to it and it predicts nothing."""


def to_device(
    batch: MicroBatch,
    platform: Platform,
    dtype: torch.dtype,
    outputs: Mapping[str, Collection[str]],
    balance: float = 0.0,
) -> DeviceMicroBatch:
    """Move a micro-batch to the device; patches arrive in `dtype`. `outputs`: by encoder, the outputs whose rows enter
    the text module. `balance`: weight of the loss that balances experts, see `JobSpec.balance`.
    """
    own, inputs = batch.share, {}
    for name, shares in own.encoders.items():
        patches = [_move(part, platform).to(dtype) for part in batch.patches.get(name, ())] or [None] * len(shares)
        parts = [_encoder_input(*part, platform) for part in zip(shares, patches, strict=True)]
        inputs[name] = parts[0] if len(parts) == 1 else InParts(parts)
    if own.text is not None and batch.pack is not None:
        balanced = _balanced(batch.pack, own.text, platform, balance) if balance else None
        inputs[TEXT] = replace(_text_input(batch.pack, own.text, platform, outputs), balanced=balanced)
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
    """Return the tokens of this rank's shard, with their labels."""
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


def _balanced(pack: PackedBatch, share: TokenShare, platform: Platform, weight: float) -> BalancedSamples:
    """Return the samples of a pack for the loss that balances experts."""
    starts, lengths = pack.cu_seqlens[1:], np.diff(pack.cu_seqlens)
    supervised = np.searchsorted(starts, np.flatnonzero(pack.labels != IGNORED), side="right")
    factors = weight * np.bincount(supervised, minlength=len(lengths)) / lengths.astype(np.float64) ** 2
    of_tokens = np.searchsorted(starts, share.tokens, side="right")
    return BalancedSamples(_move(of_tokens, platform), _move(factors.astype(np.float32), platform))


def _places(share: TokenShare, outputs: Mapping[str, Collection[str]]) -> dict[str, np.ndarray]:
    """Return the token positions of the rows of each output, encoder by encoder as stages receive them."""
    names = dict.fromkeys(name for each in outputs.values() for name in each)
    none = np.zeros(0, np.int64)
    return {
        name: np.concatenate([none, *(share.rows_at[encoder] for encoder, each in outputs.items() if name in each)])
        for name in names
    }


def _move(values: np.ndarray | Tensor, platform: Platform) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    return on_device(tensor, platform.device)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepTrainer:
    """Trains the parts of modules that a rank has, step by step. `optimizer`: of those parts, encoders first; `runner`
    runs their stages; `partitioner` assigns the rows of its micro-batches.
    """

    job: JobSpec
    topology: Topology
    optimizer: JointOptimizer
    runner: Runner
    partitioner: StepPartitioner
    watch: Stopwatch
    profiler: StepProfiler

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.job.config

    @property
    def shapes(self) -> ModelShapes:
        """Shapes of all modules."""
        return self.job.shapes

    @property
    def modules(self) -> tuple[TrainedModule, ...]:
        """This rank's parts of modules."""
        return self.optimizer.modules

    @property
    def platform(self) -> Platform:
        """Device and backend of this rank."""
        return self.topology.platform

    def train_step(self, step: int, batch: StepBatch, waited: float = 0.0, stop: object = False) -> StepMetrics:
        """Run forward, backward, and update; `waited`: seconds that the batch was waited for; `stop`: true, at the end
        of the step, where this rank was asked to stop.

        Where all samples were left out, nothing is updated. Raises `SharedError` before the update where the loss or a
        gradient is NaN or infinite.
        """
        start = time.perf_counter() - waited
        if batch.sample_lengths and batch.supervised == 0:
            raise SharedError(
                f"step {step}: found no supervised token in the global batch, expected some, because the loss "
                f"divides by their number; raise the batch size, or mend the data"
            )
        with self.profiler.step(step):
            if batch.sample_lengths:
                metrics = self._train(step, batch, stop)
            else:  # Only the learning rate advances.
                with self.watched(f"the end of step {step}"):
                    metrics = self._metrics(step, batch, {}, stop)
        seconds = time.perf_counter() - start
        used = utilisation(self.shapes, self.job.frozen, batch, seconds, self.topology)
        return replace(metrics, step_time_s=seconds, data_time_s=waited, mfu=used)

    def _train(self, step: int, batch: StepBatch, stop: object) -> StepMetrics:
        result = self._run(batch)
        summary = self._summed(result)
        self._refuse_faults(step, summary)
        # Whoever has read the summary has waited for all that was measured.
        laps = self.watch.read()
        norm = summary.norm / batch.supervised
        factor = clip_factor(norm, self.config.optimizer.clip_grad) / batch.supervised
        with self.watched(f"the update of step {step}"):
            # Before weights are gathered: the host would wait for these, and the next step's kernels for the host.
            metrics = self._metrics(step, batch, laps, stop, summary.loss_sum / batch.supervised, norm, result)
            self._update(step, factor)
        return metrics

    def gradients(self, batch: StepBatch) -> GradientSummary:
        """Run forward and backward of all micro-batches, then sum over ranks; gradients are not scaled by 1/N yet."""
        return self._summed(self._run(batch))

    def _run(self, batch: StepBatch) -> StepResult:
        self.optimizer.zero_grad()
        dtype, outputs = self.job.dtype, self.job.outputs
        schedule = self.job.schedule_of(len(batch.micro_batches))
        balance, micro_batches = self.job.balance, batch.micro_batches
        load = partial(to_device, platform=self.platform, dtype=dtype, outputs=outputs, balance=balance)
        return self.runner.run(schedule, lambda m: load(micro_batches[m]))

    def _summed(self, result: StepResult) -> GradientSummary:
        with self.watched(SUMS):
            return self.optimizer.reduce(result.loss, loss_counts_here=self.counts_loss).read()

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context for waiting on other ranks between the actions of the schedule."""
        return self.runner.watchdog.doing(lambda: f"{what}, with all other ranks,")

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss counts in the sum over ranks: one rank of each tp group that has a loss."""
        layout, rank = self.topology.layouts[TEXT], self.topology.rank
        if rank not in layout:
            return False
        at = layout.coordinate(rank)
        return at.tp == 0 and at.pp == layout.pp - 1

    def _update(self, step: int, scale: float = 1.0) -> None:
        """Step all optimizers, with gradients times `scale`."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step, group.setdefault("initial_lr", group["lr"]))
        self.optimizer.update(scale, step)

    def _rate(self, step: int, peak: float) -> float:
        """Return the learning rate of a step under the schedule that rises to `peak`; its minimum scales with that."""
        config, total = self.config.optimizer, self.config.train.iters
        minimum = config.min_lr if peak == config.lr else config.min_lr * peak / config.lr
        return learning_rate(
            step, peak=peak, minimum=minimum, schedule=config.schedule, warmup=config.warmup_iters, total=total
        )

    def _refuse_faults(self, step: int, summary: GradientSummary) -> None:
        fix = "Lower optimizer.lr, add warm-up, or look for broken samples in this step."
        require_finite(f"step {step}", summary.faults, fix)

    # ------------------------------------------------------------------------------------------------- metrics

    def _metrics(
        self,
        step: int,
        batch: StepBatch,
        laps: Mapping[str, Sequence[float]],
        stop: object,
        loss: float = math.nan,
        norm: float = math.nan,
        result: StepResult | None = None,
    ) -> StepMetrics:
        """Return the metrics of a step but for its time. All ranks exchange their numbers, once, before they update;
        the host waits for it. `laps`: this rank's seconds of each run of its modules. `result`: its sums.
        """
        layers = self.shapes.text.architecture.layers_in(EXPERTS.name)
        schedule = self.job.schedule_of(len(batch.micro_batches))
        runs = {name: self._runs(schedule, name) for name in self.shapes.encoders}
        own = [float(self.platform.peak_memory_bytes()), float(bool(stop)), *self._padding(batch)]
        own += [self._balance_loss(result), *take_loads(self.modules, self.topology, layers)]
        for name, count in runs.items():
            seconds = laps.get(name, [])
            own += [*seconds, *[0.0] * (count - len(seconds))]
        (memory, stopping, padding, tokens, patch_padding, patches, balance, *seconds) = self.all_gather(own).T.tolist()
        loads = {number: max(seconds.pop(0)) for number in layers}
        rounds = []
        for name, count in runs.items():
            rounds += [[of_run[rank] for rank in self.topology.layouts[name].ranks] for of_run in seconds[:count]]
            del seconds[:count]
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=self._rate(step, self.config.optimizer.lr),
            tokens=batch.tokens,
            images=sum(map(len, batch.sizes.values())),
            step_time_s=0.0,
            peak_memory_bytes=int(max(memory)),
            skipped_samples=batch.skipped,
            boundary_time_s=sum(laps.get("boundary", [])),
            stopping=bool(max(stopping)),
            extra={
                "patches": self._patches(batch),
                "supervised_tokens": batch.supervised,
                **bad_counts(batch.bad),
                "encoder_idle_share": idle_share(*rounds),
                "encoder_idle_share_predicted": idle_share(*batch.encoder_loads),
                "encoder_padding_share": _share(sum(patch_padding), sum(patches)),
                "text_idle_share_predicted": idle_share(*batch.text_loads),
                "text_padding_share": _share(sum(padding), sum(tokens)),
                **self._filled(batch),
                **({"expert_load": max(loads.values())} if loads else {}),
                **{f"expert_load_{number}": load for number, load in loads.items()},
                **({"balance_loss": sum(balance) / batch.supervised} if self.job.balance and result else {}),
            },
        )

    def _balance_loss(self, result: StepResult | None) -> float:
        """Return this rank's addend to the loss that balances experts, before the division by supervised tokens."""
        found = {} if result is None else result.metrics.get(TEXT, {})
        return float(found["balance_loss"]) if "balance_loss" in found and self.counts_loss else 0.0

    def _padding(self, batch: StepBatch) -> list[float]:
        """Return this rank's tokens of padding and of samples, and patches of padding and of items, in a step."""
        shares = [micro_batch.share for micro_batch in batch.micro_batches]
        texts = [share.text for share in shares if share.text is not None]
        embedded = [(name, patches) for share in shares for name, patches in share.patches.items()]
        encoders = self.shapes.encoders
        return [
            float(sum(text.padded - len(text.tokens) for text in texts)),
            float(sum(len(text.tokens) for text in texts)),
            float(sum(part.padding for share in shares for name in share.patches for part in share.encoders[name])),
            float(sum(patches.exchange.forward.needed * encoders[name].unit for name, patches in embedded)),
        ]

    def _runs(self, schedule: Schedule, encoder: str) -> int:
        """Return how often a rank of an encoder runs it in a step, forward and backward."""
        role = schedule.roles[schedule.role_index[self.topology.layouts[encoder].ranks[0]]]
        return sum(action.op == "run" and action.module == encoder for action in role.actions)

    def _filled(self, batch: StepBatch) -> dict[str, float | int]:
        """Return, with a token budget, the share of it that the step's packs fill, and the number of micro-batches."""
        budget, count = self.job.budget, len(batch.micro_batches)
        if budget is None:
            return {}
        packs = count * self.job.batch.replicas
        return {"budget_share": batch.tokens / (packs * budget.tokens), "micro_batches": count}

    def _patches(self, batch: StepBatch) -> int:
        encoders = self.shapes.encoders
        return sum(sum(encoders[name].sequences(size)) for name, sizes in batch.sizes.items() for size in sizes)

    # --------------------------------------------------------------------------------------------- all ranks

    def on_any_rank(self, flag: object) -> bool:
        """Return whether `flag` is true on at least one rank; the same on each."""
        with self.watched("the question whether any rank was asked to stop"):
            return bool(self.all_gather([float(bool(flag))]).max())

    def wait_for_all(self, what: str) -> None:
        """Wait until all ranks have come here, however long they work. `what` describes the wait."""
        with self.runner.watchdog.waiting(lambda: what):
            on_every(self.topology.host, lambda: None)

    def all_gather(self, numbers: Sequence[float]) -> torch.Tensor:
        """Return all ranks' numbers, fp64 [ranks, numbers] on the host; each rank passes as many."""
        mine = on_device(torch.tensor(numbers, dtype=torch.float64), self.platform.device)
        everyone = mine.new_empty(self.topology.world_size * len(mine))
        dist.all_gather_into_tensor(everyone, mine, group=self.topology.world)
        return everyone.view(self.topology.world_size, -1).cpu()

    def all_reduce(self, counts: np.ndarray) -> np.ndarray:
        """Return the sum of all ranks' `counts`, int64 of any shape, the same on each rank."""
        total = torch.from_numpy(counts).to(self.platform.device, copy=True)
        dist.all_reduce(total, group=self.topology.world)
        return total.cpu().numpy()


def _share(part: float, rest: float) -> float:
    return part / max(1.0, part + rest)
