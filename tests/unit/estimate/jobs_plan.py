"""What the workers of the pool run for the tests of plans: real steps on the data that a plan assumes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.measuring.trial import assumed_step
from megatron_hetero.boundary.loaded import BufferPool
from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.parameters import parameters_of
from megatron_hetero.groups.megatron import fsdp_groups
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.watchdog import Stopwatch
from megatron_hetero.models.layers import offload as activations
from megatron_hetero.schedule import semantics as gathering
from megatron_hetero.schedule.contract import StepResult
from megatron_hetero.step.data_parallel import Replicated
from megatron_hetero.step.execution import StepExecution
from megatron_hetero.train.start import build_trainer
from megatron_hetero.train.trainer import Trainer

BUCKET = 20_000
"""Elements of a bucket of gradients."""


def measure(flags: list[str]) -> dict[str, Any]:
    """Bytes by kind that one real step takes on this rank, rows that it sends and receives, and its parameters."""
    config = load_config(flags)
    with mock.patch.object(gathering, "BUCKET", BUCKET):
        run = build_trainer(config, Platform(CPU, "gloo"))
    run.writer.close()  # Workers outlive their runs: those of another pool could not write to the same log.dir.
    step = assumed_step(run)
    live = LiveActivations(run)
    pools = [_count_buffers(communicator) for communicator in run.interpreter.communicators.values()]
    with live:
        run.train_step(1, step)
    plans = {str(edge): [m.plan.boundaries[edge] for m in step.micro_batches if edge in m.plan.boundaries]
             for edge in run.job.edges}  # fmt: skip
    return {
        "weights": _bytes(m.data_parallel.weights(name) for m in run.modules for name in m.parameters),
        "gathered": live.most_gathered,
        "gradients": sum(map(_gradient_bytes, run.modules)),
        "optimizer": sum(_optimizer_bytes(optimizer, on_host=False) for optimizer in run.optimizer.sharded.values()),
        "host": sum(_optimizer_bytes(optimizer, on_host=True) for optimizer in run.optimizer.sharded.values()),
        "host activations": sum(map(_offloaded_bytes, run.modules)),
        "activations": live.peak,
        "boundary": sum(pool.peak for pool in pools),
        "forward": {name: _rows([plan.forward for plan in own]) for name, own in plans.items()},
        "backward": {name: _rows([plan.backward for plan in own if plan.backward]) for name, own in plans.items()},
        "parameters": {
            m.name: [list(m.parameters), sum(p.numel() for p in m.parameters.values())] for m in run.modules
        },
        "planned": {m.name: _planned(run, m) for m in run.modules},
    }


def _planned(run: Trainer, module: Any) -> list[Any]:
    tp, stages = module.holders.size(), [chunk.stage for chunk in module.chunks]
    found = parameters_of(module.name, run.shapes, tp, stages, run.job.frozen.tensors)
    return [[p.name for p in found], sum(p.elements for p in found)]


def _rows(directions: list[Any]) -> tuple[int, int, int]:
    """Rows received and sent, and exchanges, in all micro-batches."""
    return (
        sum(d.received_rows for d in directions),
        sum(d.sent_rows for d in directions),
        sum(d.collectives for d in directions),
    )


# ---------------------------------------------------------------------------------------------------- measures


def _bytes(tensors: Any) -> int:
    """Bytes of the memory that tensors lie in."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _gradient_bytes(module: Any) -> int:
    sharing = module.data_parallel
    if isinstance(sharing, Replicated):
        return sum(buffer.gradients.nbytes for buffer in sharing.memory)
    return sum(gradients.nbytes for gradients in sharing.summed)


def _offloaded_bytes(module: Any) -> int:
    """Host memory for activations: as much as was in use at once."""
    offload = module.chunks[0].offload
    return 0 if offload is None else offload.pool.nbytes


def _optimizer_bytes(optimizer: Any, *, on_host: bool) -> int:
    """State, and master weights of their own, in host memory or the rest."""
    if optimizer is None:
        return 0
    states = [s for shard in optimizer.shards.values() for s in (shard.master, *shard.moments.values())]
    kept = optimizer.module.data_parallel.weights
    weights = {kept(name).untyped_storage().data_ptr() for name in optimizer.module.parameters}
    tensors = [t for stored in states for t in stored.tensors if t.untyped_storage().data_ptr() not in weights]
    return _bytes(tensors) if optimizer.algorithm.offload == on_host else 0


class _CountedBuffers(BufferPool):
    """Buffers that know the most that there were."""

    def __init__(self, width: int, device: torch.device):
        super().__init__(width, device)
        self.lent, self.peak = 0, 0

    def acquire(self, size: int) -> Tensor:
        buffer = super().acquire(size)
        self.lent += buffer.nbytes
        self.peak = max(self.peak, self.lent + sum(b.nbytes for b in self._free))
        return buffer

    def release(self, buffer: Tensor) -> None:
        super().release(buffer)
        self.lent -= buffer.nbytes


def _count_buffers(communicator: Any) -> _CountedBuffers:
    communicator._buffers = _CountedBuffers(communicator.width, communicator.device)
    return communicator._buffers


class _Kept:
    """A tensor that autograd keeps; leaves the books when autograd lets it go."""

    def __init__(self, tensor: Tensor, books: dict[int, list[int]]):
        self.tensor, self.books, self.address = tensor.detach(), books, tensor.untyped_storage().data_ptr()
        self.books.setdefault(self.address, [0, tensor.untyped_storage().nbytes()])[0] += 1

    def __del__(self) -> None:
        self.books[self.address][0] -= 1
        if not self.books[self.address][0]:
            del self.books[self.address]


class LiveActivations:
    """Inside, the most bytes that lived at once on this rank: of what autograd keeps, without parameters, and of the
    hidden states and rows that the interpreter keeps. Each memory counts once.
    """

    def __init__(self, run: Trainer):
        self.peak, self.saved, self.execution, self.most_gathered = 0, {}, None, 0
        self.copies = WeakSet[activations.Copy]()
        kept = [m.data_parallel.weights(name) for m in run.modules for name in m.parameters]
        self.parameters = {t.untyped_storage().data_ptr() for t in kept}
        parts = [part for m in run.modules for chunk in m.chunks for part in chunk.modules()]
        self.shared = [each for part in parts for group in fsdp_groups(part) for each in group.fsdp_params]
        self.hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self.copying = mock.patch.object(activations, "Copy", partial(_CountedCopy, self))
        run.interpreter.watch = _Sampler(run.platform, self)  # pyright: ignore[reportAttributeAccessIssue]
        run.interpreter.run = partial(self._execute, run)

    def __enter__(self) -> Self:
        self.hooks.__enter__()
        self.copying.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.copying.stop()
        self.hooks.__exit__(*error)

    def _execute(
        self,
        run: Trainer,
        schedule: Any,
        load: Any,
        after_backward: Callable[[str], None] | None = None,
        before_last: Callable[[str, int], None] | None = None,
    ) -> StepResult:
        self.execution = StepExecution(
            run.interpreter, schedule, load, after_backward or (lambda _: None), before_last or (lambda *_: None)
        )
        return self.execution.run()

    def _pack(self, tensor: Tensor) -> Any:
        is_weight = any(isinstance(t, torch.nn.Parameter) for t in (tensor, tensor._base))
        if is_weight or tensor.untyped_storage().data_ptr() in self.parameters or not tensor.untyped_storage().nbytes():
            return _Plain(tensor)
        kept = _Kept(tensor, self.saved)
        self.sample()
        return kept

    def sample(self) -> None:
        """Look at what lives now."""
        gathered = (t for each in self.shared if hasattr(each, "_unsharded_param") for t in each.all_gather_outputs)
        self.most_gathered = max(self.most_gathered, sum(t.untyped_storage().nbytes() for t in gathered))
        offloaded = [copy.device for copy in self.copies if copy.device is not None]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*offloaded, *self._held())}
        extra = sum(size for address, size in held.items() if address not in self.saved)
        self.peak = max(self.peak, extra + sum(size for _, size in self.saved.values()))

    def _held(self) -> Iterator[Tensor]:
        execution = self.execution
        if execution is None:
            return
        for of_kind in (
            execution.inputs,
            *execution.outputs.values(),
            *execution.called.values(),
            execution.received,
            execution.embedded,
            execution.row_grads,
        ):
            yield from of_kind.values()
        for rows in execution.rows.values():
            yield from (t for leaf in rows.leaves.values() for t in (leaf, leaf.grad) if t is not None)
        yield from (buffer for buffer, _ in execution.receives.values())
        for crossing in execution.crossings.values():
            if crossing._wire_dtype == crossing._dtype:
                yield crossing._output
            phases: Any = crossing._phases
            frame = phases.gi_frame  # What is sent lives as long as the exchange.
            if frame is not None:
                yield frame.f_locals["rows"]


class _CountedCopy(activations.Copy):
    """What is offloaded, as long as it is on the device."""

    def __init__(self, live: LiveActivations, saved: Tensor):
        super().__init__(saved)
        self.live = live
        live.copies.add(self)
        live.sample()

    def bring(self, device: Tensor) -> None:
        super().bring(device)
        self.live.sample()


class _Plain:
    """What is not counted."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class _Sampler(Stopwatch):
    """Looks at what lives after every action."""

    def __init__(self, platform: Platform, live: LiveActivations):
        super().__init__(platform)
        self.live = live

    @contextlib.contextmanager
    def part(self, name: str, label: str = "") -> Iterator[None]:
        with super().part(name, label):
            yield
        self.live.sample()
