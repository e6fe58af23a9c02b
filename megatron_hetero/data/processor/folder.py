"""The data side of a `transformers` folder: its files and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hetero.errors import UserError, in_short
from megatron_hetero.files.json_objects import MOST_BYTES, Only, check, read_object
from megatron_hetero.files.opening import is_unfit
from megatron_hetero.hf.folder_files import COMPANIONS
from megatron_hetero.models.registry import titles
from megatron_hetero.outputs.checkpoints import advice_to_export

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
            content = read_object(file, MOST_TOKENIZER_BYTES if file.name == TOKENIZER else MOST_BYTES)
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
