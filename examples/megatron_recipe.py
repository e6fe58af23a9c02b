"""A SigLIP tower of `transformers` feeds a `GPTModel` of Megatron-Core, which may have pipeline stages, by a schedule.

The tower has replicas, which may shard its weights (ZeRO); the text model any `tp`, `pp` and `dp`. Weights are in
bfloat16, with masters that take 2 bytes more (`master="split"`), and gradients are summed within the last backward pass
of a step:

    make demo/demo.json                                                               # draws the data, once
    torchrun --nproc-per-node 4 examples/megatron_recipe.py dp:4 tp:2,pp:2
    torchrun --nproc-per-node 4 examples/megatron_recipe.py dp:2@0-1 tp:2@2-3 --zero 3
    torchrun --nproc-per-node 4 examples/megatron_recipe.py dp:1@0 pp:3@1-3 --data demo/data --steps 20
    torchrun --nproc-per-node 2 examples/megatron_recipe.py dp:2 dp:2 --checkpoints runs/recipe  # resumes from there

It learns to answer questions about pictures. `recipe.py` is a shorter program to copy, without stages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

# `python -m` has the current folder on its path, not this file's.
sys.path.append(str(Path(__file__).parent))

import torch
import torch.distributed as dist
from demo_data import Sample, read_data
from siglip_gpt import HIDDEN, TextStage, Tower
from torch import Tensor, nn

import megatron_hetero as mh

SAMPLES, MICRO_BATCHES, RATE, CLIP = 16, 4, 2e-3, 1.0
GRAPH = mh.Graph({"vision": ["text"]}, width=HIDDEN, dtype=torch.bfloat16)


def graph_of(topology: mh.Topology) -> mh.Graph:
    """The graph that `build` was given."""
    assert topology.graph is not None
    return topology.graph


def inputs_of(topology: mh.Topology, batch: Sequence[Sample]) -> mh.MicroBatchInputs:
    """This rank's inputs of a micro-batch."""
    inputs: dict[str, Any] = {}
    if topology.has("vision"):
        pictures = [batch[0].pictures[:0], *(sample.pictures for sample in topology.shard("vision", batch))]
        inputs["vision"] = torch.cat(pictures).to(graph_of(topology).dtype)
    if topology.has("text"):
        inputs["text"] = topology.shard("text", batch)
    rows = mh.Rows(samples=len(batch), rows_per_sample=[sample.rows for sample in batch])
    return mh.MicroBatchInputs(inputs, {("vision", "text"): rows})


def build_models(topology: mh.Topology, words: int) -> dict[str, nn.Module]:
    """Modules of this rank, the text model's stage among them."""
    modules: dict[str, nn.Module] = {"vision": Tower()} if topology.has("vision") else {}
    modules |= {"text": TextStage(topology, words)} if topology.has("text") else {}
    return {name: module.to(topology.platform.device, graph_of(topology).dtype) for name, module in modules.items()}


def train(
    topology: mh.Topology,
    modules: dict[str, nn.Module],
    samples: Sequence[Sample],
    steps: int,
    *,
    zero: Literal[1, 2, 3] = 1,
    checkpoints: Path | None = None,
) -> Iterator[tuple[list[Sample], Tensor]]:
    """Yield the samples and the loss of each step, once its gradients are finished and before its update."""
    algorithms = {"vision": mh.AdamW(lr=RATE, zero=zero, master="split"), "text": mh.AdamW(lr=RATE, master="split")}
    optimizer = mh.build_optimizers(topology, modules, algorithms, clip_grad=CLIP)
    run = mh.Runner(topology, modules, optimizer=optimizer)
    last = mh.load_checkpoint(checkpoints, optimizer) if checkpoints else None
    size, first = SAMPLES // MICRO_BATCHES, last.step if last else 0
    for step in range(first, first + steps):
        batch = [samples[(step * SAMPLES + i) % len(samples)] for i in range(SAMPLES)]
        tokens = torch.stack([sample.answers for sample in batch]).sum()
        loss = run([inputs_of(topology, batch[at : at + size]) for at in range(0, SAMPLES, size)])
        optimizer.finish_gradients(tokens)
        yield batch, mh.total_loss(topology, "text", loss) / tokens
        optimizer.step(tokens=None)  # Gradients are finished. One norm, one clip over all modules.
        optimizer.zero_grad()
    if checkpoints:
        mh.save_checkpoint(checkpoints, optimizer, first + steps, keep_last=2)


def main(argv: Sequence[str]) -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vision", help="layout of the tower: dp")
    parser.add_argument("text", help="layout of the text model: tp, pp, dp")
    parser.add_argument("--data", type=Path, default=Path("demo/data"), help="folder of train.jsonl and images")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=1, help="ZeRO stage of the tower")
    parser.add_argument("--checkpoints", type=Path, help="folder to resume from, in any layout, and to save to")
    options = parser.parse_args(argv)
    with mh.process_group() as platform:
        topology = mh.build(GRAPH, vision=options.vision, text=options.text)
        mh.prepare_megatron(topology, seed=1)
        samples, words = read_data(options.data, platform.device)
        modules = build_models(topology, words)
        steps = train(topology, modules, samples, options.steps, zero=options.zero, checkpoints=options.checkpoints)
        for number, (_, loss) in enumerate(steps, 1):
            if dist.get_rank() == 0:
                print(f"step {number}/{options.steps}: loss {loss.item():.4f}")


if __name__ == "__main__":
    mh.guarded(main, sys.argv[1:])
