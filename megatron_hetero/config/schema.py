"""The configuration of a run: all sections, checks across sections, loading and saving.

Flags override the YAML file, which overrides the defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

import yaml

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import resolved
from megatron_hetero.base.outputs import is_ours, lock_of
from megatron_hetero.config.fields import Section, check_values, option, shown_name, unused, wrong
from megatron_hetero.config.flags import EstimateRequest, read_command
from megatron_hetero.config.load import build
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.optimizers import OptimizerConfig
from megatron_hetero.config.sections import (
    BoundaryConfig,
    CheckpointConfig,
    DataConfig,
    EstimateConfig,
    EvalConfig,
    ExportConfig,
    LogConfig,
    ModelConfig,
    ScheduleConfig,
    TrainConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """All settings, validated on construction.

    Raises:
        UserError: a value is invalid, alone or combined with others.
    """

    model: ModelConfig
    modules: Mapping[str, ModuleConfig] = option({}, "Settings of each module.")
    data: DataConfig
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: EstimateConfig = field(default_factory=EstimateConfig)

    def module(self, name: str) -> ModuleConfig:
        """Return the settings of a module; the defaults if the configuration has none."""
        return self.modules.get(name) or ModuleConfig()

    @property
    def further(self) -> dict[str, ModuleConfig]:
        """The settings of further encoders, by name."""
        return {name: row for name, row in self.modules.items() if row.hf_path is not None}

    @property
    def further_folders(self) -> dict[str, Path]:
        """The model folders of further encoders, by name."""
        return {name: row.hf_path for name, row in self.modules.items() if row.hf_path is not None}

    @property
    def layer_backend(self) -> str:
        """The setting `model.backend`; `auto` is resolved to `torch` if `model.compile` or a `tp_overlap` needs it."""
        ours = self.model.compile != "none" or any(row.tp_overlap for row in self.modules.values())
        return "torch" if self.model.backend == "auto" and ours else self.model.backend

    @property
    def may_use_cudnn(self) -> bool:
        """Whether cuDNN may compute attention: in half precision, unless `model.attention` excludes it."""
        return self.model.attention == "auto" and self.model.dtype != "float32"

    def __post_init__(self) -> None:
        check_values(self)

    def _check(self, section: str) -> None:
        _check_training(self)
        _check_evaluation(self)
        _check_paths(self)


def _check_training(config: Config) -> None:
    """Check the settings of training and optimizer against each other and against the maximum sample length."""
    train, optimizer = config.train, config.optimizer
    tokens, longest = train.tokens_per_micro_batch, config.data.max_seq_length
    if tokens is not None and tokens < longest:
        fix = f"raise it, or try `--data.max_seq_length {tokens}`"
        expected = f"≥ data.max_seq_length = {longest}"
        raise wrong("train.tokens_per_micro_batch", tokens, expected, "samples are never cut", fix)
    if optimizer.warmup_iters > train.iters:
        expected, why = f"≤ train.iters = {train.iters}", "the learning rate would never peak"
        fix = f"try `--optimizer.warmup_iters {train.iters}`"
        raise wrong("optimizer.warmup_iters", optimizer.warmup_iters, expected, why, fix)
    if optimizer.warmup_iters == train.iters and optimizer.min_lr:
        why, fix = f"all {train.iters} steps are warm-up", "remove it, or lower optimizer.warmup_iters"
        raise unused("optimizer.min_lr", optimizer.min_lr, why, fix)


def _check_evaluation(config: Config) -> None:
    evaluation, names = config.eval, ", ".join(config.eval.datasets)
    config.data.require_registered("eval.datasets", evaluation.datasets)
    if len(set(evaluation.datasets)) != len(evaluation.datasets):
        raise wrong("eval.datasets", names, "each name once", "", "remove the duplicate")
    if evaluation.interval and not names:
        why = "there is nothing to evaluate"
        raise wrong("eval.interval", evaluation.interval, "0 without eval.datasets", why, "set eval.datasets")
    if names and not evaluation.interval:
        raise unused("eval.datasets", names, "eval.interval is 0", "set that, or remove it")


# ------------------------------------------------------------------------------------------- paths


def _check_paths(config: Config) -> None:
    """Check that the export and the log replace neither an input nor another output, with symbolic links resolved."""
    places = {name: resolved(path, name) for name, path in _inputs_and_outputs(config)}
    _require_outside_checkpoints("log.dir", config.log.dir, places)
    if config.export.hf_dir is None:
        return
    target = resolved(config.export.hf_dir, "export.hf_dir")
    gone = {target, lock_of(target)}
    for setting, path in places.items():
        replaced = bool(gone & {path, *path.parents})
        if replaced or (setting.startswith(("model.", "modules.")) and path in target.parents):
            expected = f"a folder separate from {setting} ({path})"
            because = "the export replaces the whole folder" if replaced else "a model folder holds one model"
            raise wrong("export.hf_dir", config.export.hf_dir, expected, because, "choose another")
    _require_outside_checkpoints("export.hf_dir", config.export.hf_dir, places)


def _inputs_and_outputs(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield all input and output paths except the export's, each with the name of its setting."""
    model, resume = config.model, config.checkpoint.resume
    paths: dict[str, Path | None] = {"model.hf_path": model.hf_path, "model.hf_path_vision": model.hf_path_vision}
    paths |= {f"modules.{name}.hf_path": folder for name, folder in config.further_folders.items()}
    paths |= {f"modules.{name}.lora.hf_path": row.lora.hf_path for name, row in config.modules.items()}
    for name, dataset in config.data.registry.items():
        setting = f"data.registry.{name}"
        paths |= {f"{setting}.annotations": dataset.annotations, f"{setting}.images": dataset.images}
        paths[f"{setting}.files"] = dataset.folder_of_files
    paths["checkpoint.resume"] = resume if isinstance(resume, Path) else None
    paths |= {"checkpoint.dir": config.checkpoint.dir, "log.dir": config.log.dir}
    return ((name, path) for name, path in paths.items() if path is not None)


def _require_outside_checkpoints(setting: str, path: Path, places: Mapping[str, Path]) -> None:
    """Check that an output in the checkpoint folder has no reserved name: runs move and delete such subfolders."""
    folder, target = places.get("checkpoint.dir"), resolved(path, setting)
    if folder is not None and folder in target.parents and is_ours(name := target.relative_to(folder).parts[0]):
        expected = f"a folder separate from checkpoint.dir ({folder})"
        raise wrong(setting, path, expected, f"{name} is reserved there", "choose another")


# ------------------------------------------------------------------------------------- loading and saving


def load_command(argv: Sequence[str]) -> tuple[Config, EstimateRequest | None]:
    """Return the configuration of a command line (without the program's name), and the request for an estimate if there
    is one. ``--help`` prints and exits.

    Raises:
        UserError: a file, name or value is invalid; the message names it and the fix.
    """
    settings, request = read_command(argv, Config, plans=True)
    return build(Config, settings), request


def load_config(argv: Sequence[str]) -> Config:
    """Return the configuration of a command line without ``--plan``.

    Raises:
        UserError: as in `load_command`, or the command line has ``--plan``.
    """
    settings, request = read_command(argv, Config, plans=False)
    if request is not None:
        raise UserError.at("--plan", problem="not supported by this program", fix="use pretrain_vlm.py")
    return build(Config, settings)


def to_yaml(config: Config) -> str:
    """Return the whole configuration as YAML, which `load_config` reads back as an equal value."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def flat_settings(config: Config) -> dict[str, str]:
    """Return every setting as text, by its dotted name such as `optimizer.lr`."""
    return dict(_flat(_plain(config), ""))


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield name, "none" if value is None else str(value)
        return
    for key, below in value.items():
        yield from _flat(below, f"{name}.{key}" if name else key)


def _plain(value: object) -> object:
    """Convert `value` to YAML types: tuples to lists, paths to text, modules to the settings that are not defaults."""
    if isinstance(value, ModuleConfig):
        return {name: _plain(getattr(value, name)) for name in value.given}
    if is_dataclass(value):
        return {shown_name(f): _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
