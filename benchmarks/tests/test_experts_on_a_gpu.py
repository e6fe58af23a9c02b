"""Ranks that share a GPU, some without tokens and some whose experts get none, compute what `transformers` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.crew import Crew
from benchmarks.gpu.sharing import join
from megatron_hetero.groups.platform import Platform
from megatron_hetero.models.layers.recompute import Recompute
from tests.support.expert_blocks import EMPTY, Row, differences


class Ranks:
    """What each rank runs."""

    def __init__(self, platform: Platform):
        self.platform = platform

    def differences(self, row: Row) -> dict[str, float]:
        return differences(row, self.platform)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_without_rows_equal_transformers(tmp_path: Path) -> None:
    crew = Crew(4, tmp_path / "store", Ranks, join=join, start="spawn")
    try:
        for row in (*EMPTY, Row("tp:2,cp:2,ep:4", recompute=Recompute("none", chunk=5))):
            results = crew.run("differences", row)
            assert all(difference <= 1e-5 for found in results for difference in found.values()), (row, results)
    finally:
        crew.close()
