"""Optional packages: which are used, what is said of the others, and that everybody names the same versions."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.base.errors import SharedError, UserError
from megatron_hetero.groups.collective import require_same
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.models.layers import backend, packages
from megatron_hetero.models.layers.backend import TORCH, backend_notices, choose_backend
from megatron_hetero.models.layers.packages import (
    CAUSAL_CONV1D,
    FLA,
    FLASH_ATTN,
    FLASH_ATTN_3,
    PACKAGES,
    TRANSFORMER_ENGINE,
    OptionalPackage,
    Status,
    find,
    package_facts,
    unusable,
)
from megatron_hetero.train import inputs
from tests.support.ranks import on_ranks

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
        (FLA, ["0.6.0", "0.6.1"], ["0.4.2", "0.5.2", "0.7.0"]),
        (CAUSAL_CONV1D, ["1.6.0", "1.6.2.post1", "1.7.0+cu13torch2.13"], ["1.5.4", "1.8.0"]),
    ],
    ids=["Transformer Engine", "flash-attn", "FlashAttention-3", "flash-linear-attention", "causal-conv1d"],
)
def test_versions(package: OptionalPackage, usable: list[str], not_usable: list[str]) -> None:
    for version in usable:
        assert unusable(package, Status(version)) == ""
    for version in not_usable:
        assert unusable(package, Status(version)).startswith(f"{version} is installed, and ")


def assert_notices(chosen: str, *patterns: str) -> None:
    notices = backend_notices(chosen, GPU)
    assert len(notices) == len(patterns) and all(map(re.match, patterns, notices)), notices


def test_what_is_installed_is_said_in_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    founds = dict.fromkeys(PACKAGES, Status(None))
    monkeypatch.setattr(backend, "find", lambda package: founds[package])
    assert backend_notices("auto", GPU) == []
    founds[CAUSAL_CONV1D] = Status("1.7.0")
    founds[FLASH_ATTN] = Status("2.8.3", "ImportError: undefined symbol: _ZN3c10")
    founds[TRANSFORMER_ENGINE] = Status("2.8.0")
    of_flash_attn, of_te = (
        "flash_attn 2.8.3 is installed, but cannot be imported (ImportError: undefined symbol: _ZN3c10): "
        "PyTorch is used instead.",
        "transformer_engine 2.8.0 is installed, and 2.9 or newer, below 2.21 is known to work: "
        "PyTorch is used instead.",
    )
    of_conv1d = "causal_conv1d 1.7.0 is used for short convolutions in half precision."
    assert backend_notices("auto", GPU) == [of_flash_attn, of_te, of_conv1d]
    assert backend_notices("torch", GPU) == [of_flash_attn, of_conv1d]
    founds[FLA] = Status("0.6.0", lacks="triton>=3.7.1 (found 3.6.0)")
    of_fla = "fla 0.6.0 is installed, but needs triton>=3.7.1 (found 3.6.0): PyTorch is used instead."
    assert backend_notices("torch", GPU) == [of_flash_attn, of_fla, of_conv1d]


def test_plain_pytorch_is_chosen_where_transformer_engine_cannot_be() -> None:
    for found in (
        Status(None),
        Status("2.8.0"),
        Status("2.21.0"),
        Status("2.9.0", "ImportError: libcudnn.so"),
    ):
        assert choose_backend("auto", GPU, found) is TORCH
    assert choose_backend("auto", Platform(CPU, "gloo"), Status("2.9.0")) is TORCH
    assert choose_backend("torch", GPU, Status("2.9.0")) is TORCH


@pytest.mark.parametrize(
    "platform, found, said",
    [
        (
            GPU,
            Status(None),
            "found te, but transformer_engine is not installed, expected Transformer Engine>=2.9,<2.21 on",
        ),
        (
            GPU,
            Status("1.13.0"),
            "found te, but transformer_engine 1.13.0 is installed, and 2.9 or newer, below 2.21 is",
        ),
        (
            GPU,
            Status("2.9.0", "ImportError: x"),
            "found te, but transformer_engine 2.9.0 is installed, but cannot be",
        ),
        (
            Platform(CPU, "gloo"),
            Status("2.9.0"),
            "found te, but transformer_engine does not run on the device cpu, expected Transformer Engine>=2.9,<2.21",
        ),
    ],
    ids=["absent", "too old", "broken", "cpu"],
)
def test_asking_for_what_cannot_be_had_is_refused(platform: Platform, found: Status, said: str) -> None:
    with pytest.raises(UserError, match="model.backend: .*" + re.escape(said)) as error:
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
        find(OptionalPackage(f"{name}[extra]", name, ">=2,<3", (f"{name}:kernel",), "tests"))
        for name in (*sources, "absent_package")
    )
    assert whole == Status("2.8.3") and absent == Status(None)
    assert other.version == "4.0.0" and "kernel" in other.error
    assert broken == Status("2.8.3", "ImportError: undefined symbol")
    for name in ("whole_package", "other_package"):
        del sys.modules[name]


def test_what_a_package_needs_of_another_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needing.py").write_text("def kernel(): pass\n")
    (tmp_path / "needing-1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: needing\nVersion: 1.0\n"
    (tmp_path / "needing-1.0.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "needed.py").write_text('__version__ = "3.6.0+git1"\n')
    monkeypatch.syspath_prepend(tmp_path)
    place = ("needing", "needing", ">=1,<2", ("needing:kernel",), "tests")
    assert find(OptionalPackage(*place, ("needed>=3.6",))) == Status("1.0")
    assert find(OptionalPackage(*place, ("needed>=3.7.1",))) == Status("1.0", lacks="needed>=3.7.1 (found 3.6.0+git1)")
    assert find(OptionalPackage(*place, ("not_there>=1",))).error == "ModuleNotFoundError: No module named 'not_there'"
    for name in ("needing", "needed"):
        del sys.modules[name]


@on_ranks(2)
def test_ranks_with_unlike_packages_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each chooses its kernels by itself."""
    rank = dist.get_rank()

    def compare(*of_ranks: Status) -> None:
        monkeypatch.setattr(packages, "find", lambda package: of_ranks[rank] if package is FLA else Status(None))
        require_same(dist.group.WORLD, "ranks of one run", package_facts(GPU), "start them alike")

    compare(Status("0.6.0"), Status("0.6.0"))
    told = "ranks of one run: package fla-core: found 0.6.0 is used on rank 0 and "
    with pytest.raises(SharedError, match=re.escape(f"{told}is not installed on rank 1")):
        compare(Status("0.6.0"), Status(None))
    with pytest.raises(SharedError, match=re.escape(f"{told}0.6.1 is used on rank 1")):
        compare(Status("0.6.0"), Status("0.6.1"))
    with pytest.raises(SharedError, match=re.escape(f"{told}0.6.0 is installed, but cannot be imported (OSError)")):
        compare(Status("0.6.0"), Status("0.6.0", "OSError"))
    assert package_facts(Platform(CPU, "gloo")) == {}


def test_a_run_compares_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(may_use_cudnn=True)
    monkeypatch.setattr(inputs, "flat_settings", lambda _: {})
    monkeypatch.setattr(packages, "find", lambda _: Status("0.6.0"))
    facts = inputs._settings_and_versions(config, GPU)
    assert facts["package fla-core"] == "0.6.0 is used"
    assert facts["package causal-conv1d"] == "0.6.0 is installed, and 1.6 or newer, below 1.8 is known to work"
    assert {f"package {package.name}" for package in PACKAGES} <= facts.keys()


@pytest.mark.parametrize(
    "extra, required",
    [("gpu", (TRANSFORMER_ENGINE, FLASH_ATTN)), ("delta", (FLA, CAUSAL_CONV1D))],
    ids=["gpu", "delta"],
)
def test_setup_names_these_versions(extra: str, required: tuple[OptionalPackage, ...]) -> None:
    found = re.search(rf'"{extra}": \[(.*)\],$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert found is not None
    assert re.findall(r'"([^"]+)"', found[1]) == [package.name + package.versions for package in required]


def test_documentation_names_these_versions() -> None:
    rows = [line for line in (ROOT / "docs/installation.md").read_text().splitlines() if line.startswith("| ")]
    for package in PACKAGES:
        needs = [package.versions, *(need.lstrip("abcdefghijklmnopqrstuvwxyz_") for need in package.needs)]
        assert [row for row in rows if all(f"`{each}`" in row for each in needs)], package.name


def commands(page: Path) -> list[str]:
    """The lines of a page that call pip, in their order."""
    return [line.strip() for line in page.read_text().splitlines() if line.startswith("    ") and "pip install" in line]


def test_the_optional_packages_are_built_with_what_they_need() -> None:
    """flash-attn's setup imports torch, packaging and wheel, and PyTorch's tools for extensions want ninja; what is
    isolated would find none of them.
    """
    for page in (ROOT / "docs/installation.md",):
        lines = commands(page)
        (build,) = (i for i, line in enumerate(lines) if "[gpu]" in line)
        assert "--no-build-isolation" in lines[build]
        before = " ".join(lines[:build]).split()
        assert {"torch", "setuptools", "wheel", "packaging", "ninja", "psutil"} <= {
            word.partition("=")[0].partition(">")[0].strip("'") for word in before
        }
