"""The data side of a `transformers` folder: its files and its tokenizer.

The tokenizer of a model whose language model has a folder of its own, and its export's files other than weights.

From records to tokens and patches, with a model's own tokenizer and readers.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_hetero.base.errors import VISION, UserError, in_short
from megatron_hetero.base.files import MOST_JSON_BYTES, Only, check, is_unfit, read_object
from megatron_hetero.base.outputs import advice_to_export
from megatron_hetero.config.schema import Config
from megatron_hetero.config.sections import EncoderConfig
from megatron_hetero.data import chat
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.records import Record
from megatron_hetero.data.validation import ItemField, item_fields
from megatron_hetero.hf.folders import COMPANIONS, PROCESSOR_FILES
from megatron_hetero.models.family import Family
from megatron_hetero.models.folders import VISION_FOLDER, ModelFolders, read_config
from megatron_hetero.models.items.types import Block, ItemReader, Piece, Size
from megatron_hetero.models.registry import family_of, titles

# `transformers` is imported where it is used: it imports torch, seconds that command-line help and checks of the
# configuration need not wait for.

TOKENIZER = "tokenizer.json"
MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_TEMPLATE = 2**18
"""Characters of a chat template. Published ones have some thousands."""
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
_FIX = "copy the complete folder of the model again, tokenizer and processor files included"

JSON_FILES = (
    *("config.json", "generation_config.json", TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", *IMAGE_FILES, "chat_template.json"),
)
"""JSON files that are read here or go into an export."""
_IMAGES = {"do_resize": Only((True,), because="the number of image tokens follows from the resized picture")}
_ONLY: Mapping[str, Mapping[str, Only]] = {
    "tokenizer_config.json": {
        "split_special_tokens": Only((False, None), because="the image placeholder is one token")
    },
    **dict.fromkeys(IMAGE_FILES, _IMAGES),
}
"""Values that `transformers` accepts and training cannot use, by file."""

Needed = tuple[tuple[str, ...], ...]
TEXT_FILES: Needed = (("config.json",), ("tokenizer.json", "vocab.json"))
VISION_FILES: Needed = (("config.json",), IMAGE_FILES)


def check_folder(path: Path, needed: Needed = TEXT_FILES + VISION_FILES, setting: str = "model.hf_path") -> None:
    """Raises UserError unless the folder that `setting` names has the files that the loaders below need (one of each
    entry of `needed`), with valid content.
    """
    if not path.is_dir():
        raise UserError.at(
            f"{setting}: {path}",
            found="a file" if path.is_file() else "no such folder",
            expected=f"a {titles()} folder in transformers format",
            fix="correct the path; models are not downloaded: fetch one first with `hf download MODEL --local-dir DIR`",
        )
    for name in COMPANIONS:
        # `transformers` would silently ignore what is not a file, and read one of any size.
        if unfit := is_unfit(path / name):
            raise UserError.at(path / name, found=unfit, expected=f"a file of {setting}", fix=_FIX)
    for names in needed:
        if not any((path / name).is_file() for name in names):
            raise UserError.at(
                path / names[0],
                found="no such file",
                expected=" or ".join(names) + f" in the folder {setting}",
                fix=advice_to_export(path) or _FIX,
            )
    check_files(path)


def check_files(path: Path, names: Iterable[str] = JSON_FILES) -> None:
    """Check the folder's JSON files among `names`. Raises `UserError`."""
    for file in (path / name for name in names):
        if file.is_file():
            content = read_object(file, MOST_TOKENIZER_BYTES if file.name == TOKENIZER else MOST_JSON_BYTES)
            check(file, content, _ONLY.get(file.name, {}))


@contextmanager
def as_user_errors(path: Path, what: str, setting: str = "model.hf_path") -> Iterator[None]:
    """`transformers` raises OSError, ValueError, KeyError, ..."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError.at(
            f"{setting}: {path}",
            found=f"{what} that does not load ({in_short(error)})",
            expected=f"{what} of {titles()} in transformers format, without remote code",
            fix=_FIX,
        ) from error


def load_tokenizer(path: Path, template: str | None = None) -> Any:
    """The tokenizer, with the chat template that older folders keep in chat_template.json, or with another
    `template`.
    """
    from transformers import AutoTokenizer

    with as_user_errors(path, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, **_LOCAL)
        tokenizer.chat_template = template or tokenizer.chat_template
        legacy = path / "chat_template.json"
        if tokenizer.chat_template is None and legacy.is_file():
            tokenizer.chat_template = json.loads(legacy.read_text("utf-8"))["chat_template"]
        # Broken settings are reported now, not at some record.
        np.array(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    if tokenizer.chat_template is None:
        raise UserError.at(
            f"model.hf_path: {path}",
            problem="no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json)",
            fix="use the folder of an instruct model, or add its template",
        )
    if (length := len(str(tokenizer.chat_template))) > MOST_TEMPLATE:
        raise UserError.at(
            f"model.hf_path: {path}",
            found=f"a chat template of {length} characters",
            expected=f"at most {MOST_TEMPLATE}",
            fix=_FIX,
        )
    return tokenizer


def check_vocabulary(path: Path, tokenizer: Any, rows: int) -> None:
    """Check that the embedding has a row for every token of the tokenizer, which may have fewer tokens than `rows`.
    Raises `UserError`.
    """
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if beyond:
        shown = ", ".join(f"{token!r} ({number})" for number, token in beyond[:5])
        more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
        raise UserError.at(
            f"model.hf_path: {path}",
            found=f"tokens beyond the embedding: {shown}{more}",
            expected=f"ids below {rows}, vocab_size in config.json",
            because="these tokens have no weights",
            fix="add rows with transformers, `model.resize_token_embeddings("
            f"{beyond[-1][0] + 1})`, and save model and tokenizer together; or remove the tokens from the tokenizer",
        )


TEMPLATE, LEGACY_TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"


def open_tokenizer(folders: ModelFolders) -> Any:
    """The tokenizer of the language model's folder; if that has a language model only, with the chat template of the
    vision folder, which supports images. Raises `UserError`.
    """
    if not folders.text_alone:
        return load_tokenizer(folders.text)
    return load_tokenizer(folders.text, template=load_tokenizer(folders.vision).chat_template)


def with_token_ids(folders: ModelFolders, tokenizer: Any) -> Any:
    """The model's configuration with the ids of the tokens that show items.

    Raises:
        UserError: the tokenizer of a language model has none, or the embedding has no rows for them.
    """
    config = copy.deepcopy(folders.config)
    if folders.text_alone:
        vocabulary, rows = tokenizer.get_vocab(), config.text_config.vocab_size
        for name, token in folders.family.tokens.items():
            number = vocabulary.get(token)
            if number is None or number >= rows:
                raise _no_token(folders, token, number, rows)
            setattr(config, name, number)
    return config


def _no_token(folders: ModelFolders, token: str, number: int | None, rows: int) -> UserError:
    found = f"no token {token} in the tokenizer" if number is None else f"token {token} with id {number}"
    tokens = ", ".join(f'"{token}"' for token in folders.family.tokens.values())
    return UserError.at(
        f"model.hf_path: {folders.text}",
        found=found,
        expected=f"an added token with an id below {rows}, the rows of the embedding",
        because="it marks images in the text",
        fix=f"add them with `tokenizer.add_tokens([{tokens}], special_tokens=True)` and "
        "`model.resize_token_embeddings(len(tokenizer))` of transformers, and save both",
    )


def export_changes(folders: ModelFolders) -> dict[str, str | None]:
    """Files of an export that differ from the language model's folder: by name the new text, or None to omit the file.
    Empty if there is one folder.
    """
    if folders.text == folders.vision:
        return {}
    tokenizer = open_tokenizer(folders)
    changes: dict[str, str | None] = {
        name: path.read_text(encoding="utf-8") if (path := folders.vision / name).is_file() else None
        for name in PROCESSOR_FILES
    }
    changes["config.json"] = with_token_ids(folders, tokenizer).to_json_string()
    return changes | _template_changes(folders.text, tokenizer.chat_template) if folders.text_alone else changes


def _template_changes(folder: Path, template: str) -> dict[str, str | None]:
    changes: dict[str, str | None] = {TEMPLATE: template, LEGACY_TEMPLATE: None}
    if (folder / TOKENIZER_CONFIG).is_file():
        settings = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        settings.pop("chat_template", None)
        changes[TOKENIZER_CONFIG] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return changes


# Boxes and object names are content, though the tokenizer lists their marks as special: grounding data uses them.
_CONTENT_MARKS = re.compile(r"<\|(object_ref|box|quad)_(start|end)\|>")


class _Tokens(NamedTuple):
    """All tokens, how many each token became that was there before, and the blocks of each item."""

    ids: np.ndarray
    repeats: np.ndarray
    blocks: list[Sequence[Block]]


@dataclass(frozen=True, eq=False)
class Processor:
    """The tokenizer of a model's folder, and the readers of its encoders. Holds no open files and can be pickled.

    `model_type`: from the model's configuration. `readers`: by the field of a record that items are in. `shown`: what
    stands for them in messages.
    """

    tokenizer: Any
    model_type: str
    readers: Mapping[ItemField, ItemReader]
    shown: chat.Parts

    @classmethod
    def from_folder(
        cls,
        hf_path: Path,
        section: Any = None,
        encoders: Mapping[str, EncoderConfig] | None = None,
        hf_path_vision: Path | None = None,
    ) -> Processor:
        """Loads tokenizer and readers. Nothing is downloaded and no code of the folders runs.

        Args:
            hf_path: a model folder in `transformers` format.
            section: how items of the folder's own `vision` are read, see `ItemType.open`; None: as the folder says.
            encoders: encoders in addition to it.
            hf_path_vision: a folder of the family that provides `vision` instead; `hf_path` then provides the tokenizer
                only, see `ModelFolders`.

        Raises:
            UserError: a file is missing or broken, or the files do not belong together.
        """
        path = Path(hf_path)
        config, tokenizer = _open_text(path, hf_path_vision)
        _check_special_tokens(path, tokenizer, config)
        check_vocabulary(path, tokenizer, config.text_config.vocab_size)
        own = family_of(config.model_type)
        source, setting = (path, "model.hf_path") if hf_path_vision is None else (hf_path_vision, VISION_FOLDER)
        tokens = [getattr(config, each.tokens.row) for each in own.items]
        readers = _open_readers(VISION, source, tokens, section, setting)
        shown = {field: {"type": str(field.modality)} for field in readers}
        start, end = _around(own)
        for name, further in (encoders or {}).items():
            taken = {reader.token_id: f"stands for images of {field.encoder}" for field, reader in readers.items()}
            number = _token_of(name, further.token, tokenizer, taken, config)
            opened = _open_readers(name, further.hf_path, [number], further, f"model.encoders.{name}.hf_path")
            readers |= opened
            # Chat templates do not know it.
            shown |= {field: {"type": "text", "text": f"{start}{further.token}{end}"} for field in opened}
        return cls(tokenizer, config.model_type, readers, shown)

    @property
    def fields(self) -> tuple[ItemField, ...]:
        """The fields of records that items may be in."""
        return tuple(self.readers)

    @cached_property
    def row_tokens(self) -> np.ndarray:
        """The tokens that stand for rows, int64."""
        return np.unique([reader.token_id for reader in self.readers.values()]).astype(np.int64)

    def tokenize(self, record: Record) -> TokenizedSample:
        """Tokenizes a record. Only the headers of its items are read.

        Text is tokenized in pieces of equal supervision, so that no token is half supervised: a line break at the start
        of an answer would otherwise merge with the one at the end of the prompt.

        Raises:
            UserError: too much text, special tokens in it, a missing or oversized item, or an unsuitable chat
            template.
        """
        record.require_readable()
        self._refuse_special_tokens(record)
        sizes = self._sizes(record, len(record.items))
        short_ids, supervised = self._encode(record)
        fix = "one for each image, in the order of the images", "use the chat template of the published model"
        tokens = self._expanded(record, sizes, short_ids, "chat template of model.hf_path", "text", *fix)
        places = [block.places for of_item in tokens.blocks for block in of_item]
        rows = np.array([block.shape[1] for block in places], np.int64)
        row_positions = np.flatnonzero(np.isin(tokens.ids, self.row_tokens))
        starts = row_positions[np.cumsum(rows) - rows]
        return TokenizedSample(
            input_ids=tokens.ids,
            supervised=supervised.repeat(tokens.repeats),
            sizes=sizes,
            pieces=tuple(reader.pieces(size) for reader, size in zip(self._readers(record), sizes, strict=True)),
            position_ids=family_of(self.model_type).positions(len(tokens.ids), starts, places),
            row_positions=row_positions,
            rows=np.array([sum(block.places.shape[1] for block in of_item) for of_item in tokens.blocks], np.int64),
            record=record,
        )

    def prompt(self, record: Record, turns: int, shown: int) -> tuple[np.ndarray, tuple[Size, ...]]:
        """The first `turns` of a record as tokens, with the generation prompt, and the sizes of the items in them, of
        which there are `shown`. Raises `UserError`.
        """
        record.require_readable()
        short_ids = self._tokens_of(chat.render_prompt(self.tokenizer, record, turns, self.shown))
        sizes = self._sizes(record, shown)
        fix = "one for each image", "use the chat template of the instruct model"
        return self._expanded(record, sizes, short_ids, "chat template of the model", "question", *fix).ids, sizes

    def _readers(self, record: Record) -> list[ItemReader]:
        """The reader of each item."""
        return [self.readers[ref.field] for ref in record.items]

    def _sizes(self, record: Record, count: int) -> tuple[Size, ...]:
        """The sizes of the first items."""
        return tuple(reader.size(record.item(k)) for k, reader in enumerate(self._readers(record)[:count]))

    def _expanded(
        self, record: Record, sizes: Sequence[Size], short_ids: np.ndarray, where: str, what: str, each: str, fix: str
    ) -> _Tokens:
        """Tokens that have one token for each item, as many as there are `sizes`, with all that show it. The last four
        arguments are for messages.
        """
        readers = self._readers(record)[: len(sizes)]
        is_item = np.isin(short_ids, self.row_tokens)
        if not np.array_equal(short_ids[is_item], [reader.token_id for reader in readers]):
            raise UserError.at(
                f"{record.where}: {where}",
                found=f"{is_item.sum()} image tokens in the rendered {what}",
                expected=f"{len(sizes)}, {each}",
                fix=fix,
            )
        blocks = [reader.blocks(size) for reader, size in zip(readers, sizes, strict=True)]
        shown = [self._shown(reader.token_id, of_item) for reader, of_item in zip(readers, blocks, strict=True)]
        repeats = np.ones(len(short_ids), dtype=np.int64)
        repeats[is_item] = [len(tokens) for tokens in shown]
        ids = short_ids.repeat(repeats)
        ids[is_item.repeat(repeats)] = np.concatenate([np.zeros(0, np.int64), *shown])
        return _Tokens(ids, repeats, blocks)

    def _shown(self, token_id: int, blocks: Sequence[Block]) -> np.ndarray:
        """The tokens that show the blocks of an item, in place of the one that stands for it."""
        parts = [
            part
            for block in blocks
            for part in (
                self._tokens_of(block.before),
                np.full(block.places.shape[1], token_id),
                self._tokens_of(block.after),
            )
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _tokens_of(self, text: str) -> np.ndarray:
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
        return np.array(tokens, dtype=np.int64)

    def _encode(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and supervision with one token per item."""
        ids, supervised = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
        for rendered in chat.render(self.tokenizer, record, self.shown):
            tokens = self._tokens_of(rendered.text)
            ids.append(tokens)
            supervised.append(np.full(len(tokens), rendered.supervised))
        return np.concatenate(ids), np.concatenate(supervised)

    def patches(self, record: Record, k: int, pieces: Sequence[Piece]) -> np.ndarray:
        """Some pieces of item ``k`` as its encoder takes them, see `ItemReader.patches`."""
        return self.readers[record.items[k].field].patches(record.item(k), pieces)

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


def open_processor(config: Config) -> Processor:
    """The tokenizer of `model.hf_path` and the readers of each encoder. Raises `UserError`."""
    model = config.model
    return Processor.from_folder(model.hf_path, config.data, model.encoders, model.hf_path_vision)


def _open_readers(
    encoder: str, folder: Path, tokens: Sequence[int], section: Any, setting: str
) -> dict[ItemField, ItemReader]:
    """The readers of an encoder's first types, of the folder that `setting` names. `tokens`: what stands for a row of
    each of these. Raises `UserError`.
    """
    config = read_config(folder, setting)
    types = family_of(config.model_type).items[: len(tokens)]
    check_files(folder, IMAGE_FILES)
    readers = []
    for each, token_id in zip(types, tokens, strict=True):
        with as_user_errors(folder, each.processor, setting):
            readers.append(each.open(folder, config, section, setting, token_id))
    return dict(zip(item_fields({encoder: [each.modality for each in types]}), readers, strict=True))


def _open_text(path: Path, hf_path_vision: Path | None) -> tuple[Any, Any]:
    """Configuration and tokenizer of the folders. Raises `UserError`."""
    if hf_path_vision is None:
        check_folder(path)
        return read_config(path, "model.hf_path"), load_tokenizer(path)
    check_folder(path, TEXT_FILES)
    check_folder(hf_path_vision, VISION_FILES, VISION_FOLDER)
    folders = ModelFolders.read(path, hf_path_vision)
    tokenizer = open_tokenizer(folders)
    return with_token_ids(folders, tokenizer), tokenizer


def _around(family: Family) -> tuple[str, str]:
    """The tokens before and after an item."""
    tokens = family.items[0].tokens
    return family.tokens[tokens.start], family.tokens[tokens.end]


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
    names = [name for each in family.items for name in (each.tokens.row, each.tokens.start)]
    wanted = {family.tokens[name]: getattr(config, name) for name in names}
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
