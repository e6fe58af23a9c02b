"""Interfaces of item types, by which general code reads, splits and distributes items of any kind.

An *item* is shown at one place of a record: a picture, a video, a clip of sound. It consists of *pieces*, which are
read, assigned to replicas and limited in size one by one: a picture is one piece, a video has one for every two frames.
The pieces of all item types of an encoder have the geometry of the encoder (`ItemShape`), so that one call encodes them
together.

A *patch* is embedded as one token of the encoder, a *unit* is the group of patches that become one row.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from megatron_hetero.base.contents import Content

if TYPE_CHECKING:
    from megatron_hetero.config.sections import EstimateConfig

Modality = Literal["image", "video", "audio"]
"""Modality of an item type. The types of one encoder have different modalities."""

Header: TypeAlias = "tuple[int, int]"
"""Two numbers from the header of an item's file, such as width and height."""

Size = Hashable
"""Size of an item or piece, whose meaning depends on the item type, such as rows and columns of patches."""


class Item(NamedTuple):
    """An item of a record.

    `content`: the item's bytes, or the first of `frames`. `where`: name of the record in messages. `frames`: contents
    of the files of an item that consists of several, in order. `given`: names and values of settings in the record.
    `header`: see `ItemReader.header`; None if it has not been read.
    """

    content: Content
    where: str
    frames: tuple[Content, ...] = ()
    given: tuple[tuple[str, Any], ...] = ()
    header: Header | None = None


class Piece(NamedTuple):
    """A piece of an item: its number in the item, and its size."""

    number: int
    size: Size


class RowBlock(NamedTuple):
    """Consecutive rows of an item in the text, between the texts `before` and `after`.

    `places`: int64 [3, rows], positions in time, height and width, relative to the first position of the block.
    `length`: position of the following text, relative to the same position; None: the position after the largest.
    """

    places: np.ndarray
    before: str = ""
    after: str = ""
    length: int | None = None


class ItemTokens(NamedTuple):
    """Tokens of an item in the text, as keys of `Family.tokens`: `start`, then `row` once per row, then `end`."""

    start: str
    row: str
    end: str


class ItemReader(Protocol):
    """Protocol of readers of one type of items for one encoder. Readers have no open files and can be pickled."""

    @property
    def token_id(self) -> int:
        """Id of the token that stands for one row."""
        ...

    def header(self, item: Item) -> Header:
        """Read the numbers that `size` needs from the header of an item's file. Raises `UserError`."""
        ...

    def size(self, item: Item) -> Size:
        """Return the size of an item, from `Item.header` if set, else from its file. Raises `UserError`."""
        ...

    def pieces(self, size: Any) -> tuple[Size, ...]:
        """Return the sizes of the pieces of an item of this size, in the order of their rows."""
        ...

    def blocks(self, size: Any) -> Sequence[RowBlock]:
        """Return the blocks of an item in the text, which together have as many rows as its pieces."""
        ...

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        """Decode the patches of some pieces of an item: float32 [patches, elements]. Raises `UserError`."""
        ...

    def describe(self, item: Item, size: Any) -> str:
        """Return a description of an item as stored and as the encoder takes it. Raises `UserError`."""
        ...


class ItemType(Protocol):
    """Base of item types. The module of a type imports neither torch nor transformers; its methods may."""

    modality: Modality
    """Modality of its items."""
    tokens: ItemTokens
    """The tokens of an item in the text."""
    processor: str
    """Name of the processor of `transformers` that reads its items, for messages."""
    settings: tuple[str, ...] = ()
    """Where folders store the processor's settings: a key of `processor_config.json`, then files of older folders."""

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> ItemReader:
        """Open a reader with the settings of an encoder's folder.

        Args:
            folder: a folder in `transformers` format.
            config: the folder's configuration.
            section: the user's settings for reading items, `data` or an entry of `modules`. A type reads the fields
                that it knows; defaults of missing fields and of None are those of the folder.
            setting: name of the setting with the folder, for messages.
            token_id: the token that stands for one row.

        Raises:
            UserError: the settings are invalid. A folder that does not load may raise any other exception.
        """
        ...

    def chat_entry(self, section: Any, token: str) -> dict[str, str]:
        """Return the entry of a chat message for an item with rows of `token`. `section`: see `open`."""
        return {"type": self.modality}

    def assumed(self, shape: Any, plan: EstimateConfig) -> Size:
        """Return the size of the pieces that section `plan` describes, for an encoder with this shape."""
        ...

    def assumed_pieces(self, plan: EstimateConfig) -> int:
        """Return the number of pieces in the sample that section `plan` describes."""
        return plan.images

    def assumed_items(self, plan: EstimateConfig) -> tuple[str, str]:
        """Return a description of the items in a sample of section `plan`, and the names of their settings."""
        return f"{plan.images} image{'s' * (plan.images != 1)}", "plan.images, plan.image_side"

    def measures(self, shape: Any, size: Any) -> str:
        """Return the size of a piece in words."""
        ...

    def exported(self, folder: Path, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor settings to export for a run with `section` (see `open`); empty to keep the folder's."""
        return {}


class ItemOrder(NamedTuple):
    """The units of one piece in the order in which the encoder processes them.

    `units`: int32 [units], position of each processed unit in the order of rows. `windows`: int32 [windows], number of
    units in each window of local attention.
    """

    units: np.ndarray
    windows: np.ndarray


class ItemShape(Protocol):
    """Protocol of the geometry of an encoder's pieces. Each `size` is the size of a piece."""

    @property
    def unit(self) -> int:
        """Number of patches in a unit."""
        ...

    @property
    def unit_width(self) -> int:
        """Number of input elements in a unit."""
        ...

    @property
    def position_dims(self) -> int:
        """Number of coordinates of a patch."""
        ...

    def rows(self, size: Any) -> int:
        """Return the number of rows of a piece, one per unit."""
        ...

    def order(self, size: Any) -> ItemOrder:
        """Return the order in which the encoder processes the units of a piece."""
        ...

    def positions(self, size: Any, units: np.ndarray) -> np.ndarray:
        """Return the coordinates of the patches in units with these numbers: int64 [position_dims, patches]."""
        ...

    def sequences(self, size: Any) -> tuple[int, ...]:
        """Return the number of patches in each sequence of full attention."""
        ...

    def cost(self, size: Any) -> float:
        """Return the predicted forward FLOPs of encoding a piece."""
        return sum(self.sequences(size)) * self.cost_per_patch(size)

    def cost_per_patch(self, size: Any) -> float:
        """Return the predicted forward FLOPs of one patch, which attends to all patches of its sequence."""
        ...


def padded_patches(patches: int, unit: int, sequence_shards: int) -> int:
    """Return the number of patches in a shard after padding: equal whole units, at least one, for each of
    `sequence_shards` ranks.

    `sequence_shards`: tp with sequence-parallel activations, else 1. An empty shard participates in collectives, and
    Megatron's layers do not accept tensors without elements.
    """
    share = unit * sequence_shards
    return max(1, -(-patches // share)) * share
