"""What each rank decodes, encodes and reads in a micro-batch, from integers that all ranks know. Pure.

Words of this file: a *pack* is the micro-batch of one replica of the text module. Images are numbered over the packs
of all replicas in turn; so are the rows, image by image in raster order of their units.

All of it follows from the shapes of the packs, so that micro-batches of one shape are planned once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from megatron_hetero.boundary.plan import RankPlan, plan_boundary
from megatron_hetero.data.items import Size
from megatron_hetero.errors import UserError
from megatron_hetero.layout.edge import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.names import ROWS, TEXT
from megatron_hetero.sharding.balance import assign, assign_in_order, loads_of
from megatron_hetero.sharding.encoder_shards import EncoderShards, EncoderShare
from megatron_hetero.sharding.items import ItemShape
from megatron_hetero.sharding.token_shards import TokenShards, TokenShare

Balance = Literal["off", "replica"]
"""How images are assigned to the encoder's replicas: in order, or so that predicted work is even."""


@dataclass(frozen=True)
class ImageSource:
    """Where an image comes from: sample number of the stream of samples, and its place among that sample's images."""

    sample: int
    place: int


@dataclass(frozen=True)
class Images:
    """The images of a pack that are for one encoder. Hashable.

    `counts`: images of each sample; `sizes`: of all images. `places`: the bytes of int64 [rows], where rows go in the
    pack.
    """

    counts: tuple[int, ...]
    sizes: tuple[Size, ...]
    places: bytes

    @property
    def positions(self) -> np.ndarray:
        """Where rows go in the pack, int64 [rows]."""
        return np.frombuffer(self.places, np.int64)


@dataclass(frozen=True)
class PackShape:
    """What decides how a pack is cut: the tokens of each sample, and the images of each encoder, in the order of the
    encoders. Hashable.
    """

    lengths: tuple[int, ...]
    images: tuple[Images, ...]


@dataclass(frozen=True)
class PackMetadata:
    """What other ranks need to know of a pack: its shape, where the images of each encoder come from, and the number of
    its supervised tokens.
    """

    shape: PackShape
    sources: tuple[tuple[ImageSource, ...], ...]
    supervised: int

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.shape.lengths)


@dataclass(frozen=True, eq=False)
class PixelPlan:
    """The pixels that one rank of an encoder's first stage decodes and embeds.

    `decodes`: numbers of the images that this rank decodes. `exchange`: how the units of their patches reach the ranks
    of its replica that embed them (the forward direction). `padding`: patches of zeros after those that it embeds.
    """

    decodes: tuple[int, ...]
    exchange: RankPlan
    padding: int


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """Everything that ranks agree on about one micro-batch, as one rank sees it.

    `text`: what this rank reads, None outside the text module. By encoder, `pixels` and `encoders` are what this rank
    decodes and encodes, where it is of the encoder's first stage and of the encoder; `loads` the predicted forward
    flops of each replica. `boundaries`: by edge, how rows reach the text, where this rank takes part.

    An encoder for which no pack of the micro-batch has an image is in none of them: nobody encodes, nothing crosses.
    """

    text: TokenShare | None
    pixels: Mapping[str, PixelPlan] = field(default_factory=dict)
    encoders: Mapping[str, EncoderShare] = field(default_factory=dict)
    boundaries: Mapping[Edge, RankPlan] = field(default_factory=dict)
    loads: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class StepPlanner:
    """Plans micro-batches for `rank`.

    Args:
        encoders: by name.
        layouts: of the encoders and of "text".
        sequence_parallel: for all of them, whether activations are sharded over tp.
        row_bytes: bytes of a row of one output on the wire.
        balance: how images are assigned to an encoder's replicas.
        edges: along which the rows of encoders reach the text module, with the outputs that cross there; None: the rows
            of each from its last stage to the first.
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
    ):
        self.encoders, self.layouts = dict(encoders), dict(layouts)
        self.text = layouts[TEXT]
        self.sharded = dict(sequence_parallel)
        self.rank = rank
        self.row_bytes = row_bytes
        self.balance: Balance = balance
        self.edges = dict(edges or {Edge(name, TEXT): (ROWS,) for name in encoders})
        self._shared = lru_cache(maxsize=64)(self._plan)
        self._own = lru_cache(maxsize=64)(self._plan_pixels)

    def plan(self, packs: Sequence[PackShape], turn: int = 0) -> MicroBatchPlan:
        """Plan one micro-batch. `packs`: one for each replica of the text module. `turn`: number of the micro-batch.

        Raises:
            UserError: a pack has more or fewer places for rows than its images have rows.
        """
        plan, first_stages = self._shared(tuple(packs))
        pixels = {
            name: self._own(name, shards, turn % (shards.layout.size // shards.layout.dp))
            for name, shards in first_stages.items()
            if self.rank in shards.layout
        }
        return replace(plan, pixels=pixels) if pixels else plan

    def _plan(self, packs: tuple[PackShape, ...]) -> tuple[MicroBatchPlan, dict[str, EncoderShards]]:
        """Everything but pixels, which other ranks decode in each turn; and the shards of the encoders' first stages,
        of those that have images.
        """
        for replica, pack in enumerate(packs):
            for shape, images in zip(self.encoders.values(), pack.images, strict=True):
                require_rows_for_places(replica, pack.lengths, images, shape.rows)
        places = {name: tuple(p.images[i].positions for p in packs) for i, name in enumerate(self.encoders)}
        lengths = tuple(p.lengths for p in packs)
        tokens = TokenShards(self.text.stage(0), self.sharded[TEXT], lengths, places)
        wanted = {at: tokens if at == 0 else replace(tokens, layout=self.text.stage(at)) for at in self._entered}
        plan = MicroBatchPlan(tokens.share(self.text.peer_at_stage(self.rank, 0)) if self.rank in self.text else None)
        first_stages = {}
        for i, name in enumerate(self.encoders):
            sizes = tuple(size for pack in packs for size in pack.images[i].sizes)
            if sizes:
                encoding, first_stages[name] = self._plan_encoder(name, sizes, wanted)
                plan = _joined(plan, encoding)
        return plan, first_stages

    @cached_property
    def _entered(self) -> list[int]:
        """The pipeline coordinates of the text module that rows enter."""
        return sorted({edge.target_coordinate(self.text) for edge in self.edges})

    def _plan_encoder(
        self, name: str, sizes: tuple[Size, ...], wanted: Mapping[int, TokenShards]
    ) -> tuple[MicroBatchPlan, EncoderShards]:
        """The part of one encoder. `wanted`: what the text module reads, by pipeline coordinate."""
        shape, layout = self.encoders[name], self.layouts[name]
        costs = [shape.cost(size) for size in sizes]
        assigned = assign(costs, layout.dp) if self.balance == "replica" else assign_in_order(len(costs), layout.dp)
        first = EncoderShards(shape, layout.stage(0), self.sharded[name], sizes, tuple(map(tuple, assigned)))
        held, boundaries = {}, {}
        for edge, outputs in self.edges.items():
            ranks = edge.source_ranks(layout) + edge.target_ranks(self.text)
            if edge.source == name and self.rank in ranks:
                if (at := edge.source_coordinate(layout)) not in held:
                    held[at] = (first if at == 0 else replace(first, layout=layout.stage(at))).ownership()
                needed = wanted[edge.target_coordinate(self.text)].ownership(name)
                boundaries[edge] = plan_boundary(held[at], needed, self.row_bytes * len(outputs)).rank(self.rank)
        plan = MicroBatchPlan(
            text=None,
            encoders={name: first.share(layout.peer_at_stage(self.rank, 0))} if self.rank in layout else {},
            boundaries=boundaries,
            loads={name: tuple(loads_of(costs, assigned))},
        )
        return plan, first

    def _plan_pixels(self, name: str, shards: EncoderShards, turn: int) -> PixelPlan:
        replica = shards.layout.replica_of(self.rank)
        unit_bytes = 4 * self.encoders[name].unit_width
        patches = plan_boundary(shards.decoded(replica, turn), shards.replica_ownership(replica), unit_bytes)
        return PixelPlan(
            shards.decodes(self.rank, turn), patches.rank(self.rank, backward=False), shards.share(self.rank).padding
        )


def _joined(plan: MicroBatchPlan, more: MicroBatchPlan) -> MicroBatchPlan:
    """`plan` with what `more` says of an encoder."""
    return replace(
        plan,
        encoders={**plan.encoders, **more.encoders},
        boundaries={**plan.boundaries, **more.boundaries},
        loads={**plan.loads, **more.loads},
    )


def require_rows_for_places(
    replica: int, lengths: Sequence[int], images: Images, rows_of: Callable[[Size], int]
) -> None:
    """Check that each sample's images have as many rows as the sample has places for them, and that places ascend.
    `lengths`: tokens of the samples.

    Raises:
        UserError: naming the replica, the first sample that is wrong, and both numbers.
    """
    places, ends = images.positions, np.cumsum(lengths)
    where = f"pack of text replica {replica}"
    if len(places) and (places[0] < 0 or places[-1] >= sum(lengths) or np.any(np.diff(places) <= 0)):
        raise UserError.at(
            where,
            found="image tokens out of order, twice in one place, or outside the samples",
            expected=f"ascending positions below {sum(lengths)}",
            because="each row takes the place of one image token",
            fix="make sizes and image positions from the same samples",
        )
    rows = [rows_of(size) for size in images.sizes]
    of_image = np.repeat(np.arange(len(lengths)), images.counts)
    expected = np.bincount(of_image, weights=rows, minlength=len(lengths)).astype(int)
    found = np.bincount(np.searchsorted(ends, places, side="right"), minlength=len(lengths))
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        sample = int(wrong[0])
        raise UserError.at(
            f"{where}, sample {sample}",
            found=f"{found[sample]} image tokens",
            expected=f"{expected[sample]}, one for each row of its {images.counts[sample]} images",
            because="each row takes the place of one image token",
            fix="make sizes and image positions from the same samples",
        )
