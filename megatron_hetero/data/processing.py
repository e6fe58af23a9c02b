"""From records to tokens and patches, with a model's own tokenizer and image processor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megatron_hetero.data import chat, model_folder, pictures
from megatron_hetero.data.positions import rope_positions
from megatron_hetero.data.records import Record
from megatron_hetero.errors import UserError

# Boxes and object names are content, though the tokenizer lists their marks as special: grounding data writes them.
_CONTENT_MARKS = re.compile(r"<\|(object_ref|box|quad)_(start|end)\|>")


@dataclass(frozen=True, eq=False)
class TokenizedSample:
    """One record as tokens, each image already expanded to one token per merged patch.

    Attributes:
        input_ids: int64 [n].
        supervised: bool [n], true for the tokens the model is trained to produce.
        grids: int64 [images, 3]; time, height, width in patches, before merging.
        position_ids: int64 [3, n], multimodal rotary positions from 0.
        image_positions: int64 [rows], the indices of image tokens, image by image in raster order.
        merge_size: patches per image token and side.
        record: where it comes from.
    """

    input_ids: np.ndarray
    supervised: np.ndarray
    grids: np.ndarray
    position_ids: np.ndarray
    image_positions: np.ndarray
    merge_size: int
    record: Record

    def __len__(self) -> int:
        return len(self.input_ids)


class Processor:
    """The text and image side of a Qwen2.5-VL folder. Holds no open files and can be pickled."""

    def __init__(self, tokenizer: Any, image_processor: Any, config: Any, max_image_pixels: int) -> None:
        """Use `from_folder`."""
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.max_image_pixels = max_image_pixels
        self.image_token_id: int = config.image_token_id
        self.vision_start_token_id: int = config.vision_start_token_id
        self.pad_token_id: int = _pad_token_id(tokenizer)
        self.patch_size: int = image_processor.patch_size
        self.temporal_patch_size: int = image_processor.temporal_patch_size
        self.merge_size: int = image_processor.merge_size
        self.min_pixels: int = image_processor.size["shortest_edge"]
        self.max_pixels: int = image_processor.size["longest_edge"]

    @classmethod
    def from_folder(
        cls,
        hf_path: Path,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_image_pixels: int = pictures.MAX_IMAGE_PIXELS,
    ) -> Processor:
        """Loads tokenizer and image processor. Nothing is downloaded and no code of the folder runs.

        Args:
            hf_path: a Qwen2.5-VL folder in `transformers` format.
            min_pixels: smallest area of a resized image in pixels; None takes the folder's.
            max_pixels: largest area of a resized image in pixels; None takes the folder's.
            max_image_pixels: pictures with more pixels than this are refused before decoding.

        Raises:
            UserError: a file is missing or broken, or the files do not belong together.
        """
        path = Path(hf_path)
        model_folder.check_folder(path)
        config = model_folder.load_config(path)
        tokenizer = model_folder.load_tokenizer(path)
        _check_special_tokens(path, tokenizer, config)
        image_processor = model_folder.load_image_processor(path, min_pixels, max_pixels)
        model_folder.check_agreement(path, config, image_processor)
        return cls(tokenizer, image_processor, config, max_image_pixels)

    def tokenize(self, record: Record) -> TokenizedSample:
        """Tokens of a record. Of its images only the headers are read.

        The text is tokenized in the pieces between which supervision changes, so no token is half supervised: an answer
        that begins with a line break would otherwise merge with the one that ends the prompt.

        Raises:
            UserError: special tokens in the text, a missing or oversized image, or an unfit chat template.
        """
        self._refuse_special_tokens(record)
        grids = np.array([self.grid(record, k) for k in range(len(record.images))], dtype=np.int64).reshape(-1, 3)
        short_ids, short_supervised = self._encode(record)
        is_image = short_ids == self.image_token_id
        if is_image.sum() != len(grids):
            raise UserError.at(
                f"{record.where}: chat template of model.hf_path",
                found=f"{is_image.sum()} image tokens in the rendered text",
                expected=f"{len(grids)}, one for each image",
                fix="use the chat template of Qwen2.5-VL",
            )
        repeats = np.ones(len(short_ids), dtype=np.int64)
        repeats[is_image] = grids.prod(axis=1) // self.merge_size**2
        starts = (repeats.cumsum() - repeats)[is_image]
        input_ids = short_ids.repeat(repeats)
        return TokenizedSample(
            input_ids=input_ids,
            supervised=short_supervised.repeat(repeats),
            grids=grids,
            position_ids=rope_positions(len(input_ids), starts, grids, self.merge_size),
            image_positions=np.flatnonzero(input_ids == self.image_token_id),
            merge_size=self.merge_size,
            record=record,
        )

    def _encode(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and supervision with one token per image."""
        ids: list[int] = []
        supervised: list[bool] = []
        for piece in chat.render(self.tokenizer, record):
            tokens = self.tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"]
            ids += tokens
            supervised += [piece.supervised] * len(tokens)
        return np.array(ids, dtype=np.int64), np.array(supervised, dtype=bool)

    def grid(self, record: Record, k: int) -> tuple[int, int, int]:
        """(time, height, width) of image ``k`` in patches before merging, from its header."""
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
                f"{record.where}: image {path}",
                found=f"a picture of {width} x {height} pixels ({error})",
                expected="sides that differ by a factor below 200",
                fix="crop or split the picture, or remove the record",
            ) from error
        return 1, height // self.patch_size, width // self.patch_size

    def load_image(self, path: Path, where: str) -> Image.Image:
        """The decoded picture, upright, in mode RGB, at its own size.

        Raises:
            UserError: naming ``path`` and the record ``where``.
        """
        return pictures.load_picture(path, where, self.max_image_pixels)

    def patches(self, record: Record, image_index: int, grid: Sequence[int] | np.ndarray) -> np.ndarray:
        """Decodes one image into the patches that the vision encoder takes.

        Args:
            record: the record of the image.
            image_index: which of its images.
            grid: [3], the image's row of `TokenizedSample.grids`.

        Returns:
            float32 [t·h·w, channels · temporal_patch_size · patch_size²], normalised; merged groups are adjacent.

        Raises:
            UserError: the image cannot be decoded, or its size is not what its header said.
        """
        path = record.image_path(image_index)
        output = self.image_processor(images=[self.load_image(path, record.where)], return_tensors="np")
        found, expected = output["image_grid_thw"][0].tolist(), np.asarray(grid).tolist()
        if found != expected:
            raise UserError.at(
                f"{record.where}: image {path}",
                found=f"a decoded picture of {found} patches (time, height, width)",
                expected=f"{expected}, as its header said",
                fix="leave the pictures alone while training reads them, or replace this one if it is damaged",
            )
        return np.ascontiguousarray(output["pixel_values"], dtype=np.float32)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """Matches what the tokenizer would take as control tokens inside a record's text."""
        added = self.tokenizer.added_tokens_decoder
        control = {str(token) for key, token in added.items() if token.special or key == self.image_token_id}
        tokens = sorted(token for token in control if not _CONTENT_MARKS.fullmatch(token))
        return re.compile("|".join(map(re.escape, tokens)))

    def _refuse_special_tokens(self, record: Record) -> None:
        for k, turn in enumerate(record.turns):
            if match := self._special_tokens.search(turn.text):
                raise UserError.at(
                    f"{record.where}: field 'conversations[{k}]'",
                    found=f"the special token {match[0]} in the text",
                    expected="plain text",
                    because="it would be read as the structure of the conversation or of an image",
                    fix="remove it; images are written as <image>",
                )


def _pad_token_id(tokenizer: Any) -> int:
    """Padding is masked everywhere, so any valid token will do where the tokenizer names none."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def _check_special_tokens(path: Path, tokenizer: Any, config: Any) -> None:
    """The chat template writes tokens by name, the model knows them by number."""
    wanted = {"<|image_pad|>": config.image_token_id, "<|vision_start|>": config.vision_start_token_id}
    vocabulary = tokenizer.get_vocab()
    for token, number in {**wanted, chat.END_OF_TURN: None}.items():
        found = vocabulary.get(token)
        if found is None or (number is not None and found != number):
            raise UserError.at(
                f"model.hf_path: {path}",
                found=f"token {token} with id {found} in the tokenizer",
                expected=f"id {number}, as in config.json" if number is not None else "a token that ends turns",
                fix="copy config.json and the tokenizer files from the same model",
            )
