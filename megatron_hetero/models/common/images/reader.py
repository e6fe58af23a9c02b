"""What one encoder sees of the images that are for it: sizes from headers, patches from decoded pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megatron_hetero.data import pictures
from megatron_hetero.data.records import Record
from megatron_hetero.errors import UserError
from megatron_hetero.models.common.images.geometry import ImageSize


class ImageReader:
    """The image processor of a model folder. Holds no open files and can be pickled.

    Attributes:
        token_id: the token that stands for one merged patch.
        patch_size, temporal_patch_size: of the encoder, in pixels and frames.
        merge_size: patches per token and side.
        min_pixels, max_pixels: areas that images are enlarged or reduced to.
    """

    def __init__(self, image_processor: Any, token_id: int, max_image_pixels: int) -> None:
        self.image_processor = image_processor
        self.token_id = token_id
        self.max_image_pixels = max_image_pixels
        self.patch_size: int = image_processor.patch_size
        self.temporal_patch_size: int = image_processor.temporal_patch_size
        self.merge_size: int = image_processor.merge_size
        self.min_pixels: int = image_processor.size["shortest_edge"]
        self.max_pixels: int = image_processor.size["longest_edge"]

    def size(self, record: Record, k: int) -> ImageSize:
        """Of image ``k`` as the encoder takes it, from its header."""
        # Here, since it brings torch; see model_folder.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        path = record.image_path(k)
        width, height = pictures.picture_size(path, record.where, self.max_image_pixels)
        try:
            height, width = smart_resize(
                height, width, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels
            )
        except (ValueError, ZeroDivisionError) as error:
            raise UserError.at(
                pictures.image_place(record.where, path),
                found=f"a picture of {width} x {height} pixels ({error})",
                expected="sides that differ by a factor below 200",
                fix="crop or split the picture, or remove the record",
            ) from error
        return ImageSize(1, height // self.patch_size, width // self.patch_size)

    def places(self, size: ImageSize) -> np.ndarray:
        """Frame, row and column of each merged patch in raster order: int64 [3, rows]."""
        frames, rows, columns = size
        return np.indices((frames, rows // self.merge_size, columns // self.merge_size)).reshape(3, -1)

    def describe(self, record: Record, k: int, size: ImageSize) -> str:
        """Image ``k`` in words."""
        width, height = pictures.picture_size(record.image_path(k), record.where, self.max_image_pixels)
        resized = f"{size.columns * self.patch_size}×{size.rows * self.patch_size} px"
        return f"{width}×{height} px → {resized}, grid {tuple(size)} (t, h, w)"

    def load_image(self, path: Path, where: str) -> Image.Image:
        """The decoded picture, upright, in mode RGB, at its own size.

        Raises:
            UserError: naming ``path`` and the record ``where``.
        """
        return pictures.load_picture(path, where, self.max_image_pixels)

    def patches(self, record: Record, k: int, size: ImageSize) -> np.ndarray:
        """Decodes one image into the patches that the encoder takes.

        Args:
            record: the record of the image.
            k: which of its images.
            size: of the image, as its header said.

        Returns:
            float32 [t·h·w, channels · temporal_patch_size · patch_size²], normalised; merged groups are adjacent.

        Raises:
            UserError: the image cannot be decoded, or its size is not what its header said.
        """
        path = record.image_path(k)
        output = self.image_processor(images=[self.load_image(path, record.where)], return_tensors="np")
        found, expected = output["image_grid_thw"][0].tolist(), list(size)
        if found != expected:
            raise UserError.at(
                pictures.image_place(record.where, path),
                found=f"a decoded picture of {found} patches (time, height, width)",
                expected=f"{expected}, as its header said",
                fix="do not change pictures during training; if this one is damaged, replace it",
            )
        return np.ascontiguousarray(output["pixel_values"], dtype=np.float32)
