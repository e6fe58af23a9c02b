"""What the workers of the pool run for the tests of gradients, optimizers, the loader and whole steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.config.schema import load_config
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.models.items.types import Item
from megatron_hetero.models.stages import EncoderModel, TextModel
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.step.gradients import scale_gradients
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.train.export import Value, assemble, gather_parameters
from megatron_hetero.train.start import build_trainer
from megatron_hetero.train.trainer import Trainer
from tests.support.items import IMAGE
from tests.support.pool import platform

Arrays = dict[str, np.ndarray]
MakeFlags = Callable[..., list[str]]
"""The fixture `make_flags`."""


def build(flags: list[str]) -> Trainer:
    """The run that the program would build, without its metrics: workers outlive their runs, and those of another pool
    could not write to the same log.dir.
    """
    run = build_logged(flags)
    run.writer.close()
    return run


def build_logged(flags: list[str]) -> Trainer:
    """The run that the program would build. Close its writer."""
    return build_trainer(load_config(flags), platform())


def fp32_weight(module: TrainedModule, name: str) -> torch.Tensor:
    """A parameter, whole, in fp32."""
    return module.whole_weight(name).float()


def stored(run: Trainer, value: Value = fp32_weight) -> Arrays:
    """A value of every parameter by stored name, on rank 0."""
    parts = gather_parameters(run.modules, run.topology, value)
    return {name: tensor.numpy().copy() for name, tensor in assemble(parts, stored_shapes(run.shapes))}


def gradient(run: Trainer) -> Arrays:
    """The gradients in the buffers, zero where a parameter is frozen."""
    return stored(run, TrainedModule.whole_gradient)


def step(flags: list[str]) -> dict[str, Any]:
    """One training step: weights before and after, the gradient that was applied, and what was reported."""
    run = build(flags)
    before = stored(run)
    _, batch, _ = next(iter(run.batches()))
    metrics = run.train_step(1, batch)
    return {
        "before": before,
        "after": stored(run),
        "gradient": gradient(run),
        "loss": metrics.loss,
        "norm": metrics.grad_norm,
        "lr": metrics.lr,
        "tokens": metrics.tokens,
        "images": metrics.images,
    }


def gradients_of_steps(flags: list[str]) -> list[dict[str, Any]]:
    """Loss and gradients (scaled by 1/N, not clipped) of each configured step; nothing is updated."""
    run, results = build([*flags, "--optimizer.name", "sgd"]), []
    for _, batch, _ in run.batches():
        summary = run.gradients(batch)
        scale_gradients(run.modules, 1.0 / batch.supervised)
        results.append(
            {
                "loss": summary.loss_sum / batch.supervised,
                "norm": summary.norm / batch.supervised,
                "gradient": gradient(run),
                "tokens": batch.tokens,
                "lengths": batch.sample_lengths,
            }
        )
    return results


def losses(flags: list[str]) -> list[float]:
    """Train all configured steps."""
    run = build(flags)
    return [run.train_step(number, batch).loss for number, batch, _ in run.batches()]


def dealt(flags: list[str]) -> dict[str, Any]:
    """Train all configured steps: losses, the numbers of the samples that this rank's replica trained, the lengths of
    all samples, and metrics.
    """
    run, numbers, lengths, metrics = build(flags), [], [], []
    for number, batch, _ in run.batches():
        lengths.append(batch.sample_lengths)
        numbers.append([n for micro_batch in batch.micro_batches for n in micro_batch.samples])
        metrics.append(run.train_step(number, batch))
    extra = [{**each.extra, "skipped": each.skipped_samples} for each in metrics]
    return {"losses": [each.loss for each in metrics], "numbers": numbers, "lengths": lengths, "extra": extra}


def error_of_changed_sample(flags: list[str]) -> str:
    """What the first step says where rank 1 reads samples with one more token than other ranks."""
    run = build(flags)
    tokenize = Processor.tokenize

    def longer(processor: Processor, record: Record) -> TokenizedSample:
        sample = tokenize(processor, record)
        return replace(
            sample,
            input_ids=np.append(sample.input_ids, 1),
            supervised=np.append(sample.supervised, False),
            position_ids=np.pad(sample.position_ids, ((0, 0), (0, 1))),
        )

    changed = mock.patch.object(Processor, "tokenize", longer) if run.topology.rank else nullcontext()
    try:
        with changed:
            next(iter(run.batches()))
    except UserError as error:
        return str(error)
    return ""


def with_skips(flags: list[str]) -> dict[str, Any]:
    """Train and save as the program does: of each step whether it changed a weight, its loss, and how many samples it
    left out; what is said at the end, and where the run went on from.
    """
    run, steps = build_logged(flags), []
    with run.writer:
        for number, batch, _ in run.batches():
            before = stored(run)
            metrics = run.train_step(number, batch)
            run.writer.write(metrics)
            run.saver.after(number, metrics.stopping)
            after = stored(run)
            changed = any(not np.array_equal(value, after[name]) for name, value in before.items())
            steps.append((changed, metrics.loss, metrics.skipped_samples))
    return {"steps": steps, "notes": run.writer.notes(), "from": run.resumed.step}


def error_of(flags: list[str]) -> tuple[int, str]:
    """How many steps were trained before the data or the numbers stopped the run, and what it said."""
    done = 0
    try:
        run = build(flags)
        for number, batch, _ in run.batches():
            run.train_step(number, batch)
            done = number
    except UserError as error:
        return done, str(error)
    return done, ""


def error_of_killed_worker(flags: list[str]) -> str:
    """What a run says in which rank 1 loses the processes of its loader after the first step."""
    run = build(flags)
    try:
        for number, _, _ in run.batches():
            if number == 1 and run.topology.rank == 1:
                _kill_readers()
    except UserError as error:
        return str(error)
    return ""


def _kill_readers() -> None:
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            if b"reader_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


# ---------------------------------------------------------------------------------------------- schedule


class LiveBytes:
    """What is saved for backward inside `saving`, until it is let go: bytes now and at most."""

    def __init__(self) -> None:
        self.now, self.peak = 0, 0

    def saving(self) -> Any:
        """The context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved.tensor)

    def _save(self, tensor: torch.Tensor) -> Any:
        self.now += tensor.nbytes
        self.peak = max(self.peak, self.now)
        return _Saved(tensor, self)


class _Saved:
    def __init__(self, tensor: torch.Tensor, counter: LiveBytes):
        self.tensor, self.counter = tensor, counter

    def __del__(self) -> None:
        self.counter.now -= self.tensor.nbytes


def encoder_activations(flags: list[str]) -> tuple[int, int]:
    """The most bytes that the encoder saves for backward at a time in one step, and what is left of them after it."""
    run, live, forward = build(flags), LiveBytes(), EncoderModel.forward

    def counted(*args: Any) -> Any:
        with live.saving():
            return forward(*args)

    _, batch, _ = next(iter(run.batches()))
    with mock.patch.object(EncoderModel, "forward", counted):
        run.gradients(batch)
    return live.peak, live.now


# ---------------------------------------------------------------------------------------------- boundary


def overlaps(flags: list[str]) -> dict[str, tuple[float, float]]:
    """Intervals, in microseconds, of a profiled step on rank 0, whose crossings wait for the other ranks.

    "forward" and "backward": the all-to-alls of the boundary; "embedding" and "gradient": those of the tokens, made
    slow, since a thread of gloo takes its time to begin.
    """
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.gradients(batch)  # Once before, so that nothing is set up in the step that is watched.
    start, embed = BoundaryCommunicator._start, TextModel.embed

    def late_start(*args: Any) -> Any:
        time.sleep(0.0 if run.topology.rank == 0 else 0.4)
        return start(*args)

    def slow_embed(*args: Any) -> torch.Tensor:
        time.sleep(0.1)
        embedded = embed(*args)
        embedded.register_hook(lambda _: time.sleep(0.1))  # its gradient takes a while too
        return embedded

    with (
        mock.patch.object(BoundaryCommunicator, "_start", late_start),
        mock.patch.object(TextModel, "embed", slow_embed),
        profile(activities=[ProfilerActivity.CPU]) as trace,
    ):
        run.gradients(batch)
    events = sorted(trace.events() or [], key=lambda event: event.time_range.start)
    forward, backward = [e for e in events if e.name == "gloo:all_to_all"]
    [embedding] = [e for e in events if e.name == "text embedding"]
    [gradient] = [e for e in events if e.name == "EmbeddingBackward0"]
    named = {"forward": forward, "backward": backward, "embedding": embedding, "gradient": gradient}
    return {name: (event.time_range.start, event.time_range.end) for name, event in named.items()}


# ------------------------------------------------------------------------------------------------ loader


def decoded(flags: list[str]) -> list[dict[str, Any]]:
    """Per step: which images this rank decoded, those that its encoder replica encodes, and how many there are."""
    run = build(flags)
    seen: list[tuple[str, str]] = []
    samples: Any = run.loader.reader
    reader, results = samples.processor.readers[IMAGE], []
    real = reader.patches

    def spy(item: Item, pieces: Any) -> np.ndarray:
        seen.append((item.where, item.path.name))
        return real(item, pieces)

    with mock.patch.object(reader, "patches", spy):
        for _, batch, _ in run.batches():
            results.append({"decoded": sorted(seen), "images": len(batch.sizes["vision"])})
            seen.clear()
    return results


def batches(flags: list[str]) -> list[list[tuple[list[int], bytes, int]]]:
    """Tokens, pixels and supervised tokens of every micro-batch of every step."""
    run = build(flags)
    return [
        [(m.pack.input_ids.tolist(), _bytes(m.patches), b.supervised) for m in b.micro_batches if m.pack is not None]
        for _, b, _ in run.batches()
    ]


def _bytes(pixels: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(of_encoder.numpy().tobytes() for of_encoder in pixels.values())


def export_of(flags: list[str], target: Path) -> Arrays:
    """Train one step and export; returns the weights as they were."""
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.train_step(1, batch)
    run.export(target)
    return stored(run)
