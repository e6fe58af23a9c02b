"""Shards of tokens: which rank of the text module works on which tokens of its replica's pack, and which rank owns or
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
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.boundary.ownership import Gradient, Groups, Ownership
from megatron_hetero.layout.axes import axes_of
from megatron_hetero.layout.context import (
    AttentionSegments,
    zigzag_segments,
    zigzag_tokens,
)
from megatron_hetero.layout.layout import Layout


@dataclass(frozen=True)
class SequenceShard:
    """The shard on which one rank works in one call of a module's layers: tokens of a pack, or patches of an encoder's
    items. Lengths are in tokens or patches. Equality ignores indices: equal shards cost the same.

    Attributes:
        tokens: length n of the shard without padding, which the rank's tp group shares.
        local: length between layers on each of the tp `ranks` that split the shard, with padding. Never 0, since
            Megatron's layers do not accept tensors without elements.
        ranks: number of tp ranks that split the shard; 1 if activations are not split over tp.
        sp_lengths: number of tokens of each sp member of this rank's cp member.
        cp_lengths: number of tokens of each cp member.
        segments: segments of full attention of the cp member.
        windows: lengths of the shard's windows of local attention.
        lengths: number of tokens of each sample of the whole pack; empty for an encoder.
        supervised: number of tokens with a loss, if it is known.
        padding: number of this rank's `local` tokens that are padding, at the end.
        positions: for the text module, positions in the pack, int64 [n], ascending; for an encoder, coordinates of
            patches, int64 [dims, n].
        rows_at: by encoder, positions in this rank's shard of the embedding of the rows that reach this rank, int64
            [rows], in their order of arrival.
    """

    tokens: int
    local: int
    ranks: int
    sp_lengths: tuple[int, ...]
    cp_lengths: tuple[int, ...]
    segments: AttentionSegments
    windows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    supervised: int = 0
    padding: int = field(default=0, compare=False)
    positions: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int64), compare=False, repr=False)
    rows_at: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray], compare=False, repr=False)

    @property
    def padded(self) -> int:
        """Length of the shard with padding, over all tp ranks."""
        return self.local * self.ranks

    @property
    def member(self) -> int:
        """Number of tokens of the cp member, over all its sp ranks."""
        return sum(self.sp_lengths)


@dataclass(frozen=True, eq=False)
class TokenShards:
    """The packs of all replicas, cut over the ranks of the text module, in each of its pipeline stages.

    `sharded`: whether activations are sharded over tp. `lengths`: for each pack, the number of tokens of each sample.
    `places`: by encoder, the positions of rows in each pack, int64. The rows of an encoder are numbered pack by pack.
    """

    layout: Layout
    sharded: bool
    lengths: tuple[tuple[int, ...], ...]
    places: Mapping[str, tuple[np.ndarray, ...]]

    def ownership(self, encoder: str, stage: int = 0) -> Ownership:
        """Return the rows of an encoder that each rank of a stage needs for the tokens of its shard, ascending."""
        group, _ = self._cut_places[encoder]
        return Ownership.from_assignment(holding_groups(self.layout, self.sharded, stage), group)

    def shard(self, rank: int) -> SequenceShard:
        """Return the shard of `rank`."""
        at = self.layout.coordinate(rank)
        lengths, runs, tp_rank = self.lengths[at.dp], self._runs(at.dp), at.tp if self.sharded else 0
        tokens = runs[at.cp][at.sp]
        local = int(tp_share(np.array(len(tokens)), self._tp))
        group = self._group(at.dp, at.cp, at.sp) + tp_rank
        return SequenceShard(
            tokens=len(tokens),
            local=local,
            ranks=self._tp,
            sp_lengths=tuple(map(len, runs[at.cp])),
            cp_lengths=tuple(sum(map(len, each)) for each in runs),
            segments=zigzag_segments(lengths, self.layout.cp, at.cp),
            lengths=lengths,
            padding=local - local_tokens(len(tokens), local, tp_rank),
            positions=tokens,
            rows_at={encoder: place[groups == group] for encoder, (groups, place) in self._cut_places.items()},
        )

    @property
    def _tp(self) -> int:
        """Number of tp ranks that split the tokens of an sp member."""
        return self.layout.tp if self.sharded else 1

    def _group(self, replica: int, cp_rank: int, sp_rank: int) -> int:
        """Return the number of the first group of ranks that has tokens of an sp member, in `holding_groups`."""
        return ((replica * self.layout.cp + cp_rank) * self.layout.sp + sp_rank) * self._tp

    def _runs(self, replica: int) -> list[list[np.ndarray]]:
        """Return the tokens of a pack, int64, by cp member and sp member."""
        members = zigzag_tokens(self.lengths[replica], self.layout.cp)
        return [np.split(tokens, even_cuts(len(tokens), self.layout.sp)[1:-1]) for tokens in members]

    @cached_property
    def _cut_places(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The group of ranks that needs each row and the row's place in its shard of the embedding, by encoder."""
        cuts = [self._cut(replica) for replica in range(len(self.lengths))]
        return {
            encoder: (
                np.concatenate([groups[at] for (groups, _), at in zip(cuts, places, strict=True)]),
                np.concatenate([place[at] for (_, place), at in zip(cuts, places, strict=True)]),
            )
            for encoder, places in self.places.items()
        }

    def _cut(self, replica: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the group of ranks that embeds each token of a pack, and the token's place in its shard, int64."""
        groups, places = np.empty((2, sum(self.lengths[replica])), np.int64)
        for cp_rank, runs in enumerate(self._runs(replica)):
            for sp_rank, tokens in enumerate(runs):
                share = tp_share(np.array(len(tokens)), self._tp)
                tp_rank, places[tokens] = np.divmod(np.arange(len(tokens)), share)
                groups[tokens] = self._group(replica, cp_rank, sp_rank) + tp_rank
        return groups, places


@lru_cache(maxsize=64)
def holding_groups(layout: Layout, sharded: bool, stage: int = 0) -> Groups:
    """Return groups of ranks of a stage with the same rows: tp groups, or single ranks if activations are sharded."""
    return layout.stage(stage).groups(*(() if sharded else ("tp",)))


def even_cuts(total: int, runs: int) -> np.ndarray:
    """Return the bounds of `runs` contiguous runs of `total` elements, as even as possible, int64 [runs + 1]."""
    return np.arange(runs + 1) * total // runs


def tp_share(tokens: np.ndarray, tp: int) -> np.ndarray:
    """Return the number of tokens, with padding, on each of `tp` ranks that split activations; at least 1."""
    return np.maximum(1, -(-tokens // tp))


def local_tokens(tokens: int, share: int, tp_rank: int) -> int:
    """Return how many of a tp rank's `share` tokens are not padding, in a shard of `tokens` tokens."""
    return max(0, min(tokens - share * tp_rank, share))


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
    """Return the ownership of rows of whole samples on replicas: an encoder's output, or a module's input.

    Args:
        layout: layout of the module.
        counts: number of rows of each sample. Rows are numbered sample by sample, from 0.
        replicas: the data-parallel replica of each sample; default: sample i on replica i mod dp.
        split: axes among `tp`, `sp`, `cp` over which each replica's rows are cut into contiguous runs, as even as
            possible (`tp`: Megatron's sequence parallelism; `sp`: Ulysses). Ranks along other axes have the same rows.
        stage: pipeline stage; default: the last one, which computes rows; 0 for a module that reads rows.
        gradient: gradient of rows that are on several ranks, see `Ownership`.

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
    """Return the rows of `rank`: a contiguous run of its replica's rows."""
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
    """Return the ownership of the rows at each rank's tokens (`tokens_of`), ascending. Without `sequence_parallel` the
    ranks along `tp` need the same rows.

    Args:
        layout: layout of the module that reads tokens.
        lengths: for each data-parallel replica, the number of tokens of each of its consecutive samples.
        places: for each replica, the positions of rows among its tokens, [rows]. Rows are numbered in this order,
            replica by replica, from 0.
        sequence_parallel: whether activations are cut over `tp`, as by Megatron's `sequence_parallel`.
        stage: pipeline stage; -1: the last stage, for a module whose tokens leave it as rows.
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
    """Return the positions, int64 ascending, of the tokens of its replica that `rank` works on.

    They are cut over `cp` in zigzag, each sample by itself (into 2 cp chunks, of which member i has the chunks i and
    2 cp - 1 - i: Megatron's where 2 cp divides the length), then over `sp` into even contiguous runs, and, with
    `sequence_parallel`, over `tp` into contiguous runs, of which the last ones are shorter where `tp` does not divide.

    Args:
        layout: layout of the module.
        rank: one of its ranks.
        lengths: number of tokens of each of the replica's consecutive samples.
        sequence_parallel: see `own_tokens`.
    """
    at = layout.coordinate(rank)
    packs = tuple(tuple(lengths) if replica == at.dp else () for replica in range(layout.dp))
    shard = TokenShards(layout, sequence_parallel, packs, {}).shard(rank)
    if not sequence_parallel:
        return shard.positions
    return shard.positions[at.tp * shard.local : (at.tp + 1) * shard.local]


def _stage(layout: Layout, stage: int) -> Layout:
    return layout.stage(stage + layout.pp if stage < 0 else stage)


def _refuse(where: str, found: str, expected: str) -> None:
    raise UserError.at(where, found=found, expected=expected, fix="correct it")
