"""The axes of parallelism, and what each of them splits over ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["weights", "tokens", "samples", "layers", "experts"]


@dataclass(frozen=True)
class Axis:
    """An axis by its name in layouts. Ranks that differ in it alone hold different parts of what it `splits`."""

    name: str
    splits: Split


TABLE = (
    Axis("tp", "weights"),
    Axis("sp", "tokens"),
    Axis("cp", "tokens"),
    Axis("dp", "samples"),
    Axis("pp", "layers"),
)
"""From the axis that varies fastest among a layout's ranks to the slowest."""
AXES = tuple(axis.name for axis in TABLE)


def axes_of(*splits: Split) -> tuple[str, ...]:
    """The names of the axes that split any of these."""
    return tuple(axis.name for axis in TABLE if axis.splits in splits)
