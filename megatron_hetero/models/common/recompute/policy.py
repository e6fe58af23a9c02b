"""What a module's layers make again, as it is configured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

How = Literal["none", "selective", "full"]


class Settings(Protocol):
    """The two settings, by module; what they lack is made as usual."""

    @property
    def recompute(self) -> Mapping[str, How | int]:
        """`none`, `selective`, `full` or a number of layers."""
        ...

    @property
    def chunk(self) -> Mapping[str, int]:
        """Tokens at a time through an MLP."""
        ...


@dataclass(frozen=True)
class Recompute:
    """What the layers of a module make again in the backward pass, instead of keeping it.

    `how`: nothing; what follows from what is kept without a matrix product and without communication (`selective`); all
    but the inputs of layers (`full`), or that in the first so many layers of each pipeline stage. `chunk`: so many
    tokens at a time go through the MLP on a rank where there are more, and gate and up are made again for each; 0 for
    all at once.
    """

    how: How | int = "none"
    chunk: int = 0

    @classmethod
    def of(cls, settings: Settings, module: str) -> Recompute:
        """That of `module`."""
        return cls(settings.recompute.get(module, "none"), settings.chunk.get(module, 0))

    @property
    def selective(self) -> bool:
        """Whether all layers keep less."""
        return self.how == "selective"

    def whole_layers(self, layers: int) -> int:
        """How many layers of a stage that has so many are made again as a whole; they are its first."""
        if isinstance(self.how, int):
            return min(self.how, layers)
        return layers if self.how == "full" else 0

    def chunks(self, tokens: int) -> bool:
        """Whether an MLP takes `tokens` in several chunks."""
        return 0 < self.chunk < tokens


EVERYTHING_KEPT = Recompute()
