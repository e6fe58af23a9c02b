"""Both modules on the same ranks, without pipeline stages: per micro-batch

    encoder forward, boundary, text forward, text backward, boundary, encoder backward

so that activations of one micro-batch live at a time. The boundary is crossed explicitly rather than by autograd:
every rank takes part in both directions whether or not it holds a row, and a rank without images hangs nobody.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator
from megatron_hetero.boundary.plan import BoundaryPlan
from megatron_hetero.models.qwen2_5_vl.text import TextInput, TextModel
from megatron_hetero.models.qwen2_5_vl.vision import VisionInput, VisionModel
from megatron_hetero.platform import Platform


@dataclass(frozen=True, eq=False)
class DeviceMicroBatch:
    """A micro-batch on the device. `vision` and `boundary` are None where nobody has an image."""

    vision: VisionInput | None
    boundary: BoundaryPlan | None
    text: TextInput


class Stopwatch:
    """Seconds spent in named parts of a step: of the device's stream on a GPU (without waiting for it), of the host on
    a CPU.
    """

    def __init__(self, platform: Platform):
        self._platform = platform
        self._laps: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside towards `name`."""
        start = self._now()
        try:
            yield
        finally:
            self._laps.append((name, start, self._now()))

    def read(self) -> dict[str, float]:
        """Seconds per part since the last reading. On a GPU the device must have been waited for."""
        seconds: dict[str, float] = {}
        for name, start, stop in self._laps:
            lap = start.elapsed_time(stop) / 1000 if self._platform.is_cuda else stop - start
            seconds[name] = seconds.get(name, 0.0) + lap
        self._laps.clear()
        return seconds

    def _now(self) -> Any:
        if not self._platform.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def run_step(
    vision: VisionModel,
    text: TextModel,
    communicator: BoundaryCommunicator,
    micro_batches: Iterable[DeviceMicroBatch],
    watch: Stopwatch,
) -> Tensor:
    """Forward and backward of all micro-batches; gradients accumulate. Returns this rank's sum of token losses, fp32
    scalar.
    """
    total = torch.zeros((), dtype=torch.float32, device=communicator.device)
    for batch in micro_batches:
        total += _run_micro_batch(vision, text, communicator, batch, watch)
    return total


def _run_micro_batch(
    vision: VisionModel,
    text: TextModel,
    communicator: BoundaryCommunicator,
    batch: DeviceMicroBatch,
    watch: Stopwatch,
) -> Tensor:
    trains_vision = batch.boundary is not None and any(p.requires_grad for p in vision.parameters())
    encoded = rows = _no_rows(text, communicator)
    if batch.boundary is not None:
        with watch.part("vision"), torch.set_grad_enabled(trains_vision):
            encoded = vision(batch.vision)
        with watch.part("boundary"):
            rows = communicator.forward(batch.boundary, encoded.detach())
    with watch.part("text"):
        rows.requires_grad_(trains_vision)
        loss = text(batch.text, rows)
        if loss.requires_grad:
            loss.backward()
    if batch.boundary is not None and rows.grad is not None:
        with watch.part("boundary"):
            grads = communicator.backward(batch.boundary, rows.grad)
        with watch.part("vision"):
            encoded.backward(_with_padding(grads, encoded))
    return loss.detach()


def _no_rows(text: TextModel, communicator: BoundaryCommunicator) -> Tensor:
    return torch.zeros(0, communicator.width, dtype=text.config.params_dtype, device=communicator.device)


def _with_padding(grads: Tensor, encoded: Tensor) -> Tensor:
    """Gradients of the rows that crossed, and zeros for those that pad the encoder's output."""
    return torch.nn.functional.pad(grads, (0, 0, 0, len(encoded) - len(grads)))
