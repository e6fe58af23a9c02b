"""The optimizer of a module: Megatron's, with the learning rates of our parameter groups.

AdamW is Megatron's distributed optimizer around PyTorch's: each rank of the module's data- and context-parallel group
keeps the fp32 master weights and moments of an equal share (ZeRO stage 1, Rajbhandari et al. 2020, arXiv 1910.02054).
Biases and all other one-dimensional parameters (norms) are exempt from weight decay. SGD is plain: w -= lr * g,
replicated.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate

from megatron_hetero.config.optimizers import OPTIMIZERS
from megatron_hetero.config.schema import OptimizerConfig
from megatron_hetero.distributed.megatron import own_parameter_groups, pytorch_optimizers
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.engine.learning_rate import learning_rate
from megatron_hetero.engine.module import TrainedModule
from megatron_hetero.models.weights import group_of
from megatron_hetero.names import TEXT, parts_of


def build_optimizer(
    module: TrainedModule, config: OptimizerConfig, dtype: torch.dtype, platform: Platform
) -> ChainedOptimizer | None:
    """Megatron's optimizer for `module`, or None where everything in it is frozen."""
    if module.ddp is None:
        return None
    kind = OPTIMIZERS[config.name]
    megatron = MegatronOptimizerConfig(
        optimizer=kind.megatron,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=0.0 if "weight_decay" in kind.unused else config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        sgd_momentum=0.0,
        clip_grad=0.0,  # ours clips over all modules
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=kind.sharded,
    )
    with platform.megatron_scope(), own_parameter_groups(), pytorch_optimizers():
        optimizer = get_megatron_optimizer(
            megatron,
            [module.ddp],  # pyright: ignore[reportArgumentType]
            _overrides(module, config),
            use_gloo_process_groups=False,
            pg_collection=module.groups,
        )
    assert isinstance(optimizer, ChainedOptimizer), "Megatron chains the optimizers of dense and expert parameters"
    _fuse(optimizer)
    return optimizer


def _fuse(optimizer: ChainedOptimizer) -> None:
    """Let AdamW run as one kernel."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def _overrides(module: TrainedModule, config: OptimizerConfig) -> dict[ParamKey, Any]:
    one_dimensional = ParamPredicate("one-dimensional", lambda p: p.dim() == 1)
    # `wd_mult` alone does nothing: only Megatron's own scheduler, which is not used here, applies it.
    exempt = {"wd_mult": 0.0, "weight_decay": 0.0}
    overrides: dict[ParamKey, Any] = {ParamKey(name="*.bias", predicate=one_dimensional): exempt}
    encoder, *projector = parts_of(module.name)
    rates = dict.fromkeys(projector, config.lr_projector)
    rates |= {} if module.name == TEXT else {encoder: config.lr_vision}
    for group, peak in rates.items():
        if peak is not None:
            members = {id(p) for name, p in module.parameters.items() if group_of(module.name, name) == group}
            predicate = ParamPredicate(group, lambda p, members=members: id(p) in members)
            overrides[ParamKey(predicate=predicate)] = {"max_lr": peak, "min_lr": config.min_lr * peak / config.lr}
    return overrides


def set_learning_rates(optimizer: ChainedOptimizer, step: int, config: OptimizerConfig, total: int) -> None:
    """Give each parameter group its rate of `step` (from 1) of `total`."""
    for group in optimizer.param_groups:
        group["lr"] = rate_of(group["max_lr"], group["min_lr"], step, config, total)


def update(optimizer: ChainedOptimizer) -> None:
    """Step with the gradients as they are.

    Not Megatron's `step`: that computes the norm, which we do ourselves, over the ranks of all pipeline stages, and
    would hang waiting for those that train nothing and have no optimizer.
    """
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()


def rate_of(peak: float, minimum: float, step: int, config: OptimizerConfig, total: int) -> float:
    """The rate of `step` of `total` under the schedule of `config`, from `peak` to `minimum`."""
    return learning_rate(
        step, peak=peak, minimum=minimum, schedule=config.schedule, warmup=config.warmup_iters, total=total
    )
