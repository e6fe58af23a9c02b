"""Statistics of data sets: how long their samples are, and how large their items.

Records are counted in the index; everything else is of evenly spaced samples, which are tokenized. Quantiles are values
that occur: half of the samples, or 95 % of them, have at most as many tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from megatron_hetero.base.errors import UserError, printable
from megatron_hetero.base.terminal import FILE_COLUMNS, Progress
from megatron_hetero.config.sections import SampledDataset
from megatron_hetero.data.mixture import reading_of
from megatron_hetero.data.processor import Processor, open_processor
from megatron_hetero.data.records import Dataset
from megatron_hetero.data.sources.formats import finished
from megatron_hetero.data.validation import ItemField
from megatron_hetero.models.items.types import Header

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_hetero.config.schema import Config

SHOWN_PROBLEMS = 3
"""Messages of bad records that are shown of each data set."""
_THREADS, _AT_A_TIME = 8, 256
"""Threads that tokenize, since reading waits for disks, and samples that they are given at a time."""


# -------------------------------------------------------------------------------------------------- the figures


class Sample(NamedTuple):
    """Figures of one sample: tokens, supervised tokens, and of each item its field, its tokens and its header."""

    tokens: int
    supervised: int
    items: Sequence[tuple[ItemField, int, Header]]


class Items(NamedTuple):
    """Items of one field: all their tokens, and their headers, int64 [items, 2], such as width and height, see
    `ItemReader.header`.
    """

    tokens: int
    headers: np.ndarray

    @property
    def areas(self) -> np.ndarray:
        """Width times height of each item, or the only figure that is not 0, int64 [items]."""
        return np.maximum(self.headers, 1).prod(axis=1)


@dataclass(frozen=True, eq=False)
class DatasetStatistics:
    """Figures of one data set.

    Attributes:
        data: its records.
        tokens: int64 [samples], of each sample that could be read.
        supervised: supervised tokens of all of them.
        items: by field.
        unreadable: number of samples that could not be read.
        problem: the message of the first of these.
    """

    data: Dataset
    tokens: np.ndarray
    supervised: int
    items: Mapping[ItemField, Items]
    unreadable: int
    problem: str = ""

    @classmethod
    def of(cls, data: Dataset, found: Iterable[Sample | UserError]) -> DatasetStatistics:
        """The figures of samples, or the errors of reading them."""
        tokens, supervised, unreadable, problem = array("q"), 0, 0, ""
        totals: dict[ItemField, int] = {}
        headers: dict[ItemField, array[int]] = {}
        for sample in found:
            if isinstance(sample, UserError):
                unreadable += 1
                problem = problem or str(sample)
                continue
            tokens.append(sample.tokens)
            supervised += sample.supervised
            for field, rows, header in sample.items:
                totals[field] = totals.get(field, 0) + rows
                headers.setdefault(field, array("q")).extend(header)
        items = {field: Items(totals[field], finished(headers[field]).reshape(-1, 2)) for field in totals}
        return cls(data, finished(tokens), supervised, items, unreadable, problem)


def measured(config: Config, processor: Processor, count: int) -> list[DatasetStatistics]:
    """Statistics of each data set of a configuration from `count` of its good records, 0 for all. Raises `UserError`
    if one cannot be opened.
    """
    reading = reading_of(config, processor, strict=False)
    names = dict.fromkeys([*(each.name for each in sampled(config)), *config.eval.datasets])
    opened = [Dataset(name, config.data.registry[name], reading) for name in names]
    chosen = [spread(data.good_records, count) for data in opened]
    pool = ThreadPoolExecutor(_THREADS, "tokenize")
    try:
        with Progress("tokenizing samples", max(1, sum(map(len, chosen)))) as progress:
            return [
                DatasetStatistics.of(data, _samples(data, numbers, processor, pool, progress))
                for data, numbers in zip(opened, chosen, strict=True)
            ]
    finally:
        pool.shutdown(cancel_futures=True)


def sampled(config: Config) -> list[SampledDataset]:
    """The entries of `data.datasets`."""
    return [SampledDataset.parse(text) for text in config.data.datasets]


def spread(numbers: np.ndarray, count: int) -> np.ndarray:
    """As many of these numbers, evenly spaced; all if there are no more, or for 0."""
    return numbers[np.arange(count) * len(numbers) // count] if 0 < count < len(numbers) else numbers


def _samples(
    data: Dataset, numbers: np.ndarray, processor: Processor, pool: ThreadPoolExecutor, progress: Progress
) -> Iterator[Sample | UserError]:
    for first in range(0, len(numbers), _AT_A_TIME):
        for sample in pool.map(lambda number: _sample(data, number, processor), numbers[first : first + _AT_A_TIME]):
            progress.advance(1, 1)
            yield sample


def _sample(data: Dataset, number: int, processor: Processor) -> Sample | UserError:
    try:
        record = data[number]
        readers = [processor.readers[ref.field] for ref in record.items]
        headers = record.headers or tuple(reader.header(record.item(k)) for k, reader in enumerate(readers))
        # With headers, so that files are opened once.
        tokenized = processor.tokenize(replace(record, headers=headers))
    except UserError as error:
        return error
    fields = [ref.field for ref in record.items]
    items = list(zip(fields, tokenized.rows.tolist(), headers, strict=True))
    return Sample(len(tokenized), int(tokenized.supervised.sum()), items)


# ---------------------------------------------------------------------------------------------------- the table


def show_statistics(config: Config, count: int, console: Console) -> None:
    """Print the statistics of a configuration's data sets, see `measured`. Raises `UserError`."""
    found, limit = measured(config, open_processor(config), count), config.data.max_seq_length
    table = _table(found, limit)
    # In its own width: figures that are cut or folded are wrong figures.
    table.width = Measurement.get(console, console.options.update(width=FILE_COLUMNS), table).maximum
    console.print(table, crop=False)
    for text in _problems(found):
        console.print(Text(text), soft_wrap=True)
    opened = {each.data.name: each.data for each in found}
    text = samples_per_epoch([(opened[each.name], each) for each in sampled(config)])
    console.print(Text(text), soft_wrap=True)


def samples_per_epoch(parts: Iterable[tuple[Dataset, SampledDataset]]) -> str:
    """Samples of an epoch of these data sets, and keys of their records that are not read, in lines."""
    parts = list(parts)
    good = [(len(data) - data.bad, each) for data, each in parts]
    sources = ", ".join(f"{each} ({records} records)" for records, each in good)
    text = printable(f"{sum(each.count(records) for records, each in good)} samples per epoch from {sources}")
    return "\n".join([text, *dict.fromkeys(data.unread for data, _ in parts if data.unread)])


def _problems(found: Iterable[DatasetStatistics]) -> Iterator[str]:
    for each in found:
        kinds = (
            (each.data.bad, "bad record", each.data.problems[:SHOWN_PROBLEMS]),
            (each.unreadable, "unreadable sample", [each.problem]),
        )
        for number, what, messages in kinds:
            if number:
                shown = f" {len(messages)}" * (len(messages) > 1)
                first = f", the first{shown}" if len(messages) < number else ""
                yield printable(f"{number:,} {what}{'s' * (number > 1)} of {each.data.name}{first}:")
                yield from (f"  {printable(message)}" for message in messages)


_TOKENS = ("samples", "unreadable\nsamples", "tokens:\nmean", "\nmedian", "\n95 %", "\nmaximum", "super-\nvised")
_ITEMS = ("items", "per\nsample", "share of\ntokens", "size:\nmedian", "\nlargest")
"""Names of columns. Items have them only where a data set has items."""


def _table(found: Sequence[DatasetStatistics], limit: int) -> Table:
    # Lean, because there are many columns.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    has_items = any(each.items for each in found)
    names = ("data set", "records", "bad\nrecords", *_TOKENS, f"over\n{limit:,}", *(_ITEMS if has_items else ()))
    for name in names:
        table.add_column(name, justify="left" if name in ("data set", "items") else "right", no_wrap=True)
    for each in found:
        row = [printable(each.data.name), f"{len(each.data):,}", _part(each.data.bad, len(each.data))]
        row += _cells(each, limit) + (_cells_of_items(each) if has_items else [])
        table.add_row(*map(Text, row))
    return table


def _cells(each: DatasetStatistics, limit: int) -> list[str]:
    tokens, samples = each.tokens, len(each.tokens) + each.unreadable
    cells = [f"{samples:,}", _part(each.unreadable, samples)]
    if not len(tokens):
        return [*cells, *[""] * 6]
    return [
        *cells,
        f"{tokens.mean():,.1f}",
        *(f"{figure:,}" for figure in np.quantile(tokens, (0.5, 0.95, 1.0), method="inverted_cdf")),
        _percent(each.supervised, tokens.sum()),
        _percent((tokens > limit).sum(), len(tokens)),
    ]


def _cells_of_items(each: DatasetStatistics) -> list[str]:
    """A line in each cell for each field."""
    lines = [
        (
            field.name,
            f"{len(items.headers) / len(each.tokens):,.2f}",
            _percent(items.tokens, each.tokens.sum()),
            *("×".join(f"{n:,}" for n in items.headers[k] if n) for k in _median_and_largest(items.areas)),
        )
        for field, items in sorted(each.items.items())
    ]
    return ["\n".join(cell) for cell in zip(*lines, strict=True)] or [""] * len(_ITEMS)


def _median_and_largest(values: np.ndarray) -> tuple[int, int]:
    """The places of the median and of the largest value."""
    order = np.argsort(values, kind="stable")
    return int(order[(len(order) - 1) // 2]), int(order[-1])


def _part(number: int, of: int) -> str:
    return f"{number:,} ({_percent(number, of)})" if number else "0"


def _percent(number: int, of: int) -> str:
    return "0" if not number else "<0.1 %" if number < 0.001 * of else f"{100 * number / of:.1f} %"
