"""Model FLOPs utilisation and the peaks of devices. What parts of modules compute: tests/unit/models/test_parts.py."""

from __future__ import annotations

import pytest

from megatron_hetero.train.measures import peak_flops


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA B200", 2.25e15),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
        ("", None),
        ("Some GPU of tomorrow", None),
    ],
)
def test_peaks(name: str, expected: float | None) -> None:
    assert peak_flops(name) == expected
