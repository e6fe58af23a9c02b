"""Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megatron_hetero.errors import UserError, in_short
from megatron_hetero.outputs.logs import WANDB_ID


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
            raise UserError.at(
                "log.wandb (--log.wandb)",
                problem=f"Weights & Biases is not installed ({error})",
                fix="install it with `pip install wandb`, or remove log.wandb",
            ) from None
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
