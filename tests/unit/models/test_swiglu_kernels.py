"""SwiGLU by Triton, without a GPU: values by Triton's interpreter, and what is compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.models.hopper import Built, built, errors_by_the_interpreter, needs_triton, triton_of_its_own

pytestmark = [needs_triton, pytest.mark.usefixtures(triton_of_its_own.__name__)]
WIDTHS = {"7B tp:4": 4736, "32B tp:8": 3456, "an expert of 30B-A3B": 768, "an expert of 235B-A22B": 1536}
ENCODER = 3420
"""Of Qwen2.5-VL, not a multiple of 8: rows begin at multiples of 8 bytes."""


def test_values_by_the_interpreter() -> None:
    """All results are exact up to one rounding."""
    errors = errors_by_the_interpreter("tests.unit.models.swiglu_values")
    assert len(errors) == 51 and max(errors.values()) <= 1, errors


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_on_a_gpu() -> None:
    from tests.unit.models.swiglu_values import errors_on

    errors = errors_on("cuda")
    assert len(errors) == 51 and max(errors.values()) <= 1, errors


def compiled(backward: bool, width: int, weighted: bool, warps: int = 4) -> Built:
    from megatron_hetero.models.layers import swiglu_kernels

    kernel: Any = swiglu_kernels.swiglu_backward if backward else swiglu_kernels.swiglu_forward
    constants: dict[str, Any] = {"WIDTH": width, "BLOCK": swiglu_kernels.BLOCK}
    if not weighted:
        constants |= {name: None for name in ("weights", "grad_weights") if name in kernel.arg_names}
    pointers = {name: "*bf16" for name in kernel.arg_names if name not in constants}
    return built(kernel, pointers, constants, warps)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS.keys())
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_kernels_for_hopper(backward: bool, width: int, weighted: bool) -> None:
    """16 bytes at once, but for the weight of a row and its gradient; no spills; 48 registers or fewer, with which ten
    programs run on a multiprocessor; shared memory for the sum of a row alone, a number for each warp.
    """
    found = compiled(backward, width, weighted)
    narrow = {kind: times for kind, times in found.memory.items() if ".v4.b32" not in kind}
    assert set(narrow) == ({"ld.global.b16"} if weighted else set()) | (
        {"st.global.b16"} if backward & weighted else set()
    )
    wide = {kind: times for kind, times in found.memory.items() if kind not in narrow}
    loads, stores = wide["ld.global.v4.b32"], wide["st.global.v4.b32"]
    assert len(wide) == 2 and loads * (2 if backward else 1) == stores * (3 if backward else 2)
    assert found.stack == 0 and found.registers <= 48
    assert found.shared == (16 if backward and weighted else 0)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_rows_aligned_to_8_bytes(backward: bool) -> None:
    found = compiled(backward, ENCODER, weighted=False, warps=8)
    assert set(found.memory) == {"ld.global.v2.b32", "st.global.v2.b32"}
    assert found.stack == found.shared == 0 and found.registers <= 48
