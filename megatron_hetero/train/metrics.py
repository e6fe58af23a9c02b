"""Metrics of training steps and evaluations, formatted as records of metrics.jsonl and as lines for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Value = float | int | str | None
"""Value of a metric in a record of metrics.jsonl."""
_RECORDED_OTHERWISE = ("data_time_s", "boundary_time_s", "stopping", "extra")
"""Attributes of `StepMetrics` that are not recorded, or recorded under other names."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of one training step, over all ranks.

    Attributes:
        step: number of the step, from 1.
        loss: mean over supervised tokens, in nats; NaN if nothing was trained, since all samples were skipped.
        grad_norm: gradient norm over all modules, before clipping; NaN if nothing was trained.
        lr: learning rate of the text module.
        tokens: number of tokens in all samples, including image tokens, without padding.
        images: number of images and videos in all samples.
        step_time_s: duration of the step in seconds.
        peak_memory_bytes: maximum over ranks since the start of the run, before the step's update.
        skipped_samples: number of samples skipped as too long.
        data_time_s: seconds spent waiting for data.
        boundary_time_s: seconds that this rank spent packing or awaiting rows; transfers overlap with compute.
        mfu: model FLOPs utilisation; None if the device's peak is unknown.
        stopping: whether a rank was asked to stop, so that all stop after this step; not recorded.
        extra: additional values to record, by name.
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
        """Return the record for metrics.jsonl, in which NaN and infinity are replaced by None."""
        rates = {
            "tokens_per_s": self._per_second(self.tokens),
            "images_per_s": self._per_second(self.images),
            "data_share": self._per_second(self.data_time_s),
            "boundary_share": self._per_second(self.boundary_time_s),
        }
        values = {name: value for name, value in vars(self).items() if name not in _RECORDED_OTHERWISE}
        return {name: _finite(value) for name, value in {**values, **rates, **self.extra}.items()}

    def line(self, steps: int) -> str:
        """Format the metrics as a line for the terminal; `steps` is the number of steps of the run."""
        fields = [
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
        if self.mfu is not None:
            fields.append(f"MFU {self.mfu:.1%}")
        if self.skipped_samples:
            fields.append(f"{self.skipped_samples:,} too long")
        if self.extra.get("bad_samples"):
            fields.append(f"{self.extra['bad_samples']:,} bad")
        return " | ".join(fields)

    def _per_second(self, amount: float) -> float:
        """Return an amount divided by the duration of the step; 0 if no time passed."""
        return amount / self.step_time_s if self.step_time_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """Metrics of an evaluation of one held-out data set after a step, over all ranks.

    `loss`: mean over all supervised tokens, in nats. `asked`: number of samples with supervised tokens. `exact_match`:
    share of these samples whose answer greedy decoding would reproduce exactly. `samples`: number of samples not
    skipped as too long or bad. `bad`: counts of bad samples, see `bad_counts`.
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
        """Metrics by name; None in place of NaN and infinity."""
        values = {name: value for name, value in vars(self).items() if name not in ("step", "dataset", "bad")}
        return {name: _finite(value) for name, value in {**values, **self.bad}.items()}

    def record(self) -> dict[str, Value]:
        """Return the record of this evaluation for metrics.jsonl."""
        return {"step": self.step, "eval_dataset": self.dataset} | {f"eval_{n}": v for n, v in self.values.items()}

    def line(self, steps: int) -> str:
        """Format the metrics as a line for the terminal; `steps` is the number of steps of the run."""
        return (
            f"step {self.step:>{len(str(steps))}}/{steps} | evaluation of {self.dataset} | loss {self.loss:.4f} | "
            f"exact match {self.exact_match:.1%} of {self.asked:,} | "
            f"{self.supervised_tokens:,} tokens of {self.samples:,} samples | {self.time_s:.3f} s"
        )


def _finite(value: Value) -> Value:
    """Return None for NaN and infinity, which JSON cannot represent; return other values unchanged."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
