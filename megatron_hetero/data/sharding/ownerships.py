"""Ownerships of modules in a layout: which rank holds, or needs, which rows. Pure.

Rows are numbered sample by sample, in one order for both sides of a boundary. For two samples of three rows and one
of two, encoded by `sp:2,dp:2` and read by `tp:2,dp:2`, the first two samples by the text module's first replica:

    own_samples(Layout.parse("sp:2,dp:2", 4), [3, 3, 2], [0, 1, 0], split=["sp"])       0: 0-1; 1: 2,6-7; 2: 3; 3: 4-5
    own_samples(Layout.parse("tp:2,dp:2", 4), [3, 3, 2], [0, 0, 1])                     0,1: 0-5; 2,3: 6-7
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from megatron_hetero.boundary.ownership import Gradient, Ownership
from megatron_hetero.data.sharding.token_shards import TokenShards, even_cuts, tp_share
from megatron_hetero.errors import UserError
from megatron_hetero.layout.axes import axes_of
from megatron_hetero.layout.layout import Layout

CUT = ("cp", "sp", "tp")
"""Axes over which the rows of a replica may be cut, from the longest runs to the shortest."""


def own_samples(
    layout: Layout,
    counts: Sequence[int],
    replicas: Sequence[int] | None = None,
    *,
    split: Collection[str] = (),
    stage: int = -1,
    gradient: Gradient = "invariant",
) -> Ownership:
    """Whole samples on replicas: what an encoder makes of items, or what a replica of the text module reads.

    Args:
        layout: of the module.
        counts: rows of each sample, numbered in this order from 0.
        replicas: the data-parallel replica of each sample; default: sample i on replica i mod dp.
        split: of `tp`, `sp`, `cp`: axes over which each replica's rows are cut, as evenly as may be, into contiguous
            runs (`tp`: Megatron's sequence parallelism; `sp`: Ulysses). Ranks along the others hold the same rows.
        stage: of the pipeline: the last one, which makes rows; 0 for a module that reads them.
        gradient: of rows on several ranks, see `Ownership`.

    Raises:
        UserError: numbers do not fit the layout or each other.
    """
    places = np.arange(len(counts)) % layout.dp if replicas is None else np.asarray(replicas, np.int64)
    if len(places) != len(counts):
        _refuse("replicas", f"{len(places)} of {len(counts)} samples", "one for each of `counts`")
    if wrong := [int(replica) for replica in places if not 0 <= replica < layout.dp]:
        _refuse("replicas", f"replica {wrong[0]}", f"0 to {layout.dp - 1}, by the layout `{layout}`")
    if wrong := [count for count in counts if count < 0]:
        _refuse("counts", f"a sample of {wrong[0]} rows", "0 or more")
    if unknown := sorted(set(split) - set(CUT)):
        _refuse("split", f"axis `{unknown[0]}`", f"some of {', '.join(sorted(CUT))}")
    there = _stage(layout, stage)
    ends = np.cumsum([0, *counts], dtype=np.int64)
    rows: list[list[int]] = [[] for _ in range(layout.dp)]
    for sample, replica in enumerate(places.tolist()):
        rows[replica] += range(ends[sample], ends[sample + 1])
    shared = [axis for axis in axes_of("weights", "tokens") if axis not in split]
    holders = {ranks: _run(there, ranks[0], rows, split) for ranks in there.groups(*shared)}
    return Ownership.of(holders, gradient)


def _run(layout: Layout, rank: int, rows: Sequence[Sequence[int]], split: Collection[str]) -> Sequence[int]:
    """The part of its replica's rows that `rank` holds."""
    at = layout.coordinate(rank)
    run, runs = 0, 1
    for axis in CUT:
        if axis in split:
            run, runs = run * layout.degrees[axis] + getattr(at, axis), runs * layout.degrees[axis]
    cuts = even_cuts(len(rows[at.dp]), runs)
    return rows[at.dp][cuts[run] : cuts[run + 1]]


def own_tokens(
    layout: Layout,
    lengths: Sequence[Sequence[int]],
    places: Sequence[Sequence[int] | np.ndarray],
    *,
    sequence_parallel: bool = False,
    stage: int = 0,
    gradient: Gradient = "invariant",
) -> Ownership:
    """The rows of each rank's own tokens (`tokens_of`), ascending; those along `tp` need the same without
    `sequence_parallel`.

    Args:
        layout: of the module that reads tokens.
        lengths: for each data-parallel replica, the tokens of each of its samples, which lie one after the other.
        places: for each replica, the positions among its tokens where rows go, [rows]. Rows are numbered in this order,
            replica by replica, from 0.
        sequence_parallel: whether activations are cut over `tp`, as by Megatron's `sequence_parallel`.
        stage: of the pipeline; -1 is the last, for a module whose own tokens leave it as rows.
        gradient: of rows on several ranks, see `Ownership`. Ranks along `tp` have `invariant` ones.

    Raises:
        UserError: numbers do not fit the layout or each other.
    """
    for name, given in (("lengths", lengths), ("places", places)):
        if len(given) != layout.dp:
            _refuse(name, f"{len(given)} replicas", f"the {layout.dp} of the layout `{layout}`")
    packs = tuple(tuple(int(n) for n in each) for each in lengths)
    arrays = tuple(np.asarray(each, np.int64).reshape(-1) for each in places)
    for replica, (pack, array) in enumerate(zip(packs, arrays, strict=True)):
        if outside := [int(place) for place in array if not 0 <= place < sum(pack)]:
            _refuse(f"places of replica {replica}", f"position {outside[0]}", f"0 to {sum(pack) - 1}")
    owned = TokenShards(_stage(layout, stage), sequence_parallel, packs, {"rows": arrays}).ownership("rows")
    return Ownership(owned.groups, owned.ids, owned.starts, gradient)


def tokens_of(layout: Layout, rank: int, lengths: Sequence[int], *, sequence_parallel: bool = False) -> np.ndarray:
    """Positions, int64 ascending, of the tokens that `rank` works on among those of its replica.

    Cut over `cp` in zigzag, each sample by itself (into 2 cp chunks, of which member i has the chunks i and
    2 cp - 1 - i: Megatron's where 2 cp divides the length), then over `sp` into even contiguous runs, and, with
    `sequence_parallel`, over `tp` into contiguous runs, of which the last ones are shorter where `tp` does not divide.

    Args:
        layout: of the module.
        rank: one of its ranks.
        lengths: tokens of each sample of the replica, which lie one after the other.
        sequence_parallel: as for `own_tokens`.
    """
    there = _stage(layout, layout.coordinate(rank).pp)
    at = there.coordinate(rank)
    packs = tuple(tuple(lengths) if replica == at.dp else () for replica in range(there.dp))
    tokens = TokenShards(there, sequence_parallel, packs, {}).share(rank).tokens
    if not sequence_parallel:
        return tokens
    share = int(tp_share(np.array(len(tokens)), there.tp))
    return tokens[at.tp * share : (at.tp + 1) * share]


def _stage(layout: Layout, stage: int) -> Layout:
    return layout.stage(stage + layout.pp if stage < 0 else stage)


def _refuse(where: str, found: str, expected: str) -> None:
    raise UserError.at(where, found=found, expected=expected, fix="correct it")
