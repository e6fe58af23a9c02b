"""Optional packages: which are used, what is said of the others, and that everybody names the same versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.models.layers import backend
from megatron_hetero.models.layers.backend import TORCH, backend_notices, choose_backend
from megatron_hetero.models.layers.kernels import (
    FLASH_ATTN,
    FLASH_ATTN_3,
    TRANSFORMER_ENGINE,
    Found,
    OptionalPackage,
    find,
    unusable,
)

ROOT = Path(__file__).parents[3]
GPU = Platform(torch.device("cuda", 0), "nccl")


@pytest.mark.parametrize(
    "package, usable, not_usable",
    [
        (
            TRANSFORMER_ENGINE,
            ["2.9.0", "2.9.0+1ab2c3d", "2.10", "2.20.2"],
            ["1.13.0", "2.8.0", "2.9.0.dev0", "2.21.0"],
        ),
        (
            FLASH_ATTN,
            ["2.1.0", "2.5.9.post1", "2.8.3.post2", "2.8.4+cu13torch2.11"],
            ["1.0.9", "2.0.9", "3.0.0", "4.0.0b5"],
        ),
        (FLASH_ATTN_3, ["3.0.0b1", "3.0.0b1+cu128", "3.0.0"], ["2.8.3", "4.0.0"]),
    ],
    ids=["Transformer Engine", "flash-attn", "FlashAttention-3"],
)
def test_versions(package: OptionalPackage, usable: list[str], not_usable: list[str]) -> None:
    for version in usable:
        assert unusable(package, Found(version)) == ""
    for version in not_usable:
        assert unusable(package, Found(version)).startswith(f"{version} is installed, and ")


def test_what_is_installed_and_not_used_is_said_in_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    founds = dict.fromkeys((TRANSFORMER_ENGINE, FLASH_ATTN, FLASH_ATTN_3), Found(None))
    monkeypatch.setattr(backend, "find", lambda package: founds[package])
    assert backend_notices("auto", GPU) == []
    founds[FLASH_ATTN_3] = Found("3.0.0")
    founds[FLASH_ATTN] = Found("2.8.3", "ImportError: undefined symbol: _ZN3c10")
    founds[TRANSFORMER_ENGINE] = Found("2.8.0")
    of_flash_attn, of_te = (
        "flash_attn 2.8.3 is installed, but cannot be imported (ImportError: undefined symbol: _ZN3c10): "
        "PyTorch is used instead.",
        "transformer_engine 2.8.0 is installed, and 2.9 or newer, below 2.21 is known to work: "
        "PyTorch is used instead.",
    )
    assert backend_notices("auto", GPU) == [of_flash_attn, of_te]
    assert backend_notices("torch", GPU) == [of_flash_attn]


def test_plain_pytorch_is_chosen_where_transformer_engine_cannot_be() -> None:
    for found in (Found(None), Found("2.8.0"), Found("2.21.0"), Found("2.9.0", "ImportError: libcudnn.so")):
        assert choose_backend("auto", GPU, found) is TORCH
    assert choose_backend("auto", Platform(CPU, "gloo"), Found("2.9.0")) is TORCH
    assert choose_backend("torch", GPU, Found("2.9.0")) is TORCH


@pytest.mark.parametrize(
    "platform, found, said",
    [
        (
            GPU,
            Found(None),
            "found te, but transformer_engine is not installed, expected Transformer Engine>=2.9,<2.21 on",
        ),
        (GPU, Found("1.13.0"), "found te, but transformer_engine 1.13.0 is installed, and 2.9 or newer, below 2.21 is"),
        (GPU, Found("2.9.0", "ImportError: x"), "found te, but transformer_engine 2.9.0 is installed, but cannot be"),
        (
            Platform(CPU, "gloo"),
            Found("2.9.0"),
            "found te, but transformer_engine does not run on the device cpu, expected Transformer Engine>=2.9,<2.21",
        ),
    ],
    ids=["absent", "too old", "broken", "cpu"],
)
def test_asking_for_what_cannot_be_had_is_refused(platform: Platform, found: Found, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"model.backend: {said}")) as error:
        choose_backend("te", platform, found)
    assert "--model.backend torch" in str(error.value)


def test_a_cpu_gets_no_warning() -> None:
    assert backend_notices("auto", Platform(CPU, "gloo")) == []


def test_a_package_is_found_with_its_version_or_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"whole_package": ("2.8.3", "def kernel(): pass\n"), "other_package": ("4.0.0", ""),
               "broken_package": ("2.8.3", "raise ImportError('undefined symbol')\n")}  # fmt: skip
    for name, (version, source) in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    whole, other, broken, absent = (
        find(OptionalPackage(f"{name}[extra]", name, ">=2,<3", (f"{name}:kernel",)))
        for name in (*sources, "absent_package")
    )
    assert whole == Found("2.8.3") and absent == Found(None)
    assert other.version == "4.0.0" and "kernel" in other.error
    assert broken == Found("2.8.3", "ImportError: undefined symbol")
    for name in ("whole_package", "other_package"):
        del sys.modules[name]


def test_setup_and_documentation_name_these_versions() -> None:
    extras = re.search(r'"gpu": \[(.*)\],$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert extras is not None
    assert re.findall(r'"([^"]+)"', extras[1]) == [
        package.name + package.versions for package in (TRANSFORMER_ENGINE, FLASH_ATTN)
    ]
    page = (ROOT / "docs/installation.md").read_text()
    for package in (TRANSFORMER_ENGINE, FLASH_ATTN, FLASH_ATTN_3):
        assert f"`{package.versions}`" in page


def commands(page: Path) -> list[str]:
    """The lines of a page that call pip, in their order."""
    return [line.strip() for line in page.read_text().splitlines() if line.startswith("    ") and "pip install" in line]


def test_the_optional_packages_are_built_with_what_they_need() -> None:
    """flash-attn's setup imports torch, packaging and wheel, and PyTorch's tools for extensions want ninja; what is
    isolated would find none of them.
    """
    for page in (ROOT / "README.md", ROOT / "docs/installation.md"):
        lines = commands(page)
        (build,) = (i for i, line in enumerate(lines) if "[gpu]" in line)
        assert "--no-build-isolation" in lines[build]
        before = " ".join(lines[:build]).split()
        assert {"torch", "setuptools", "wheel", "packaging", "ninja", "psutil"} <= {
            word.partition("=")[0].partition(">")[0].strip("'") for word in before
        }
