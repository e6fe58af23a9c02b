"""Edges that are compared: which rows each rank holds and needs, and where in its shard of the embedding they go.

The rows are those of `SAMPLES` samples with equally many, because Megatron-Core's communicators take nothing else;
each sample has text ahead of its rows, at most half as many tokens.

    source        replicas get runs of whole samples, which those communicators need; with sp, which they do not have,
                  samples are assigned one by one, as images are. sp cuts the rows of a replica evenly; tp replicates
                  them
    destination   replicas get runs of whole samples. sp, and tp where activations are sequence-parallel, cut the tokens
                  of a replica evenly; tp replicates them otherwise
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hetero.boundary.ownership import Groups, Ownership
from megatron_hetero.layout.layout import Layout

SAMPLES = 24
"""A multiple of every number of replicas here."""


@dataclass(frozen=True)
class Edge:
    """Two layouts; `sharded`: whether activations behind the boundary are sequence-parallel over `tp`."""

    source: str
    destination: str
    sharded: bool = True
    world: int = 8

    def __str__(self) -> str:
        whole = self.destination_layout.tp > 1 and not self.sharded
        return f"{self.source} → {self.destination}{', whole' if whole else ''}"

    @cached_property
    def source_layout(self) -> Layout:
        """Of the encoder."""
        return Layout.parse(self.source, self.world)

    @cached_property
    def destination_layout(self) -> Layout:
        """Of the language model."""
        return Layout.parse(self.destination, self.world)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that take part, ascending."""
        return tuple(sorted({*self.source_layout.ranks, *self.destination_layout.ranks}))

    @cached_property
    def source_groups(self) -> Groups:
        """Replica groups of the source: sp members of the first replica, of the second …"""
        return _groups(self.source_layout, sharded=False)

    @cached_property
    def destination_groups(self) -> Groups:
        """Replica groups of the destination in the same order."""
        return _groups(self.destination_layout, sharded=self.sharded)

    def source_owners(self, rows: int) -> np.ndarray:
        """The group of each row."""
        sample, place = np.divmod(np.arange(rows), rows // SAMPLES)
        replicas = self.source_layout.dp
        shards, samples = len(self.source_groups) // replicas, SAMPLES // replicas
        one_by_one = self.source_layout.sp > 1
        replica, local = (sample % replicas, sample // replicas) if one_by_one else np.divmod(sample, samples)
        return replica * shards + (local * (rows // SAMPLES) + place) * shards // (rows // replicas)

    def token_places(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The group that needs each row, the row's place among that group's tokens, and the tokens of each group."""
        per_sample, replicas = rows // SAMPLES, self.destination_layout.dp
        shards = len(self.destination_groups) // replicas
        text = np.random.default_rng(0).integers(0, per_sample // 2 + 1, (replicas, SAMPLES // replicas))
        ends = np.cumsum(text + per_sample, axis=1)
        at = ((ends - per_sample)[..., None] + np.arange(per_sample)).reshape(replicas, -1)
        length = -(-ends[:, -1] // shards)
        shard, place = np.divmod(at, length[:, None])
        group = np.arange(replicas)[:, None] * shards + shard
        return group.ravel(), place.ravel(), np.repeat(length, shards)

    def ownerships(self, rows: int) -> tuple[Ownership, Ownership]:
        """Of both sides."""
        source = Ownership.from_assignment(self.source_groups, self.source_owners(rows))
        return source, Ownership.from_assignment(self.destination_groups, self.token_places(rows)[0])


EDGES = (
    Edge("dp:4@0-3", "tp:4@4-7"),
    Edge("dp:4@0-3", "tp:4@4-7", sharded=False),
    Edge("tp:2,dp:2@0-3", "dp:4@4-7"),
    Edge("sp:8", "tp:8"),
    Edge("dp:8", "tp:4,dp:2"),
    Edge("dp:8", "tp:4,dp:2", sharded=False),
    Edge("tp:4,dp:2", "dp:8"),
    Edge("sp:4,dp:2", "tp:2,dp:4"),
    Edge("sp:2,dp:3@0-5", "tp:3,dp:2@0-5"),
)
TRIED = (
    Edge("tp:2,dp:3@0-5", "tp:3,dp:2@0-5"),
    Edge("dp:4@0-3", "tp:8"),
    Edge("dp:4@0-3", "tp:2,cp:2@4-7"),
    Edge("dp:8", "tp:4,pp:2"),
)
"""Not measured, only tried with Megatron-Core's communicators."""


def whole_samples(rows: int) -> int:
    """The multiple of `SAMPLES` below `rows`."""
    return rows // SAMPLES * SAMPLES


def _groups(layout: Layout, sharded: bool) -> Groups:
    members = [
        tuple(layout.rank_at(tp=tp, sp=sp, cp=cp, dp=dp) for tp in range(layout.tp))
        for dp in range(layout.dp)
        for cp in range(layout.cp)
        for sp in range(layout.sp)
    ]
    return tuple((rank,) for group in members for rank in group) if sharded else tuple(members)
