"""Which rank of the text module works on which tokens of its replica's pack. Pure.

A pack is cut three times: zigzag over `cp`, each sample by itself (`megatron_hetero.layout.context`); what a cp
member got, in contiguous runs over `sp`; and, with sequence-parallel activations, what an sp member got, in runs of
equal length over `tp`, the last ones filled up with padding. For one sample of 12 tokens under cp:2,sp:2,tp:2:

    cp 0: 0 1 2 9 10 11     sp 0: 0 1 2       tp 0: 0 1      tp 1: 2 .
                            sp 1: 9 10 11     tp 0: 9 10     tp 1: 11 .
    cp 1: 3 4 5 6 7 8       sp 0: 3 4 5       ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_hetero.boundary.ownership import Groups, Ownership
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
    tensors without elements. `sp_lengths`: tokens of each sp member of this rank's cp member; `cp_lengths`: of each
    cp member. `segments`: what the cp member attends to. `rows_at`: by encoder, int64, where the rows that reach this
    rank go in its shard of the embedding, in their order of arrival.
    """

    tokens: np.ndarray
    padded: int
    sp_lengths: tuple[int, ...]
    cp_lengths: tuple[int, ...]
    segments: AttentionSegments
    rows_at: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class TokenShards:
    """The packs of all replicas, cut. `layout` of the text module; `sharded`: sequence-parallel activations over tp.

    `lengths`: for each pack the tokens of its samples. `places`: by encoder, for each pack, int64, where its rows go.
    The rows of an encoder are numbered over the packs in turn.
    """

    layout: Layout
    sharded: bool
    lengths: tuple[tuple[int, ...], ...]
    places: Mapping[str, tuple[np.ndarray, ...]]

    def ownership(self, encoder: str) -> Ownership:
        """Which rows of an encoder each rank needs, in ascending order: those of the tokens that it embeds."""
        group, _ = self._cut_places[encoder]
        return Ownership.from_assignment(holding_groups(self.layout, self.sharded), group)

    def share(self, rank: int) -> TokenShare:
        """What `rank` works on."""
        at, layout = self.layout.coordinate(rank), self.layout
        lengths = self.lengths[at.dp]
        of_members = zigzag_tokens(lengths, layout.cp)
        mine = of_members[at.cp]
        cuts = even_cuts(len(mine), layout.sp)
        tokens = mine[cuts[at.sp] : cuts[at.sp + 1]]
        tp = layout.tp if self.sharded else 1
        return TokenShare(
            tokens=tokens,
            padded=int(tp_share(np.array(len(tokens)), tp)) * tp,
            sp_lengths=tuple(np.diff(cuts).tolist()),
            cp_lengths=tuple(map(len, of_members)),
            segments=zigzag_segments(lengths, layout.cp, at.cp),
            rows_at=self._rows_at(rank),
        )

    def _rows_at(self, rank: int) -> dict[str, np.ndarray]:
        groups = holding_groups(self.layout, self.sharded)
        # Groups come in the order of the layout's ranks, all of one size.
        mine = self.layout.ranks.index(rank) // len(groups[0])
        return {encoder: place[group == mine] for encoder, (group, place) in self._cut_places.items()}

    @cached_property
    def _cut_places(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """By encoder, for each row the group of ranks that needs it, and its place in their shard of the embedding."""
        return {encoder: self._cut(places) for encoder, places in self.places.items()}

    def _cut(self, places: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        layout, tp = self.layout, self.layout.tp if self.sharded else 1
        pack, member, place, total = self._place_in_context(places)
        # Which run of floor(k * total / sp) a place falls into: the largest k that begins at or before it.
        sp_rank = ((place + 1) * layout.sp - 1) // total
        start, stop = sp_rank * total // layout.sp, (sp_rank + 1) * total // layout.sp
        share = tp_share(stop - start, tp)
        tp_rank = (place - start) // share
        group = ((pack * layout.cp + member) * layout.sp + sp_rank) * tp + tp_rank
        return group, place - start - tp_rank * share

    def _place_in_context(
        self, places: tuple[np.ndarray, ...]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each row its pack, cp member, place among that member's tokens, and their number."""
        cp = self.layout.cp
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
        start = before[first_sample[pack], member]
        late = offset >= bounds[sample, 2 * cp - 1 - member]
        skipped = np.where(late, bounds[sample, 2 * cp - 1 - member] - chunks[sample, member], bounds[sample, member])
        return (
            pack, member, before[sample, member] - start + offset - skipped,
            before[first_sample[pack + 1], member] - start,
        )  # fmt: skip


@lru_cache(maxsize=64)
def holding_groups(layout: Layout, sharded: bool) -> Groups:
    """The ranks that hold the same rows: those of a tp group, or single ranks with sequence-parallel activations."""
    return layout.groups(*(() if sharded else ("tp",)))


def even_cuts(total: int, parts: int) -> np.ndarray:
    """Where even contiguous runs of `total` begin, and the end: int64 [parts + 1]."""
    return np.arange(parts + 1) * total // parts


def tp_share(tokens: np.ndarray, tp: int) -> np.ndarray:
    """Tokens of each of `tp` ranks that share activations, padding included; at least one."""
    return np.maximum(1, -(-tokens // tp))
