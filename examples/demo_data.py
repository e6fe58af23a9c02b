"""The demo's data as tensors: samples of one picture, several or none, a question and an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from megatron_hetero import UserError

LENGTH, SIDE, PATCH = 24, 48, 16
"""Tokens of a sample, pixels of a picture's side and of a patch's."""
ROWS = (SIDE // PATCH) ** 2
"""Rows that an encoder computes for a picture."""


class Sample(NamedTuple):
    """A sample: its number; its tokens, int64 [LENGTH], 0 in place of rows; a mask of the answer's tokens, fp32; its
    pictures, [n, 3, SIDE, SIDE].
    """

    number: int
    tokens: Tensor
    answers: Tensor
    pictures: Tensor

    @property
    def rows(self) -> int:
        """Rows that an encoder computes for its pictures."""
        return ROWS * len(self.pictures)


def read_data(folder: Path, device: torch.device) -> tuple[list[Sample], int]:
    """Return the samples, and the size of the vocabulary. Raises `UserError`."""
    if not (folder / "train.jsonl").is_file():
        raise UserError.at(
            "--data",
            problem=f"no file {folder / 'train.jsonl'}",
            fix="run `make demo/demo.json`, or name another folder",
        )
    with open(folder / "train.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    turns = [[turn["value"].replace("<image>", "").split() for turn in record["conversations"]] for record in records]
    vocabulary = sorted({word for conversation in turns for turn in conversation for word in turn})
    words = {word: number for number, word in enumerate(vocabulary, 2)}  # 0 is a row, 1 padding.
    samples = []
    for number, (record, (question, answer)) in enumerate(zip(records, turns, strict=True)):
        files = record.get("image", [])
        files = [files] if isinstance(files, str) else files
        pixels = [np.asarray(Image.open(folder / "images" / name).resize((SIDE, SIDE)), np.float32) for name in files]
        pictures = torch.from_numpy(np.array(pixels, np.float32).reshape(-1, SIDE, SIDE, 3) / 128 - 1)
        ids = [0] * (ROWS * len(files)) + [words[word] for word in question + answer]
        tokens = torch.tensor((ids + [1] * LENGTH)[:LENGTH])
        places = torch.arange(LENGTH)
        answers = ((places >= len(ids) - len(answer)) & (places < len(ids))).float()
        samples.append(Sample(number, *(each.to(device) for each in (tokens, answers, pictures.permute(0, 3, 1, 2)))))
    return samples, len(words) + 2
