"""One rank's share of a layout on real kernels: the project's own modules, schedule, gradient sums and optimizer, with
drawn weights, on the step that a plan assumes. The other ranks are not there: what stands in for collectives
(`groups.EchoGroup`) is timed and taken off, so that times are those of what the rank itself computes, an upper bound
for what communication leaves.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu import cases, groups, trace
from benchmarks.gpu.honest import without
from benchmarks.gpu.hopper import swiglu
from benchmarks.gpu.phases import Phases, split
from benchmarks.gpu.record import Record
from benchmarks.measuring.material import write_samples
from benchmarks.measuring.trial import assumed_step, drawn_trainer
from megatron_hetero.config.schema import Config, load_config
from megatron_hetero.data.device import to_device
from megatron_hetero.data.loader import StepBatch
from megatron_hetero.estimate.estimate import KINDS, Estimate
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers import kernels, mlp
from megatron_hetero.models.stages import EncoderInput
from megatron_hetero.schedule.contract import MicroBatchInputs
from megatron_hetero.train.measures import peak_flops, step_flops
from megatron_hetero.train.trainer import Trainer

MODELS = Path(__file__).parents[2] / "examples/models"
RANK = 0
MICRO_BATCHES, MORE = 2, 8
"""Micro-batches of a step, and of a second one, of which what is done once in a step is a smaller part."""
STEPS, STEPS_OF_MORE = 5, 3
LEFT = 0.08
"""Share of a device's memory that must be left besides what a plan counts: CUDA's context, fragmentation."""

BEFORE = ("flash_attn", "torch_flash", "bucketed")
"""Attention kernels that are not for Hopper alone."""

MEMORY = 0.1
"""How far the peak of a step may be from the plan's memory, relatively."""


@dataclass(frozen=True)
class Layout:
    """Layouts over `world` ranks; `replicas` of the text module."""

    world: int
    vision: str
    text: str
    replicas: int

    def __str__(self) -> str:
        return f"{self.vision}|{self.text} on {self.world} ranks"


LAYOUTS = {
    "7B": (Layout(8, "sp:8", "tp:4,dp:2", 2),),
    # More replicas share the optimizer's state out; all else of a rank stays as it is.
    "32B": tuple(
        Layout(8 * dp, f"sp:8,dp:{dp}" if dp > 1 else "sp:8", f"tp:8,dp:{dp}" if dp > 1 else "tp:8", dp)
        for dp in (1, 2, 4)
    ),
}
"""Of each model those that are tried: the first that the device has the memory for."""
SMALL = {"7B": (Layout(8, "sp:4,dp:2", "tp:2,dp:4", 4),), "32B": (Layout(4, "sp:4", "tp:4", 1),)}


def measure(record: Record, folder: Path, model: str, when: str = "", *, small: bool) -> None:
    """Build the rank, and take steps: of two micro-batches and of more. `when`: "before" for two micro-batches with
    kernels that are not for Hopper.
    """
    with _kernels_before() if when else contextlib.nullcontext():
        _measure(record, folder, model, more=not when, small=small)


@contextlib.contextmanager
def _kernels_before() -> Iterator[None]:
    """Inside, attention has the kernels `BEFORE` only, and the compiler's SwiGLU is for any width."""
    choose = kernels.choose_kernel

    def before(*given: Any) -> kernels.KernelName:
        name = choose(*given)
        return name if name in BEFORE else "torch_flash"

    activation = swiglu.as_before if torch.cuda.is_available() else mlp.swiglu
    with mock.patch.object(kernels, "choose_kernel", before), mock.patch.object(mlp, "swiglu", activation):
        yield


def _measure(record: Record, folder: Path, model: str, *, more: bool, small: bool) -> None:
    platform = replace(Platform.detect(), backend=groups.EchoGroup.backend, host_backend=groups.EchoGroup.backend)
    if small:
        write_samples(folder, cases.SMALL, [])
    place = folder / "model" if small else MODELS / f"qwen2_5_vl_{model.lower()}"
    layout, plan = _that_fits(record, (SMALL if small else LAYOUTS)[model], place, platform, small=small)
    groups.register()
    if platform.is_cuda:
        torch.cuda.set_device(platform.device)
    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=RANK, world_size=layout.world)
    record.put("planned GB", dict(zip(KINDS, (plan.memory[RANK] / 1e9).tolist(), strict=True)))
    _of_two(record, plan, platform)
    if not more:
        return
    _free(platform)
    plan = Estimate.of(load_config(_flags(place, layout, MORE, small=small)), layout.world, gpu=platform.is_cuda)
    record.put("more steps", {"micro-batches": MORE, **_steps(_rank(plan, platform), plan, STEPS_OF_MORE)})


def _rank(plan: Estimate, platform: Platform) -> RankOnDevice:
    """The rank of a plan, whose stand-ins for collectives are timed."""
    rank = RankOnDevice.build(plan.job.config, platform)
    groups.EchoGroup.watch = rank.watch
    return rank


def _free(platform: Platform) -> None:
    """Free the memory of a rank that nothing refers to."""
    gc.collect()
    if platform.is_cuda:
        torch.cuda.empty_cache()


def _that_fits(
    record: Record, layouts: tuple[Layout, ...], place: Path, platform: Platform, *, small: bool
) -> tuple[Layout, Estimate]:
    """The layout that is measured, with its plan; recorded, with those that would not fit."""
    device, too_large = device_bytes(platform), []
    layout, plan = layouts[0], None
    for layout in layouts:
        plan = Estimate.of(
            load_config(_flags(place, layout, MICRO_BATCHES, small=small)), layout.world, gpu=platform.is_cuda
        )
        needed = int(plan.memory[RANK].sum())
        if needed <= (1 - LEFT) * device or layout == layouts[-1]:
            break
        too_large.append(f"{layout} needs {needed / 1e9:.1f} GB")
    assert plan is not None, "there is a layout to try"
    sample = plan.assumed.sample
    record.put("layout", {
        "model": place.name, "layout": str(layout), "rank": RANK, "micro-batches": MICRO_BATCHES,
        "tokens of a pack": sample.tokens,
        "patches of its image": sum(plan.job.shapes.encoders["vision"].sequences(sample.sizes["vision"][0])),
        "dtype": plan.job.config.model.dtype, "device GB": None if device == float("inf") else device / 1e9,
    })  # fmt: skip
    record.put("does not fit", too_large)
    return layout, plan


def device_bytes(platform: Platform) -> float:
    """The device's memory; infinite on a CPU."""
    return torch.cuda.get_device_properties(platform.device).total_memory if platform.is_cuda else float("inf")


def _flags(place: Path, layout: Layout, micro_batches: int, *, small: bool) -> list[str]:
    tokens, side, dtype = (256, 112, "float32") if small else (6912, 1001, "bfloat16")
    return (
        f"--model.hf_path {place} --model.dtype {dtype} --vision-parallel {layout.vision} "
        f"--text-parallel {layout.text} --train.global_batch_size {micro_batches * layout.replicas} "
        f"--train.micro_batch_size 1 --plan.tokens {tokens} --plan.images 1 --plan.image_side {side} "
        f"--data.registry.none.annotations {place}/none.json --data.datasets none --optimizer.lr 1e-5"
    ).split()


@dataclass(frozen=True)
class RankOnDevice:
    """A rank that takes one step over and over."""

    trainer: Trainer
    batch: StepBatch
    watch: Phases

    @classmethod
    def build(cls, config: Config, platform: Platform) -> RankOnDevice:
        """In the default process group."""
        trainer, watch = drawn_trainer(config, platform, check=False), Phases(platform)
        trainer.runner.watch, trainer.runner.optimizer = watch, None  # Sums are a phase of their own.
        batch = assumed_step(trainer)
        if platform.is_cuda:
            # As the loader leaves it.
            batch = replace(batch, micro_batches=tuple(map(_pinned, batch.micro_batches)))
        gc.collect()
        return cls(trainer, batch, watch)

    def step(self) -> dict[str, float]:
        """One step as `Trainer.issue_step` takes it, timed in parts: the host waits for its end only. Seconds: of the
        whole, until the host had issued forward and backward, and of each phase and its stand-ins (see `phases.split`)
        on the device's stream.
        """
        trainer, platform = self.trainer, self.trainer.topology.platform
        platform.synchronize()
        start = time.perf_counter()
        with self.watch.lap("zero gradients"):
            trainer.optimizer.zero_grad()
        loss = trainer.runner.run(trainer.job.schedule, self.load).loss
        issued = time.perf_counter() - start
        with self.watch.lap("gradient sums"):
            table = trainer.optimizer.reduce(loss, loss_counts_here=trainer.counts_loss)
            scale = table.scale(self.batch.supervised, trainer.job.config.optimizer.clip_grad)
        with self.watch.lap("update"):
            trainer.optimizer.update_unless_nan(scale, 1)
        platform.synchronize()
        seconds = time.perf_counter() - start
        phases = {name: sum(laps) for name, laps in self.watch.read().items()}
        return {"step": seconds, "issued": issued, **phases}

    def load(self, micro_batch: int) -> Any:
        return to_device(self.batch.micro_batches[micro_batch], self.trainer.topology.platform.device)


def _pinned(micro_batch: MicroBatchInputs) -> MicroBatchInputs:
    """A micro-batch with its patches in pinned memory."""
    vision: EncoderInput | None = micro_batch.inputs.get("vision")
    if vision is None or vision.patches is None:
        return micro_batch
    pinned = replace(vision, patches=vision.patches.pin_memory())
    return replace(micro_batch, inputs={**micro_batch.inputs, "vision": pinned})


def _of_two(record: Record, plan: Estimate, platform: Platform) -> None:
    """Steps of two micro-batches: times, memory, kernels, and the host."""
    rank = _rank(plan, platform)
    # The real one, which refuses what is not finite.
    loss = rank.trainer.train_step(1, rank.batch).loss
    rank.watch.read()
    if platform.is_cuda:
        torch.cuda.reset_peak_memory_stats(platform.device)
    record.put("steps", {"loss": loss, **_steps(rank, plan, STEPS)})
    planned, used = int(plan.memory[RANK].sum()), platform.peak_memory_bytes()
    record.put("memory", {
        "planned GB": planned / 1e9,
        "peak GB": used / 1e9 if platform.is_cuda else None,
        "reserved GB": torch.cuda.max_memory_reserved(platform.device) / 1e9 if platform.is_cuda else None,
    })  # fmt: skip
    if platform.is_cuda:
        record.check("relative difference of the peak memory and the plan's", abs(used / planned - 1), MEMORY)
    _trace(record, rank)


def _steps(rank: RankOnDevice, plan: Estimate, count: int) -> dict[str, Any]:
    """Medians of `count` steps, after one that does not count. Rates are of times less stand-ins."""
    rank.step()
    steps = [rank.step() for _ in range(count)]
    medians, stand_ins = split({name: median(step[name] for step in steps) for name in steps[0]})
    left, trainer = without(medians, stand_ins), rank.trainer
    flops = step_flops(trainer.job.shapes, trainer.job.frozen, rank.batch) / trainer.topology.world_size
    peak = peak_flops(trainer.topology.platform.device_name)
    return {
        "milliseconds": {name: 1e3 * value for name, value in medians.items()},
        "stand-ins ms": {name: 1e3 * value for name, value in stand_ins.items()},
        "least and most ms": [1e3 * f(step["step"] for step in steps) for f in (min, max)],
        "TFLOP of a step": flops / 1e12, "TFLOP/s": flops / left["step"] / 1e12,
        "MFU without communication": flops / left["step"] / peak if peak else None,
        "TFLOP/s by phase": _rates(plan, left),
    }  # fmt: skip


def _rates(plan: Estimate, seconds: dict[str, float]) -> dict[str, float]:
    """TFLOP/s of each module's forward and backward, by the operations that the plan counts."""
    rates = {}
    for (module, kind, _), operations in plan.work.items():
        phase = f"{module} {'backward' if kind == 'B' else 'forward'}"
        runs = (*plan.job.schedule.module[module].forward_kinds, "B")
        if kind in runs and seconds.get(phase):
            micro_batches = plan.job.batch.micro_batches
            rates[phase] = rates.get(phase, 0.0) + micro_batches * operations / seconds[phase] / 1e12
    return rates


def _trace(record: Record, rank: RankOnDevice) -> None:
    """Kernels of a step with stand-ins among the copies, and the host's time where nothing holds the host up."""
    watch = rank.watch
    groups.EchoGroup.watch = None
    watch.marks = marks = list[str]()
    found = trace.of(rank.step, rank.trainer.topology.platform, marks)
    watch.marks = None
    record.put("trace", found)
    watch.apart = True
    watch.host.clear()
    rank.step()
    watch.apart = False
    kernels_of = {phase: int(of_phase["kernels"]) for phase, of_phase in found["phases"].items()}
    seconds = dict(watch.host)
    record.put("host", {
        **{phase: _of_host(1e3 * s, kernels_of.get(phase, 0), rank, phase) for phase, s in seconds.items()},
        "all phases": _of_host(1e3 * sum(seconds.values()), found["kernels"], rank, ""),
    })  # fmt: skip


def _of_host(ms: float, kernels: int, rank: RankOnDevice, phase: str) -> dict[str, float | None]:
    """The host's time of a phase, for each of its kernels, and for each layer and micro-batch if a module runs."""
    module = phase.partition(" ")[0]
    shapes, passes = rank.trainer.job.shapes, rank.trainer.job.batch.micro_batches
    layers = shapes[module].layers if module in shapes.modules else None
    return {
        "ms": ms,
        "µs for a kernel": 1e3 * ms / kernels if kernels else None,
        "ms for a layer": ms / layers / passes if layers else None,
    }
