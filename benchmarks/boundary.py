"""Compares ways over a boundary: `python -m benchmarks.boundary [--quick] [--help]`.

Starts its own ranks. All ways run in turn within each round, in the same processes and on the same rows, and times of
the same round only are compared. What arrives is checked to the bit on every rank before the clock runs. Writes a
table, the numbers and a plot to `benchmarks/results`. What Megatron-Core's communicators refuse is found by trying.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.boundary_report import MEGATRON, BoundaryReport
from benchmarks.crew import Crew
from benchmarks.edges import EDGES, SAMPLES, TRIED, Edge, whole_samples

RESULTS = Path(__file__).parent / "results"
RANKS = 8
DTYPES = {1280: "float32", 5120: "bfloat16"}
"""By width of a row: the wide ones would not fit into a small machine's memory otherwise."""


def main() -> None:
    """Measure, print, write."""
    options = _options()
    report = BoundaryReport(RANKS, {name: version(name) for name in ("megatron-core", "torch")})
    with tempfile.TemporaryDirectory() as folder:
        for edge in dict.fromkeys((*options.edges, *TRIED)):
            report.refusals[str(edge)] = {name: _refusal(Path(folder), edge, name) for name in MEGATRON}
        print(report.refused(), flush=True)
        crew = _crew(Path(folder) / "measured")
        for width in options.widths:
            for rows in options.rows:
                for edge in options.edges:
                    _measure(crew, report, edge, whole_samples(rows), width, options)
                    print(report.text(last_only=True), flush=True)
        crew.close()
    print(report.text())
    if options.results is not None:
        report.write(options.results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.boundary", description=__doc__)
    parser.add_argument("--rows", type=_numbers, default=[1 << 10, 1 << 14, 1 << 16], help="rows of a crossing")
    parser.add_argument("--widths", type=_numbers, default=list(DTYPES), help="elements of a row")
    parser.add_argument("--rounds", type=int, default=9, help="times that every way is taken, at most")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the rounds of one case; at least three run")
    parser.add_argument("--memory-gb", type=float, default=6.0, help="leave out what would take more over all ranks")
    parser.add_argument("--edges", type=_edges, default=EDGES, help=f"of 0 to {len(EDGES) - 1}")
    parser.add_argument("--quick", action="store_true", help="a minute: few rows, narrow; writes nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.widths, options.rounds, options.results = [1 << 10, 1 << 13], [1280], 3, None
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _edges(text: str) -> list[Edge]:
    return [EDGES[number] for number in _numbers(text)]


def _crew(store: Path) -> Crew:
    from benchmarks.crossing import CrossingBench

    return Crew(RANKS, store, CrossingBench, preload="benchmarks.crossing")


def _refusal(folder: Path, edge: Edge, name: str) -> str:
    """The error of one of Megatron-Core's communicators, empty if it crosses the edge. Ranks that failed in a crossing
    cannot be used again, so that each is tried in processes of its own.
    """
    crew, orders = _crew(folder / f"{name} {edge}"), ("prepare", edge, 4 * SAMPLES, 8, "float32", [name])
    try:
        crew.run(*orders)
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]
    try:
        crew.run("check", name)
    except RuntimeError as error:
        return f"accepts the grids, then fails: {str(error).strip().splitlines()[-1].partition(':')[0]}"
    finally:
        crew.close()
    return ""


def _measure(
    crew: Crew, report: BoundaryReport, edge: Edge, rows: int, width: int, options: argparse.Namespace
) -> None:
    dtype = DTYPES.get(width, "float32")
    names = _that_can(report, edge, rows * width * (4 if dtype == "float32" else 2), options.memory_gb * 1e9)
    least = crew.run("prepare", edge, rows, width, dtype, names)
    received, begin = {}, time.perf_counter()
    for name in names:
        received[name] = crew.run("check", name)
    rounds = max(3, min(options.rounds, int(2 * options.seconds / (time.perf_counter() - begin))))
    seconds: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[:: 1 if turn % 2 == 0 else -1]:
            forward, backward = zip(*crew.run("measure", name), strict=True)
            seconds[name].append((max(forward), max(backward)))
    crew.run("forget")
    case = {"edge": str(edge), "rows": rows, "width": width, "dtype": dtype, "sharded": edge.sharded}
    report.add(case, seconds, received, [own for own, _ in least], least[0][1])


def _that_can(report: BoundaryReport, edge: Edge, row_bytes: int, limit: float) -> list[str]:
    """The names of the systems that can do this edge in this much memory."""
    names = ["ours", *(name for name, refusal in report.refusals[str(edge)].items() if not refusal)]
    copies = 1 if edge.sharded else edge.destination_layout.tp
    portions = len(edge.ranks) / min(layout.size for layout in (edge.source_layout, edge.destination_layout))
    # Every rank gets an equal portion from every rank; besides there are the rows, and both shards of the embedding.
    needed = row_bytes * (len(edge.ranks) * portions + 2 + 3 * copies)
    if needed > limit:
        report.leave_out(f"all-gather, {edge}, {row_bytes / 1e6:.0f} MB of rows: it takes {needed / 1e9:.0f} GB")
    else:
        names.append("all-gather")
    return names


if __name__ == "__main__":
    main()
