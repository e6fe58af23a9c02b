"""What a GPU must hold besides the tensors of a step. Pure.

context         the CUDA context with the kernels in use, and workspaces of libraries: `CONTEXT` bytes. With lazy
                loading, PyTorch's context has some 300 MB, and had over 1 GB where all kernels were loaded
                (pytorch/pytorch issue 107667). Workspaces of cuBLAS and cublasLt are 32 MiB each for a stream on
                Hopper (cuBLAS documentation, `cublasSetWorkspace`; pytorch/pytorch pull request 120925). cuDNN,
                Transformer Engine and NCCL load kernels of their own
communicators   buffers of NCCL, estimated (`nccl_memory`)
fragmentation   what the caching allocator holds and cannot use, as a share of the tensors: `FRAGMENTATION`.
                Without expandable segments 15 % on average of eight LLMs on A100, and up to 33 % (GMLake, ASPLOS
                2024, arXiv 2401.08156); 43 % with virtual stages and recomputation (STAlloc, arXiv 2507.16274).
                Runs have expandable segments (PyTorch's "CUDA semantics", PYTORCH_ALLOC_CONF), which map memory
                    page by page as GMLake does: reports of Megatron's and PyTorch's trainers then name 1 to 3 % of
                    the tensors as "reserved but unallocated". 5 % leaves room for data of many sizes
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hetero.distributed.communicators import CommunicatorKind
from megatron_hetero.planning.memory.nccl_memory import bytes_by_rank

ALLOWANCES: tuple[str, ...] = ("context", "communicators", "fragmentation")
"""What is allowed for, in the order of the columns of `allowance_bytes`."""
CONTEXT, FRAGMENTATION = 10**9, 0.05


def allowance_bytes(kinds: Sequence[CommunicatorKind], tensors: np.ndarray) -> np.ndarray:
    """Bytes by rank, int64 [ranks, allowances]. `tensors`: of each rank, int64 [ranks]."""
    found = np.zeros((len(tensors), len(ALLOWANCES)), np.int64)
    found[:, 0] = CONTEXT
    found[:, 1] = bytes_by_rank(kinds, len(tensors))
    found[:, 2] = (tensors * FRAGMENTATION).astype(np.int64)
    return found
