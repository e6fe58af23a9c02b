"""What encoders take: items of one or more types. General code reads, cuts and deals them through what is here, and
never looks into a size.

An *item* is what a record shows in one place: a picture, a video, a clip of sound. It consists of *pieces*, each read,
assigned to a replica and bounded by itself: a picture is one, a video has one for every two frames. All types of an
encoder have pieces of the encoder's own geometry (`ItemShape`), so that one call takes them side by side.

A *patch* is what an encoder embeds as one token, a *unit* the patches that become one row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from megatron_hetero.config.sections import EstimateConfig

Modality = Literal["image", "video", "audio"]
"""What items are. The types of an encoder differ in it."""

Size = Hashable
"""The size of an item, or of a piece: a value of its type's own, such as rows and columns of patches."""


class Item(NamedTuple):
    """Where an item is: its file, and the record that shows it, for messages."""

    path: Path
    where: str


class Piece(NamedTuple):
    """Piece `number` of an item, and the piece's size."""

    number: int
    size: Size


class Block(NamedTuple):
    """Rows of an item that are side by side in the text, between text that the type writes.

    `places`: where they are in time, height and width, from the position at which the block begins: int64 [3, rows].
    """

    places: np.ndarray
    before: str = ""
    after: str = ""


class ItemTokens(NamedTuple):
    """How the text shows an item: between `start` and `end` a `row` for each of its rows. Names of `Family.tokens`."""

    start: str
    row: str
    end: str


class ItemReader(Protocol):
    """Reads items of one type for one encoder. Holds no open files and can be pickled."""

    @property
    def token_id(self) -> int:
        """The token that stands for one row."""
        ...

    def size(self, item: Item) -> Size:
        """The size of an item, from its header. Raises `UserError`."""
        ...

    def pieces(self, size: Any) -> tuple[Size, ...]:
        """The sizes of the pieces of an item of that size, in the order of their rows."""
        ...

    def blocks(self, size: Any) -> Sequence[Block]:
        """How the text shows an item of that size, which has as many rows as its pieces have."""
        ...

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        """Some pieces of an item, decoded, one after the other: float32 [patches, elements]. Raises `UserError`."""
        ...

    def blank(self) -> ItemReader:
        """The same, but that items have their sizes and no content."""
        ...

    def describe(self, item: Item, size: Any) -> str:
        """An item in words: what it is in its file, and what the encoder takes. Raises `UserError`."""
        ...


class ItemType(Protocol):
    """A type of items. Importing one imports neither torch nor transformers; its methods do."""

    @property
    def modality(self) -> Modality:
        """What its items are."""
        ...

    @property
    def tokens(self) -> ItemTokens:
        """How the text shows them."""
        ...

    @property
    def processor(self) -> str:
        """What reads them in `transformers`, in words."""
        ...

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> ItemReader:
        """The reader of an encoder's folder, which `setting` names.

        Args:
            folder: in `transformers` format.
            config: the folder's configuration.
            section: what the user's configuration says of reading items, `data` or an entry of `model.encoders`. A type
                reads fields of its own; what a section lacks, or leaves None, is as the folder says.
            setting: for messages.
            token_id: the token that stands for one row.

        Raises:
            UserError: the settings do not fit. For a folder that does not load, any other error.
        """
        ...

    def inputs(self, patches: np.ndarray, sizes: Sequence[Any]) -> dict[str, Any]:
        """What a model of `transformers` takes of items of these sizes, whose patches follow each other."""
        ...

    def assumed(self, shape: Any, plan: EstimateConfig) -> Size:
        """The size of the pieces that section `plan` describes, for an encoder of that shape."""
        ...

    def measures(self, shape: Any, size: Any) -> str:
        """The size of a piece in words."""
        ...


class ItemOrder(Protocol):
    """One piece in the order in which its encoder works."""

    @property
    def units(self) -> np.ndarray:
        """int32 [units], the number of each unit, in the order of rows."""
        ...

    @property
    def windows(self) -> np.ndarray:
        """int32 [windows], units of each window."""
        ...

    def positions(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Coordinates of each patch of the units [start, stop) of this order: int64 [dims, patches]."""
        ...


class ItemShape(Protocol):
    """How an encoder cuts its pieces. A `size` is that of a piece."""

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

    def sequences(self, size: Any) -> tuple[int, ...]:
        """Patches of each sequence of full attention."""
        ...

    def windows(self, size: Any) -> list[int]:
        """Patches of each window of local attention, in its own order."""
        ...

    def cost(self, size: Any) -> float:
        """Predicted forward flops of encoding the piece."""
        ...

    def cost_per_patch(self, size: Any) -> float:
        """Predicted forward flops of one of its patches, which meets all patches of its sequence."""
        ...


def padded_patches(patches: int, unit: int, sequence_shards: int) -> int:
    """Patches of a shard with padding: whole units for each of the ranks that share its activations, and never none.

    `sequence_shards`: tp with sequence-parallel activations, else 1. An empty shard takes part in collectives, and
    Megatron's layers do not accept tensors without elements.
    """
    share = unit * sequence_shards
    return max(1, -(-patches // share)) * share
