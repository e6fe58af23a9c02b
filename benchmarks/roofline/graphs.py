"""Whether CUDA graphs of layers pay: `python -m benchmarks.roofline.graphs` (no GPU; seconds).

The host issues kernel after kernel and may be at most `AHEAD` kernels ahead of the device; a step begins with an empty
device. What the device waits for the host is *exposed*. Kernels per pass are those that a fake GPU has counted
(`tests/fake_cuda/kernels.json`), the device's time per pass is measured on one H100 (`results/gpu.md`), without the
stand-ins for collectives; *planned* is less what attention by cuDNN and SwiGLU at the bandwidth save. Both leave out
communication, which gives the host more time: what is exposed here is the most.

A graph of a layer is replayed in `REPLAY`, once between any two exchanges, whose kernels stay the host's. Tensors have
the sizes of a *bucket*: with b buckets from a quarter of the longest input on, each sqrt[b](4) times the one before, a
call computes so much padding: with 4, 8 and 16 buckets 19, 9 and 4 % of the module's time, if the logarithms of lengths
are uniform. A graph of text costs that too, unless packs are full (`FULL`).

Writes `results/roofline/graphs.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from math import log
from pathlib import Path

from benchmarks.report import table

RESULTS = Path(__file__).parents[1] / "results" / "roofline"
AHEAD = 1024
"""Launches that CUDA queues before it makes the host wait."""
REPLAY = 10e-6
"""Assumed: seconds of the host for the replay of a layer's graph, in each pass."""
KERNEL = {"65 µs": 65e-6, "100 µs": 100e-6}
"""Seconds of the host for a kernel on the H100's machine: by its trace, whose kernels include stand-ins; and with which
the first call of the encoder, for which the device waits, takes as long as it did: 46 ms for 460 kernels of 7B.
"""
SPENT = 0.9
"""Assumed: the share of this that autograd functions without wrappers leave. On a CPU they alone leave 0.88 to 0.95;
with all that has changed it is 0.82 (`results/host-by-module.md`), but part of that GPUs never did.
"""
FULL = 0.025
"""Assumed: padding of a graph of text with packs that are as long as samples allow."""
RANGE = 4.0
"""Longest input over the shortest one with a graph."""
EXCHANGING = {"vision": 4}
"""Layers of the encoder that exchange tokens, those with full attention; all layers of text do."""
OUTSIDE = 8
"""Kernels in a pass of such a layer that are no part of a graph: exchanges, and copies before and after them."""


@dataclass(frozen=True)
class Pass:
    """A pass of a module for a call: `kernels` that take the host `launch` seconds each, and the device `device`."""

    kernels: int
    device: float
    launch: float


@dataclass(frozen=True)
class Share:
    """A rank's share. Of a micro-batch, by module: layers; kernels and seconds of the device, forward and backward."""

    name: str
    layers: dict[str, int]
    kernels: dict[str, tuple[int, int]]
    device: dict[str, tuple[float, float]]

    def passes(self, module: str, launch: float, *, calls: int = 1, graph: bool = False) -> tuple[Pass, Pass]:
        """The forward and the backward pass of a call with the inputs of so many micro-batches."""

        def one(direction: int) -> Pass:
            kernels, device = self.kernels[module][direction], calls * self.device[module][direction]
            if not graph:
                return Pass(kernels, device, launch)
            layers = self.layers[module]
            outside = OUTSIDE * EXCHANGING.get(module, layers)
            return Pass(outside + layers, device, (outside * launch + layers * REPLAY) / (outside + layers))

        return one(0), one(1)

    def step(self, launch: float, micro_batches: int, waves: int = 1, graphs: Iterable[str] = ()) -> list[Pass]:
        """All passes of a step, in order."""
        encoder = self.passes("vision", launch, calls=waves, graph="vision" in graphs)
        text = self.passes("text", launch, graph="text" in graphs)
        return [encoder[0], *(text * waves), encoder[1]] * (micro_batches // waves)

    def padding(self, modules: Iterable[str], buckets: int) -> float:
        """Seconds of padding in a micro-batch, where these modules have graphs."""
        return sum(sum(self.device[each]) * (FULL if each == "text" else wasted(buckets)) for each in modules)


def wasted(buckets: int) -> float:
    """Padding as a share of what is computed without it."""
    ratio = RANGE ** (1 / buckets)
    return (ratio - 1) / log(ratio) - 1


def exposed(passes: Iterable[Pass]) -> float:
    """Seconds that the device waits for the host in a step."""
    host = device = waits = 0.0
    ends: list[float] = []
    for each in passes:
        for _ in range(each.kernels):
            if len(ends) >= AHEAD:
                host = max(host, ends[-AHEAD])
            host += each.launch
            waits += max(0.0, host - device)
            device = max(host, device) + each.device / each.kernels
            ends.append(device)
    return waits


def planned(share: Share, saved: float) -> Share:
    """The share where text takes so many seconds less in a micro-batch."""
    left = 1 - saved / sum(share.device["text"])
    forward, backward = share.device["text"]
    return replace(share, device=share.device | {"text": (left * forward, left * backward)})


# Milliseconds of two micro-batches in `results/gpu.md`. The forward pass of the encoder is taken to be twice as fast as
# its backward one, which has twice the operations and does not wait. Less stand-ins: 29 and 74 ms, in proportion.
_7B = Share(
    "7B `sp:8\\|tp:4,dp:2`",
    {"vision": 32, "text": 28},
    {"vision": (460, 925), "text": (514, 807)},
    {"vision": (8.6e-3, 17.2e-3), "text": (58.2e-3, 120.6e-3)},
)
_32B = Share(
    "32B `sp:8\\|tp:8`",
    {"vision": 32, "text": 64},
    {"vision": (461, 925), "text": (1128, 1830)},
    {"vision": (6.5e-3, 13.0e-3), "text": (122.8e-3, 249.0e-3)},
)
SHARES = (
    (_7B, "measured"),
    (planned(_7B, 34.5e-3), "planned"),
    (_32B, "measured"),
    (planned(_32B, 64e-3), "planned"),
)
MICRO_BATCHES, WAVES, BUCKETS = 8, (1, 2, 4), (4, 8, 16)
ENCODER, BOTH = ("vision",), ("vision", "text")


def page() -> str:
    """The results."""
    rows = []
    for (share, device), (shown, kernel), waves in product(SHARES, KERNEL.items(), WAVES):
        launch = SPENT * kernel
        each = {
            graphs: exposed(share.step(launch, MICRO_BATCHES, waves, graphs)) / MICRO_BATCHES
            for graphs in ((), ENCODER, BOTH)
        }
        gains = [f"{1e3 * (each[()] - each[ENCODER] - share.padding(ENCODER, n)):+.1f}" for n in BUCKETS]
        both = f"{1e3 * (each[()] - each[BOTH] - share.padding(BOTH, BUCKETS[1])):+.1f}"
        busy = sum(map(sum, share.device.values()))
        rows.append(
            f"{share.name}, {device} | {shown} | {waves} | {1e3 * busy:.0f} | "
            f"{1e3 * each[()]:.1f} | {1e3 * each[ENCODER]:.1f} | {' | '.join(gains)} | {1e3 * each[BOTH]:.1f} | {both}"
        )
    names = [f"gain with {n} buckets" for n in BUCKETS]
    header = " | ".join(
        ["share, times of the device", "host, a kernel", "waves", "device, ms", "exposed, ms", "with graphs of the "
         "encoder", *names, "with graphs of both", f"gain with {BUCKETS[1]} buckets"]
    )  # fmt: skip
    return "\n".join(
        [
            "# Do CUDA graphs of layers pay?\n",
            f"Milliseconds of a micro-batch of a rank, in steps of {MICRO_BATCHES}, by the event model of "
            "`python -m benchmarks.roofline.graphs` (not measured). A gain is what graphs save of what is exposed, "
            f"less padding. The host takes {SPENT:.0%} of the time for a kernel that is stated.\n",
            table(header, rows),
            "\nWith one micro-batch in a wave, graphs of the encoder pay if the host is slow. So do larger waves, "
            "for which nothing is captured or padded: they take 3 to 6 GB of a rank (`--plan`: 49.1, 51.0 and "
            "54.7 GB of 7B in waves of 1, 2 and 4; 72.4, 73.4 and 75.3 GB of 32B), and `schedule.waves auto` "
            "chooses four for both. Graphs of the encoder then save less than four buckets cost, and with more "
            "buckets between -2.4 and +1.1 ms, at most 0.3 % of a micro-batch. Graphs of text cost more. They are"
            " not built.",
        ]
    )


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline.graphs", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    results = parser.parse_args().results
    results.mkdir(parents=True, exist_ok=True)
    (results / "graphs.md").write_text(page() + "\n", encoding="utf-8")
    print(page())


if __name__ == "__main__":
    main()
