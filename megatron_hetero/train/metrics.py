"""The metrics of a step and of an evaluation, as records of metrics.jsonl and as lines for the terminal; and what ranks
exchange for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")
Value = float | int | str | None
"""A metric in a record."""
_RECORDED_OTHERWISE = ("data_time_s", "boundary_time_s", "stopping", "extra")
"""Attributes of `StepMetrics` that are recorded in another form, or not at all."""


@dataclass(frozen=True)
class StepFigures(Generic[T]):
    """What ranks exchange of a step: each figure of one rank (`T` is float), or of all (a list by rank).

    Attributes:
        memory: peak bytes since the start of the run.
        stopping: whether the rank was asked to stop, 0 or 1.
        padding, tokens: tokens of padding and of samples.
        patch_padding, patches: patches of padding and of items.
        balance: addend to the loss that balances experts, before the division by supervised tokens.
        loads: load of the busiest expert of each layer with experts, see `take_loads`.
        runs: by encoder, the seconds of each of its runs, forward and backward; 0 on other ranks.
    """

    memory: T
    stopping: T
    padding: T
    tokens: T
    patch_padding: T
    patches: T
    balance: T
    loads: Sequence[T]
    runs: Mapping[str, Sequence[T]]

    def pack(self) -> list[T]:
        """Return all figures in one list, as long on every rank."""
        numbers = self.memory, self.stopping, self.padding, self.tokens, self.patch_padding, self.patches, self.balance
        return [*numbers, *self.loads, *chain.from_iterable(self.runs.values())]

    def unpack(self, packed: Sequence[U]) -> StepFigures[U]:
        """Return the figures, of the same step, that `pack` has put into `packed`."""
        memory, stopping, padding, tokens, patch_padding, patches, balance, *rest = packed
        numbers = memory, stopping, padding, tokens, patch_padding, patches, balance
        lists = iter(rest)
        loads = [next(lists) for _ in self.loads]
        return StepFigures(*numbers, loads, {name: [next(lists) for _ in own] for name, own in self.runs.items()})


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, over all ranks.

    Attributes:
        step: counted from 1.
        loss: mean over supervised tokens, in nats; NaN if nothing was trained.
        grad_norm: over all modules, before clipping; NaN if nothing was trained.
        lr: learning rate of the text module.
        tokens: number in all samples, including image tokens, excluding padding.
        images: number of images.
        skipped_samples: samples skipped as too long; if all were, nothing was trained.
        step_time_s: wall-clock seconds.
        peak_memory_bytes: maximum over ranks since the start of the run, before the step's update.
        data_time_s: seconds of the step spent waiting for data.
        boundary_time_s: seconds of the step in which this rank packed or awaited rows; transfers overlap with compute.
        mfu: model FLOPs utilisation, None if the device's peak is unknown.
        stopping: whether a rank was asked to stop, so that all stop after this step; not recorded.
        extra: further values to record, under unused names.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    images: int
    step_time_s: float
    peak_memory_bytes: int
    skipped_samples: int = 0
    data_time_s: float = 0.0
    boundary_time_s: float = 0.0
    mfu: float | None = None
    stopping: bool = False
    extra: Mapping[str, Value] = field(default_factory=dict)

    def record(self) -> dict[str, Value]:
        """Return the record for metrics.jsonl; numbers that are not finite are None."""
        rates = {
            "tokens_per_s": self._per_second(self.tokens),
            "images_per_s": self._per_second(self.images),
            "data_share": self._per_second(self.data_time_s),
            "boundary_share": self._per_second(self.boundary_time_s),
        }
        own = {name: value for name, value in vars(self).items() if name not in _RECORDED_OTHERWISE}
        return {name: _finite(value) for name, value in {**own, **rates, **self.extra}.items()}

    def line(self, steps: int) -> str:
        """Return the line for the terminal, in a run of `steps` steps."""
        parts = [
            f"step {self.step:>{len(str(steps))}}/{steps}",
            "nothing trained" if math.isnan(self.loss) else f"loss {self.loss:.4f} | norm {self.grad_norm:.3f}",
            f"lr {self.lr:.2e}",
            f"{self._per_second(self.tokens):,.0f} tokens/s",
            f"{self._per_second(self.images):,.1f} images/s",
            f"{self.step_time_s:.3f} s",
            f"data {self._per_second(self.data_time_s):.0%}",
            f"boundary {self._per_second(self.boundary_time_s):.0%}",
            f"memory {self.peak_memory_bytes / 2**30:.2f} GiB",
        ]
        parts += [] if self.mfu is None else [f"MFU {self.mfu:.1%}"]
        parts += [f"{self.skipped_samples:,} too long"] if self.skipped_samples else []
        parts += [f"{self.extra['bad_samples']:,} bad"] if self.extra.get("bad_samples") else []
        return " | ".join(parts)

    def _per_second(self, amount: float) -> float:
        """Return an amount of the step as a rate, and seconds as a share of its time; 0 where no time passed."""
        return amount / self.step_time_s if self.step_time_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """Metrics of one held-out data set after one step, over all ranks.

    Attributes:
        step: the step that it follows, counted from 1.
        dataset: its name.
        loss: mean over all supervised tokens, in nats.
        exact_match: fraction of samples whose answer greedy decoding would reproduce exactly.
        asked: the number of samples that this is a fraction of: those with a supervised token.
        supervised_tokens: number of supervised tokens.
        samples: number of samples, without those skipped as too long or bad.
        time_s: wall-clock seconds.
        bad: see `bad_counts`.
    """

    step: int
    dataset: str
    loss: float
    exact_match: float
    asked: int
    supervised_tokens: int
    samples: int
    time_s: float
    bad: Mapping[str, int] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Value]:
        """Numbers by name; those that are not finite are None."""
        own = {name: value for name, value in vars(self).items() if name not in ("step", "dataset", "bad")}
        return {name: _finite(value) for name, value in {**own, **self.bad}.items()}

    def record(self) -> dict[str, Value]:
        """Return the record for metrics.jsonl, which has a line of its own."""
        return {"step": self.step, "eval_dataset": self.dataset} | {f"eval_{n}": v for n, v in self.values.items()}

    def line(self, steps: int) -> str:
        """Return the line for the terminal, in a run of `steps` steps."""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps} | evaluation of {self.dataset} | loss {self.loss:.4f} | "
            f"exact match {self.exact_match:.1%} of {self.asked:,} | "
            f"{self.supervised_tokens:,} tokens of {self.samples:,} samples | {self.time_s:.3f} s"
        )


def _finite(value: Value) -> Value:
    """Return the value, or None for NaN and infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
