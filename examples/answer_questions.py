"""Answers a data set's questions with an exported model in plain `transformers`, and prints the exact-match rate.

    python -m examples.answer_questions HF_DIR --annotations FILE [--images DIR] [--adapter DIR] [--blank]

The model runs in other layers than those that trained it, so the rate verifies the export too. The first question of
each record is answered greedily. `--adapter` adds the adapters of a PEFT folder by `peft`. `--blank` replaces pictures
and videos by one colour, which gives the rate of guessing.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import AutoModelForImageTextToText, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from megatron_hetero.base.errors import UserError, listed, printable
from megatron_hetero.base.terminal import Parser, console
from megatron_hetero.cli.command import a_path, at_least
from megatron_hetero.config.sections import DatasetConfig, VideoConfig, cache_folder
from megatron_hetero.data.chat import END_OF_TURN
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Dataset, Reading, Record
from megatron_hetero.data.tokenizer import check_folder
from megatron_hetero.data.validation import item_fields
from megatron_hetero.groups.launch import ended
from megatron_hetero.models.items.types import Piece

_MARKS = re.compile("<image>|<video>")


class Answerer:
    """A model with its tokenizer and readers. Nothing is downloaded and no code of the folder runs."""

    def __init__(
        self, folder: Path, device: str, marks: Literal["video", "pairs"] = "video", adapter: Path | None = None
    ) -> None:
        """Raises `UserError` if the folder lacks files or weights: transformers would initialise them at random."""
        self.processor = Processor.from_folder(folder, SimpleNamespace(video=VideoConfig(marks=marks)))
        tokenizer: Any = self.processor.tokenizer
        tokenizer.pad_token = tokenizer.pad_token or END_OF_TURN  # Any token will do: padding is masked.
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise UserError.at(folder, problem=f"no weights for {listed(missing)}", fix="export the model again")
        if adapter is not None:
            from peft import PeftModel

            with warnings.catch_warnings():  # peft 0.21 reads an attribute that transformers has renamed.
                warnings.simplefilter("ignore", FutureWarning)
                PeftModel.from_pretrained(model, adapter)  # Into the model itself.
        self.model: Any = model.to(device).eval()
        end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        # Replaces the folder's settings, such as sampling and penalties.
        self.model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=tokenizer.pad_token_id)

    @torch.no_grad()
    def answer(self, records: Sequence[Record], blank: bool, max_new_tokens: int) -> list[str]:
        """Return the answers to the first questions of some records."""
        samples = [self.processor.tokenize(_first_question(record)) for record in records]
        prompts = [int(sample.supervised.argmax()) for sample in samples]
        longest = max(prompts)
        ids = torch.full((len(samples), longest), self.model.generation_config.pad_token_id)
        mask, positions = torch.zeros_like(ids), torch.zeros(3, *ids.shape, dtype=torch.int64)
        for k, (sample, length) in enumerate(zip(samples, prompts, strict=True)):
            # Left padding, so that all answers start at the same position.
            ids[k, longest - length :] = torch.from_numpy(sample.input_ids[:length])
            mask[k, longest - length :] = 1
            positions[:, k, longest - length :] = torch.from_numpy(sample.position_ids[:, :length])
        inputs = {"input_ids": ids, "attention_mask": mask, **self._items(samples, ids, blank)}
        # Positions as in training: those of transformers overlap after videos of Qwen2.5-VL.
        deltas = positions.amax(dim=(0, 2))[:, None] + 1 - mask.sum(dim=1, keepdim=True)
        rope_index = tuple(tensor.to(self.model.device) for tensor in (positions, deltas))
        self.model.model.get_rope_index = lambda *_, **__: rope_index
        moved = {name: each.to(self.model.device) for name, each in inputs.items()}
        output = self.model.generate(**moved, max_new_tokens=max_new_tokens)
        texts = self.processor.tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _items(self, samples: Sequence[TokenizedSample], ids: Tensor, blank: bool) -> dict[str, Tensor]:
        """Patches and grids of pictures and videos. `blank`: in the mean colour."""
        config, patches_by_modality = self.model.config, dict[str, list[Tensor]]()
        grids_by_modality = dict[str, list[list[int]]]()
        for sample in samples:
            for k, (ref, sizes) in enumerate(zip(sample.record.items, sample.pieces, strict=True)):
                pieces = [Piece(number, size) for number, size in enumerate(sizes)]
                patches = torch.from_numpy(self.processor.patches(sample.record, k, pieces))
                name, whole = ref.field.modality, [len(sizes), *sizes[0][1:]]  # type: ignore[index]
                patches_by_modality.setdefault(name, []).append(torch.zeros_like(patches) if blank else patches)
                grids_by_modality.setdefault(name, []).append(whole)
        kinds = {"image": (config.image_token_id, 1, ""), "video": (config.video_token_id, 2, "_videos")}
        inputs = {"mm_token_type_ids": torch.zeros_like(ids)}
        for name, (token, kind, tail) in kinds.items():
            if name in patches_by_modality:
                inputs["mm_token_type_ids"] += kind * (ids == token)
                inputs[f"pixel_values{tail}"] = torch.cat(patches_by_modality[name])
                inputs[f"{name}_grid_thw"] = torch.tensor(grids_by_modality[name])
        return inputs


def _first_answer(record: Record) -> int:
    """Return the number of turns before the first answer."""
    return [turn.role for turn in record.turns].index("assistant")


def _first_question(record: Record) -> Record:
    """Return the record up to its first answer, with the items that are shown before it."""
    at = _first_answer(record)
    shown = sum(not isinstance(entry, str) for turn in record.turns[:at] for entry in turn.entries)
    return replace(record, turns=record.turns[: at + 1], items=record.items[:shown])


def rates(answerer: Answerer, records: Sequence[Record], given: argparse.Namespace) -> Table:
    """Return a table of the exact-match rates of the most frequent questions and of all."""
    asked, correct = Counter[str](), Counter[str]()
    for start in range(0, len(records), given.batch_size):
        batch = records[start : start + given.batch_size]
        answers = answerer.answer(batch, given.blank, given.max_new_tokens)
        for record, answer in zip(batch, answers, strict=True):
            at = _first_answer(record)
            question = _MARKS.sub("", record.turns[at - 1].text).strip()
            asked[question] += 1
            correct[question] += answer == record.turns[at].text.strip()
    table = Table("question", title=f"Exact match, pictures {'blanked' if given.blank else 'shown'}")
    for name in ("correct", "asked", "rate"):
        table.add_column(name, justify="right")
    frequent = [(Text(printable(q, but="\n\t")), correct[q], number) for q, number in asked.most_common(12)]
    for question, right, number in (*frequent, ("all", correct.total(), asked.total())):
        table.add_row(question, str(right), str(number), f"{right / number:.1%}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return ended(lambda: _answer(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    positive = partial(at_least, 1)
    parser = Parser(prog="python -m examples.answer_questions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("hf_dir", type=a_path, metavar="HF_DIR", help="exported model in transformers format")
    parser.add_argument("--annotations", type=a_path, required=True, help="questions in LLaVA format")
    parser.add_argument("--images", type=a_path, help="folder of images and videos, the base of relative paths")
    parser.add_argument("--adapter", type=a_path, help="PEFT folder of low-rank adapters; needs `peft`")
    parser.add_argument("--limit", type=positive, help="maximum number of records (default: all)")
    parser.add_argument("--blank", action="store_true", help="show pictures and videos in one colour")
    parser.add_argument("--max-new-tokens", type=positive, default=8, help="maximum tokens per answer (default 8)")
    parser.add_argument("--batch-size", type=positive, default=16, help="questions per batch (default 16)")
    marks = "the run's data.video.marks, which no folder has (default video)"
    parser.add_argument("--marks", choices=("video", "pairs"), default="video", help=marks)
    parser.add_argument("--device", type=_device, default="cpu", help="torch device (default cpu)")
    return parser


def _device(text: str) -> str:
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from error
    return text


def _answer(given: argparse.Namespace) -> None:
    disable_progress_bar()
    check_folder(given.hf_dir)
    fields = item_fields({"vision": ("image", "video")})
    entry = DatasetConfig(annotations=given.annotations, images=given.images)
    questions = Dataset("questions", entry, Reading(fields, cache_folder("records")))
    records = [questions[k] for k in range(len(questions))[: given.limit]]
    console().print(rates(Answerer(given.hf_dir, given.device, given.marks, given.adapter), records, given))


if __name__ == "__main__":
    raise SystemExit(main())
