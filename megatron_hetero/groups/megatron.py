"""All imports of Megatron-Core (except in `Layout.from_mpu`), its globals, and the collection of process groups that
its layers take. `tests/versions.md` lists the imported names by release.

Megatron-Core takes its process groups explicitly nearly everywhere. Two places still read globals: the buffer that
sequence-parallel linears gather into, and the tracker of random states that a `TransformerBlock` forks. Neither
contains a process group, so modules of different layouts can share them. The construction of an optimizer uses the
default process group, and the loss of a `LanguageModule` before 0.19 the tensor-parallel group of `parallel_state`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.base.environment import prepare_environment
from megatron_hetero.groups.platform import Platform, answer_for_cuda
from megatron_hetero.layout.axes import AXES, EXPERTS, MAIN, View, axes_of
from megatron_hetero.layout.communicators import GRADIENT_AXES, REPLICA_AXES


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` to other values inside the context."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _compile_later(function: Any = None, *, compile_now: Any = torch.compile, **options: Any) -> Any:
    """Wrap a function like `torch.compile`, but compile it at its first call."""
    compiled = cache(lambda: compile_now(function, **options))
    return wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs)) if function else compiled()


# Decorators of Megatron-Core would load the compiler at import, which takes 2.3 of the 6 seconds of a rank's start.
with _replaced(torch, compile=_compile_later):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.packed_seq_params import PackedSeqParams as PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.enums import AttnMaskType as AttnMaskType
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig as TransformerConfig

MODEL_PARALLEL_STREAM = "model-parallel-rng"


def prepare(platform: Platform) -> None:
    """Make code of Megatron-Core that assumes CUDA work on this platform. Idempotent."""
    prepare_environment()  # This does nothing after `process_group`.
    # Suppress the advice to use one hardware queue: high-priority collectives need several queues to start in time.
    cast("Any", tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce).warned = True
    if platform.is_cuda:
        return
    answer_for_cuda()
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not isinstance(megatron_random._CUDA_RNG_STATE_TRACKER, _CpuRNGStatesTracker):
        megatron_random._CUDA_RNG_STATE_TRACKER = _CpuRNGStatesTracker()
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


class _CpuRNGStatesTracker(megatron_random.CudaRNGStatesTracker):
    """Megatron's tracker of random states, for the CPU's generator."""

    def add(self, name: str, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()


def prepare_globals(seed: int) -> None:
    """Initialise Megatron's memory buffer and random states in this process, after `prepare`. Idempotent."""
    _prepare_buffer()
    megatron_random.initialize_rng_tracker()
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(MODEL_PARALLEL_STREAM, seed)


def prepare_layers(seed: int, tp: int, pp: int) -> None:
    """Initialise Megatron's globals for its models, after `prepare`, and patch layers that ignore their collection of
    groups.

    Random streams are seeded as by `model_parallel_cuda_manual_seed` for a process at these coordinates, except streams
    that a program with `parallel_state` has seeded.
    """
    _prepare_buffer()
    if hasattr(tensor_parallel.cross_entropy, "get_tensor_model_parallel_rank"):  # True before Megatron-Core 0.19.
        _patch(LanguageModule, "compute_language_model_loss", _loss_in_group)
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


def _loss_in_group(compute: Any, model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute the loss over the model's tensor-parallel group; the unfused loss would use `parallel_state`'s group."""
    group = model.pg_collection.tp
    with _replaced(
        tensor_parallel.cross_entropy,
        get_tensor_model_parallel_group=lambda *_, **__: group,
        get_tensor_model_parallel_rank=group.rank,
        get_tensor_model_parallel_world_size=group.size,
    ):
        return compute(model, *args, **kwargs)


def _norm_on_shards(make: Any, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Create a PyTorch norm on activations that are sharded over `tp`, which Megatron refuses. Its parameters are
    marked as in other norms, so that their gradients are summed over `tp`.
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
    """Return the states of all random generators that models use, uint8 [bytes] on the host, by name."""
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    return platform.random_states() | {f"megatron-{name}": state for name, state in tracker.get_states().items()}


def set_random_states(states: Mapping[str, Tensor], platform: Platform) -> None:
    """Restore the states that `random_states` returned."""
    prefix, tracker = "megatron-", cast("Any", megatron_random.get_cuda_rng_tracker())
    tracker.set_states({name.removeprefix(prefix): s for name, s in states.items() if name.startswith(prefix)})
    platform.set_random_states(states)


@contextlib.contextmanager
def without_processes(device: torch.device) -> Iterator[None]:
    """Let Megatron's layers be built and run on `device` without a default process group or random streams."""
    with (
        _replaced(torch.cuda, current_device=lambda: device),
        _replaced(dist, is_initialized=lambda: True, get_rank=lambda *_: 0),
        _replaced(megatron_random.CudaRNGStatesTracker, fork=lambda *_: contextlib.nullcontext()),
    ):
        yield


def _local_parameter_groups() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Megatron builds optimizers without communication. Use it before other threads start.

    Megatron gathers the kinds of parameter groups over the world, so that all ranks have the same ones, empty or not.
    But here ranks have different modules, and ranks of a frozen stage build no optimizer: other ranks would wait
    forever.
    """

    def gather(gathered: list[Any], local: Any, *_: Any, **__: Any) -> None:
        gathered[:] = [local] * len(gathered)

    return _replaced(dist, all_gather_object=gather)


# ------------------------------------------------------------------------------- the process groups of a module


@dataclass(init=False, repr=False)
class ModuleGroups(ProcessGroupCollection):
    """Megatron's collection of process groups, with groups for the two axes of its context-parallel group `cp`.

    `sp` is the axis `sp`, `context` the axis `cp`: among ranks `sp` varies faster, so that member i of `cp` is member
    i mod sp of its `sp` group and member i // sp of its `context` group.

    `along` returns the group along axes of any view of the module's layout. `holders` maps the name of a view to the
    group over which the view splits parameters.
    """

    sp: dist.ProcessGroup = field(init=False)
    context: dist.ProcessGroup = field(init=False)
    along: Callable[..., dist.ProcessGroup] = field(init=False)
    holders: Mapping[str, dist.ProcessGroup] = field(init=False)


def module_groups(
    group: Callable[..., dist.ProcessGroup], ends: dist.ProcessGroup | None, views: Iterable[View] = ()
) -> ModuleGroups:
    """Return the collection of a module. `group`: function from axes to the group along these axes. `ends`: the group
    of its first and last stage. `views`: further views of its layout.
    """
    # The distributed optimizer has one instance: its `intra` groups contain all ranks, and there is no `inter` group.
    samples = group(*GRADIENT_AXES)
    # Without a view for experts, experts are split like dense layers.
    experts = next((view for view in views if view == EXPERTS), MAIN)
    groups: Any = ModuleGroups(
        along=group,
        holders={view.name: group(*view.shard_axes) for view in (MAIN, *views)},
        tp=group("tp"),
        sp=group("sp"),
        context=group("cp"),
        cp=group(*axes_of("tokens")),
        dp=group("dp"),
        pp=group("pp"),
        dp_cp=samples,
        mp=group("tp", "pp"),
        tp_cp=group(*REPLICA_AXES),
        tp_dp_cp=group(*axes_of("weights", "tokens", "samples")),
        hcp=None,
        ep=group(*experts.axes_of("experts")),
        expt_tp=group(*experts.axes_of("weights")),
        expt_dp=group(*experts.sum_axes),
        tp_ep=group(*experts.shard_axes),
        tp_ep_pp=group(*experts.shard_axes, "pp"),
        intra_dp_cp=samples,
        intra_expt_dp=group(*experts.sum_axes),
        intra_dist_opt=group(*AXES),
        inter_dist_opt=None,
        embd=ends,
        pos_embd=None,  # It is used only if several stages embed positions, unlike in Megatron's decoders.
    )
    # These are groups of FSDP's gathers (0.18+), and of weights with a separate axis, here of one rank (0.19+).
    groups.dp_cp_ag = groups.expt_dp_ag = groups.gtp_remat = groups.expt_gtp_remat = None
    groups.dp_cp_gtp_remat, groups.expt_dp_gtp_remat = groups.dp_cp, groups.expt_dp
    groups.tp_ep_pp_with_egtp_remat = groups.tp_ep_pp
    return groups


def megatron_loop(pp: int, virtual_stages: int | None, group: dist.ProcessGroup, config: Any) -> tuple[Any, Any]:
    """Return Megatron's `forward_backward_func`, and its communicator between the stages of `group` or None."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    return get_forward_backward_func(pp, virtual_stages), P2PCommunicator(group, config) if pp > 1 else None


def megatron_optimizer(config: Any, ddps: list[Any], groups: ModuleGroups) -> Any:
    """Create Megatron's optimizer of a module whose chunks are wrapped in Megatron's `DistributedDataParallel`."""
    from megatron.core.optimizer import get_megatron_optimizer

    with _local_parameter_groups():
        return get_megatron_optimizer(config, ddps, use_gloo_process_groups=False, pg_collection=groups)


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """Return the gradients of a Megatron optimizer, for a norm that counts each element on one rank along `tp`."""
    from megatron.core.optimizer import optimizer as kinds

    if hasattr(optimizer, "get_main_grads_for_grad_norm"):
        return optimizer.get_main_grads_for_grad_norm()
    # From 0.19 on, some parameters may have a separate norm; here all parameters have the same norm.
    separate: Any = kinds.SEPARATE_GRAD_NORM_GROUPS  # pyright: ignore[reportAttributeAccessIssue]
    return [gradient for kind in (None, *separate) for gradient in optimizer.get_grads_for_grad_norm(kind)]


def te_layers() -> Any:
    """Return Megatron's provider of Transformer Engine's layers."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
