"""The only file that touches Megatron-Core's global state.

Megatron-Core takes its process groups explicitly nearly everywhere. Two places still read globals: the
buffer that sequence-parallel linears gather into, and the tracker of random states that a
`TransformerBlock` forks. Neither holds a process group, so modules of different layouts can share them.
"""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random

MODEL_PARALLEL_STREAM = "model-parallel-rng"


def prepare_globals(seed: int) -> None:
    """Fill Megatron's globals for this process. To be called once the platform has been prepared; idempotent."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    megatron_random.initialize_rng_tracker()
    tracker = megatron_random.get_cuda_rng_tracker()
    assert tracker is not None, "initialised above"
    tracker.reset()
    tracker.add(MODEL_PARALLEL_STREAM, seed)
