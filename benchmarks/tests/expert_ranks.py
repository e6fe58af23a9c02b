"""Ranks that compute blocks with experts beside `transformers`: some without tokens, some whose experts get none."""

from __future__ import annotations

from pathlib import Path

from benchmarks.crew import Crew
from benchmarks.gpu.sharing import join
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers.recompute import Recompute
from tests.support.expert_blocks import EMPTY, Row, differences

ROWS = (*EMPTY, Row("tp:2,cp:2,ep:4", recompute=Recompute("none", chunk=5)))


class Ranks:
    """What each rank runs."""

    def __init__(self, platform: Platform):
        self.platform = platform

    def differences(self, row: Row) -> dict[str, float]:
        """Relative differences from `transformers` by tensor; none on ranks without a part of the block."""
        return differences(row, self.platform)


def crew(folder: Path, *, start: str) -> Crew:
    """Four ranks on the first GPU, or on the CPU."""
    return Crew(4, folder / "store", Ranks, preload="benchmarks.tests.expert_ranks", join=join, start=start)
