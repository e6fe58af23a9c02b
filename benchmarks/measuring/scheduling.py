"""One model in one layout, under several schedules in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch.distributed as dist

from benchmarks.measuring.memory import Memory
from benchmarks.measuring.recording import ActionWatch, LiveActivations
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import Platform
from megatron_hetero.job.job import JobSpec
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings
from megatron_hetero.train.trainer import Trainer
from pretrain_vlm import build_run

LEARNING_RATE = 1e-5


def run_flags(folder: Path, vision: str, text: str, samples: int) -> list[str]:
    """Flags of a run that trains `samples` samples of `folder` in a step, one in a micro-batch."""
    flags = f"--model.hf_path {folder}/model --model.dtype float32 --data.registry.d.annotations {folder}/data.jsonl "
    flags += f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false --data.workers 0 "
    flags += f"--train.iters 100000 --train.global_batch_size {samples} --train.micro_batch_size 1 "
    flags += f"--optimizer.lr {LEARNING_RATE} --optimizer.schedule constant --log.dir {folder}/log "
    return [*flags.split(), "--vision-parallel", vision, "--text-parallel", text]


@dataclass(frozen=True, eq=False)
class JobOfOneSchedule(JobSpec):
    """A job whose steps all have the schedule `chosen`."""

    chosen: Schedule

    def schedule_of(self, micro_batches: int, *, evaluation: bool = False) -> Schedule:
        return self.chosen


class ScheduleBench:
    """One rank of a run, with its only batch, planned for each schedule; each order names one of these."""

    def __init__(
        self,
        platform: Platform,
        folder: Path,
        vision: str,
        text: str,
        samples: int,
        settings: Mapping[str, ScheduleSettings],
    ):
        self.memory = Memory(platform)
        run = build_run(load_config(run_flags(folder, vision, text, samples)), platform)
        self.trainer = trainer = run.trainer
        self.watch = ActionWatch(platform, [module.name for module in trainer.job.schedule.encoders])
        trainer.runner.watch = self.watch
        layouts, micro_batches = trainer.topology.layouts, trainer.job.schedule.micro_batches
        self._schedules = {name: build_schedule(layouts, micro_batches, chosen) for name, chosen in settings.items()}
        self._batches = {}
        for name, schedule in self._schedules.items():
            runs = {encoder: schedule.in_one_call(encoder) for encoder in run.loader.partitioner.encoders}
            partitioner = replace(run.loader.partitioner, runs=lambda _, runs=runs: runs)
            self._batches[name] = replace(run.loader, partitioner=partitioner).load(1, map)

    def schedule(self, name: str) -> Schedule:
        """What `name` stands for."""
        return self._schedules[name]

    def loss(self, name: str) -> float:
        """The sum of token losses of the batch."""
        return self._trainer(name).gradients(self._batches[name]).loss_sum

    def step(self, name: str) -> float:
        """Train once; seconds."""
        trainer = self._trainer(name)
        dist.barrier()
        start = time.perf_counter()
        trainer.train_step(1, self._batches[name])
        return time.perf_counter() - start

    def record(self, name: str) -> list[tuple[str, float, float]]:
        """Train once; text, start and end of each action."""
        self.step(name)
        return self.watch.spans

    def peak_activation_bytes(self, name: str) -> int:
        """Train once; the most that the encoders on this rank kept for their backward passes at a time."""
        parameters = [p for module in self.trainer.optimizer.modules for p in module.parameters.values()]
        self.watch.live = live = LiveActivations(parameters)
        self.step(name)
        self.watch.live = None
        return live.peak_bytes

    def peak_bytes(self, name: str) -> int:
        """Train once; the peak memory of that."""
        return self.memory.peak(lambda: self.step(name))

    def _trainer(self, name: str) -> Trainer:
        self.watch.spans.clear()
        self.watch.read()
        job = {each.name: getattr(self.trainer.job, each.name) for each in fields(self.trainer.job)}
        return replace(self.trainer, job=JobOfOneSchedule(**job, chosen=self._schedules[name]))
