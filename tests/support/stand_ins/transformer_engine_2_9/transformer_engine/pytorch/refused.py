"""Things that are imported, and that our modules must not use."""

from __future__ import annotations

from typing import Any


def refused(name: str) -> Any:
    """A class that cannot be made, and whose attributes are not there."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError(f"transformer_engine: {name} is used")

    return type(name, (), {"__init__": fail})
