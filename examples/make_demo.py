"""Creates what a first training run needs: a small model, drawn pictures or videos with questions, a configuration.

    python -m examples.make_demo DIR [--model FAMILY] [--data image|video] [--adapt TRAINED] [--seed N] [--force]

DIR/model/               a model in `transformers` format: random weights, tokenizer and image processor
DIR/data/train.jsonl     questions about pictures, LLaVA-style
DIR/data/heldout.jsonl   questions about combinations of properties that training never shows
DIR/data/images/         the pictures, or the videos
DIR/data/reversed.jsonl  with videos only: the held-out ones played backwards, with other answers
DIR/config.yaml          the configuration of the run
DIR/demo.json            the options of the demo

With `--adapt` no model is written: low-rank adapters teach the trained one other names of colours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

# `python examples/make_demo.py` has this file's folder on its path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.demo.films import RATE, FilmSample, film_samples
from examples.demo.model import EXPERTS, SYSTEM_PROMPTS, DemoSizes, write_model
from examples.demo.records import Sample, held_out_samples, renamed, training_samples
from megatron_hetero.base.errors import UserError, reason
from megatron_hetero.base.terminal import Parser
from megatron_hetero.cli.command import a_path, at_least
from megatron_hetero.data.tokenizer import check_folder
from megatron_hetero.groups.launch import ended
from megatron_hetero.models.registry import titles

# Moved into place in this order, so that a folder with the marker is complete.
MARKER = "demo.json"
ENTRIES = ("model", "data", "config.yaml", MARKER)
# Increment when the same options produce other bytes.
FORMAT = 4
WORK = ".making-"
FAMILIES = tuple(SYSTEM_PROMPTS)
"""Families with a demo."""

# Positions are learned last, abruptly, between steps 150 and 300 depending on the seed; the other steps are margin.
# With half of the pictures, the same steps fit the training pictures but generalize less.
CONFIG = """\
# The demo's run. Paths are relative to this file.
model: {{hf_path: {base}, dtype: float32{balance}}}
modules: {{vision: {{parallel: 'sp:2'{lora}}}, text: {{parallel: '{text}'{lora}}}}}
data:
  registry:
    demo-train: {{annotations: data/train.jsonl, images: data/images}}
    demo-heldout: {{annotations: data/heldout.jsonl, images: data/images}}
  datasets: [demo-train]
  shuffle: true
  max_seq_length: 256
{video}train: {{iters: {steps}, global_batch_size: 32, micro_batch_size: {samples}, seed: {seed}}}
optimizer:
  name: adamw
  lr: {rate}
  min_lr: 0.0
  betas: [0.9, 0.99]
  eps: 1.0e-08
  weight_decay: 0.0
  clip_grad: 1.0
  schedule: cosine
  warmup_iters: 20
log: {{dir: log}}
export: {{hf_dir: {export}}}
"""
SETTINGS = {"balance": "", "text": "tp:2", "samples": 32}
SETTINGS |= {"base": "model", "lora": "", "steps": 450, "rate": 0.002, "export": "trained"}
# The projector, which would train in full beside adapters, is frozen, so that only adapters learn.
LORA_SETTINGS = {"balance": ", freeze: [projector]", "lora": ", lora: {r: 4}", "steps": 200, "rate": 0.006}
LORA_SETTINGS |= {"export": "adapter"}
# Experts are divided over the ranks; each rank has all other weights.
EXPERT_SETTINGS = {"balance": ", router_aux_loss_coef: 0.001", "text": "dp:2,ep:2", "samples": 16}
VIDEO_CONFIG = f"  video: {{fps: {RATE}, min_frames: 2}}\n"


@dataclass(frozen=True)
class DemoOptions:
    """Options that determine every byte of the demo."""

    seed: int = 0
    train_pictures: int = 8000
    heldout_questions: int = 320
    shape: DemoSizes = field(default_factory=DemoSizes)
    model: str = FAMILIES[0]
    data: Literal["image", "video"] = "image"
    base: str = ""
    """Folder of the trained model that adapters are trained beside, if any."""


def make_demo(folder: Path, options: DemoOptions | None = None, *, force: bool = False) -> None:
    """Write the demo into `folder`, all of it or nothing.

    Args:
        folder: new or empty.
        options: seed and sizes.
        force: replace `model/`, `data/`, `config.yaml` and `demo.json` in the folder; other content stays.

    Raises:
        UserError: the folder has content, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(WORK))
        if names and not force:
            raise UserError.at(
                folder,
                found=f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}",
                expected="a new or empty folder",
                because=f"{', '.join(ENTRIES)} would be replaced",
                fix="choose another DIR, or pass --force to replace those, with all that is in them",
            )
        _write_all(folder, options or DemoOptions())
    except OSError as error:
        problem = f"cannot be written ({reason(error)})"
        raise UserError.at(folder, problem=problem, fix="choose another DIR, or free space") from error


def _write_all(folder: Path, options: DemoOptions) -> None:
    """Write to a temporary folder, then move: an interrupted run leaves no partial demo."""
    with tempfile.TemporaryDirectory(prefix=WORK, dir=folder) as name:
        new = Path(name)
        _write_entries(new, options, folder)
        (folder / MARKER).unlink(missing_ok=True)
        for entry in ENTRIES:
            _remove(folder / entry)
            if (new / entry).exists():
                (new / entry).rename(folder / entry)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_entries(folder: Path, options: DemoOptions, target: Path) -> None:
    """Write to `folder` what will be moved to `target`."""
    data = folder / "data"
    (data / "images").mkdir(parents=True)
    if options.data == "video":
        train = film_samples(options.train_pictures, options.seed, held_out=False)
        held_out = film_samples(options.heldout_questions, options.seed, held_out=True)
        _write_samples(data, "reversed", [replace(sample, film=sample.film.reversed()) for sample in held_out])
    else:
        train = training_samples(options.train_pictures, options.seed)
        held_out = held_out_samples(options.heldout_questions, options.seed)
        if options.base:
            train, held_out = renamed(train), renamed(held_out)
    _write_samples(data, "train", train)
    _write_samples(data, "heldout", held_out)
    settings: dict[str, object] = SETTINGS | (EXPERT_SETTINGS if options.model in EXPERTS else {})
    if options.base:
        settings |= {"base": os.path.relpath(options.base, target), **LORA_SETTINGS}
    else:
        corpus = [text for sample in train for text in (sample.question, sample.answer)]
        write_model(folder / "model", options.model, corpus, options.shape, options.seed)
    video = VIDEO_CONFIG if options.data == "video" else ""
    config = CONFIG.format(seed=options.seed, video=video, **settings)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    marker = {"format": FORMAT} | asdict(options)
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _write_samples(data: Path, split: str, samples: Sequence[Sample | FilmSample]) -> None:
    with open(data / f"{split}.jsonl", "w", encoding="utf-8") as file:
        for k, sample in enumerate(samples):
            name = f"{split}-{k:05d}"
            file.write(json.dumps(sample.record(name)) + "\n")
            sample.save(data / "images", name)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m examples.make_demo",
        description=f"Create a small {titles()} with random weights, drawn pictures with questions, and a "
        "configuration.",
    )
    default = DemoOptions()
    parser.add_argument("folder", type=a_path, metavar="DIR", help="output folder: new or empty")
    parser.add_argument(
        "--model",
        default=default.model,
        choices=FAMILIES,
        help=f"model family (default {default.model})",
    )
    parser.add_argument(
        "--data",
        default=default.data,
        choices=("image", "video"),
        help=f"what questions are about (default {default.data})",
    )
    parser.add_argument("--adapt", type=a_path, metavar="TRAINED", help="trained model, for which adapters learn")
    for flag, least, value, text in (
        ("--seed", 0, default.seed, "seed of weights, data and questions"),
        ("--train-pictures", 1, default.train_pictures, "number of training pictures or videos"),
        ("--heldout-questions", 1, default.heldout_questions, "number of held-out questions"),
        ("--text-layers", 1, default.shape.text_layers, "number of layers of the language model"),
    ):
        parser.add_argument(flag, type=partial(at_least, least), default=value, help=f"{text} (default {value})")
    parser.add_argument(
        "--force", action="store_true", help=f"replace {', '.join(ENTRIES)} in DIR, whole, and nothing else"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return ended(lambda: _make(_parser().parse_args(arguments)))


def _make(given: argparse.Namespace) -> str:
    sizes, base = DemoSizes(text_layers=given.text_layers), given.adapt
    if base is not None:
        if given.data == "video":
            fix = "leave one of them out"
            raise UserError.at("--adapt", found="videos", expected="pictures, whose colours have other names", fix=fix)
        check_folder(base)
    options = DemoOptions(
        given.seed, given.train_pictures, given.heldout_questions, sizes, given.model, given.data, str(base or "")
    )
    make_demo(given.folder, options, force=given.force)
    return f"wrote {given.folder}; next: --config {given.folder / 'config.yaml'}"


if __name__ == "__main__":
    raise SystemExit(main())
