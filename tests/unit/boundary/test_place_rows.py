"""Rows in an embedding: values and gradients of a masked scatter, and a message where their numbers differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hetero import UserError, place_rows

HIDDEN = 3


def drawn(counts: list[list[int]], rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """An embedding, rows and places; `counts`: 1 where a row goes, by sample and position."""
    torch.manual_seed(0)
    places = torch.tensor(counts, dtype=torch.bool).view(len(counts), len(counts[0]) if counts else 4)
    embedded = torch.randn(*places.shape, HIDDEN, dtype=dtype, requires_grad=True)
    return embedded, torch.randn(rows, HIDDEN, dtype=dtype, requires_grad=True), places


CASES = {
    "some": ([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], 6),
    "none": ([[0, 0], [0, 0]], 0),
    "no samples": ([], 0),
    "no tokens": ([[], []], 0),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("length_first", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_it_is_a_masked_scatter(case: str, length_first: bool, compiled: bool) -> None:
    embedded, rows, places = drawn(*CASES[case])
    given = embedded.detach().transpose(0, 1).contiguous().requires_grad_() if length_first else embedded
    place: Any = torch.compile(place_rows, backend="aot_eager", fullgraph=True) if compiled else place_rows
    found = place(given, rows, places, length_first=length_first)
    weights = torch.randn_like(embedded)
    by_sample = found.transpose(0, 1) if length_first else found
    expected = embedded.masked_scatter(places[..., None], rows)
    assert torch.equal(by_sample, expected) and found.shape == given.shape
    gradients = torch.autograd.grad((by_sample * weights).sum(), (given, rows))
    others = torch.autograd.grad((expected * weights).sum(), (embedded, rows))
    assert torch.equal(gradients[0].transpose(0, 1) if length_first else gradients[0], others[0])
    assert torch.equal(gradients[1], others[1])


def test_rows_are_converted_and_nothing_is_written_in_place() -> None:
    embedded, rows, places = drawn([[0, 1]], 1)
    before, low = embedded.detach().clone(), rows.detach().double().requires_grad_()
    found = place_rows(embedded, low, places)
    found.sum().backward()
    assert found.dtype == torch.float32 and torch.equal(embedded, before)
    assert low.grad is not None and low.grad.dtype == torch.float64


@pytest.mark.parametrize("number", [0, 1, 3])
def test_another_number_of_rows_is_refused(number: int) -> None:
    """Also fewer places than rows, of which a masked scatter takes a prefix."""
    embedded, rows, places = drawn([[0, 1, 1]], number)
    with pytest.raises(UserError, match=f"place_rows: 2 places for {number} rows"):
        place_rows(embedded, rows, places)
    torch.compiler.reset()
    for fullgraph, said in (
        (True, f"place_rows: .* than {number} rows"),
        (False, "place_rows: "),
    ):
        with pytest.raises((UserError, RuntimeError), match=said):
            torch.compile(place_rows, backend="aot_eager", fullgraph=fullgraph)(embedded, rows, places)


def test_what_does_not_fit_is_refused() -> None:
    embedded, rows, places = drawn([[0, 1, 1], [0, 0, 0]], 2)
    wrong = [
        (embedded, rows, places.T), (embedded, rows, places.long()), (embedded, rows[:, :2], places),
        (embedded[0], rows, places), (embedded, rows, places[..., None]), (embedded.transpose(0, 1), rows, places),
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(UserError, match=r"expected \[samples, length, hidden\], \[rows, hidden\], \["):
            place_rows(*each)
    with pytest.raises(UserError, match=r"\(2, 3, 3\), .* expected \[length, samples, hidden\].* `length_first`"):
        place_rows(embedded, rows, places, length_first=True)
