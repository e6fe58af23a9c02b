"""Compares steps of adapters with those of full training: `python -m benchmarks.lora [--help]`.

Both train the same model on the same data in the same layout, in turn within each round, and times of the same round
are compared, so that a machine that others use too disturbs both alike. Writes a table and the numbers to
`benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.crew import Crew
from benchmarks.material import SAMPLES, Case, write_material
from benchmarks.measuring.material import ModelSize
from benchmarks.report import Ratio, table, verdict

RESULTS = Path(__file__).parent / "results"
MOST = 0.75
"""The largest share of full training's time that adapters may take: products of a frozen base cost 4 of 6."""
SYSTEMS = {
    "full": (),
    "both towers": ("--vision-lora.r", "{r}", "--text-lora.r", "{r}", "--model.freeze", "projector"),
    "text": ("--text-lora.r", "{r}", "--model.freeze", "vision", "projector"),
}
"""What is compared, by name, with its flags: full training, and adapters on these modules, beside frozen ones."""


@dataclass(frozen=True)
class Measured:
    """A system in a layout: seconds of each round, of the slowest rank, processors' time of all ranks, and bytes sent
    and peak bytes, of the rank with most.
    """

    seconds: Sequence[float]
    cpu_seconds: Sequence[float]
    sent: float
    peak: float


def main() -> None:
    """Measure, print, write."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        write_material(Path(folder), _size(options), [_case(options)])
        found = {text: _layout(text, options, Path(folder) / str(n)) for n, text in enumerate(options.layouts)}
    text = _text(options, found)
    print(text)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "lora.md").write_text(text + "\n", encoding="utf-8")
        numbers = {layout: {name: asdict(each) for name, each in both.items()} for layout, both in found.items()}
        (options.results / "lora.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=__doc__)
    parser.add_argument("--layouts", nargs="+", default=["dp:2|dp:2", "sp:2|tp:2"], help="of vision and of text")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--r", type=int, default=8, help="rank of adapters")
    parser.add_argument("--patches", type=int, default=1024, help="patches per step, in four images")
    parser.add_argument("--words", type=int, default=200, help="words of an answer")
    parser.add_argument("--rounds", type=int, default=5, help="times that each runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    for size in fields(ModelSize):
        flag, wide = "--" + size.name.replace("_", "-"), {"vision_hidden": 512, "text_hidden": 1024}
        parser.add_argument(flag, type=int, default=wide.get(size.name, size.default), help="of the model")
    return parser.parse_args()


def _size(options: argparse.Namespace) -> ModelSize:
    return ModelSize(**{f.name: getattr(options, f.name) for f in fields(ModelSize)})


def _case(options: argparse.Namespace) -> Case:
    return Case.even(options.patches, SAMPLES, _size(options).patch, options.words)


def _layout(text: str, options: argparse.Namespace, store: Path) -> dict[str, Measured]:
    """Measure both systems in a layout, `VISION|TEXT`."""
    import benchmarks.systems

    build: Callable[..., Any] = benchmarks.systems.Ours
    crews = dict[str, Crew]()
    for name, flags in SYSTEMS.items():
        own = [flag.format(r=options.r) for flag in flags]
        crews[name] = Crew(options.ranks, Path(f"{store}-{name}"), build, store.parent, [1], *text.split("|"), *own)
    peaks = {name: max(crew.run("peak_bytes", 0)) for name, crew in crews.items()}
    steps: dict[str, list[Any]] = {name: [] for name in crews}
    for turn in range(options.rounds):
        for name in list(crews)[:: 1 if turn % 2 == 0 else -1]:
            steps[name].append(crews[name].run("step", 0))
    sent = {name: max(traffic.bytes for traffic in crew.run("traffic", 0)) for name, crew in crews.items()}
    for crew in crews.values():
        crew.close()
    seconds = {name: [max(rank.seconds for rank in ranks) for ranks in steps[name]] for name in crews}
    cpu = {name: [sum(rank.cpu_seconds for rank in ranks) for ranks in steps[name]] for name in crews}
    return {name: Measured(seconds[name], cpu[name], sent[name], peaks[name]) for name in crews}


def _text(options: argparse.Namespace, found: dict[str, dict[str, Measured]]) -> str:
    rows, verdicts = list[str](), list[str]()
    for layout, systems in found.items():
        full, where = systems["full"], layout.replace("|", ", ")
        for name, adapters in list(systems.items())[1:]:
            ratio = Ratio.of(adapters.seconds, full.seconds)
            of_cpu = Ratio.of(adapters.cpu_seconds, full.cpu_seconds)
            sent = f"{adapters.sent / full.sent:.2f}" if full.sent else "-"
            seconds = " | ".join(f"{median(each.seconds):.2f} s" for each in (full, adapters))
            row = (where, name, seconds, ratio, of_cpu, sent, f"{adapters.peak / full.peak:.2f}")
            rows.append(" | ".join(map(str, row)))
            said = f"{where}, adapters on {name}: {ratio} of full training's time, at most {MOST}"
            verdicts.append(f"- {verdict(ratio.median <= MOST, said)}")
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(_size(options)).items())
    head = (
        f"Steps with adapters of rank {options.r} and with full training, {options.ranks} ranks, fp32, "
        f"{options.patches:,} patches in {SAMPLES} images, {options.words} words each. Model: {sizes}. Shares are of "
        "full training: of times of the same round, median [min, max]."
    )
    columns = "vision, text | adapters on | full | adapters | time | processors' time | bytes sent | peak memory"
    return "\n".join([head, "", table(columns, rows), "", *verdicts])


if __name__ == "__main__":
    main()
