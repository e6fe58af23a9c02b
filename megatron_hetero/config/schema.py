"""The configuration of a run: all sections, their checks against each other, and how it is loaded and saved.

Flags override the YAML file, which overrides the defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

from megatron_hetero.base.errors import UserError, parts_of
from megatron_hetero.base.files import resolved
from megatron_hetero.base.outputs import is_ours, lock_of, partial_export_of, replaced_of
from megatron_hetero.config.fields import Section, check_values, option, shown_name, unused, wrong
from megatron_hetero.config.flags import CommandLine, EstimateRequest, read_flags, without_plan
from megatron_hetero.config.load import build, merge, read_yaml
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


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """All settings, validated on construction.

    Raises:
        UserError: a value is invalid, alone or combined with others.
    """

    model: ModelConfig
    parallel: Mapping[str, str] = option(
        {}, "Layout of a module, such as `sp:8` or `tp:4,dp:2@0-7`.", "dp over all ranks"
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


class _Conflict(NamedTuple):
    """A conflict between an output and another path of the run."""

    setting: str
    """The other setting."""
    path: Path
    """Its path."""
    because: str
    """The reason for the message."""


def _check_paths(config: Config) -> None:
    """Check, through symbolic links too, that the export and the log replace neither an input nor another output."""
    places = {name: resolved(path, name) for name, path in _inputs_and_outputs(config)}
    for conflict in _in_checkpoints(places["log.dir"], places):
        expected = f"a folder separate from checkpoint.dir ({conflict.path})"
        raise wrong("log.dir", config.log.dir, expected, conflict.because, "choose another")
    if config.export.hf_dir is None:
        return
    conflict = next(_conflicts(resolved(config.export.hf_dir, "export.hf_dir"), places), None)
    if conflict is not None:
        others = (Path(f"{conflict.path}-trained{'' if n == 1 else f'-{n}'}") for n in count(1))
        good = next(path for path in others if next(_conflicts(path, places), None) is None)
        expected = f"a folder separate from {conflict.setting} ({conflict.path})"
        raise wrong("export.hf_dir", config.export.hf_dir, expected, conflict.because, f"try `--export.hf_dir {good}`")


def _inputs_and_outputs(config: Config) -> Iterator[tuple[str, Path]]:
    """All paths but the export, by setting."""
    model, resume = config.model, config.checkpoint.resume
    paths: dict[str, Path | None] = {"model.hf_path": model.hf_path, "model.hf_path_vision": model.hf_path_vision}
    paths |= {f"model.encoders.{name}.hf_path": encoder.hf_path for name, encoder in model.encoders.items()}
    for name, dataset in config.data.registry.items():
        paths |= {
            f"data.registry.{name}.annotations": dataset.annotations,
            f"data.registry.{name}.images": dataset.images,
        }
    paths["checkpoint.resume"] = resume if isinstance(resume, Path) else None
    paths |= {"checkpoint.dir": config.checkpoint.dir, "log.dir": config.log.dir}
    return ((name, path) for name, path in paths.items() if path is not None)


def _conflicts(target: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """Conflicts of an export, which replaces its folder and the temporary folders next to it."""
    gone = {target, partial_export_of(target), replaced_of(target), lock_of(target)}
    for setting, path in places.items():
        if gone & {path, *path.parents}:
            yield _Conflict(setting, path, "the export replaces the whole folder")
        if setting.startswith("model.") and path in target.parents:
            yield _Conflict(setting, path, "a model folder holds one model")
    yield from _in_checkpoints(target, places)


def _in_checkpoints(path: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """The conflict of an output whose name is reserved in the folder of checkpoints, where a run moves and deletes."""
    folder = places.get("checkpoint.dir")
    if folder is not None and folder in path.parents and is_ours(name := path.relative_to(folder).parts[0]):
        yield _Conflict("checkpoint.dir", folder, f"{name} is reserved there")


# ------------------------------------------------------------------------------------- loading and saving


def load_command(argv: Sequence[str]) -> tuple[Config, EstimateRequest | None]:
    """The configuration of a command line (without the program's name), and the request for an estimate if there is
    one. ``--help`` prints and exits.

    Raises:
        UserError: a file, name or value is invalid; the message names it and the fix.
    """
    line = read_flags(argv, Config)
    if line.plan is None and "plan" in line.settings:  # In a file the section may wait for a later plan.
        raise without_plan(f"--plan.{next(iter(line.settings['plan']))}")
    return _config_of(line), line.plan


def load_config(argv: Sequence[str]) -> Config:
    """The configuration of a command line without ``--plan``.

    Raises:
        UserError: as `load_command`, or the command line has ``--plan``.
    """
    line = read_flags(argv, Config)
    if line.plan is not None:
        raise UserError.at("--plan", problem="not supported by this program", fix="use pretrain_vlm.py")
    return _config_of(line)


def _config_of(line: CommandLine) -> Config:
    settings = read_yaml(line.config, Config) if line.config else {}
    return build(Config, merge(settings, line.settings))


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
    by_module = {
        "parallel": config.parallel,
        "parallel_layers": config.parallel_layers,
        "model.recompute": config.model.recompute,
        "model.chunk": config.model.chunk,
        "model.tp_overlap": config.model.tp_overlap,
        "model.sequence_parallel": config.model.sequence_parallel,
        "precision": config.precision,
        "offload": config.offload,
        "zero": config.zero,
    }
    for where, names in by_module.items():
        for name in names:
            if name not in known:
                raise UserError.at(
                    f"{where}.{name}",
                    found=f"module `{name}`{did_you_mean(name, known)}",
                    expected=f"one of {', '.join(known)}",
                    because="the model has no other modules",
                    fix="rename or remove it",
                )


def _plain(value: object) -> object:
    """Values as YAML types: lists for tuples, text for paths."""
    if is_dataclass(value):
        return {shown_name(f): _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
