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

from megatron_hetero import Boundary, Layout, UserError, guarded, micro_batch, process_group
from megatron_hetero.groups.topology import Topology

VISION, TEXT = "vision", "text"
WIDTH, ROWS, SIDE, LABELS = 32, 4, 8, 4
SAMPLES, MICRO_BATCHES, STEPS, RATE = 12, 2, 30, 3e-3
TOLERANCE = 1e-4


def build() -> dict[str, nn.Module]:
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
    """Noise, [n, 64], which is the brighter the larger the label."""
    noise = [torch.randn(SIDE**2, generator=torch.Generator().manual_seed(number)) for number in samples]
    return torch.stack([torch.zeros(SIDE**2), *noise])[1:].to(device) + 2.0 * labels_of(samples, device)[:, None]


def train(topology: Topology) -> dict[str, nn.Module]:
    """This rank's modules after training."""
    device = topology.platform.device
    modules = {name: module.to(device) for name, module in build().items() if topology.has(name)}
    optimizers = [torch.optim.AdamW(module.parameters(), lr=RATE) for module in modules.values()]
    boundary = Boundary.open(topology, VISION, TEXT, width=WIDTH, dtype=torch.float32)

    for step in range(STEPS):
        for batch in micro_batches(step):
            seen, read = topology.shard(VISION, batch), topology.shard(TEXT, batch)
            pictures, labels = pictures_of(seen, device), labels_of(read, device)
            with micro_batch(boundary):
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
    modules = {name: module.to(device) for name, module in build().items()}
    optimizer = torch.optim.AdamW([p for module in modules.values() for p in module.parameters()], lr=RATE)
    for step in range(STEPS):
        for batch in micro_batches(step):
            rows = modules[VISION](pictures_of(batch, device)).view(-1, WIDTH)
            (loss_of(modules[TEXT], rows, labels_of(batch, device)) / (MICRO_BATCHES * SAMPLES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return modules


def loss_of(text: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
    """The sum over samples: how many a rank has is not the same everywhere."""
    return F.cross_entropy(text(rows.reshape(-1, ROWS * WIDTH)), labels, reduction="sum")


def differences(found: Mapping[str, nn.Module], expected: Mapping[str, nn.Module]) -> list[float]:
    """Between weights of the modules of this rank and those of one process."""
    return [
        float((a - b).detach().abs().max())
        for name, module in found.items()
        for a, b in zip(module.parameters(), expected[name].parameters(), strict=True)
    ]


def main(argv: Sequence[str]) -> None:
    """Train, compare, and report on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vision", nargs="?", help="layout: dp")
    parser.add_argument("text", nargs="?", help="layout: dp")
    given = parser.parse_args(argv)
    with process_group() as platform:
        world = dist.get_world_size()
        texts = [text or f"dp:{world}" for text in (given.vision, given.text)]
        layouts = {
            name: Layout.parse(text, world, module=name) for name, text in zip((VISION, TEXT), texts, strict=True)
        }
        for name, layout in layouts.items():
            if layout.dp != layout.size:
                raise UserError.at(f"{name} layout", found=f"`{layout}`", expected="replicas only", fix="use dp")
        topology = Topology.build(layouts, platform, edges=[(VISION, TEXT)], planned=[(VISION, TEXT)])
        found, expected = train(topology), train_alone(platform.device)
        apart = torch.tensor(max(differences(found, expected)), device=platform.device)
        dist.all_reduce(apart, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"{STEPS} steps: weights within {apart.item():.1e} of those of one process")
        if not apart.item() < TOLERANCE:
            raise RuntimeError(f"check: found weights {apart.item():.1e} apart, expected less than {TOLERANCE:.0e}")


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
