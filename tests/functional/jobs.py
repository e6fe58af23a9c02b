"""What the workers of the pool run for the tests of bad input."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.train.start import build_trainer


def refusal(flags: list[str]) -> str | None:
    """The message with which a run of these flags ends on this rank; None where it trains to its end."""
    try:
        run = build_trainer(load_config(flags), Platform(CPU, "gloo"))
        for step, batch, _ in run.batches():
            run.train_step(step, batch)
    except UserError as error:
        return str(error)
    return None


def refusal_of_each(flags: list[list[str]]) -> str | None:
    """The same, where each rank has flags of its own."""
    return refusal(flags[dist.get_rank()])


def refusal_in(folders: list[str], flags: list[str]) -> str | None:
    """The same, where each rank works in a folder of its own."""
    with contextlib.chdir(folders[dist.get_rank()]):
        return refusal(flags)
