"""Which communicators the operations of a schedule share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from megatron_hetero.layout.communicators import EdgeUse, Link


@dataclass(frozen=True)
class Wiring:
    """Which operations of a rank share a communicator.

    `links`: one communicator for activations (F, R) and one for gradients (B) per ordered pair of ranks (`pair`) or per
    pipeline. `boundaries`: one communicator per direction of an edge, or per edge. The defaults are those of
    `megatron_hetero.layout.communicators`.
    """

    links: Literal["pair", "pipeline"] = "pair"
    boundaries: Literal["direction", "boundary"] = "direction"

    def __call__(self, use: Link | EdgeUse) -> str:
        """Name the communicator for a use."""
        if isinstance(use, Link):
            return str(use) if self.links == "pair" else f"{use.module} {use.direction}"
        return str(use) if self.boundaries == "direction" else "-".join(use.edge.ends)


WIRINGS = [Wiring(*each) for each in product(("pair", "pipeline"), ("direction", "boundary"))]
