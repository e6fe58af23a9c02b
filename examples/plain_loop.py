"""Two modules of your own, each in a layout of its own, in an ordinary training loop.

A vision module turns pictures into rows; a text module, on other ranks or on the same ones, reads the rows of its own
samples. Each layout is a number of replicas, on all ranks or on some:

    torchrun --nproc-per-node 4 examples/plain_loop.py dp:4 dp:2@0-1
    torchrun --nproc-per-node 4 examples/plain_loop.py dp:3@0-2 dp:1@3

At the end the weights are compared with those of the same loop in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_hetero as mh

VISION, TEXT = "vision", "text"
WIDTH, ROWS, SIDE, LABELS = 32, 4, 8, 4
SAMPLES, MICRO_BATCHES, STEPS, LEARNING_RATE = 12, 2, 30, 3e-3
TOLERANCE = 1e-4
GRAPH = mh.Graph({VISION: [TEXT]}, width=WIDTH, dtype=torch.float32)


def build_modules() -> dict[str, nn.Module]:
    """The same weights on all ranks. Pictures, [n, 64], to rows, [n, 4 * 32]; rows of a sample, [n, 128], to logits."""
    torch.manual_seed(0)
    vision = nn.Sequential(nn.Linear(SIDE * SIDE, WIDTH), nn.GELU(), nn.Linear(WIDTH, ROWS * WIDTH))
    return {VISION: vision, TEXT: nn.Sequential(nn.LayerNorm(ROWS * WIDTH), nn.Linear(ROWS * WIDTH, LABELS))}


def micro_batches(step: int) -> list[range]:
    """The samples of each micro-batch of a step."""
    starts = range(step * MICRO_BATCHES * SAMPLES, (step + 1) * MICRO_BATCHES * SAMPLES, SAMPLES)
    return [range(start, start + SAMPLES) for start in starts]


def labels_of(samples: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n]."""
    return torch.tensor([number * 7 % LABELS for number in samples], dtype=torch.int64, device=device)


def pictures_of(samples: Sequence[int], device: torch.device) -> Tensor:
    """Noise, [n, 64], brighter for larger labels."""
    noise = [torch.randn(SIDE**2, generator=torch.Generator().manual_seed(number)) for number in samples]
    return torch.stack([torch.zeros(SIDE**2), *noise])[1:].to(device) + 2.0 * labels_of(samples, device)[:, None]


def train(topology: mh.Topology) -> dict[str, nn.Module]:
    """This rank's modules after training."""
    device = topology.platform.device
    modules = {name: module.to(device) for name, module in build_modules().items() if topology.has(name)}
    optimizers = [torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE) for module in modules.values()]
    boundary = mh.Boundary.open(topology, VISION, TEXT)

    for step in range(STEPS):
        for batch in micro_batches(step):
            pictures = pictures_of(topology.shard(VISION, batch), device)
            labels = labels_of(topology.shard(TEXT, batch), device)
            with mh.micro_batch(boundary):
                plan = boundary.plan(samples=len(batch), rows_per_sample=ROWS)
                rows = boundary(plan, modules[VISION](pictures).view(-1, WIDTH) if VISION in modules else None)
                if TEXT in modules:
                    loss_of(modules[TEXT], rows, labels).backward()
        for name, module in modules.items():
            for grad in (p.grad for p in module.parameters() if p.grad is not None):
                dist.all_reduce(grad, group=topology.group(name, "sp", "cp", "dp"))
                grad /= MICRO_BATCHES * SAMPLES
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return modules


def train_alone(device: torch.device) -> dict[str, nn.Module]:
    """The same in one process, without this library."""
    modules = {name: module.to(device) for name, module in build_modules().items()}
    optimizer = torch.optim.AdamW([p for module in modules.values() for p in module.parameters()], lr=LEARNING_RATE)
    for step in range(STEPS):
        for batch in micro_batches(step):
            rows = modules[VISION](pictures_of(batch, device)).view(-1, WIDTH)
            (loss_of(modules[TEXT], rows, labels_of(batch, device)) / (MICRO_BATCHES * SAMPLES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return modules


def loss_of(text: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
    """The sum over samples, not the mean, since ranks may have different numbers of samples."""
    return F.cross_entropy(text(rows.reshape(-1, ROWS * WIDTH)), labels, reduction="sum")


def differences(trained: Mapping[str, nn.Module], expected: Mapping[str, nn.Module]) -> list[float]:
    """The largest difference of each weight of this rank from the one in `expected`."""
    return [
        float((weight - other).detach().abs().max())
        for name, module in trained.items()
        for weight, other in zip(module.parameters(), expected[name].parameters(), strict=True)
    ]


def main(argv: Sequence[str]) -> None:
    """Train, compare, and report on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vision", nargs="?", help="layout: dp")
    parser.add_argument("text", nargs="?", help="layout: dp")
    options = parser.parse_args(argv)
    with mh.process_group():
        everywhere = f"dp:{dist.get_world_size()}"
        topology = mh.build(GRAPH, {VISION: options.vision or everywhere, TEXT: options.text or everywhere})
        for name, layout in topology.layouts.items():
            if layout.dp != layout.size:
                raise mh.UserError(
                    f"{name} layout `{layout}`: found other axes than dp, which this example has; use dp"
                )
        trained, expected = train(topology), train_alone(topology.platform.device)
        largest = torch.tensor(max(differences(trained, expected)), device=topology.platform.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if topology.rank == 0:
            print(f"{STEPS} steps: weights within {largest.item():.1e} of those of one process")
        if not largest.item() < TOLERANCE:
            raise RuntimeError(f"found weights {largest.item():.1e} apart, expected less than {TOLERANCE:.0e}")


if __name__ == "__main__":
    mh.guarded(main, sys.argv[1:])
