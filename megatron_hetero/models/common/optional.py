"""Packages that are used where they are installed in a version that is known to work. Nothing here needs a GPU.

`docs/installation.md` says what each brings and how it is installed; `setup.py` asks for the same versions.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class OptionalPackage:
    """What is asked of a package: names for pip and for Python, and the versions that are known to work.

    `imports`: modules, and names in them written `module:name`, that have to be there.
    """

    name: str
    module: str
    versions: str
    imports: tuple[str, ...]


TRANSFORMER_ENGINE = OptionalPackage(
    # What megatron-core 0.16.1 asks for in its own extra `dev`.
    "transformer-engine[pytorch]",
    "transformer_engine",
    ">=2.9,<2.12",
    ("transformer_engine.pytorch:Linear", "transformer_engine.pytorch.fp8:fp8_autocast"),
)
FLASH_ATTN = OptionalPackage(
    # Causal attention is aligned at the last query and key from 2.1 on (flash-attn's README, "Changelog"). Version 4
    # shares the name `flash_attn` without having the function.
    "flash-attn",
    "flash_attn",
    ">=2.1,<3",
    ("flash_attn:flash_attn_varlen_func",),
)
FLASH_ATTN_3 = OptionalPackage(
    # All versions so far are betas of 3.0.0 (hopper/__init__.py in flash-attention's repository).
    "flash_attn_3",
    "flash_attn_interface",
    ">=3.0.0b1,<4",
    ("flash_attn_interface:flash_attn_varlen_func",),
)


@dataclass(frozen=True)
class Found:
    """A package as it is installed. `version`: None where it is not. `error`: why it cannot be imported."""

    version: str | None
    error: str = ""


@lru_cache
def find(package: OptionalPackage) -> Found:
    """Look for the package, and import it where it is installed."""
    if importlib.util.find_spec(package.module) is None:
        return Found(None)
    try:
        for place in package.imports:
            module, _, name = place.partition(":")
            getattr(importlib.import_module(module), name)
    except Exception as error:  # A build for another torch or CUDA fails with errors of many kinds.
        return Found(_version(package), f"{type(error).__name__}: {error}".splitlines()[0])
    return Found(_version(package))


def _version(package: OptionalPackage) -> str:
    """Or "?" where nothing says."""
    version = getattr(importlib.import_module(package.module), "__version__", None)
    try:
        return version or importlib.metadata.version(package.name.partition("[")[0])
    except importlib.metadata.PackageNotFoundError:
        return "?"


def unusable(package: OptionalPackage, found: Found) -> str:
    """Why the package is not used, as the rest of a sentence about it; empty where it is."""
    if found.version is None:
        return "is not installed"
    if not _accepts(package.versions, found.version):
        return f"{found.version} is installed, and {_in_words(package.versions)} is known to work"
    return f"{found.version} is installed, but cannot be imported ({found.error})" if found.error else ""


def notices(found: Sequence[tuple[OptionalPackage, Found]]) -> list[str]:
    """A line for each package that is installed and not used. Packages that are not installed need none."""
    lines = [(package, unusable(package, f)) for package, f in found if f.version is not None]
    return [f"{package.module} {why}: PyTorch is used instead." for package, why in lines if why]


def _accepts(versions: str, version: str) -> bool:
    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _in_words(versions: str) -> str:
    """
    >>> _in_words(">=2.9,<2.12")
    '2.9 or newer, below 2.12'
    """
    lowest, below = versions.split(",")
    return f"{lowest.removeprefix('>=')} or newer, below {below.removeprefix('<')}"
