"""Rows of long matrices, of which `make test` runs some and `make matrix` the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thinned(rows: Iterable[Any], every: int) -> list[Any]:
    """All rows for `parametrize`; those that are not each `every`-th one are marked as long. Give a number that does
    not divide the period in which a property of the rows comes again.
    """
    return [_row(row) if number % every == 0 else _row(row, pytest.mark.long) for number, row in enumerate(rows)]


def long(rows: Iterable[Any]) -> list[Any]:
    """Rows for `parametrize`, all of which `make test` leaves out."""
    return [_row(row, pytest.mark.long) for row in rows]


def _row(row: Any, *marks: pytest.MarkDecorator) -> Any:
    values: Sequence[Any] = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=marks)
