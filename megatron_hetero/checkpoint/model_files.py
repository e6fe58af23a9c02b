"""Hashes of a model's files other than weights, which identify the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_hetero.checkpoint.model_sources import ModelSources
from megatron_hetero.errors import UserError
from megatron_hetero.files.opening import read_bytes
from megatron_hetero.hf.folder_files import CONFIG, PROCESSOR_FILES, TOKENIZER_FILES

Hashes = Mapping[str, Mapping[str, str]]
"""SHA-256 by setting, such as `model.hf_path`, and by file name in that folder."""
_WITHOUT_MEANING = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"})
"""Keys of `config.json` about dtype, origin and generation, for which training has settings of its own."""


def hashes(sources: ModelSources) -> Hashes:
    """Hashes of the existing files that define what is trained: configuration, tokenizer and processor; for an
    additional encoder, configuration and processor. Raises `UserError` if one cannot be read.
    """
    whole = (CONFIG, *TOKENIZER_FILES, *PROCESSOR_FILES)
    of_encoder = (CONFIG, *PROCESSOR_FILES)
    return {
        setting: _hashes(folder, of_encoder if setting.startswith("model.encoders.") else whole)
        for setting, folder in sources.folders.items()
    }


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: _hash(folder / name) for name in names if (folder / name).is_file()}


def _hash(path: Path) -> str:
    try:
        content = read_bytes(path)
        if path.name == CONFIG:
            content = json.dumps(_meaning(json.loads(content)), sort_keys=True).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError.at(
            path,
            problem=f"cannot be read ({error})",
            because="checkpoints record a hash of it",
            fix="restore the folder",
        ) from None
    return hashlib.sha256(content).hexdigest()


def _meaning(config: Any) -> Any:
    """A configuration, nested ones included, without the keys that do not change the model."""
    if not isinstance(config, dict):
        return config
    return {name: _meaning(value) for name, value in config.items() if name not in _WITHOUT_MEANING}


def differences(old: Hashes, new: Hashes) -> Iterator[tuple[str, str, str]]:
    """Each file that differs: setting, name, and removed, added or changed."""
    for setting in sorted(old.keys() | new.keys()):
        before, now = old.get(setting, {}), new.get(setting, {})
        for name in sorted(before.keys() | now.keys()):
            if name not in now:
                yield setting, name, "removed"
            elif name not in before:
                yield setting, name, "added"
            elif before[name] != now[name]:
                yield setting, name, "changed"


def alone(found: Hashes, name: str) -> Hashes:
    """The hashes of files of that `name`."""
    return {setting: {name: files[name]} for setting, files in found.items() if name in files}
