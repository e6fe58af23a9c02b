"""Compares layouts and rivals: `python -m benchmarks.step [--encoder-only] [--help]`.

Starts its own ranks, runs all systems in turn within each round, and compares times of the same round only, so that
load from others on the machine affects numerator and denominator equally. Writes a table, the numbers and a plot to
`benchmarks/results`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.crew import Crew
from benchmarks.material import Case, count_parameters, write_material
from benchmarks.measuring.material import ANSWER, ModelSize
from benchmarks.report import EncoderReport, StepReport
from megatron_hetero.models.items.pictures import ImageSize

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, print, write."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        report = _encoder_sweep(options, Path(folder)) if options.encoder_only else _whole_steps(options, Path(folder))
    print(report.text())
    if options.results is not None:
        report.write(options.results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--encoder-only", action="store_true", help="time the vision encoder over a sweep of widths")
    parser.add_argument("--patches", type=_numbers, default=[1024, 4096, 16384], help="patches per step")
    parser.add_argument("--images", type=_numbers, default=[4, 1], help="images per step that these are spread over")
    parser.add_argument(
        "--pictures",
        type=lambda text: text.split(","),
        default=["even"],
        help="even: squares of the same size; llava: sizes drawn as in LLaVA-1.5; or even,llava",
    )
    parser.add_argument("--steps", type=int, default=4, help="drawn steps of llava")
    parser.add_argument(
        "--seed", type=int, default=10, help="of llava's draw; 10 is the first whose four steps are as uneven as many"
    )
    parser.add_argument("--words", type=_numbers, default=[ANSWER], help="words of an answer")
    parser.add_argument("--long", type=int, default=0, help="words of the answer of the last sample, if they differ")
    parser.add_argument("--rounds", type=int, default=5, help="times that every system runs")
    parser.add_argument(
        "--systems", type=lambda t: t.split(","), help=f"of {', '.join(_SYSTEMS | _SPARSE | _DELTA)}, as fits the model"
    )
    parser.add_argument(
        "--hidden", type=_numbers, default=[64, 128, 256, 512, 1280], help="widths of the encoder's sweep"
    )
    parser.add_argument("--layers", type=int, default=8, help="layers in the encoder's sweep")
    parser.add_argument("--gflop", type=float, default=1500.0, help="skip points of the sweep that cost more per pass")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    for size in fields(ModelSize):
        flag = "--" + size.name.replace("_", "-")
        parser.add_argument(flag, type=int, default=size.default, help="of the model of whole steps")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


_WHOLE = ("--vision-sequence_parallel", "false", "--text-sequence_parallel", "false")
_ZERO = ("--vision-zero", "3", "--text-zero", "3")
_SYSTEMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sp|tp": ("Ours", ("sp:{n}", "tp:{n}")),
    "sp|tp whole": ("Ours", ("sp:{n}", "tp:{n}", *_WHOLE)),
    "tp|tp": ("Ours", ("tp:{n}", "tp:{n}")),
    "tp|tp whole": ("Ours", ("tp:{n}", "tp:{n}", *_WHOLE)),
    "sp|dp": ("Ours", ("sp:{n}", "dp:{n}")),
    "dp|dp": ("Ours", ("dp:{n}", "dp:{n}")),
    "sp|tp zero": ("Ours", ("sp:{n}", "tp:{n}", "--vision-zero", "3")),
    "sp|dp zero": ("Ours", ("sp:{n}", "dp:{n}", *_ZERO)),
    "dp|dp zero": ("Ours", ("dp:{n}", "dp:{n}", *_ZERO)),
    "fsdp": ("Plain", ("fsdp",)),
    "ddp": ("Plain", ("ddp",)),
}
"""By name, a class of `benchmarks.systems` and its arguments. `whole`: activations are not split over tp. `zero`:
ZeRO 3, of the encoder or of both modules.
"""
_SPARSE: dict[str, tuple[str, tuple[str, ...]]] = {
    "sp|dp ep": ("Ours", ("sp:{n}", "dp:{n},ep:{n}")),
    "sp|tp2 dp ep": ("Ours", ("sp:{n}", "tp:2,dp:{half},ep:{n}")),
    "sp|tp ep": ("Ours", ("sp:{n}", "tp:{n},ep:{n}")),
    "dp|dp ep": ("Ours", ("dp:{n}", "dp:{n},ep:{n}")),
    "sp|dp ep1 zero": ("Ours", ("sp:{n}", "dp:{n},ep:1", *_ZERO)),
    "fsdp": _SYSTEMS["fsdp"],
    "ddp": _SYSTEMS["ddp"],
}
"""Likewise, for models with experts; `ep`: these are divided over all ranks."""
_DELTA: dict[str, tuple[str, tuple[str, ...]]] = {
    "sp|tp": _SYSTEMS["sp|tp"],
    "sp|sp": ("Ours", ("sp:{n}", "sp:{n}")),
    "sp|cp": ("Ours", ("sp:{n}", "cp:{n}")),
    "sp|tp cp": ("Ours", ("sp:{n}", "tp:2,cp:{half}")),
    "sp|cp zero": ("Ours", ("sp:{n}", "cp:{n}", *_ZERO)),
    "dp|dp": _SYSTEMS["dp|dp"],
    "fsdp": _SYSTEMS["fsdp"],
    "ddp": _SYSTEMS["ddp"],
}
"""Likewise, for models with gated delta nets."""


def _whole_steps(options: argparse.Namespace, folder: Path) -> StepReport:
    import benchmarks.systems

    size = ModelSize(**{f.name: getattr(options, f.name) for f in fields(ModelSize)})
    cases = []
    if "even" in options.pictures:
        wanted = product(options.images, options.patches, options.words)
        cases += [Case.even(patches, images, size.patch, words, options.long) for images, patches, words in wanted]
    if "llava" in options.pictures:
        cases += [Case.llava(options.steps, options.seed, words) for words in options.words]
    write_material(folder, size, cases)
    steps = [case.steps for case in cases]
    crews: dict[str, Crew] = {}
    systems = _SPARSE if size.experts else _DELTA if size.attention_every else _SYSTEMS
    for number, name in enumerate(options.systems or systems):
        kind, values = systems[name]
        values = tuple(value.format(n=options.ranks, half=options.ranks // 2) for value in values)
        build = getattr(benchmarks.systems, kind)
        crews[name] = Crew(options.ranks, folder / f"store-{number}", build, folder, steps, *values)
    report = StepReport(size, options.ranks, count_parameters(folder))
    for number, case in enumerate(cases):
        report.add(case, *_measure_case(crews, number, options.rounds))
        print(report.text(last_only=True), flush=True)
    for crew in crews.values():
        crew.close()
    return report


def _measure_case(crews: dict[str, Crew], case: int, rounds: int) -> tuple[dict[str, list[Any]], ...]:
    """Steps of every system, by round and rank; its traffic and its peak memory, by rank."""
    peaks = {name: crew.run("peak_bytes", case) for name, crew in crews.items()}
    steps: dict[str, list[Any]] = {name: [] for name in crews}
    for turn in range(rounds):
        for name in list(crews)[:: 1 if turn % 2 == 0 else -1]:
            steps[name].append(crews[name].run("step", case))
    return steps, {name: crew.run("traffic", case) for name, crew in crews.items()}, peaks


def _encoder_sweep(options: argparse.Namespace, folder: Path) -> EncoderReport:
    from benchmarks.encoder import EncoderBench
    from benchmarks.measuring.encoder import encoder_shape

    crew = Crew(options.ranks, folder / "store", EncoderBench)
    report = EncoderReport(options.layers, options.ranks)
    for hidden in options.hidden:
        for patches in options.patches:
            side = round(patches**0.5)
            gflop = 3e-9 * encoder_shape(hidden, options.layers).cost(ImageSize(1, side, side))
            if gflop > options.gflop:
                report.skipped.append(f"width {hidden}, {patches} patches: {gflop:.0f} GFLOP a pass")
                continue
            report.add(crew.run("measure", hidden, options.layers, ImageSize(1, side, side), options.rounds)[0])
            print(report.text(last_only=True), flush=True)
    crew.close()
    return report


if __name__ == "__main__":
    main()
