"""Exact-match rate of the exported model's greedy answers on a data set.

The model runs in plain `transformers`, not in the layers it was trained with, so the rate also verifies the export.
Blank items (grey pictures) give the rate of guessing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from megatron_hetero.base.errors import UserError, in_short, listed, os_errors_as, printable
from megatron_hetero.base.files import RESTORE, read_object, shown
from megatron_hetero.base.outputs import EVALUATION
from megatron_hetero.base.terminal import console
from megatron_hetero.config.schema import Config
from megatron_hetero.data.chat import END_OF_TURN
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Annotations, Record
from megatron_hetero.data.validation import ItemField, split_at_placeholders
from megatron_hetero.groups.platform import Platform
from megatron_hetero.hf.model_files import all_finite
from megatron_hetero.models.family import Family
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.items.pictures import PixelLimits
from megatron_hetero.models.items.types import ItemType, Modality, Piece, Size
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import open_modules
from megatron_hetero.train.log import unwritable

KINDS: tuple[Modality, ...] = get_args(Modality)
"""Modalities in the order of their numbers in `mm_token_type_ids`, from 1."""
MOST_LINES = 12
"""Maximum number of questions with a line of their own in the table."""


@dataclass(frozen=True)
class Answer:
    """One question with the expected answer and the model's, both stripped."""

    question: str
    expected: str
    given: str

    @property
    def correct(self) -> bool:
        """Whether the two answers are the same text."""
        return self.expected == self.given


@dataclass(frozen=True)
class EvaluationResult:
    """All answers, in the order of the annotations."""

    answers: tuple[Answer, ...]
    blank: bool = False

    @property
    def questions(self) -> int:
        """Number of questions."""
        return len(self.answers)

    @property
    def correct(self) -> int:
        """Number of correct answers."""
        return sum(answer.correct for answer in self.answers)

    @property
    def rate(self) -> float:
        """Share of correct answers, 0 to 1."""
        return self.correct / self.questions

    def by_question(self) -> dict[str, EvaluationResult]:
        """Return the answers to each wording of a question, the most frequent wording first."""
        groups: dict[str, list[Answer]] = {}
        for answer in self.answers:
            groups.setdefault(answer.question, []).append(answer)
        ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
        return {question: EvaluationResult(tuple(group), self.blank) for question, group in ordered}

    def __str__(self) -> str:
        pictures_were = "blanked" if self.blank else "shown"
        return f"{100 * self.rate:.1f} % exact match ({self.correct} of {self.questions}, pictures {pictures_were})"


class _Shown(NamedTuple):
    """An item of a prompt."""

    field: ItemField
    size: Size
    patches: np.ndarray


@dataclass(frozen=True)
class _Prompt:
    """The first question of a record, as tokens up to the model's answer."""

    question: str
    expected: str
    tokens: list[int]
    shown: list[_Shown]


def exact_match(
    hf_dir: Path,
    annotations: Path,
    images: Path | None,
    *,
    limit: int | None = None,
    blank: bool = False,
    max_new_tokens: int = 8,
    batch_size: int = 16,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    device: str = "cpu",
) -> EvaluationResult:
    """Answer the first question of every record greedily.

    Args:
        hf_dir: a folder in `transformers` format; nothing is downloaded and no code of the folder runs.
        annotations: LLaVA-style JSON or JSONL.
        images: folder that image paths are relative to; None for text-only data.
        limit: answer only the first `limit` records; None answers all.
        blank: show uniform grey pictures of the same sizes instead.
        max_new_tokens: longest answer.
        batch_size: questions per call of `generate`.
        min_pixels: `data.min_pixels` of the training; None takes the folder's.
        max_pixels: `data.max_pixels` of the training; None takes the folder's.
        device: torch device of the model.

    Raises:
        UserError: a folder, file, record or picture is missing or broken.
    """
    processor = Processor.from_folder(hf_dir, PixelLimits(min_pixels, max_pixels))
    tokenizer = processor.tokenizer
    # Any token will do: padding is masked.
    tokenizer.pad_token = tokenizer.pad_token or END_OF_TURN
    # transformers would initialise missing weights at random, and read quantised codes as values.
    folders = ModelFolders.read(hf_dir)
    open_modules(folders, ModelShapes.of(folders), seed=0)
    family = family_of(processor.model_type)
    model = _load_model(hf_dir, family, tokenizer, device)
    records = islice(Annotations("evaluation", annotations, images, processor.fields), limit)
    prompts = (_prompt(record, processor, blank) for record in records)
    types: dict[Modality, ItemType] = {each.modality: each for each in family.items}
    answers: list[Answer] = []
    while batch := list(islice(prompts, batch_size)):
        answers += _answer(model, processor, types, batch, max_new_tokens)
    return EvaluationResult(tuple(answers), blank)


def _load_model(hf_dir: Path, family: Family, tokenizer: Any, device: str) -> Any:
    # Other settings of the folder's generation_config.json (sampling, beams, penalties, forced tokens) are ignored.
    greedy = GenerationConfig(
        do_sample=False, eos_token_id=_ends(hf_dir, tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    try:
        loaded: Any = family.model_class().from_pretrained(
            hf_dir, local_files_only=True, use_safetensors=True, generation_config=greedy, output_loading_info=True
        )
        model, info = loaded
        if drawn := sorted(info["missing_keys"]):
            raise ValueError(f"transformers finds no weights for {listed(drawn)}")
    except Exception as error:  # safetensors, json and transformers raise exceptions of their own
        raise UserError.at(
            hf_dir,
            found=f"weights that do not load ({in_short(error)})",
            expected=f"a {family.title} model with safetensors weights",
            fix="export the model again",
        ) from error
    if strange := [name for name, parameter in model.named_parameters() if not all_finite(parameter.detach())]:
        raise UserError.at(
            hf_dir,
            problem=f"NaN or infinity in {len(strange)} tensors: {listed(strange)}",
            fix="export an earlier step of the run",
        )
    try:
        if torch.device(device).type == "meta":
            raise RuntimeError("tensors without values")
        return model.to(device).eval()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        found = str(error).splitlines()[0]
        fix = "choose another, such as cpu or cuda:0"
        raise UserError.at(f"--device {device}", found=found, expected="a device of this machine", fix=fix) from None


def _ends(hf_dir: Path, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer, from the folder's generation_config.json and the chat template."""
    file = hf_dir / "generation_config.json"
    named = read_object(file).get("eos_token_id") if file.is_file() else None
    ends = named if isinstance(named, list) else [] if named is None else [named]
    if not all(type(end) is int for end in ends):
        raise UserError.at(f"{file}: eos_token_id", found=shown(named), expected="the number of a token", fix=RESTORE)
    return list(dict.fromkeys([*ends, tokenizer.convert_tokens_to_ids(END_OF_TURN)]))


def _prompt(record: Record, processor: Processor, blank: bool) -> _Prompt:
    first = next(k for k, turn in enumerate(record.turns) if turn.role == "assistant")
    asked = "\n".join(turn.text for turn in record.turns[:first] if turn.role == "user")
    stretches, fields = split_at_placeholders(asked, processor.fields)
    tokens, sizes = processor.prompt(record, first, len(fields))
    shown = []
    for k, (field, size) in enumerate(zip(fields, sizes, strict=True)):
        reader = processor.readers[field].blank() if blank else processor.readers[field]
        pieces = [Piece(number, of_piece) for number, of_piece in enumerate(reader.pieces(size))]
        shown.append(_Shown(field, size, reader.patches(record.item(k), pieces)))
    return _Prompt("".join(stretches).strip(), record.turns[first].text.strip(), tokens.tolist(), shown)


def _answer(
    model: Any, processor: Processor, types: Mapping[Modality, ItemType], batch: list[_Prompt], max_new_tokens: int
) -> list[Answer]:
    # Left padding, so that all answers start at the same position.
    inputs = processor.tokenizer.pad(
        {"input_ids": [prompt.tokens for prompt in batch]}, padding_side="left", return_tensors="pt"
    )
    kinds = torch.zeros_like(inputs["input_ids"], dtype=torch.int32)
    for field, reader in processor.readers.items():
        kinds[inputs["input_ids"] == reader.token_id] = KINDS.index(field.modality) + 1
        if of_field := [each for prompt in batch for each in prompt.shown if each.field == field]:
            patches = np.concatenate([each.patches for each in of_field])
            of_type = types[field.modality].inputs(patches, [each.size for each in of_field])
            inputs.update({name: x.to(model.dtype) if x.is_floating_point() else x for name, x in of_type.items()})
    inputs["mm_token_type_ids"] = kinds
    with torch.no_grad():
        output = model.generate(**inputs.to(model.device), max_new_tokens=max_new_tokens)
    texts = processor.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [Answer(p.question, p.expected, text.strip()) for p, text in zip(batch, texts, strict=True)]


def result_table(result: EvaluationResult) -> Table:
    """Return a table with a line per wording of a question, and the total."""
    table = Table(title=f"Exact match, pictures {'blanked' if result.blank else 'shown'}")
    table.add_column("question", overflow="fold")
    for name in ("correct", "asked", "rate"):
        table.add_column(name, justify="right")
    groups = result.by_question()
    for question, group in islice(groups.items(), MOST_LINES):
        table.add_row(Text(printable(question, but="\n\t")), *_cells(group))
    rest = tuple(answer for group in islice(groups.values(), MOST_LINES, None) for answer in group.answers)
    if rest:
        table.add_row(f"({len(groups) - MOST_LINES} other questions)", *_cells(EvaluationResult(rest, result.blank)))
    table.add_section()
    table.add_row("all", *_cells(result))
    return table


def _cells(result: EvaluationResult) -> tuple[str, str, str]:
    return str(result.correct), str(result.questions), f"{100 * result.rate:.1f} %"


def evaluate_export(config: Config, platform: Platform) -> None:
    """Answer the questions of `eval.datasets`, with their pictures and with blank ones; print tables, write
    `evaluation.json`.

    For one process, once all others are done: it uses all cores. Raises `UserError` as `exact_match` does, and if the
    file cannot be written.
    """
    disable_progress_bar()
    if not platform.is_cuda:
        torch.set_num_threads(os.cpu_count() or 1)
    assert config.export.hf_dir is not None, "the configuration requires an export where something is evaluated"
    results: dict[str, dict[str, object]] = {}
    for name in config.eval.datasets:
        dataset, results[name] = config.data.registry[name], {}
        for blank in (False, True):
            result = exact_match(
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
            console().print(result_table(result))
            print(f"{name}: {result}", flush=True)
            results[name]["blanked" if blank else "shown"] = {"rate": result.rate, "questions": result.questions}
    path = config.log.dir / EVALUATION
    with os_errors_as(partial(unwritable, path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
