"""What the folders of a model hold besides weights, as hashes: whether it is the same model."""

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
"""By setting, such as `model.hf_path`, and the name of a file in that folder: its SHA-256."""
_WITHOUT_MEANING = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"})
"""What `config.json` says of the weights' type, of who wrote it and of generation. Training has settings of its own."""


def hashes(sources: ModelSources) -> Hashes:
    """Those of all files that decide what is trained, where they are there: configuration, tokenizer and processor; of
    a further encoder, configuration and processor. Raises `UserError` for one that cannot be read.
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
            found=f"a file that cannot be read ({error})",
            expected="one of the model",
            because="checkpoints say which model they are of",
            fix="restore the folder",
        ) from None
    return hashlib.sha256(content).hexdigest()


def _meaning(config: Any) -> Any:
    """A configuration, and those in it, without what does not change the model."""
    if not isinstance(config, dict):
        return config
    return {name: _meaning(value) for name, value in config.items() if name not in _WITHOUT_MEANING}


def differences(old: Hashes, new: Hashes) -> Iterator[tuple[str, str, str]]:
    """Each file that is not the same: setting, name, and how the new one differs."""
    for setting in sorted(old.keys() | new.keys()):
        before, now = old.get(setting, {}), new.get(setting, {})
        for name in sorted(before.keys() | now.keys()):
            if name not in now:
                yield setting, name, "no such file"
            elif name not in before:
                yield setting, name, "a file that was not there"
            elif before[name] != now[name]:
                yield setting, name, "another content"


def alone(found: Hashes, name: str) -> Hashes:
    """The hashes of files of that `name`."""
    return {setting: {name: files[name]} for setting, files in found.items() if name in files}
