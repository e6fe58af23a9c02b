"""The model, data and command lines of `tests/unit/train`."""

from __future__ import annotations

from tests.unit.train.conftest import make_flags, small_data, small_model

__all__ = ["make_flags", "small_data", "small_model"]
