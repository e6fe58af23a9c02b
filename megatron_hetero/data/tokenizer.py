"""Checks, loading and export of the tokenizer and processor files in a model folder in `transformers` format.

`transformers` is imported where it is used: it imports torch, which takes seconds that command-line help and
configuration checks should not spend.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hetero.base.errors import UserError, in_short
from megatron_hetero.base.files import MAX_JSON_BYTES, is_unfit, read_object
from megatron_hetero.base.outputs import advice_to_export
from megatron_hetero.hf.model_files import COMPANIONS, NESTED, PROCESSOR_FILES, Changes, require_own_files
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.family import Family
from megatron_hetero.models.folders import ModelFolders, read_config
from megatron_hetero.models.registry import family_of, titles

TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 64 * 2**20
MAX_TEMPLATE = 2**18
"""Maximum characters of a chat template. Published templates have some thousands."""
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
_FIX = "copy the complete folder of the model again, tokenizer and processor files included"
JSON_FILES = tuple(name for name in COMPANIONS if name.endswith(".json") and name != "vocab.json")
"""JSON files that are read here or exported. `vocab.json` may be large, and only the tokenizer reads it."""

Needed = tuple[tuple[str, ...], ...]
TEXT_FILES: Needed = (("config.json",), ("tokenizer.json", "vocab.json"))
VISION_FILES: Needed = (("config.json",), IMAGE_FILES)


def check_folder(path: Path, needed: Needed = TEXT_FILES + VISION_FILES, setting: str = "model.hf_path") -> None:
    """Check that the folder named by `setting` has one file of each entry of `needed`, and that its files are valid.
    Raises `UserError`.
    """
    if not path.is_dir():
        raise UserError.at(
            f"{setting}: {path}",
            found="a file" if path.is_file() else "no such folder",
            expected=f"a {titles()} folder in transformers format",
            fix="correct the path; models are not downloaded: fetch one first with `hf download MODEL --local-dir DIR`",
        )
    for name in COMPANIONS:
        # `transformers` silently ignores anything that is not a file, and reads files of any size.
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
    """Check that the folder's files among `names` are JSON objects, and that no link leaves it. Raises `UserError`."""
    require_own_files(path)
    for file in (path / name for name in names):
        if file.is_file():
            read_object(file, MAX_TOKENIZER_BYTES if file.name == TOKENIZER else MAX_JSON_BYTES)


@contextmanager
def as_user_errors(path: Path, what: str, setting: str = "model.hf_path") -> Iterator[None]:
    """Convert any exception of `transformers` inside the context to a `UserError` about `what` in the folder."""
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
    """Load the folder's tokenizer with its chat template, which older folders store in chat_template.json, or with
    another `template`. Raises `UserError`.
    """
    from transformers import AutoTokenizer

    with as_user_errors(path, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, **_LOCAL)
        tokenizer.chat_template = template or tokenizer.chat_template
        legacy = path / "chat_template.json"
        if tokenizer.chat_template is None and legacy.is_file():
            tokenizer.chat_template = json.loads(legacy.read_text("utf-8"))["chat_template"]
        # Tokenize once, so that broken settings are reported now and not while records are read.
        np.array(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    if tokenizer.chat_template is None:
        raise UserError.at(
            f"model.hf_path: {path}",
            problem="no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json)",
            fix="use the folder of an instruct model, or add its template",
        )
    if (length := len(str(tokenizer.chat_template))) > MAX_TEMPLATE:
        found, expected = f"a chat template of {length} characters", f"at most {MAX_TEMPLATE}"
        raise UserError.at(f"model.hf_path: {path}", found=found, expected=expected, fix=_FIX)
    return tokenizer


def check_vocabulary(path: Path, tokenizer: Any, rows: int) -> None:
    """Check that all token ids are below `rows`, the rows of the embedding. Raises `UserError`."""
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


def open_tokenizer(folders: ModelFolders) -> Any:
    """Load the tokenizer of the language model's folder. If the folder has a language model only, use the chat template
    of the vision folder, which supports images. Raises `UserError`.
    """
    if not folders.text_alone:
        return load_tokenizer(folders.text)
    return load_tokenizer(folders.text, template=load_tokenizer(folders.vision).chat_template)


def with_token_ids(folders: ModelFolders, tokenizer: Any) -> Any:
    """Return the model's configuration with the ids of the tokens that mark items.

    Raises:
        UserError: a language model's tokenizer lacks these tokens, or the embedding has no rows for them.
    """
    config = copy.deepcopy(folders.config)
    if not folders.text_alone:
        return config
    vocabulary, rows = tokenizer.get_vocab(), config.text_config.vocab_size
    for name, token in folders.family.tokens.items():
        number = vocabulary.get(token)
        if number is None or number >= rows:
            tokens = ", ".join(f'"{token}"' for token in folders.family.tokens.values())
            raise UserError.at(
                f"model.hf_path: {folders.text}",
                found=f"no token {token} in the tokenizer" if number is None else f"token {token} with id {number}",
                expected=f"an added token with an id below {rows}, the rows of the embedding",
                because="it marks images in the text",
                fix=f"add them with `tokenizer.add_tokens([{tokens}], special_tokens=True)` and "
                "`model.resize_token_embeddings(len(tokenizer))` of transformers, and save both",
            )
        setattr(config, name, number)
    return config


def export_changes(folders: ModelFolders, config: Mapping[str, Any], encoders: Mapping[str, Path]) -> Changes:
    """Return the files of an export that differ from the files in the model folder (key `text`) and in the folder of
    each further encoder (key: its name). `config`: the run's configuration. `encoders`: folders of further encoders.
    """
    changes: dict[str, Mapping[str, str | None]] = {TEXT: _model_files(folders, config.get("data") or {})}
    for name, folder in encoders.items():
        family = family_of(read_config(folder, f"modules.{name}.hf_path").model_type)
        changes[name] = _processor_files(folder, family, config["modules"][name])
    return changes


def _processor_files(folder: Path, family: Family, section: Mapping[str, Any]) -> dict[str, str | None]:
    """Return processor files with the settings of a run's `section`, for all versions of transformers: older versions
    read other files first.
    """
    files: dict[str, Any] = {}
    nested = read_object(folder / NESTED) if (folder / NESTED).is_file() else {}
    for each in family.items:
        if settings := each.exported(folder, section):
            key, file, *_ = each.settings
            files[file] = settings
            if key in nested:
                files[NESTED] = nested = nested | {key: settings}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}


def _model_files(folders: ModelFolders, data: Mapping[str, Any]) -> dict[str, str | None]:
    settings = _processor_files(folders.vision, folders.family, data)
    if folders.text == folders.vision:
        return settings
    tokenizer = open_tokenizer(folders)
    changes: dict[str, str | None] = {
        name: path.read_text(encoding="utf-8") if (path := folders.vision / name).is_file() else None
        for name in PROCESSOR_FILES
    }
    changes["config.json"] = with_token_ids(folders, tokenizer).to_json_string()
    if folders.text_alone:
        changes |= {"chat_template.jinja": tokenizer.chat_template, "chat_template.json": None}
        stored = folders.text / "tokenizer_config.json"
        if stored.is_file():
            tokenizer_config = json.loads(stored.read_text(encoding="utf-8"))
            tokenizer_config.pop("chat_template", None)
            changes[stored.name] = json.dumps(tokenizer_config, indent=2, ensure_ascii=False) + "\n"
    return changes | settings
