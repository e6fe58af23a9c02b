"""Shards of tokens: which rank of the text module works on which tokens of its replica's pack, and which rank holds or
needs which rows in a layout, as pure functions.

A pack is cut three times: zigzag over `cp`, each sample by itself (`megatron_hetero.layout.context`); the tokens of a
cp member in contiguous runs over `sp`; and, with sequence-parallel activations, the tokens of an sp member in runs of
equal length over `tp`, padded at the end. For one sample of 12 tokens under cp:2,sp:2,tp:2:

    cp 0: 0 1 2 9 10 11     sp 0: 0 1 2       tp 0: 0 1      tp 1: 2 .
                            sp 1: 9 10 11     tp 0: 9 10     tp 1: 11 .
    cp 1: 3 4 5 6 7 8       sp 0: 3 4 5       ...

Rows are numbered sample by sample, in one order for both sides of a boundary. For two samples of three rows and one
of two, encoded by `sp:2,dp:2` and read by `tp:2,dp:2`, the first two samples by the text module's first replica:

    own_samples(Layout.parse("sp:2,dp:2", 4), [3, 3, 2], [0, 1, 0], split=["sp"])       0: 0-1; 1: 2,6-7; 2: 3; 3: 4-5
    own_samples(Layout.parse("tp:2,dp:2", 4), [3, 3, 2], [0, 0, 1])                     0,1: 0-5; 2,3: 6-7
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.ownership import Gradient, Groups, Ownership
from megatron_hetero.layout.axes import axes_of
from megatron_hetero.layout.context import (
    AttentionSegments,
    chunk_bounds,
    zigzag_member,
    zigzag_segments,
    zigzag_tokens,
)
from megatron_hetero.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class TokenShare:
    """What one rank of the text module works on in one micro-batch.

    `tokens`: int64 [n], positions in the pack, ascending; its tp group shares them. `padded`: their number with
    padding, a multiple of the tp ranks that share activations, and never 0, since Megatron's layers do not accept
    tensors without elements. `sp_lengths`: tokens of each sp member of this rank's cp member; `cp_lengths`: tokens of
    each cp member. `segments`: attention of the cp member. `rows_at`: by encoder, int64, positions in this rank's shard
    of the embedding of the rows that reach it, in their order of arrival.
    """

    tokens: np.ndarray
    padded: int
    sp_lengths: tuple[int, ...]
    cp_lengths: tuple[int, ...]
    segments: AttentionSegments
    rows_at: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class TokenShards:
    """The packs of all replicas, cut over the ranks of the text module, in each of its pipeline stages.

    `sharded`: whether activations are sharded over tp. `lengths`: for each pack the tokens of its samples. `places`: by
    encoder, for each pack the positions of its rows, int64. The rows of an encoder are numbered over the packs in turn.
    """

    layout: Layout
    sharded: bool
    lengths: tuple[tuple[int, ...], ...]
    places: Mapping[str, tuple[np.ndarray, ...]]

    def ownership(self, encoder: str, stage: int = 0) -> Ownership:
        """The rows of an encoder that each rank of a stage needs, for the tokens of its shard, ascending."""
        group, _ = self._cut_places[encoder]
        return Ownership.from_assignment(holding_groups(self.layout, self.sharded, stage), group)

    def share(self, rank: int) -> TokenShare:
        """The share of `rank`."""
        at, layout = self.layout.coordinate(rank), self.layout
        lengths = self.lengths[at.dp]
        of_members = zigzag_tokens(lengths, layout.cp)
        mine = of_members[at.cp]
        cuts = even_cuts(len(mine), layout.sp)
        tokens = mine[cuts[at.sp] : cuts[at.sp + 1]]
        tp = layout.tp if self.sharded else 1
        number = ((at.dp * layout.cp + at.cp) * layout.sp + at.sp) * tp + (at.tp if self.sharded else 0)
        return TokenShare(
            tokens=tokens,
            padded=int(tp_share(np.array(len(tokens)), tp)) * tp,
            sp_lengths=tuple(np.diff(cuts).tolist()),
            cp_lengths=tuple(map(len, of_members)),
            segments=zigzag_segments(lengths, layout.cp, at.cp),
            rows_at={encoder: place[group == number] for encoder, (group, place) in self._cut_places.items()},
        )

    @cached_property
    def _cut_places(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The group of ranks that needs each row, and its place in their shard of the embedding, by encoder."""
        return {encoder: self._cut(places) for encoder, places in self.places.items()}

    def _cut(self, places: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        cp, sp, tp = self.layout.cp, self.layout.sp, self.layout.tp if self.sharded else 1
        pack = np.repeat(np.arange(len(self.lengths)), [len(p) for p in places])
        lengths = np.array([n for samples in self.lengths for n in samples], np.int64)
        first_sample = np.cumsum([0, *map(len, self.lengths)])
        ends = np.concatenate([[0], np.cumsum(lengths)])
        token = np.concatenate([np.zeros(0, np.int64), *places]) + ends[first_sample[pack]]
        sample = np.searchsorted(ends[1:], token, side="right")
        numbers = np.arange(len(lengths)) - np.repeat(first_sample[:-1], np.diff(first_sample))
        offset = token - ends[sample]
        member = zigzag_member(offset, lengths[sample], numbers[sample], cp)
        # Tokens of each member in the samples before, counted from the pack's first.
        bounds = chunk_bounds(lengths, numbers, cp)
        chunks = np.diff(bounds, axis=1)
        sizes = chunks[:, :cp] + chunks[:, : cp - 1 : -1]
        before = np.concatenate([np.zeros((1, cp), np.int64), np.cumsum(sizes, axis=0)])
        first = before[first_sample[pack], member]
        late = offset >= bounds[sample, 2 * cp - 1 - member]
        skipped = np.where(late, bounds[sample, 2 * cp - 1 - member] - chunks[sample, member], bounds[sample, member])
        # The place of each row among the tokens of its cp member, and the number of these.
        place, total = before[sample, member] - first + offset - skipped, before[first_sample[pack + 1], member] - first
        # The last run, of those that begin at floor(k * total / sp), that begins at or before the place.
        sp_rank = ((place + 1) * sp - 1) // total
        start, stop = sp_rank * total // sp, (sp_rank + 1) * total // sp
        share = tp_share(stop - start, tp)
        tp_rank = (place - start) // share
        return ((pack * cp + member) * sp + sp_rank) * tp + tp_rank, place - start - tp_rank * share


@lru_cache(maxsize=64)
def holding_groups(layout: Layout, sharded: bool, stage: int = 0) -> Groups:
    """Ranks of a stage that hold the same rows: tp groups, or single ranks with sequence-parallel activations."""
    return layout.stage(stage).groups(*(() if sharded else ("tp",)))


def even_cuts(total: int, parts: int) -> np.ndarray:
    """Bounds of even contiguous runs of `total`, int64 [parts + 1]."""
    return np.arange(parts + 1) * total // parts


def tp_share(tokens: np.ndarray, tp: int) -> np.ndarray:
    """Tokens per rank of `tp` ranks that share activations, with padding; at least one."""
    return np.maximum(1, -(-tokens // tp))


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
    """Ownership of the rows of whole samples on replicas: an encoder's output, or a module's input.

    Args:
        layout: layout of the module.
        counts: rows of each sample, numbered in this order from 0.
        replicas: the data-parallel replica of each sample; default: sample i on replica i mod dp.
        split: some of `tp`, `sp`, `cp`: axes over which each replica's rows are cut into contiguous runs, as even as
            possible (`tp`: Megatron's sequence parallelism; `sp`: Ulysses). Ranks along the others hold the same rows.
        stage: pipeline stage: the last one, which computes rows; 0 for a module that reads them.
        gradient: gradient of rows on several ranks, see `Ownership`.

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
    """The run of its replica's rows that `rank` holds."""
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
    """Ownership of the rows of each rank's own tokens (`tokens_of`), ascending. Without `sequence_parallel` the ranks
    along `tp` need the same rows.

    Args:
        layout: layout of the module that reads tokens.
        lengths: for each data-parallel replica, the tokens of each of its consecutive samples.
        places: for each replica, the positions of rows among its tokens, [rows]. Rows are numbered in this order,
            replica by replica, from 0.
        sequence_parallel: whether activations are cut over `tp`, as by Megatron's `sequence_parallel`.
        stage: pipeline stage; -1 is the last, for a module whose own tokens leave it as rows.
        gradient: gradient of rows on several ranks, see `Ownership`. It is `invariant` along `tp`.

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
        layout: layout of the module.
        rank: one of its ranks.
        lengths: tokens of each of the replica's consecutive samples.
        sequence_parallel: as for `own_tokens`.
    """
    at = layout.coordinate(rank)
    packs = tuple(tuple(lengths) if replica == at.dp else () for replica in range(layout.dp))
    tokens = TokenShards(layout, sequence_parallel, packs, {}).share(rank).tokens
    if not sequence_parallel:
        return tokens
    share = int(tp_share(np.array(len(tokens)), layout.tp))
    return tokens[at.tp * share : (at.tp + 1) * share]


def _stage(layout: Layout, stage: int) -> Layout:
    return layout.stage(stage + layout.pp if stage < 0 else stage)


def _refuse(where: str, found: str, expected: str) -> None:
    raise UserError.at(where, found=found, expected=expected, fix="correct it")
