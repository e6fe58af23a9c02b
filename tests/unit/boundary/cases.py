"""Random boundaries, for the tests of the plan and of the communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from megatron_hetero.boundary.ownership import Ownership

Placement = Literal["equal", "mixed", "disjoint"]
PLACEMENTS: tuple[Placement, ...] = ("equal", "mixed", "disjoint")
LARGEST_GROUP = 8


def random_boundary(
    rng: np.random.Generator, ranks: Sequence[int], rows: int, placement: Placement
) -> tuple[Ownership, Ownership]:
    """Source and destination of `rows` rows, whose ids have gaps; the destination needs all of them, some or none.

    Together the two sides cover `ranks`, at least two of them where they are disjoint.
    """
    first, second = _sides(rng, ranks, placement)
    ids = rng.permutation(2 * rows)[:rows]
    needed = ids if rng.random() < 0.5 else ids[: rng.integers(0, rows + 1)]
    return random_ownership(rng, first, ids), random_ownership(rng, second, needed)


def random_ownership(rng: np.random.Generator, ranks: Sequence[int], ids: np.ndarray) -> Ownership:
    """Each of `ids` in one of the ragged groups of `ranks`, some of which get none; stored in order or in any order."""
    groups = _ragged(rng, ranks, int(rng.integers(1, LARGEST_GROUP + 1)))
    weights = rng.random(len(groups)) * (rng.random(len(groups)) < 0.7) + 1e-9
    holder = rng.choice(len(groups), len(ids), p=weights / weights.sum())
    ordered = rng.random() < 0.3
    if ordered:  # Runs of rows, which the communicator sends without copying them.
        holder, ids = np.sort(holder), np.sort(ids)
    gradient = "partial" if rng.random() < 0.5 else "invariant"
    return Ownership.of({group: ids[holder == i] for i, group in enumerate(groups)}, gradient)


def _sides(rng: np.random.Generator, ranks: Sequence[int], placement: Placement) -> tuple[list[int], list[int]]:
    """The ranks of the two sides, in any order."""
    shuffled, n = rng.permutation(ranks).tolist(), len(ranks)
    if placement == "equal":
        return shuffled, rng.permutation(shuffled).tolist()
    if placement == "disjoint":
        cut = int(rng.integers(1, n))
        return shuffled[:cut], shuffled[cut:]
    begin = int(rng.integers(0, n))
    return shuffled[: rng.integers(begin + 1, n + 1)], shuffled[begin:]


def _ragged(rng: np.random.Generator, ranks: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """`ranks` in groups of 1 to `most`."""
    groups, rest = [], list(ranks)
    while rest:
        size = int(rng.integers(1, most + 1))
        groups.append(tuple(rest[:size]))
        rest = rest[size:]
    return groups
