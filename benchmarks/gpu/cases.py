"""The small random model and the data of the sections that compare numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.gradients import whole_gradient
from benchmarks.measuring.material import ModelSize, write_samples
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.step.gradients import scale_gradients
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.train.hf_export import Value, assemble, gather_parameters
from megatron_hetero.train.run import Run
from pretrain_vlm import build_run

SIZE = ModelSize(
    vision_hidden=256, vision_layers=8, vision_heads=4, text_hidden=512, text_layers=4, text_heads=8, text_kv_heads=4
)
SMALL = ModelSize(
    vision_hidden=64, vision_layers=4, vision_heads=4, text_hidden=64, text_layers=4, text_heads=4, text_kv_heads=2
)
SIDES = (280, 112, 0, 0, 56, 196, 140, 0)
"""Pixels of the picture of each sample of a step; 0 is none. In micro-batches of two the second is text alone."""
SMALL_SIDES = (112, 56, 0, 0, 56, 84, 140, 0)
STEPS = 3
LEARNING_RATE = 1e-3


def write(folder: Path, *, small: bool, experts: int = 0) -> None:
    """`folder/model`, whose every parameter matters, and `folder/data.jsonl` for `STEPS` steps. With `experts`, each
    text layer has so many.
    """
    from transformers import AutoModelForImageTextToText

    sides, size = (SMALL_SIDES, SMALL) if small else (SIDES, SIZE)
    # Each step has the same sizes of pictures in another order.
    rolled = [side for step in range(STEPS) for side in sides[2 * step :] + sides[: 2 * step]]
    write_samples(folder, replace(size, experts=experts), rolled)
    model: Any = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Activations of order one, so that no gradient drowns in the rounding of others.
            # Experts' weights are one tensor [experts, inputs, outputs].
            inputs = parameter.shape[1] if parameter.dim() == 3 else parameter[0].numel()
            std = 0.2 if parameter.dim() == 1 else inputs**-0.5
            parameter.normal_(std=std).add_(1.0 if "norm" in name or "ln_q" in name else 0.0)
    model.save_pretrained(folder / "model")


def flags(folder: Path, vision: str, text: str, dtype: str, *more: str) -> list[str]:
    """Of a run on what `write` wrote."""
    common = (
        f"--model.hf_path {folder}/model --model.dtype {dtype} --data.registry.d.annotations {folder}/data.jsonl "
        f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false --data.workers 0 "
        f"--data.max_seq_length 4096 --train.global_batch_size {len(SIDES)} --train.micro_batch_size 2 "
        f"--train.iters {STEPS} --optimizer.lr {LEARNING_RATE} --optimizer.schedule constant --log.dir {folder}/log "
        f"--vision-parallel {vision} --text-parallel {text}"
    )
    return [*common.split(), *more]


def build(platform: Platform, given: list[str]) -> Run:
    """The run, as the program builds it."""
    return build_run(load_config(given), platform)


def gradients(run: Run, step: int = 1) -> tuple[float, dict[str, Tensor]]:
    """Loss and every gradient of a step, before clipping, by stored name, on the host of the first rank. With an
    optimizer that shares gradients out there must be one rank.
    """
    batch = run.loader.load(step, map)
    summary = run.trainer.gradients(batch)
    scale_gradients(run.trainer.optimizer.modules, 1.0 / batch.supervised)
    return summary.loss_sum / batch.supervised, stored(run, whole_gradient)


def stored(run: Run, value: Value = TrainedModule.whole_weight) -> dict[str, Tensor]:
    """What `value` has of each parameter, by stored name, fp32 on the host of the first rank; nothing elsewhere."""
    parts = gather_parameters(run.trainer.optimizer.modules, run.trainer.topology, value)
    return {name: tensor.float() for name, tensor in assemble(parts, stored_shapes(run.trainer.job.shapes))}
