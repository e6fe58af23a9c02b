"""Which ranks share what of a module that a library user has built, by the ZeRO stage of its optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hetero.execution.gathering import shares_weights
from megatron_hetero.step.data_parallel import DataParallel, Replicated
from megatron_hetero.step.fully_sharded import FullySharded, shard_stage
from megatron_hetero.step.megatron_optimizer import refuse
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.optimizer import Algorithm
from megatron_hetero.step.wrapped import Wrapped, is_sharded


def shared_by_zero(module: TrainedModule, algorithm: Algorithm) -> TrainedModule:
    """The module with gradients in buffers, and what its ranks share. Raises `UserError` for one that is wrapped."""
    _require_plain(module)
    group, platform = module.replicas, module.topology.platform
    gradients = getattr(torch, algorithm.gradients)
    if not shares_weights(algorithm.zero, group.size(), bool(module.trained)):
        sharing: DataParallel = Replicated.of(
            *(module.name, module.parameters, module.chunks, group),
            in_one_bucket=False,
            prefers_all_reduce=platform.prefers_all_reduce,
            sharded=algorithm.kind.sharded,
            gradients=gradients,
            adds_up=False,
        )
        return module.shared_by(sharing)
    if len(dtypes := {str(p.dtype) for p in module.trained.values()}) > 1:
        found = f"{' and '.join(sorted(dtypes))} parameters with zero={algorithm.zero}"
        refuse(module, found, "one dtype, which FSDP2 asks for, or zero=1")
    trained, names = frozenset(module.trained), {id(p): name for name, p in module.parameters.items()}
    places = [{path: names[id(p)] for path, p in chunk.named_parameters()} for chunk in module.chunks]
    stages = [
        stage
        for chunk, place in zip(module.chunks, places, strict=True)
        for stage in shard_stage(
            *(chunk, place.__getitem__, group, platform.device, _filled, trained),
            gradients=gradients,
            zero=algorithm.zero,
            adds_up=False,
        )
    ]
    for stage in stages:
        stage.before_run(algorithm.zero == 2)  # Also where no interpreter says it.
    named = {
        place[path]: p
        for chunk, place in zip(module.chunks, places, strict=True)
        for path, p in chunk.named_parameters()
    }
    return module.shared_by(FullySharded(named, group, tuple(stages)))


def _filled(name: str, _: Tensor) -> None:
    raise AssertionError(f"{name} has values")


def _require_plain(module: TrainedModule) -> None:
    """Check that no wrapper shares the module already, and that weights are in a dtype that there are masters for."""
    sharing = module.data_parallel
    assert isinstance(sharing, Wrapped), "a module of a library user"
    for name, parameter in module.trained.items():
        expected = "the module itself: this optimizer shares its states, and with `zero` its weights"
        if name in sharing.in_main_grad:
            refuse(module, "Megatron's DistributedDataParallel", expected)
        if is_sharded(parameter):
            refuse(module, f"a DTensor ({name})", expected)
        if sharing.done[name].factor != 1.0:
            refuse(module, "PyTorch's DistributedDataParallel", expected)
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            refuse(module, f"{parameter.dtype} parameters ({name})", "float32 or bfloat16")
