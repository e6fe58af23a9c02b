"""The time of a step on a GPU, from what it asks for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from benchmarks.roofline.costs import Event
from benchmarks.roofline.devices import Assumed, Gpu
from benchmarks.roofline.timeline import Sharing, Timeline
from tests.fake_cuda.rank import BEFORE, REST, SUMS, UPDATE, WEIGHTS, within

DIRECTIONS = ("forward", "backward")
MODULES = ("vision", "text")
BETWEEN = ("boundary", "pipeline")
ENDING = ("gradient sums", "update", "weights", "rest")


RECOMPUTED = "recomputed"
ONCE = (BEFORE, WEIGHTS, REST, SUMS, UPDATE)
"""Phases of which a step has one, at its begin or its end."""


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase: of the device (the longer of its streams). `by_kind`: of the stream that computes, by kind of
    operation; "wire" is what it waits for the `links`, "host" what it waits for the host. `flops`: by kind, too.
    """

    device: float
    by_kind: Mapping[str, float]
    links: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)

    def with_computing(self, seconds: float) -> PhaseTime:
        """Where the kernels of the stream that computes take so long together, the host's launching included."""
        wire = self.by_kind.get("wire", 0.0)
        return replace(self, device=seconds + wire, by_kind={"measured": seconds, "wire": wire})


def is_once(phase: str) -> bool:
    """Whether a step has one such phase, in place of one in each micro-batch."""
    return phase in ONCE or phase.startswith(SUMS)


class _Times:
    """Runs events on a timeline, and adds up seconds by phase."""

    def __init__(self, gpu: Gpu, assumed: Assumed):
        self.assumed = assumed
        self.main: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.side, self.links = defaultdict[str, float](float), defaultdict[str, float](float)
        self.flops: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        sharing = Sharing(gpu.processors, assumed.whole, assumed.product_first, assumed.carved)
        self.timeline = Timeline(assumed.queues, sharing, assumed.launch)
        self._works: dict[int, int] = {}
        self._seconds = cache(lambda ask: ask.seconds(gpu, assumed))

    def run(self, event: Event, weight: float) -> None:
        """Run one, whose seconds count so many times."""
        phase, timeline = event.phase, self.timeline
        if event.what == "host":
            timeline.host_waits()
        elif event.what == "wait":
            if event.work in self._works:
                self.main[phase]["wire"] += weight * timeline.wait(self._works[event.work])
        else:
            assert event.ask is not None, "all else is an operation"
            seconds = self._seconds(event.ask)
            if event.what == "beside":
                self.main[phase]["host"] += weight * timeline.launch()
                self.side[phase] += weight * seconds
                if event.ask.kind == "wire":
                    timeline.issue(seconds, communicator="beside", ctas=event.ask.held(self.assumed))
            elif event.what == "issue" and not self.assumed.alone:
                self._issue(event, seconds, weight)
            elif seconds:
                self._compute(event, seconds, weight)

    def _compute(self, event: Event, seconds: float, weight: float) -> None:
        assert event.ask is not None, "it is an operation"
        of_phase, kind = self.main[event.phase], event.ask.kind
        of_phase["host"] += weight * self.timeline.launch(event.ask.host)
        of_phase["stand-ins" if kind == "wire" else kind] += weight * seconds
        self.flops[event.phase][kind] += weight * event.ask.flops
        for link, late in self.timeline.compute(seconds, product=kind == "product").items():
            # What comes late for a link that is used once in a step is once, too.
            self.main[link or event.phase]["wire"] += late * bool(weight) if link else weight * late

    def _issue(self, event: Event, seconds: float, weight: float) -> None:
        assert event.ask is not None, "it is a collective"
        # What is done once in a step has a link of its own, named by the phase that what waits for it counts to.
        phase = event.phase
        once = SUMS if phase.startswith(SUMS) else WEIGHTS if phase in (WEIGHTS, BEFORE) else ""
        self.main[phase]["host"] += weight * self.timeline.launch(event.ask.host)
        self.links[phase] += weight * seconds
        held = event.ask.held(self.assumed)
        self._works[event.work] = self.timeline.issue(seconds, once, event.communicator, held)


def _of_step(events: Sequence[Event], micro_batches: int) -> Iterator[tuple[Event, float]]:
    """The events of a step, and how often the seconds of each count. Steps are read when the next one was issued: the
    host does not wait for the end of the step in the phase `REST`.
    """
    last = min(micro_batches, 3) - 1
    backward = next((n for n, event in enumerate(events) if event.phase.endswith("backward")), len(events))
    for number in range(last + 1):
        alike = micro_batches - 2 if 0 < number < last else 1
        for place, event in enumerate(events):
            if not is_once(event.phase):
                yield event, alike / micro_batches
            elif number == (0 if place < backward else last) and (event.phase, event.what) != (REST, "host"):
                yield event, 1.0


def phase_times(events: Sequence[Event], micro_batches: int, gpu: Gpu, assumed: Assumed) -> dict[str, PhaseTime]:
    """By phase, of a micro-batch (the mean) or once in a step, `assumed` that.

    A step follows another one, during which the host may have got ahead; not where a rank is measured `alone`.

    Args:
        events: of a step of one micro-batch. Of its other micro-batches only the first, one in the midst and the last
            are run: in the midst all are alike.
        micro_batches: of the step.
    """
    times = _Times(gpu, assumed)
    if not assumed.alone:
        # Of the other one a single micro-batch; its gathers of weights are those of `BEFORE`.
        for event, _ in _of_step(events, 1):
            if event.phase not in (BEFORE, WEIGHTS):
                times.run(event, 0.0)
    for event, weight in _of_step(events, micro_batches):
        times.run(event, weight)

    def of_phase(phase: str) -> PhaseTime:
        main = times.main[phase]
        return PhaseTime(max(sum(main.values()), times.side[phase]), main, times.links[phase], times.flops[phase])

    return {phase: of_phase(phase) for phase in {*times.main, *times.side, *times.links}}


@dataclass(frozen=True)
class Prediction:
    """Of a step. `phases`: of one of its `micro_batches`, and of the end of the step. `flops`: of the model, in a
    micro-batch, by module, over `ranks` ranks. `patches`: of a micro-batch.
    """

    phases: Mapping[str, PhaseTime]
    micro_batches: int
    flops: Mapping[str, int]
    patches: int
    ranks: int
    gpu: Gpu

    def with_computing(self, seconds: Mapping[str, float]) -> Prediction:
        """Where the kernels of some phases take so many seconds."""
        measured = {name: self.phases[name].with_computing(value) for name, value in seconds.items()}
        return replace(self, phases={**self.phases, **measured})

    def _seconds(self, *phases: str) -> float:
        return sum(self.phases[phase].device for phase in phases if phase in self.phases)

    def module(self, name: str) -> float:
        """Seconds of a module in a micro-batch, forward and backward."""
        return self._seconds(*(f"{name} {direction}" for direction in DIRECTIONS))

    @property
    def micro_batch(self) -> float:
        """Seconds."""
        return sum(map(self.module, MODULES)) + self._seconds(*BETWEEN)

    @property
    def end(self) -> float:
        """Seconds of the sums of gradients, the update and what else there is once in a step. Sums begin within the
        last backward passes, where nothing waits for them; of the gathers of weights, what forward passes wait.
        """
        return self._seconds(*ENDING, *(within(f"{module} backward") for module in MODULES))

    @property
    def step(self) -> float:
        """Seconds."""
        return self.micro_batches * self.micro_batch + self.end

    @property
    def lost(self) -> dict[str, float]:
        """Shares of the step besides its MFU: what of a step's time is spent otherwise than at the peak."""
        parts = defaultdict[str, float](float)
        for phase, time in self.phases.items():
            if phase == BEFORE:
                continue
            once = is_once(phase)
            times = (1 if once else self.micro_batches) / self.step
            for kind, seconds in time.by_kind.items():
                ideal = time.flops.get(kind, 0.0) / self.gpu.peak
                parts["once a step" if once and kind != "wire" else kind] += times * (seconds - ideal)
                parts[RECOMPUTED] += times * ideal
            parts["beside"] += times * (time.device - sum(time.by_kind.values()))
        parts[RECOMPUTED] -= self.mfu_of_step
        return parts

    @property
    def patches_per_second(self) -> float:
        """Over all ranks."""
        return self.micro_batches * self.patches / self.step

    def mfu(self, flops: int, seconds: float) -> float:
        """Share of the peak of all ranks."""
        return flops / (seconds * self.ranks * self.gpu.peak)

    @property
    def mfu_of_modules(self) -> dict[str, float]:
        """Each by itself."""
        return {name: self.mfu(self.flops[name], self.module(name)) for name in MODULES}

    @property
    def mfu_of_micro_batch(self) -> float:
        """Without the end of the step, which long steps hardly see."""
        return self.mfu(sum(self.flops.values()), self.micro_batch)

    @property
    def mfu_of_step(self) -> float:
        """Of the whole step."""
        return self.mfu(self.micro_batches * sum(self.flops.values()), self.step)
