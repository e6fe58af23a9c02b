"""Records when ranks do the actions of a schedule, what their encoders keep meanwhile, and how long work and transfers
take, as the simulator wants to know it. Times are the host's: on a CPU those of the work itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.actions import parsed
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Stopwatch
from megatron_hetero.schedule.actions import Action, irecv, run, send, start
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.simulator import DurationKey, Span

Recorded = Mapping[int, Sequence[Span]]
"""By rank, what it did in a step. Seconds by one clock for all ranks, from the first start of any of them."""


class ActionWatch(Stopwatch):
    """The program's own stopwatch, which also keeps start and end of each action, and lets `live` follow encoders."""

    def __init__(self, platform: Platform, encoders: Sequence[str]):
        super().__init__(platform)
        self._encoders = encoders
        self.live: LiveActivations | None = None
        self.spans: list[tuple[str, float, float]] = []
        """Text of the action, start and end by `time.perf_counter`, which processes of one machine share."""

    @contextlib.contextmanager
    def lap(self, name: str, label: str = "") -> Iterator[None]:
        start = time.perf_counter()
        with super().lap(name, label), self._followed(label):
            yield
        self.spans.append((label, start, time.perf_counter()))

    def _followed(self, label: str) -> contextlib.AbstractContextManager[Any]:
        action = parsed(label)
        encodes = action.op == "run" and action.kind != "B" and action.module in self._encoders
        return self.live if self.live is not None and encodes else contextlib.nullcontext()


class LiveActivations:
    """While inside, notes what autograd keeps for backward passes; follows until it is freed. Each storage counts once,
    parameters do not.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.peak_bytes, self._bytes = 0, 0
        self._holders: dict[int, int] = {}
        self._excluded = {p.untyped_storage().data_ptr() for p in parameters}

    def __enter__(self) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, saved: Tensor) -> Tensor | _Kept:
        return saved if saved.untyped_storage().data_ptr() in self._excluded else _Kept(saved, self)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """One more saved tensor uses the storage."""
        held = self._holders.get(storage.data_ptr(), 0)
        self._holders[storage.data_ptr()] = held + 1
        self._bytes += 0 if held else storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """One less."""
        self._holders[storage.data_ptr()] -= 1
        if not self._holders[storage.data_ptr()]:
            del self._holders[storage.data_ptr()]
            self._bytes -= storage.nbytes()


class _Kept:
    """A saved tensor, which tells when autograd lets it go."""

    def __init__(self, tensor: Tensor, live: LiveActivations):
        self.tensor, self._live = tensor, live
        live.hold(tensor.untyped_storage())

    def __del__(self) -> None:
        self._live.release(self.tensor.untyped_storage())


def _unpack(kept: Tensor | _Kept) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


# ------------------------------------------------------------------------------------- what was recorded


def on_one_clock(by_rank: Sequence[Sequence[tuple[str, float, float]]]) -> dict[int, list[Span]]:
    """What all ranks' `ActionWatch.spans` say, from the first start on."""
    origin = min(start for spans in by_rank for _, start, _ in spans)
    return {
        rank: [Span(parsed(text), begin - origin, end - origin) for text, begin, end in spans]
        for rank, spans in enumerate(by_rank)
    }


def step_seconds(step: Recorded) -> float:
    """From the first start to the last end."""
    return max(spans[-1].end for spans in step.values())


def bubble(step: Recorded) -> float:
    """Mean over ranks of the share of the step in which they do not compute."""
    busy = [sum(s.end - s.start for s in spans if s.action.op == "run") for spans in step.values()]
    return 1 - sum(busy) / len(busy) / step_seconds(step)


def require_order(schedule: Schedule, step: Recorded) -> None:
    """Check that each rank did its actions in the schedule's order, and that none received anything before it was
    sent. Every rank on a side of a boundary must have exchanged rows with every rank on the other side, but for
    micro-batches that are computed in one call, whose rows lie on some ranks alone. Raises `AssertionError`.
    """
    at = {(rank, span.action): span for rank, spans in step.items() for span in spans}
    for rank, spans in step.items():
        assert tuple(span.action for span in spans) == schedule.actions_of(rank), f"order of rank {rank}"
        for span in spans:
            for sender in _sent_by(schedule, rank, span.action):
                assert at[sender].start <= span.end, f"{span.action} of rank {rank} ended before {sender} began"


def _sent_by(schedule: Schedule, rank: int, action: Action) -> Iterator[tuple[int, Action]]:
    """The ranks and actions that send what `action` receives. Gradients of rows leave inside the backward that makes
    them, before the action that says so.
    """
    if action.op == "wait":
        yield _partners(schedule, rank, action)[1]
    elif action.op == "finish":
        if any(len(call) > 1 and action.micro_batch in call for call in schedule.in_one_call(action.edge.source)):
            return
        encoder, text = schedule.sides(action.edge)
        senders, receivers = (encoder, text) if action.kind == "F" else (text, encoder)
        entered = schedule.stages_of(action.edge)[1]
        sends = run("B", schedule.text.name, entered, action.micro_batch) if action.kind == "B" else _started(action)
        yield from ((sender, sends) for sender in senders if rank in receivers)


def _started(action: Action) -> Action:
    return start(action.kind, action.edge, action.micro_batch)


def _partners(schedule: Schedule, rank: int, action: Action) -> tuple[tuple[int, Action], tuple[int, Action]]:
    """The `irecv` and the `send` of what `action` waits for, with their ranks."""
    assert isinstance(action.stage, int) and isinstance(action.peer, int)
    posted = irecv(action.kind, action.module, action.stage, action.peer, action.micro_batch)
    sent = send(action.kind, action.module, action.peer, action.stage, action.micro_batch)
    return (rank, posted), (schedule.peer_rank(rank, action), sent)


# ------------------------------------------------------------------------------- what the simulator is told


def median_durations(steps: Sequence[Recorded]) -> dict[DurationKey, float]:
    """Seconds of each work: the median over ranks and steps of the mean over micro-batches, of which several may be one
    call.
    """
    found: dict[DurationKey, list[float]] = {}
    for spans in (spans for step in steps for spans in step.values()):
        of_rank: dict[DurationKey, list[float]] = {}
        for span in (span for span in spans if span.action.op == "run"):
            of_rank.setdefault(_work(span.action), []).append(span.end - span.start)
        for key, seconds in of_rank.items():
            found.setdefault(key, []).append(mean(seconds))
    return {key: median(seconds) for key, seconds in found.items()}


def least_transfers(schedule: Schedule, steps: Sequence[Recorded]) -> dict[DurationKey, float]:
    """Seconds of each transfer and crossing from when both sides are ready to the end of its `wait` or `finish`: the
    least of a step, since more was spent on other work; the median over steps.
    """
    found: dict[DurationKey, list[float]] = {}
    for step in steps:
        least: dict[DurationKey, float] = {}
        at = {(rank, span.action): span for rank, spans in step.items() for span in spans}
        for rank, span in ((r, s) for r, spans in step.items() for s in spans if s.action.op in ("wait", "finish")):
            took = span.end - max(at[ready].start for ready in _made_ready_by(schedule, rank, span.action))
            key = _moved(span.action)
            least[key] = min(took, least.get(key, took))
        for key, seconds in least.items():
            found.setdefault(key, []).append(seconds)
    return {key: max(0.0, median(seconds)) for key, seconds in found.items()}


def _made_ready_by(schedule: Schedule, rank: int, action: Action) -> Iterator[tuple[int, Action]]:
    """The ranks and actions after which what `action` waits for can move."""
    if action.op == "wait":
        yield from _partners(schedule, rank, action)
    else:
        everyone = {member for side in schedule.sides(action.edge) for member in side}
        yield from ((member, _started(action)) for member in everyone)


def _work(action: Action) -> DurationKey:
    assert action.stage is not None
    return action.module, action.kind, action.stage


def _moved(action: Action) -> DurationKey:
    """As the simulator names it: by the sender's stage, or by the encoder."""
    return action.module, action.kind, action.peer if action.op == "wait" and isinstance(action.peer, int) else -1
