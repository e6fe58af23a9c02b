"""What the installed version of Transformer Engine has, by `recorded.json` (written by `tools/te_signatures.py`).

"transformer_engine.pytorch.ep:": {"2.17.1": ""}                                       a module, from 2.17.1 on
"transformer_engine.pytorch.ep:is_symm_backed": {"2.18.0": ""}                         a name in it
"transformer_engine.pytorch.module.base:get_workspace": {"2.9.0": "", "2.10.0": null}  a name, before 2.10.0
"transformer_engine.pytorch.module.linear:Linear.forward": {"2.9.0": "self, inp"}      parameters of a method
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

VERSION = version("transformer-engine")


def _now(history: dict[str, str | None]) -> str | None:
    return next((history[since] for since in reversed(history) if Version(since) <= Version(VERSION)), None)


_HISTORIES = json.loads(Path(__file__).with_name("recorded.json").read_text())
PLACES: dict[str, str] = {place: now for place, history in _HISTORIES.items() if (now := _now(history)) is not None}


def signed(place: str, *ignored: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method be called with the recorded arguments of `place`. It takes those that it has by name; the others,
    but for the `ignored`, must be what they are by default.
    """
    signature = inspect.signature(eval(f"lambda {PLACES[f'transformer_engine.pytorch.{place}']}: None"))

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        taken = inspect.signature(method).parameters

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            others = bound.arguments.keys() - taken.keys() - set(ignored)
            used = {name for name in others if bound.arguments[name] != signature.parameters[name].default}
            assert not used, f"not what this stands in for: {used}"
            return method(**{name: value for name, value in bound.arguments.items() if name in taken})

        call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return call

    return decorate


def refused(name: str) -> Any:
    """A class that cannot be made, and whose attributes are not there."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError(f"transformer_engine: {name} is used")

    return type(name, (), {"__init__": fail})
