"""Optional packages with CUDA kernels: the versions that are known to work, and what is installed.

`docs/installation.md` describes the packages, and `setup.py` requires the same versions. Nothing here needs a GPU.
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
    """An optional package with CUDA kernels.

    Attributes:
        name: name of the package for pip.
        module: name of its Python module.
        versions: versions that are known to work.
        imports: names that must be importable, as `module:name`.
        use: what the package computes, for messages.
        needs: requirements on other packages that its metadata lacks, without which its results are wrong.
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
    # From 2.1 on, causal attention aligns the last query and key (flash-attn's README, "Changelog"). Version 4 uses the
    # name `flash_attn` too, but lacks the function.
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
    # The package flash-linear-attention adds models to `fla-core`. On Hopper, 0.5.0 refuses the backward pass with any
    # Triton from 3.4 on; later versions refuse it with Triton before 3.7.1, which compiles wrong gradients
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
class Status:
    """Installation status of a package.

    Attributes:
        version: the installed version; None if the package is not installed.
        error: the reason why the package cannot be imported, if any.
        lacks: the unmet requirements on other packages, with their versions.
    """

    version: str | None
    error: str = ""
    lacks: str = ""


@lru_cache
def find(package: OptionalPackage) -> Status:
    """Return the status of a package, after importing it if it is installed."""
    try:
        version = importlib.metadata.version(package.name.partition("[")[0])
    except importlib.metadata.PackageNotFoundError:
        return Status(None)
    try:
        for required in package.imports:
            module, _, name = required.partition(":")
            getattr(importlib.import_module(module), name)
        lacking = [f"{need} (found {other})" for need in package.needs if (other := _other_version(need)) is not None]
    except Exception as error:  # A build for another torch or CUDA fails with errors of many kinds.
        return Status(version, f"{type(error).__name__}: {error}".splitlines()[0])
    return Status(version, lacks=" and ".join(lacking))


def _other_version(need: str) -> str | None:
    """Return the installed version of the module in `need` if it does not meet this requirement, else None."""
    required = Requirement(need)
    version = importlib.import_module(required.name).__version__
    return None if required.specifier.contains(version, prereleases=True) else version


def unusable(package: OptionalPackage, found: Status) -> str:
    """Return why a package is not used, as the predicate of a sentence; empty if it is used."""
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
    """Return which optional packages this rank uses, as facts that must be equal on all ranks, since each rank chooses
    kernels by itself. Devices other than GPUs use no packages.
    """
    if not platform.is_cuda:
        return {}
    statuses = {package: find(package) for package in PACKAGES}
    return {
        f"package {package.name}": unusable(package, status) or f"{status.version} is used"
        for package, status in statuses.items()
    }
