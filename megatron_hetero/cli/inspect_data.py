"""Command that prints training samples: ``python -m megatron_hetero.cli.inspect_data --config FILE -n 5``.

For each of the first samples it prints the rendered text, with supervised tokens coloured and in ⟦ ⟧, and the sizes of
images and videos. It accepts all training flags, so a run can be inspected with its command line. ``--sheets DIR``
draws the sampled frames of each video with their times. ``--statistics`` prints statistics of each data set instead,
see `megatron_hetero.cli.data_statistics`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw
from rich.text import Text

from megatron_hetero.base.errors import UserError, os_errors_as, printable, reason
from megatron_hetero.base.files import replacing
from megatron_hetero.base.terminal import Parser, console
from megatron_hetero.cli.command import a_path, at_least
from megatron_hetero.cli.data_statistics import samples_per_epoch, show_statistics
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.groups.launch import ended
from megatron_hetero.models.items.videos import VideoReader

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_hetero.config.schema import Config

_SAMPLES, _EXAMINED = 5, 1000
"""Default number of printed samples, and of samples per data set in statistics."""
_SHEETS = "choose another --sheets folder"
_SUPERVISED = "bold green"
_SUPERVISED_MARKS = ("⟦", "⟧")


def rendered(processor: Processor, sample: TokenizedSample) -> Text:
    """Return the sample's text as the model reads it, with supervised runs marked and tokens of rows counted."""
    text = Text()
    keys = zip(sample.supervised.tolist(), np.isin(sample.input_ids, processor.row_tokens).tolist(), strict=True)
    position = 0
    for (supervised, is_row), run in groupby(keys):
        size = sum(1 for _ in run)
        ids = sample.input_ids[position : position + size].tolist()
        position += size
        if is_row:
            text.append(f"{processor.tokenizer.decode(ids[:1])}×{size}", "cyan")
        elif supervised:
            text.append(printable(processor.tokenizer.decode(ids), but="\n\t").join(_SUPERVISED_MARKS), _SUPERVISED)
        else:
            text.append(printable(processor.tokenizer.decode(ids), but="\n\t"))
    return text


def show_sample(console: Console, processor: Processor, sample: TokenizedSample, max_seq_length: int | None) -> None:
    """Print the text of a sample, and the number of its tokens and the size of each of its items."""
    record = sample.record
    note = " — longer than data.max_seq_length" if max_seq_length and len(sample) > max_seq_length else ""
    # Print text instead of a `rich` rule, which would cut long paths.
    console.print(Text(printable(f"── {record.where} ({record.dataset})"), "bold"), soft_wrap=True)
    console.print(rendered(processor, sample), soft_wrap=True)
    console.print(f"tokens: {len(sample)}, supervised: {int(sample.supervised.sum())}{note}", highlight=False)
    for k, size in enumerate(sample.sizes):
        field, file, frames, _ = record.items[k]
        name = f"{file} and {len(frames) - 1} more frames" if frames else file
        to = f" for {field.encoder}" if len({each.encoder for each in processor.readers}) > 1 else ""
        described = processor.readers[field].describe(record.item(k), size)
        line = f"{field.modality} {k}{to}: {name}, {described}, {sample.rows[k]} tokens"
        console.print(Text(printable(line)), soft_wrap=True)


_SHEET_COLUMNS, _THUMBNAIL, _CAPTION = 6, 200, 16
"""Frames per row of a sheet, pixels of a frame's longer side, and height in pixels of the line with its time."""


def contact_sheet(frames: Sequence[tuple[float, Image.Image]]) -> Image.Image:
    """Return a picture of the frames in rows, each frame with its time below it."""
    width, height = frames[0][1].size
    scale = min(1.0, _THUMBNAIL / max(width, height))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    columns, rows = min(_SHEET_COLUMNS, len(frames)), -(-len(frames) // _SHEET_COLUMNS)
    sheet = Image.new("RGB", (columns * (size[0] + 4), rows * (size[1] + _CAPTION)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (time, frame) in enumerate(frames):
        row, column = divmod(number, columns)
        corner = column * (size[0] + 4) + 2, row * (size[1] + _CAPTION)
        sheet.paste(frame.resize(size), corner)
        draw.text((corner[0], corner[1] + size[1] + 1), f"{time:.2f} s", fill="black")
    return sheet


def draw_sheets(processor: Processor, record: Record, folder: Path) -> Iterator[Path]:
    """Write a contact sheet of each video of a record into `folder`, and yield its path."""
    for k, ref in enumerate(record.items):
        reader = processor.readers[ref.field]
        if isinstance(reader, VideoReader):
            path = folder / f"{record.dataset}-{record.index + 1}-{k}.png"
            with replacing(path) as new:
                contact_sheet(reader.frames(record.item(k))).save(new)
            yield path


def show(config: Config, count: int, console: Console, sheets: Path | None = None) -> None:
    """Print the first ``count`` samples that a run with this configuration reads, and draw contact sheets into the
    folder ``sheets``. Raises `UserError` if the folder cannot be written.
    """
    from megatron_hetero.data.mixture import open_mixture
    from megatron_hetero.data.processor import open_processor

    processor = open_processor(config)
    mixture = open_mixture(config, processor)
    for k in range(count):
        show_sample(console, processor, processor.tokenize(mixture[k]), config.data.max_seq_length)
        if sheets is not None:
            with os_errors_as(
                lambda error: UserError.at(sheets, problem=f"cannot be written ({reason(error)})", fix=_SHEETS)
            ):
                sheets.mkdir(parents=True, exist_ok=True)
                for path in draw_sheets(processor, mixture[k], sheets):
                    console.print(Text(f"frames: {path}"), soft_wrap=True)
    if processor.advice:
        console.print(Text(processor.advice), soft_wrap=True)
    console.print(Text(samples_per_epoch(mixture.sampled)), soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_hetero.cli.inspect_data",
        description="Print training samples with supervised tokens marked, or statistics of data sets. All training "
        "flags are accepted.",
        allow_abbrev=False,
    )
    count = partial(at_least, 0)
    parser.add_argument(
        "-n",
        type=count,
        metavar="COUNT",
        help=f"number of samples to print (default {_SAMPLES}, or 0 with --statistics)",
    )
    parser.add_argument("--sheets", type=a_path, metavar="DIR", help="draw the sampled frames of each video into DIR")
    parser.add_argument(
        "--statistics",
        type=count,
        nargs="?",
        const=_EXAMINED,
        metavar="COUNT",
        help="print statistics of each data set from COUNT evenly spaced samples, or from all for 0 "
        f"(default {_EXAMINED})",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return ended(lambda: _inspect(*_parser().parse_known_args(argv)))


def _inspect(options: argparse.Namespace, flags: list[str]) -> None:
    from megatron_hetero.config.schema import load_config

    config, count = load_config(flags), options.statistics
    if count is not None:
        show_statistics(config, count, console())
    # Sheets are drawn for printed samples only.
    default = _SAMPLES if count is None or options.sheets is not None else 0
    samples = default if options.n is None else options.n
    if samples or count is None:
        show(config, samples, console(), options.sheets)


if __name__ == "__main__":
    raise SystemExit(main())
