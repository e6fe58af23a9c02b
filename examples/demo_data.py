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
"""That an encoder makes of a picture."""


class Sample(NamedTuple):
    """Its number; tokens, int64 [LENGTH], 0 in place of rows; which are answers; pictures, [n, 3, SIDE, SIDE]."""

    number: int
    tokens: Tensor
    answers: Tensor
    pictures: Tensor

    @property
    def rows(self) -> int:
        """That its pictures become."""
        return ROWS * len(self.pictures)


def read_data(folder: Path, device: torch.device) -> tuple[list[Sample], int]:
    """The samples, and the number of words."""
    if not (folder / "train.jsonl").is_file():
        raise UserError.at(
            "--data",
            problem=f"no file {folder / 'train.jsonl'}",
            fix="run `make demo/demo.json`, or name another folder",
        )
    with open(folder / "train.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    turns = [[turn["value"].replace("<image>", "").split() for turn in r["conversations"]] for r in records]
    words = {word: at for at, word in enumerate(sorted({w for each in turns for turn in each for w in turn}), 2)}
    samples = []
    for number, (record, (question, answer)) in enumerate(zip(records, turns, strict=True)):
        files = record.get("image", [])
        files = [files] if isinstance(files, str) else files
        shown = [
            np.asarray(Image.open(folder / "images" / f).resize((SIDE, SIDE)), np.float32) / 128 - 1 for f in files
        ]
        pictures = torch.from_numpy(np.array(shown, np.float32).reshape(-1, SIDE, SIDE, 3)).permute(0, 3, 1, 2)
        said = [0] * (ROWS * len(files)) + [words[word] for word in question + answer]
        tokens = torch.tensor((said + [1] * LENGTH)[:LENGTH])
        places = torch.arange(LENGTH)
        answers = ((places >= len(said) - len(answer)) & (places < len(said))).float()
        samples.append(Sample(number, *(each.to(device) for each in (tokens, answers, pictures))))
    return samples, len(words) + 2
