"""What each rank decodes, encodes and reads in the micro-batches of a step, from integers that all ranks know. Pure.

Words of this file: a *pack* is the micro-batch of one replica of the text module. The pieces of items are numbered over
the packs of all replicas in turn; so are the rows, piece by piece in the order of their units. A *call* of an encoder
takes one micro-batch or more (`data.sharding.calls`); its pieces and rows are numbered one micro-batch after the other.

All of it follows from the shapes of the packs, so that micro-batches, and calls, of one shape are planned once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from megatron_hetero.base.errors import ROWS, TEXT, UserError
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import RankPlan, plan_boundary
from megatron_hetero.data.balance import assign, assign_in_order, cut_calls, loads_of
from megatron_hetero.data.dealing import PackShape, Pieces
from megatron_hetero.data.encoder_shards import EncoderShards, EncoderShare
from megatron_hetero.data.token_shards import TokenShards, TokenShare
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.items.types import ItemShape, Size

Balance = Literal["off", "replica"]
"""How pieces are assigned to the encoder's replicas: in order, or so that predicted work is even."""


@dataclass(frozen=True, eq=False)
class PatchPlan:
    """The patches that one rank of an encoder's first stage decodes and embeds.

    `decodes`: numbers of the pieces that this rank decodes. `exchange`: how the units of their patches reach the ranks
    of its replica that embed them (the forward direction). `padding`: patches of zeros after those that it embeds.
    """

    decodes: tuple[int, ...]
    exchange: RankPlan
    padding: int


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """Everything that ranks agree on about one micro-batch, as one rank sees it.

    `text`: what this rank reads, None outside the text module. By encoder, `patches` and `encoders` are what this rank
    decodes and encodes, where it is of the encoder's first stage and of the encoder; `loads` the predicted forward
    flops of each replica. `boundaries`: by edge, how rows reach the text, where this rank takes part.

    `calls`: by encoder, the micro-batches that one call of it encodes, where these are several. Then `patches`,
    `encoders` and `loads` of the first are those of all, and the others have none. A rank holds the rows of the call
    one micro-batch after the other.

    An encoder for which no pack of the micro-batch, or of the call, has an item is in none of them: nobody encodes,
    nothing crosses.
    """

    text: TokenShare | None
    patches: Mapping[str, PatchPlan] = field(default_factory=dict)
    encoders: Mapping[str, EncoderShare] = field(default_factory=dict)
    boundaries: Mapping[Edge, RankPlan] = field(default_factory=dict)
    loads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    calls: Mapping[str, range] = field(default_factory=dict)


Packs = tuple[PackShape, ...]
"""Those of a micro-batch, one for each replica of the text module."""
Together = Callable[[int], Mapping[str, Sequence[range]]]
"""For a number of micro-batches, by encoder, all of them in runs of those that may be one call."""


@dataclass(frozen=True, eq=False)
class _Reading:
    """What the text module reads in a micro-batch: this rank's share; and by pipeline coordinate, everybody's."""

    share: TokenShare | None
    wanted: Mapping[int, TokenShards]


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of an encoder: the shards of its first stage, this rank's share, and the predicted forward flops of each
    replica; for each micro-batch by edge, how its rows cross.
    """

    shards: EncoderShards
    share: EncoderShare | None
    loads: tuple[float, ...]
    boundaries: tuple[Mapping[Edge, RankPlan], ...]


class StepPlanner:
    """Plans micro-batches for `rank`.

    Args:
        encoders: by name.
        layouts: of the encoders and of "text".
        sequence_parallel: for all of them, whether activations are sharded over tp.
        row_bytes: bytes of a row of one output on the wire.
        balance: how pieces are assigned to an encoder's replicas.
        edges: along which the rows of encoders reach the text module, with the outputs that cross there; None: the rows
            of each from its last stage to the first.
        together: which micro-batches of a step an encoder may encode in one call; None: each by itself.
    """

    def __init__(
        self,
        encoders: Mapping[str, ItemShape],
        layouts: Mapping[str, Layout],
        sequence_parallel: Mapping[str, bool],
        rank: int,
        row_bytes: int,
        balance: Balance = "replica",
        edges: Mapping[Edge, Sequence[str]] | None = None,
        together: Together | None = None,
    ):
        self.encoders, self.layouts = dict(encoders), dict(layouts)
        self.text = layouts[TEXT]
        self.sharded = dict(sequence_parallel)
        self.rank = rank
        self.row_bytes = row_bytes
        self.balance: Balance = balance
        self.edges = dict(edges or {Edge(name, TEXT): (ROWS,) for name in encoders})
        self.together = together
        self._numbers = {name: i for i, name in enumerate(self.encoders)}
        self._read = lru_cache(maxsize=32)(self._plan_reading)  # These are the largest.
        self._encode = lru_cache(maxsize=64)(self._plan_call)
        self._decode = lru_cache(maxsize=64)(self._plan_patches)

    def with_calls(self, together: Together) -> StepPlanner:
        """The same, but that these micro-batches may be one call."""
        return StepPlanner(
            self.encoders, self.layouts, self.sharded, self.rank, self.row_bytes, self.balance, self.edges, together
        )

    def plan(self, packs: Sequence[PackShape], turn: int = 0) -> MicroBatchPlan:
        """Plan one micro-batch that is encoded by itself. `packs`: one for each replica of the text module. `turn`: its
        number.

        Raises:
            UserError: a pack has more or fewer places for rows than its items have rows.
        """
        return self._plans([tuple(packs)], {}, turn)[0]

    def plan_step(self, packs: Sequence[Sequence[PackShape]]) -> list[MicroBatchPlan]:
        """Plan all micro-batches of a step. `packs`: of each. Raises `UserError`, as `plan` does."""
        together = {} if self.together is None else self.together(len(packs))
        return self._plans([tuple(of_one) for of_one in packs], together, 0)

    def _plans(
        self, packs: Sequence[Packs], together: Mapping[str, Sequence[range]], turn: int
    ) -> list[MicroBatchPlan]:
        """`turn`: the number of the first."""
        plans = [MicroBatchPlan(self._read(of_one).share) for of_one in packs]
        for name in self.encoders:
            for call in self._calls(name, packs, together.get(name)):
                if any(self._sizes(name, of_one) for of_one in packs[call.start : call.stop]):
                    self._add_call(plans, name, call, packs, turn)
        return plans

    def _calls(self, name: str, packs: Sequence[Packs], together: Sequence[range] | None) -> tuple[range, ...]:
        if together is None:
            return tuple(range(m, m + 1) for m in range(len(packs)))
        shape, layout = self.encoders[name], self.layouts[name]
        patches = [shape.unit * sum(map(shape.rows, self._sizes(name, of_one))) for of_one in packs]
        return cut_calls(patches, together, layout.size // layout.pp)

    def _sizes(self, name: str, packs: Packs) -> tuple[Size, ...]:
        """The sizes of all pieces of a micro-batch that are for an encoder."""
        return tuple(size for pack in packs for size in pack.pieces[self._numbers[name]].sizes)

    def _add_call(self, plans: list[MicroBatchPlan], name: str, call: range, packs: Sequence[Packs], turn: int) -> None:
        """Add what one call encodes to the plan of its first micro-batch, and what crosses to the plan of each."""
        planned, first = self._encode(name, tuple(packs[call.start : call.stop])), plans[call.start]
        shards, patches = planned.shards, first.patches
        if self.rank in shards.layout:
            decoders = shards.layout.size // shards.layout.dp
            patches = {**patches, name: self._decode(name, shards, (turn + call.start) % decoders)}
        plans[call.start] = replace(
            first,
            patches=patches,
            encoders=first.encoders if planned.share is None else {**first.encoders, name: planned.share},
            loads={**first.loads, name: planned.loads},
            calls={**first.calls, name: call} if len(call) > 1 else first.calls,
        )
        for m, boundaries in zip(call, planned.boundaries, strict=True):
            if boundaries:
                plans[m] = replace(plans[m], boundaries={**plans[m].boundaries, **boundaries})

    def _plan_reading(self, packs: Packs) -> _Reading:
        for replica, pack in enumerate(packs):
            for shape, pieces in zip(self.encoders.values(), pack.pieces, strict=True):
                require_rows_for_places(replica, pack.lengths, pieces, shape.rows)
        places = {name: tuple(p.pieces[i].positions for p in packs) for name, i in self._numbers.items()}
        lengths = tuple(p.lengths for p in packs)
        tokens = TokenShards(self.text.stage(0), self.sharded[TEXT], lengths, places)
        share = tokens.share(self.text.peer_at_stage(self.rank, 0)) if self.rank in self.text else None
        wanted = {at: tokens if at == 0 else replace(tokens, layout=self.text.stage(at)) for at in self._entered}
        return _Reading(share, wanted)

    @cached_property
    def _entered(self) -> list[int]:
        """The pipeline coordinates of the text module that rows enter."""
        return sorted({edge.target_coordinate(self.text) for edge in self.edges})

    def _plan_call(self, name: str, packs: tuple[Packs, ...]) -> _Call:
        """A call that encodes some micro-batches. Pieces are numbered over all of them in turn, and so are rows."""
        shape, layout = self.encoders[name], self.layouts[name]
        each = [self._sizes(name, of_one) for of_one in packs]
        sizes = tuple(size for of_one in each for size in of_one)
        costs = [shape.cost(size) for size in sizes]
        assigned = assign(costs, layout.dp) if self.balance == "replica" else assign_in_order(len(costs), layout.dp)
        first = EncoderShards(shape, layout.stage(0), self.sharded[name], sizes, tuple(map(tuple, assigned)))
        ends = np.cumsum([0, *(sum(map(shape.rows, of_one)) for of_one in each)]).tolist()
        edges = [edge for edge in self.edges if edge.source == name and self._takes_part(edge)]
        stages = {at: replace(first, layout=layout.stage(at)) for at in {e.source_coordinate(layout) for e in edges}}
        held = {at: shards.ownership().cut(ends) for at, shards in stages.items()}
        boundaries = []
        for number, of_one in enumerate(packs):
            sources = {edge: held[edge.source_coordinate(layout)][number] for edge in edges if each[number]}
            boundaries.append({edge: self._boundary(edge, rows, of_one) for edge, rows in sources.items()})
        share = first.share(layout.peer_at_stage(self.rank, 0)) if self.rank in layout else None
        return _Call(first, share, tuple(loads_of(costs, assigned)), tuple(boundaries))

    def _takes_part(self, edge: Edge) -> bool:
        """Whether this rank is on a side of the edge."""
        return self.rank in edge.source_ranks(self.layouts[edge.source]) + edge.target_ranks(self.text)

    def _boundary(self, edge: Edge, held: Ownership, packs: Packs) -> RankPlan:
        """How the rows of a micro-batch cross, of which the encoder's ranks hold `held`."""
        needed = self._read(packs).wanted[edge.target_coordinate(self.text)].ownership(edge.source)
        return plan_boundary(held, needed, self.row_bytes * len(self.edges[edge])).rank(self.rank)

    def _plan_patches(self, name: str, shards: EncoderShards, turn: int) -> PatchPlan:
        replica = shards.layout.replica_of(self.rank)
        unit_bytes = 4 * self.encoders[name].unit_width
        patches = plan_boundary(shards.decoded(replica, turn), shards.replica_ownership(replica), unit_bytes)
        return PatchPlan(
            shards.decodes(self.rank, turn), patches.rank(self.rank, backward=False), shards.share(self.rank).padding
        )


def require_rows_for_places(
    replica: int, lengths: Sequence[int], pieces: Pieces, rows_of: Callable[[Size], int]
) -> None:
    """Check that each sample's items have as many rows as the sample has places for them, and that places ascend.
    `lengths`: tokens of the samples.

    Raises:
        UserError: naming the replica, the first sample that is wrong, and both numbers.
    """
    places, ends = pieces.positions, np.cumsum(lengths)
    where = f"pack of text replica {replica}"
    if len(places) and (places[0] < 0 or places[-1] >= sum(lengths) or np.any(np.diff(places) <= 0)):
        raise UserError.at(
            where,
            found="image tokens out of order, twice in one place, or outside the samples",
            expected=f"ascending positions below {sum(lengths)}",
            because="each row takes the place of one image token",
            fix="make sizes and image positions from the same samples",
        )
    rows = [rows_of(size) for size in pieces.sizes]
    of_piece = np.repeat(np.arange(len(lengths)), pieces.counts)
    expected = np.bincount(of_piece, weights=rows, minlength=len(lengths)).astype(int)
    found = np.bincount(np.searchsorted(ends, places, side="right"), minlength=len(lengths))
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        sample = int(wrong[0])
        raise UserError.at(
            f"{where}, sample {sample}",
            found=f"{found[sample]} image tokens",
            expected=f"{expected[sample]}, one for each row of its {pieces.counts[sample]} images",
            because="each row takes the place of one image token",
            fix="make sizes and image positions from the same samples",
        )
