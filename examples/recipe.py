"""SigLIP feeds a `GPTModel`. A second run resumes the first: torchrun --nproc-per-node 2 examples/recipe.py"""

import argparse
from pathlib import Path

if __name__ == "__main__":  # Before Megatron, whose import takes seconds.
    argparse.ArgumentParser(description=__doc__).parse_known_args()
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import optimizer, tensor_parallel, transformer
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from transformers import SiglipVisionConfig, SiglipVisionModel

import megatron_hetero as mh

RUN, STEPS, SAMPLES, LENGTH, ROWS, BF16 = Path("runs/recipe"), 20, 8, 16, 9, torch.bfloat16
VISION = SiglipVisionConfig(hidden_size=96, num_hidden_layers=2, image_size=48, vision_use_head=False)
TEXT = {"hidden_size": 96, "num_attention_heads": 12, "num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
GPT = {"position_embedding_type": "rope", "scatter_embedding_sequence_parallel": False}


@mh.process_group()
def _train(layouts):
    topology = mh.build(mh.Graph({"vision": ["text"]}, width=96, dtype=BF16), vision=layouts[0], text=layouts[1])
    mh.prepare_megatron(topology, seed=1)
    vision, text, loss = SiglipVisionModel(VISION) if topology.has("vision") else None, None, 0.0
    if topology.has("text"):
        tp, groups = topology.layouts["text"].tp, topology.collection("text")
        config = transformer.TransformerConfig(**TEXT, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
        text = GPTModel(config, gpt_layer_specs.get_gpt_layer_local_spec(), 32, LENGTH, pg_collection=groups, **GPT)
    boundary, device = mh.Boundary.open(topology, "vision", "text"), topology.platform.device
    modules = {n: m.to(device, BF16) for n, m in (("vision", vision), ("text", text)) if m is not None}
    optim = mh.build_optimizers(topology, modules, optimizer.OptimizerConfig(lr=1e-3, bf16=True))
    state = {"step": 0, "train": optim.state_for_dcp()}
    if saved := sorted(RUN.glob("*/.metadata")):
        dcp.load(state, checkpoint_id=saved[-1].parent)
        optim.load_from_dcp(state["train"])
    for step in range(state["step"] + 1, state["step"] + STEPS + 1):
        gray = torch.randint(32, (SAMPLES, 1, 1, 1), generator=torch.Generator().manual_seed(step)).to(device)
        with mh.micro_batch(boundary):
            plan = boundary.plan(samples=SAMPLES, rows_per_sample=ROWS)
            pictures, tokens = topology.shard("vision", gray), topology.shard("text", gray).view(-1, 1)
            rows = boundary(plan, vision(pictures.expand(-1, 3, 48, 48) / 16)[0].flatten(0, 1) if vision else None)
            if text is not None:
                tokens, places = tokens.expand(-1, LENGTH), torch.arange(LENGTH).expand(len(tokens), -1) < ROWS
                hidden = mh.place_rows(text.embedding(tokens, None), rows, places, length_first=True)
                hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden, group=text.pg_collection.tp)
                losses = text(tokens, None, None, decoder_input=hidden, labels=tokens.roll(-1, 1))
                (loss := losses[:, ROWS - 1 : -1].sum()).backward()
        optim.step(tokens=mh.count_tokens(topology, "text", (LENGTH - ROWS) * len(tokens)))
        optim.zero_grad()
        mean = mh.total_loss(topology, "text", loss) / (LENGTH - ROWS) / SAMPLES
        if topology.rank == 0:
            print(f"step {step}: loss {mean:.4f}")
        if step % 10 == 0:
            dcp.save({"step": step, "train": optim.state_for_dcp()}, checkpoint_id=RUN / f"{step:08}")


if __name__ == "__main__":
    mh.guarded(_train, ["dp:2", "tp:2"])  # The tower: dp. The text model: tp and dp, with pp see megatron_recipe.py.
