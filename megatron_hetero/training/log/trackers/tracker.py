"""The protocol of experiment trackers, and which ones a run has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """An experiment tracker. `name`: for messages."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records values by metric name, such as `train/loss`. Raises `OSError`."""
        ...

    def close(self, *, failed: bool) -> None:
        """Finishes; nothing is recorded afterwards. `failed`: whether the run ended with an error. Raises `OSError`."""
        ...


def open_trackers(folder: Path, *, tensorboard: bool, wandb: str | None, config: str, done: int) -> list[Tracker]:
    """The trackers of a run whose first `done` steps were trained before; all of them, or none is left open.

    Args:
        folder: where trackers write.
        tensorboard: whether TensorBoard is one of them.
        wandb: the Weights & Biases project; None: it is not one of them.
        config: the resolved configuration as YAML.
        done: number of steps trained before.

    Raises:
        UserError: a tracker is not installed or cannot be started.
    """
    trackers: list[Tracker] = []
    with ExitStack() as opened:
        for tracker in _trackers(folder, tensorboard, wandb, config, done):
            opened.callback(_abandon, tracker)
            trackers.append(tracker)
        opened.pop_all()
    return trackers


def _abandon(tracker: Tracker) -> None:
    with suppress(OSError):
        tracker.close(failed=True)


def _trackers(folder: Path, tensorboard: bool, wandb: str | None, config: str, done: int) -> Iterator[Tracker]:
    if tensorboard:
        from megatron_hetero.training.log.trackers.tensorboard import TensorBoard

        yield TensorBoard(folder, done)
    if wandb is not None:
        from megatron_hetero.training.log.trackers.wandb import WandB

        yield WandB(folder, wandb, config)


def scalars(group: str, values: Mapping[str, object]) -> dict[str, float]:
    """The numbers among the values of a record, by metric name: `group/name`."""
    return {f"{group}/{n}": v for n, v in values.items() if n != "step" and isinstance(v, int | float)}
