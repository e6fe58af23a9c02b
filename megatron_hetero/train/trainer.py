"""Training steps on one rank: forward, backward and optimizer update, synchronized with all other ranks."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan

import numpy as np
import torch
import torch.distributed as dist

from megatron_hetero.base.errors import NotFiniteError, SharedError
from megatron_hetero.data.balance import idle_share
from megatron_hetero.data.device import to_device
from megatron_hetero.data.loader import StepBatch
from megatron_hetero.data.packing import bad_counts
from megatron_hetero.groups.collective import on_every
from megatron_hetero.groups.platform import on_host
from megatron_hetero.groups.topology import Topology
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.names import TEXT
from megatron_hetero.schedule.contract import StepResult, chunks_of
from megatron_hetero.step.algorithms import learning_rate
from megatron_hetero.step.execution import SUMS
from megatron_hetero.step.gradients import GradientSummary, GradientTable, require_finite
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.runner import Runner
from megatron_hetero.train.measures import StepProfiler, peak_flops, step_flops, take_loads
from megatron_hetero.train.metrics import StepMetrics

Laps = Mapping[str, Sequence[float]]
"""Durations in seconds on this rank of each run of a module and each boundary crossing, by name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class IssuedStep:
    """A step whose work has been issued to the device, and what the host reads once the device has done it.

    Attributes:
        step: number of the step.
        batch: its batch.
        began: when the step began, by `time.perf_counter`, including the `waited` seconds for its batch.
        ended: function that waits for the device, and returns the time of the end (see `Platform.mark`).
        laps: function that then returns the `Laps` of the step.
        memory, stopping: peak memory before the update, and whether this rank was asked to stop.
        balance: load-balancing loss of this rank.
        loads: the result of `take_loads`.
        table: losses and squared norms of all ranks; None if nothing was trained.
        scale: factor of the gradients, a scalar on the device; NaN if this step, or a step that had not been read when
            it was issued, is not finite, so that the update is skipped.
    """

    step: int
    batch: StepBatch
    began: float
    waited: float
    ended: Callable[[], float]
    laps: Callable[[], Laps]
    memory: int
    stopping: bool
    balance: torch.Tensor
    loads: tuple[Sequence[int], torch.Tensor]
    table: GradientTable | None
    scale: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Trainer:
    """Trains the modules on this rank, step by step. The host may issue a step before it reads the previous one: it
    then waits for the device once a step, while the device has more work.

    Attributes:
        job: specification of modules, batches and schedules.
        topology: topology of all modules.
        optimizer: optimizer of the modules on this rank, encoders first.
        runner: runner that executes the schedule on these modules.
        profiler: profiler that traces chosen steps.
        figures: a host group of all ranks for figures of steps, which no other thread uses.
        issued: steps that have been issued but not read, oldest first.
    """

    job: JobSpec
    topology: Topology
    optimizer: JointOptimizer
    runner: Runner
    profiler: StepProfiler
    figures: dist.ProcessGroup
    issued: deque[IssuedStep] = field(default_factory=deque[IssuedStep])

    def train_step(self, step: int, batch: StepBatch, waited: float = 0.0, stop: object = False) -> StepMetrics:
        """Issue a step, and read it; see `issue_step` and `read_step`."""
        assert not self.issued, "all earlier steps have been read"
        self.issue_step(step, batch, waited, stop)
        return self.read_step()

    def issue_step(self, step: int, batch: StepBatch, waited: float = 0.0, stop: object = False) -> None:
        """Issue forward, backward and update of a step to the device, without waiting for its results. If all samples
        were skipped, no weights are updated.

        `waited`: seconds spent waiting for the batch. `stop`: an object that is true once this rank was
        asked to stop, read before the update. The device skips the update if the loss or a gradient of this step, or of
        one that has not been read, is not finite; `read_step` then raises.
        """
        start = time.perf_counter() - waited
        if batch.sample_lengths and batch.supervised == 0:
            raise SharedError(
                f"step {step}: found no supervised token in the global batch, expected some, because the loss "
                f"divides by their number; raise the batch size, or correct the data"
            )
        scale = before = self.issued[-1].scale if self.issued else None
        result = table = rows = None
        with self.profiler.step(step):
            if batch.sample_lengths:  # Without trained samples, only the learning rate schedule advances.
                result = self._run(batch)
                table = self._summed(result)
                scale = table.scale(batch.supervised, self.job.config.optimizer.clip_grad)
                if before is not None:
                    scale = torch.where(before.isnan(), before, scale)
            with self.watched(f"the update of step {step}"):
                memory, stopping = self.topology.platform.peak_memory_bytes(), bool(stop)
                sums = result.metrics.get(TEXT, {}) if result is not None and self.counts_loss else {}
                layers, loads = take_loads(self.optimizer.modules, self.topology)
                # Copy results before the update: the copies would otherwise wait for the weights to be gathered.
                balance, loads = on_host(sums.get("balance_loss", torch.zeros(()))), on_host(loads)
                if table is not None and scale is not None:
                    rows = table.on_host()
                    self._update(step, scale)
        self.issued.append(
            IssuedStep(
                step=step,
                batch=batch,
                began=start,
                waited=waited,
                ended=self.topology.platform.mark(),
                laps=self.runner.watch.take(),
                memory=memory,
                stopping=stopping,
                balance=balance,
                loads=(layers, loads),
                table=rows,
                scale=scale,
            )
        )

    def read_step(self) -> StepMetrics:
        """Wait until the oldest step that was issued but not read has ended, and return its metrics. Collective.

        Raises `SharedError` if the loss or a gradient is not finite. The weights and states are then those before this
        step, and steps that were issued after it are forgotten.
        """
        issued = self.issued[0]
        with self.watched(f"the end of step {issued.step}"):
            ended = issued.ended()
            summary = None if issued.table is None else issued.table.read()
            try:
                if summary is not None:
                    self._refuse_faults(issued.step, summary)
            except NotFiniteError:
                self.optimizer.uncount(sum(each.table is not None for each in self.issued))
                self.issued.clear()
                raise
            metrics = self._metrics(issued, summary)
        self.issued.popleft()
        if self.issued:  # The device began the next step at the end of this one.
            self.issued[0] = replace(self.issued[0], began=max(self.issued[0].began, ended))
        seconds = ended - issued.began
        mfu = self._utilisation(issued.batch, seconds)
        return replace(metrics, step_time_s=seconds, data_time_s=issued.waited, mfu=mfu)

    def _utilisation(self, batch: StepBatch, seconds: float) -> float | None:
        """Return the model FLOPs utilisation of a step over all devices; None if the device's peak is unknown."""
        peak = peak_flops(self.topology.platform.device_name)
        if peak is None:
            return None
        return step_flops(self.job.shapes, self.job.frozen, batch) / (seconds * self.topology.world_size * peak)

    def gradients(self, batch: StepBatch) -> GradientSummary:
        """Run forward and backward of all micro-batches, then sum over ranks without scaling gradients by 1/N."""
        return self._summed(self._run(batch)).read()

    def _run(self, batch: StepBatch) -> StepResult:
        self.optimizer.zero_grad()
        micro_batches = batch.micro_batches
        schedule = self.job.schedule_of(len(micro_batches))
        return self.runner.run(schedule, lambda m: to_device(micro_batches[m], self.topology.platform.device))

    def _summed(self, result: StepResult) -> GradientTable:
        with self.watched(SUMS):
            return self.optimizer.reduce(result.loss, loss_counts_here=self.counts_loss)

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a watchdog context for waiting on other ranks outside the schedule; `what` describes the wait."""
        return self.topology.watchdog.doing(lambda: f"{what}, with all other ranks,")

    @property
    def counts_loss(self) -> bool:
        """Whether this rank adds its loss to the sum over ranks: only one rank of each last-stage tp group does."""
        layout, rank = self.topology.layouts[TEXT], self.topology.rank
        if rank not in layout:
            return False
        at = layout.coordinate(rank)
        return at.tp == 0 and at.pp == layout.pp - 1

    def _update(self, step: int, scale: torch.Tensor) -> None:
        """Step all optimizers, with gradients multiplied by `scale`, unless it is NaN."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step, group.setdefault("initial_lr", group["lr"]))
        self.optimizer.update_unless_nan(scale, step)

    def _rate(self, step: int, peak: float) -> float:
        """Return the learning rate of a step for a schedule with maximum `peak`, to which its minimum is scaled."""
        config, total = self.job.config.optimizer, self.job.config.train.iters
        minimum = config.min_lr if peak == config.lr else config.min_lr * peak / config.lr
        return learning_rate(
            step, peak=peak, minimum=minimum, schedule=config.schedule, warmup=config.warmup_iters, total=total
        )

    def _refuse_faults(self, step: int, summary: GradientSummary) -> None:
        fix = "Lower optimizer.lr, add warm-up, or look for broken samples in this step."
        require_finite(f"step {step}", summary.faults, fix)

    def _metrics(self, issued: IssuedStep, summary: GradientSummary | None) -> StepMetrics:
        """Return the metrics of a step that has ended, except its duration. Collective: all ranks exchange their
        figures. `summary`: the summary of its gradients; None if nothing was trained.
        """
        batch, laps = issued.batch, issued.laps()
        runs = self._run_counts(batch)
        figures = self._figures(issued, runs, laps)
        columns = self.all_gather(list(figures.values())).T.tolist()
        by_rank: dict[str, list[float]] = dict(zip(figures, columns, strict=True))
        encoders, balanced = self.job.shapes.encoders, self.job.balance and batch.supervised
        loads = {number: max(by_rank[f"load {number}"]) for number in self._expert_layers}
        pieces = [(encoders[name], size) for name, sizes in batch.sizes.items() for size in sizes]
        rounds = [
            [by_rank[f"{name} run {number}"][rank] for rank in self.topology.layouts[name].ranks]
            for name, count in runs.items()
            for number in range(count)
        ]
        return StepMetrics(
            step=issued.step,
            loss=nan if summary is None else summary.loss_sum / batch.supervised,
            grad_norm=nan if summary is None else summary.norm / batch.supervised,
            lr=self._rate(issued.step, self.job.text.settings.lr or self.job.config.optimizer.lr),
            tokens=batch.tokens,
            images=len(pieces),
            step_time_s=0.0,
            peak_memory_bytes=int(max(by_rank["memory"])),
            skipped_samples=batch.skipped,
            boundary_time_s=sum(laps.get("boundary", [])),
            stopping=bool(max(by_rank["stopping"])),
            extra={
                "patches": sum(sum(shape.sequences(size)) for shape, size in pieces),
                "supervised_tokens": batch.supervised,
                **bad_counts(batch.bad),
                "encoder_idle_share": idle_share(*rounds),
                "encoder_idle_share_predicted": idle_share(*batch.encoder_loads),
                "encoder_padding_share": _share(sum(by_rank["patch padding"]), sum(by_rank["patches"])),
                "text_idle_share_predicted": idle_share(*batch.text_loads),
                "text_padding_share": _share(sum(by_rank["padding"]), sum(by_rank["tokens"])),
                **self._filled(batch),
                **({"expert_load": max(loads.values())} if loads else {}),
                **{f"expert_load_{number}": load for number, load in loads.items()},
                **({"balance_loss": sum(by_rank["balance loss"]) / batch.supervised} if balanced else {}),
            },
        )

    def _figures(self, issued: IssuedStep, runs: Mapping[str, int], laps: Laps) -> dict[str, float]:
        """Return this rank's figures of a step that has ended, with the same names on all ranks: peak memory, stop
        flag, numbers of tokens and patches in samples and in padding, load-balancing loss, loads of experts (0 for
        layers on other ranks), and durations of encoder runs. `runs`: number of runs of each encoder.
        """
        encoders = self.job.shapes.encoders
        inputs = [each for micro_batch in issued.batch.micro_batches for each in micro_batch.inputs.items()]
        texts = [text for name, text in inputs if name == TEXT]
        chunks = [chunk for name, given in inputs if name in encoders for chunk in chunks_of(given)]
        embedded = [chunk for chunk in chunks if chunk.patches is not None]
        tokens = sum(text.positions.shape[1] for text in texts)
        patch_padding = sum(chunk.padding for chunk in embedded)
        figures = {
            "memory": float(issued.memory),
            "stopping": float(issued.stopping),
            "padding": float(sum(len(text.tokens) for text in texts) - tokens),
            "tokens": float(tokens),
            "patch padding": float(patch_padding),
            "patches": float(sum(len(each.patches) for each in embedded) - patch_padding),
            "balance loss": float(issued.balance),
        }
        layers, loads = issued.loads
        load_by_layer = dict(zip(layers, loads.tolist(), strict=True))
        for number in self._expert_layers:
            figures[f"load {number}"] = load_by_layer.get(number, 0.0)
        for name, count in runs.items():
            seconds = laps.get(name, ())
            assert len(seconds) <= count, f"{len(seconds)} runs of {name}, {count} in the schedule"
            for number in range(count):
                figures[f"{name} run {number}"] = seconds[number] if number < len(seconds) else 0.0
        return figures

    @property
    def _expert_layers(self) -> Sequence[int]:
        """Layer numbers of the text module's layers with experts."""
        return self.job.shapes.text.architecture.layers_in(EXPERTS.name)

    def _run_counts(self, batch: StepBatch) -> dict[str, int]:
        """Return the number of forward and backward runs of each encoder in a step."""
        schedule, counts = self.job.schedule_of(len(batch.micro_batches)), dict[str, int]()
        for name in self.job.shapes.encoders:
            role = schedule.roles[schedule.role_index[self.topology.layouts[name].ranks[0]]]
            counts[name] = sum(action.op == "run" and action.module == name for action in role.actions)
        return counts

    def _filled(self, batch: StepBatch) -> dict[str, float | int]:
        """Return the share of the token budget that packs fill, and the number of micro-batches; an empty dict if there
        is no token budget.
        """
        budget, count = self.job.budget, len(batch.micro_batches)
        if budget is None:
            return {}
        packs = count * self.job.batch.replicas
        return {"budget_share": batch.tokens / (packs * budget.tokens), "micro_batches": count}

    def on_any_rank(self, flag: object) -> bool:
        """Return whether `flag` is true on at least one rank. Collective."""
        with self.watched("the question whether any rank was asked to stop"):
            return bool(self.all_gather([float(bool(flag))]).max())

    def wait_for_all(self, what: str) -> None:
        """Wait, without a time limit, until all ranks have called this method. `what` describes the wait."""
        with self.topology.watchdog.waiting(lambda: what):
            on_every(self.topology.host, lambda: None)

    def all_gather(self, numbers: Sequence[float]) -> torch.Tensor:
        """Gather `numbers` of all ranks as fp64 [ranks, numbers] on the host; all ranks pass equally many numbers."""
        local = torch.tensor(numbers, dtype=torch.float64)
        gathered = local.new_empty(self.topology.world_size * len(local))
        dist.all_gather_into_tensor(gathered, local, group=self.figures)
        return gathered.view(self.topology.world_size, -1)

    def all_reduce(self, counts: np.ndarray) -> np.ndarray:
        """Return the sum of `counts` over all ranks, int64 in any shape, equal on all ranks."""
        total = torch.from_numpy(counts).to(self.topology.platform.device, copy=True)
        dist.all_reduce(total, group=self.topology.world)
        return total.cpu().numpy()


def _share(amount: float, rest: float) -> float:
    return amount / max(1.0, amount + rest)
