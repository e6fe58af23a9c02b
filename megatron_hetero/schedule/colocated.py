"""Both modules on the same ranks, without pipeline stages: per micro-batch

    encoder forward, boundary, text forward, text backward, boundary, encoder backward

so that activations of one micro-batch live at a time. The boundary is crossed explicitly rather than by autograd:
every rank takes part in both directions whether or not it holds a row, and a rank without images hangs nobody.

Crossings run beside other work: forward while the tokens are embedded, backward, from the moment at which the gradients
of the rows are known, while the text module finishes its own (those of the embedding).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hetero.boundary.communicator import BoundaryCommunicator, Crossing, LoadedPlan
from megatron_hetero.models.qwen2_5_vl.text import TextInput, TextModel
from megatron_hetero.models.qwen2_5_vl.vision import VisionInput, VisionModel
from megatron_hetero.platform import Platform


@dataclass(frozen=True, eq=False)
class DeviceMicroBatch:
    """A micro-batch on the device. `vision` and `boundary` are None where nobody has an image."""

    vision: VisionInput | None
    boundary: LoadedPlan | None
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
        """Count the time inside towards `name`, by which profilers show it too."""
        start = self._now()
        try:
            with torch.profiler.record_function(name):
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
    encoded = crossing = None
    if batch.vision is not None and batch.boundary is not None:
        with watch.part("vision"), torch.set_grad_enabled(trains_vision):
            encoded = vision(batch.vision)
        with watch.part("boundary"):
            crossing = communicator.start_forward(batch.boundary, encoded.detach()[: batch.boundary.forward.held])
    with watch.part("text embedding"):
        embedded = text.embed(batch.text)
    with watch.part("boundary"):
        rows = _no_rows(text, communicator) if crossing is None else crossing.wait()
    returning: list[Crossing] = []
    if batch.boundary is not None and trains_vision:
        _return_gradients(rows, batch.boundary, communicator, watch, returning)
    with watch.part("text"):
        loss = text(batch.text, embedded, rows)
        if loss.requires_grad:
            loss.backward()
    if returning:
        with watch.part("boundary"):
            grads = returning[0].wait()
        with watch.part("vision"):
            encoded.backward(_with_padding(grads, encoded))  # pyright: ignore
    return loss.detach()


def _return_gradients(
    rows: Tensor, plan: LoadedPlan, communicator: BoundaryCommunicator, watch: Stopwatch, returning: list[Crossing]
) -> None:
    """Let the gradients of the rows start on their way back as soon as they are known."""
    rows.requires_grad_()

    def start(leaf: Tensor) -> None:
        with watch.part("boundary"):
            returning.append(communicator.start_backward(plan, leaf.grad))  # pyright: ignore[reportArgumentType]

    rows.register_post_accumulate_grad_hook(start)


def _no_rows(text: TextModel, communicator: BoundaryCommunicator) -> Tensor:
    return torch.zeros(0, communicator.width, dtype=text.config.params_dtype, device=communicator.device)


def _with_padding(grads: Tensor, encoded: Tensor) -> Tensor:
    """Gradients of the rows that crossed, and zeros for those that pad the encoder's output."""
    return torch.nn.functional.pad(grads, (0, 0, 0, len(encoded) - len(grads)))
