"""A kernel that holds multiprocessors as a collective of NCCL does: few blocks of many threads, which wait."""

# pyright: basic, reportMissingImports=false
import triton
import triton.language as tl
from triton.language.extra import cuda

WARPS = 16
"""Of a block: with 16 registers a thread they want an eighth of a multiprocessor's, more than a product leaves."""


@triton.jit
def spin(ends, nanoseconds):
    """Wait in each block, then write the time to `ends`, int64 [blocks]."""
    start = cuda.globaltimer()
    now = start
    while now - start < nanoseconds:
        now = cuda.globaltimer()
    tl.store(ends + tl.program_id(0), now)
