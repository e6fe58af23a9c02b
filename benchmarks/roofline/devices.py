"""What GPUs reach, for a roofline: measured where the record of one H100 says it (`benchmarks/results/gpu.json`), and
otherwise assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_hetero.config.sections import USABLE_GIB, GpuName

# ------------------------------------------------------- fitted to one section of the record, `share-7b`, and no other

PRODUCTS = 0.81
"""Share of the data sheet's operations per second that matrix products reach."""
SHORTEST, GAP = 8e-6, 2.5e-6
"""Seconds that an operation takes a device at the least, and between two. PyTorch launches more kernels than there are
operations (the record has 1.2 for each): memory is set to zero, sums and norms have a second kernel.
"""
HOST = 76e-6
"""Seconds of the host for an operation that PyTorch launches from Python, forward or backward."""
SUMS = 0.2
"""Share of the memory's bandwidth that sums over tokens reach, of which gradients of biases are made."""
DYNAMIC = {"swiglu forward": 1.58e12, "swiglu backward": 0.88e12}
"""Bytes per second of SwiGLU where the compiler does not know its width: no vectors are loaded, so that memory of more
bandwidth does not help.
"""
EXPANDED = 0.97e12
"""Bytes per second that a copy of an expanded tensor writes: what stood in for an all-gather."""

# ------------------------------------------------------------------------------------------- measured by other sections

MEMORY = 0.9
"""Share of the memory's bandwidth: the record's `copy on the device` is 3,009 of 3,350 GB/s."""
NORMS = 0.65
"""The same of norms: what the record's reductions leave for them."""
AHEAD = 850
"""Operations that the host may be ahead of the device: CUDA's queue has room for 1,024 kernels."""

# -------------------------------------------------------------------------------------------------------------- assumed

TODAY = 0.82
"""The host's time of a micro-batch over that of the recorded code, as `benchmarks.host` measures it on a CPU."""
INNER = 12e-6
"""Seconds of the host for what PyTorch launches within an operator: 8 µs (the record) and what is around it."""
LINKS = 0.82
"""Share of the links' bandwidth that collectives in a node reach: 370 of 450 GB/s a direction."""
CTA = 20e9
"""Bytes per second that a CTA of NCCL moves over NVLink, which bounds communicators with `max_ctas`."""
COLLECTIVE = 10e-6
"""Seconds that a collective takes besides moving its bytes."""
QUERIES = 128
"""Queries of a head that a block of an attention kernel has."""


@dataclass(frozen=True)
class Attention:
    """How fast an attention kernel is: with many blocks it reaches `most` of a device's peak, with `half` blocks half
    of that. A causal pack of few heads has few blocks, and the last ones of each head take longest.
    """

    most: float
    half: float

    def share(self, blocks: float) -> float:
        """Of the peak."""
        return self.most * blocks / (blocks + self.half)


ATTENTION: Mapping[str, Attention] = {
    # FlashAttention-2: `most` is published (Shah et al. 2024, arXiv 2407.08608), `half` fitted to `share-7b`.
    "flash forward": Attention(0.35, 287),
    "flash backward": Attention(0.31, 130),
    # cuDNN is assumed to be as fast as FlashAttention-3 (flash-attention issue 1310), of which 48 heads are published
    # (685 and 540 TFLOP/s of 8k tokens: tritonbench issue 1267); 5 to 7 heads 480 to 530 and 380 to 415.
    "cudnn forward": Attention(0.69, 138),
    "cudnn backward": Attention(0.546, 138),
}
"""By kernel and direction."""


@dataclass(frozen=True)
class Assumed:
    """What nobody knows before it is measured. `launch`: seconds of the host for an operation. `ramp`: bytes of a
    message of which half the links' rate is reached. `waves`: whether products take whole waves of tiles. `products`,
    `attention`: times what `PRODUCTS` and `ATTENTION` say. `flash`: whether FlashAttention-2 computes all attention;
    `dynamic`: whether SwiGLU is compiled for any width. `queues`: hardware queues. `micro_batches`: of a step, in place
    of as many as it has.

    Of multiprocessors beside collectives, see `timeline.Sharing`: `held` by a collective of NCCL's choice, 0 where it
    needs none; whether products are `whole`, whether a `product_first` lands, and whether products are `carved`.
    `copied`: whether copy engines gather, which need no multiprocessors.

    `alone`: one rank runs on one device, as `benchmarks.gpu` does it; copies stand in for collectives.
    """

    launch: float = HOST * TODAY
    ramp: float = 0.0
    waves: bool = False
    products: float = 1.0
    attention: float = 1.0
    flash: bool = False
    dynamic: bool = False
    queues: int = 32
    micro_batches: int | None = None
    held: int = 0
    whole: bool = False
    product_first: bool = False
    carved: bool = False
    copied: bool = False
    alone: bool = False


HELD = 24
"""Multiprocessors of a collective of NCCL's choice on a node of H100: 16 or 24 (pytorch pull request 144974)."""
RAMP = 15e6
FAST = Assumed()
"""Communication at the fast end of its range: messages of any size at the links' rate, without multiprocessors."""
SLOW = Assumed(ramp=RAMP, held=HELD, whole=True, product_first=True)
"""Communication at the slow end."""
USUAL = Assumed(ramp=RAMP / 2, held=HELD, whole=True)
"""Communication at the middle of its range."""
MIDDLE, FASTEST, SLOWEST = "middle", "fastest", "slowest"
ASSUMED = {
    MIDDLE: USUAL,
    FASTEST: FAST,
    SLOWEST: SLOW,
    "links at one rate": replace(USUAL, ramp=0.0),
    "links slower by size of message": replace(USUAL, ramp=RAMP),
    "collectives need no multiprocessors": replace(USUAL, held=0, whole=False),
    "kernels share multiprocessors with collectives": replace(USUAL, whole=False),
    "products hold theirs, and land first": replace(USUAL, product_first=True),
    "products leave collectives some": replace(USUAL, product_first=True, carved=True),
    "copy engines gather": replace(USUAL, product_first=True, copied=True),
    "one hardware queue": replace(USUAL, queues=1),
    "attention by FlashAttention-2": replace(USUAL, flash=True),
    "attention 15 % slower": replace(USUAL, attention=0.85),
    "SwiGLU of dynamic width": replace(USUAL, dynamic=True),
    "products 5 % slower, for power": replace(USUAL, products=0.95),
    "products in whole waves of tiles": replace(USUAL, waves=True),
    "host 103 µs an operation": replace(USUAL, launch=103e-6),
    "host 46 µs an operation": replace(USUAL, launch=46e-6),
    "host 20 µs an operation": replace(USUAL, launch=20e-6),
    "fastest, host 46 µs an operation": replace(FAST, launch=46e-6),
    "two micro-batches": replace(USUAL, micro_batches=2),
    "eight micro-batches": replace(USUAL, micro_batches=8),
}
"""The range of communication, and what each assumption is worth alone, from its middle on: of communication, of
kernels, of the host (that of the record's other share; 60 % of what was measured), and of the step.
"""


@dataclass(frozen=True)
class Gpu:
    """A device, eight of them in a node. From its data sheet: dense bfloat16 operations per second (`peak`), bytes per
    second of its memory and of its links, one way. `attention`: how fast FlashAttention-2 is, times that on Hopper.
    `usable`: bytes of memory. `single`: operations per second in single precision, without tensor cores, as PyTorch
    multiplies where TF32 is not allowed. `processors`: multiprocessors.
    """

    name: str
    peak: float
    memory: float
    links: float
    usable: float
    single: float
    attention: float = 1.0
    processors: int = 132

    @property
    def packages(self) -> tuple[str, ...]:
        """What `tests.fake_cuda` is told to have: attention by cuDNN, as in torch before 2.15."""
        return ("cudnn dense",) if self.name in ("h100", "h200") else ()


def _gpu(name: GpuName, peak: float, memory: float, links: float, single: float, *more: float) -> Gpu:
    attention, processors = more or (1.0, 132)
    return Gpu(name, peak, memory, links, USABLE_GIB[name] * 2**30, single, attention, int(processors))


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA's data sheets of the SXM modules.
        _gpu("h100", 989.4e12, 3.35e12, 450e9, 67e12),
        _gpu("h200", 989.4e12, 4.8e12, 450e9, 67e12),
        # 50 to 73 % of the peak in attention: Dao 2023, arXiv 2307.08691.
        _gpu("a100-80", 312e12, 2.039e12, 300e9, 19.5e12, 0.6 / ATTENTION["flash forward"].most, 108),
    )
}
