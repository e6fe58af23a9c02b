"""What GPUs reach, for a roofline."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.config.gpus import USABLE_GIB, GpuName

PRODUCTS, MEMORY, LINKS, ATTENTION = 0.69, 0.78, 0.82, 0.35
"""Shares of the data sheet's figures that kernels reach. Assumed: large matrix products 680 of 989 TFLOP/s, kernels
that move memory 2.6 of 3.35 TB/s, collectives in a node 370 of 450 GB/s a direction. FlashAttention-2 reaches 35 % of
an H100 (Shah et al. 2024, arXiv 2407.08608).
"""
FLASH_3 = {"forward": 1.75, "backward": 1.6}
"""How many times as fast FlashAttention-3 is on Hopper: 1.5 to 2 and 1.5 to 1.75 (the same paper)."""
LAUNCH, COLLECTIVE = 5e-6, 10e-6
"""Assumed: seconds of the host for a kernel that PyTorch launches from Python, forward or backward; seconds that a
collective takes besides moving its bytes.
"""


@dataclass(frozen=True)
class Gpu:
    """A device, eight of them in a node. From its data sheet: dense bfloat16 operations per second (`peak`), bytes per
    second of its memory and of its links, one way. `attention`: the share of `peak` that attention reaches. `usable`:
    bytes of memory.
    """

    name: str
    peak: float
    memory: float
    links: float
    attention: float
    usable: float

    @property
    def is_hopper(self) -> bool:
        """Whether FlashAttention-3 runs on it."""
        return self.name in ("h100", "h200")


def _gpu(name: GpuName, peak: float, memory: float, links: float, attention: float = ATTENTION) -> Gpu:
    return Gpu(name, peak, memory, links, attention, USABLE_GIB[name] * 2**30)


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA's data sheets of the SXM modules.
        _gpu("h100", 989.4e12, 3.35e12, 450e9),
        _gpu("h200", 989.4e12, 4.8e12, 450e9),
        _gpu("a100-80", 312e12, 2.039e12, 300e9, 0.6),  # 50 to 73 %: Dao 2023, arXiv 2307.08691
    )
}
