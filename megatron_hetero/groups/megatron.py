"""The only file that uses Megatron-Core's global state and the internals of PyTorch's FSDP2 (`fully_shard`).

Megatron-Core takes its process groups explicitly nearly everywhere. Two places still read globals: the buffer that
sequence-parallel linears gather into, and the tracker of random states that a `TransformerBlock` forks. Neither
contains a process group, so modules of different layouts can share them. The construction of an optimizer uses the
default process group, and the loss of a `LanguageModule` the tensor-parallel group of `parallel_state`.

FSDP2 has no public names for the parameters that it shards and for its pending gradients.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from megatron_hetero.groups.platform import Platform

MODEL_PARALLEL_STREAM = "model-parallel-rng"


def prepare_globals(seed: int) -> None:
    """Fill Megatron's globals for this process, after `Platform.prepare_megatron`. Idempotent."""
    _prepare_buffer()
    megatron_random.initialize_rng_tracker()
    tracker = megatron_random.get_cuda_rng_tracker()
    assert tracker is not None, "initialised above"
    tracker.reset()
    tracker.add(MODEL_PARALLEL_STREAM, seed)


def prepare_layers(seed: int, tp: int, pp: int) -> None:
    """Fill Megatron's globals for Megatron's own models, after `Platform.prepare_megatron`, and let their layers take
    groups from their collections.

    Random streams are seeded as by `model_parallel_cuda_manual_seed` for a process at these coordinates. Streams that a
    program with `parallel_state` has seeded stay.
    """
    _prepare_buffer()
    _patch(LanguageModule, "compute_language_model_loss", _loss_in_own_group)
    _patch(WrappedTorchNorm, "__new__", _norm_on_shards)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # A router reads it even without Transformer Engine.
    megatron_random.initialize_rng_tracker()
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    if not (parallel_state.model_parallel_is_initialized() and tracker.get_states()):
        tracker.reset()
    streams = {
        megatron_random.get_data_parallel_rng_tracker_name(): seed,
        MODEL_PARALLEL_STREAM: seed + 2718 + tp + 100 * pp,
        megatron_random.get_expert_parallel_rng_tracker_name(): seed + 1024 + tp + 100 * pp,
    }
    for name in streams.keys() - tracker.get_states().keys():
        tracker.add(name, streams[name])


def _prepare_buffer() -> None:
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def _patch(owner: type, name: str, wrapper: Any) -> None:
    """Replace a method by `wrapper(method, ...)`, once."""
    method = getattr(owner, name)
    if not hasattr(method, "__wrapped__"):
        setattr(owner, name, wraps(method)(lambda *args, **kwargs: wrapper(method, *args, **kwargs)))


def _loss_in_own_group(compute: Any, model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The loss over the model's own tensor-parallel group; the unfused loss would use the group of `parallel_state`."""
    group = model.pg_collection.tp
    own = {
        "get_tensor_model_parallel_group": lambda *_, **__: group,
        "get_tensor_model_parallel_rank": group.rank,
        "get_tensor_model_parallel_world_size": group.size,
    }
    found = {name: getattr(cross_entropy, name) for name in own}
    for name, value in own.items():
        setattr(cross_entropy, name, value)
    try:
        return compute(model, *args, **kwargs)
    finally:
        for name, value in found.items():
            setattr(cross_entropy, name, value)


def _norm_on_shards(make: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """A PyTorch norm on activations that are sharded over `tp`, which Megatron refuses. Its parameters are marked like
    those of other norms, so that their gradients are summed over `tp`.
    """
    if not config.sequence_parallel:
        return make(cls, config, *args, **kwargs)
    whole = copy.copy(config)
    whole.sequence_parallel = False
    norm = make(cls, whole, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


def random_states(platform: Platform) -> dict[str, Tensor]:
    """The states of all random generators that models use, uint8 [bytes] on the host, by name."""
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    return platform.random_states() | {f"megatron-{name}": state for name, state in tracker.get_states().items()}


def set_random_states(states: Mapping[str, Tensor], platform: Platform) -> None:
    """Restore the states that `random_states` returned."""
    of_tracker = {name.removeprefix("megatron-"): s for name, s in states.items() if name.startswith("megatron-")}
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    tracker.set_states(of_tracker)
    platform.set_random_states(states)


@contextlib.contextmanager
def without_processes(device: torch.device) -> Iterator[None]:
    """Inside, Megatron's layers are built and run on `device` without a default process group and random streams."""
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "current_device", lambda: device),
        (dist, "is_initialized", lambda: True),
        (dist, "get_rank", lambda *_: 0),
        (megatron_random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
    )
    before = [getattr(owner, name) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


@contextlib.contextmanager
def own_parameter_groups() -> Iterator[None]:
    """Inside, Megatron builds optimizers without communication. For use before threads that communicate are started.

    It would gather the kinds of parameter groups over the whole world, so that all ranks have the same ones, empty or
    not. But ranks have different modules, and ranks of a frozen stage build no optimizer: the others would wait for
    them forever.
    """

    def gather(gathered: list[Any], mine: Any, *_: Any, **__: Any) -> None:
        gathered[:] = [mine] * len(gathered)

    real = dist.all_gather_object
    dist.all_gather_object = gather
    try:
        yield
    finally:
        dist.all_gather_object = real


def fsdp_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of `module`, without those of submodules that are sharded separately."""
    state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # pyright: ignore[reportCallIssue]
    # PyTorch 2.12 and earlier have one group in each module.
    found = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def has_reduced(module: nn.Module) -> bool:
    """Whether FSDP2 has reduced all gradients of `module`."""
    groups = fsdp_groups(module)
    own = [each for group in groups for each in group.fsdp_params]
    left = [each.unsharded_accumulated_grad for each in own] + [group._partial_reduce_output for group in groups]
    left += [each._unsharded_param.grad for each in own if hasattr(each, "_unsharded_param")]
    return all(each is None for each in left)


def forget_order(modules: Sequence[nn.Module]) -> None:
    """Clear FSDP2's record of the order in which modules ran, which it expects a backward pass to do."""
    for group in (group for module in modules for group in fsdp_groups(module)):
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def reduce_unused(module: Any) -> None:
    """Have the backward pass reduce zeros for trained parameters of `module` that get no gradient."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in fsdp_groups(module):  # PyTorch 2.12 and earlier leave them out.
        group.post_backward = partial(_with_zeros, group, group.post_backward)


def _with_zeros(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    for each in group.fsdp_params:
        own = getattr(each, "_unsharded_param", None)
        if own is not None and own.requires_grad and own.grad is None and each.unsharded_accumulated_grad is None:
            own.grad = torch.zeros_like(own)
    post_backward(*args)


def fsdp_parameters(module: nn.Module) -> list[nn.Parameter]:
    """FSDP2's parameters of `module`, in the order in which their gradients are communicated."""
    return [each.sharded_param for group in fsdp_groups(module) for each in group.fsdp_params]
