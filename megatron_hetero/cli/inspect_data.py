"""Prints training samples: ``python -m megatron_hetero.cli.inspect_data --config FILE -n 5``.

For each of the first samples: the rendered text with supervised tokens coloured and in ⟦ ⟧, image sizes. All
training flags are accepted, so a run can be inspected with its own command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich.markup import escape
from rich.text import Text

from megatron_hetero.base.errors import printable
from megatron_hetero.base.terminal import Parser, console
from megatron_hetero.cli.command import at_least
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.groups.launch import ended

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_hetero.config.schema import Config

_SUPERVISED = "bold green"
_SUPERVISED_MARKS = ("⟦", "⟧")


def rendered(processor: Processor, sample: TokenizedSample) -> Text:
    """The sample's text as the model reads it; supervised spans are marked, tokens of rows counted."""
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
    """Print one sample."""
    record = sample.record
    note = " — longer than data.max_seq_length" if max_seq_length and len(sample) > max_seq_length else ""
    # Not a rule: it would cut long paths.
    console.print(Text(printable(f"── {record.where} ({record.dataset})"), "bold"), soft_wrap=True)
    console.print(rendered(processor, sample), soft_wrap=True)
    console.print(f"tokens: {len(sample)}, supervised: {int(sample.supervised.sum())}{note}", highlight=False)
    for k, size in enumerate(sample.sizes):
        field, file = record.items[k]
        to = f" for {field.encoder}" if len(processor.readers) > 1 else ""
        described = processor.readers[field].describe(record.item(k), size)
        line = f"{field.modality} {k}{to}: {file}, {described}, {sample.rows[k]} tokens"
        console.print(Text(printable(line)), soft_wrap=True)


def show(config: Config, count: int, console: Console) -> None:
    """Print the first ``count`` samples that a run with this configuration reads."""
    from megatron_hetero.data.mixture import open_mixture
    from megatron_hetero.data.processor import open_processor

    processor = open_processor(config)
    mixture = open_mixture(config, processor.fields)
    for k in range(count):
        show_sample(console, processor, processor.tokenize(mixture[k]), config.data.max_seq_length)
    sources = ", ".join(f"{share} ({len(annotations)} records)" for annotations, share in mixture.parts)
    console.print(escape(f"{len(mixture)} samples per epoch from {sources}"), highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m megatron_hetero.cli.inspect_data",
        description="Print training samples with supervised tokens marked. All training flags are accepted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", type=partial(at_least, 0), default=5, metavar="COUNT", help="number of samples to print (default 5)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return ended(lambda: _inspect(*_parser().parse_known_args(argv)))


def _inspect(options: argparse.Namespace, flags: list[str]) -> None:
    from megatron_hetero.config.schema import load_config

    show(load_config(flags), options.n, console())


if __name__ == "__main__":
    raise SystemExit(main())
