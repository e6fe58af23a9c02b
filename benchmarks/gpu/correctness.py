"""One rank over NCCL against plain `transformers` on the same device: loss, every gradient, weights after steps."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from benchmarks.gpu import cases
from benchmarks.gpu.record import Record
from benchmarks.gpu.reference import Reference, difference, errors
from megatron_hetero.groups.launch import process_group
from megatron_hetero.groups.platform import Platform

LOSS, GRADIENTS, UPDATE = 1e-5, 1e-4, 1e-3
"""In fp32, largest relative errors of the loss, of any gradient (as `reference.errors` has it), and of what the weights
have moved by.
"""
BF16 = 1.25
"""In bf16, how many times the error of `transformers`' own bf16 ours may be, over all gradients. Both against fp32
arithmetic on the same weights.
"""
BF16_KIND = 2.0
"""The same of any kind of parameter alone."""


def measure(record: Record, folder: Path, *, small: bool) -> None:
    """fp32, then bf16."""
    cases.write(folder, small=small)
    with process_group() as platform:
        record.put("arithmetic", {
            "device": platform.device_name, "backend": torch.distributed.get_backend(),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        })  # fmt: skip
        _fp32_gradients(record, folder, platform)
        _fp32_steps(record, folder, platform)
        _bf16_gradients(record, folder, platform)


def _fp32_gradients(record: Record, folder: Path, platform: Platform) -> None:
    expected_loss, expected = Reference.load(folder, torch.float32, platform.device).gradients()
    loss, found = cases.gradients(cases.build(platform, cases.flags(folder, "dp:1", "dp:1", "float32")))
    by_kind = errors(found, expected)
    record.put("fp32", {"loss": loss, "loss of transformers": expected_loss, "errors": by_kind})
    record.check("fp32: relative error of the loss", abs(loss - expected_loss) / expected_loss, LOSS)
    record.check("fp32: largest relative error of a gradient", max(by_kind.values()), GRADIENTS)


def _fp32_steps(record: Record, folder: Path, platform: Platform) -> None:
    reference = Reference.load(folder, torch.float32, platform.device)
    before = reference.weights()
    expected_losses, expected = reference.train(cases.STEPS)
    run = cases.build(platform, cases.flags(folder, "dp:1", "dp:1", "float32"))
    losses = [metrics.loss for metrics in run.steps(stop=False)]
    found = cases.stored(run)
    moved = {name: expected[name] - before[name] for name in before}
    error = difference({name: found[name] - before[name] for name in before}, moved)
    record.put("fp32 steps", {"losses": losses, "losses of transformers": expected_losses, "error": error})
    worst = max(abs(a - b) / b for a, b in zip(losses, expected_losses, strict=True))
    record.check(f"fp32: largest relative error of the losses of {cases.STEPS} steps of AdamW", worst, LOSS)
    record.check("fp32: relative error of what the weights have moved by in them", error, UPDATE)


def _bf16_gradients(record: Record, folder: Path, platform: Platform) -> None:
    expected_loss, expected = Reference.load(folder, torch.float32, platform.device, rounded=True).gradients()
    theirs_loss, theirs = Reference.load(folder, torch.bfloat16, platform.device).gradients()
    loss, ours = cases.gradients(cases.build(platform, cases.flags(folder, "dp:1", "dp:1", "bfloat16")))
    of_ours, of_theirs = errors(ours, expected), errors(theirs, expected)
    all_of_ours, all_of_theirs = difference(ours, expected), difference(theirs, expected)
    record.put("bf16", {
        "loss": loss, "loss of transformers": theirs_loss, "loss in fp32": expected_loss,
        "error": all_of_ours, "error of transformers": all_of_theirs,
        "errors": of_ours, "errors of transformers": of_theirs,
    })  # fmt: skip
    record.check("bf16: error of all gradients over that of transformers' bf16", all_of_ours / all_of_theirs, BF16)
    worst = max(of_ours, key=lambda kind: of_ours[kind] / of_theirs[kind])
    ratio = of_ours[worst] / of_theirs[worst]
    record.check(f"bf16: the same of one kind of parameter, at most ({worst})", ratio, BF16_KIND)
