"""Ranks that share a GPU, some without tokens and some whose experts get none, compute what `transformers` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.tests.expert_ranks import ROWS, crew


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ranks_without_rows_equal_transformers(tmp_path: Path) -> None:
    ranks = crew(tmp_path, start="spawn")
    try:
        for row in ROWS:
            results = ranks.run("differences", row)
            assert all(difference <= 1e-5 for found in results for difference in found.values()), (row, results)
    finally:
        ranks.close()
