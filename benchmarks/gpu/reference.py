"""The same samples through plain `transformers`, one at a time, and how far apart gradients are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import LEARNING_RATE, SIDES
from benchmarks.systems import MAX_PIXELS, plain_inputs
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.models.items.pictures import PixelLimits

FLOOR = 1e-3
"""Of the norm of all gradients: what is added to a gradient's norm before errors are divided by it."""


@dataclass
class Reference:
    """A model of `transformers` on a device, and the samples."""

    model: Any
    processor: Processor
    mixture: Mixture
    device: torch.device

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device, *, rounded: bool = False) -> Reference:
        """From what `cases.write` wrote. `rounded`: fp32 arithmetic on weights of bf16."""
        found = cls.of(folder / "model", folder / "data.jsonl", torch.bfloat16 if rounded else dtype, device)
        found.model.to(dtype)
        return found

    @classmethod
    def of(cls, model: Path, annotations: Path, dtype: torch.dtype, device: torch.device) -> Reference:
        """From a model's folder, and records with a folder `images` beside them."""
        from transformers import AutoModelForImageTextToText

        loaded: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        registry = {"d": DatasetConfig(annotations=annotations, images=annotations.parent / "images")}
        processor, mixture = (
            Processor.from_folder(model, PixelLimits(None, MAX_PIXELS)),
            Mixture.parse(("d",), registry, False, 0),
        )
        return cls(loaded.to(device), processor, mixture, device)

    def gradients(self, step: int = 1) -> tuple[float, dict[str, Tensor]]:
        """Loss and every gradient of a step, by stored name, fp32 on the host."""
        self.model.zero_grad()
        samples = [self.processor.tokenize(self.mixture[(step - 1) * len(SIDES) + k]) for k in range(len(SIDES))]
        loss = self._loss(samples, backward=True)
        return loss, {stored_name(n): p.grad.float().cpu() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def loss(self, count: int) -> float:
        """Of the first samples."""
        return self._loss([self.processor.tokenize(self.mixture[k]) for k in range(count)], backward=False)

    def _loss(self, samples: Sequence[TokenizedSample], *, backward: bool) -> float:
        supervised = torch.tensor(float(sum(int(sample.supervised.sum()) for sample in samples)), device=self.device)
        total = 0.0
        for sample in samples:
            inputs = {k: v.to(self.device) for k, v in plain_inputs(sample, self.processor).items()}
            if "pixel_values" in inputs:
                inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
            loss = self.model(**inputs, num_items_in_batch=supervised, use_cache=False).loss
            if backward:
                loss.backward()
            total += loss.item()
        return total

    def train(self, steps: int) -> tuple[list[float], dict[str, Tensor]]:
        """Losses of steps of AdamW with gradients clipped at 1, and the weights after them."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        losses = []
        for step in range(1, steps + 1):
            losses.append(self.gradients(step)[0])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
        return losses, self.weights()

    def weights(self) -> dict[str, Tensor]:
        """All of them by stored name, fp32 on the host."""
        return {stored_name(n): p.detach().float().cpu().clone() for n, p in self.model.named_parameters()}


def stored_name(name: str) -> str:
    """The name of a parameter in a published folder."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Of all tensors together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the differences of all tensors over the norm of what is expected."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return norm({name: found[name] - expected[name] for name in expected}) / norm(expected)


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest relative error of a tensor by kind of parameter: layers of a kind are one.

    A tensor's error is the norm of its difference over its norm plus `FLOOR` of the norm of all.
    """
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    floor, largest = FLOOR * norm(expected), {}
    for name, tensor in expected.items():
        error = float((found[name].double() - tensor.double()).norm()) / (float(tensor.double().norm()) + floor)
        kind = re.sub(r"\.\d+\.", ".*.", name)
        largest[kind] = max(largest.get(kind, 0.0), error)
    return largest
