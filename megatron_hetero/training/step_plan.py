"""What each rank decodes, encodes and reads in a micro-batch, from integers that all ranks know. Pure.

Words of this file: a *pack* is the micro-batch of one replica of the text module. Images are numbered over the packs
of all replicas in turn; so are the rows, image by image in raster order of their units.

All of it follows from the shapes of the packs, so that micro-batches of one shape are planned once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from megatron_hetero.boundary.plan import RankPlan, plan_boundary
from megatron_hetero.errors import UserError
from megatron_hetero.layout import Layout
from megatron_hetero.models.balance import deal, deal_in_order, loads_of
from megatron_hetero.models.qwen2_5_vl.geometry import Grid
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.qwen2_5_vl.vision import encoding_cost
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

    `lengths`: tokens of each sample. `grids`: of its images. `image_positions`: the bytes of int64 [rows of the pack],
    where rows go in the pack.
    """

    lengths: tuple[int, ...]
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
class VisionPlan:
    """The vision side of a micro-batch, as one rank sees it.

    `decodes`: numbers of the images that this rank decodes. `pixels`: how the units of their patches reach the ranks of
    its replica that embed them (the forward direction). `share`: what this rank encodes. `boundary`: how rows reach the
    text. `loads`: predicted forward flops of each replica.
    """

    decodes: tuple[int, ...]
    pixels: RankPlan
    share: EncoderShare
    boundary: RankPlan
    loads: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """Everything that ranks agree on about one micro-batch, as one rank sees it.

    `vision` is None where no pack of the micro-batch has an image: then nobody encodes and nothing crosses.
    """

    vision: VisionPlan | None
    text: TokenShare


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
        self._plan_cached = lru_cache(maxsize=64)(self._plan)

    def plan(self, packs: Sequence[PackShape], turn: int = 0) -> MicroBatchPlan:
        """Plan one micro-batch. `packs`: one for each replica of the text module. `turn`: number of the micro-batch.

        Raises:
            UserError: a pack has more or fewer places for rows than its images have rows.
        """
        return self._plan_cached(tuple(packs), turn % (self.vision.size // self.vision.dp))

    def _plan(self, packs: tuple[PackShape, ...], turn: int) -> MicroBatchPlan:
        for replica, pack in enumerate(packs):
            require_rows_for_places(replica, pack, self.shape.unit)
        tokens = TokenShards(
            self.text, self.sharded["text"], tuple(p.lengths for p in packs), tuple(p.positions for p in packs)
        )
        grids = tuple(grid for pack in packs for grid in pack.grids)
        return MicroBatchPlan(self._plan_vision(grids, tokens, turn) if grids else None, tokens.share(self.rank))

    def _plan_vision(self, grids: tuple[Grid, ...], tokens: TokenShards, turn: int) -> VisionPlan:
        costs = [encoding_cost(grid, self.shape) for grid in grids]
        replicas = self.vision.dp
        dealt = deal(costs, replicas) if self.balance == "replica" else deal_in_order(len(costs), replicas)
        shards = EncoderShards(self.shape, self.vision, self.sharded["vision"], grids, tuple(map(tuple, dealt)))
        replica = self.vision.replica_of(self.rank)
        embedded = shards.replica_ownership(replica)
        patches = plan_boundary(
            shards.decoded(replica, turn), embedded, 4 * self.shape.unit * self.shape.patch_elements
        )
        return VisionPlan(
            decodes=shards.decodes(self.rank, turn),
            pixels=patches.rank(self.rank),
            share=shards.share(self.rank),
            boundary=plan_boundary(shards.ownership(), tokens.ownership(), self.row_bytes).rank(self.rank),
            loads=tuple(loads_of(costs, dealt)),
        )


def require_rows_for_places(replica: int, pack: PackShape, unit: int) -> None:
    """Check that a pack's images have as many rows as the pack has places for them. `unit`: patches of a row.

    Raises:
        UserError: naming the replica and the pack's samples with their numbers of places.
    """
    rows = sum(frames * height * width // unit for frames, height, width in pack.grids)
    places = pack.positions
    if rows == len(places) and (not rows or 0 <= places.min() <= places.max() < sum(pack.lengths)):
        return
    of_sample = np.bincount(np.searchsorted(np.cumsum(pack.lengths), places, side="right"), minlength=len(pack.lengths))
    listed = ", ".join(f"sample {i}: {n}" for i, n in enumerate(of_sample.tolist()))
    raise UserError.at(
        f"pack of text replica {replica}",
        found=f"{len(places)} image tokens ({listed}; tokens {pack.lengths})",
        expected=f"{rows} inside its samples, one for each row of its {len(pack.grids)} images",
        because="each row takes the place of one image token",
        fix="make grids and image positions from the same samples",
    )
