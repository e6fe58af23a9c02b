"""The time of a step on a GPU, from what it asks for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.roofline.devices import ASSUMED, BEST, Gpu
from tests.fake_cuda.rank import within

DIRECTIONS = ("forward", "backward")
MODULES = ("vision", "text")
BETWEEN = ("boundary", "pipeline")
ENDING = ("gradient sums", "update", "weights", "rest")


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase: of the device (the longer of its streams), and of the host that launches `kernels`.
    `by_kind`: of the stream that computes, by kind of kernel; "wire" is what it waits for the `links`.
    `launch`: seconds of the host for a kernel.
    """

    device: float
    kernels: int
    by_kind: Mapping[str, float]
    links: float = 0.0
    launch: float = ASSUMED[BEST].launch

    def with_attention(self, times: float) -> PhaseTime:
        """Where attention is so many times as fast."""
        saved = self.by_kind.get("attention", 0.0) * (1 - 1 / times)
        by_kind = {kind: seconds - saved * (kind == "attention") for kind, seconds in self.by_kind.items()}
        return replace(self, device=self.device - saved, by_kind=by_kind)

    def with_computing(self, seconds: float) -> PhaseTime:
        """Where the kernels of the stream that computes take so long together, the host's launching included."""
        wire = self.by_kind.get("wire", 0.0)
        return replace(self, device=seconds + wire, kernels=0, by_kind={"measured": seconds, "wire": wire})

    @property
    def host(self) -> float:
        """Seconds in which the kernels are launched."""
        return self.kernels * self.launch

    @property
    def seconds(self) -> float:
        """What it takes: whoever is slower."""
        return max(self.device, self.host)


def phase_times(costs: Sequence[Sequence[Any]], assumed: str = BEST) -> dict[str, PhaseTime]:
    """By phase, of `costs` as the worker writes them, `assumed` what is `ASSUMED` by that name."""
    streams: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: {"main": {}, "side": {}, "links": {}})
    kernels: dict[str, int] = defaultdict(int)
    for phase, stream, kind, found in costs:
        streams[phase][stream][kind] = found["seconds"][assumed]
        kernels[phase] += found["kernels"]

    def of_phase(phase: str, of: Mapping[str, Mapping[str, float]]) -> PhaseTime:
        main, side, links = (sum(of[stream].values()) for stream in ("main", "side", "links"))
        return PhaseTime(max(main, side), kernels[phase], of["main"], links, ASSUMED[assumed].launch)

    return {phase: of_phase(phase, of) for phase, of in streams.items()}


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

    def with_attention(self, forward: float, backward: float) -> Prediction:
        """Where attention is so many times as fast in either direction."""
        times = {phase: backward if phase.endswith("backward") else forward for phase in self.phases}
        return replace(self, phases={name: t.with_attention(times[name]) for name, t in self.phases.items()})

    def with_computing(self, seconds: Mapping[str, float]) -> Prediction:
        """Where the kernels of some phases take so many seconds."""
        measured = {name: self.phases[name].with_computing(value) for name, value in seconds.items()}
        return replace(self, phases={**self.phases, **measured})

    def _seconds(self, *phases: str) -> float:
        return sum(self.phases[phase].seconds for phase in phases if phase in self.phases)

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
