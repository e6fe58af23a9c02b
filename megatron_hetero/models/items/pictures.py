"""The item type of pictures: sizes, patches and positions, and the reader.

Patches are in unit order: units are counted along the rows of a picture (*raster order*), and the merge x merge patches
of a unit are consecutive, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from PIL import Image

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import read_object
from megatron_hetero.hf.model_files import NESTED
from megatron_hetero.models.items.image_files import image_place, load_picture, picture_size
from megatron_hetero.models.items.types import Header, Item, ItemOrder, ItemTokens, ItemType, Modality, Piece, RowBlock
from megatron_hetero.models.items.video_sampling import given_size

if TYPE_CHECKING:
    from megatron_hetero.config.sections import EstimateConfig


class ImageSize(NamedTuple):
    """Number of frames, and of rows and columns of patches before merging. A picture has one frame."""

    frames: int
    rows: int
    columns: int


@lru_cache(maxsize=1024)
def picture_order(size: ImageSize, merge: int, window: int) -> ItemOrder:
    """Return the order of a picture's units by windows of `window` x `window` units, which are smaller at the lower and
    right edges: window after window, with the units of each window in raster order. With window 1 this is raster order.
    """
    frames, rows, columns = size[0], size[1] // merge, size[2] // merge
    frame, row, column = np.indices((frames, rows, columns))
    across, down = -(-columns // window), -(-rows // window)
    window_of = ((frame * down + row // window) * across + column // window).ravel()
    return ItemOrder(
        units=np.argsort(window_of, kind="stable").astype(np.int32),
        windows=np.bincount(window_of, minlength=frames * down * across).astype(np.int32),
    )


def patch_positions(size: ImageSize, merge: int, units: np.ndarray) -> np.ndarray:
    """Return the row and column of each patch in units with these raster indices: int64 [2, patches]."""
    rows, columns, inside = size[1] // merge, size[2] // merge, np.arange(merge)
    units = units.astype(np.int64)[:, None, None]
    row = units // columns % rows * merge + inside[:, None]
    column = units % columns * merge + inside[None, :]
    return np.stack([x.ravel() for x in np.broadcast_arrays(row, column)])


def rope_positions(length: int, starts: np.ndarray, blocks: Sequence[RowBlock]) -> np.ndarray:
    """Return the multimodal rotary positions of one sample: time, height and width of each token (Qwen2-VL, arXiv
    2409.12191, section 2.1).

    A text token advances all three by one. The tokens of an image share one time and have their row and column in the
    image, all relative to the image's first position. The following text continues after the largest position, or at
    the position that `RowBlock.length` gives.

    Args:
        length: number of tokens of the sample, including rows of items.
        starts: int64 [blocks], index of each block's first row.
        blocks: the blocks of all items.

    Returns:
        int64 [3, length].
    """
    positions = np.empty((3, length), dtype=np.int64)
    token = position = 0
    for start, block in zip(starts.tolist(), blocks, strict=True):
        text = start - token
        positions[:, token:start] = np.arange(position, position + text)
        token, position = start + block.places.shape[1], position + text
        positions[:, start:token] = position + block.places
        position += int(block.places.max()) + 1 if block.length is None else block.length
    positions[:, token:] = np.arange(position, position + length - token)
    return positions


@dataclass(frozen=True, eq=False)
class ImageReader:
    """`ItemReader` of pictures, which uses the image processor of a model folder.

    `token_id`: the token that stands for one merged patch.
    """

    image_processor: Any
    token_id: int

    def header(self, item: Item) -> Header:
        """Return the width and height of the upright picture, from the header of its file."""
        return picture_size(item.content, item.where)

    def size(self, item: Item) -> ImageSize:
        """Return the size in patches of a picture after resizing."""
        return self._size(item, item.header or self.header(item))

    def _size(self, item: Item, file_size: tuple[int, int]) -> ImageSize:
        """Return the size in patches, after resizing, of a picture with this width and height in its file."""
        # This module imports torch; see `megatron_hetero.data.tokenizer`.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor, given, (width, height) = self.image_processor, dict(item.given), file_size
        unit, limits = processor.patch_size * processor.merge_size, processor.size
        low = given.get("min_pixels", min(limits["shortest_edge"], given.get("max_pixels", math.inf)))
        high = given.get("max_pixels", max(limits["longest_edge"], low))
        try:
            height, width = given_size(given, unit) or smart_resize(height, width, unit, low, high)
        except (ValueError, ZeroDivisionError) as error:
            raise UserError.at(
                image_place(item.where, item.content),
                found=f"a picture of {width} x {height} pixels ({error})",
                expected="sides that differ by a factor below 200",
                fix="crop or split the picture, or remove the record",
            ) from error
        return ImageSize(1, height // processor.patch_size, width // processor.patch_size)

    def pieces(self, size: ImageSize) -> tuple[ImageSize, ...]:
        """Return the size of the only piece, which is the whole picture."""
        return (size,)

    def blocks(self, size: ImageSize) -> Sequence[RowBlock]:
        """Return one block, with the frame, row and column of each unit in raster order."""
        (frames, rows, columns), merge = size, self.image_processor.merge_size
        return (RowBlock(np.indices((frames, rows // merge, columns // merge)).reshape(3, -1)),)

    def describe(self, item: Item, size: ImageSize) -> str:
        """Return a description of a picture: its size in pixels, its resized size, and its grid of patches."""
        (width, height), patch = self.header(item), self.image_processor.patch_size
        resized = f"{size.columns * patch}×{size.rows * patch} px"
        return f"{width}×{height} px → {resized}, grid {tuple(size)} (t, h, w)"

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        """Decode the patches of a picture, which has one piece.

        Returns:
            float32 [t·h·w, channels · temporal_patch_size · patch_size²], normalised; merged groups are adjacent.

        Raises:
            UserError: the picture cannot be decoded, or differs in size from its header.
        """
        [(_, size)], picture, more = pieces, load_picture(item.content, item.where), {}
        if item.given:
            (_, rows, columns), patch = self._size(item, picture.size), self.image_processor.patch_size
            picture, more = fitted(picture, (columns * patch, rows * patch)), {"do_resize": False}
        output = self.image_processor(images=[picture], return_tensors="np", **more)
        grid, expected = output["image_grid_thw"][0].tolist(), list(cast(ImageSize, size))
        if grid != expected:
            raise UserError.at(
                image_place(item.where, item.content),
                found=f"a decoded picture of {grid} patches (time, height, width)",
                expected=f"{expected}, as its header said",
                fix="do not change pictures meanwhile; replace damaged ones; touch one whose old size is in data.index",
            )
        return np.ascontiguousarray(output["pixel_values"], dtype=np.float32)


def fitted(picture: Image.Image, side: tuple[int, int]) -> Image.Image:
    """Return the picture resized to this width and height."""
    return picture if picture.size == side else picture.resize(side, Image.Resampling.BICUBIC)


class PixelLimits(NamedTuple):
    """Minimum and maximum area of a resized picture in pixels; None: the default of the encoder's folder."""

    min_pixels: int | None = None
    max_pixels: int | None = None


def read_settings(folder: Path, sources: Sequence[str]) -> dict[str, Any]:
    """Read a processor's settings from the files of `ItemType.settings`, like `transformers`. Raises `UserError`."""
    key, *files = sources
    for name in (NESTED, *files):
        if (folder / name).is_file():
            content = read_object(folder / name)
            settings = content.get(key) if name == NESTED else content
            if isinstance(settings, dict):
                return settings
    return {}


def load_image_processor(folder: Path, kind: type, section: Any, setting: str) -> Any:
    """Load the PIL variant of a folder's image processor, which computes the same pixels on every machine.

    Args:
        folder: a folder whose files have been checked.
        kind: class of the image processor.
        section: settings with some fields of `PixelLimits`.
        setting: name of the setting with the folder.

    Raises:
        UserError: no picture can have an area within the limits.
    """
    # Imported from its module: releases before 5.18 export it only if torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **local)
    if not isinstance(image_processor, kind):
        raise TypeError(f"it is of type {type(image_processor).__name__}")
    size = dict(image_processor.size)
    low, high = (getattr(section, field, None) for field in PixelLimits._fields)
    low = size.get("shortest_edge") or size.get("min_pixels") if low is None else low
    high = size.get("longest_edge") or size.get("max_pixels") if high is None else high
    if low is None or high is None or not 0 < low <= high:
        place = "data" if setting.startswith("model.hf_path") else setting.removesuffix(".hf_path")
        raise UserError.at(
            f"{place}.min_pixels and {place}.max_pixels",
            found=f"an area of {low} to {high} pixels",
            expected="0 < min_pixels <= max_pixels",
            because=f"the defaults come from {folder}",
            fix="set both, as areas in pixels",
        )
    image_processor.size = {"shortest_edge": low, "longest_edge": high}
    return image_processor


def check_agreement(folder: Path, vision: Any, image_processor: Any) -> None:
    """Check that the image processor works and cuts the patches that the encoder expects. Raises `UserError`, or the
    exceptions of a broken image processor.
    """
    file = folder / "preprocessor_config.json"
    _require(file, "do_resize", image_processor.do_resize, True, "for images of any size")
    require_patches(file, {name: getattr(image_processor, name) for name in _PATCHES}, vision)
    side = vision.patch_size * vision.spatial_merge_size
    size = {"shortest_edge": side**2, "longest_edge": side**2}
    with np.errstate(all="ignore"):
        patches = image_processor([Image.new("RGB", (side, side))], size=size, return_tensors="np")["pixel_values"]
    if not np.isfinite(patches).all():
        raise ValueError(f"black pixels become values from {patches.min()} to {patches.max()}")


_PATCHES = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Settings of processors that cut patches, with the settings of `vision_config` that must be equal."""


def require_patches(file: Path, settings: Mapping[str, Any], vision: Any) -> None:
    """Check that a processor's settings in `file` agree with `vision_config` on patches, where they are given. Raises
    `UserError`.
    """
    for name, vision_name in _PATCHES.items():
        theirs = getattr(vision, vision_name)
        _require(file, name, settings.get(name, theirs), theirs, "by vision_config of config.json")


def _require(file: Path, name: str, ours: object, theirs: object, why: str) -> None:
    if ours != theirs:
        fix = "copy both files from the same model"
        raise UserError.at(file, found=f"{name} {ours}", expected=f"{theirs}, {why}", fix=fix)


IMAGE_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Tokens of pictures and videos in published folders, by the names of their ids in `config.json`."""


@dataclass(frozen=True)
class Pictures(ItemType):
    """`ItemType` of pictures. Sizes are `ImageSize`s, and each picture is one piece."""

    image_processor_class: Callable[[], type]
    """Function that returns the image processor class of `transformers` whose patches the encoder takes."""
    modality: Modality = "image"
    tokens = ItemTokens("vision_start_token_id", "image_token_id", "vision_end_token_id")
    processor: str = "an image processor"
    settings: tuple[str, ...] = ("image_processor", "preprocessor_config.json")

    def open(self, folder: Path, config: Any, section: Any, setting: str, token_id: int) -> ImageReader:
        """Return a reader with the folder's image processor, see `ItemType.open`."""
        image_processor = load_image_processor(folder, self.image_processor_class(), section, setting)
        check_agreement(folder, config.vision_config, image_processor)
        return ImageReader(image_processor, token_id)

    def exported(self, folder: Path, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the image processor's settings with the run's pixel limits; empty if the run has no limits."""
        if not any(chosen := PixelLimits(section.get("min_pixels"), section.get("max_pixels"))):
            return {}
        size = load_image_processor(folder, self.image_processor_class(), chosen, str(folder)).size
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"], "size": size}
        return read_settings(folder, self.settings) | limits

    def assumed(self, shape: Any, plan: EstimateConfig) -> ImageSize:
        """Return the size of the square picture that section `plan` describes, in whole units."""
        return square(plan.image_side, shape)

    def measures(self, shape: Any, size: ImageSize) -> str:
        """Width and height in pixels."""
        return pixels_of(shape, size)


def square(side: int, shape: Any) -> ImageSize:
    """Return the size, in whole units, of a square picture with `side` pixels per side for an encoder's shape."""
    patches = max(1, round(side / (shape.patch * shape.merge))) * shape.merge
    return ImageSize(1, patches, patches)


def pixels_of(shape: Any, size: ImageSize) -> str:
    """Return width and height in pixels as text."""
    return f"{size.columns * shape.patch:,}x{size.rows * shape.patch:,} pixels"
