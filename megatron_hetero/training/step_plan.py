"""What each rank encodes and reads in a micro-batch, from integers that all ranks know. Pure.

Words of this file: a *pack* is the micro-batch of one replica of the text module. Images are numbered over the packs
of all replicas in turn; so are the rows, image by image in raster order of their units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import BoundaryPlan, plan_boundary
from megatron_hetero.layout import Layout
from megatron_hetero.models.qwen2_5_vl.geometry import EncoderPlan, Grid, deal_images, image_geometry, plan_encoder
from megatron_hetero.models.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.qwen2_5_vl.vision import encoding_cost, padded_patches


@dataclass(frozen=True)
class ImageSource:
    """Where an image comes from: sample number of the stream of samples, and its place among that sample's images."""

    sample: int
    place: int


@dataclass(frozen=True, eq=False)
class PackMetadata:
    """What other ranks need to know of a pack: its padded length, and per image the grid, source, and positions of its
    rows.

    `positions`: int64 [rows of the pack], where rows go in the pack. `supervised`: number of supervised tokens.
    `length`: tokens without padding.
    """

    length: int
    padded_length: int
    supervised: int
    grids: tuple[Grid, ...]
    sources: tuple[ImageSource, ...]
    positions: np.ndarray


@dataclass(frozen=True, eq=False)
class PatchPart:
    """Patches of one image that a rank embeds: `patches` (int64) index the image's pixel rows."""

    source: ImageSource
    grid: Grid
    patches: np.ndarray


@dataclass(frozen=True, eq=False)
class EncoderShare:
    """What one rank encodes in one micro-batch.

    `parts`: its images' patches, in order; `padding`: patches of zeros after them. `positions`: int64 [2, n] for the n
    real patches of the rank's shard (that its tp group shares). `windows`: lengths of the shard's windows. `sequences`,
    `shard_lengths`: of the whole replica. All lengths in patches.
    """

    parts: tuple[PatchPart, ...]
    padding: int
    positions: np.ndarray
    windows: tuple[int, ...]
    sequences: tuple[int, ...]
    shard_lengths: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MicroBatchPlan:
    """Everything that ranks agree on about one micro-batch, as one rank sees it.

    `encoder` is None where no pack of the micro-batch has an image: then nobody encodes and nothing crosses.
    `rows_at`: int64, where the rows that reach this rank go in its shard of the embedding, in their order of arrival.
    """

    encoder: EncoderShare | None
    boundary: BoundaryPlan | None
    rows_at: np.ndarray


def plan_micro_batch(
    packs: Sequence[PackMetadata],
    shape: VisionShape,
    layouts: Mapping[str, Layout],
    sequence_parallel: Mapping[str, bool],
    rank: int,
    world_size: int,
) -> MicroBatchPlan:
    """Deal the images of `packs` (one per replica of the text module) to encoders, and plan the boundary, for
    `rank`.
    """
    grids = [grid for pack in packs for grid in pack.grids]
    if not grids:
        return MicroBatchPlan(None, None, np.zeros(0, np.int64))
    sources = [source for pack in packs for source in pack.sources]
    vision, text = layouts["vision"], layouts["text"]
    dealt = deal_images([encoding_cost(grid, shape) for grid in grids], vision.dp)
    members = vision.sp * vision.cp
    plans = [plan_encoder(images, [grids[i] for i in images], members, shape.merge, shape.window) for images in dealt]
    shards = EncoderShards(tuple(plans), tuple(grids), shape, vision, sequence_parallel["vision"])
    source, destination = shards.ownership(), text_ownership(packs, text, sequence_parallel["text"])
    return MicroBatchPlan(
        encoder=shards.share(rank, sources),
        boundary=plan_boundary(source, destination, rank, world_size),
        rows_at=_rows_at(packs, text, sequence_parallel["text"], rank),
    )


# ---------------------------------------------------------------------------------------------------------
# Source side
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class EncoderShards:
    """The encoder plans of all vision replicas, and what follows from them for each rank."""

    plans: tuple[EncoderPlan, ...]
    grids: tuple[Grid, ...]
    shape: VisionShape
    layout: Layout
    sequence_parallel: bool

    def _shard_units(self, replica: int, member: int) -> tuple[np.ndarray, np.ndarray]:
        """(image, raster index of the unit) for each unit of a shard, in the order in which it is encoded."""
        images, units = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for part in self.plans[replica].slices[member]:
            chosen = self._geometry(part.image).units[part.start : part.stop]
            images.append(np.full(len(chosen), part.image))
            units.append(chosen)
        return np.concatenate(images), np.concatenate(units)

    def _geometry(self, image: int):
        return image_geometry(self.grids[image], self.shape.merge, self.shape.window)

    def _place(self, rank: int) -> tuple[int, int, int]:
        """Replica, context-parallel member and tp index of a rank. sp varies faster than cp."""
        at = self.layout.coordinate(rank)
        return at.dp, at.cp * self.layout.sp + at.sp, at.tp

    def _own_units(self, rank: int) -> tuple[slice, int]:
        """The units of its shard that a rank embeds and holds the rows of, and how many more pad them."""
        replica, member, tp_rank = self._place(rank)
        sharers, place = (self.layout.tp, tp_rank) if self.sequence_parallel else (1, 0)
        patches, unit = self.plans[replica].lengths[member], self.shape.unit
        real, share = patches // unit, padded_patches(patches, unit, sharers) // unit // sharers
        start, stop = min(real, share * place), min(real, share * (place + 1))
        return slice(start, stop), share - (stop - start)

    def share(self, rank: int, sources: Sequence[ImageSource]) -> EncoderShare:
        """What `rank` encodes."""
        replica, member, _ = self._place(rank)
        plan, unit = self.plans[replica], self.shape.unit
        images, units = self._shard_units(replica, member)
        mine, padding = self._own_units(rank)
        positions = [np.zeros((2, 0), np.int64)]
        for part in plan.slices[member]:
            positions.append(self._geometry(part.image).positions[:, part.start * unit : part.stop * unit])
        return EncoderShare(
            parts=tuple(self._parts(images[mine], units[mine], sources)),
            padding=padding * unit,
            positions=np.concatenate(positions, axis=1),
            windows=plan.windows[member],
            sequences=plan.sequences,
            shard_lengths=plan.lengths,
        )

    def _parts(self, images: np.ndarray, units: np.ndarray, sources: Sequence[ImageSource]) -> list[PatchPart]:
        unit = self.shape.unit
        parts = []
        for image in dict.fromkeys(images.tolist()):
            patches = units[images == image][:, None] * unit + np.arange(unit)
            parts.append(PatchPart(sources[image], self.grids[image], patches.ravel()))
        return parts

    def ownership(self) -> Ownership:
        """Which rows each rank holds once it has encoded. Ranks of a tp group hold the same without sequence-parallel
        activations.
        """
        first_row = np.cumsum([0, *(int(np.prod(grid)) // self.shape.unit for grid in self.grids)])
        holders = {}
        replicated = not self.sequence_parallel
        for ranks in self.layout.groups(*(("tp",) if replicated else ())):
            replica, member, _ = self._place(ranks[0])
            images, units = self._shard_units(replica, member)
            mine, _ = self._own_units(ranks[0])
            holders[ranks] = (first_row[images] + units)[mine]
        return Ownership.of(holders)


# ---------------------------------------------------------------------------------------------------------
# Destination side
# ---------------------------------------------------------------------------------------------------------


def text_ownership(packs: Sequence[PackMetadata], layout: Layout, sequence_parallel: bool) -> Ownership:
    """Which rows each rank of the text module needs: those whose positions lie in its shard of its replica's pack."""
    first_row = np.cumsum([0, *(len(pack.positions) for pack in packs)])
    replicated = not sequence_parallel
    holders = {}
    for ranks in layout.groups(*(("tp",) if replicated else ())):
        at = layout.coordinate(ranks[0])
        start, stop = _shard(packs[at.dp], layout.tp, at.tp, sequence_parallel)
        positions = packs[at.dp].positions
        holders[ranks] = first_row[at.dp] + np.flatnonzero((positions >= start) & (positions < stop))
    return Ownership.of(holders)


def _shard(pack: PackMetadata, tp: int, tp_rank: int, sequence_parallel: bool) -> tuple[int, int]:
    if not sequence_parallel:
        return 0, pack.padded_length
    length = pack.padded_length // tp
    return length * tp_rank, length * (tp_rank + 1)


def _rows_at(packs: Sequence[PackMetadata], layout: Layout, sequence_parallel: bool, rank: int) -> np.ndarray:
    at = layout.coordinate(rank)
    start, stop = _shard(packs[at.dp], layout.tp, at.tp, sequence_parallel)
    positions = packs[at.dp].positions
    return positions[(positions >= start) & (positions < stop)] - start
