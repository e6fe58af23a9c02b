"""Sampling rate of a data set per epoch: ``name%rate``.

Checks that the export of a run replaces neither an input nor another output, through symbolic links too.

Validation of a configuration's values, alone and against each other. Needs nothing but the values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import reduce
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_hetero.base.errors import ENCODER_NAME, TAKEN, UserError, is_pattern, parts_of
from megatron_hetero.base.files import resolved
from megatron_hetero.base.outputs import is_ours, lock_of, partial_export_of, replaced_of
from megatron_hetero.config.load import shown_name
from megatron_hetero.config.optimizers import OPTIMIZERS
from megatron_hetero.layout.grammar import did_you_mean

if TYPE_CHECKING:
    from megatron_hetero.config.schema import (
        CheckpointConfig,
        Config,
        DataConfig,
        EncoderConfig,
        EvalConfig,
        ModelConfig,
        OptimizerConfig,
        PlanConfig,
        TrainConfig,
    )

_RATE = re.compile(r"\d+(\.\d+)?")
_MOST = 1_000_000
"""Percent: ten thousand passes."""


@dataclass(frozen=True)
class SampledDataset:
    """A data set and its sampling rate per epoch, written ``name%percent``."""

    name: str
    """Key of the data set in `data.registry`."""
    rate: Fraction = Fraction(1)
    """Epochs of the data set per epoch of the mixture: 1/2 is half of it, 5/2 two and a half passes."""

    @classmethod
    def parse(cls, text: str) -> SampledDataset:
        """Parses ``name`` or ``name%percent``.

        Raises:
            UserError: the percentage is not a positive number.
        """
        name, mark, percent = text.rpartition("%")
        if not mark:
            return cls(text)
        if not _RATE.fullmatch(percent) or not 0 < Fraction(percent) <= _MOST or not name:
            raise UserError.at(
                "data.datasets",
                found=repr(text),
                expected=f"`name` or `name%rate` with a percentage > 0 and ≤ {_MOST}, in digits",
                fix=f"write {name or 'name'}%50 for half of the data set per epoch",
            )
        return cls(name, Fraction(percent) / 100)

    def __str__(self) -> str:
        return self.name if self.rate == 1 else f"{self.name}%{float(self.rate * 100):g}"

    def count(self, records: int) -> int:
        """Samples per epoch from a data set with this many records: rate · records, rounded up."""
        return math.ceil(self.rate * records)


CHECKPOINTS, LOGS = "checkpoint.dir", "log.dir"


class _Conflict(NamedTuple):
    """A conflict between the export's folder and another path of the run."""

    setting: str
    """The other setting."""
    path: Path
    """Its path."""
    because: str
    """The reason for the message."""


def check_paths(config: Config) -> None:
    """Check the paths of a run. Raises `UserError` with one that works."""
    places, target = {name: resolved(path, name) for name, path in _given(config)}, config.export.hf_dir
    for conflict in _in_checkpoints(places[LOGS], places):
        where, found, because = f"{LOGS} (--{LOGS})", str(config.log.dir), conflict.because
        expected, fix = f"a folder separate from {CHECKPOINTS} ({conflict.path})", "choose another"
        raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)
    if target is None:
        return
    conflict = next(_conflicts(resolved(target, "export.hf_dir"), places), None)
    if conflict is not None:
        others = (Path(f"{conflict.path}-trained{'' if n == 1 else f'-{n}'}") for n in count(1))
        good = next(path for path in others if next(_conflicts(path, places), None) is None)
        raise UserError.at(
            "export.hf_dir (--export.hf_dir)",
            found=str(target),
            expected=f"a folder separate from {conflict.setting} ({conflict.path})",
            because=conflict.because,
            fix=f"try `--export.hf_dir {good}`",
        )


def _given(config: Config) -> Iterator[tuple[str, Path]]:
    """All inputs and outputs but the export, by setting."""
    model, checkpoint = config.model, config.checkpoint
    yield "model.hf_path", model.hf_path
    if model.hf_path_vision is not None:
        yield "model.hf_path_vision", model.hf_path_vision
    for name, encoder in model.encoders.items():
        yield f"model.encoders.{name}.hf_path", encoder.hf_path
    for name, dataset in config.data.registry.items():
        yield f"data.registry.{name}.annotations", dataset.annotations
        if dataset.images is not None:
            yield f"data.registry.{name}.images", dataset.images
    if checkpoint.resume not in ("auto", "never"):
        yield "checkpoint.resume", Path(checkpoint.resume)
    if checkpoint.dir is not None:
        yield CHECKPOINTS, checkpoint.dir
    yield LOGS, config.log.dir


def _conflicts(target: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """An export replaces its folder and the temporary folders next to it."""
    gone = {target, partial_export_of(target), replaced_of(target), lock_of(target)}
    for setting, path in places.items():
        if gone & {path, *path.parents}:
            yield _Conflict(setting, path, "the export replaces the whole folder")
        if setting.startswith("model.") and path in target.parents:
            yield _Conflict(setting, path, "a model folder holds one model")
    yield from _in_checkpoints(target, places)


def _in_checkpoints(path: Path, places: Mapping[str, Path]) -> Iterator[_Conflict]:
    """A run moves and deletes what has a reserved name in its folder of checkpoints."""
    folder = places.get(CHECKPOINTS)
    if folder is not None and folder in path.parents and is_ours(name := path.relative_to(folder).parts[0]):
        yield _Conflict(CHECKPOINTS, folder, f"{name} is reserved there")


_NOT_IN_PROJECTS = frozenset("/\\#?%:")
"""Characters that Weights & Biases refuses in the name of a project."""
# Lower bound of each number, and whether it is inclusive.
_BOUNDS: dict[str, tuple[float, bool]] = {
    "data.max_seq_length": (1, True),
    "data.min_pixels": (1, True),
    "data.max_pixels": (1, True),
    "data.workers": (0, True),
    "schedule.waves": (1, True),
    "schedule.run_ahead": (0, True),
    "schedule.virtual_stages": (1, True),
    "schedule.timeout_s": (0, True),
    "train.iters": (1, True),
    "train.global_batch_size": (1, True),
    "train.micro_batch_size": (1, True),
    "train.tokens_per_micro_batch": (1, True),
    "train.patches_per_micro_batch": (1, True),
    "train.seed": (0, True),
    "train.profile.start": (0, True),
    "train.profile.steps": (1, True),
    "optimizer.lr": (0, False),
    "optimizer.min_lr": (0, True),
    "optimizer.lr_vision": (0, False),
    "optimizer.lr_projector": (0, False),
    "optimizer.eps": (0, False),
    "optimizer.weight_decay": (0, True),
    "optimizer.clip_grad": (0, True),
    "optimizer.warmup_iters": (0, True),
    "checkpoint.interval": (1, True),
    "checkpoint.keep_last": (1, True),
    "eval.interval": (0, True),
    "eval.limit": (1, True),
    "eval.max_new_tokens": (1, True),
    "plan.images": (0, True),
    "plan.image_side": (1, True),
    "plan.tokens": (1, True),
    "plan.supervised": (0, False),
    "plan.memory_gb": (0, False),
}


def check(config: Config) -> None:
    """Check all values. Raises `UserError` for the first invalid one."""
    _check_numbers(config)
    _check_model(config.model)
    _check_recomputation(config.model)
    _check_overlap(config.model)
    _check_compile(config.model)
    _check_data(config.data, config.eval)
    _check_checkpoint(config.checkpoint)
    _check_profile(config.train)
    _check_wandb(config.log.wandb)
    check_paths(config)
    _check_evaluation(config)
    _check_batch(config.train)
    _check_budget(config.train, config.data.max_seq_length)
    _check_optimizer(config.optimizer, config.train.iters)
    _check_frozen(config.optimizer, config.model)
    _check_states(config)
    _check_offload(config)
    _check_zero(config)
    _check_plan(config.plan)


def _wrong(name: str, found: object, expected: str, why: str, do: str) -> UserError:
    return UserError.at(f"{name} (--{name})", found=str(found), expected=expected, because=why, fix=do)


def _unused(name: str, found: object, why: str, do: str) -> UserError:
    """For a setting without effect: a user's setting is never silently ignored."""
    return _wrong(name, found, "no value", why, do)


def _check_numbers(config: Config) -> None:
    for name, (bound, inclusive) in _BOUNDS.items():
        value: Any = reduce(getattr, name.split("."), config)
        if isinstance(value, int | float) and not (value >= bound if inclusive else value > bound):
            expected = f"{'≥' if inclusive else '>'} {bound}"
            raise _wrong(name, value, expected, "", "raise or remove it")
    if 0 < (seconds := config.schedule.timeout_s) < 1:
        why = "actions may take that long"
        raise _wrong("schedule.timeout_s", seconds, "0 or ≥ 1", why, "raise it, or set 0 to disable the watchdog")


def _check_model(model: ModelConfig) -> None:
    for name, encoder in model.encoders.items():
        _check_encoder(f"model.encoders.{name}", name, encoder)
    for name, listed in (("model.freeze", model.freeze), ("model.train", model.train)):
        for part in (entry for entry in listed if not is_pattern(entry)):
            if part not in model.parts:
                found, expected = f"`{part}`{did_you_mean(part, model.parts)}", f"some of {', '.join(model.parts)}"
                raise _wrong(name, found, expected, "the model has no other parts", "rename or remove it")
        if len(set(listed)) != len(listed):
            raise _wrong(name, ", ".join(listed), "each part once", "", "remove the duplicate")
    if set(model.freeze) == set(model.parts):
        problem = f"freezes all of {', '.join(model.parts)}, which leaves nothing to train"
        raise UserError.at("model.freeze (--model.freeze)", problem=problem, fix="remove one")


def _check_recomputation(model: ModelConfig) -> None:
    for name, how in model.recompute.items():
        if isinstance(how, int) and how < 1:
            why, do = "the first N layers of each pipeline stage are recomputed", "use `none` to recompute nothing"
            raise _wrong(f"model.recompute.{name}", how, "none, selective, full or a number of layers ≥ 1", why, do)
    for name, tokens in model.chunk.items():
        if tokens < 0:
            raise _wrong(f"model.chunk.{name}", tokens, "≥ 0", "", "use 0 for all tokens at once, or remove it")


def _check_overlap(model: ModelConfig) -> None:
    for name, parts in model.tp_overlap.items():
        if parts < 1:
            raise _wrong(f"model.tp_overlap.{name}", parts, "≥ 1", "", "use 1 for one exchange, or remove it")


def _check_compile(model: ModelConfig) -> None:
    if model.compile != "none" and model.backend == "te":
        why, do = "Transformer Engine brings kernels of its own", "remove it, or set model.backend to torch"
        raise _wrong("model.compile", model.compile, "none with model.backend te", why, do)


def _check_encoder(where: str, name: str, encoder: EncoderConfig) -> None:
    require_encoder_name(name, "model.encoders (--model.encoders)")
    low, high = encoder.min_pixels, encoder.max_pixels
    for field_name, area in (("min_pixels", low), ("max_pixels", high)):
        if area is not None and area < 1:
            raise _wrong(f"{where}.{field_name}", area, "≥ 1", "", "raise or remove it")
    _check_pixels(where, low, high)


def require_encoder_name(name: str, where: str) -> None:
    """Check the name of an additional encoder. Raises `UserError`."""
    if not ENCODER_NAME.fullmatch(name) or name in TAKEN or name.endswith("_projector"):
        raise UserError.at(
            where,
            found=f"the name `{name}`",
            expected="an unreserved name of a-z, 0-9 and _",
            because="flags and records use it",
            fix="rename the encoder, for example `detail`",
        )


def _check_pixels(where: str, low: int | None, high: int | None) -> None:
    if low is not None and high is not None and low > high:
        fix = f"lower it, or raise {where}.max_pixels"
        raise _wrong(f"{where}.min_pixels", low, f"≤ {where}.max_pixels = {high}", "no image could fit", fix)


def _check_data(data: DataConfig, evaluation: EvalConfig) -> None:
    for name in data.registry:
        if "%" in name or not name:
            why = "`%` separates a name from its rate"
            raise _wrong("data.registry", f"the name `{name}`", "a name without `%`", why, "rename the data set")
    if not data.datasets:
        raise _wrong("data.datasets", "an empty list", "at least one name", "there is nothing to train on", "add one")
    _check_registered("data.datasets", [SampledDataset.parse(text).name for text in data.datasets], data.registry)
    _check_registered("eval.datasets", evaluation.datasets, data.registry)
    _check_pixels("data", data.min_pixels, data.max_pixels)
    if data.worker_type != "thread" and not data.workers:
        why, do = "data.workers is 0, which loads in the training thread", "set data.workers, or remove it"
        raise _unused("data.worker_type", data.worker_type, why, do)


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    if checkpoint.dir is not None:
        return
    # A checkpoint to resume from may be given without a folder for new ones.
    reads = () if checkpoint.resume in ("auto", "never") else ("resume", "allow_changes")
    for f in fields(checkpoint):
        value = getattr(checkpoint, f.name)
        if f.name not in reads and value != f.default:
            why = f"nothing is {'written' if reads else 'written or read'} without checkpoint.dir"
            found = str(value).lower() if isinstance(value, bool) else value
            found = ", ".join(value) if isinstance(value, tuple) else found
            raise _unused(f"checkpoint.{shown_name(f)}", found, why, "set checkpoint.dir, or remove it")


def _check_profile(train: TrainConfig) -> None:
    start, steps, iters = train.profile.start, train.profile.steps, train.iters
    if not start and steps != type(train.profile)().steps:
        why, do = "train.profile.start is 0, which disables profiling", "set train.profile.start, or remove it"
        raise _unused("train.profile.steps", steps, why, do)
    if start > iters:
        expected, do = f"≤ train.iters = {iters}", "lower it, or raise train.iters"
        raise _wrong("train.profile.start", start, expected, "no later step is trained", do)
    if start and start + steps - 1 > iters:
        most = iters - start + 1
        expected, why = f"≤ {most} from step {start} on", f"train.iters is {iters}, and the trace is written"
        raise _wrong("train.profile.steps", steps, expected, f"{why} after its last step", f"lower it to {most}")


def _check_wandb(project: str | None) -> None:
    if project is not None and (not project or len(project) > 128 or _NOT_IN_PROJECTS & set(project)):
        expected = f"a project name of up to 128 characters without {' '.join(sorted(_NOT_IN_PROJECTS))}"
        raise _wrong("log.wandb", f"`{project}`", expected, "", "rename the project, or remove it")


def _check_evaluation(config: Config) -> None:
    evaluation, export, model = config.eval, config.export, config.model
    names = ", ".join(evaluation.datasets)
    if len(set(evaluation.datasets)) != len(evaluation.datasets):
        raise _wrong("eval.datasets", names, "each name once", "", "remove the duplicate")
    if evaluation.interval and not names:
        why = "there is nothing to evaluate"
        raise _wrong("eval.interval", evaluation.interval, "0 without eval.datasets", why, "set eval.datasets")
    if names and not evaluation.interval and model.encoders:
        why = "`transformers` has no such model to answer them"
        fix = "set eval.interval to evaluate during training, or remove them"
        raise _wrong("eval.datasets", names, "none with model.encoders", why, fix)
    if names and not evaluation.interval and export.hf_dir is None:
        why = "the exported model answers them"
        fix = "set export.hf_dir, or eval.interval to evaluate during training"
        raise _wrong("eval.datasets", names, "none without export.hf_dir", why, fix)
    for f in fields(evaluation):
        value = getattr(evaluation, f.name)
        if f.name in ("limit", "max_new_tokens") and value != f.default and not config.answers:
            why = "no exported model answers questions in this run"
            fix = "remove it, or set eval.datasets and export.hf_dir for a model of one encoder"
            raise _unused(f"eval.{f.name}", value, why, fix)


def _check_registered(where: str, names: Sequence[str], registry: Mapping[str, object]) -> None:
    for name in names:
        if name not in registry:
            known = ", ".join(registry) or "empty"
            found = f"`{name}`{did_you_mean(name, registry)}"
            do = f"correct the name, or add data.registry.{name} with annotations and images"
            raise _wrong(where, found, f"a name from data.registry ({known})", "", do)


def _check_batch(train: TrainConfig) -> None:
    batch, micro = train.global_batch_size, train.micro_batch_size
    if batch % micro:
        best = max(n for n in range(1, min(micro, batch) + 1) if batch % n == 0)
        expected, why = f"a divisor of train.global_batch_size = {batch}", "a step is a whole number of micro-batches"
        raise _wrong("train.micro_batch_size", micro, expected, why, f"try `--train.micro_batch_size {best}`")


def _check_budget(train: TrainConfig, longest: int) -> None:
    """A token budget bounds what a micro-batch holds instead of a number of samples, and has room for any sample."""
    tokens, patches = train.tokens_per_micro_batch, train.patches_per_micro_batch
    if tokens is None and patches is not None:
        why, do = "train.tokens_per_micro_batch is not set", "set it too, or remove this"
        raise _unused("train.patches_per_micro_batch", patches, why, do)
    if tokens is None:
        return
    if train.micro_batch_size != type(train)().micro_batch_size:
        why, do = "train.tokens_per_micro_batch bounds a micro-batch", "remove one of them"
        raise _unused("train.micro_batch_size", train.micro_batch_size, why, do)
    if tokens < longest:
        expected, why = f"≥ data.max_seq_length = {longest}", "samples are never cut"
        do = f"raise it, or try `--data.max_seq_length {tokens}`"
        raise _wrong("train.tokens_per_micro_batch", tokens, expected, why, do)


def _check_optimizer(optimizer: OptimizerConfig, iters: int) -> None:
    for beta in optimizer.betas:
        if not 0 <= beta < 1:
            raise _wrong("optimizer.betas", beta, "two numbers in [0, 1)", "", "try `--optimizer.betas 0.9 0.999`")
    if optimizer.min_lr > optimizer.lr:
        expected, why = f"≤ optimizer.lr = {optimizer.lr}", "the learning rate decays to it"
        raise _wrong("optimizer.min_lr", optimizer.min_lr, expected, why, "lower it, or raise optimizer.lr")
    if optimizer.warmup_iters > iters:
        expected, why = f"≤ train.iters = {iters}", "the learning rate would never peak"
        raise _wrong(
            "optimizer.warmup_iters", optimizer.warmup_iters, expected, why, f"try `--optimizer.warmup_iters {iters}`"
        )
    if optimizer.warmup_iters == iters and optimizer.min_lr:
        why, do = f"all {iters} steps are warm-up", "remove it, or lower optimizer.warmup_iters"
        raise _unused("optimizer.min_lr", optimizer.min_lr, why, do)
    _check_unused(optimizer)


def _check_frozen(optimizer: OptimizerConfig, model: ModelConfig) -> None:
    """Learning rates of frozen parts, and recomputation without a backward pass, would have no effect."""
    frozen = set(model.freeze)
    encoders, projectors = zip(*(parts_of(name) for name in model.encoder_names), strict=True)
    rates = {"lr_vision": (optimizer.lr_vision, encoders), "lr_projector": (optimizer.lr_projector, projectors)}
    for name, (rate, parts) in rates.items():
        if rate is not None and frozen.issuperset(parts):
            why, do = f"model.freeze and model.train leave {', '.join(parts)} frozen", "remove it, or train one"
            raise _unused(f"optimizer.{name}", rate, why, do)
    for name, how in model.recompute.items():
        if how != "none" and name in model.encoder_names and model.is_frozen(name):
            raise _unused(f"model.recompute.{name}", how, f"{name} is frozen and has no backward pass", "remove it")


def _check_states(config: Config) -> None:
    """Optimizer settings that would have no effect."""
    fp32, kind = config.model.dtype == "float32", OPTIMIZERS[config.optimizer.name]
    for module, chosen in config.precision.items():
        name = f"precision.{module}"
        if fp32 and (chosen.master, chosen.gradients) != ("float32", "float32"):
            field = "master" if chosen.master != "float32" else "gradients"
            why, do = "weights in float32 are their own masters", "remove it, or set model.dtype to bfloat16"
            raise _unused(f"{name}.{field}", getattr(chosen, field), why, do)
        if chosen.moments != "float32" and not kind.moments:
            why, do = f"optimizer.name is {kind.name}, which keeps no moments", "remove it, or use adamw"
            raise _unused(f"{name}.moments", chosen.moments, why, do)
        for changed in (f for f in fields(chosen) if getattr(chosen, f.name) != f.default):
            _require_trained(config, module, f"{name}.{changed.name}", getattr(chosen, changed.name))


def _check_offload(config: Config) -> None:
    """There must be something to keep in host memory."""
    kind, encoders = OPTIMIZERS[config.optimizer.name], config.model.encoder_names
    for module, chosen in config.offload.items():
        masters = config.model.dtype != "float32" and config.precision_of(module).master != "none"
        if chosen.states and not (kind.moments or masters):
            why, do = f"{kind.name} keeps no states of this module", "remove it"
            raise _unused(f"offload.{module}.states", chosen.states, why, do)
        if chosen.states:
            _require_trained(config, module, f"offload.{module}.states", chosen.states)
        if chosen.activations and module in encoders and module in config.model.freeze:
            # The layers of a frozen text module keep activations for the gradients of what trains before them.
            why, do = f"{module} is frozen and its layers have no backward pass", f"remove it, or train {module}"
            raise _unused(f"offload.{module}.activations", chosen.activations, why, do)


def _check_zero(config: Config) -> None:
    """ZeRO 2 shares gradients, of which frozen modules have none."""
    for module, zero in config.zero.items():
        if zero == 2 and config.model.is_frozen(module):
            raise _unused(f"zero.{module}", zero, f"{module} is frozen and has no gradients", "remove it, or use 3")


def _require_trained(config: Config, module: str, name: str, value: object) -> None:
    """Frozen modules have neither gradients nor an optimizer."""
    if config.model.is_frozen(module):
        raise _unused(name, value, f"{module} is frozen and not updated", "remove it")


def _check_plan(plan: PlanConfig) -> None:
    if plan.supervised > 1:
        raise _wrong("plan.supervised", plan.supervised, "> 0 and ≤ 1", "it is a share", "try `--plan.supervised 0.5`")


def _check_unused(optimizer: OptimizerConfig) -> None:
    """Settings that the optimizer or its schedule does not use."""
    defaults = {f.name: f.default for f in fields(optimizer)}
    unused: dict[str, tuple[str, str]] = dict.fromkeys(OPTIMIZERS[optimizer.name].unused, ("name", optimizer.name))
    if optimizer.schedule == "constant":
        unused["min_lr"] = ("schedule", "constant")
    for name, (setting, reason) in unused.items():
        value = getattr(optimizer, name)
        if value != defaults[name]:
            setting = f"optimizer.{setting}"
            raise _unused(f"optimizer.{name}", value, f"{setting} is {reason}", f"remove it, or change {setting}")
