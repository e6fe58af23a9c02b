"""Norms and rotation of heads by Triton, without a GPU: values by Triton's interpreter, and what is compiled for
Hopper.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_hetero.models.layers.compiled import NormWeights
from tests.unit.models.hopper import built, errors_by_the_interpreter, needs_triton, triton_of_its_own

pytestmark = [needs_triton, pytest.mark.usefixtures(triton_of_its_own.__name__)]
HEADS = {"30B-A3B": (8, 128, 128), "8B": (4, 128, 128), "235B-A22B": (16, 128, 128), "Qwen3.5-9B": (4, 256, 64)}
"""Query heads of a group, elements of a head, and how many are rotated."""
RESULTS = 150


def test_values_by_the_interpreter() -> None:
    """All results are exact up to one rounding."""
    errors = errors_by_the_interpreter("tests.unit.models.head_values")
    assert len(errors) == RESULTS and max(errors.values()) <= 1, errors


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_on_a_gpu() -> None:
    from tests.unit.models.head_values import errors_on

    errors = errors_on("cuda")
    assert len(errors) == RESULTS and max(errors.values()) <= 1, errors


@pytest.mark.parametrize("queries, dim, width", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_kernels_for_hopper(backward: bool, queries: int, dim: int, width: int) -> None:
    """Heads are loaded and stored 16 bytes at a time, without spills. On 132 multiprocessors all programs of a backward
    pass run at once.
    """
    from megatron_hetero.models.layers import head_kernels

    kernel: Any = head_kernels.heads_backward if backward else head_kernels.heads_forward
    norm = NormWeights(torch.empty(dim), None, 1e-6)
    mixed, table = torch.empty(1, 1, 1, (queries + 2) * dim), torch.empty(2, 1, width)
    _, sizes = head_kernels.arguments(mixed, table[0], table[1], dim, norm, norm)
    warps = sizes.pop("num_warps")
    numbers = dict.fromkeys(("row_stride", "group_stride", "rows", "groups"), "i32")
    constants = sizes | {"eps": 1e-6, "offset": 0}
    types = {name: "*fp32" if name in ("cosines", "sines", "sums") else "*bf16" for name in kernel.arg_names}
    types = {name: numbers.get(name, kind) for name, kind in types.items() if name not in constants}
    found = built(kernel, types, constants, warps)
    narrow = sum(times for kind, times in found.memory.items() if ".v4.b32" not in kind)
    wide = {kind: times for kind, times in found.memory.items() if ".v4.b32" in kind}
    chunks = sizes["HEADS"] * sizes["BLOCK"] // (8 * 32 * warps)
    tiles = (6, 1) if backward else (2, 2)
    assert wide["ld.global.v4.b32"] >= tiles[0] * chunks and wide["st.global.v4.b32"] == tiles[1] * chunks
    assert narrow <= 6, "of angles and gains, which all heads share, and of sums"
    assert found.stack == 0
    warps_at_once = 65536 // (found.registers * 32 * warps) * warps
    assert warps_at_once >= (head_kernels.WARPS / 132 if backward else 24)
