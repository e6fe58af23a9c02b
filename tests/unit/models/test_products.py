"""Matrix products are the same by whichever library."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_hetero.models.layers import linear as products
from megatron_hetero.models.layers.linear import LEAST, add_product, product

SHAPES = [(512, 256, 192), (LEAST // 128**2, 128, 128), (129, 511, 255), (7, 16, 12), (0, 512, 512), (1, 3, 1)]


assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-3)
"""Of sums of up to 1,024 products of drawn numbers."""


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_product(rows: int, inner: int, columns: int, biased: bool) -> None:
    x, weight, bias = _drawn(rows, 1, inner), _drawn(columns, inner), _drawn(columns) if biased else None
    out = product(x, weight.t(), bias)
    assert out.shape == (rows, 1, columns) and out.is_contiguous() and not out._is_view()
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(out.double(), expected)
    # As the gradient of the input has it.
    back = product(out, weight)
    assert_close(back.double(), out.double() @ weight.double())


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_add_product(rows: int, inner: int, columns: int) -> None:
    total, grad, x = _drawn(columns, inner), _drawn(rows, columns), _drawn(rows, inner)
    expected = total.double() + grad.double().t() @ x.double()
    add_product(total, grad.t(), x)
    assert_close(total.double(), expected)


def test_other_dtypes() -> None:
    x, weight = _drawn(512, 256, dtype=torch.bfloat16), _drawn(256, 256, dtype=torch.bfloat16)
    torch.testing.assert_close(product(x, weight), x @ weight)
    wide = product(x.double(), weight.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide, x.double() @ weight.double())


def test_which_library() -> None:
    large, small = torch.zeros(LEAST // 64**2, 64), torch.zeros(LEAST // 64**2 - 1, 64)
    assert products._by_onednn(large, torch.zeros(64, 64)) == products.has_onednn()
    assert not products._by_onednn(small, torch.zeros(64, 64))
    assert not products._by_onednn(large.bfloat16(), torch.zeros(64, 64, dtype=torch.bfloat16))
