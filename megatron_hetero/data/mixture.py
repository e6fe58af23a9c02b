"""Several data sets as one infinite, reproducible stream of records."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import Config
from megatron_hetero.config.sections import DatasetConfig, SampledDataset
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import PLAIN, Dataset, Reading, Record
from megatron_hetero.data.sources.index import Blocks

Shuffle: TypeAlias = "Literal['blocks'] | bool"
"""Whether samples are permuted; "blocks": blocks are permuted, and then the samples within a few blocks."""
WINDOW_BYTES, WINDOW_RECORDS = 1 << 29, 1 << 13
"""Maximum bytes to be read for a window, and maximum records of a window."""


class Mixture:
    """The stream of samples that training reads: ``mixture[i]`` for every i >= 0.

    An epoch has ``len(mixture)`` samples, rate · records of every data set. With ``shuffle`` each epoch draws and
    permutes its records, as a function of (seed, epoch) alone; without, an epoch is the first records of each data set
    in the order of the configuration. With ``shuffle="blocks"`` blocks of consecutive records are drawn and permuted,
    and then the records of each *window*, a few blocks that fit into the memory of one rank.
    """

    # The stream has no end: `for record in mixture` would never stop.
    __iter__ = None

    def __init__(self, sampled: Sequence[tuple[Dataset, SampledDataset]], *, shuffle: Shuffle, seed: int) -> None:
        self.sampled = tuple(sampled)
        self.shuffle = shuffle
        self.seed = seed
        self._counts = [each.count(len(data)) for data, each in self.sampled]
        self._starts = np.cumsum([0] + [len(data) for data, _ in self.sampled])
        self._type = np.int32 if self._starts[-1] < 2**31 else np.int64
        # Two epochs: concurrent readers may be on both sides of an epoch boundary.
        self._order = lru_cache(maxsize=2)(self._draw)

    @classmethod
    def parse(
        cls,
        datasets: Sequence[str],
        registry: Mapping[str, DatasetConfig],
        shuffle: Shuffle,
        seed: int,
        reading: Reading = PLAIN,
    ) -> Mixture:
        """Load the named data sets.

        Args:
            datasets: entries ``name`` or ``name%rate``. The rate is in percent of the data set's records per epoch; a
                rate over 100 repeats records.
            registry: the data sets by name.
            shuffle, seed: see `Mixture`.
            reading: options for reading the data sets, see `Reading`.

        Raises:
            UserError: no entry, an unknown name, a bad rate, or a data set that does not load.
        """
        if not datasets:
            raise UserError.at("data.datasets", problem="no data set", fix="name one of data.registry")
        sampled = [SampledDataset.parse(text) for text in datasets]
        names = dict.fromkeys(each.name for each in sampled)
        if unknown := [name for name in names if name not in registry]:
            close, known = difflib.get_close_matches(unknown[0], registry, n=1), ", ".join(registry) or "no data sets"
            raise UserError.at(
                "data.datasets",
                found=f"unknown data set {unknown[0]!r}",
                expected=f"one of data.registry ({known})",
                fix=f"did you mean {close[0]!r}?" if close else "add it to data.registry, or correct the name",
            )
        loaded = {name: Dataset(name, registry[name], reading) for name in names}
        return cls([(loaded[each.name], each) for each in sampled], shuffle=shuffle, seed=seed)

    def hashed(self) -> Iterator[tuple[Dataset, SampledDataset, str]]:
        """Yield the data sets, each with a hash of the block data that affect the order; empty without blocks."""
        if self.shuffle != "blocks":
            yield from ((*each, "") for each in self.sampled)
            return
        blocks = [data.blocks for data, _ in self.sampled]
        # The number of records limits windows of small records, whatever their bytes. The last block may be cut.
        maximum = WINDOW_RECORDS * max((each.sizes / np.diff(each.starts)).max() for each in blocks)
        by_size = maximum + sum(each.sizes.max() for each in blocks) > WINDOW_BYTES
        for (data, rate), each in zip(self.sampled, blocks, strict=True):
            text = each.starts.tobytes() + each.sizes.tobytes() * int(by_size)
            yield data, rate, hashlib.sha256(text).hexdigest()

    def __len__(self) -> int:
        """Return the number of samples per epoch."""
        return sum(self._counts)

    def __getitem__(self, i: int) -> Record:
        """Return the i-th sample of the stream, in epoch ``i // len(mixture)``."""
        if i < 0:
            raise IndexError(f"sample {i}: the stream starts at 0 and has no end to count back from")
        dataset, record = self._source(i)
        return self.sampled[dataset][0][record]

    def read_ahead(self, samples: Sequence[int]) -> None:
        """Prefetch samples of the stream, if the format of their files supports that."""
        sources = np.array([self._source(i) for i in samples], np.int64).reshape(-1, 2)
        for dataset in np.unique(sources[:, 0]).tolist():
            self.sampled[dataset][0].read_ahead(np.unique(sources[sources[:, 0] == dataset, 1]))

    def _source(self, i: int) -> tuple[int, int]:
        """Return the number of a sample's data set, and the number of the sample's record in it."""
        epoch, position = divmod(int(i), len(self))
        record = int(self._order(epoch if self.shuffle else 0)[position])
        dataset = int(np.searchsorted(self._starts, record, side="right")) - 1
        return dataset, record - int(self._starts[dataset])

    def _draw(self, epoch: int) -> np.ndarray:
        """Return the records of an epoch in order, numbered over all data sets."""
        generator = np.random.default_rng([self.seed % 2**64, epoch])
        if self.shuffle == "blocks":
            return self._draw_blocks(generator)
        chosen = []
        for (data, _), count, start in zip(self.sampled, self._counts, self._starts[:-1], strict=True):
            every = np.arange(start, start + len(data), dtype=self._type)
            repeats, rest = divmod(count, len(data))
            last = (generator.permutation(every) if self.shuffle else every)[:rest]
            chosen += [every] * repeats + [last]
        order = np.concatenate(chosen)
        if self.shuffle:
            generator.shuffle(order)
        return order

    def _draw_blocks(self, generator: np.random.Generator) -> np.ndarray:
        drawn = [np.zeros((0, 3), np.int64)]
        for (data, _), count, start in zip(self.sampled, self._counts, self._starts[:-1], strict=True):
            drawn.append(_blocks_of_epoch(data.blocks, count, generator) + np.array([start, start, 0]))
        blocks = generator.permutation(np.concatenate(drawn))
        order = np.concatenate([np.arange(first, stop, dtype=self._type) for first, stop, _ in blocks.tolist()])
        end = 0
        for records in _windows(blocks):
            generator.shuffle(order[end : end + records])
            end += records
        return order


def _blocks_of_epoch(blocks: Blocks, count: int, generator: np.random.Generator) -> np.ndarray:
    """Draw blocks with `count` records of a data set. Returns first record, end, and bytes of each block, int64
    [blocks, 3]. The last drawn block may be cut.
    """
    every = np.stack([blocks.starts[:-1], blocks.starts[1:], blocks.sizes], axis=1)
    repeats, rest = divmod(count, int(blocks.starts[-1]))
    drawn = generator.permutation(every)
    ends = np.cumsum(drawn[:, 1] - drawn[:, 0])
    last = drawn[: int(np.searchsorted(ends, rest)) + 1 if rest else 0]
    if rest:
        last[-1, 1] -= ends[len(last) - 1] - rest
    return np.concatenate([*[every] * repeats, last])


def _windows(blocks: np.ndarray) -> Iterator[int]:
    """Yield the number of records of each window."""
    records = size = 0
    for first, stop, block_size in blocks.tolist():
        more = stop - first
        if records and (records + more > WINDOW_RECORDS or size + block_size > WINDOW_BYTES):
            yield records
            records = size = 0
        records, size = records + more, size + block_size
    yield records


def reading_of(config: Config, processor: Processor, *, strict: bool = True) -> Reading:
    """Return the options with which a run reads its data sets. `strict`: see `Reading`."""
    data = config.data
    strict = strict and data.bad_records == "stop"
    return Reading(processor.fields, data.index_folder, processor.readers if data.scan else None, strict)


def open_mixture(config: Config, processor: Processor) -> Mixture:
    """Open the data sets of `data.datasets`. Raises `UserError`."""
    data, reading = config.data, reading_of(config, processor)
    return Mixture.parse(data.datasets, data.registry, data.shuffle, config.train.seed, reading)


def open_held_out(config: Config, processor: Processor) -> dict[str, Mixture]:
    """Open the data sets of `eval.datasets`, by name, in the order of their records. Raises `UserError`."""
    registry, seed, reading = config.data.registry, config.train.seed, reading_of(config, processor)
    return {name: Mixture.parse((name,), registry, False, seed, reading) for name in config.eval.datasets}
