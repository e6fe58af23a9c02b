"""Estimates GPU memory besides the tensors of a step: CUDA context, NCCL's buffers, fragmentation. Pure.

NCCL allocates the buffers of each connection and channel when ranks first use an algorithm, at start-up, and never
frees these buffers. The number of channels depends on GPUs and links; the figures are for a node of eight H100:

  * messages and all-to-alls connect each pair of ranks that exchange anything: a first `all_to_all_single` of
    eight ranks took 3.28 GB, or 0.47 GB for each of the seven others (NVIDIA/nccl issue 1685, 32 channels). Ranks of
    other nodes share buffers (issue 1450) and are counted as one more rank. `max_ctas` limits the channels;
  * other collectives connect rings: 16 channels, each with a buffer for the rank before it, of 4 MiB (protocol Simple),
    4.7 MiB (LL128) and 0.5 MiB (LL), the defaults of NCCL's `init.cc`; trees, with buffers for two neighbours; and
    NVLS, with three or more ranks in a node: 16 channels of two buffers of 1 MiB per rank of the node
    (`transport/nvls.cc`). Four A100 took 0.69 GB, two took 0.54 GB (issue 964).

`NCCL_MAX_P2P_NCHANNELS` lowers the first kind in proportion, and `NCCL_MAX_CTAS` the second.

Allowances:

context         the CUDA context with the kernels in use, and workspaces of libraries: `CONTEXT` bytes. With lazy
                loading, PyTorch's context has some 300 MB, and had over 1 GB where all kernels were loaded
                (pytorch/pytorch issue 107667). Workspaces of cuBLAS and cublasLt are 32 MiB each for a stream on
                Hopper (cuBLAS documentation, `cublasSetWorkspace`; pytorch/pytorch pull request 120925); runs with
                `tp_overlap` use two streams. cuDNN, Transformer Engine and NCCL load further kernels
communicators   NCCL's buffers, as above
fragmentation   memory that the caching allocator reserves and cannot use, as a share of the tensors: `FRAGMENTATION`.
                Without expandable segments: 15 % on average over eight LLMs on A100, and up to 33 % (GMLake, ASPLOS
                2024, arXiv 2401.08156); 43 % with virtual stages and recomputation (STAlloc, arXiv 2507.16274).
                Runs have expandable segments (PyTorch's "CUDA semantics", PYTORCH_ALLOC_CONF), which map memory
                page by page as GMLake does: reports of Megatron's and PyTorch's trainers then name 1 to 3 % of the
                tensors as "reserved but unallocated". 5 % leaves room for data of many sizes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megatron_hetero.layout.communicators import Axes, CommunicatorKind, Ranks, max_ctas

NODE = 8
"""Number of ranks on a node."""
PEER_BYTES = 3_280_000_000 // 7
"""Bytes of buffers for each peer in messages and all-to-alls, with `PEER_CHANNELS` channels."""
PEER_CHANNELS = 32
RING_BYTES = 16 * (4 * 2**20 + 120 * 640 * 8 * 8 + 512 * 2**10)
"""Bytes of ring buffers of a communicator; buffers of trees take twice as many."""
NVLS_BYTES = 16 * 2 * 2**20
"""Bytes of NVLS buffers of a communicator for each of its ranks on a node."""


def kind_bytes(kind: CommunicatorKind) -> int:
    """Return the maximum bytes of NCCL buffers of one communicator of this kind on a rank."""
    return _exchange_bytes(kind) + kind.collects * max(map(_collective_bytes, kind.groups))


def bytes_by_rank(kinds: Sequence[CommunicatorKind], world_size: int) -> np.ndarray:
    """Return the bytes of NCCL buffers of each rank, the world communicator included: int64 [ranks]."""
    everybody = tuple(range(world_size))
    total = np.full(world_size, _collective_bytes(everybody) if world_size > 1 else 0, np.int64)
    for kind in kinds:
        total[np.concatenate(kind.groups)] += _exchange_bytes(kind) if kind.is_worlds(everybody) else kind_bytes(kind)
    return total


def _exchange_bytes(kind: CommunicatorKind) -> int:
    """Return the bytes of buffers for messages and all-to-alls. All peers on other nodes count as one peer."""
    if not any(not isinstance(use, Axes) or use.exchanges for use in kind.uses):
        return 0
    channels = max_ctas(kind.uses[0]) or PEER_CHANNELS
    peers = max(max(nodes.values()) - 1 + (len(nodes) > 1) for nodes in map(_by_node, kind.groups))
    return peers * PEER_BYTES * channels // PEER_CHANNELS


def _collective_bytes(ranks: Ranks) -> int:
    """Return the bytes of the buffers of rings, trees and NVLS of a communicator of `ranks`."""
    in_node = max(_by_node(ranks).values())
    return 3 * RING_BYTES + (in_node * NVLS_BYTES if in_node > 2 else 0)


def _by_node(ranks: Ranks) -> Counter[int]:
    """Return the number of ranks on each node."""
    return Counter(rank // NODE for rank in ranks)


ALLOWANCES: tuple[str, ...] = ("context", "communicators", "fragmentation")
"""Names of the columns that `allowance_bytes` returns."""
CONTEXT, FRAGMENTATION = 10**9, 0.05


def allowance_bytes(kinds: Sequence[CommunicatorKind], tensors: np.ndarray) -> np.ndarray:
    """Return the allowances of each rank in bytes: int64 [ranks, allowances]. `tensors`: the bytes of the tensors of
    each rank, int64 [ranks].
    """
    context = np.full(len(tensors), CONTEXT)
    fragmentation = (tensors * FRAGMENTATION).astype(np.int64)
    return np.stack([context, bytes_by_rank(kinds, len(tensors)), fragmentation], axis=1)
