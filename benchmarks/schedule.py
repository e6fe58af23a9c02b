"""Compares schedules: `python -m benchmarks.schedule [--quick] [--help]`.

Three things, over gloo on this machine, with steps that run alternately so that times of the same round are compared:

  1. When actions really happen, beside what the simulator says when it is given the medians of how long work and
     transfers take: the order must be the same, and with a core for every rank the share of idle time too.
  2. An encoder on a rank of its own that runs ahead of the text module, against one that does not.
  3. An encoder that shares ranks with text stages: waves against everything first, in time and in activations kept.

Writes tables, the numbers, plots and pictures of schedules to `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.crew import Crew
from benchmarks.measuring.material import ModelSize, write_samples
from benchmarks.schedule_report import EVEN, UNEVEN, ScheduleReport
from megatron_hetero.schedule.settings import ScheduleSettings

RESULTS = Path(__file__).parent / "results"
APART = ModelSize(vision_layers=9, text_layers=4, text_hidden=384)
"""Both modules take about as long, so that neither only waits for the other."""
SHARED = ModelSize(vision_layers=4, text_layers=8)
"""The encoder takes about half as long as the text module, as in Qwen2.5-VL's 3B and 7B with mostly images."""
FOUR = ModelSize(vision_layers=4, text_layers=4)
PLACEMENTS = (
    ("dp:1@0", "dp:1@1", 2, APART, ScheduleSettings()),
    ("sp:2", "pp:2", 2, SHARED, ScheduleSettings()),
    ("sp:2@0-1", "pp:2@2-3", 4, FOUR, ScheduleSettings()),
    ("sp:4", "pp:4", 4, FOUR, ScheduleSettings(waves=4)),
)
"""What is recorded: layouts, ranks, model and schedule."""
WINDOWED = 224
"""Pixels of a side whose picture has a window of the encoder for each of four ranks."""


def main() -> None:
    """Measure, print, write."""
    options = _options()
    report = ScheduleReport(options.micro_batches)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
    for placement in PLACEMENTS:
        _record(report, options, *placement)
    for name, sides in {EVEN: [168], UNEVEN: _random_sides(options.micro_batches)}.items():
        _compare_run_ahead(report, options, name, sides)
    _compare_waves(report, options)
    print(report.text())
    if options.results is not None:
        report.write(options.results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedule", description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=16, help="of a step that is compared")
    parser.add_argument("--rounds", type=int, default=15, help="times that every schedule runs")
    parser.add_argument("--recorded", type=int, default=5, help="steps of which actions are recorded")
    parser.add_argument("--quick", action="store_true", help="two minutes: few micro-batches and rounds; no results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    options = parser.parse_args()
    if options.quick:
        options.micro_batches, options.rounds, options.recorded, options.results = 8, 3, 3, None
    return options


def _random_sides(number: int) -> list[int]:
    """Sides of pictures, in pixels: a random mixture that costs about as much as equal ones of 168."""
    return random.Random(0).choices([112, 140, 168, 224, 280], weights=[4, 3, 3, 2, 1], k=number)


@contextmanager
def _crew(
    vision: str, text: str, ranks: int, size: ModelSize, sides: Sequence[int], settings: Mapping[str, ScheduleSettings]
) -> Iterator[Crew]:
    """Ranks with a batch of a micro-batch for each side, that have run each schedule once."""
    from benchmarks.measuring.scheduling import ScheduleBench

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_samples(folder, size, sides)
        arguments = folder, vision, text, len(sides), settings
        crew = Crew(ranks, folder / "store", ScheduleBench, *arguments, preload="benchmarks.measuring.scheduling")
        losses = {crew.run("loss", schedule)[0] for schedule in settings}
        assert max(losses) - min(losses) <= 1e-6 * max(losses), f"schedules of {vision}|{text} differ: {losses}"
        yield crew
        crew.close()


def _record(
    report: ScheduleReport,
    options: argparse.Namespace,
    vision: str,
    text: str,
    ranks: int,
    size: ModelSize,
    settings: ScheduleSettings,
) -> None:
    from benchmarks.measuring.recording import on_one_clock, require_order

    side = WINDOWED if ranks > 2 else 168
    with _crew(vision, text, ranks, size, [side] * 8, {"": settings}) as crew:
        crew.run("step", "")
        schedule = crew.run("schedule", "")[0]
        steps = [on_one_clock(crew.run("record", "")) for _ in range(options.recorded)]
    for step in steps:
        require_order(schedule, step)
    report.add_recording(f"{vision}|{text}", schedule, steps, options.results)
    print(report.recordings[-1]["line"], flush=True)


def _compare_run_ahead(report: ScheduleReport, options: argparse.Namespace, name: str, sides: Sequence[int]) -> None:
    settings = {str(n): ScheduleSettings(run_ahead=n) for n in (0, 1, 3)}
    spread = [sides[i % len(sides)] for i in range(options.micro_batches)]
    with _crew("dp:1@0", "dp:1@1", 2, APART, spread, settings) as crew:
        seconds = _alternated(crew, settings, options.rounds)
        peaks = {each: crew.run("peak_activation_bytes", each) for each in settings}
    report.add_run_ahead(name, seconds, {each: max(found) for each, found in peaks.items()})
    print(report.run_ahead_table(report.run_ahead[-len(settings) :]), flush=True)


def _compare_waves(report: ScheduleReport, options: argparse.Namespace) -> None:
    sizes = sorted({max(1, options.micro_batches // n) for n in (8, 4, 2, 1)})
    settings = {str(n): ScheduleSettings(waves=n) for n in sizes} | {"recompute": ScheduleSettings("recompute")}
    with _crew("sp:2", "pp:2", 2, SHARED, [168] * options.micro_batches, settings) as crew:
        seconds = _alternated(crew, settings, options.rounds)
        kept = {name: max(crew.run("peak_activation_bytes", name)) for name in settings}
        memory = {name: max(crew.run("peak_bytes", name)) for name in settings}
    report.add_waves(seconds, kept, memory)


def _alternated(crew: Crew, names: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step on the slowest rank, by schedule and round. The first round warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in list(names)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(max(crew.run("step", name)))
    return {name: each[1:] for name, each in seconds.items()}


if __name__ == "__main__":
    main()
