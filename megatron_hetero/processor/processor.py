"""From records to tokens and patches, with a model's own tokenizer and image processor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hetero.config.schema import EncoderConfig
from megatron_hetero.data import chat, pictures
from megatron_hetero.data.items import Size
from megatron_hetero.data.records import Record
from megatron_hetero.data.sample import TokenizedSample
from megatron_hetero.errors import UserError
from megatron_hetero.models.family import Family, ItemReader
from megatron_hetero.models.folders import VISION_FOLDER, ModelFolders, read_config
from megatron_hetero.models.registry import family_of
from megatron_hetero.names import VISION
from megatron_hetero.processor import folder as model_folder
from megatron_hetero.processor.two_folders import open_tokenizer, with_token_ids

# Boxes and object names are content, though the tokenizer lists their marks as special: grounding data uses them.
_CONTENT_MARKS = re.compile(r"<\|(object_ref|box|quad)_(start|end)\|>")


@dataclass(frozen=True, eq=False)
class Processor:
    """The tokenizer of a model's folder, and the image reader of each encoder. Holds no open files and can be pickled.

    `model_type`: from the model's configuration. `readers`: by encoder. `shown`: the text that stands for an image of
    each encoder other than `vision`.
    """

    tokenizer: Any
    model_type: str
    readers: Mapping[str, ItemReader]
    shown: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_folder(
        cls,
        hf_path: Path,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_image_pixels: int = pictures.MAX_IMAGE_PIXELS,
        encoders: Mapping[str, EncoderConfig] | None = None,
        hf_path_vision: Path | None = None,
    ) -> Processor:
        """Loads tokenizer and image processors. Nothing is downloaded and no code of the folders runs.

        Args:
            hf_path: a model folder in `transformers` format.
            min_pixels: smallest area of a resized image in pixels; None takes the folder's.
            max_pixels: largest area of a resized image in pixels; None takes the folder's.
            max_image_pixels: pictures with more pixels than this are refused before decoding.
            encoders: encoders in addition to the folder's own `vision`.
            hf_path_vision: a folder of the family that provides `vision` instead; `hf_path` then provides the tokenizer
                only, see `ModelFolders`.

        Raises:
            UserError: a file is missing or broken, or the files do not belong together.
        """
        path = Path(hf_path)
        config, tokenizer = _open_text(path, hf_path_vision)
        _check_special_tokens(path, tokenizer, config)
        model_folder.check_vocabulary(path, tokenizer, config.text_config.vocab_size)
        limits = min_pixels, max_pixels, max_image_pixels
        source, setting = (path, "model.hf_path") if hf_path_vision is None else (hf_path_vision, VISION_FOLDER)
        own = family_of(config.model_type)
        readers = {VISION: _open_reader(source, getattr(config, own.shown[own.modality].row), *limits, setting)}
        for name, source in (encoders or {}).items():
            taken = {reader.token_id: f"stands for images of {other}" for other, reader in readers.items()}
            number = _token_of(name, source.token, tokenizer, taken, config)
            areas = source.min_pixels, source.max_pixels, max_image_pixels
            readers[name] = _open_reader(source.hf_path, number, *areas, f"model.encoders.{name}.hf_path")
        start, end = _around(own)
        shown = {name: f"{start}{source.token}{end}" for name, source in (encoders or {}).items()}
        return cls(tokenizer, config.model_type, readers, shown)

    @cached_property
    def row_tokens(self) -> np.ndarray:
        """The placeholder token of each encoder, int64 [encoders]."""
        return np.array([reader.token_id for reader in self.readers.values()], np.int64)

    def tokenize(self, record: Record) -> TokenizedSample:
        """Tokenizes a record. Only the headers of its images are read.

        Text is tokenized in pieces of equal supervision, so that no token is half supervised: a line break at the start
        of an answer would otherwise merge with the one at the end of the prompt.

        Raises:
            UserError: too much text, special tokens in it, a missing or oversized image, or an unsuitable chat
            template.
        """
        record.require_readable()
        self._refuse_special_tokens(record)
        sizes = tuple(self.size(record, k) for k in range(len(record.images)))
        short_ids, short_supervised = self._encode(record)
        is_image = np.isin(short_ids, self.row_tokens)
        wanted = np.array([self.readers[name].token_id for name in record.encoders], np.int64)
        if not np.array_equal(short_ids[is_image], wanted):
            raise UserError.at(
                f"{record.where}: chat template of model.hf_path",
                found=f"{is_image.sum()} image tokens in the rendered text",
                expected=f"{len(sizes)}, one for each image, in the order of the images",
                fix="use the chat template of the published model",
            )
        places = [self.readers[name].places(size) for name, size in zip(record.encoders, sizes, strict=True)]
        repeats = np.ones(len(short_ids), dtype=np.int64)
        repeats[is_image] = rows = np.array([of_image.shape[1] for of_image in places], np.int64)
        starts = (repeats.cumsum() - repeats)[is_image]
        input_ids = short_ids.repeat(repeats)
        return TokenizedSample(
            input_ids=input_ids,
            supervised=short_supervised.repeat(repeats),
            sizes=sizes,
            position_ids=family_of(self.model_type).positions(len(input_ids), starts, places),
            image_positions=np.flatnonzero(np.isin(input_ids, self.row_tokens)),
            rows=rows,
            record=record,
        )

    def _encode(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and supervision with one token per image."""
        ids: list[int] = []
        supervised: list[bool] = []
        for rendered in chat.render(self.tokenizer, record, self.shown):
            with model_folder.panics_as_errors(record.where):
                tokens = self.tokenizer(rendered.text, add_special_tokens=False, verbose=False)["input_ids"]
            ids += tokens
            supervised += [rendered.supervised] * len(tokens)
        return np.array(ids, dtype=np.int64), np.array(supervised, dtype=bool)

    def size(self, record: Record, k: int) -> Size:
        """The size of image ``k``, of the type of its encoder's family, from its header."""
        return self.readers[record.encoders[k]].size(record, k)

    def patches(self, record: Record, k: int, size: Size) -> np.ndarray:
        """The patches of an image as its encoder takes them, see `ItemReader.patches`."""
        return self.readers[record.encoders[k]].patches(record, k, size)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        """Matches what the tokenizer would take as control tokens inside a record's text."""
        added = self.tokenizer.added_tokens_decoder
        control = {str(token) for key, token in added.items() if token.special or key in self.row_tokens}
        tokens = sorted(token for token in control if not _CONTENT_MARKS.fullmatch(token))
        return re.compile("|".join(map(re.escape, tokens)))

    def _refuse_special_tokens(self, record: Record) -> None:
        for k, turn in enumerate(record.turns):
            if match := self._special_tokens.search(turn.text):
                raise UserError.at(
                    f"{record.where}: field 'conversations[{k}]'",
                    problem=f"special token {match[0]} in the text",
                    because="it would be read as the structure of the conversation or of an image",
                    fix="remove it; write images as <image>",
                )


def _open_reader(
    folder: Path, token_id: int, min_pixels: int | None, max_pixels: int | None, max_image_pixels: int, setting: str
) -> ItemReader:
    """The reader of the encoder of the folder that `setting` names, see `Processor.from_folder`. Raises `UserError`."""
    config = read_config(folder, setting)
    family = family_of(config.model_type)
    image_processor = model_folder.load_image_processor(folder, family, min_pixels, max_pixels, setting)
    model_folder.check_agreement(folder, config, image_processor, setting)
    return family.reader(image_processor, token_id, max_image_pixels)


def _open_text(path: Path, hf_path_vision: Path | None) -> tuple[Any, Any]:
    """Configuration and tokenizer of the folders. Raises `UserError`."""
    if hf_path_vision is None:
        model_folder.check_folder(path)
        return read_config(path, "model.hf_path"), model_folder.load_tokenizer(path)
    model_folder.check_folder(path, model_folder.TEXT_FILES)
    model_folder.check_folder(hf_path_vision, model_folder.VISION_FILES, VISION_FOLDER)
    folders = ModelFolders.read(path, hf_path_vision)
    tokenizer = open_tokenizer(folders)
    return with_token_ids(folders, tokenizer), tokenizer


def _around(family: Family) -> tuple[str, str]:
    """The tokens before and after an item."""
    shown = family.shown[family.modality]
    return family.tokens[shown.start], family.tokens[shown.end]


def _token_of(name: str, token: str, tokenizer: Any, taken: Mapping[int, str], config: Any) -> int:
    """The id of an additional encoder's placeholder token. `taken`: tokens in use; `config`: of the model."""
    rows = config.text_config.vocab_size
    number = tokenizer.get_vocab().get(token)
    structure = tokenizer.convert_tokens_to_ids(
        [*_around(family_of(config.model_type)), "<|im_start|>", chat.END_OF_TURN]
    )
    used = {**dict.fromkeys([*structure, tokenizer.eos_token_id], "marks the structure of conversations"), **taken}
    if number is None:
        what = "is not in the tokenizer of model.hf_path"
    elif number in used or _CONTENT_MARKS.fullmatch(token):
        what = used.get(number, "marks boxes and objects")
    elif number not in tokenizer.added_tokens_decoder:
        what = "is not an added token"
    elif number >= rows:
        what = f"has id {number}, beyond the {rows} rows of the embedding"
    else:
        return number
    raise UserError.at(
        f"model.encoders.{name}.token",
        problem=f"{token!r} {what}",
        because=f"it must mark the rows of encoder {name} and nothing else",
        fix="try '<|video_pad|>', which published models have and this program does not use",
    )


def _check_special_tokens(path: Path, tokenizer: Any, config: Any) -> None:
    """Check that the ids of special tokens agree: the chat template writes them by name, the model knows them by id."""
    family = family_of(config.model_type)
    shown = family.shown[family.modality]
    wanted = {family.tokens[name]: getattr(config, name) for name in (shown.row, shown.start)}
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
