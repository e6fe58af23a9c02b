"""The oracle: the same samples through plain `transformers`, in one process, one sample at a time.

Nothing of the project is used here but the format of the data: processor, chat template, positions, labels and loss are
`transformers`' own, or written again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass
class Oracle:
    """A model folder with a data set, and AdamW or SGD by hand."""

    model: Qwen2_5_VLForConditionalGeneration
    tokenizer: Any
    images: Any
    records: list[dict]
    folder: Path

    @classmethod
    def load(cls, model: Path, data: Path) -> Oracle:
        """Load everything in fp32."""
        return cls(
            Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32),
            AutoTokenizer.from_pretrained(model),
            Qwen2VLImageProcessorPil.from_pretrained(model),
            [json.loads(line) for line in data.read_text().splitlines()],
            data.parent / "images",
        )

    def step(self, numbers: range) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients (by stored name) of the global batch of these samples."""
        self.model.zero_grad()
        total, supervised = torch.zeros(()), 0
        for number in numbers:
            loss, count = self._sample(self.records[number % len(self.records)])
            loss.backward()
            total, supervised = total + loss.detach(), supervised + count
        gradients = {}
        for name, parameter in self.model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[stored_name(name)] = grad / supervised
        return float(total / supervised), gradients

    def weights(self) -> dict[str, Tensor]:
        """All weights by stored name."""
        return {stored_name(n): p.detach().clone() for n, p in self.model.named_parameters()}

    def _sample(self, record: dict) -> tuple[Tensor, int]:
        names = record.get("image") or []
        pictures = [Image.open(self.folder / n) for n in ([names] if isinstance(names, str) else names)]
        vision = self.images(images=pictures, return_tensors="pt") if pictures else {}
        ids = self._tokens(record, vision.get("image_grid_thw", []))
        labels = self._labels(ids)
        types = (ids == self.model.config.image_token_id).int()
        logits = self.model(
            input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], mm_token_type_ids=types[None], **vision
        ).logits[0]
        targets = labels[1:]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), targets, ignore_index=-100, reduction="sum")
        return loss, int((targets != -100).sum())

    def _tokens(self, record: dict, grids: Any) -> Tensor:
        messages = []
        for turn in record["conversations"]:
            parts = turn["value"].split("<image>")
            content = []
            for k, part in enumerate(parts):
                content += [{"type": "image"}] * (k > 0) + [{"type": "text", "text": part}] * bool(part)
            messages.append({"role": ROLES[turn["from"]], "content": content})
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        for grid in grids:
            text = text.replace("<|image_pad|>", "<|placeholder|>" * (int(grid.prod()) // 4), 1)
        text = text.replace("<|placeholder|>", "<|image_pad|>")
        return torch.tensor(self.tokenizer(text)["input_ids"])

    def _labels(self, ids: Tensor) -> Tensor:
        """What follows `<|im_start|>assistant\\n`, up to and with `<|im_end|>`."""
        head = self.tokenizer("<|im_start|>assistant\n")["input_ids"]
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        labels, at, tokens = torch.full_like(ids, -100), 0, ids.tolist()
        while at < len(tokens):
            if tokens[at : at + len(head)] == head:
                at += len(head)
                stop = tokens.index(end, at) + 1
                labels[at:stop] = ids[at:stop]
                at = stop
            else:
                at += 1
        return labels


def stored_name(name: str) -> str:
    """The name of a parameter in a published folder."""
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
