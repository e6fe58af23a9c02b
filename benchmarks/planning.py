"""Times the planning of one rank: `python -m benchmarks.planning [--help]`.

Two things, on one core, with nothing kept from one time to the next but the layouts' groups: the boundary by itself
(ownerships from the group of each row, the plan, and one rank's part of both directions), and everything that a rank
plans in a step of one micro-batch (assigning and cutting images of many sizes, tokens, pixels, the boundary). Writes
tables and the numbers to `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from benchmarks.report import table, verdict
from megatron_hetero.boundary.ownership import Groups, Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.partition import StepPartitioner
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import ROWS
from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape

RESULTS = Path(__file__).parent / "results"
MAX_MS = 50.0
TEXT = 0.2
"""Share of text tokens, which shift the destination's cuts."""


@dataclass(frozen=True)
class Pair:
    """Layouts of two modules. `source`, `destination`: ranks that hold the same rows. `shuffled`: images go to source
    replicas at random rather than in runs. `disjoint`: each module has half of the ranks, rather than all."""

    name: str
    source: int
    destination: int
    shuffled: bool = False
    disjoint: bool = False
    partial: bool = False


PAIRS = (
    Pair("sp:8,dp:128 → tp:8,dp:128", 1, 1),
    Pair("sp:8,dp:128 → tp:8,dp:128, images at random", 1, 1, shuffled=True),
    Pair("dp:1024 → tp:8,dp:128, images at random", 1, 1, shuffled=True),
    Pair("dp:1024 → tp:8,dp:128, whole, images at random", 1, 8, shuffled=True),
    Pair("tp:8,dp:128 → tp:8,dp:128, whole, images at random", 8, 8, shuffled=True),
    Pair("tp:8,dp:128 → cp:8,dp:128, images at random, partial", 8, 1, shuffled=True, partial=True),
    Pair("sp:8,dp:64@0-511 → tp:8,dp:64@512-1023, images at random", 1, 1, shuffled=True, disjoint=True),
    Pair("sp:8,dp:64@0-511 → tp:8,dp:64@512-1023, whole, images at random", 1, 8, shuffled=True, disjoint=True),
    Pair("sp:64,dp:16 → tp:64,dp:16, whole", 1, 64),
)


STEPS = (
    ("sp:8", "tp:8"),
    ("dp:1024", "tp:8,cp:16"),
    ("tp:8", "sp:4,cp:2"),
    ("sp:4,cp:2", "tp:4"),
    ("sp:8@0-511", "tp:8,pp:4@512-1023"),
)
"""Layouts of vision and text whose whole steps are planned; activations are split over tp."""
SHAPE = VisionShape(
    layers=32, hidden=1280, heads=16, ffn=3420, channels=3, patch=14, temporal_patch=2, merge=2, window=4,
    full_layers=frozenset({7, 15, 23, 31}), out_hidden=3584, rope_theta=10000.0,
)  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    options = _options()
    points = []
    for pair in PAIRS:
        points.append(_measure(pair, options.ranks, options.rows, options.rounds))
        print(_row(points[-1]), flush=True)
    for vision, text in STEPS:
        points.append(_measure_step(vision, text, options.ranks, options.rows, options.rounds))
        print(_row(points[-1]), flush=True)
    text = _text(points, options)
    print(text)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "planning.md").write_text(text + "\n", encoding="utf-8")
        numbers = {"ranks": options.ranks, "rows": options.rows, "points": points}
        (options.results / "planning.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024, help="ranks of the world, a multiple of 1024")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of a crossing")
    parser.add_argument("--rounds", type=int, default=15, help="ranks for which a plan is made, spread over the world")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    return parser.parse_args()


def _measure(pair: Pair, ranks: int, rows: int, rounds: int) -> dict[str, object]:
    make = _ownerships(pair, ranks, rows)
    milliseconds = []
    for rank in np.linspace(0, ranks - 1, rounds).astype(int).tolist():
        begin = time.perf_counter()
        plan = plan_boundary(*make(), row_bytes=2)
        part = plan.rank(rank)
        milliseconds.append(1e3 * (time.perf_counter() - begin))
        assert part.forward.needed == plan.destination.num_rows(rank)
    return {"pair": pair.name, "milliseconds": milliseconds}


def _measure_step(vision: str, text: str, ranks: int, rows: int, rounds: int) -> dict[str, object]:
    layouts = {"vision": Layout.parse(vision, ranks), "text": Layout.parse(text, ranks)}
    packs = tuple(_packs(layouts["text"].dp, rows))
    milliseconds = []
    for rank in np.linspace(0, ranks - 1, rounds).astype(int).tolist():
        encoders, sharded = {"vision": SHAPE}, {"vision": True, "text": True}
        partitioner = StepPartitioner(encoders, layouts, sharded, rank, 2, {Edge("vision", "text"): (ROWS,)})
        begin = time.perf_counter()
        partitioner.text_shard(packs)
        partitioner.encoder_calls([packs])
        milliseconds.append(1e3 * (time.perf_counter() - begin))
    return {"pair": f"{vision} → {text}, everything in a step", "milliseconds": milliseconds}


def _packs(replicas: int, rows: int) -> list[PackMetadata]:
    """A pack for each replica, of samples of one image each: sides log-normal about 29 units (800 pixels), and text."""
    rng = np.random.default_rng(0)
    sides = np.clip(np.exp(rng.normal(np.log(29), 0.6, (rows, 2))), 7, 125).astype(int)
    enough = int(np.searchsorted(np.cumsum(sides.prod(axis=1)), rows)) + 1
    assigned: list[list[tuple[int, int]]] = [[] for _ in range(replicas)]
    for i, (height, width) in enumerate(sides[:enough].tolist()):
        assigned[i % replicas].append((height, width))
    return [_pack(images) for images in assigned]


def _pack(images: list[tuple[int, int]]) -> PackMetadata:
    lengths = [height * width + 40 for height, width in images]
    starts = np.cumsum([0, *lengths]) + 20
    places = [np.arange(start, start + h * w) for start, (h, w) in zip(starts.tolist(), images, strict=False)]
    grids = tuple((1, SHAPE.merge * height, SHAPE.merge * width) for height, width in images)
    joined = np.concatenate([np.zeros(0, np.int64), *places])
    return PackMetadata(tuple(lengths), (grids,), (joined.tobytes(),))


def _ownerships(pair: Pair, ranks: int, rows: int) -> Callable[[], tuple[Ownership, Ownership]]:
    """What makes both sides afresh, from the group of each row."""
    half = ranks // 2
    sides = (range(half), range(half, ranks)) if pair.disjoint else (range(ranks), range(ranks))
    source, destination = _groups(sides[0], pair.source), _groups(sides[1], pair.destination)
    rng = np.random.default_rng(0)
    order = _dealt_images(rng, rows) if pair.shuffled else np.arange(rows)
    holder = order * len(source) // rows
    # Text shifts the cuts: tokens are assigned evenly, rows are those tokens that are no text.
    tokens = np.sort(rng.permutation(int(rows * (1 + TEXT)))[:rows])
    reader = tokens * len(destination) // int(rows * (1 + TEXT))
    gradient = "partial" if pair.partial else "invariant"
    return lambda: (Ownership.from_assignment(source, holder), Ownership.from_assignment(destination, reader, gradient))


def _groups(ranks: range, copies: int) -> Groups:
    """Neighbouring ranks hold a shard; shards are numbered through all replicas."""
    return tuple(tuple(ranks[i : i + copies]) for i in range(0, len(ranks), copies))


def _dealt_images(rng: np.random.Generator, rows: int) -> np.ndarray:
    """The place of each row where images of 50 rows come in random order."""
    images = rng.permutation(-(-rows // 50))
    return np.minimum((images[:, None] * 50 + np.arange(50)).ravel()[:rows], rows - 1)


def _row(point: dict[str, object]) -> str:
    times = point["milliseconds"]
    assert isinstance(times, list)
    return f"{point['pair']} | {median(times):.1f} | {min(times):.1f} | {max(times):.1f}"


def _text(points: list[dict[str, object]], options: argparse.Namespace) -> str:
    slowest = max(median(p["milliseconds"]) for p in points)  # pyright: ignore[reportArgumentType]
    passed = slowest <= MAX_MS
    return "\n\n".join([
        f"Planning of one rank, both directions: {options.ranks:,} ranks, {options.rows:,} rows, one core.",
        table("layouts | median, ms | least | most", [_row(p) for p in points]),
        f"- {verdict(passed, f'at most {MAX_MS:.0f} ms for every pair of layouts; found {slowest:.1f} ms')}",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
