"""What the workers of the pool run for the tests of how runs end."""

from __future__ import annotations

import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import pretrain_vlm
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups import collective
from megatron_hetero.step.gradients import GradientSummary
from megatron_hetero.train.stopping import StopRequest
from megatron_hetero.train.trainer import Trainer
from tests.support.pool import platform

Harm = Callable[[int, Path], object]
"""Is done by each rank, given with a folder."""


def program(flags: list[str], step: int, harm: Harm, folder: Path) -> tuple[bool, str]:
    """What the program does, from its start to the export, where something is harmed in the midst of `step`: whether it
    was finished, and the error that ended it.
    """
    original = Trainer._refuse_faults

    def before_update(self: Trainer, number: int, summary: GradientSummary) -> None:
        if number == step:
            harm(dist.get_rank(), folder)
            collective.on_every(self.topology.files, lambda: None)  # done everywhere
        original(self, number, summary)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(Trainer, "_refuse_faults", before_update):
        try:
            return pretrain_vlm.train_and_export(load_config(flags), platform(), StopRequest()), ""
        except UserError as error:
            return False, str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def exit_codes(flags: list[str], folder: Path) -> list[int]:
    """What Weights & Biases is told when the program has done all that."""
    package = mock.MagicMock()
    with mock.patch.dict(sys.modules, wandb=package):
        program([*flags, "--log.wandb", "mine"], 1, nothing, folder)
    return [call.kwargs["exit_code"] for call in package.init.return_value.finish.call_args_list]


def nothing(rank: int, folder: Path) -> None:
    """Harms nothing."""


def folders_vanish(rank: int, folder: Path) -> None:
    """Somebody removes what is in a list of the folder."""
    if rank == 0:
        for path in (folder / "vanish").read_text().split():
            shutil.rmtree(path)


def place_is_taken(rank: int, folder: Path) -> None:
    """Somebody puts something where the model is to go."""
    if rank == 0:
        (folder / "out").mkdir()
        (folder / "out/thesis.txt").write_text("thesis")


def vanish_and_taken(rank: int, folder: Path) -> None:
    """Both."""
    folders_vanish(rank, folder)
    place_is_taken(rank, folder)


def disk_of_second_rank_is_full(rank: int, folder: Path) -> None:
    """A limit on the size of its files stands in for that."""
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def all_disks_are_full(rank: int, folder: Path) -> None:
    """The same on every rank."""
    disk_of_second_rank_is_full(1, folder)
