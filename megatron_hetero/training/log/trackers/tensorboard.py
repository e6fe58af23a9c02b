"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from megatron_hetero.errors import UserError, os_errors_as
from megatron_hetero.training.log.folder import unwritable


class TensorBoard:
    """Writes event files to `folder`. Of a run whose first `done` steps were trained before, later steps are purged."""

    name = "TensorBoard"

    def __init__(self, folder: Path, done: int) -> None:
        """Raises `UserError` if TensorBoard is not installed, or the folder cannot be written."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError.at(
                "log.tensorboard",
                problem=f"TensorBoard is not installed ({error})",
                fix="install it with `pip install tensorboard`, or remove log.tensorboard",
            ) from None
        with os_errors_as(partial(unwritable, folder)):
            self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records values by metric name. Raises `OSError`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Finishes; event files do not say how a run ended. Raises `OSError`."""
        self._writer.close()
