"""Several data sets as one infinite, reproducible stream of records."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import Config
from megatron_hetero.config.sections import DatasetConfig, SampledDataset
from megatron_hetero.data.records import Annotations, Record
from megatron_hetero.data.validation import IMAGES, ItemField


class Mixture:
    """The stream of samples that training reads: ``mixture[i]`` for every i >= 0.

    An epoch has ``len(mixture)`` samples, rate · records of every data set. With ``shuffle`` they are redrawn
    and permuted every time, as a function of (seed, epoch) alone; without, an epoch is the first records of each data
    set in the order of the configuration.
    """

    # The stream has no end: `for record in mixture` would never stop.
    __iter__ = None

    def __init__(self, parts: Sequence[tuple[Annotations, SampledDataset]], *, shuffle: bool, seed: int) -> None:
        self.parts = tuple(parts)
        self.shuffle = shuffle
        self.seed = seed
        self._counts = [each.count(len(data)) for data, each in self.parts]
        self._starts = np.cumsum([0] + [len(data) for data, _ in self.parts])
        # Two epochs: concurrent readers may be on both sides of an epoch boundary.
        self._order = lru_cache(maxsize=2)(self._draw)

    @classmethod
    def parse(
        cls,
        datasets: Sequence[str],
        registry: Mapping[str, DatasetConfig],
        shuffle: bool,
        seed: int,
        fields: Sequence[ItemField] = IMAGES,
    ) -> Mixture:
        """Loads the named data sets.

        Args:
            datasets: entries ``name`` or ``name%rate``; the rate is in percent of the data set's records per epoch,
                over 100 repeats records.
            registry: the data sets by name.
            shuffle: redraw samples and order every epoch.
            seed: of the random draws; unused without shuffle.
            fields: fields that items may be in, see `item_fields`.

        Raises:
            UserError: no entry, an unknown name, a bad rate, or a data set that does not load.
        """
        if not datasets:
            raise UserError.at("data.datasets", problem="no data set", fix="name one of data.registry")
        sampled = [SampledDataset.parse(text) for text in datasets]
        for each in sampled:
            _check_name(each.name, registry)
        names = dict.fromkeys(each.name for each in sampled)
        loaded = {
            name: Annotations(name, entry.annotations, entry.images, fields, entry.video_placeholder)
            for name, entry in ((name, registry[name]) for name in names)
        }
        return cls([(loaded[each.name], each) for each in sampled], shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        """Samples per epoch."""
        return sum(self._counts)

    def __getitem__(self, i: int) -> Record:
        """The i-th sample of the stream, in epoch ``i // len(mixture)``."""
        if i < 0:
            raise IndexError(f"sample {i}: the stream starts at 0 and has no end to count back from")
        epoch, position = divmod(int(i), len(self))
        record = int(self._order(epoch if self.shuffle else 0)[position])
        part = int(np.searchsorted(self._starts, record, side="right")) - 1
        return self.parts[part][0][record - int(self._starts[part])]

    def _draw(self, epoch: int) -> np.ndarray:
        """The records of an epoch in order, numbered over all parts."""
        generator = np.random.default_rng([self.seed % 2**64, epoch])
        chosen = []
        for (data, _), count, start in zip(self.parts, self._counts, self._starts[:-1], strict=True):
            repeats, rest = divmod(count, len(data))
            last = generator.permutation(len(data))[:rest] if self.shuffle else np.arange(rest)
            chosen.append(start + np.concatenate([np.tile(np.arange(len(data)), repeats), last]))
        order = np.concatenate(chosen)
        return generator.permutation(order) if self.shuffle else order


def open_mixture(config: Config, fields: Sequence[ItemField]) -> Mixture:
    """The data sets of `data.datasets`, loaded. Raises `UserError`."""
    data = config.data
    return Mixture.parse(data.datasets, data.registry, data.shuffle, config.train.seed, fields)


def open_held_out(config: Config, fields: Sequence[ItemField]) -> dict[str, Mixture]:
    """The data sets of `eval.datasets` by name, loaded, in the order of their records. Raises `UserError`."""
    registry, seed = config.data.registry, config.train.seed
    return {name: Mixture.parse((name,), registry, False, seed, fields) for name in config.eval.datasets}


def _check_name(name: str, registry: Mapping[str, DatasetConfig]) -> None:
    if name in registry:
        return
    close = difflib.get_close_matches(name, registry, n=1)
    known = ", ".join(registry) or "no data sets"
    raise UserError.at(
        "data.datasets",
        found=f"unknown data set {name!r}",
        expected=f"one of data.registry ({known})",
        fix=f"did you mean {close[0]!r}?" if close else "add it to data.registry, or correct the name",
    )
