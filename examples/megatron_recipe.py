"""A SigLIP tower of `transformers` feeds a `GPTModel` of Megatron-Core, each in a layout of its own.

The tower has replicas, sharded by FSDP2 if you like; the text model any `tp`, `pp` and `dp`:

    make demo/demo.json                                                               # draws the data, once
    torchrun --nproc-per-node 4 examples/megatron_recipe.py dp:4 tp:2,pp:2
    torchrun --nproc-per-node 4 examples/megatron_recipe.py dp:2@0-1 tp:2@2-3 --fsdp
    torchrun --nproc-per-node 4 examples/megatron_recipe.py dp:1@0 pp:3@1-3 --data demo/data --steps 20

It learns to answer questions about pictures. Each step's loss and gradients are compared with those of one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from PIL import Image
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import SiglipVisionConfig, SiglipVisionModel

import megatron_hetero as mh

HIDDEN, HEADS, LAYERS, LENGTH = 64, 4, 6, 24
SIDE, PATCH, ROWS = 48, 16, 9
SAMPLES, MICRO_BATCHES, RATE, CLIP, TOLERANCE = 16, 4, 2e-3, 1.0, 1e-3
GRAPH = mh.Graph({"vision": ["text"]}, width=HIDDEN, dtype=torch.float32)


class Sample(NamedTuple):
    """Its number; tokens, int64 [LENGTH], 0 in place of rows; which are answers; pictures, [n, 3, SIDE, SIDE]."""

    number: int
    tokens: Tensor
    answers: Tensor
    pictures: Tensor

    @property
    def row_ids(self) -> range:
        return range(self.number * LENGTH, self.number * LENGTH + ROWS * len(self.pictures))


class Tower(nn.Module):
    """Pictures to rows, [ROWS * n, HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS,
            image_size=SIDE, patch_size=PATCH, vision_use_head=False,
        )  # fmt: skip
        self.tower, self.projector = SiglipVisionModel(config), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, pictures: Tensor) -> Tensor:
        # A rank without a picture runs all layers too: under FSDP2 they communicate. SigLIP takes no empty batch.
        shown = pictures if len(pictures) else pictures.new_zeros(1, 3, SIDE, SIDE)
        rows = self.projector(self.tower(shown).last_hidden_state)
        return rows[: len(pictures)].flatten(0, 1)


class TextStage(nn.Module):
    """This rank's stage of the text model, as `mh.Runner` calls it."""

    def __init__(self, topology: mh.Topology, words: int):
        super().__init__()
        layout, groups = topology.layouts["text"], topology.collection("text")
        self.stage, self.tp = layout.coordinate(topology.rank).pp, layout.tp
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, pipeline_dtype=torch.float32,
            sequence_parallel=layout.tp > 1, calculate_per_token_loss=True,
        )  # fmt: skip
        self.model = GPTModel(
            config, get_gpt_layer_local_spec(), words, LENGTH, position_embedding_type="rope", pg_collection=groups,
            pre_process=self.stage == 0, post_process=self.stage == layout.pp - 1,
            share_embeddings_and_output_weights=False, scatter_embedding_sequence_parallel=False,
        )  # fmt: skip

    def hidden_shape(self, batch: Sequence[Sample]) -> tuple[int, int, int]:
        return LENGTH // self.tp, len(batch), HIDDEN

    def forward(self, batch: Sequence[Sample], arrived: Tensor) -> Tensor:
        """Hidden states, or on the last stage the sum of losses. `arrived`: rows, or the stage before's states."""
        tokens = torch.stack([sample.tokens for sample in batch])
        positions, embedded = torch.arange(LENGTH, device=tokens.device).expand_as(tokens), None
        if self.stage == 0:
            embedded = self.model.embedding(tokens, positions).transpose(0, 1)
            embedded = embedded.masked_scatter((tokens == 0)[..., None], arrived).transpose(0, 1).contiguous()
            if self.tp > 1:
                embedded = scatter_to_sequence_parallel_region(embedded, group=self.model.pg_collection.tp)
        else:
            self.model.set_input_tensor(arrived)
        if not self.model.post_process:
            return self.model(tokens, positions, None, decoder_input=embedded)
        losses = self.model(tokens, positions, None, decoder_input=embedded, labels=tokens.roll(-1, 1))
        return (losses * torch.stack([sample.answers for sample in batch]).roll(-1, 1)).sum()


def read_data(folder: Path, device: torch.device) -> tuple[list[Sample], int]:
    """The samples, and the number of words."""
    with open(folder / "train.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    turns = [[turn["value"].replace("<image>", "").split() for turn in r["conversations"]] for r in records]
    words = {word: at for at, word in enumerate(sorted({w for each in turns for turn in each for w in turn}), 2)}
    samples = []
    for number, (record, (question, answer)) in enumerate(zip(records, turns, strict=True)):
        files = record.get("image", [])
        files = [files] if isinstance(files, str) else files
        shown = [
            np.asarray(Image.open(folder / "images" / f).resize((SIDE, SIDE)), np.float32) / 128 - 1 for f in files
        ]
        pictures = torch.from_numpy(np.array(shown, np.float32).reshape(-1, SIDE, SIDE, 3)).permute(0, 3, 1, 2)
        said = [0] * (ROWS * len(files)) + [words[word] for word in question + answer]
        tokens = torch.tensor((said + [1] * LENGTH)[:LENGTH])
        places = torch.arange(LENGTH)
        answers = ((places >= len(said) - len(answer)) & (places < len(said))).float()
        samples.append(Sample(number, *(each.to(device) for each in (tokens, answers, pictures))))
    return samples, len(words) + 2


def part_of(topology: mh.Topology, batch: Sequence[Sample]) -> mh.MicroBatch:
    """This rank's part: replicas of each module take samples in turn."""
    own = {
        n: batch[v.replica_of(topology.rank) :: v.dp] if topology.has(n) else [] for n, v in topology.layouts.items()
    }
    text = topology.layouts["text"]
    first = topology.has("text") and text.coordinate(topology.rank).pp == 0
    rows = mh.Rows(held=ids(own["vision"]), needed=ids(own["text"]) if first else ())
    pictures = torch.cat([sample.pictures for sample in own["vision"]]) if own["vision"] else batch[0].pictures[:0]
    inputs = {"vision": pictures, "text": own["text"]}
    return mh.MicroBatch({name: inputs[name] for name in own if topology.has(name)}, {("vision", "text"): rows})


def ids(samples: Sequence[Sample]) -> list[int]:
    """Of the rows of samples, in their order."""
    return [row for sample in samples for row in sample.row_ids]


def build_models(topology: mh.Topology, words: int) -> dict[str, nn.Module]:
    """The modules of this rank."""
    device = topology.platform.device
    torch.manual_seed(1)
    modules: dict[str, nn.Module] = {"vision": Tower().to(device)} if topology.has("vision") else {}
    return modules | ({"text": TextStage(topology, words).to(device)} if topology.has("text") else {})


def build_both(topology: mh.Topology, words: int) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Both models as in one process, on every rank, and the modules of this rank with the same weights."""
    alone = mh.build(GRAPH, dict.fromkeys(GRAPH.modules, f"dp:{dist.get_world_size()}"))
    mh.prepare_megatron(topology, seed=1)
    whole, modules = build_models(alone, words), build_models(topology, words)
    for module in whole.values():
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)  # Megatron draws other weights on ranks along tp.
    for own, value in counterparts(topology, modules, {name: module.state_dict() for name, module in whole.items()}):
        own.data.copy_(value)
    return whole, modules


def loss_in_one_process(whole: Mapping[str, nn.Module], batch: Sequence[Sample]) -> Tensor:
    """The mean over the answers' tokens."""
    rows = whole["vision"](torch.cat([sample.pictures for sample in batch]))
    return whole["text"](batch, rows) / torch.stack([sample.answers for sample in batch]).sum()


def counterparts(
    topology: mh.Topology, modules: Mapping[str, nn.Module], whole: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[Any, Tensor]]:
    """Each parameter of a rank, with its stage and shard of what `whole` has by module and name."""
    yield from (
        ((own, whole["vision"][n]) for n, own in modules["vision"].named_parameters()) if "vision" in modules else ()
    )
    if "text" not in modules:
        return
    groups = topology.collection("text")
    first = groups.pp.rank() * LAYERS // groups.pp.size()
    for name, own in modules["text"].named_parameters():
        names = name.split(".")
        if "layers" in names:
            names[names.index("layers") + 1] = str(int(names[names.index("layers") + 1]) + first)
        value, sharded = whole["text"][".".join(names)], getattr(own, "tensor_model_parallel", False)
        yield (
            own,
            value.chunk(groups.tp.size(), getattr(own, "partition_dim", 0))[groups.tp.rank()] if sharded else value,
        )


def gradients_apart(topology: mh.Topology, modules: Mapping[str, nn.Module], whole: Mapping[str, nn.Module]) -> float:
    """The largest difference of a gradient on any rank, relative to the largest element of its tensor."""
    apart = [torch.zeros((), device=topology.platform.device)]
    grads = {
        name: {n: p.grad for n, p in module.named_parameters() if p.grad is not None} for name, module in whole.items()
    }
    largest = torch.stack([grad.abs().max() for of_module in grads.values() for grad in of_module.values()]).max()
    for own, other in counterparts(topology, modules, grads):
        found = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
        # Gradients of biases of keys are rounding errors.
        apart.append((found - other).abs().max() / other.abs().max().clamp(min=1e-3 * largest))
    worst = torch.stack(apart).max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


class Trainer:
    """Steps of a graph of modules on a topology."""

    def __init__(self, topology: mh.Topology, modules: Mapping[str, nn.Module]):
        self.topology, self.modules, self.run = topology, modules, mh.Runner(topology, modules)
        config = OptimizerConfig(optimizer="adam", lr=RATE, weight_decay=0.0, clip_grad=CLIP)
        self.optimizer = mh.build_optimizers(topology, modules, config)

    def backward(self, batch: Sequence[Sample]) -> float:
        """The mean loss over the answers' tokens; its gradients are in the parameters."""
        size = len(batch) // MICRO_BATCHES
        loss = self.run([part_of(self.topology, batch[at : at + size]) for at in range(0, len(batch), size)])
        tokens = torch.stack([sample.answers for sample in batch]).sum()
        mh.finish_gradients(self.topology, self.modules, tokens)
        layout = self.topology.layouts["text"]
        if self.topology.has("text") and layout.coordinate(self.topology.rank).tp:
            loss.zero_()  # Ranks along tp compute the same loss.
        dist.all_reduce(loss)
        return loss.item() / tokens.item()

    def update(self) -> None:
        """A step of the optimizer, with one norm and one clip over all modules."""
        self.optimizer.step(tokens=None)  # Gradients are finished.
        self.optimizer.zero_grad()


class Step(NamedTuple):
    """A mean loss, and how far it and the gradients are from those of one process, relatively."""

    loss: float
    loss_apart: float
    gradients_apart: float


def train(vision: str, text: str, data: Path, *, steps: int, fsdp: bool) -> list[Step]:
    """Train, next to the same in one process."""
    topology = mh.build(GRAPH, vision=vision, text=text)
    samples, words = read_data(data, topology.platform.device)
    whole, modules = build_both(topology, words)
    parameters = [parameter for module in whole.values() for parameter in module.parameters()]
    if fsdp and "vision" in modules:
        fully_shard(modules["vision"], mesh=topology.mesh("vision")["dp"])
    trainer, done = Trainer(topology, modules), []
    reference = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    for step in range(steps):
        batch = [samples[(step * SAMPLES + i) % len(samples)] for i in range(SAMPLES)]
        loss = trainer.backward(batch)
        expected = loss_in_one_process(whole, batch)
        expected.backward()
        done.append(Step(loss, abs(loss / expected.item() - 1), gradients_apart(topology, modules, whole)))
        trainer.update()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        reference.step()
        reference.zero_grad()
    return done


def main(argv: Sequence[str]) -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vision", help="layout of the tower: dp")
    parser.add_argument("text", help="layout of the text model: tp, pp, dp")
    parser.add_argument("--data", type=Path, default=Path("demo/data"), help="folder of train.jsonl and images")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--fsdp", action="store_true", help="shard the tower over its replicas")
    options = parser.parse_args(argv)
    with mh.process_group():
        if not (options.data / "train.jsonl").is_file():
            raise mh.UserError(
                f"--data: found no {options.data / 'train.jsonl'}; run `make demo/demo.json`, or name another folder"
            )
        steps = train(options.vision, options.text, options.data, steps=options.steps, fsdp=options.fsdp)
        if dist.get_rank() == 0:
            for number, step in enumerate(steps, 1):
                print(
                    f"step {number}/{len(steps)}: loss {step.loss:.4f}; from one process: "
                    f"loss {step.loss_apart:.1e}, gradients {step.gradients_apart:.1e}"
                )
        if not all(max(step.loss_apart, step.gradients_apart) < TOLERANCE for step in steps):
            raise RuntimeError(f"losses or gradients are not those of one process, to {TOLERANCE:.0e}")


if __name__ == "__main__":
    mh.guarded(main, sys.argv[1:])
