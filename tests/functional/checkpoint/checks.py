"""Comparing checkpoints and resumed runs, and damaging checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_hetero.base.outputs import MARK
from megatron_hetero.step.number_formats import nearest_bfloat16
from tests.functional.checkpoint import runs as jobs
from tests.support.pool import Pools

DTYPES = {"": torch.float32, "--model.dtype bfloat16": torch.bfloat16}


def require_exact_resume(pools: Pools, tmp_path: Path, flags_of: Callable[[str], list[str]]) -> None:
    """Train 4 steps at once and, in another folder, 2 and 2: losses and checkpoints are the same."""
    whole, cut = flags_of("whole"), flags_of("cut")
    untouched = pools(2).run(jobs.train, whole)[0]
    first = pools(2).run(jobs.train, cut, None, 2)[0]
    second = pools(2).run(jobs.train, cut, tmp_path / "copy")[0]
    assert second["from"] == 2 and first["losses"] + second["losses"] == untouched["losses"]
    same(tmp_path / "cut/checkpoints/step-00000002", tmp_path / "copy/step-00000002", but="random/")
    same(*(tmp_path / run / "checkpoints/step-00000004" for run in ("whole", "cut")), but="")


def same(one: Path, other: Path, but: str) -> None:
    """Both checkpoints hold the same bits; tensors that begin with `but` are not looked at."""
    a, b = ({k: v for k, v in jobs.tensors(p).items() if not but or not k.startswith(but)} for p in (one, other))
    assert a.keys() == b.keys()
    assert not [key for key in a if a[key].dtype != b[key].dtype or not torch.equal(a[key], b[key])]


def weights_of(master: torch.Tensor, dtype: str) -> torch.Tensor:
    """What a run of that dtype computes with, in fp32."""
    return nearest_bfloat16(master.float()).float() if DTYPES[dtype] == torch.bfloat16 else master


def require_loaded(written: Path, copy: Path, found: dict[str, Any], steps: int, dtype: str = "") -> None:
    """Check that what was loaded has the same bits: what is saved again at once, and the weights themselves."""
    same(written, copy, but="random/")
    kept = jobs.tensors(written)
    assert all(
        np.array_equal(weights_of(kept[f"weights/{name}"], dtype).reshape(value.shape).numpy(), value)
        for name, value in found["loaded"].items()
    )
    assert {float(count) for key, count in kept.items() if key.startswith("step/")} == {float(steps)}
    assert any("layouts changed" in note for note in found["notes"])


def flip(checkpoint: Path) -> str:
    """Change a bit of a checkpoint's tensors. Returns what is then said of it."""
    path = checkpoint / "tensors-0-0.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return "1 damaged file (tensors-0-0.safetensors has a different SHA-256)"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def published(folder: Path) -> dict[str, bytes]:
    """Without marks, which are of the folder itself."""
    return {name: data for name, data in bytes_of(folder).items() if not name.endswith(MARK)}
