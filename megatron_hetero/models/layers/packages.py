"""Optional packages with kernels for CUDA: the versions that are known to work, and what is installed.

`docs/installation.md` describes them; `setup.py` requires the same versions. Nothing here needs a GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from functools import lru_cache

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_hetero.groups.platform import Platform


@dataclass(frozen=True)
class OptionalPackage:
    """Names of a package for pip and for Python, and the versions that are known to work.

    Attributes:
        imports: required names, written `module:name`.
        use: what it computes, as the end of a sentence.
        needs: requirements on other modules, beyond those of the package, without which its results are wrong.
    """

    name: str
    module: str
    versions: str
    imports: tuple[str, ...]
    use: str
    needs: tuple[str, ...] = ()


TRANSFORMER_ENGINE = OptionalPackage(
    "transformer-engine[pytorch]",
    "transformer_engine",
    ">=2.9,<2.21",
    ("transformer_engine.pytorch:Linear", "transformer_engine.pytorch.fp8:fp8_autocast"),
    "linear layers and norms",
)
FLASH_ATTN = OptionalPackage(
    # Causal attention is aligned at the last query and key from 2.1 on (flash-attn's README, "Changelog"). Version 4
    # shares the name `flash_attn` without having the function.
    "flash-attn",
    "flash_attn",
    ">=2.1,<3",
    ("flash_attn:flash_attn_varlen_func",),
    "attention in half precision",
)
FLASH_ATTN_3 = OptionalPackage(
    # All versions so far are betas of 3.0.0 (hopper/__init__.py in flash-attention's repository).
    "flash_attn_3",
    "flash_attn_interface",
    ">=3.0.0b1,<4",
    ("flash_attn_interface:flash_attn_varlen_func",),
    "attention in half precision on Hopper",
)
FLA = OptionalPackage(
    # The package flash-linear-attention is models around `fla-core`, of the same version. On Hopper, 0.5.0 refuses the
    # backward pass with any Triton from 3.4 on, and later ones with those before 3.7.1, which compile wrong gradients
    # (`chunk_bwd_dqkwg` in fla/ops/common/chunk_o.py).
    "fla-core",
    "fla",
    ">=0.6,<0.7",
    ("fla.ops.gated_delta_rule:chunk_gated_delta_rule",),
    "the gated delta rule in half precision",
    needs=("triton>=3.7.1",),
)
CAUSAL_CONV1D = OptionalPackage(
    "causal-conv1d",
    "causal_conv1d",
    ">=1.6,<1.8",
    ("causal_conv1d:causal_conv1d_fn",),
    "short convolutions in half precision",
)
PACKAGES = (FLASH_ATTN, FLASH_ATTN_3, TRANSFORMER_ENGINE, FLA, CAUSAL_CONV1D)


@dataclass(frozen=True)
class Found:
    """An installed package, or one that is not (`version` None).

    Attributes:
        error: why it cannot be imported.
        lacks: what it needs of another module, and the version of that.
    """

    version: str | None
    error: str = ""
    lacks: str = ""


@lru_cache
def find(package: OptionalPackage) -> Found:
    """Look for the package, and import it if it is installed."""
    try:
        version = importlib.metadata.version(package.name.partition("[")[0])
    except importlib.metadata.PackageNotFoundError:
        return Found(None)
    try:
        for place in package.imports:
            module, _, name = place.partition(":")
            getattr(importlib.import_module(module), name)
        lacking = [f"{need} (found {other})" for need in package.needs if (other := _other_version(need)) is not None]
    except Exception as error:  # A build for another torch or CUDA fails with errors of many kinds.
        return Found(version, f"{type(error).__name__}: {error}".splitlines()[0])
    return Found(version, lacks=" and ".join(lacking))


def _other_version(need: str) -> str | None:
    """Return the version of the module that a requirement names, if that does not fulfil it."""
    required = Requirement(need)
    version = importlib.import_module(required.name).__version__
    return None if required.specifier.contains(version, prereleases=True) else version


def unusable(package: OptionalPackage, found: Found) -> str:
    """Return why the package is not used, as the rest of a sentence about it; empty if it is."""
    if found.version is None:
        return "is not installed"
    if not SpecifierSet(package.versions).contains(found.version, prereleases=True):
        lowest, below = package.versions.split(",")
        works = f"{lowest.removeprefix('>=')} or newer, below {below.removeprefix('<')}"
        return f"{found.version} is installed, and {works} is known to work"
    if found.error:
        return f"{found.version} is installed, but cannot be imported ({found.error})"
    return f"{found.version} is installed, but needs {found.lacks}" if found.lacks else ""


def package_facts(platform: Platform) -> dict[str, str]:
    """Return which optional packages this rank uses, as facts that must be the same on all ranks: each chooses its
    kernels by itself. Other devices than GPUs use none.
    """
    if not platform.is_cuda:
        return {}
    founds = [(package, find(package)) for package in PACKAGES]
    return {
        f"package {package.name}": unusable(package, found) or f"{found.version} is used" for package, found in founds
    }
