"""The oracle: the same samples through plain `transformers`, in one process, one sample at a time.

Nothing of the project is used here but the format of the data: processor, chat template, positions, labels and loss are
`transformers`' own, or written again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass
class Oracle:
    """A model folder with a data set, and AdamW or SGD by hand."""

    model: Any
    tokenizer: Any
    images: Any
    records: list[dict]
    folder: Path
    balance: float = 0.0
    """Coefficient of the loss that balances experts."""

    @classmethod
    def load(cls, model: Path, data: Path) -> Oracle:
        """Load everything in fp32."""
        return cls(
            AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, experts_implementation="eager"),
            AutoTokenizer.from_pretrained(model),
            Qwen2VLImageProcessorPil.from_pretrained(model),
            [json.loads(line) for line in data.read_text().splitlines()],
            data.parent / "images",
        )

    def fit(self, numbers: Sequence[int], steps: int, rate: float) -> None:
        """Train the language model on these samples, all in every step, with Adam."""
        chosen = [self.records[number] for number in numbers]
        optimizer = torch.optim.Adam(self.model.model.language_model.parameters(), lr=rate)
        for _ in range(steps):
            losses, counts = zip(*map(self._sample, chosen), strict=True)
            optimizer.zero_grad()
            loss = torch.stack(losses).sum() / sum(counts)
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def answers_exactly(self, record: dict) -> bool:
        """Whether greedy generation gives the tokens of each answer, with the true conversation before it."""
        images = self._images(record, "image", self.images)
        ids = self._tokens(self._render(record), {"<|image_pad|>": images.get("image_grid_thw", [])})
        model: Any = self.model
        for start, stop in self._answers(ids):
            prompt = ids[None, :start]
            found = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                mm_token_type_ids=(prompt == model.config.image_token_id).int(),
                **images,
                do_sample=False,
                max_new_tokens=stop - start,
            )
            if found[0].tolist() != ids[:stop].tolist():
                return False
        return True

    def _answers(self, ids: Tensor) -> list[tuple[int, int]]:
        """Where each answer begins and ends, with its `<|im_end|>`."""
        answered = torch.nn.functional.pad((self._labels(ids) != -100).int(), (1, 1))
        change = answered.diff()
        return list(zip((change == 1).nonzero()[:, 0].tolist(), (change == -1).nonzero()[:, 0].tolist(), strict=True))

    def step(self, numbers: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients (by stored name) of the global batch of these samples; parameters have the latter."""
        self.model.zero_grad()
        total, supervised = torch.zeros(()), 0
        for number in numbers:
            loss, count = self._sample(self.records[number % len(self.records)])
            if loss.requires_grad:  # What trains may have no part in a sample.
                loss.backward()
            total, supervised = total + loss.detach(), supervised + count
        gradients = dict[str, Tensor]()
        for name, parameter in self.model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = grad / supervised
            gradients |= one_by_one(stored_name(name), parameter.grad)
        return float(total / supervised), gradients

    def weights(self) -> dict[str, Tensor]:
        """All weights by stored name."""
        parameters = self.model.named_parameters()
        return {
            name: values.clone()
            for parameter, whole in parameters
            for name, values in one_by_one(stored_name(parameter), whole.detach()).items()
        }

    def _sample(self, record: dict) -> tuple[Tensor, int]:
        ids, logits, *added = self._logits(record)
        targets = self._labels(ids)[1:]
        loss = torch.nn.functional.cross_entropy(logits[:-1].float(), targets, ignore_index=-100, reduction="sum")
        supervised = int((targets != -100).sum())
        return loss + sum(supervised * each for each in added), supervised

    def _logits(self, record: dict) -> tuple[Tensor, ...]:
        """The tokens of a record [n], and the logits [n, vocabulary]; with `balance` what it adds to a token's loss."""
        vision = self._images(record, "image", self.images)
        ids = self._tokens(self._render(record), {"<|image_pad|>": vision.get("image_grid_thw", [])})
        types = (ids == self.model.config.image_token_id).int()
        more = {"output_router_logits": True} if self.balance else {}
        mask = torch.ones_like(ids)[None]
        output = self.model(input_ids=ids[None], attention_mask=mask, mm_token_type_ids=types[None], **vision, **more)
        return ids, output.logits[0], *([self.balance * output.aux_loss] if self.balance else [])

    def _images(self, record: dict, field: str, processor: Any) -> dict[str, Tensor]:
        """Patches and grids of the images of a field; nothing where there are none."""
        names = record.get(field) or []
        pictures = [Image.open(self.folder / n) for n in ([names] if isinstance(names, str) else names)]
        return processor(images=pictures, return_tensors="pt") if pictures else {}

    def _render(self, record: dict) -> str:
        messages = []
        for turn in record["conversations"]:
            parts = turn["value"].split("<image>")
            content = []
            for k, part in enumerate(parts):
                content += [{"type": "image"}] * (k > 0) + [{"type": "text", "text": part}] * bool(part)
            messages.append({"role": ROLES[turn["from"]], "content": content})
        return self.tokenizer.apply_chat_template(messages, tokenize=False)

    def _tokens(self, text: str, grids_of: dict[str, Any]) -> Tensor:
        """The tokens of a text in which each pad stands once for each image of a grid."""
        for pad, grids in grids_of.items():
            for grid in grids:
                text = text.replace(pad, "<|placeholder|>" * (int(grid.prod()) // 4), 1)
            text = text.replace("<|placeholder|>", pad)
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


@dataclass
class TwoTowers(Oracle):
    """A model with a second vision tower, `detail`, for the pictures of the field of that name: two of `transformers`'
    modules, with the rows of both in the places of their own pads, and those of both towers' earlier layers, where they
    have some, in the same places of the first layers' outputs.
    """

    detail: Any = None
    detail_images: Any = None

    @classmethod
    def load(cls, model: Path, data: Path) -> TwoTowers:
        """Load everything in fp32; the second tower from the folder `detail` beside the model's."""
        other = model.parent / "detail"
        loaded = Oracle.load(model, data)
        whole: Any = loaded.model
        # A part of the model, so that its parameters are among the model's.
        whole.detail = AutoModelForImageTextToText.from_pretrained(other, dtype=torch.float32).model.visual
        processor = Qwen2VLImageProcessorPil.from_pretrained(other)
        return cls(**vars(loaded), detail=whole.detail, detail_images=processor)

    @torch.no_grad()
    def answers_exactly(self, record: dict) -> bool:
        """As `Oracle` has it, from one pass: `transformers` has no model of two towers that generates."""
        ids, logits, *_ = self._logits(record)
        return all(
            torch.equal(logits[start - 1 : stop - 1].argmax(dim=-1), ids[start:stop])
            for start, stop in self._answers(ids)
        )

    def _render(self, record: dict) -> str:
        return super()._render(record).replace("<detail>", "<|vision_start|><|video_pad|><|vision_end|>")

    def _logits(self, record: dict) -> tuple[Tensor, ...]:
        core: Any = self.model.model
        towers = {"<|image_pad|>": (core.visual, "image", self.images),
                  "<|video_pad|>": (self.detail, "detail", self.detail_images)}  # fmt: skip
        inputs = {pad: self._images(record, field, images) for pad, (_, field, images) in towers.items()}
        text = self._render(record)
        shown = list(re.findall(r"<\|(?:image|video)_pad\|>", text))
        grids = {pad: found.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.long)) for pad, found in inputs.items()}
        ids = self._tokens(text, grids)
        embedded = core.get_input_embeddings()(ids[None])
        is_row, deeper = torch.zeros_like(ids, dtype=torch.bool), {}
        for pad, (tower, *_) in towers.items():
            if inputs[pad]:
                given = tower(inputs[pad]["pixel_values"], grid_thw=grids[pad])
                mine = ids == self.tokenizer.convert_tokens_to_ids(pad)
                embedded, is_row = embedded.masked_scatter(mine[None, :, None], given.pooler_output), is_row | mine
                for depth, rows in enumerate(getattr(given, "deepstack_features", None) or []):
                    before = deeper.get(depth, torch.zeros_like(embedded[0]))
                    deeper[depth] = before.masked_scatter(mine[:, None], rows)
        coming = {pad: iter(of_pad) for pad, of_pad in grids.items()}
        in_order = torch.stack([next(coming[pad]) for pad in shown]) if shown else None
        everything = torch.ones_like(ids)[None]
        positions, _ = core.get_rope_index(ids[None], is_row[None].int(), in_order, attention_mask=everything)
        more = {"deepstack_visual_embeds": [deeper[depth][is_row] for depth in sorted(deeper)]} if deeper else {}
        more |= {"visual_pos_masks": is_row[None]} if deeper else {}
        more |= {"output_router_logits": True} if self.balance else {}
        hidden = core.language_model(inputs_embeds=embedded, position_ids=positions, attention_mask=everything, **more)
        logits = self.model.lm_head(hidden.last_hidden_state)[0]
        if not self.balance:
            return ids, logits
        from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

        config = self.model.config.text_config
        loss = load_balancing_loss_func(hidden.router_logits, config.num_experts, config.num_experts_per_tok)
        return ids, logits, torch.as_tensor(self.balance * loss)


def stored_name(name: str) -> str:
    """The name of a parameter in a published folder."""
    if name.startswith("detail."):
        return name.replace("detail.", "detail.visual.", 1)
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def one_by_one(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The matrices of all experts in a tensor of a layer, as a folder with one tensor for each names them; any other
    tensor as it is.
    """
    kinds = next((kinds for end, kinds in _OF_EXPERTS.items() if name.endswith(f".mlp.experts.{end}")), None)
    if kinds is None:
        return {name: tensor}
    place = name.rpartition(".")[0]
    return {
        f"{place}.{number}.{kind}.weight": matrix
        for number, stacked in enumerate(tensor)
        for kind, matrix in zip(kinds, stacked.chunk(len(kinds)), strict=True)
    }


_OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
