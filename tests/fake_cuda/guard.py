"""Compiles and loads `guard.cpp`, so that autograd of a CPU build of PyTorch runs backwards of "cuda" tensors."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")


def missing() -> str | None:
    """Why there can be no guard here, None where there can be one. Imports torch, but starts nothing on a device."""
    import torch

    if shutil.which("g++") is None:
        return "no compiler g++, which the device guard is built with"
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this PyTorch has a device guard for CUDA of its own"
    return None


def compiled(folder: Path) -> Path:
    """The guard as a library in `folder`. Raises `CalledProcessError` with what the compiler said."""
    from torch.utils.cpp_extension import include_paths

    library = folder / "guard.so"
    includes = [f"-I{path}" for path in include_paths()]
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O0", *includes, str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def load(library: Path) -> None:
    """Load the guard into this process. It registers itself; what it needs of torch has to be visible before."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is installed"
    folder = Path(spec.origin).parent / "lib"
    for path in (folder / "libc10.so", folder / "libtorch_cpu.so", library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
