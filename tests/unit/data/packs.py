"""Random packs of images and text as integers, and the rows of ranks that share them; values of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from megatron_hetero.boundary.plan import RankPlan
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.partition import CallRuns, EncoderCall, StepPartitioner
from megatron_hetero.data.token_shards import SequenceShard
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import ROWS, TEXT
from megatron_hetero.models.families.qwen2_5_vl.shapes import VisionShape
from megatron_hetero.models.items.pictures import ImageSize

SHAPE = VisionShape(
    layers=2, hidden=16, heads=8, ffn=20, channels=3, patch=14, temporal_patch=2, merge=2, window=4,
    full_layers=frozenset({1}), out_hidden=24, rope_theta=10000.0,
)  # fmt: skip
EDGES = {Edge("vision", TEXT): (ROWS,)}
BATCHES = ("even", "ragged", "some without images", "fewer images than replicas", "no rows", "no tokens")
Sharded = Mapping[str, bool]
"""For "vision" and "text", whether activations are sharded over tp."""


def random_packs(batch: str, text: Layout, seed: int) -> list[PackMetadata]:
    """A micro-batch: one pack per replica of `text`. `batch`: one of `BATCHES`."""
    rng = np.random.default_rng([seed, BATCHES.index(batch)])
    return [_pack(_samples(batch, replica, text.dp, rng), rng, batch) for replica in range(text.dp)]


def _samples(batch: str, replica: int, replicas: int, rng: np.random.Generator) -> list[list[ImageSize]]:
    """The images of each sample of a pack."""
    if batch == "no tokens":
        return []
    if batch == "no rows" or (batch == "some without images" and replica % 2 == 0 and replicas > 1):
        return [[] for _ in range(rng.integers(1, 4))]
    if batch == "even":
        return [[ImageSize(1, 16, 16)]]
    if batch == "fewer images than replicas":
        return [[ImageSize(1, 2, 2)], []] if replica == 0 else [[]]
    sides = rng.integers(1, 11, size=(rng.integers(1, 5), 2))
    grids: list[ImageSize] = [ImageSize(1, 2 * int(h), 2 * int(w)) for h, w in sides]
    cut = int(rng.integers(0, len(grids) + 1))
    return [grids[:cut], [], grids[cut:]]


def _pack(samples: list[list[ImageSize]], rng: np.random.Generator, batch: str) -> PackMetadata:
    """Images between stretches of text (none in an "even" batch), many of them of one token."""
    text = (lambda: 0) if batch == "even" else (lambda: int(rng.choice([1, 1, 2, 7])))
    positions, lengths, at = [np.zeros(0, np.int64)], [], 0
    for grids in samples:
        start = at
        for grid in grids:
            at += text()
            rows = int(np.prod(grid)) // SHAPE.unit
            positions.append(np.arange(at, at + rows))
            at += rows
        at += text()
        lengths.append(at - start)
    joined = np.concatenate(positions).astype(np.int64)
    grids = tuple(grid for grids in samples for grid in grids)
    return PackMetadata(tuple(lengths), (grids,), (joined.tobytes(),))


def partitioner(
    layouts: Mapping[str, Layout],
    sharded: Sharded,
    rank: int,
    balance: Literal["off", "replica"] = "replica",
    runs: CallRuns | None = None,
) -> StepPartitioner:
    """The partitioner of `rank` for rows of 24 bytes."""
    return StepPartitioner({"vision": SHAPE}, layouts, sharded, rank, 24, EDGES, balance, runs)


@dataclass(frozen=True, eq=False)
class Planned:
    """What one rank does in a micro-batch: the shard of the text module, the call of vision that begins with it, and
    the rows that cross.
    """

    text: SequenceShard | None
    vision: EncoderCall | None
    rows: Mapping[Edge, RankPlan]


def step_of(partitioner: StepPartitioner, packs: Sequence[Sequence[PackMetadata]]) -> list[Planned]:
    """What the rank does in each micro-batch of a step."""
    rounds = [tuple(each) for each in packs]
    calls = partitioner.encoder_calls(rounds)
    first = {call.micro_batches.start: call for call in calls}
    rows = {m: plans for call in calls for m, plans in zip(call.micro_batches, call.rows, strict=True)}
    return [Planned(partitioner.text_shard(each), first.get(m), rows.get(m, {})) for m, each in enumerate(rounds)]


def planned(partitioner: StepPartitioner, packs: Sequence[PackMetadata], turn: int = 0) -> Planned:
    """What the rank does in micro-batch number `turn` of a step of equal ones."""
    return step_of(partitioner, [packs] * (turn + 1))[turn]


def first_rows(packs: list[PackMetadata]) -> list[int]:
    """Where the rows of each pack begin, and the end."""
    return np.cumsum([0, *(len(pack.positions(0)) for pack in packs)]).tolist()


def images_of(packs: list[PackMetadata]) -> list[ImageSize]:
    """The sizes of all images, in turn."""
    sizes: list[Any] = [size for pack in packs for size in pack.sizes[0]]
    return sizes


def first_rows_of_images(packs: list[PackMetadata]) -> list[int]:
    """Where the rows of each image begin, and the end."""
    return np.cumsum([0, *(SHAPE.rows(image) for image in images_of(packs))]).tolist()


def decoded_units(plan: Planned, packs: list[PackMetadata]) -> np.ndarray:
    """The global rows of the units that a rank decodes, in order: image by image."""
    first = first_rows_of_images(packs)
    images = plan.vision.decodes if plan.vision else ()
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(first[i], first[i + 1]) for i in images)])


def needed_rows(
    shard: SequenceShard, packs: list[PackMetadata], layout: Layout, sharded: bool, rank: int
) -> np.ndarray:
    """The global rows that belong at `rows_at`, from the tokens that the rank embeds."""
    at = layout.coordinate(rank)
    rows = range(*first_rows(packs)[at.dp : at.dp + 2])
    row_at = dict(zip(packs[at.dp].positions(0).tolist(), rows, strict=True))
    start = shard.local * at.tp if sharded else 0
    embedded = shard.positions[start : start + shard.local].tolist()
    found = {place: row_at[token] for place, token in enumerate(embedded) if token in row_at}
    assert sorted(shard.rows_at["vision"].tolist()) == list(found), "rows are put elsewhere than at image tokens"
    return np.array([found[place] for place in shard.rows_at["vision"].tolist()], np.int64)


def by_rank(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
