"""What each rank decodes, encodes and reads in a micro-batch, from integers that all ranks know. Pure.

Words of this file: a *pack* is the micro-batch of one replica of the text module. Images are numbered over the packs
of all replicas in turn; so are the rows, image by image in raster order of their units.

All of it follows from the shapes of the packs, so that micro-batches of one shape are planned once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from megatron_hetero.boundary.plan import RankPlan, plan_boundary
from megatron_hetero.errors import UserError
from megatron_hetero.layout import Layout
from megatron_hetero.models.balance import deal, deal_in_order, loads_of
from megatron_hetero.models.qwen2_5_vl.cost import encoding_cost
from megatron_hetero.models.qwen2_5_vl.geometry import Grid
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.training.encoder_shards import EncoderShards, EncoderShare
from megatron_hetero.training.token_shards import TokenShards, TokenShare

Balance = Literal["off", "replica"]
"""How images are dealt to the encoder's replicas: in order, or so that predicted work is even."""


@dataclass(frozen=True)
class ImageSource:
    """Where an image comes from: sample number of the stream of samples, and its place among that sample's images."""

    sample: int
    place: int


@dataclass(frozen=True)
class PackShape:
    """What decides how a pack is cut. Hashable.

    `lengths`: tokens of each sample; `images`: images of each sample. `grids`: of all images. `image_positions`: the
    bytes of int64 [rows of the pack], where rows go in the pack.
    """

    lengths: tuple[int, ...]
    images: tuple[int, ...]
    grids: tuple[Grid, ...]
    image_positions: bytes

    @property
    def positions(self) -> np.ndarray:
        """Where rows go in the pack, int64 [rows]."""
        return np.frombuffer(self.image_positions, np.int64)


@dataclass(frozen=True)
class PackMetadata:
    """What other ranks need to know of a pack: its shape, where its images come from, and the number of its supervised
    tokens.
    """

    shape: PackShape
    sources: tuple[ImageSource, ...]
    supervised: int

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.shape.lengths)


@dataclass(frozen=True, eq=False)
class PixelPlan:
    """The pixels that one rank of the encoder's first stage decodes and embeds.

    `decodes`: numbers of the images that this rank decodes. `exchange`: how the units of their patches reach the ranks
    of its replica that embed them (the forward direction). `padding`: patches of zeros after those that it embeds.
    """

    decodes: tuple[int, ...]
    exchange: RankPlan
    padding: int


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """Everything that ranks agree on about one micro-batch, as one rank sees it.

    `pixels`, `encoder` and `text` are what this rank decodes, encodes and reads: None where it is not of the encoder's
    first stage, of the encoder, or of the text module. `boundary`: how rows reach the text, None where this rank takes
    no part. `loads`: predicted forward flops of each encoder replica.

    Where no pack of the micro-batch has an image, there is nothing but `text`: nobody encodes and nothing crosses.
    """

    text: TokenShare | None
    pixels: PixelPlan | None = None
    encoder: EncoderShare | None = None
    boundary: RankPlan | None = None
    loads: tuple[float, ...] = ()


class StepPlanner:
    """Plans micro-batches for `rank`.

    Args:
        shape: of the vision encoder.
        layouts: of the modules "vision" and "text".
        sequence_parallel: for both, whether activations are sharded over tp.
        row_bytes: bytes of a row on the wire.
        balance: how images are dealt to the encoder's replicas.
    """

    def __init__(
        self,
        shape: VisionShape,
        layouts: Mapping[str, Layout],
        sequence_parallel: Mapping[str, bool],
        rank: int,
        row_bytes: int,
        balance: Balance = "replica",
    ):
        self.shape = shape
        self.vision, self.text = layouts["vision"], layouts["text"]
        self.sharded = dict(sequence_parallel)
        self.rank = rank
        self.row_bytes = row_bytes
        self.balance: Balance = balance
        self._shared = lru_cache(maxsize=64)(self._plan)
        self._own = lru_cache(maxsize=64)(self._plan_pixels)

    def plan(self, packs: Sequence[PackShape], turn: int = 0) -> MicroBatchPlan:
        """Plan one micro-batch. `packs`: one for each replica of the text module. `turn`: number of the micro-batch.

        Raises:
            UserError: a pack has more or fewer places for rows than its images have rows.
        """
        shapes = tuple(packs)
        plan, first = self._shared(shapes)
        if first is None or self.rank not in first.layout:
            return plan
        return replace(plan, pixels=self._own(first, turn % (first.layout.size // first.layout.dp)))

    def _plan(self, packs: tuple[PackShape, ...]) -> tuple[MicroBatchPlan, EncoderShards | None]:
        """Everything but pixels, which other ranks decode in each turn; and the shards of the encoder's first stage."""
        for replica, pack in enumerate(packs):
            require_rows_for_places(replica, pack, self.shape.unit)
        tokens = TokenShards(
            self.text.stage(0), self.sharded["text"], tuple(p.lengths for p in packs), tuple(p.positions for p in packs)
        )
        share = tokens.share(self.text.beside(self.rank, 0)) if self.rank in self.text else None
        grids = tuple(grid for pack in packs for grid in pack.grids)
        if not grids:
            return MicroBatchPlan(share), None
        costs = [encoding_cost(grid, self.shape) for grid in grids]
        dealt = deal(costs, self.vision.dp) if self.balance == "replica" else deal_in_order(len(costs), self.vision.dp)
        first = EncoderShards(self.shape, self.vision.stage(0), self.sharded["vision"], grids, tuple(map(tuple, dealt)))
        last = first if self.vision.pp == 1 else replace(first, layout=self.vision.stage(self.vision.pp - 1))
        boundary = plan_boundary(last.ownership(), tokens.ownership(), self.row_bytes)
        plan = MicroBatchPlan(
            text=share,
            encoder=first.share(self.vision.beside(self.rank, 0)) if self.rank in self.vision else None,
            boundary=boundary.rank(self.rank) if self.rank in boundary.ranks else None,
            loads=tuple(loads_of(costs, dealt)),
        )
        return plan, first

    def _plan_pixels(self, shards: EncoderShards, turn: int) -> PixelPlan:
        replica = shards.layout.replica_of(self.rank)
        unit_bytes = 4 * self.shape.unit * self.shape.patch_elements
        patches = plan_boundary(shards.decoded(replica, turn), shards.replica_ownership(replica), unit_bytes)
        return PixelPlan(
            shards.decodes(self.rank, turn), patches.rank(self.rank, backward=False), shards.share(self.rank).padding
        )


def require_rows_for_places(replica: int, pack: PackShape, unit: int) -> None:
    """Check that each sample's images have as many rows as the sample has places for them, and that places ascend.
    `unit`: patches of a row.

    Raises:
        UserError: naming the replica, the first sample that is wrong, and both numbers.
    """
    places, ends = pack.positions, np.cumsum(pack.lengths)
    where = f"pack of text replica {replica}"
    if len(places) and (places[0] < 0 or places[-1] >= sum(pack.lengths) or np.any(np.diff(places) <= 0)):
        raise UserError.at(
            where,
            found="image tokens out of order, twice in one place, or outside the samples",
            expected=f"ascending positions below {sum(pack.lengths)}",
            because="each row takes the place of one image token",
            fix="make grids and image positions from the same samples",
        )
    rows = [frames * height * width // unit for frames, height, width in pack.grids]
    of_image = np.repeat(np.arange(len(pack.lengths)), pack.images)
    expected = np.bincount(of_image, weights=rows, minlength=len(pack.lengths)).astype(int)
    found = np.bincount(np.searchsorted(ends, places, side="right"), minlength=len(pack.lengths))
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        sample = int(wrong[0])
        raise UserError.at(
            f"{where}, sample {sample}",
            found=f"{found[sample]} image tokens",
            expected=f"{expected[sample]}, one for each row of its {pack.images[sample]} images",
            because="each row takes the place of one image token",
            fix="make grids and image positions from the same samples",
        )
