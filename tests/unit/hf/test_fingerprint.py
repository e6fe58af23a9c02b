"""Fingerprints of weights: equal for the same tensors in other files, different for any other."""

from __future__ import annotations

from pathlib import Path
from typing import Self
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from megatron_hetero.base.errors import UserError
from megatron_hetero.hf import fingerprint as file_reads
from megatron_hetero.hf.fingerprint import fingerprint

Tensors = dict[str, torch.Tensor]
WEIGHTS: Tensors = {
    **{f"w{i}": torch.randn(300, 300, generator=torch.Generator().manual_seed(i)) for i in range(8)},
    "norm": torch.ones(16),
    "scale": torch.tensor(2.0),
    "nothing": torch.empty(0, 4),
}


def written(folder: Path, *files: Tensors, metadata: str = "pt") -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{number}.safetensors" for number in range(len(files))]
    for path, tensors in zip(paths, files, strict=True):
        save_file(tensors, path, {"format": metadata})
    return paths


def test_other_files_and_order_are_the_same_weights(tmp_path: Path) -> None:
    one = fingerprint(written(tmp_path / "one", WEIGHTS))
    some = {name: WEIGHTS[name] for name in ("w7", "norm", "w1")}
    rest = {name: values for name, values in WEIGHTS.items() if name not in some}
    assert fingerprint(written(tmp_path / "two", some, rest, metadata="other")) == one
    assert fingerprint(sorted((tmp_path / "two").iterdir(), reverse=True)) == one


@pytest.mark.parametrize("change", [
    *({name: values * 1.001} for name, values in WEIGHTS.items() if values.numel()),
    {"w0": torch.cat([WEIGHTS["w0"][:-1], torch.zeros(1, 300)])},
    {"w0": WEIGHTS["w0"].view(150, 600)},
    {"w0": WEIGHTS["w0"].bfloat16()},
    {"w0": WEIGHTS["w1"], "w1": WEIGHTS["w0"]},
    {"more": torch.ones(1)},
])  # fmt: skip
def test_every_other_tensor_shows(change: Tensors, tmp_path: Path) -> None:
    one, other = written(tmp_path / "one", WEIGHTS), written(tmp_path / "other", WEIGHTS | change)
    assert fingerprint(one) != fingerprint(other)


def test_little_is_read(tmp_path: Path) -> None:
    """Of each tensor some KiB; of the many tensors of a large model less of each."""
    paths = written(tmp_path / "large", {f"w{i}": torch.zeros(1 << 18) for i in range(8)})
    real, read = file_reads.open_regular, list[int]()

    class Counted:
        def __init__(self, path: Path) -> None:
            self._file = real(path)
            self.seek = self._file.seek

        def read(self, size: int) -> bytes:
            read.append(size)
            return self._file.read(size)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

    with mock.patch.object(file_reads, "open_regular", Counted):
        fingerprint(paths)
        assert len(read) == 2 + 8 * 4 and max(read[2:]) == 1024
        read.clear()
        with mock.patch.object(file_reads, "_MAX_SAMPLES", 16):
            fingerprint(paths)
        assert len(read) == 2 + 8 * 2


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", b'\x09\0\0\0\0\0\0\0{"w": {}}'])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: not a safetensors file .*download it again"):
        fingerprint([path])
    with pytest.raises(UserError, match=r"absent\.safetensors: cannot be read \(no such file"):
        fingerprint([tmp_path / "absent.safetensors"])
