"""A SigLIP tower of `transformers` feeds a `GPTModel` of Megatron-Core, each in a layout of its own.

    torchrun --nproc-per-node 2 examples/recipe.py

A second run resumes the first. For pipeline stages and micro-batches see megatron_recipe.py.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import megatron_hetero as mh  # isort: skip  # First: it hides warnings of Megatron's import.

if __name__ == "__main__":  # --help does not wait for that import, which takes seconds.
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_known_args()

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from transformers import SiglipVisionConfig, SiglipVisionModel

CHECKPOINTS = Path("runs/recipe")
STEPS, STEPS_PER_CHECKPOINT = 20, 10
SAMPLES, LENGTH, WORDS = 8, 16, 32  # Samples of the global batch, tokens of each, size of the vocabulary.
SIDE, ROWS, HIDDEN = 48, 9, 96  # Pixels of a picture's side, rows that the tower makes of it, their width.
TOKENS = SAMPLES * (LENGTH - ROWS)  # Supervised tokens of a step.
TOWER = SiglipVisionConfig(hidden_size=HIDDEN, num_hidden_layers=2, image_size=SIDE, vision_use_head=False)
GRAPH = mh.Graph({"vision": ["text"]}, width=HIDDEN, dtype=torch.bfloat16)


def build_modules(topology: mh.Topology) -> dict[str, torch.nn.Module]:
    """Modules of this rank."""
    modules: dict[str, torch.nn.Module] = {"vision": SiglipVisionModel(TOWER)} if topology.has("vision") else {}
    if topology.has("text"):
        tp = topology.layouts["text"].tp
        config = TransformerConfig(
            num_layers=2, hidden_size=HIDDEN, num_attention_heads=12, hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        )  # fmt: skip
        modules["text"] = GPTModel(
            config, gpt_layer_specs.get_gpt_layer_local_spec(), WORDS, LENGTH, position_embedding_type="rope",
            pg_collection=topology.collection("text"), scatter_embedding_sequence_parallel=False,
        )  # fmt: skip
    return {name: module.to(topology.platform.device, torch.bfloat16) for name, module in modules.items()}


def encode(tower: torch.nn.Module, gray: torch.Tensor) -> torch.Tensor:
    """Rows of pictures in one shade of gray each, [samples, 1], as [samples * ROWS, HIDDEN]."""
    pictures = (gray / 16).to(torch.bfloat16).view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)
    return tower(pictures).last_hidden_state.flatten(0, 1)


def sum_of_losses(model: GPTModel, gray: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Each sample is its picture's rows, then words that name the shade of gray, of which the model predicts all."""
    tokens = gray.expand(-1, LENGTH)
    is_row = torch.arange(LENGTH).expand(len(tokens), -1) < ROWS
    hidden = mh.place_rows(model.embedding(tokens, None), rows, is_row, length_first=True)
    hidden = scatter_to_sequence_parallel_region(hidden, group=model.pg_collection.tp)
    losses = model(tokens, None, None, decoder_input=hidden, labels=tokens.roll(-1, 1))
    return losses[:, ROWS - 1 : -1].sum()


@mh.process_group()
def train(layouts: Sequence[str]) -> None:
    """Train for `STEPS` steps, from the last checkpoint on if there is one. `layouts`: of the tower and the model."""
    topology = mh.build(GRAPH, vision=layouts[0], text=layouts[1])
    mh.prepare_megatron(topology, seed=1)
    modules = build_modules(topology)
    vision, text = modules.get("vision"), modules.get("text")
    boundary = mh.Boundary.open(topology, "vision", "text")
    optimizer = mh.build_optimizers(topology, modules, OptimizerConfig(lr=1e-3, bf16=True))
    state = {"step": 0, "train": optimizer.state_for_dcp()}
    if saved := sorted(CHECKPOINTS.glob("*/.metadata")):
        dcp.load(state, checkpoint_id=saved[-1].parent)
        optimizer.load_from_dcp(state["train"])

    for step in range(state["step"] + 1, state["step"] + STEPS + 1):
        # All ranks draw the whole batch. Each replica of a module takes its share, and the boundary brings its rows.
        batch = torch.randint(WORDS, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
        batch, loss = batch.to(topology.platform.device), 0.0
        with mh.micro_batch(boundary):
            plan = boundary.plan(samples=SAMPLES, rows_per_sample=ROWS)
            rows = boundary(plan, encode(vision, topology.shard("vision", batch)) if vision is not None else None)
            if text is not None:
                loss = sum_of_losses(text, topology.shard("text", batch), rows)
                loss.backward()
        optimizer.step(tokens=TOKENS)
        optimizer.zero_grad()
        mean = mh.total_loss(topology, "text", loss) / TOKENS
        if topology.rank == 0:
            print(f"step {step}: loss {mean:.4f}")
        if step % STEPS_PER_CHECKPOINT == 0:
            dcp.save({"step": step, "train": optimizer.state_for_dcp()}, checkpoint_id=CHECKPOINTS / f"{step:08}")


if __name__ == "__main__":
    mh.guarded(train, ["dp:2", "tp:2"])  # The tower may have dp, the text model tp and dp.
