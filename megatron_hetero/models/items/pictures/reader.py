"""What one encoder sees of the pictures that are for it: sizes from headers, patches from decoded pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from megatron_hetero.errors import UserError
from megatron_hetero.models.items.pictures import files
from megatron_hetero.models.items.pictures.geometry import ImageSize
from megatron_hetero.models.items.types import Block, Item, Piece

_GREY = (128, 128, 128)
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


class ImageReader:
    """The image processor of a model folder. See `megatron_hetero.models.items.types.ItemReader`.

    Attributes:
        token_id: the token that stands for one merged patch.
        max_image_pixels: pictures with more pixels are refused before decoding.
        patch_size: side of a patch in pixels.
        merge_size: patches per token and side.
        min_pixels, max_pixels: areas that pictures are enlarged or reduced to.
    """

    def __init__(self, image_processor: Any, token_id: int, max_image_pixels: int = files.MAX_IMAGE_PIXELS) -> None:
        self.image_processor = image_processor
        self.token_id = token_id
        self.max_image_pixels = max_image_pixels
        self.patch_size: int = image_processor.patch_size
        self.merge_size: int = image_processor.merge_size
        self.min_pixels: int = image_processor.size["shortest_edge"]
        self.max_pixels: int = image_processor.size["longest_edge"]

    def size(self, item: Item) -> ImageSize:
        """The size of a picture as the encoder takes it, from its header."""
        # Here, since it brings torch; see `megatron_hetero.data.processor.folder`.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        width, height = files.picture_size(*item, self.max_image_pixels)
        try:
            height, width = smart_resize(
                height, width, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels
            )
        except (ValueError, ZeroDivisionError) as error:
            raise UserError.at(
                files.image_place(item.where, item.path),
                found=f"a picture of {width} x {height} pixels ({error})",
                expected="sides that differ by a factor below 200",
                fix="crop or split the picture, or remove the record",
            ) from error
        return ImageSize(1, height // self.patch_size, width // self.patch_size)

    def pieces(self, size: ImageSize) -> tuple[ImageSize, ...]:
        """The picture."""
        return (size,)

    def blocks(self, size: ImageSize) -> Sequence[Block]:
        """Frame, row and column of each merged patch in raster order."""
        frames, rows, columns = size
        return (Block(np.indices((frames, rows // self.merge_size, columns // self.merge_size)).reshape(3, -1)),)

    def blank(self) -> ImageReader:
        """The reader of grey pictures of the same sizes."""
        return _GreyReader(self.image_processor, self.token_id, self.max_image_pixels)

    def describe(self, item: Item, size: ImageSize) -> str:
        """A picture in words."""
        width, height = files.picture_size(*item, self.max_image_pixels)
        resized = f"{size.columns * self.patch_size}×{size.rows * self.patch_size} px"
        return f"{width}×{height} px → {resized}, grid {tuple(size)} (t, h, w)"

    def load_image(self, item: Item) -> Image.Image:
        """The decoded picture, upright, in mode RGB, at its own size. Raises `UserError`."""
        return files.load_picture(*item, self.max_image_pixels)

    def patches(self, item: Item, pieces: Sequence[Piece]) -> np.ndarray:
        """Decodes one picture into the patches that the encoder takes.

        Args:
            item: the picture.
            pieces: its only one.

        Returns:
            float32 [t·h·w, channels · temporal_patch_size · patch_size²], normalised; merged groups are adjacent.

        Raises:
            UserError: the picture cannot be decoded, or its size is not what its header said.
        """
        [(_, size)] = pieces
        assert isinstance(size, ImageSize), "a picture has the size of a picture"
        output = self.image_processor(images=[self.load_image(item)], return_tensors="np")
        found, expected = output["image_grid_thw"][0].tolist(), list(size)
        if found != expected:
            raise UserError.at(
                files.image_place(item.where, item.path),
                found=f"a decoded picture of {found} patches (time, height, width)",
                expected=f"{expected}, as its header said",
                fix="do not change pictures during training; if this one is damaged, replace it",
            )
        return np.ascontiguousarray(output["pixel_values"], dtype=np.float32)


class _GreyReader(ImageReader):
    def load_image(self, item: Item) -> Image.Image:
        return Image.new("RGB", super().load_image(item).size, _GREY)


class PixelLimits(NamedTuple):
    """The smallest and the largest area of a resized picture; None: as the encoder's folder says."""

    min_pixels: int | None = None
    max_pixels: int | None = None


def load_image_processor(folder: Path, of_class: type, section: Any, setting: str) -> Any:
    """The image processor in its PIL variant, which gives the same pixels on every machine.

    Args:
        folder: its files have been checked.
        of_class: the class that it must be of.
        section: has the fields of `PixelLimits`, or some of them.
        setting: the setting that names the folder.

    Raises:
        UserError: no picture can have these areas.
    """
    # From its module: releases before 5.18 export it only if torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **_LOCAL)
    if not isinstance(image_processor, of_class):
        raise TypeError(f"it is of type {type(image_processor).__name__}")
    size = dict(image_processor.size)
    limits = PixelLimits(*(getattr(section, field, None) for field in PixelLimits._fields))
    low = size.get("shortest_edge") or size.get("min_pixels") if limits.min_pixels is None else limits.min_pixels
    high = size.get("longest_edge") or size.get("max_pixels") if limits.max_pixels is None else limits.max_pixels
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
    """Check that the image processor makes patches that the encoder accepts, tried on a picture of one row. Raises
    `UserError` or `ValueError`.
    """
    pairs = {
        "patch_size": (image_processor.patch_size, vision.patch_size),
        "merge_size": (image_processor.merge_size, vision.spatial_merge_size),
        "temporal_patch_size": (image_processor.temporal_patch_size, vision.temporal_patch_size),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UserError.at(
                folder / "preprocessor_config.json",
                found=f"{name} {ours}",
                expected=f"{theirs}, as in vision_config of config.json",
                fix="copy both files from the same model",
            )
    side, elements = (
        vision.patch_size * vision.spatial_merge_size,
        3 * vision.temporal_patch_size * vision.patch_size**2,
    )
    size = {"shortest_edge": side**2, "longest_edge": side**2}
    black = Image.new("RGB", (side, side))
    with np.errstate(all="ignore"):
        patches = image_processor(images=[black], size=size, return_tensors="np")["pixel_values"]
    if patches.shape != (vision.spatial_merge_size**2, elements) or not np.isfinite(patches).all():
        values = f"of values from {patches.min()} to {patches.max()}"
        raise ValueError(f"a black picture of {side} x {side} pixels becomes patches {patches.shape} {values}")
