"""The only file that touches Megatron-Core's global state.

Megatron-Core takes its process groups explicitly nearly everywhere. Two places still read globals: the
buffer that sequence-parallel linears gather into, and the tracker of random states that a
`TransformerBlock` forks. Neither holds a process group, so modules of different layouts can share them. A third place
uses the default process group: making an optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor

from megatron_hetero.distributed.platform import Platform

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


def random_states(platform: Platform) -> dict[str, Tensor]:
    """The states of all random generators that models use, uint8 [bytes] on the host, by name."""
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    return platform.random_states() | {f"megatron-{name}": state for name, state in tracker.get_states().items()}


def set_random_states(states: Mapping[str, Tensor], platform: Platform) -> None:
    """Put back what `random_states` gave."""
    of_tracker = {name.removeprefix("megatron-"): s for name, s in states.items() if name.startswith("megatron-")}
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    tracker.set_states(of_tracker)
    platform.set_random_states(states)


@contextlib.contextmanager
def own_parameter_groups() -> Iterator[None]:
    """Inside, Megatron makes optimizers without communication.

    It would gather the kinds of parameter groups over the whole world, so that all ranks have the same ones, empty or
    not. But ranks hold different modules, and those of a frozen stage make no optimizer: the others would wait for
    them for ever. To be used before threads that communicate are started.
    """

    def gather(gathered: list[Any], mine: Any, *_: Any, **__: Any) -> None:
        gathered[:] = [mine] * len(gathered)

    real = dist.all_gather_object
    dist.all_gather_object = gather
    try:
        yield
    finally:
        dist.all_gather_object = real


@contextlib.contextmanager
def pytorch_optimizers() -> Iterator[None]:
    """Inside, Megatron makes optimizers of PyTorch, whatever is installed.

    It would take those of Transformer Engine or Apex where it finds them. These count one step for all parameters of a
    group: a part of the model that trains only from some step on could not begin with its first one, and a checkpoint
    written with one of them could not be read where the other is installed. PyTorch's fused AdamW is one kernel too.
    """
    names = {"USING_PYTORCH_OPTIMIZER": True, "SGD": torch.optim.SGD}
    found = {name: getattr(megatron_optimizer, name) for name in names}
    for name, value in names.items():
        setattr(megatron_optimizer, name, value)
    try:
        yield
    finally:
        for name, value in found.items():
            setattr(megatron_optimizer, name, value)
