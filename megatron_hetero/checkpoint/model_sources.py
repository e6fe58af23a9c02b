"""The folders that a model comes from, as recorded by a run or given on a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_hetero.config.checks import require_encoder_name
from megatron_hetero.data.processor.folder import TEXT_FILES, VISION_FILES, check_folder
from megatron_hetero.errors import UserError
from megatron_hetero.models.folders import VISION_FOLDER, ModelFolders
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.names import VISION


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
        """From a configuration as stored in `run.json`."""
        model = config["model"]
        vision = model.get("hf_path_vision")
        return cls(
            Path(model["hf_path"]),
            None if vision is None else Path(vision),
            model.get("fresh_projector", False),
            {name: Path(encoder["hf_path"]) for name, encoder in model.get("encoders", {}).items()},
        )

    def as_config(self) -> dict[str, Any]:
        """The settings, as `recorded` reads them."""
        encoders = {name: {"hf_path": str(path.absolute())} for name, path in self.encoders.items()}
        vision = None if self.vision is None else str(self.vision.absolute())
        return {
            "hf_path": str(self.model.absolute()),
            "hf_path_vision": vision,
            "fresh_projector": self.fresh_projector,
            "encoders": encoders,
        }

    def moved(self, model: Path | None, vision: Path | None, encoders: Mapping[str, Path]) -> ModelSources:
        """The same model with new locations of its folders. Raises `UserError` for a folder that it does not have."""
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
        """For each encoder the folder of its configuration and processor; see `model_writer`."""
        return {VISION: self.model, **self.encoders}

    @property
    def folders(self) -> dict[str, Path]:
        """All folders by setting."""
        vision = {} if self.vision is None else {VISION_FOLDER: self.vision}
        further = {f"model.encoders.{name}.hf_path": path for name, path in self.encoders.items()}
        return {"model.hf_path": self.model, **vision, **further}

    def read(self) -> tuple[ModelFolders, ModelShapes]:
        """The model's configuration and its shapes, without reading weights.

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
