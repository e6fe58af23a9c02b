"""Converts records to tokens and patches with the tokenizer and item readers of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hetero.base.errors import UserError, blaming
from megatron_hetero.base.worker_process import Processes
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.schema import Config
from megatron_hetero.data import chat
from megatron_hetero.data.item_fields import ItemField
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.records import Record
from megatron_hetero.data.tokenizer import (
    IMAGE_FILES,
    TEXT_FILES,
    VISION_FILES,
    as_user_errors,
    check_files,
    check_folder,
    check_vocabulary,
    load_tokenizer,
    open_tokenizer,
    with_token_ids,
)
from megatron_hetero.data.validation import item_fields
from megatron_hetero.models.family import Family
from megatron_hetero.models.folders import VISION_FOLDER, ModelFolders, read_config
from megatron_hetero.models.items.types import ItemReader, ItemType, Piece, RowBlock, Size
from megatron_hetero.models.registry import family_of

# Tokens that mark boxes and object names in answers of grounding data.
_CONTENT_MARKS = re.compile(r"<\|(object_ref|box|quad)_(start|end)\|>")


@dataclass(frozen=True, eq=False)
class Processor:
    """The tokenizer of a model's folder and the item readers of its encoders. It can be pickled: it has no open files.

    `model_type`: type in the model's configuration. `readers`: item readers by field of records. `shown`: chat message
    entries that stand for items, by field. `last_only`: whether only the last answer of each record is supervised.
    """

    tokenizer: Any
    model_type: str
    readers: Mapping[ItemField, ItemReader]
    shown: chat.Entries
    last_only: bool = False

    @classmethod
    def from_folder(
        cls,
        hf_path: Path,
        section: Any = None,
        encoders: Mapping[str, ModuleConfig] | None = None,
        hf_path_vision: Path | None = None,
    ) -> Processor:
        """Load the tokenizer and item readers. Nothing is downloaded, and no code in the folders is run.

        Args:
            hf_path: a model folder in `transformers` format.
            section: settings for items of the encoders in the model folder, see `ItemType.open`; None: the folder's
                settings.
            encoders: further encoders by name.
            hf_path_vision: a model folder that provides the family's encoders instead; `hf_path` then provides the
                tokenizer only, see `ModelFolders`.

        Raises:
            UserError: a file is missing or broken, or the files do not belong together.
        """
        path = Path(hf_path)
        config, tokenizer = _open_text(path, hf_path_vision)
        _check_special_tokens(path, tokenizer, config)
        check_vocabulary(path, tokenizer, config.text_config.vocab_size)
        family = family_of(config.model_type)
        source, setting = (path, "model.hf_path") if hf_path_vision is None else (hf_path_vision, VISION_FOLDER)
        # A further encoder whose placeholder is the token of an item type replaces this type.
        claimed = {further.token for further in (encoders or {}).values()}
        readers, source_config = dict[ItemField, ItemReader](), read_config(source, setting)
        for name, types in family.encoders.items():
            used = [each for each in types if each is types[0] or family.tokens[each.tokens.row] not in claimed]
            fields = item_fields({name: [each.modality for each in used]})
            tokens = [getattr(config, each.tokens.row) for each in used]
            readers |= _open_readers(fields, used, source, source_config, tokens, section, setting)
        entries = {each.modality: each.chat_entry(section, family.tokens[each.tokens.row]) for each in family.items}
        shown = {field: entries[field.modality] for field in readers}
        start, end = _around(family)
        for name, further in (encoders or {}).items():
            taken = {reader.token_id: f"stands for images of {field.encoder}" for field, reader in readers.items()}
            assert further.hf_path is not None and further.token is not None, "a further encoder has both"
            number = _token_of(name, further.token, tokenizer, taken, config)
            setting = f"modules.{name}.hf_path"
            further_config = read_config(further.hf_path, setting)
            types = family_of(further_config.model_type).items[:1]
            fields = item_fields({}, {name: [types[0].modality]})
            opened = _open_readers(fields, types, further.hf_path, further_config, [number], further, setting)
            readers |= opened
            # Chat templates do not know further encoders, so their items are rendered as text.
            shown |= {field: {"type": "text", "text": f"{start}{further.token}{end}"} for field in opened}
        return cls(tokenizer, config.model_type, readers, shown)

    @property
    def fields(self) -> tuple[ItemField, ...]:
        """Item fields of records."""
        return tuple(self.readers)

    @property
    def advice(self) -> str | None:
        """A warning about the chat template, or None if there is nothing to warn about."""
        if self.last_only or not chat.drops_thoughts(self.tokenizer):
            return None
        return (
            "the chat template of model.hf_path drops the thoughts of answers before the last question, which are then "
            "trained on without; --data.supervised_turns last trains on the last answer of each record only"
        )

    @cached_property
    def row_tokens(self) -> np.ndarray:
        """Ids of the tokens that stand for rows of items, int64."""
        return np.unique([reader.token_id for reader in self.readers.values()]).astype(np.int64)

    def tokenize(self, record: Record) -> TokenizedSample:
        """Tokenize a record. Only the headers of its items are read.

        Supervised and other text are tokenized separately, so that no token has both: a line break at the start of an
        answer would otherwise merge with the one at the end of the prompt.

        Raises:
            UserError: structural tokens in the text, a missing or oversized item, or an unsuitable chat template.
        """
        with blaming(record.dataset, record.index, record.where, "text"):
            return self._tokenized(record)

    def _tokenized(self, record: Record) -> TokenizedSample:
        self._refuse_special_tokens(record)
        readers = [self.readers[ref.field] for ref in record.items]
        sizes = tuple(self._size(record, k) for k in range(len(readers)))
        short_ids, supervised = self._encode(record)
        is_item = np.isin(short_ids, self.row_tokens)
        if not np.array_equal(short_ids[is_item], [reader.token_id for reader in readers]):
            raise UserError.at(
                f"{record.where}: chat template of model.hf_path",
                found=f"{is_item.sum()} tokens of images and videos in the rendered text",
                expected=f"{len(sizes)}, one for each, in their order",
                fix="use the chat template of the published model",
            )
        item_blocks = [reader.blocks(size) for reader, size in zip(readers, sizes, strict=True)]
        shown = [self._shown(reader.token_id, blocks) for reader, blocks in zip(readers, item_blocks, strict=True)]
        repeats = np.ones(len(short_ids), dtype=np.int64)
        repeats[is_item] = [len(tokens) for tokens in shown]
        ids = short_ids.repeat(repeats)
        ids[is_item.repeat(repeats)] = np.concatenate([np.zeros(0, np.int64), *shown])
        blocks = [block for each in item_blocks for block in each]
        rows = np.array([block.places.shape[1] for block in blocks], np.int64)
        row_positions = np.flatnonzero(np.isin(ids, self.row_tokens))
        starts = row_positions[np.cumsum(rows) - rows]
        return TokenizedSample(
            input_ids=ids,
            supervised=supervised.repeat(repeats),
            sizes=sizes,
            pieces=tuple(reader.pieces(size) for reader, size in zip(readers, sizes, strict=True)),
            position_ids=family_of(self.model_type).positions(len(ids), starts, blocks),
            row_positions=row_positions,
            rows=np.array([sum(block.places.shape[1] for block in each) for each in item_blocks], np.int64),
            record=record,
        )

    def _shown(self, token_id: int, blocks: Sequence[RowBlock]) -> np.ndarray:
        """Return the tokens of an item with these blocks of rows."""
        tokens = [np.zeros(0, np.int64)]
        for block in blocks:
            tokens += [self._tokens_of(block.before), np.full(block.places.shape[1], token_id)]
            tokens.append(self._tokens_of(block.after))
        return np.concatenate(tokens)

    def _tokens_of(self, text: str) -> np.ndarray:
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return np.array(tokens, dtype=np.int64)

    def _encode(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of a record, with one token per item, and whether each token is supervised."""
        ids, supervised = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
        for rendered in chat.render(self.tokenizer, record, self.shown, last_only=self.last_only):
            if rendered.supervised and (inside := self._structure.search(rendered.text[:-1])):  # Skips the final token.
                raise UserError.at(
                    f"{record.where}: chat template of model.hf_path",
                    found=f"{inside[0]} in what follows the generation prompt",
                    expected="the answer and its end alone",
                    fix="use the chat template of the published model, or let yours write all that is before an answer "
                    "if `add_generation_prompt` is given",
                )
            tokens = self._tokens_of(rendered.text)
            ids.append(tokens)
            supervised.append(np.full(len(tokens), rendered.supervised))
        return np.concatenate(ids), np.concatenate(supervised)

    def _size(self, record: Record, k: int) -> Size:
        field = record.items[k].field
        with blaming(record.dataset, record.index, record.where, f"{field.modality}_header"):
            return self.readers[field].size(record.item(k))

    def patches(self, record: Record, k: int, pieces: Sequence[Piece]) -> np.ndarray:
        """Return the patches of some pieces of item ``k``, see `ItemReader.patches`."""
        field = record.items[k].field
        with blaming(record.dataset, record.index, record.where, f"{field.modality}_data"):
            return self.readers[field].patches(record.item(k), pieces)

    @cached_property
    def _structure(self) -> re.Pattern[str]:
        """Pattern of the tokens that structure conversations and items: special tokens of the chat template, of the
        model's items and of the tokenizer. Other special tokens, which users add, are content.
        """
        tokenizer, family = self.tokenizer, family_of(self.model_type)
        added = tokenizer.added_tokens_decoder
        special = {str(token) for token in added.values() if token.special}
        reserved = {
            *family.tokens.values(),
            chat.END_OF_TURN,
            tokenizer.eos_token,
            tokenizer.pad_token,
            tokenizer.bos_token,
        }
        in_template = {token for token in special if token in str(tokenizer.chat_template)}
        items = {str(token) for key, token in added.items() if key in self.row_tokens}
        tokens = sorted(items | in_template | (special & reserved))
        return re.compile("|".join(map(re.escape, tokens)))

    def _refuse_special_tokens(self, record: Record) -> None:
        texts = {f"turn {k + 1}": turn.text for k, turn in enumerate(record.turns)}
        further = {f"turn {k + 1}": turn.further for k, turn in enumerate(record.turns) if turn.further}
        further |= {"field 'tools'": record.tools} if record.tools else {}
        texts |= {
            place: texts.get(place, "") + json.dumps(value, ensure_ascii=False) for place, value in further.items()
        }
        for place, text in texts.items():
            if match := self._structure.search(text):
                raise UserError.at(
                    f"{record.where}: {place}",
                    problem=f"special token {match[0]} in the text",
                    because="it would be read as the structure of the conversation or of an image",
                    fix="remove it; in questions write images as <image> and videos as <video>",
                )


class ReaderProcesses(Processes):
    """Tokenizes records and reads patches like a `Processor`, in worker processes."""

    def __init__(self, processor: Processor, count: int):
        super().__init__(processor, count, "data.worker_type process (--data.worker_type)")

    def tokenize(self, record: Record) -> TokenizedSample:
        """Tokenize a record in a worker process, see `Processor.tokenize`."""
        return self.call(record.where, "tokenize", record)

    def patches(self, record: Record, k: int, pieces: Sequence[Piece]) -> np.ndarray:
        """Return patches of item ``k``, read in a worker process, see `Processor.patches`."""
        return self.call(record.where, "patches", record, k, pieces)


def open_processor(config: Config) -> Processor:
    """Open the tokenizer of `model.hf_path` and the readers of each encoder. Raises `UserError`."""
    model = config.model
    processor = Processor.from_folder(model.hf_path, config.data, config.further, model.hf_path_vision)
    return replace(processor, last_only=config.data.supervised_turns == "last")


def _open_readers(
    fields: Sequence[ItemField],
    types: Sequence[ItemType],
    folder: Path,
    config: Any,
    tokens: Sequence[int],
    section: Any,
    setting: str,
) -> dict[ItemField, ItemReader]:
    """Open the readers of an encoder's item types from its `folder`, which the setting `setting` names. Returns readers
    by field. `tokens`: for each type, the token that stands for a row. Raises `UserError`.
    """
    check_files(folder, IMAGE_FILES)
    readers = []
    for each, token_id in zip(types, tokens, strict=True):
        with as_user_errors(folder, each.processor, setting):
            readers.append(each.open(folder, config, section, setting, token_id))
    return dict(zip(fields, readers, strict=True))


def _open_text(path: Path, hf_path_vision: Path | None) -> tuple[Any, Any]:
    """Return the model's configuration and tokenizer, read from the folders. Raises `UserError`."""
    if hf_path_vision is None:
        check_folder(path)
        return read_config(path, "model.hf_path"), load_tokenizer(path)
    check_folder(path, TEXT_FILES)
    check_folder(hf_path_vision, VISION_FILES, VISION_FOLDER)
    folders = ModelFolders.read(path, hf_path_vision, fresh_projector=True)  # The projector does not affect inputs.
    tokenizer = open_tokenizer(folders)
    return with_token_ids(folders, tokenizer), tokenizer


def _around(family: Family) -> tuple[str, str]:
    """Return the tokens before and after an item."""
    tokens = family.items[0].tokens
    return family.tokens[tokens.start], family.tokens[tokens.end]


def _token_of(name: str, token: str, tokenizer: Any, taken: Mapping[int, str], config: Any) -> int:
    """Return the id of a further encoder's placeholder token. `taken`: uses of tokens by token id. `config`: the
    model's configuration; its embedding has rows for all tokens (`check_vocabulary`). Raises `UserError`.
    """
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
    else:
        return number
    raise UserError.at(
        f"modules.{name}.token (--{name}-token)",
        problem=f"{token!r} {what}",
        because=f"it must mark the rows of encoder {name} and nothing else",
        fix="try '<|vision_pad|>', which published models have and do not use, or without videos '<|video_pad|>'",
    )


def _check_special_tokens(path: Path, tokenizer: Any, config: Any) -> None:
    """Check that tokenizer and configuration agree on the ids of special tokens. Raises `UserError`."""
    family = family_of(config.model_type)
    names = [name for each in family.items for name in (each.tokens.row, each.tokens.start)]
    wanted = {family.tokens[name]: getattr(config, name) for name in names}
    for token, number in {**wanted, chat.END_OF_TURN: None}.items():
        ids = tokenizer(token, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) != 1 or number not in (None, *ids):
            raise UserError.at(
                f"model.hf_path: {path}",
                found=f"token {token} with id {', '.join(map(str, ids))} in the tokenizer",
                expected=f"id {number}, as in config.json" if number is not None else "one token that ends turns",
                fix="copy config.json and the tokenizer files from the same model, without split_special_tokens",
            )
