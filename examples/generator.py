"""A text module feeds a generator: each in a layout of its own, in one schedule.

The text module, which may have two pipeline stages, predicts tokens, for a loss of its own, and computes a row for each
sample, from which the generator draws a picture. Both may have replicas, on the same ranks or on others:

    torchrun --nproc-per-node 4 examples/generator.py dp:4 dp:4
    torchrun --nproc-per-node 4 examples/generator.py pp:2,dp:2 dp:4
    torchrun --nproc-per-node 4 examples/generator.py pp:2@0-1 dp:2@2-3

At the end the weights are compared with those of the same loop in one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_hetero as mh

TEXT, GENERATOR = "text", "generator"
TOKENS, WORDS, WIDTH, SIDE = 5, 16, 32, 6
SAMPLES, MICRO_BATCHES, STEPS, CLIP = 12, 4, 10, 1.0
TOLERANCE = 1e-4
GRAPH = mh.Graph({TEXT: [GENERATOR]}, width=WIDTH, dtype=torch.float32)
AdamW = partial(torch.optim.AdamW, lr=3e-3)


class Text(nn.Module):
    """Predicts each token from the previous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.top, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def first(self, tokens: Tensor) -> Tensor:
        """Tokens, int64 [samples, tokens], to hidden states, [samples, tokens, width]."""
        return torch.tanh(self.mix(self.words(tokens).cumsum(1)))

    def last(self, tokens: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """The sum of losses, and a row of each sample, [samples, width]."""
        after = torch.tanh(self.top(hidden))
        logits = self.head(after[:, :-1]).flatten(0, 1)
        return {"loss": F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), "rows": after[:, -1]}

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return self.last(tokens, self.first(tokens))


class Generator(nn.Module):
    """Rows, [samples, width], to pictures; its loss is their distance from given ones, [samples, pixels]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, SIDE * SIDE))

    def forward(self, pictures: Tensor, rows: Tensor) -> Tensor:
        return (self.layers(rows) - pictures).square().sum()


def models() -> dict[str, nn.Module]:
    """The same weights on all ranks."""
    torch.manual_seed(0)
    return {TEXT: Text(), GENERATOR: Generator()}


def batch(samples: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """The input of each module: tokens that count from a number, and pictures with a bar of that height."""
    starts = torch.tensor(samples, dtype=torch.int64, device=device)
    tokens = (starts[:, None] + torch.arange(TOKENS, device=device)) % WORDS
    heights = torch.arange(SIDE * SIDE, device=device) < (2 * (starts % WORDS))[:, None]
    return {TEXT: tokens, GENERATOR: heights.float()}


def micro_batches(step: int) -> list[list[int]]:
    """The samples of each micro-batch."""
    first = step * MICRO_BATCHES * SAMPLES
    return [list(range(first + m * SAMPLES, first + (m + 1) * SAMPLES)) for m in range(MICRO_BATCHES)]


def inputs_of(topology: mh.Topology, samples: Sequence[int]) -> mh.MicroBatchInputs:
    """This rank's inputs of a micro-batch. Each sample has a row."""
    shards = {name: topology.shard(name, samples) for name in topology.layouts if topology.has(name)}
    inputs = {name: batch(numbers, topology.platform.device)[name] for name, numbers in shards.items()}
    return mh.MicroBatchInputs(inputs, {(TEXT, GENERATOR): mh.Rows(samples=len(samples), rows_per_sample=1)})


def stage_of(topology: mh.Topology) -> int:
    """The rank's stage of the text module."""
    return topology.layouts[TEXT].coordinate(topology.rank).pp


def train(topology: mh.Topology) -> dict[str, nn.Module]:
    """This rank's modules, or stages of them, after training."""
    local = {name: model.to(topology.platform.device) for name, model in models().items() if topology.has(name)}
    stages: dict[str, Any] = dict(local)
    if topology.has(TEXT) and topology.layouts[TEXT].pp > 1:
        text: Any = local[TEXT]
        is_first = stage_of(topology) == 0
        local[TEXT] = nn.ModuleList([text.words, text.mix] if is_first else [text.top, text.head])
        stages[TEXT] = text.first if is_first else mh.Stage(text.last, lambda tokens: (*tokens.shape, WIDTH))
    run = mh.Runner(topology, stages)
    optimizer = mh.build_optimizers(topology, local, AdamW, clip_grad=CLIP)
    for step in range(STEPS):
        loss = run([inputs_of(topology, samples) for samples in micro_batches(step)]).loss
        optimizer.step(tokens=MICRO_BATCHES * SAMPLES)
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if topology.rank == 0:
            print(f"step {step + 1}/{STEPS}: loss {loss.item() / (MICRO_BATCHES * SAMPLES):.4f}")
    return local


def train_alone(device: torch.device) -> dict[str, Any]:
    """The same in one process, without this library."""
    modules: dict[str, Any] = {name: model.to(device) for name, model in models().items()}
    parameters = [weight for model in modules.values() for weight in model.parameters()]
    optimizer = AdamW(parameters)
    for step in range(STEPS):
        for samples in micro_batches(step):
            inputs = batch(samples, device)
            text = modules[TEXT](inputs[TEXT])
            loss = text["loss"] + modules[GENERATOR](inputs[GENERATOR], text["rows"])
            (loss / (MICRO_BATCHES * SAMPLES)).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    text = modules[TEXT]
    stages = [nn.ModuleList([text.words, text.mix]), nn.ModuleList([text.top, text.head])]
    return modules | {f"{TEXT} in stages": stages}


def difference(topology: mh.Topology, trained: Mapping[str, nn.Module], alone: Mapping[str, Any]) -> float:
    """The largest difference of a weight on any rank."""
    largest = torch.zeros((), device=topology.platform.device)
    for name, module in trained.items():
        staged = name == TEXT and topology.layouts[TEXT].pp > 1
        other = alone[f"{TEXT} in stages"][stage_of(topology)] if staged else alone[name]
        for weight, expected in zip(module.parameters(), other.parameters(), strict=True):
            largest = torch.maximum(largest, (weight - expected).abs().max().detach())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def main(argv: Sequence[str]) -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="layout, such as dp:4 or pp:2,dp:2")
    parser.add_argument("generator", help="layout, such as dp:4")
    options = parser.parse_args(argv)
    with mh.process_group():
        topology = mh.build(GRAPH, text=options.text, generator=options.generator)
        if topology.layouts[TEXT].pp > 2:
            raise mh.UserError(
                f"text layout `{options.text}`: found {topology.layouts[TEXT].pp} stages, expected 1 or 2"
            )
        largest = difference(topology, train(topology), train_alone(topology.platform.device))
        if topology.rank == 0:
            print(f"weights: {largest:.1e} from those of one process")
        if not largest < TOLERANCE:
            raise RuntimeError(f"found a difference of {largest:.1e}, expected less than {TOLERANCE:.0e}")


if __name__ == "__main__":
    mh.guarded(main, sys.argv[1:])
