"""Answers a data set's questions with an exported model in plain `transformers`, and prints the exact-match rate.

    python -m examples.answer_questions HF_DIR --annotations FILE [--images DIR] [--blank]

The model does not run in the layers it was trained with, so the rate verifies the export too. The first question of
each record is answered greedily. `--blank` shows grey pictures of the same sizes instead: the rate of guessing.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils.logging import disable_progress_bar

from megatron_hetero.base.errors import UserError, listed, printable
from megatron_hetero.base.terminal import Parser, console
from megatron_hetero.cli.command import a_path, at_least
from megatron_hetero.data.chat import END_OF_TURN, to_messages
from megatron_hetero.data.records import Annotations, Record
from megatron_hetero.data.tokenizer import check_folder
from megatron_hetero.groups.launch import ended
from megatron_hetero.models.items.image_files import load_picture


class Answerer:
    """A model with its tokenizer and image processor. Nothing is downloaded and no code of the folder runs."""

    def __init__(self, folder: Path, device: str) -> None:
        """Raises `UserError` if the folder lacks files, or weights, which transformers would initialise at random."""
        check_folder(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.tokenizer.pad_token = self.tokenizer.pad_token or END_OF_TURN  # Any token will do: padding is masked.
        self.images: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise UserError.at(folder, problem=f"no weights for {listed(missing)}", fix="export the model again")
        self.model: Any = model.to(device).eval()
        end = self.tokenizer.convert_tokens_to_ids(END_OF_TURN)
        # In place of the folder's settings, such as sampling and penalties.
        self.model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=self.tokenizer.pad_token_id)

    @torch.no_grad()
    def answer(self, records: Sequence[Record], blank: bool, max_new_tokens: int) -> list[str]:
        """Return the answers to the first questions of some records."""
        pictures = [picture for record in records for picture in _pictures(record, blank)]
        shown = self.images(images=pictures, return_tensors="pt") if pictures else {}
        rows = (int(grid.prod()) // self.images.merge_size**2 for grid in shown.get("image_grid_thw", ()))
        token = self.tokenizer.convert_ids_to_tokens(self.model.config.image_token_id)
        chats = [to_messages(record)[: _first_answer(record)] for record in records]
        texts = self.tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        prompts = [re.sub(re.escape(token), lambda _: token * next(rows), text) for text in texts]
        # Left padding, so that all answers start at the same position.
        inputs = self.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.model.config.image_token_id).int()
        inputs.update(shown)
        output = self.model.generate(**inputs.to(self.model.device), max_new_tokens=max_new_tokens)
        answers = output[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.tokenizer.batch_decode(answers, skip_special_tokens=True)]


def _first_answer(record: Record) -> int:
    """Return the number of turns before the first answer."""
    return [turn.role for turn in record.turns].index("assistant")


def _pictures(record: Record, blank: bool) -> list[Image.Image]:
    """Return the pictures before the first answer."""
    count = sum(turn.text.count("<image>") for turn in record.turns[: _first_answer(record)])
    pictures = [load_picture(*record.item(k)) for k in range(count)]
    return [Image.new("RGB", each.size, (128, 128, 128)) for each in pictures] if blank else pictures


def rates(answerer: Answerer, records: Sequence[Record], given: argparse.Namespace) -> Table:
    """Return a table of the exact-match rates of the most frequent questions and of all."""
    asked, correct = Counter[str](), Counter[str]()
    for start in range(0, len(records), given.batch_size):
        batch = records[start : start + given.batch_size]
        answers = answerer.answer(batch, given.blank, given.max_new_tokens)
        for record, answer in zip(batch, answers, strict=True):
            at = _first_answer(record)
            question = record.turns[at - 1].text.replace("<image>", "").strip()
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
    parser.add_argument("--images", type=a_path, help="image folder, the base of relative image paths")
    parser.add_argument("--limit", type=positive, help="maximum number of records (default: all)")
    parser.add_argument("--blank", action="store_true", help="show grey pictures of the same sizes")
    parser.add_argument("--max-new-tokens", type=positive, default=8, help="maximum tokens per answer (default 8)")
    parser.add_argument("--batch-size", type=positive, default=16, help="questions per batch (default 16)")
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
    annotations = Annotations("questions", given.annotations, given.images)
    records = [annotations[k] for k in range(len(annotations))[: given.limit]]
    console().print(rates(Answerer(given.hf_dir, given.device), records, given))


if __name__ == "__main__":
    raise SystemExit(main())
