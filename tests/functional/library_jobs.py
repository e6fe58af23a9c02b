"""What the workers of the pool run for the tests of the library example."""

from __future__ import annotations

from examples.custom_modules import Options, train
from megatron_hetero import Platform, UserError
from megatron_hetero.platform import CPU


def trained(options: Options) -> tuple[list[float], list[str]]:
    """The losses of the example, and what it says."""
    said: list[str] = []
    return train(options, Platform(CPU, "gloo"), said.append), said


def refusal(options: Options) -> str:
    """The message with which the example refuses to run."""
    try:
        trained(options)
    except UserError as error:
        return str(error)
    return ""
