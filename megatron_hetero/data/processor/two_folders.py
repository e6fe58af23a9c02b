"""The tokenizer of a model whose language model has a folder of its own, and its export's files other than weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from megatron_hetero.data.processor.folder import load_tokenizer
from megatron_hetero.errors import UserError
from megatron_hetero.hf.folder_files import PROCESSOR_FILES
from megatron_hetero.models.folders import ModelFolders

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
