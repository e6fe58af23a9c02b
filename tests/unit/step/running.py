"""Steps of a `GPTModel` in a layout, for comparison with one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.layout import Layout
from megatron_hetero.step.gradients import count_tokens
from megatron_hetero.step.megatron_training import megatron_schedule, prepare_megatron
from megatron_hetero.step.wrapped import local
from tests.support.pool import platform
from tests.unit.step import gpt

WORLD = 4


def topology_of(**layouts: str) -> Topology:
    return topology_of_world(WORLD, **layouts)


def topology_of_world(world: int, **layouts: str) -> Topology:
    parsed = {name: Layout.parse(text, world) for name, text in layouts.items()}
    edges = [(name, "text") for name in layouts if name != "text"]
    topology = Topology.build(parsed, platform(), edges=edges, planned=edges)
    prepare_megatron(topology, seed=1)
    return topology


def wrapped(model: Any, wrapper: str, topology: Topology, module: str = "text") -> nn.Module:
    """`plain`, `ddp` (PyTorch's), `fsdp`, or Megatron's: `megatron`, `megatron-mean`, `zero1`."""
    if wrapper == "ddp":
        group = topology.group(module, "sp", "cp", "dp")
        return nn.parallel.DistributedDataParallel(model, process_group=group)
    if wrapper == "fsdp":
        kept = {name: vars(p).copy() for name, p in model.named_parameters()}
        fully_shard(model, mesh=topology.mesh(module)["dp"])
        for name, p in model.named_parameters():
            vars(p).update({key: value for key, value in kept[name].items() if key not in vars(p)})
        return model
    if wrapper in ("megatron", "megatron-mean", "zero1"):
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=wrapper == "zero1", overlap_grad_reduce=False
        )
        with topology.platform.megatron_scope():
            ddp: Any = DistributedDataParallel(
                model.config,
                config,
                model,
                pg_collection=topology.collection(module),
            )
        ddp.zero_grad_buffer()
        return ddp
    return model


def mine(topology: Topology, batch: Sequence[gpt.Sample], module: str = "text") -> list[gpt.Sample]:
    """Of this rank's replica."""
    layout = topology.layouts[module]
    return list(batch[layout.replica_of(topology.rank) :: layout.dp])


def backward(
    topology: Topology, model: Any, batch: Sequence[gpt.Sample], rows: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, int]:
    """Forward and backward passes of this rank's samples, one in a micro-batch, in Megatron's loop. Returns the sum of
    the losses, 0 but on the last stage, and the number of tokens. `rows`: of each micro-batch.
    """
    own = mine(topology, batch)

    def forward_step(samples: Any, part: Any) -> tuple[Tensor, Any]:
        sample, arrived = next(samples)
        output = gpt.losses_of(part, sample, arrived)

        def loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            total = (losses * sample.counts).sum()
            return total, sample.counts.sum().int(), total.detach().clone()

        return output, loss

    first = model[0] if isinstance(model, list) else model
    config = (first.module if hasattr(first, "module") else first).config
    if not config.calculate_per_token_loss:
        loss = torch.stack([gpt.loss_of(model, sample) for sample in own]).sum()
        loss.backward()
        return loss.detach(), sum(sample.supervised for sample in own)
    forward_backward = megatron_schedule(topology, "text", config)
    chunks = len(model) if isinstance(model, list) else 1
    iterators = [zip(own, rows or [None] * len(own), strict=True) for _ in range(chunks)]
    losses = forward_backward(
        forward_step_func=forward_step,
        data_iterator=iterators if isinstance(model, list) else iterators[0],
        model=model,
        num_microbatches=len(own),
        seq_length=gpt.LENGTH,
        micro_batch_size=1,
    )
    return torch.stack(losses).sum() if losses else torch.zeros(()), sum(sample.supervised for sample in own)


def total_loss(topology: Topology, loss: Tensor, tokens: Tensor) -> float:
    """The mean over the tokens of the step, on all ranks."""
    place = topology.layouts["text"].coordinate(topology.rank) if topology.has("text") else None
    counted = loss.double() if place is not None and place.tp == 0 else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(counted)
    return counted.item() / tokens.item()


def require_gradients(topology: Topology, model: Any, reference: Any, expected: Any, tied: bool = False) -> None:
    """Compare this rank's gradients with those of one process, [as `gpt.gradients`]."""
    inner = model.module if hasattr(model, "module") and not isinstance(model, gpt.GPTModel) else model
    names = {id(p): name for name, p in reference.named_parameters()}
    for name, (own, theirs) in gpt.counterparts(inner, reference, tied).items():
        if not own.requires_grad:
            assert own.grad is None
            continue
        found = own.main_grad if inner is not model and hasattr(own, "main_grad") else own.grad
        found = found.full_tensor() if hasattr(found, "full_tensor") else local(found)
        right = gpt.shard(expected[names[id(theirs)]], own, inner.pg_collection)
        assert gpt.apart(found, right) < 1e-5, (topology.rank, name, gpt.apart(found, right))


def tokens_of(topology: Topology, mine: int) -> Tensor:
    return count_tokens(topology, "text", mine)
