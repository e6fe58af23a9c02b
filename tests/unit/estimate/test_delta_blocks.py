"""Memory of the gated delta rule, measured on `meta`."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hetero.estimate.allocations import META, Memory, SubmoduleBytes, abridged, measured_rule
from megatron_hetero.models.layers.chunks import blocks_of, chunk_length
from megatron_hetero.models.layers.delta_kernels import fla_rule
from megatron_hetero.models.layers.delta_rule import delta_rule
from megatron_hetero.models.layers.sequences import Sequences
from tests.fake_cuda.packages import rule_of

LENGTHS = [(5000,), (20000, 3, 9000), (700,) * 40, (1, 2, 3), (8192,) * 4, (64, 4096, 4097)]


def _measured(rule: Any, lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype) -> SubmoduleBytes:
    (h, H), n = heads, sum(lengths)

    def inputs(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(n, *shape, dtype=of, device=META, requires_grad=True)

    sequences = Sequences(lengths, META)
    _ = sequences.chunks  # All layers share them.

    def run(v_nHV: Tensor) -> list[Tensor]:
        q, k, decay, beta = inputs(h, 32), inputs(h, 32), inputs(H, of=torch.float32), inputs(H)
        return [rule(q, k, v_nHV, decay, beta, sequences)]

    return Memory(gpu=True).measure(run, inputs(H, 16), {})


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_memory_is_that_of_all_blocks(lengths: tuple[int, ...]) -> None:
    abridged.cache_clear()
    _measured(measured_rule("cuda"), lengths, (2, 4), torch.float32)  # Blocks, which are cached, are not counted.
    found = _measured(measured_rule("cuda"), lengths, (2, 4), torch.float32)
    expected = _measured(delta_rule, lengths, (2, 4), torch.float32)
    assert found.saved == expected.saved
    assert found.forward == pytest.approx(expected.forward, rel=0.01)
    assert found.backward == pytest.approx(expected.backward, rel=0.01)


@pytest.mark.parametrize("places", [512, 4096])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_what_is_left_out_has_the_sizes_of_what_is_run(lengths: tuple[int, ...], places: int) -> None:
    chunks, others = abridged(lengths, places)
    length = chunk_length(lengths)
    every = [block[:3] for block in blocks_of(lengths, length, places // length)]
    runs = [(sizes, len(list(of))) for sizes, of in itertools.groupby(every)]
    assert [block[:3] for block in chunks.blocks] == [sizes for sizes, _ in runs]
    expected = [steps[0] for (steps, starts, _), count in runs for _ in range(count - 1) if not starts]
    assert list(others) == expected


def test_a_long_sequence_takes_no_longer_than_a_short_one() -> None:
    assert len(abridged((1 << 18,), 4096)[0].blocks) == len(abridged((1 << 14,), 4096)[0].blocks) == 3


@pytest.mark.parametrize("heads", [(2, 4), (4, 4)], ids=str)
def test_long_packs_have_the_memory_of_flash_linear_attention(heads: tuple[int, int]) -> None:
    lengths = (100_000,)
    gpu: Any = SimpleNamespace(
        usage=SimpleNamespace(kernels=defaultdict(Counter)), phase="", ran_compiled=lambda *_, **__: None
    )
    bounds: Any = SimpleNamespace(cu_seqlens=None, host_cu_seqlens=torch.tensor([0, *lengths]))

    def rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, _: Any) -> Tensor:
        return fla_rule(q, k, v, decay, beta, bounds, function=rule_of(gpu))

    expected = _measured(rule, lengths, heads, torch.bfloat16)
    found = _measured(measured_rule("cuda"), lengths, heads, torch.bfloat16)
    assert 0.97 * expected.backward <= found.backward <= 1.1 * expected.backward
    assert _measured(measured_rule("cpu"), lengths, heads, torch.bfloat16).backward < found.backward
