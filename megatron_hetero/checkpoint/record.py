"""The record of a run in its checkpoints, and whether another run may resume from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from megatron_hetero.base.errors import UserError, in_short, listed, reason
from megatron_hetero.base.files import read_text
from megatron_hetero.checkpoint.contents import expected_shapes
from megatron_hetero.checkpoint.index import RANDOM, Shape
from megatron_hetero.checkpoint.sources import Hashes, ModelSources, alone, differences
from megatron_hetero.config.optimizers import optimizer_kind
from megatron_hetero.config.sections import Overridable
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.hf.model_files import CONFIG
from megatron_hetero.models.frozen import frozen_tensors
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes

FILE_NAME = "run.json"
OVERRIDABLE: tuple[str, ...] = get_args(Overridable)
"""Settings that may change only if `checkpoint.allow_changes` names them: they change the data stream."""
MODEL = "model.hf_path"
"""The overridable setting that stands for all files other than weights in the model's folders."""


@dataclass(frozen=True)
class DatasetRecord:
    """One entry of `data.datasets`: `share` as written there, the number of records, and their hash."""

    share: str
    records: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.share} ({self.records} records, {self.sha256[:8]})"


@dataclass(frozen=True)
class RunRecord:
    """The file `run.json`. `step`: the last trained step; `config`: the resolved configuration.

    `imported_from`: the folder of imported weights, if no run has trained them. Any run may then start from them, and
    the configuration has only the settings that define the model.

    `model_files`: hashes of the model's files other than weights. Checkpoints of earlier versions have none.
    """

    step: int
    world_size: int
    layouts: Mapping[str, str]
    datasets: tuple[DatasetRecord, ...]
    config: Mapping[str, Any]
    imported_from: str | None = None
    model_files: Hashes = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> RunRecord:
        """Read the record of a checkpoint. Raises `UserError`."""
        path = checkpoint / FILE_NAME
        try:
            values = json.loads(read_text(path))
            datasets = tuple(DatasetRecord(**entry) for entry in values.pop("datasets"))
            ModelSources.recorded(values["config"])
            optimizer_kind(values["config"]["optimizer"]["name"])
            return cls(datasets=datasets, **values)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError.at(
                path,
                problem=f"cannot be read ({reason(error) if isinstance(error, OSError) else in_short(error)})",
                fix="use another checkpoint (--checkpoint.resume PATH)",
            ) from None

    def frozen(self, shapes: ModelShapes) -> frozenset[str]:
        """Return the stored tensors of the model that did not train. Earlier versions had no `model.train`."""
        model = self.config["model"]
        return frozen_tensors(shapes, model["freeze"], model.get("train", ()))

    @property
    def optimizer(self) -> str:
        """The setting `optimizer.name`."""
        return self.config["optimizer"]["name"]

    def precision(self, module: str, field: str) -> str:
        """Return the setting `precision.MODULE.FIELD`."""
        return self.config.get("precision", {}).get(module, {}).get(field, "float32")

    def _setting(self, name: str) -> str:
        if name == "data.datasets":
            return ", ".join(map(str, self.datasets))
        section, field = name.split(".")
        return str(self.config[section][field])

    def require_resumable(self, new: RunRecord, allowed: Collection[str], checkpoint: Path) -> None:
        """Check that a run with the record `new` may resume from this one. Raises `UserError` with both values."""
        if self.imported_from is not None:
            return
        for name in (*(name for name in OVERRIDABLE if name != MODEL), "optimizer.name"):
            old_value, new_value = self._setting(name), new._setting(name)
            if old_value != new_value and name not in allowed:
                more = f", or allow it with --checkpoint.allow_changes {name}" if name in OVERRIDABLE else ""
                raise UserError.at(
                    f"{name} (--{name})",
                    found=new_value,
                    expected=f"{old_value}, as in {checkpoint}",
                    because="the run would not continue as it began",
                    fix=f"restore it{more}",
                )

    def require_steps(self, new: RunRecord, checkpoint: Path) -> None:
        """Check that the checkpoint is not past the end of the run `new`. Raises `UserError`."""
        iters = new.config["train"]["iters"]
        if self.step > iters:
            raise UserError.at(
                "train.iters (--train.iters)",
                found=str(iters),
                expected=f"≥ {self.step}, the step of {checkpoint}",
                fix="raise it, or resume an earlier checkpoint with --checkpoint.resume PATH and another "
                "checkpoint.dir",
            )

    def require_complete(self, stored: Mapping[str, Shape], shapes: ModelShapes, checkpoint: Path) -> dict[str, Shape]:
        """Check that `stored`, the tensors of a checkpoint with this record, are exactly those of a model of
        `shapes`. Returns them without random states. Raises `UserError` listing all faults.
        """
        found = {key: shape for key, shape in stored.items() if not key.startswith(f"{RANDOM}/")}
        require_tensors(
            checkpoint,
            found,
            expected_shapes(stored_shapes(shapes), self.frozen(shapes), optimizer_kind(self.optimizer)),
        )
        return found

    def require_same_model(self, new: RunRecord, allowed: Collection[str], checkpoint: Path) -> None:
        """Check that a run with the record `new` has the same model files other than weights, wherever its folders are.
        Raises `UserError` naming the first that differs.
        """
        before, now = self.model_files, new.model_files
        if not before or MODEL in allowed:
            return
        if self.imported_from is not None:  # Any run may start from these, with its own tokenizer.
            before, now = (alone(found, CONFIG) for found in (before, now))
            if before.keys() != now.keys():
                return
        folders, old_folders = (ModelSources.recorded(record.config).folders for record in (new, self))
        for setting, name, change in differences(before, now):
            place = f": {folders[setting] / name}" if setting in folders else ""
            origin = f" (then in {old_folders[setting]})" if setting in old_folders else ""
            raise UserError.at(
                f"{setting} (--{setting}){place}",
                problem=f"{change if place else 'removed'} since {checkpoint / FILE_NAME} was written{origin}",
                because="the same weights would be another model, or get other inputs",
                fix=f"restore it, or allow it with --checkpoint.allow_changes {MODEL}",
            )


def dataset_records(mixture: Mixture) -> tuple[DatasetRecord, ...]:
    """Return the records of a mixture's data sets."""
    return tuple(DatasetRecord(str(share), len(data), data.digest) for data, share in mixture.parts)


def plain(resolved: str) -> Mapping[str, Any]:
    """Return the values of a resolved configuration, given as YAML."""
    return yaml.safe_load(resolved)


def require_tensors(
    checkpoint: Path, found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> None:
    """Check that a checkpoint holds exactly the `expected` tensors in their shapes. Raises `UserError` listing all
    faults.
    """
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    wrong = {
        f"{key} is {list(found[key])}, not {list(shape)}"
        for key, shape in expected.items()
        if key in found and list(found[key]) != list(shape)
    }
    kinds = {"missing": missing, "unexpected": extra, "of another shape": wrong}
    faults = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if faults:
        raise UserError.at(
            checkpoint,
            problem=f"tensors do not match the model ({'; '.join(faults)})",
            fix="give the model that the checkpoint was trained from (model.hf_path of a run, --model of an export), "
            "or use another checkpoint",
        )
