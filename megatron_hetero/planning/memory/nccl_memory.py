"""What communicators take of a GPU's memory, about. Pure.

NCCL allocates buffers for each connection and channel when ranks first exchange something, and keeps them. How many
channels there are depends on the GPUs and links; the figures here are those of a node of eight H100:

  * messages and all-to-alls connect every two ranks that have something for each other: a first `all_to_all_single` of
    eight ranks took 3.28 GB, or 0.47 GB for each of the seven others (NVIDIA/nccl issue 1685, 32 channels). Those of
    other nodes share buffers (issue 1450) and are counted as one more;
  * other collectives connect rings: 16 channels, each with a buffer for the rank before it, of 4 MiB (protocol Simple),
    4.7 MiB (LL128) and 0.5 MiB (LL), the defaults of NCCL's `init.cc`. Trees and NVLS add to it.

`NCCL_MAX_P2P_NCHANNELS` and `NCCL_MAX_CTAS` lower the first and the second in proportion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megatron_hetero.distributed.communicators import Axes, CommunicatorKind, Ranks, Use

NODE = 8
"""Ranks of a node."""
PEER_BYTES = 3_280_000_000 // 7
"""For each rank that a rank exchanges messages with."""
RING_BYTES = 16 * (4 * 2**20 + 120 * 640 * 8 * 8 + 512 * 2**10)
"""For rings."""


def kind_bytes(kind: CommunicatorKind) -> int:
    """The most that a rank's communicator of this kind takes."""
    others = max(map(_counted, kind.groups))
    exchanges = any(_exchanges(use) for use in kind.uses)
    rings = any(isinstance(use, Axes) and use.axes != ("sp",) for use in kind.uses)
    return exchanges * others * PEER_BYTES + rings * RING_BYTES


def bytes_by_rank(kinds: Sequence[CommunicatorKind], world_size: int) -> np.ndarray:
    """What all communicators of each rank take, that of the world included, int64 [ranks]."""
    found = np.full(world_size, RING_BYTES * (world_size > 1), np.int64)
    for kind in kinds:
        found[np.concatenate(kind.groups)] += kind_bytes(kind)
    return found


def _counted(ranks: Ranks) -> int:
    """Others that buffers are for: those of the same node, and one for all other nodes."""
    nodes = Counter(rank // NODE for rank in ranks)
    return max(nodes.values()) - 1 + (len(nodes) > 1)


def _exchanges(use: Use) -> bool:
    """Whether it is messages or all-to-alls. Attention under `sp` exchanges heads for tokens."""
    return not isinstance(use, Axes) or use.axes == ("sp",)
