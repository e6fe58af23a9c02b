"""Experiment trackers that receive a run's metrics besides metrics.jsonl, each imported only where it is wanted."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_hetero.errors import UserError, in_short, os_errors_as
from megatron_hetero.outputs.logs import WANDB_ID
from megatron_hetero.training.log.folder import unwritable


def open_trackers(
    folder: Path, *, tensorboard: bool, wandb: str | None, config: str, done: int
) -> list[TensorBoard | WandB]:
    """The trackers of a run whose first `done` steps were trained before.

    Args:
        folder: where trackers write.
        tensorboard: whether TensorBoard is one of them.
        wandb: the Weights & Biases project; None: it is not one of them.
        config: the resolved configuration as YAML.
        done: number of steps trained before.

    Raises:
        UserError: a tracker is not installed or cannot be started.
    """
    trackers: list[TensorBoard | WandB] = [TensorBoard(folder, done)] if tensorboard else []
    return trackers if wandb is None else [*trackers, WandB(folder, wandb, config)]


def scalars(group: str, values: Mapping[str, object]) -> dict[str, float]:
    """The numbers among the values of a record, by metric name: `group/name`."""
    return {f"{group}/{n}": v for n, v in values.items() if n != "step" and isinstance(v, int | float)}


def _not_installed(where: str, name: str, package: str, error: ImportError) -> UserError:
    fix = f"install it with `pip install {package}`, or remove log.{package}"
    return UserError.at(where, problem=f"{name} is not installed ({error})", fix=fix)


class TensorBoard:
    """Writes event files to `folder`. Of a run whose first `done` steps were trained before, later steps are purged."""

    name = "TensorBoard"

    def __init__(self, folder: Path, done: int) -> None:
        """Raises `UserError` if TensorBoard is not installed, or the folder cannot be written."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("log.tensorboard", self.name, "tensorboard", error) from None
        with os_errors_as(partial(unwritable, folder)):
            self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records values by metric name. Raises `OSError`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Finishes; event files do not say how a run ended. Raises `OSError`."""
        self._writer.close()


class WandB:
    """Logs to a Weights & Biases project, with the configuration of the run. A resumed run continues the W&B run whose
    id an earlier one has left in `folder`. `WANDB_MODE=offline` writes to `folder/wandb` only, for `wandb sync`.

    Steps are a metric of their own (`step`), not W&B's counter, which refuses steps that are trained again.
    """

    name = "Weights & Biases"

    def __init__(self, folder: Path, project: str, config: str) -> None:
        """Raises `UserError` if it is not installed or cannot be started, for want of a login for example."""
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise _not_installed("log.wandb (--log.wandb)", self.name, "wandb", error) from None
        file = folder / WANDB_ID
        try:
            self._run = wandb.init(
                project=project,
                dir=str(folder),
                id=file.read_text(encoding="utf-8").strip() if file.is_file() else None,
                resume="allow",
                config=yaml.safe_load(config) or {},
                # Standard output belongs to the progress bar.
                settings=wandb.Settings(console="off"),
            )
            self._run.define_metric("*", step_metric="step")
            file.write_text(f"{self._run.id}\n", encoding="utf-8")
        except Exception as error:  # Its exceptions share no base class with those of its dependencies.
            raise UserError.at(
                "log.wandb (--log.wandb)",
                problem=f"Weights & Biases does not start ({in_short(error)})",
                fix="run `wandb login`, or set WANDB_MODE=offline, or remove log.wandb",
            ) from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records values by metric name. Raises `OSError`."""
        try:
            self._run.log({**values, "step": step})
        except Exception as error:
            raise OSError(in_short(error)) from error

    def close(self, *, failed: bool) -> None:
        """Finishes the upload, and marks the run as failed or finished. Raises `OSError`."""
        try:
            self._run.finish(exit_code=int(failed))
        except Exception as error:
            raise OSError(in_short(error)) from error
