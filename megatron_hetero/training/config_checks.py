"""What a configuration's values must fulfil, alone and with each other. Nothing but the values is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import reduce
from typing import TYPE_CHECKING, Any

from megatron_hetero.errors import UserError
from megatron_hetero.layout_grammar import did_you_mean
from megatron_hetero.module_names import ENCODER_NAME, TAKEN
from megatron_hetero.training.config_paths import check_paths
from megatron_hetero.training.settings import shown_name

if TYPE_CHECKING:
    from megatron_hetero.training.config import (
        CheckpointConfig,
        Config,
        DataConfig,
        EncoderConfig,
        EvalConfig,
        ExportConfig,
        ModelConfig,
        OptimizerConfig,
        PlanConfig,
        TrainConfig,
    )

# Lowest value of each number, and whether the number itself is allowed.
_LOWEST: dict[str, tuple[float, bool]] = {
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
    """Check all values. Raises `UserError` for the first that makes no sense."""
    _check_numbers(config)
    _check_model(config.model)
    _check_data(config.data, config.eval)
    _check_checkpoint(config.checkpoint)
    check_paths(config)
    _check_evaluation(config.eval, config.export, config.model)
    _check_batch(config.train)
    _check_optimizer(config.optimizer, config.train.iters)
    _check_plan(config.plan)


def _wrong(name: str, found: object, expected: str, why: str, do: str) -> UserError:
    return UserError.at(f"{name} (--{name})", found=str(found), expected=expected, because=why, fix=do)


def _check_numbers(config: Config) -> None:
    for name, (lowest, itself) in _LOWEST.items():
        value: Any = reduce(getattr, name.split("."), config)
        if value is not None and not (value >= lowest if itself else value > lowest):
            expected = f"{lowest} or more" if itself else f"more than {lowest}"
            raise _wrong(name, value, expected, "smaller values mean nothing here", "raise it, or leave it out")


def _check_model(model: ModelConfig) -> None:
    for name, encoder in model.encoders.items():
        _check_encoder(f"model.encoders.{name}", name, encoder)
    for part in model.freeze:
        if part not in model.parts:
            found, expected = f"`{part}`{did_you_mean(part, model.parts)}", f"some of {', '.join(model.parts)}"
            raise _wrong("model.freeze", found, expected, "the model has no other parts", "rename or remove it")
    if len(set(model.freeze)) != len(model.freeze):
        found = ", ".join(model.freeze)
        raise _wrong("model.freeze", found, "each part once", "a part is frozen or not", "remove the repetition")
    if set(model.freeze) == set(model.parts):
        why, expected = "then nothing is left to train", f"not all of {', '.join(model.parts)}"
        raise _wrong("model.freeze", "all parts", expected, why, "remove one of them")


def _check_encoder(where: str, name: str, encoder: EncoderConfig) -> None:
    if not ENCODER_NAME.fullmatch(name) or name in TAKEN or name.endswith("_projector"):
        expected, why = "a name of a-z, 0-9 and _ with another meaning nowhere", "flags and records use it"
        raise _wrong("model.encoders", f"the name `{name}`", expected, why, "rename the encoder, for example `detail`")
    low, high = encoder.min_pixels, encoder.max_pixels
    for field_name, area in (("min_pixels", low), ("max_pixels", high)):
        if area is not None and area < 1:
            why = "smaller values mean nothing here"
            raise _wrong(f"{where}.{field_name}", area, "1 or more", why, "raise it, or leave it out")
    if low is not None and high is not None and low > high:
        expected, why = f"at most {where}.max_pixels, {high}", "no image could have so many and so few"
        raise _wrong(f"{where}.min_pixels", low, expected, why, "lower it, or raise the other")


def _check_data(data: DataConfig, evaluation: EvalConfig) -> None:
    from megatron_hetero.data.mixture import Share  # Here, since it brings torch, which --help need not wait for.

    for name in data.registry:
        if "%" in name or not name:
            why = "`%` separates a name from its rate"
            raise _wrong("data.registry", f"the name `{name}`", "a name without `%`", why, "rename the data set")
    if not data.datasets:
        raise _wrong("data.datasets", "an empty list", "a name or more", "there is nothing to train on", "add one")
    _check_registered("data.datasets", [Share.parse(text).name for text in data.datasets], data.registry)
    _check_registered("eval.datasets", evaluation.datasets, data.registry)
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        expected, why = f"at most data.max_pixels, {data.max_pixels}", "no image could have so many and so few"
        raise _wrong("data.min_pixels", data.min_pixels, expected, why, "lower it, or raise the other")


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
    if checkpoint.dir is None:
        for f in fields(checkpoint):
            value = getattr(checkpoint, f.name)
            if f.name not in ("resume", "allow_changes") and value != f.default:
                why, do = "nothing is written without checkpoint.dir", "set checkpoint.dir, or remove it"
                found = str(value).lower() if isinstance(value, bool) else value
                raise _wrong(f"checkpoint.{shown_name(f)}", found, "nothing", why, do)


def _check_evaluation(evaluation: EvalConfig, export: ExportConfig, model: ModelConfig) -> None:
    names = ", ".join(evaluation.datasets)
    if evaluation.interval and not names:
        why = "there is nothing to evaluate"
        raise _wrong("eval.interval", evaluation.interval, "0 without eval.datasets", why, "name some in eval.datasets")
    if names and not evaluation.interval and model.encoders:
        why = "answers come from `transformers`, which has no such model"
        fix = "set eval.interval to measure them during training, or remove them"
        raise _wrong("eval.datasets", names, "none with model.encoders", why, fix)
    if names and not evaluation.interval and export.hf_dir is None:
        why = "the exported model is what answers"
        fix = "set export.hf_dir, or eval.interval to measure them during training"
        raise _wrong("eval.datasets", names, "none without export.hf_dir", why, fix)


def _check_registered(where: str, names: Sequence[str], registry: Mapping[str, object]) -> None:
    for name in names:
        if name not in registry:
            known = ", ".join(registry) or "none yet"
            found, why = f"`{name}`{did_you_mean(name, registry)}", "only these have files"
            do = f"correct the name, or add data.registry.{name} with annotations and images"
            raise _wrong(where, found, f"names of data.registry ({known})", why, do)


def _check_batch(train: TrainConfig) -> None:
    batch, micro = train.global_batch_size, train.micro_batch_size
    if batch % micro:
        best = max(n for n in range(1, min(micro, batch) + 1) if batch % n == 0)
        expected, why = f"a divisor of train.global_batch_size, {batch}", "a step is a whole number of micro-batches"
        raise _wrong("train.micro_batch_size", micro, expected, why, f"try `--train.micro_batch_size {best}`")


def _check_optimizer(optimizer: OptimizerConfig, iters: int) -> None:
    for beta in optimizer.betas:
        if not 0 <= beta < 1:
            why = "they are decay rates"
            raise _wrong(
                "optimizer.betas", beta, "two numbers from 0 to below 1", why, "try `--optimizer.betas 0.9 0.999`"
            )
    if optimizer.min_lr > optimizer.lr:
        expected, why = f"at most optimizer.lr, {optimizer.lr}", "the rate falls to it"
        raise _wrong("optimizer.min_lr", optimizer.min_lr, expected, why, "lower it, or raise the other")
    if optimizer.warmup_iters > iters:
        expected, why = f"at most train.iters, {iters}", "the rate would never reach its highest value"
        raise _wrong(
            "optimizer.warmup_iters", optimizer.warmup_iters, expected, why, f"try `--optimizer.warmup_iters {iters}`"
        )
    _check_unused(optimizer)


def _check_plan(plan: PlanConfig) -> None:
    if plan.supervised > 1:
        why = "it is a share of the tokens"
        raise _wrong(
            "plan.supervised", plan.supervised, "more than 0 and at most 1", why, "try `--plan.supervised 0.5`"
        )


def _check_unused(optimizer: OptimizerConfig) -> None:
    """Settings that would have no effect are errors: a user's setting is never silently ignored."""
    defaults = {f.name: f.default for f in fields(optimizer)}
    unused = {"betas": "sgd", "eps": "sgd", "weight_decay": "sgd", "min_lr": "constant"}
    for name, reason in unused.items():
        value = getattr(optimizer, name)
        if reason in (optimizer.name, optimizer.schedule) and value != defaults[name]:
            setting = "optimizer.name" if reason == "sgd" else "optimizer.schedule"
            why = f"{setting} is {reason}, which does not use it"
            raise _wrong(f"optimizer.{name}", value, "nothing", why, f"remove it, or change {setting}")
