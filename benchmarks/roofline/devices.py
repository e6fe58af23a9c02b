"""What GPUs reach, for a roofline."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_hetero.config.sections import USABLE_GIB, GpuName

PRODUCTS, MEMORY, LINKS, ATTENTION = 0.69, 0.78, 0.82, 0.35
"""Shares of the data sheet's figures that kernels reach. Assumed: large matrix products 680 of 989 TFLOP/s, kernels
that move memory 2.6 of 3.35 TB/s, collectives in a node 370 of 450 GB/s a direction. FlashAttention-2 reaches 35 % of
an H100 (Shah et al. 2024, arXiv 2407.08608).
"""
FLASH_3 = {"forward": 1.75, "backward": 1.6}
"""How many times as fast FlashAttention-3 is on Hopper: 1.5 to 2 and 1.5 to 1.75 (the same paper)."""
CTA = 20e9
"""Assumed: bytes per second that a CTA of NCCL moves over NVLink, which bounds communicators with `max_ctas`."""
COLLECTIVE = 10e-6
"""Assumed: seconds that a collective takes besides moving its bytes."""


@dataclass(frozen=True)
class Assumed:
    """What nobody knows before it is measured. `launch`: seconds of the host for a kernel that PyTorch launches from
    Python, forward or backward. `ramp`: bytes of a message of which half the links' rate is reached. `waves`: whether
    products take whole waves of tiles. `products`, `attention`: times what `PRODUCTS` and `ATTENTION` say. `queues`:
    hardware queues.

    Of multiprocessors beside collectives, see `timeline.Sharing`: `held` by a collective of NCCL's choice, 0 where it
    needs none; whether products are `whole`, whether a `product_first` lands, and whether products are `carved`.
    `copied`: whether copy engines gather, which need no multiprocessors.
    """

    launch: float = 5e-6
    ramp: float = 0.0
    waves: bool = False
    products: float = 1.0
    attention: float = 1.0
    queues: int = 32
    held: int = 0
    whole: bool = False
    product_first: bool = False
    carved: bool = False
    copied: bool = False


HELD = 24
"""Multiprocessors of a collective of NCCL's choice on a node of H100: 16 or 24 (pytorch pull request 144974)."""
WORST = Assumed(
    launch=12e-6, ramp=15e6, waves=True, products=0.9, attention=0.85, held=HELD, whole=True, product_first=True
)
"""The other end of the range."""
BEST, LEAST = "optimistic", "pessimistic"
_WHOLE = Assumed(held=HELD, whole=True)
ASSUMED = {
    BEST: Assumed(),
    LEAST: WORST,
    "one hardware queue": Assumed(queues=1),
    "eight hardware queues": Assumed(queues=8),
    "links by size of message": Assumed(ramp=WORST.ramp),
    "kernels share multiprocessors with collectives": Assumed(held=HELD),
    "products hold theirs, collectives land first": _WHOLE,
    "products hold theirs, and land first": replace(_WHOLE, product_first=True),
    "products leave collectives some": replace(_WHOLE, product_first=True, carved=True),
    "copy engines gather": replace(_WHOLE, product_first=True, copied=True),
    "products in whole waves of tiles": Assumed(waves=True),
    "slower products": Assumed(products=WORST.products),
    "slower attention": Assumed(attention=WORST.attention),
    "slower host": Assumed(launch=WORST.launch),
    "pessimistic, one hardware queue": replace(WORST, queues=1),
}
"""The range, and what each assumption is worth alone."""


@dataclass(frozen=True)
class Gpu:
    """A device, eight of them in a node. From its data sheet: dense bfloat16 operations per second (`peak`), bytes per
    second of its memory and of its links, one way. `attention`: the share of `peak` that attention reaches. `usable`:
    bytes of memory. `single`: operations per second in single precision, without tensor cores, as PyTorch multiplies
    where TF32 is not allowed. `processors`: multiprocessors.
    """

    name: str
    peak: float
    memory: float
    links: float
    attention: float
    usable: float
    single: float
    processors: int = 132

    @property
    def is_hopper(self) -> bool:
        """Whether FlashAttention-3 runs on it."""
        return self.name in ("h100", "h200")


def _gpu(name: GpuName, peak: float, memory: float, links: float, single: float, *more: float) -> Gpu:
    attention, processors = more or (ATTENTION, 132)
    return Gpu(name, peak, memory, links, attention, USABLE_GIB[name] * 2**30, single, int(processors))


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA's data sheets of the SXM modules.
        _gpu("h100", 989.4e12, 3.35e12, 450e9, 67e12),
        _gpu("h200", 989.4e12, 4.8e12, 450e9, 67e12),
        _gpu("a100-80", 312e12, 2.039e12, 300e9, 19.5e12, 0.6, 108),  # 50 to 73 %: Dao 2023, arXiv 2307.08691
    )
}
