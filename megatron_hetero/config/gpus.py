"""GPUs by name, for `plan.memory_gb`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

GpuName = Literal[
    "a10", "a100", "a100-40", "a100-80", "b200", "b300", "gb200", "h100", "h200", "l4", "l40s", "rtx-4090"
]
"""The GPUs that `plan.memory_gb` names."""

# As `torch.cuda.mem_get_info` sees them: less than on the data sheet, since the driver and error correction keep some
# (NVIDIA's data sheets say 24, 40, 48, 80, 141, 180, 186 and 288 GB). It differs by 0.3 % between drivers; this is the
# least of what PyTorch printed in reports ("GPU 0 has a total capacity of ...").
USABLE_GIB: Mapping[GpuName, float] = {
    "a10": 22.03,  # A10G; 22.03 to 22.09 reported
    "a100": 79.14,  # the one of 80 GB; 79.14 to 79.25
    "a100-40": 39.38,  # 39.38 to 39.56
    "a100-80": 79.14,
    "b200": 178.35,  # 178.35 and 178.36
    "b300": 267.69,
    "gb200": 184.31,
    "h100": 79.10,  # SXM; 79.10 to 79.18 (vllm-project/vllm#27508: 79.11)
    "h200": 139.72,  # 139.72 to 139.81
    "l4": 22.03,
    "l40s": 44.34,  # 44.34 to 44.42 (QwenLM/Qwen3-VL#2097: 44.40)
    "rtx-4090": 23.63,  # 23.63 to 23.68 (zai-org/CogVideo#36: 23.68, 3DTopia/Phidias-Diffusion#8: 23.64)
}
"""Memory that a process can use, in GiB."""


def usable_bytes(memory: float | GpuName) -> int:
    """Of a GPU by its name, or of a number of GB (10^9 bytes)."""
    return round(USABLE_GIB[memory] * 2**30) if isinstance(memory, str) else round(memory * 1e9)
