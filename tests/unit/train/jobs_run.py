"""What the workers of the pool run for the tests of gradients, optimizers, the loader and whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.models.items.types import Item
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.schedule.contract import StepResult
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.step.gradients import scale_gradients
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.number_formats import upper_half
from megatron_hetero.train.hf_export import Value, assemble, gather_parameters
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


# ----------------------------------------------------------------------------------------------- faults


@contextmanager
def _before_last_backward(run: Trainer, edit: Callable[[str], None], loss_too: float) -> Iterator[None]:
    """Let `edit(module)` change gradients before the last backward pass, in which sums over ranks begin; add
    `loss_too`.
    """
    real = run.interpreter.run

    def edited(
        schedule: Schedule, load: Any, after: Callable[[str], None], before: Callable[[str, int], None]
    ) -> StepResult:
        def before_last(module: str, stage: int) -> None:
            edit(module)
            before(module, stage)

        result = real(schedule, load, after, before_last)
        return replace(result, loss=result.loss + loss_too)

    with mock.patch.object(run.interpreter, "run", edited):
        yield


def fault(flags: list[str], where: str, on_rank: int, value: float) -> dict[str, Any]:
    """Put `value` into one gradient of module `where` (or into the loss) on one rank; then try a step."""
    run = build(flags)

    models: dict[str, Any] = {module.name: module.chunks[0] for module in run.modules}
    here = run.topology.rank == on_rank

    def edit(module: str) -> None:
        if here and module == where:
            next(p for p in models[where].parameters() if p.requires_grad).main_grad.view(-1)[3] = value

    _, batch, _ = next(iter(run.batches()))
    before = stored(run)
    message = ""
    with _before_last_backward(run, edit, value if here and where == "loss" else 0.0):
        faults = run.gradients(batch).faults
        try:
            run.train_step(5, batch)
        except UserError as error:
            message = str(error)
    after = stored(run)
    return {"faults": faults, "message": message, "unchanged": all((before[n] == after[n]).all() for n in before)}


# -------------------------------------------------------------------------------------------- optimizers


def groups_of_step(flags: list[str], number: int) -> list[tuple[float, float, float]]:
    """(lr, weight decay, smallest lr) of every parameter group after step `number`."""
    run = build(flags)
    run._update(number)
    groups, last = run.optimizer.param_groups, run.config.train.iters
    return sorted((g["lr"], g["weight_decay"], run._rate(last, g["initial_lr"])) for g in groups)


def reported_rate(flags: list[str], number: int) -> float:
    """The learning rate that step `number` reports."""
    run = build(flags)
    run._update(number)
    return run._rate(number, run.config.optimizer.lr)


def precision(flags: list[str]) -> dict[str, Any]:
    """Types of parameters, gradients and masters after one step, and whether parameters are rounded masters."""
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.train_step(1, batch)
    masters, rounded = [], True
    for optimizer in run.optimizer.sharded.values():
        for name, shard in optimizer.shards.items():
            weights = optimizer.module.data_parallel.weights(name)[shard.start : shard.stop]
            master = shard.master.read(0, shard.stop - shard.start)
            masters.append(master.dtype)
            rounded = rounded and bool(torch.equal(weights, upper_half(master.view(torch.int32) + (1 << 15))))
    parameters = [p for module in run.modules for p in module.parameters.values()]
    return {
        "parameters": {str(p.dtype) for p in parameters},
        "gradients": {str(p.main_grad.dtype) for p in parameters},  # pyright: ignore[reportAttributeAccessIssue]
        "masters": {str(dtype) for dtype in masters},
        "rounded": rounded,
    }


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


# ---------------------------------------------------------------------------------------------- boundary


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
