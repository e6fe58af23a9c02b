"""Trains modules of one's own with the library's public names: `library.py VISION TEXT [OPTIONS]`, two layouts.

A vision module of PyTorch feeds a text module, of PyTorch or Megatron-Core, by a `Runner` or in a loop of one's own.
Rank 0 writes losses and norms to log-0/metrics.jsonl, each rank its weights to out-RANK/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import megatron_hetero as mh

WORDS, WIDTH, LENGTH, ROWS, PIXELS, SAMPLES, MICRO_BATCHES, STEPS = 16, 32, 12, 3, 20, 6, 3, 3
EDGE = ("vision", "text")
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
    "megatron": OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.01, clip_grad=0.5, bf16=True),
}


class Text(nn.Module):
    """A stage of a text module without attention. Token 0 is the place of a row."""

    def __init__(self, first: bool, last: bool):
        super().__init__()
        self.words, self.mix = (nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)) if first else (None, None)
        self.head = nn.Linear(WIDTH, WORDS) if last else None

    def hidden_shape(self, tokens: Tensor) -> tuple[int, ...]:
        return *tokens.shape, WIDTH

    def forward(self, tokens: Tensor, arrived: Tensor) -> Tensor:
        """Tokens, int64 [samples, LENGTH], and rows or hidden states, to hidden states or the sum of losses."""
        hidden = arrived
        if self.words and self.mix:
            embedded = self.words(tokens).masked_scatter((tokens == 0)[..., None], arrived)
            hidden = torch.tanh(self.mix(embedded.cumsum(1)))
        if not self.head:
            return hidden
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


class Megatron(nn.Module):
    """A stage of Megatron's model."""

    def __init__(self, topology: Any, stage: int):
        super().__init__()
        layout = topology.layouts["text"]
        self.stage, self.tp = stage, layout.tp
        config = TransformerConfig(
            num_layers=2, hidden_size=WIDTH, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=self.tp, pipeline_model_parallel_size=layout.pp, bf16=True,
            pipeline_dtype=torch.bfloat16, sequence_parallel=self.tp > 1, calculate_per_token_loss=True,
        )  # fmt: skip
        self.model = GPTModel(
            config, get_gpt_layer_local_spec(), WORDS, LENGTH, position_embedding_type="rope",
            pg_collection=topology.collection("text"), pre_process=stage == 0, post_process=stage == layout.pp - 1,
            share_embeddings_and_output_weights=False, scatter_embedding_sequence_parallel=False,
        )  # fmt: skip

    def hidden_shape(self, tokens: Tensor) -> tuple[int, ...]:
        return LENGTH // self.tp, len(tokens), WIDTH

    def forward(self, tokens: Tensor, arrived: Tensor) -> Tensor:
        """As `Text.forward`."""
        positions, embedded = torch.arange(LENGTH).expand_as(tokens), None
        if self.stage:
            self.model.set_input_tensor(arrived)
        else:
            embedded = self.model.embedding(tokens, positions).transpose(0, 1)
            embedded = embedded.masked_scatter((tokens == 0)[..., None], arrived).transpose(0, 1).contiguous()
            embedded = scatter_to_sequence_parallel_region(embedded, group=self.model.pg_collection.tp)
        labels = tokens.roll(-1, 1) if self.model.post_process else None
        found = self.model(tokens, positions, None, decoder_input=embedded, labels=labels)
        return found if labels is None else found[:, :-1].float().sum()


def build_modules(topology: Any, stage: int, options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """This rank's modules."""
    torch.manual_seed(1)
    modules: dict[str, Any] = {}
    if topology.has("vision"):
        layers = nn.Linear(PIXELS, WIDTH), nn.GELU(), nn.Linear(WIDTH, ROWS * WIDTH), nn.Unflatten(1, (ROWS, WIDTH))
        modules["vision"] = nn.Sequential(*layers, nn.Flatten(0, 1)).to(dtype)
        if options.shard:
            fully_shard(modules["vision"], mesh=topology.mesh("vision")["dp"])
    if topology.has("text"):
        last = stage == topology.layouts["text"].pp - 1
        modules["text"] = (Megatron(topology, stage) if options.megatron else Text(stage == 0, last)).to(dtype)
    return modules


def part_of(topology: Any, stage: int, samples: range, dtype: torch.dtype) -> mh.MicroBatchInputs:
    """This rank's part of a micro-batch: replicas take samples in turn. Sample i has i % 3 pictures of ROWS rows."""
    layouts, held = topology.layouts, [name for name in EDGE if topology.has(name)]
    own = {name: samples[layouts[name].replica_of(topology.rank) :: layouts[name].dp] for name in held}
    ids = {name: [LENGTH * i + row for i in own[name] for row in range(ROWS * (i % 3))] for name in held}
    noise = [torch.randn(i % 3, PIXELS, generator=torch.Generator().manual_seed(i)) for i in own.get("vision", ())]
    numbers, places = torch.tensor(own.get("text", ()), dtype=torch.int64)[:, None], torch.arange(LENGTH)
    tokens = (numbers * places % (WORDS - 1) + 1).masked_fill(places < ROWS * (numbers % 3), 0)
    inputs = {"vision": torch.cat([torch.zeros(0, PIXELS), *noise]).to(dtype), "text": tokens}
    rows = mh.Rows(held=ids.get("vision", ()), needed=ids.get("text", ()) if stage == 0 else ())
    return mh.MicroBatchInputs({name: inputs[name] for name in held}, {EDGE: rows})


def by_loop(boundary: Any, modules: dict[str, Any], inputs: Sequence[mh.MicroBatchInputs]) -> Tensor:
    """The sum of this rank's losses in a step, back-propagated."""
    total = torch.zeros(())
    for part in inputs:
        with mh.micro_batch(boundary):
            plan = boundary.plan(held=part.rows[EDGE].held, needed=part.rows[EDGE].needed)
            rows = boundary(plan, modules["vision"](part.inputs["vision"]) if "vision" in modules else None)
            if "text" in modules:
                loss = modules["text"](part.inputs["text"], rows)
                loss.backward()
                total += loss.detach()
    return total


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("vision", "text"):
        parser.add_argument(name)
    parser.add_argument("--zero", type=int, default=0)
    for flag in ("--loop", "--shard", "--megatron", "--sgd"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(argv)
    dtype, tokens = torch.bfloat16 if options.megatron else torch.float32, SAMPLES * MICRO_BATCHES * (LENGTH - 1)
    with mh.process_group():
        graph = mh.Graph({"vision": ["text"]}, width=WIDTH, dtype=dtype)
        topology = mh.build(graph, vision=options.vision, text=options.text)
        if options.megatron:
            mh.prepare_megatron(topology, seed=1)
        stage = topology.layouts["text"].coordinate(topology.rank).pp if topology.has("text") else 0
        modules = build_modules(topology, stage, options, dtype)
        chosen = "megatron" if options.megatron else "sgd" if options.sgd else "adamw"
        algorithm: Any = mh.AdamW(lr=1e-2, zero=options.zero) if options.zero else OPTIMIZERS[chosen]
        optimizer = mh.build_optimizers(topology, modules, algorithm, clip_grad=0.5)
        boundary = mh.Boundary.open(topology, *EDGE) if options.loop else None
        run: Any = (
            partial(by_loop, boundary, modules)
            if options.loop
            else mh.Runner(topology, modules, optimizer=optimizer if options.zero else None)
        )
        steps = []
        for first in range(0, STEPS * MICRO_BATCHES * SAMPLES, MICRO_BATCHES * SAMPLES):
            starts = range(first, first + MICRO_BATCHES * SAMPLES, SAMPLES)
            result = run([part_of(topology, stage, range(start, start + SAMPLES), dtype) for start in starts])
            norm, loss = optimizer.step(tokens=tokens), mh.total_loss(topology, "text", result) / tokens
            optimizer.zero_grad()
            steps.append({"step": len(steps) + 1, "loss": float(loss), "grad_norm": float(norm)})
        state = {f"{name}.{key}": p for name, m in modules.items() for key, p in m.named_parameters()}
        whole = {key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in state.items()}
        Path(f"out-{topology.rank}").mkdir()
        save_file({k: p.detach().contiguous() for k, p in whole.items()}, f"out-{topology.rank}/weights.safetensors")
        if topology.rank == 0:
            Path("log-0").mkdir()
            Path("log-0/metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


if __name__ == "__main__":
    mh.guarded(main, sys.argv[1:])
