"""Model folders, as recorded by a run or given on a command line, and hashes of their files other than weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_hetero.base.errors import VISION, UserError
from megatron_hetero.base.files import read_bytes
from megatron_hetero.config.sections import require_encoder_name
from megatron_hetero.data.processor import TEXT_FILES, VISION_FILES, check_folder
from megatron_hetero.hf.model_files import CONFIG, PROCESSOR_FILES, TOKENIZER_FILES
from megatron_hetero.models.folders import VISION_FOLDER, ModelFolders
from megatron_hetero.models.shapes import ModelShapes


@dataclass(frozen=True)
class ModelSources:
    """The settings of a run that define its model: `model.hf_path`, `model.hf_path_vision`, `model.fresh_projector`,
    and `hf_path` of each of `model.encoders`.
    """

    model: Path
    vision: Path | None = None
    fresh_projector: bool = False
    encoders: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.encoders:
            require_encoder_name(name, "encoders of the model")

    @classmethod
    def recorded(cls, config: Mapping[str, Any]) -> ModelSources:
        """Return the settings of a configuration in `run.json`."""
        model = config["model"]
        vision = model.get("hf_path_vision")
        return cls(
            Path(model["hf_path"]),
            None if vision is None else Path(vision),
            model.get("fresh_projector", False),
            {name: Path(encoder["hf_path"]) for name, encoder in model.get("encoders", {}).items()},
        )

    def as_config(self) -> dict[str, Any]:
        """Return the settings in the form that `recorded` reads."""
        encoders = {name: {"hf_path": str(path.absolute())} for name, path in self.encoders.items()}
        vision = None if self.vision is None else str(self.vision.absolute())
        return {
            "hf_path": str(self.model.absolute()),
            "hf_path_vision": vision,
            "fresh_projector": self.fresh_projector,
            "encoders": encoders,
        }

    def moved(self, model: Path | None, vision: Path | None, encoders: Mapping[str, Path]) -> ModelSources:
        """Return the model with new locations of its folders. Raises `UserError` for a folder that it does not have."""
        if vision is not None and self.vision is None:
            raise UserError.at(
                "--vision",
                found=str(vision),
                expected="none",
                because=f"the encoder comes from {self.model} too",
                fix="remove it, or give that folder's new location with --model DIR",
            )
        for name in encoders.keys() - self.encoders.keys():
            known = ", ".join(self.encoders) or "none"
            raise UserError.at(
                "--encoder",
                found=name,
                expected=f"an additional encoder of the model ({known})",
                fix="correct the name, or remove it",
            )
        return replace(
            self,
            model=model or self.model,
            vision=vision or self.vision,
            encoders={**self.encoders, **encoders},
        )

    @property
    def companions(self) -> dict[str, Path]:
        """Folder of the configuration and processor of each encoder; see `model_writer`."""
        return {VISION: self.model, **self.encoders}

    @property
    def folders(self) -> dict[str, Path]:
        """Folders by setting."""
        vision = {} if self.vision is None else {VISION_FOLDER: self.vision}
        further = {f"model.encoders.{name}.hf_path": path for name, path in self.encoders.items()}
        return {"model.hf_path": self.model, **vision, **further}

    def read(self) -> tuple[ModelFolders, ModelShapes]:
        """Read the model's configuration and its shapes, without weights.

        Raises `UserError` if a folder lacks configuration, tokenizer or processor.
        """
        if self.vision is None:
            check_folder(self.model)
        else:
            check_folder(self.model, TEXT_FILES)
            check_folder(self.vision, VISION_FILES, VISION_FOLDER)
        for name, path in self.encoders.items():
            check_folder(path, VISION_FILES, f"model.encoders.{name}.hf_path")
        folders = ModelFolders.read(self.model, self.vision, self.fresh_projector)
        return folders, ModelShapes.of(folders, self.encoders)


Hashes = Mapping[str, Mapping[str, str]]
"""SHA-256 by setting, such as `model.hf_path`, and by file name in that folder."""
_WITHOUT_MEANING = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"})
"""Keys of `config.json` about dtype, origin and generation, for which training has settings of its own."""


def hashes(sources: ModelSources) -> Hashes:
    """Return hashes of the existing files that define what is trained: configuration, tokenizer and processor; for an
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
    """Return a configuration, nested ones included, without the keys that do not change the model."""
    if not isinstance(config, dict):
        return config
    return {name: _meaning(value) for name, value in config.items() if name not in _WITHOUT_MEANING}


def differences(old: Hashes, new: Hashes) -> Iterator[tuple[str, str, str]]:
    """Yield setting, name, and removed, added or changed, of each file that differs."""
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
    """Return the hashes of files of that `name`."""
    return {setting: {name: files[name]} for setting, files in found.items() if name in files}
