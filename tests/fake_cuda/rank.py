"""One rank's step on a GPU that computes nothing: built, moments made, forward, backward, sums and update."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measuring.actions import parsed
from benchmarks.measuring.trial import FAKE, assumed_step, drawn_trainer
from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import KINDS, Estimate
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Stopwatch, Watchdog
from megatron_hetero.models.layers import dispatch, rotary
from megatron_hetero.schedule.actions import Action
from megatron_hetero.step.buffers import BufferedGradients, BufferedWeights
from megatron_hetero.train.trainer import Trainer
from tests.fake_cuda import packages
from tests.fake_cuda.cases import Case
from tests.fake_cuda.device import GPU, FakeGpu, Usage

OF_KIND = {"F": "forward", "R": "forward again", "B": "backward"}
SUMS, WEIGHTS, UPDATE, REST = "gradient sums", "weights", "update", "rest"
BEFORE = "the end of the step before"


class _Phases(Stopwatch):
    """The stopwatch and the watchdog of a rank, which tell the GPU besides which part of a step it is in."""

    def __init__(self, platform: Platform, gpu: FakeGpu, watchdog: Watchdog):
        super().__init__(platform)
        self.gpu, self.watchdog = gpu, watchdog

    @contextlib.contextmanager
    def lap(self, name: str, label: str = "") -> Iterator[None]:
        with self.gpu.during(_phase(parsed(label))), super().lap(name, label):
            yield

    @contextlib.contextmanager
    def doing(self, described: Callable[[], str]) -> Iterator[None]:
        what = described()
        phase = SUMS if what.startswith("the sums") else UPDATE if what.startswith("the update") else self.gpu.phase
        with self.gpu.during(phase), self.watchdog.doing(described):
            yield


def _phase(action: Action) -> str:
    if action.op == "run":
        return f"{action.module} {OF_KIND[action.kind]}"
    return "boundary" if action.op in ("start", "finish") else "pipeline"


@contextlib.contextmanager
def _apart(gpu: FakeGpu) -> Iterator[None]:
    """Inside, what is done once in a step counts by itself, also in the midst of a forward or backward pass: gathers of
    weights, and where runs wait for these; sums of gradients that begin `within` a backward pass, but for the last,
    which begins at its end.
    """
    real, real_gather, real_wait = BufferedGradients._start, BufferedWeights.publish, BufferedWeights.wait

    def start(sums: BufferedGradients, place: int) -> None:
        inside = gpu.phase.endswith("backward") and place < len(sums.buckets) - 1
        with gpu.during(within(gpu.phase) if inside else SUMS):
            real(sums, place)

    def gather(gathers: BufferedWeights) -> None:
        with gpu.during(BEFORE if gpu.phase == BEFORE else WEIGHTS):
            real_gather(gathers)

    def wait(gathers: BufferedWeights, places: Iterable[int] | None = None) -> None:
        with gpu.during(WEIGHTS):
            real_wait(gathers, places)

    with (
        mock.patch.object(BufferedGradients, "_start", start),
        mock.patch.multiple(BufferedWeights, publish=gather, wait=wait),
    ):
        yield


def within(phase: str) -> str:
    """The phase of sums that begin within another."""
    return f"{SUMS} within {phase}"


def measure(case: Case, gpu: FakeGpu) -> dict[str, Any]:
    """What one step of the case's rank asks of `gpu`, which is in use, and what the plan says that it takes; see
    `_report`.
    """
    # Tables and numbers that a case before has made in this process.
    for value in (*vars(rotary).values(), *vars(dispatch).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    gpu.capability = case.capability
    gpu.symmetric.clear()
    config = load_config(case.flags)
    plan = Estimate.of(config, case.world)
    dist.init_process_group(FAKE, store=FakeStore(), rank=case.rank, world_size=case.world)
    try:
        usage, before = gpu.usage, gpu.usage.live
        trainer = drawn_trainer(config, Platform(GPU, FAKE, FAKE))
        phases: Any = _Phases(trainer.topology.platform, gpu, trainer.topology.watchdog)
        trainer.runner.watch = trainer.runner.watchdog = phases
        trainer = replace(trainer, topology=replace(trainer.topology, watchdog=phases))
        batch = assumed_step(trainer)
        with gpu.during(BEFORE), _apart(gpu):
            for optimizer in trainer.optimizer.sharded.values():
                optimizer.module.weights.publish()
        usage.start_again()
        with gpu.during(REST), _apart(gpu), packages.installed(gpu, case.packages):
            trainer.train_step(1, batch)
        planned = dict(zip(KINDS, plan.memory[case.rank].tolist(), strict=True))
        return (
            _report(usage, trainer)
            | {"peak": usage.peak - before, "planned": planned}
            | {"host": int(plan.host_activations[case.rank])}
        )
    finally:
        dist.destroy_process_group()
        # What modules of the same process share; the next one makes its own.
        parallel_state.destroy_global_memory_buffer()


def _report(usage: Usage, trainer: Trainer) -> dict[str, Any]:
    """`kernels`: by phase, how many ran, and `all`. `layers`: of this rank, by module. `ops`: of what kinds they were.
    `waits`: [phase, place, times]. `mixed`: ops that were given tensors of both devices. `copied`: bytes out and back
    beside the computation.
    """
    kernels = {phase: of_phase.total() for phase, of_phase in sorted(usage.kernels.items())}
    ops: Counter[str] = sum(usage.kernels.values(), Counter())
    return {
        "kernels": kernels | {"all": sum(kernels.values())},
        "layers": {m.name: sum(len(chunk.stage.layers) for chunk in m.chunks) for m in trainer.optimizer.modules},
        "micro_batches": trainer.job.batch.micro_batches,
        "ops": dict(ops.most_common()),
        "waits": [[*where, times] for where, times in sorted(usage.waits.items())],
        "mixed": dict(usage.mixed),
        "copied": dict(usage.copied),
        "at_peak": usage.at_peak,
    }
