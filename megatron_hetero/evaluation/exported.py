"""Evaluates the exported model with plain `transformers`, at the end of a run."""

from __future__ import annotations

import json
import os
from functools import partial

import torch
from transformers.utils.logging import disable_progress_bar

from megatron_hetero.config.schema import Config
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.errors import os_errors_as
from megatron_hetero.evaluation.generate import EvaluationResult, exact_match, result_table
from megatron_hetero.outputs.logs import EVALUATION
from megatron_hetero.terminal import console
from megatron_hetero.training.log.folder import unwritable


def evaluate_export(config: Config, platform: Platform) -> None:
    """Answer the questions of `eval.datasets`, with their pictures and with blank ones; print tables, write
    `evaluation.json`.

    For one process, once all others are done: it uses all cores. Raises `UserError` as `exact_match` does, and if the
    file cannot be written.
    """
    disable_progress_bar()
    if not platform.is_cuda:
        torch.set_num_threads(os.cpu_count() or 1)
    results: dict[str, dict[str, object]] = {}
    for name in config.eval.datasets:
        results[name] = {}
        for blank in (False, True):
            result = _ask(config, name, platform, blank)
            console().print(result_table(result))
            print(f"{name}: {result}", flush=True)
            results[name]["blanked" if blank else "shown"] = {"rate": result.rate, "questions": result.questions}
    path = config.log.dir / EVALUATION
    with os_errors_as(partial(unwritable, path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _ask(config: Config, name: str, platform: Platform, blank: bool) -> EvaluationResult:
    assert config.export.hf_dir is not None, "the configuration requires an export where something is evaluated"
    dataset = config.data.registry[name]
    return exact_match(
        config.export.hf_dir,
        dataset.annotations,
        dataset.images,
        limit=config.eval.limit,
        blank=blank,
        max_new_tokens=config.eval.max_new_tokens,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        device=str(platform.device),
    )
