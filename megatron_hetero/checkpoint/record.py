"""The record of a run in its checkpoints (run.json): configuration, model folders and data sets, with the checks that
another run may resume from the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import ValidationError, convert, defstruct

from megatron_hetero.base.errors import UserError, faults_of, in_short, reason
from megatron_hetero.base.files import read_bytes, read_text
from megatron_hetero.checkpoint.contents import expected_shapes
from megatron_hetero.checkpoint.index import RANDOM, Shape
from megatron_hetero.checkpoint.recorded_adapters import (
    ModuleAdapters,
    held,
    require_held,
    require_same_adapters,
    require_same_bases,
    unrecorded_base,
    with_recorded,
)
from megatron_hetero.config.fields import children, flag_of, wrong
from megatron_hetero.config.modules import require_encoder_name
from megatron_hetero.config.moved import name_today, translated
from megatron_hetero.config.optimizers import optimizer_kind
from megatron_hetero.config.schema import Config
from megatron_hetero.config.sections import Overridable
from megatron_hetero.data.processor import TEXT_FILES, VISION_FILES, check_folder
from megatron_hetero.hf.model_files import CONFIG, PROCESSOR_FILES, TOKENIZER_FILES
from megatron_hetero.hf.weight_map import TensorShapes
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.folders import VISION_FOLDER, ModelFolders
from megatron_hetero.models.frozen import frozen_tensors
from megatron_hetero.models.shapes import ModelShapes

FILE_NAME = "run.json"
OVERRIDABLE: tuple[str, ...] = get_args(Overridable)
"""Settings that change what is trained; a resumed run may change them only if `checkpoint.allow_changes` names them."""
FAILING = {"data.too_long": "error", "data.bad_records": "stop"}
"""Values with which a run stops at a bad sample; until then it trains exactly like a run that skips bad samples."""
LIMITS = ("data.max_seq_length", "train.patches_per_micro_batch")
"""Size limits on samples; they change what is trained only if larger samples are skipped."""
MODEL = "model.hf_path"
"""Overridable setting that covers all files except weights in the model's folders."""
FURTHER_SETTINGS = ("hf_path", "token", "min_pixels", "max_pixels")
"""Settings in `modules.NAME` that exist only for additional encoders."""


def further_encoders(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the `FURTHER_SETTINGS` that are set for each additional encoder in a configuration, by encoder."""
    encoders = dict[str, dict[str, Any]]()
    for name, row in config["modules"].items():
        if settings := {setting: row[setting] for setting in FURTHER_SETTINGS if row.get(setting) is not None}:
            encoders[name] = settings
    return encoders


@dataclass(frozen=True)
class ModelSources:
    """The settings of a run that define its model: `model.hf_path`, `model.hf_path_vision`, `model.fresh_projector`,
    and `modules.NAME.hf_path` of each additional encoder.
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
        """Return the model sources in a recorded configuration, as in `run.json`."""
        model = config["model"]
        vision = None if model.get("hf_path_vision") is None else Path(model["hf_path_vision"])
        encoders = {name: Path(row["hf_path"]) for name, row in further_encoders(config).items()}
        return cls(Path(model["hf_path"]), vision, model.get("fresh_projector", False), encoders)

    def as_config(self) -> dict[str, Any]:
        """Return the sources as a configuration that `recorded` can read."""
        vision = None if self.vision is None else str(self.vision.absolute())
        folders = {"hf_path": str(self.model.absolute()), "hf_path_vision": vision}
        rows = {name: {"hf_path": str(path.absolute())} for name, path in self.encoders.items()}
        return {"model": {**folders, "fresh_projector": self.fresh_projector}, "modules": rows}

    def moved(self, model: Path | None, vision: Path | None, encoders: Mapping[str, Path]) -> ModelSources:
        """Return these sources with new folder locations. Raises `UserError` for a folder that the model lacks."""
        if vision is not None and self.vision is None:
            why = f"the encoder comes from {self.model} too"
            fix = "remove it, or give that folder's new location with --model DIR"
            raise UserError.at("--vision", found=str(vision), expected="none", because=why, fix=fix)
        for name in encoders.keys() - self.encoders.keys():
            expected = f"an additional encoder of the model ({', '.join(self.encoders) or 'none'})"
            raise UserError.at("--encoder", found=name, expected=expected, fix="correct the name, or remove it")
        vision = vision or self.vision
        return replace(self, model=model or self.model, vision=vision, encoders={**self.encoders, **encoders})

    @property
    def companions(self) -> dict[str, Path]:
        """Folders with the configuration and processor of `text` and of each additional encoder, by module name."""
        return {TEXT: self.model, **self.encoders}

    @property
    def folders(self) -> dict[str, Path]:
        """All folders of the model, by setting, such as `model.hf_path`."""
        vision = {} if self.vision is None else {VISION_FOLDER: self.vision}
        further = {f"modules.{name}.hf_path": path for name, path in self.encoders.items()}
        return {"model.hf_path": self.model, **vision, **further}

    def read(self) -> tuple[ModelFolders, ModelShapes]:
        """Read the configuration and the tensor shapes of the model, without its weights.

        Raises `UserError` if a folder lacks configuration, tokenizer or processor.
        """
        if self.vision is None:
            check_folder(self.model)
        else:
            check_folder(self.model, TEXT_FILES)
            check_folder(self.vision, VISION_FILES, VISION_FOLDER)
        for name, path in self.encoders.items():
            check_folder(path, VISION_FILES, f"modules.{name}.hf_path")
        folders = ModelFolders.read(self.model, self.vision, self.fresh_projector)
        return folders, ModelShapes.of(folders, self.encoders)


Hashes = Mapping[str, Mapping[str, str]]
"""SHA-256 hashes of files, by the setting of their folder, such as `model.hf_path`, and by file name."""
_WITHOUT_MEANING = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"})
"""Keys of `config.json` that do not affect training: dtype, origin and generation."""


def hashes(sources: ModelSources) -> Hashes:
    """Return hashes of the existing files that define the model apart from its weights: configuration, tokenizer and
    processor; for an additional encoder, configuration and processor. Raises `UserError` if one cannot be read.
    """
    by_setting: dict[str, dict[str, str]] = {}
    for setting, folder in sources.folders.items():
        tokenizer = () if setting.startswith("modules.") else TOKENIZER_FILES
        names = (name for name in (CONFIG, *tokenizer, *PROCESSOR_FILES) if (folder / name).is_file())
        by_setting[setting] = {name: _hash(folder / name) for name in names}
    return by_setting


def _hash(path: Path) -> str:
    try:
        content = read_bytes(path)
        if path.name == CONFIG:
            content = json.dumps(_meaning(json.loads(content)), sort_keys=True).encode()
    except (OSError, ValueError, RecursionError) as error:
        problem, why = f"cannot be read ({error})", "checkpoints record a hash of it"
        raise UserError.at(path, problem=problem, because=why, fix="restore the folder") from None
    return hashlib.sha256(content).hexdigest()


def _meaning(config: Any) -> Any:
    """Return a configuration without the keys that do not change the model, at any depth."""
    if not isinstance(config, dict):
        return config
    return {name: _meaning(value) for name, value in config.items() if name not in _WITHOUT_MEANING}


def differences(old: Hashes, new: Hashes) -> Iterator[tuple[str, str, str]]:
    """Yield (setting, file name, "removed", "added" or "changed") for each file whose hash differs."""
    for setting in sorted(old.keys() | new.keys()):
        before, now = old.get(setting, {}), new.get(setting, {})
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                yield setting, name, "removed" if name not in now else "changed" if name in before else "added"


def alone(all_hashes: Hashes, name: str) -> Hashes:
    """Return only the hashes of the files called `name`."""
    return {setting: {name: files[name]} for setting, files in all_hashes.items() if name in files}


@dataclass(frozen=True)
class DatasetRecord:
    """The record of one entry of `data.datasets`: its configured `share`, number of records, and their hash."""

    share: str
    records: int
    sha256: str
    blocks: str = ""  # See `Mixture.hashed`. Records of earlier versions leave it empty, which matches any value.

    def __str__(self) -> str:
        return f"{self.share} ({self.records} records, {self.sha256[:8]})"


_DTYPE = Literal["float32", "bfloat16"] | None
_MODEL = defstruct("Model", [("freeze", list[str]), ("train", list[str] | None, None), ("dtype", _DTYPE, None)])
_DATA = defstruct("Data", [("video", dict[str, Any] | None, None)])
_MODULE = defstruct("Module", [("precision", dict[str, Any] | None, None)])
_SECTIONS = {"modules": dict[str, _MODULE], "data": _DATA, "train": dict[str, Any]}
_READ = defstruct("Config", [("model", _MODEL), *((name, kind | None, None) for name, kind in _SECTIONS.items())])
"""Schema of the settings that are read from `RunRecord.config`."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run, saved as `run.json` in each checkpoint.

    Attributes:
        step: the last trained step.
        world_size: number of ranks.
        layouts: layouts by module.
        datasets: entries of `data.datasets`.
        config: the resolved configuration.
        imported_from: source folder of imported weights; None if a run trained the weights. Any run may start from
            imported weights; their configuration has only the settings that define the model.
        model_files: hashes of the model's files except weights; empty in checkpoints of earlier versions.
        experts_transposed: whether expert weights are transposed in the language model's folder. Exports use the same
            format, even if that folder no longer has its weights.
        adapters: adapters by module; a run with adapters saves only trained tensors and those that PEFT replaced.
        bases: fingerprints of the weights in the model's folders, by setting, for adapters and imported weights.
    """

    step: int
    world_size: int
    layouts: Mapping[str, str]
    datasets: tuple[DatasetRecord, ...]
    config: Mapping[str, Any]
    imported_from: str | None = None
    model_files: Hashes = field(default_factory=dict)
    experts_transposed: bool = False
    adapters: Mapping[str, ModuleAdapters] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the record as the JSON text of `run.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> RunRecord:
        """Read the record of a checkpoint, translating old names of settings to current ones. Raises `UserError`."""
        path = checkpoint / FILE_NAME
        try:
            values = json.loads(read_text(path))
            files = {name_today(setting): hashed for setting, hashed in values.get("model_files", {}).items()}
            values |= {"config": translated(values["config"]), "model_files": files}
            ModelSources.recorded(values["config"])
            optimizer_kind(values["config"]["optimizer"]["name"])
            record, datasets = cls(**values), tuple(DatasetRecord(**each) for each in values["datasets"])
            adapters = convert(values, cls).adapters
            convert(record.config, _READ)
            return replace(record, datasets=datasets, adapters=adapters)
        except (OSError, ValueError, ValidationError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problem = f"cannot be read ({reason(error) if isinstance(error, OSError) else in_short(error)})"
            fix = "use another checkpoint (--checkpoint.resume PATH)"
            raise UserError.at(path, problem=problem, fix=fix) from None

    def frozen(self, shapes: ModelShapes) -> frozenset[str]:
        """Return the names of the model's stored tensors that were frozen in this run."""
        model = self.config["model"]
        return frozen_tensors(with_recorded(shapes, self.adapters), model["freeze"], model.get("train") or ())

    def held(self, shapes: ModelShapes) -> TensorShapes:
        """Return the shapes of the model's stored tensors whose weights are in this run's checkpoints, by name."""
        return held(self.adapters, with_recorded(shapes, self.adapters), self.frozen(shapes))

    def precision(self, module: str, field: str) -> str:
        """Return the recorded setting `modules.MODULE.precision.FIELD`; its default is float32."""
        return (self.config["modules"].get(module, {}).get("precision") or {}).get(field, "float32")

    def _setting(self, name: str) -> str:
        if name == "data.datasets":
            return ", ".join(map(str, self.datasets))
        if name == "modules":  # The folders of additional encoders are compared by content, not by path.
            further = sorted(further_encoders(self.config).items())
            return str({name: {k: v for k, v in row.items() if k != "hf_path"} for name, row in further})
        *sections, field = name.split(".")
        values, kind = self.config, Config
        for section in sections:
            values, kind = values.get(section) or {}, (children(kind) or {})[section]
        value = values.get(field, getattr(kind, field, None))  # The class attribute is the setting's default.
        return "no value" if value is None else str(value)

    def require_resumable(self, new: RunRecord, allowed: Collection[str], checkpoint: Path) -> None:
        """Check that a run with the record `new` may resume from this record, and ends at or after its step. Raises
        `UserError` with both values of a setting that differs.
        """
        if self.imported_from is not None:
            return
        ignored = {MODEL, *(name for name, value in FAILING.items() if self._setting(name) == value)}
        ignored |= {*LIMITS} if "data.too_long" in ignored else set()
        for name in (*(name for name in OVERRIDABLE if name not in ignored), "optimizer.name"):
            old_value, new_value = self._setting(name), new._setting(name)
            if old_value != new_value and name not in allowed:
                more = f", or allow it with --checkpoint.allow_changes {name}" if name in OVERRIDABLE else ""
                expected, why = f"{old_value}, as in {checkpoint}", "the run would not continue as it began"
                raise wrong(name, new_value, expected, why, f"restore it{more}")
        for old, now in zip(self.datasets, new.datasets, strict=False):
            if old.blocks and now.blocks and old.blocks != now.blocks and "data.datasets" not in allowed:
                why = "data.shuffle blocks orders records by row groups or runs of bytes: the files have been rewritten"
                fix = "restore the files, or allow it with --checkpoint.allow_changes data.datasets"
                raise wrong("data.datasets", f"{now} in other blocks", f"those of {checkpoint}", why, fix)
        if self.step > (iters := new.config["train"]["iters"]):
            fix = "raise it, or resume an earlier checkpoint with --checkpoint.resume PATH and another checkpoint.dir"
            raise wrong("train.iters", iters, f"≥ {self.step}, the step of {checkpoint}", "", fix)

    def require_complete(self, stored: Mapping[str, Shape], shapes: ModelShapes, checkpoint: Path) -> None:
        """Check that the `stored` tensors of this record's checkpoint, except random states, are exactly the tensors of
        a model of `shapes` with the recorded adapters. Raises `UserError` listing all faults.
        """
        tensors = {key: shape for key, shape in stored.items() if not key.startswith(f"{RANDOM}/")}
        kind = optimizer_kind(self.config["optimizer"]["name"])
        require_tensors(checkpoint, tensors, expected_shapes(self.held(shapes), self.frozen(shapes), kind))

    def require_same_adapters(
        self, new: RunRecord, shapes: ModelShapes, allowed: Collection[str], checkpoint: Path
    ) -> None:
        """Check that the record `new`, of a run that trains a model of `shapes`, has the same adapters and base weights
        as this record. Raises `UserError`, which says how to continue.
        """
        folders, was = (ModelSources.recorded(record.config).folders for record in (new, self))
        if self.imported_from is None:
            require_same_adapters(self.adapters, new.adapters, folders, allowed, checkpoint)
        if not new.adapters:
            return
        if not self.bases:
            raise unrecorded_base(checkpoint)
        what = "those that were imported to" if self.imported_from is not None else "the base of the adapters in"
        require_same_bases(self.bases, new.bases, folders, was, f"{what} {checkpoint}")
        if self.imported_from is None:
            train = bool(new.config["model"].get("train"))
            require_held(self.held(shapes).keys(), new.held(shapes).keys(), train, checkpoint)

    def require_same_model(self, new: RunRecord, allowed: Collection[str], checkpoint: Path) -> None:
        """Check that the record `new` has the same hashes of model files, regardless of the folders' paths. Raises
        `UserError` naming the first file that differs.
        """
        before, now = self.model_files, new.model_files
        if not before or MODEL in allowed:
            return
        if self.imported_from is not None:  # A run may use another tokenizer with imported weights.
            before, now = alone(before, CONFIG), alone(now, CONFIG)
            if before.keys() != now.keys():
                return
        folders, old_folders = (ModelSources.recorded(record.config).folders for record in (new, self))
        for setting, name, change in differences(before, now):
            place = f": {folders[setting] / name}" if setting in folders else ""
            origin = f" (then in {old_folders[setting]})" if setting in old_folders else ""
            problem = f"{change if place else 'removed'} since {checkpoint / FILE_NAME} was written{origin}"
            why = "the same weights would be another model, or get other inputs"
            fix = f"restore it, or allow it with --checkpoint.allow_changes {MODEL}"
            raise UserError.at(f"{setting} ({flag_of(setting)}){place}", problem=problem, because=why, fix=fix)


def require_tensors(
    checkpoint: Path, found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> None:
    """Check that the names and shapes of the tensors `found` in a checkpoint are exactly those `expected`. Raises
    `UserError` listing all faults.
    """
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    wrong = {
        f"{key} is {list(found[key])}, not {list(shape)}"
        for key, shape in expected.items()
        if key in found and list(found[key]) != list(shape)
    }
    if faults := faults_of({"missing": missing, "unexpected": extra, "of another shape": wrong}):
        given = "the model that the checkpoint was saved from (model.hf_path of a run, --model of an export)"
        problem = f"tensors do not match the model ({faults})"
        raise UserError.at(checkpoint, problem=problem, fix=f"give {given}, or use another checkpoint")
