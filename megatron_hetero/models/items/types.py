"""Interfaces of item types, by which general code reads, cuts and deals items without looking into a size.

An *item* is what a record shows in one place: a picture, a video, a clip of sound. It consists of *pieces*, each read,
assigned to a replica and limited in size by itself: a picture is one, a video has one for every two frames. All item
types of an encoder have pieces of the encoder's own geometry (`ItemShape`), so that one call takes them together.

A *patch* is what an encoder embeds as one token, a *unit* the patches that become one row.
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
"""Kind of an item type, different for each type of an encoder."""

Header: TypeAlias = "tuple[int, int]"
"""Two figures in the header of an item's file, such as width and height."""

Size = Hashable
"""The size of an item or piece, a value of the type's own, such as rows and columns of patches."""


class Item(NamedTuple):
    """Location of an item, and what is known of it.

    `content`: its bytes, or the first of `frames`. `where`: the record that shows it, for messages. `frames`: the bytes
    of an item that consists of several files, in order. `given`: names and values of further fields of the record.
    `header`: see `ItemReader.header`; None if it has not been read.
    """

    content: Content
    where: str
    frames: tuple[Content, ...] = ()
    given: tuple[tuple[str, Any], ...] = ()
    header: Header | None = None


class Piece(NamedTuple):
    """Piece `number` of an item, and the piece's size."""

    number: int
    size: Size


class RowBlock(NamedTuple):
    """Consecutive rows of an item in the text, between `before` and `after`.

    `places`: int64 [3, rows], positions in time, height and width, from the first position of the block. `length`:
    position of the text after it, from there; None: the one after the largest.
    """

    places: np.ndarray
    before: str = ""
    after: str = ""
    length: int | None = None


class ItemTokens(NamedTuple):
    """Tokens of an item in the text: `start`, a `row` for each of its rows, `end`. Keys of `Family.tokens`."""

    start: str
    row: str
    end: str


class ItemReader(Protocol):
    """Reads items of one type for one encoder. Has no open files and can be pickled."""

    @property
    def token_id(self) -> int:
        """The token that stands for one row."""
        ...

    def header(self, item: Item) -> Header:
        """What `size` takes from the header of an item's file. Raises `UserError`."""
        ...

    def size(self, item: Item) -> Size:
        """The size of an item, from its header, which is read only if it is not known. Raises `UserError`."""
        ...

    def pieces(self, size: Any) -> tuple[Size, ...]:
        """The sizes of the pieces of an item of that size, in the order of their rows."""
        ...

    def blocks(self, size: Any) -> Sequence[RowBlock]:
        """The blocks of an item in the text, which have as many rows as its pieces."""
        ...

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        """The decoded patches of some pieces of an item, float32 [patches, elements]. Raises `UserError`."""
        ...

    def describe(self, item: Item, size: Any) -> str:
        """A description of an item in its file and of what the encoder takes. Raises `UserError`."""
        ...


class ItemType(Protocol):
    """Base of a type of items. Importing one imports neither torch nor transformers; its methods do."""

    modality: Modality
    """The kind of its items."""
    tokens: ItemTokens
    """The tokens of an item in the text."""
    processor: str
    """Name of the processor of `transformers` that reads its items, for messages."""
    settings: tuple[str, ...] = ()
    """Where folders have the processor's settings: key in `processor_config.json`, and files of older folders."""

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> ItemReader:
        """The reader of an encoder's folder, which `setting` names.

        Args:
            folder: in `transformers` format.
            config: the folder's configuration.
            section: the user's settings for reading items, `data` or an entry of `modules`. A type reads fields
                of its own; the folder gives the defaults of missing ones and of None.
            setting: for messages.
            token_id: the token that stands for one row.

        Raises:
            UserError: the settings do not fit. For a folder that does not load, any other error.
        """
        ...

    def chat_part(self, section: Any, token: str) -> dict[str, str]:
        """The part of a chat message that stands for an item with rows of `token`. `section`: see `open`."""
        return {"type": self.modality}

    def assumed(self, shape: Any, plan: EstimateConfig) -> Size:
        """The size of the pieces that section `plan` describes, for an encoder of `shape`."""
        ...

    def assumed_pieces(self, plan: EstimateConfig) -> int:
        """Number of pieces of a sample that section `plan` describes."""
        return plan.images

    def assumed_items(self, plan: EstimateConfig) -> tuple[str, str]:
        """The items of a sample in words, and the settings that describe them."""
        return f"{plan.images} image{'s' * (plan.images != 1)}", "plan.images, plan.image_side"

    def measures(self, shape: Any, size: Any) -> str:
        """The size of a piece in words."""
        ...

    def exported(self, folder: Path, section: Mapping[str, Any]) -> dict[str, Any]:
        """The processor's settings in an export of a run with `section` (see `open`); empty for those of the folder."""
        return {}


class ItemOrder(NamedTuple):
    """One piece in the order in which its encoder works.

    `units`: int32 [units], the number of each unit, in the order of rows. `windows`: int32 [windows], units of each
    window of local attention.
    """

    units: np.ndarray
    windows: np.ndarray


class ItemShape(Protocol):
    """The geometry by which an encoder cuts pieces. A `size` is a piece's."""

    @property
    def unit(self) -> int:
        """Patches of a unit."""
        ...

    @property
    def unit_width(self) -> int:
        """Input elements of a unit."""
        ...

    @property
    def position_dims(self) -> int:
        """Coordinates of a patch."""
        ...

    def rows(self, size: Any) -> int:
        """Rows of a piece, one for each unit."""
        ...

    def order(self, size: Any) -> ItemOrder:
        """The piece in the order in which the encoder works."""
        ...

    def positions(self, size: Any, units: np.ndarray) -> np.ndarray:
        """Coordinates of each patch of these units of the piece, by number: int64 [dims, patches]."""
        ...

    def sequences(self, size: Any) -> tuple[int, ...]:
        """Patches of each sequence of full attention."""
        ...

    def cost(self, size: Any) -> float:
        """Predicted forward flops of encoding the piece."""
        return sum(self.sequences(size)) * self.cost_per_patch(size)

    def cost_per_patch(self, size: Any) -> float:
        """Predicted forward flops of one patch, which attends to all patches of its sequence."""
        ...


def padded_patches(patches: int, unit: int, sequence_shards: int) -> int:
    """Patches of a shard with padding: whole units for each of the ranks that share its activations, and never none.

    `sequence_shards`: tp with sequence-parallel activations, else 1. An empty shard takes part in collectives, and
    Megatron's layers do not accept tensors without elements.
    """
    share = unit * sequence_shards
    return max(1, -(-patches // share)) * share
