"""The configuration of a run: all sections, their checks against each other, and how it is loaded and saved.

Flags override the YAML file, which overrides the defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Literal

import yaml

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import resolved
from megatron_hetero.base.outputs import is_ours, lock_of
from megatron_hetero.config.fields import NAMED, Section, check_values, option, shown_name, unused, wrong
from megatron_hetero.config.flags import EstimateRequest, read_flags, without_plan
from megatron_hetero.config.load import Tree, build, merge, read_yaml
from megatron_hetero.config.optimizers import FP32, OPTIMIZERS, OffloadConfig, OptimizerConfig, PrecisionConfig
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
from megatron_hetero.layout.grammar import did_you_mean
from megatron_hetero.layout.names import parts_of


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """All settings, validated on construction.

    Raises:
        UserError: a value is invalid, alone or combined with others.
    """

    model: ModelConfig
    parallel: Mapping[str, str] = option(
        {},
        "Layout of a module, such as `sp:8` or `tp:4,dp:2@0-7`; `ep` divides experts: `tp:4,dp:2,ep:8`.",
        "dp over all ranks",
    )
    parallel_layers: Mapping[str, tuple[int, ...]] = option(
        {}, "Layers per pipeline stage of a module, in order, such as `10 18`.", "even"
    )
    data: DataConfig
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: Mapping[str, PrecisionConfig] = option({}, "Optimizer states and gradients of a module.")
    offload: Mapping[str, OffloadConfig] = option({}, "What a module keeps in host memory.")
    zero: Mapping[str, Literal[1, 2, 3]] = option(
        {},
        "ZeRO stage of a module: what its dp, sp and cp ranks shard. 1: AdamW's states; 2: also gradients; 3: also "
        "weights, gathered layer by layer (FSDP2).",
        "1",
    )
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    plan: EstimateConfig = field(default_factory=EstimateConfig)

    def precision_of(self, module: str) -> PrecisionConfig:
        """Dtypes of a module's optimizer states and gradients."""
        return self.precision.get(module, FP32)

    def offload_of(self, module: str) -> OffloadConfig:
        """What a module keeps in host memory."""
        return self.offload.get(module, OffloadConfig())

    def zero_of(self, module: str) -> int:
        """The ZeRO stage of a module."""
        return self.zero.get(module, 1)

    def __post_init__(self) -> None:
        check_values(self)

    def _check(self, section: str) -> None:
        _check_training(self)
        _check_states(self)
        _check_evaluation(self)
        _check_paths(self)


def _check_training(config: Config) -> None:
    """Check the settings of steps against those of data and model."""
    train, optimizer, model = config.train, config.optimizer, config.model
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
    encoders, projectors = zip(*(parts_of(name) for name in model.encoder_names), strict=True)
    rates = {"lr_vision": (optimizer.lr_vision, encoders), "lr_projector": (optimizer.lr_projector, projectors)}
    for name, (rate, parts) in rates.items():
        if rate is not None and set(model.freeze).issuperset(parts):
            why, fix = f"model.freeze and model.train leave {', '.join(parts)} frozen", "remove it, or train one"
            raise unused(f"optimizer.{name}", rate, why, fix)


def _check_states(config: Config) -> None:
    """Check that optimizer states, gradients and activations with settings of their own exist."""
    fp32, kind = config.model.dtype == "float32", OPTIMIZERS[config.optimizer.name]
    for module, chosen in config.precision.items():
        for f in fields(chosen):
            name, value = f"precision.{module}.{f.name}", getattr(chosen, f.name)
            if value == f.default:
                continue
            if fp32 and f.name in ("master", "gradients"):
                why, fix = "weights in float32 are their own masters", "remove it, or set model.dtype to bfloat16"
                raise unused(name, value, why, fix)
            if f.name == "moments" and not kind.moments:
                why, fix = f"optimizer.name is {kind.name}, which keeps no moments", "remove it, or use adamw"
                raise unused(name, value, why, fix)
            _require_trained(config, module, name, value)
    for module, chosen in config.offload.items():
        if chosen.states:
            name = f"offload.{module}.states"
            if not kind.moments and (fp32 or config.precision_of(module).master == "none"):
                raise unused(name, True, f"{kind.name} keeps no states of this module", "remove it")
            _require_trained(config, module, name, True)
        # The layers of a frozen text module keep activations for the gradients of encoders.
        if chosen.activations and module in config.model.encoder_names and module in config.model.freeze:
            why, fix = f"{module} is frozen and its layers have no backward pass", f"remove it, or train {module}"
            raise unused(f"offload.{module}.activations", True, why, fix)
    for module, zero in config.zero.items():
        if zero == 2 and config.model.is_frozen(module):
            raise unused(f"zero.{module}", zero, f"{module} is frozen and has no gradients", "remove it, or use 3")


def _require_trained(config: Config, module: str, name: str, value: object) -> None:
    if config.model.is_frozen(module):
        raise unused(name, value, f"{module} is frozen and not updated", "remove it")


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
    """Check, through symbolic links too, that the export and the log replace neither an input nor another output."""
    places = {name: resolved(path, name) for name, path in _inputs_and_outputs(config)}
    _require_outside_checkpoints("log.dir", config.log.dir, places)
    if config.export.hf_dir is None:
        return
    target = resolved(config.export.hf_dir, "export.hf_dir")
    gone = {target, lock_of(target)}
    for setting, path in places.items():
        replaced = bool(gone & {path, *path.parents})
        if replaced or (setting.startswith("model.") and path in target.parents):
            expected = f"a folder separate from {setting} ({path})"
            because = "the export replaces the whole folder" if replaced else "a model folder holds one model"
            raise wrong("export.hf_dir", config.export.hf_dir, expected, because, "choose another")
    _require_outside_checkpoints("export.hf_dir", config.export.hf_dir, places)


def _inputs_and_outputs(config: Config) -> Iterator[tuple[str, Path]]:
    """All paths but the export, by setting."""
    model, resume = config.model, config.checkpoint.resume
    paths: dict[str, Path | None] = {"model.hf_path": model.hf_path, "model.hf_path_vision": model.hf_path_vision}
    paths |= {f"model.encoders.{name}.hf_path": encoder.hf_path for name, encoder in model.encoders.items()}
    for name, dataset in config.data.registry.items():
        setting = f"data.registry.{name}"
        paths |= {f"{setting}.annotations": dataset.annotations, f"{setting}.images": dataset.images}
        paths[f"{setting}.files"] = dataset.folder_of_files
    paths["checkpoint.resume"] = resume if isinstance(resume, Path) else None
    paths |= {"checkpoint.dir": config.checkpoint.dir, "log.dir": config.log.dir}
    return ((name, path) for name, path in paths.items() if path is not None)


def _require_outside_checkpoints(setting: str, path: Path, places: Mapping[str, Path]) -> None:
    """Check that an output has no name that is reserved in the folder of checkpoints, where a run moves and deletes."""
    folder, target = places.get("checkpoint.dir"), resolved(path, setting)
    if folder is not None and folder in target.parents and is_ours(name := target.relative_to(folder).parts[0]):
        expected = f"a folder separate from checkpoint.dir ({folder})"
        raise wrong(setting, path, expected, f"{name} is reserved there", "choose another")


# ------------------------------------------------------------------------------------- loading and saving


def load_command(argv: Sequence[str]) -> tuple[Config, EstimateRequest | None]:
    """The configuration of a command line (without the program's name), and the request for an estimate if there is
    one. ``--help`` prints and exits.

    Raises:
        UserError: a file, name or value is invalid; the message names it and the fix.
    """
    settings, file, request = read_flags(argv, Config)
    if request is None and "plan" in settings:  # In a file the section may wait for a later plan.
        raise without_plan(f"--plan.{next(iter(settings['plan']))}")
    return _merged(settings, file), request


def load_config(argv: Sequence[str]) -> Config:
    """The configuration of a command line without ``--plan``.

    Raises:
        UserError: as `load_command`, or the command line has ``--plan``.
    """
    settings, file, request = read_flags(argv, Config)
    if request is not None:
        raise UserError.at("--plan", problem="not supported by this program", fix="use pretrain_vlm.py")
    return _merged(settings, file)


def _merged(settings: Tree, file: Path | None) -> Config:
    return build(Config, merge(read_yaml(file, Config) if file else {}, settings))


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `load_config` reads back to an equal value."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def flat_settings(config: Config) -> dict[str, str]:
    """Every setting as text, by its dotted name: `optimizer.lr`."""
    return dict(_flat(_plain(config), ""))


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield name, "none" if value is None else str(value)
        return
    for part, below in value.items():
        yield from _flat(below, f"{name}.{part}" if name else part)


def require_modules(config: Config, modules: Iterable[str]) -> None:
    """Check that per-module settings name modules of the model.

    Raises:
        UserError: a setting names an unknown module.
    """
    known = list(modules)
    for prefix, section in (("", config), ("model.", config.model)):
        for f in fields(section):
            value = getattr(section, f.name)
            for name in value if isinstance(value, Mapping) and f.name not in NAMED else ():
                if name not in known:
                    where, found = f"{prefix}{f.name}.{name}", f"module `{name}`{did_you_mean(name, known)}"
                    because, fix = "the model has no other modules", "rename or remove it"
                    raise wrong(where, found, f"one of {', '.join(known)}", because, fix)


def _plain(value: object) -> object:
    """Values as YAML types: lists for tuples, text for paths."""
    if is_dataclass(value):
        return {shown_name(f): _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
