"""Model folders and their configurations: one `transformers` folder, or one for the language model and another for the
encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hetero.base.errors import UserError, in_short, listed
from megatron_hetero.base.files import read_object, shown
from megatron_hetero.base.outputs import advice_to_export
from megatron_hetero.hf.model_files import require_own_files
from megatron_hetero.models.family import EncoderShape, Family
from megatron_hetero.models.registry import FAMILIES, family_of, titles

VISION_FOLDER = "model.hf_path_vision"


@dataclass(frozen=True, eq=False)
class ModelFolders:
    """The folders of a model, and its joint configuration.

    Attributes:
        text: folder of the language model.
        vision: folder of the encoder; the same folder for a whole model.
        config: the joint configuration.
        fresh_projector: whether the projector is initialised instead of loaded.
        text_alone: whether the language model's folder has no encoder, and a chat template without images.
        unused: tensors of the encoder folder's projector that the model does not have.
    """

    text: Path
    vision: Path
    config: Any
    fresh_projector: bool = False
    text_alone: bool = False
    unused: frozenset[str] = frozenset()

    @property
    def family(self) -> Family:
        """Family of the model."""
        return family_of(self.config.model_type)

    @property
    def notice(self) -> str:
        """Notice about unused tensors; empty if there are none."""
        if not self.unused:
            return ""
        return f"the fresh projector is {self.family.title}'s: {listed(self.unused)} of {self.vision} are not used"

    @classmethod
    def read(cls, hf_path: Path, hf_path_vision: Path | None = None, fresh_projector: bool = False) -> ModelFolders:
        """Read `config.json` of the folders, as saved by any version of transformers.

        Args:
            hf_path: folder of a whole model; with `hf_path_vision`, possibly of a language model alone.
            hf_path_vision: folder of another encoder to use.
            fresh_projector: whether to initialise the projector even if the folder's projector fits.

        Raises:
            UserError: a folder is missing, broken, or of an unsupported family.
        """
        if hf_path_vision is None:
            config = read_config(hf_path, "model.hf_path")
            family = family_of(config.model_type)
            with sound(hf_path / "config.json"):
                family.check_encoder(hf_path, config)
                family.check_text(hf_path, config)
            return cls(hf_path, hf_path, config, fresh_projector)
        vision = read_config(hf_path_vision, VISION_FOLDER)
        of_encoder = family_of(vision.model_type)
        with sound(hf_path_vision / "config.json"):
            of_encoder.check_encoder(hf_path_vision, vision)
        text = read_config(hf_path, "model.hf_path", of_encoder)
        family = family_of(text.model_type)
        text_alone = text.model_type != family.model_type
        with sound(hf_path / "config.json"):
            config = family.joined(text, vision, text_alone)
            family.check_text(hf_path, config)
            width = family.text_shape(config).hidden
        with sound(hf_path_vision / "config.json"):
            encoder, joined = _encoder(of_encoder, vision), _encoder(family, config)
            fresh = fresh_projector or encoder.out_hidden != width
            unused = frozenset(encoder.architecture.projector.keys() - joined.architecture.projector.keys())
        if unused and not fresh:
            raise UserError.at(
                hf_path_vision / "config.json",
                found=f"an encoder of {of_encoder.title} whose projector has {listed(unused, 2)}",
                expected=f"a projector of {family.title}",
                because="the language model takes no more outputs of an encoder",
                fix="initialize the projector with --model.fresh_projector true, or use an encoder of that family",
            )
        return cls(hf_path, hf_path_vision, config, fresh, text_alone, unused)


def _encoder(family: Family, config: Any) -> EncoderShape:
    """Return the shape of the first encoder of a whole model."""
    return family.encoder_shape(config, next(iter(family.encoders)))


def read_config(folder: Path, setting: str, of_encoder: Family | None = None) -> Any:
    """Read the configuration of a whole model of any family from the `folder` of a setting. `of_encoder`: family of an
    encoder from another folder; if given, `folder` may also contain a language model alone. Raises `UserError`.
    """
    path, model_types = folder / "config.json", tuple(FAMILIES)
    if of_encoder is not None:
        name = of_encoder.model_type
        taking = [family for family in FAMILIES.values() if name in (family.model_type, *family.encoders_of)]
        model_types = tuple(each for family in taking for each in (family.model_type, *family.language_models))
    if not folder.is_dir() or not path.is_file():
        found = f"the file {folder}" if folder.is_file() else f"no {path if folder.is_dir() else folder}"
        raise UserError.at(
            setting,
            found=found,
            expected=f"a transformers folder of {titles()} with config.json and safetensors weights",
            fix=advice_to_export(folder) or "download one, or correct the path",
        )
    require_own_files(folder)
    raw = read_object(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_types:
        because, fix = "this program builds no other family", f"give a {titles()} folder"
        if of_encoder is not None:
            because = f"the encoder of {VISION_FOLDER} is {of_encoder.title}'s"
            fix = f"give a language model that takes it, or leave out --{VISION_FOLDER}"
        elif any(model_type in family.language_models for family in FAMILIES.values()):
            fix += f", or the folder of a vision encoder too, with --{VISION_FOLDER}"
        expected = " or ".join(map(repr, model_types))
        raise UserError.at(path, found=f"model_type {shown(model_type)}", expected=expected, because=because, fix=fix)
    family = family_of(model_type)
    family.check_values(path, raw)
    with sound(path):
        return family.config_class(model_type).from_pretrained(folder, local_files_only=True)


@contextmanager
def sound(path: Path) -> Iterator[None]:
    """Convert exceptions about values in the configuration `path`, including transformers' own, to `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError.at(
            path, problem=f"cannot be used ({in_short(error)})", fix="restore the original file"
        ) from error
