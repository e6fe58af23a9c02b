"""Layers of Transformer Engine, by a stand-in with the signatures and checks of version 2.9."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.matrix import thinned
from tests.support.pool import Pool
from tests.support.stand_ins import TRANSFORMER_ENGINE
from tests.unit.models import jobs_te as jobs

HOPPER, AMPERE = (9, 0), (8, 0)
COLUMN, ROW, THEIRS, OURS = "TEColumnParallelLinear", "TERowParallelLinear", "TEDotProductAttention", "TorchAttention"


@pytest.fixture(scope="module")
def with_te(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two workers that find Transformer Engine installed."""
    pool = Pool(2, tmp_path_factory.mktemp("pool"), [TRANSFORMER_ENGINE])
    yield pool
    pool.close()


@pytest.mark.parametrize("kv_heads", thinned([2, 8], 2))
@pytest.mark.parametrize(
    "layout, of_full_layers", [("dp:2", THEIRS), ("tp:2", THEIRS), ("sp:2", OURS), ("cp:2", OURS)], ids=str
)
def test_layers_compute_what_those_on_pytorch_do(
    layout: str, of_full_layers: str, kv_heads: int, with_te: Pool
) -> None:
    """Transformer Engine's attention has a fixed number of heads: where `sp` scatters them, it would refuse them."""
    found = with_te.run(jobs.attentions, layout, kv_heads, (16, 7, 2, 9), HOPPER)
    full = [COLUMN, of_full_layers, ROW]
    assert found == [{"causal": full, "full": full, "windowed": [COLUMN, THEIRS, ROW]}] * 2


def test_before_hopper_attention_is_ours(with_te: Pool) -> None:
    found = with_te.run(jobs.attentions, "dp:2", 2, (16, 7, 2, 9), AMPERE)
    assert found == [{layer: [COLUMN, OURS, ROW] for layer in jobs.LAYERS}] * 2
