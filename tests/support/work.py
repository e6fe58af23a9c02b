"""How much work something is, on any machine."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable


def calls(function: Callable[..., object], *arguments: object) -> int:
    """How many functions of Python are called by `function(*arguments)`."""
    with cProfile.Profile() as profile:
        function(*arguments)
    return pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]
