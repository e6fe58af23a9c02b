"""Random packs of images and text, as integers, for the tests of plans."""

from __future__ import annotations

import numpy as np

from megatron_hetero.layout import Layout
from megatron_hetero.models.qwen2_5_vl.geometry import Grid
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.training.step_plan import ImageSource, PackMetadata

SHAPE = VisionShape(
    layers=2, hidden=16, heads=8, ffn=20, channels=3, patch=14, temporal_patch=2, merge=2, window=4,
    full_layers=frozenset({1}), out_hidden=24, rope_theta=10000.0,
)  # fmt: skip
BATCHES = ("even", "ragged", "some without images", "fewer images than replicas", "no rows")


def random_packs(batch: str, text: Layout, pad_multiple: int, seed: int) -> list[PackMetadata]:
    """A micro-batch: one pack per replica of `text`. `batch`: one of `BATCHES`."""
    rng = np.random.default_rng([seed, BATCHES.index(batch)])
    return [
        make_pack(_grids(batch, replica, text.dp, rng), rng, replica, pad_multiple, tight=batch == "even")
        for replica in range(text.dp)
    ]


def _grids(batch: str, replica: int, replicas: int, rng: np.random.Generator) -> list[Grid]:
    if batch == "no rows" or (batch == "some without images" and replica % 2 == 0 and replicas > 1):
        return []
    if batch == "even":
        return [(1, 16, 16)]
    if batch == "fewer images than replicas":
        return [(1, 2, 2)] if replica == 0 else []
    sides = rng.integers(1, 11, size=(rng.integers(1, 5), 2))
    return [(1, 2 * int(h), 2 * int(w)) for h, w in sides]


def make_pack(
    grids: list[Grid], rng: np.random.Generator, replica: int, pad_multiple: int, *, tight: bool = False
) -> PackMetadata:
    """A pack of images between stretches of text (none where `tight`); a pack without images has text alone."""
    positions, at = [], 0
    for grid in grids:
        at += 0 if tight else int(rng.integers(1, 7))
        rows = int(np.prod(grid)) // SHAPE.unit
        positions.append(np.arange(at, at + rows))
        at += rows
    at += 0 if tight else int(rng.integers(1, 7))
    return PackMetadata(
        length=at,
        padded_length=at + -at % pad_multiple,
        supervised=1,
        grids=tuple(grids),
        sources=tuple(ImageSource(100 * replica + k // 2, k % 2) for k in range(len(grids))),
        positions=np.concatenate([np.zeros(0, np.int64), *positions]),
    )


def rows_of_positions(packs: list[PackMetadata]) -> list[dict[int, int]]:
    """For each pack, the global row at each position that has one."""
    first, found = 0, []
    for pack in packs:
        found.append({int(position): first + i for i, position in enumerate(pack.positions)})
        first += len(pack.positions)
    return found


def encoded_rows(parts: object, packs: list[PackMetadata]) -> np.ndarray:
    """The global rows that a rank makes, in order, from the patches that it embeds."""
    sources = [source for pack in packs for source in pack.sources]
    grids = [grid for pack in packs for grid in pack.grids]
    first = np.cumsum([0] + [int(np.prod(grid)) // SHAPE.unit for grid in grids])
    rows = [np.zeros(0, np.int64)]
    for part in parts:  # pyright: ignore[reportGeneralTypeIssues]
        units = part.patches.reshape(-1, SHAPE.unit)
        assert (units == units[:, :1] // SHAPE.unit * SHAPE.unit + np.arange(SHAPE.unit)).all(), "a unit was torn apart"
        rows.append(first[sources.index(part.source)] + units[:, 0] // SHAPE.unit)
    return np.concatenate(rows)
