"""Statistics of data sets for choosing layouts and budgets: counts, lengths and shares, as lines of text.

Records are counted in the index; all other statistics are measured on evenly spaced, tokenized samples. Quantiles
are values that occur: half of the samples, or 95 % of them, have at most as many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.text import Text

from megatron_hetero.base.errors import UserError, printable
from megatron_hetero.base.terminal import Progress
from megatron_hetero.config.sections import SampledDataset
from megatron_hetero.data.mixture import reading_of
from megatron_hetero.data.processor import Processor, open_processor
from megatron_hetero.data.records import Dataset

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_hetero.config.schema import Config

SHOWN_PROBLEMS = 3
"""Number of messages about bad records that are printed for each data set."""
_THREADS, _AT_A_TIME = 8, 256
"""Number of threads that tokenize, since reading waits for disks, and number of samples tokenized at a time."""


class Lengths(NamedTuple):
    """Token counts of one sample: all, supervised ones, and for each item the name of its field with its count."""

    tokens: int
    supervised: int
    items: list[tuple[str, int]]


def show_statistics(config: Config, count: int, console: Console) -> None:
    """Print statistics of each data set of a configuration, from `count` of its good records (0: all). Raises
    `UserError` if a data set cannot be opened.
    """
    processor = open_processor(config)
    reading = reading_of(config, processor, strict=False)
    sampled = [SampledDataset.parse(text) for text in config.data.datasets]
    names = dict.fromkeys([*(each.name for each in sampled), *config.eval.datasets])
    opened = {name: Dataset(name, config.data.registry[name], reading) for name in names}
    for data in opened.values():
        samples = measure(data, processor, spread(data.good_records, count))
        lengths = [sample for sample in samples if isinstance(sample, Lengths)]
        errors = [str(sample) for sample in samples if isinstance(sample, UserError)]
        for line in [
            f"{data.name}: {len(data):,} records, {share(data.bad, len(data))} bad",
            *_described(lengths, config.data.max_seq_length),
            *_problems(data.name, "bad record", data.bad, data.problems[:SHOWN_PROBLEMS]),
            *_problems(data.name, "unreadable sample", len(errors), errors[:1]),
        ]:
            console.print(Text(printable(line)), soft_wrap=True)
    console.print(Text(samples_per_epoch([(opened[each.name], each) for each in sampled])), soft_wrap=True)


def measure(data: Dataset, processor: Processor, numbers: np.ndarray) -> list[Lengths | UserError]:
    """Return the lengths of the samples with these record numbers; an error for each unreadable sample."""
    result: list[Lengths | UserError] = []
    title = f"tokenizing samples of data set {data.name!r}"
    with Progress(title, max(1, len(numbers))) as progress, ThreadPoolExecutor(_THREADS, "tokenize") as pool:
        for first in range(0, len(numbers), _AT_A_TIME):
            chunk = numbers[first : first + _AT_A_TIME].tolist()
            result += pool.map(partial(_lengths, data, processor), chunk)
            progress.advance(len(chunk), len(chunk))
    return result


def _lengths(data: Dataset, processor: Processor, number: int) -> Lengths | UserError:
    try:
        sample = processor.tokenize(data[number])
    except UserError as error:
        return error
    fields = [ref.field.name for ref in sample.record.items]
    return Lengths(len(sample), int(sample.supervised.sum()), list(zip(fields, sample.rows.tolist(), strict=True)))


def spread(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return `count` evenly spaced elements of `numbers`; all of them if `count` is 0 or at least their number."""
    return numbers[np.arange(count) * len(numbers) // count] if 0 < count < len(numbers) else numbers


def samples_per_epoch(data_sets: Iterable[tuple[Dataset, SampledDataset]]) -> str:
    """Return the samples per epoch of these data sets, and the unread keys of their records, as lines of text."""
    data_sets = list(data_sets)
    good = [(len(data) - data.bad, each) for data, each in data_sets]
    sources = ", ".join(f"{each} ({records} records)" for records, each in good)
    text = printable(f"{sum(each.count(records) for records, each in good)} samples per epoch from {sources}")
    return "\n".join([text, *dict.fromkeys(data.unread for data, _ in data_sets if data.unread)])


def _described(lengths: list[Lengths], limit: int) -> Iterator[str]:
    """Yield lines about the tokens and items of samples."""
    if not lengths:
        return
    tokens = np.array([each.tokens for each in lengths])
    total, over = int(tokens.sum()), int((tokens > limit).sum())
    supervised = sum(each.supervised for each in lengths)
    yield f"  {len(lengths):,} samples tokenized, {share(over, len(lengths))} longer than {limit:,} tokens"
    yield f"  tokens per sample: {quantiles(tokens)}; {share(supervised, total)} supervised"
    for name in sorted({name for each in lengths for name, _ in each.items}):
        rows = np.array([count for each in lengths for field, count in each.items if field == name])
        yield f"  {name}: {len(rows) / len(lengths):,.2f} per sample, {share(int(rows.sum()), total)} tokens"
        yield f"  tokens per {name}: {quantiles(rows)}"


def quantiles(values: np.ndarray) -> str:
    """Return the mean, median, 95 % quantile and maximum of values, in words."""
    median, high, maximum = np.quantile(values, (0.5, 0.95, 1.0), method="inverted_cdf").tolist()
    return f"mean {values.mean():,.1f}, median {median:,}, 95 % {high:,}, maximum {maximum:,}"


def share(number: int, total: int) -> str:
    """Return a number, and its share of a total, in words."""
    return f"{number:,} ({100 * number / total:.1f} %)" if total else f"{number:,}"


def _problems(name: str, what: str, number: int, messages: list[str] | tuple[str, ...]) -> Iterator[str]:
    if number:
        first = f", the first {len(messages)}" if len(messages) < number else ""
        yield f"{number:,} {what}{'s' * (number > 1)} of {name}{first}:"
        yield from (f"  {message}" for message in messages)
