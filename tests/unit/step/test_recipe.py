"""SigLIP of `transformers` with `GPTModel` of Megatron-Core: losses and gradients are those of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from examples.demo.records import draw, training_samples
from megatron_hetero import Boundary, build, finish_gradients, micro_batch, prepare_megatron, total_loss
from megatron_hetero.groups.topology import Topology
from megatron_hetero.step.buffers import BufferedGradients
from tests.support.matrix import long, thinned
from tests.support.ranks import on_ranks
from tests.unit.step import running


class Step(NamedTuple):
    """A mean loss, and how far it and the gradients are from those of one process, relatively."""

    loss: float
    loss_apart: float
    gradients_apart: float


class OneProcess:
    """Whole models, of which the modules of a topology are parts with the same weights."""

    def __init__(self, recipe: Any, topology: Topology, modules: Mapping[str, nn.Module], words: int, rate: float):
        everywhere = f"dp:{dist.get_world_size()}"
        whole = recipe.build_models(build(recipe.graph_of(topology), vision=everywhere, text=everywhere), words)
        self.topology, self.modules, self.whole, self.clip = topology, dict(modules), whole, recipe.CLIP
        self.parameters = [parameter for module in whole.values() for parameter in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        for parameter in self.parameters:
            dist.broadcast(parameter.data, 0)  # Megatron draws other weights on ranks along tp.
        for own, value in self._counterparts({name: module.state_dict() for name, module in whole.items()}):
            own.data.copy_(value)

    def compare(self, batch: Sequence[Any], loss: Tensor) -> Step:
        """Compute the loss of a batch and its gradients, and compare."""
        rows = self.whole["vision"](torch.cat([sample.pictures for sample in batch]))
        expected = self.whole["text"](batch, rows) / torch.stack([sample.answers for sample in batch]).sum()
        expected.backward()
        return Step(loss.item(), abs(loss.item() / expected.item() - 1), self.gradients_apart())

    def update(self) -> None:
        """Clip and update the weights."""
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients_apart(self) -> float:
        """The largest difference of a gradient on any rank, relative to the largest element of its tensor."""
        apart = [torch.zeros((), device=self.topology.platform.device)]
        grads = {
            name: {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            for name, module in self.whole.items()
        }
        largest = torch.stack([grad.abs().max() for of_module in grads.values() for grad in of_module.values()]).max()
        for own, other in self._counterparts(grads):
            found: Any = own.main_grad if hasattr(own, "main_grad") else own.grad
            if found is None and isinstance(own, DTensor):
                continue  # In shards of the optimizer's own; the next loss says whether they were right.
            found = found.full_tensor() if isinstance(found, DTensor) else found
            # Gradients of biases of keys are rounding errors.
            apart.append((found - other).abs().max() / other.abs().max().clamp(min=1e-3 * largest))
        worst = torch.stack(apart).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.item()

    def _counterparts(self, whole: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        """Each parameter of a rank, with its stage and shard of what `whole` has by module and name."""
        if "vision" in self.modules:
            yield from ((own, whole["vision"][name]) for name, own in self.modules["vision"].named_parameters())
        if "text" not in self.modules:
            return
        groups = self.topology.collection("text")
        first = groups.pp.rank() * len(self.whole["text"].model.decoder.layers) // groups.pp.size()
        for name, own in self.modules["text"].named_parameters():
            names = name.split(".")
            if "layers" in names:
                at = names.index("layers") + 1
                names[at] = str(int(names[at]) + first)
            value = whole["text"][".".join(names)]
            if getattr(own, "tensor_model_parallel", False):
                value = value.chunk(groups.tp.size(), vars(own)["partition_dim"])[groups.tp.rank()]
            yield own, value


LAYOUTS = [
    ("dp:4", "tp:2,dp:2"),
    ("dp:4", "pp:2,dp:2"),
    ("dp:2@0-1", "tp:2@2-3"),
    ("dp:2@2-3", "dp:2@0-1"),
    ("dp:1@0", "pp:3@1-3"),
    ("dp:3@0-2", "tp:2@2-3"),
    ("dp:4", "pp:2@1-2"),
    ("dp:2@1-2", "tp:2,pp:2"),
]
MORE = [
    ("dp:4", "dp:4"),
    ("dp:4", "tp:4"),
    ("dp:4", "tp:2,pp:2"),
    ("dp:2@0-1", "pp:2@2-3"),
    ("dp:3@0-2", "dp:1@3"),
]
"""For `make matrix`: whatever these have, a row above has, if with something else beside it."""
WRAPPED = [
    ("ddp", "ddp", "dp:4", "tp:2,dp:2"),
    ("fsdp", "fsdp", "dp:2@0-1", "dp:2@2-3"),
    ("fsdp", "fsdp", "dp:4", "tp:2,dp:2"),
    ("plain", "fsdp", "dp:4", "dp:2@1-2"),
    ("ddp", "plain", "dp:2@0-1", "dp:2@2-3"),
]
"""Wrappers of the tower and of the model, and their layouts."""
MORE_WRAPPED = [
    (*wrappers, *layouts)
    for layouts in (("dp:4", "tp:2,dp:2"), ("dp:2@0-1", "dp:2@2-3"), ("dp:4", "dp:2@1-2"))
    for wrappers in (("ddp", "ddp"), ("fsdp", "fsdp"), ("plain", "fsdp"), ("ddp", "plain"))
    if (*wrappers, *layouts) not in WRAPPED
]
"""The same for `make matrix`: all wrappers in all layouts."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data, for two steps: samples with one picture, two and none."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    lines = []
    for number, sample in enumerate(training_samples(24, seed=5)):
        lines.append(json.dumps(sample.record(f"{number}")))
        for name, scene in zip(sample.files(f"{number}"), sample.scenes, strict=True):
            draw(scene).save(folder / "images" / name)
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def topology_of(recipe: Any, vision: str, text: str) -> Topology:
    """In fp32, to compare with one process."""
    return build(replace(recipe.GRAPH, dtype=torch.float32), vision=vision, text=text)


def train(vision: str, text: str, data: Path, **options: Any) -> None:
    # Here, since it warns of what it imports, and in the tests' own process warnings are errors.
    from examples import megatron_recipe as recipe

    topology = topology_of(recipe, vision, text)
    prepare_megatron(topology, seed=1)
    samples, words = recipe.read_data(data, topology.platform.device)
    modules = recipe.build_models(topology, words)
    reference = OneProcess(recipe, topology, modules, words, recipe.RATE)
    steps = []
    for batch, loss in recipe.train(topology, modules, samples, steps=2, **options):
        steps.append(reference.compare(batch, loss))
        reference.update()
    first, second = steps
    assert second.loss < first.loss
    assert max(first.loss_apart, second.loss_apart) < 1e-6
    assert first.gradients_apart < 1e-5
    assert second.gradients_apart < 1e-3, "AdamW's first step follows the signs of rounding errors"


@pytest.mark.parametrize("vision, text", [*thinned(LAYOUTS, 4), *long(MORE)])
@on_ranks(4)
def test_any_layouts_train_as_one_process(vision: str, text: str, data: Path) -> None:
    train(vision, text, data)


@pytest.mark.parametrize("vision, text", thinned([("dp:4", "tp:2,pp:2"), ("dp:2@0-1", "tp:2@2-3")], 2))
@on_ranks(4)
def test_it_learns_in_bfloat16_and_resumes_elsewhere(vision: str, text: str, data: Path, tmp_path: Path) -> None:
    """With split masters, and sums of gradients within the backward pass."""
    from examples import megatron_recipe as recipe

    losses, within = list[float](), list[int]()
    start = BufferedGradients._arrived

    def spied(sums: BufferedGradients, *arguments: Any) -> None:
        before = len(sums._works)
        start(sums, *arguments)
        within.append(len(sums._works) - before)

    for layouts in ((vision, text), ("dp:4", "dp:4")):
        topology = build(recipe.GRAPH, vision=layouts[0], text=layouts[1])
        prepare_megatron(topology, seed=1)
        samples, words = recipe.read_data(data, topology.platform.device)
        modules = recipe.build_models(topology, words)
        with mock.patch.object(BufferedGradients, "_arrived", spied):
            steps = recipe.train(topology, modules, samples, steps=4, checkpoints=tmp_path)
            losses += [loss.item() for _, loss in steps]
        assert sum(within), "sums begin within backward passes"
    assert losses[7] < losses[4] < losses[0], "the second run goes on from the first"


@pytest.mark.parametrize("vision, text", thinned([("dp:4", "tp:2,pp:2"), ("dp:2@0-1", "tp:2@2-3")], 2))
@on_ranks(4)
def test_a_tower_whose_weights_replicas_share(vision: str, text: str, data: Path) -> None:
    train(vision, text, data, zero=3)


@pytest.mark.parametrize("tower, model, vision, text", [*thinned(WRAPPED, 2), *long(MORE_WRAPPED)])
@on_ranks(4)
def test_either_side_in_a_wrapper_of_pytorch(tower: str, model: str, vision: str, text: str, data: Path) -> None:
    """In a plain loop: a `Runner` refuses DDP, which reduces in each backward pass."""
    from examples import megatron_recipe as recipe

    topology = topology_of(recipe, vision, text)
    samples, words = recipe.read_data(data, topology.platform.device)
    prepare_megatron(topology, seed=1)
    inner = recipe.build_models(topology, words)
    reference = OneProcess(recipe, topology, inner, words, rate=0.1)
    wrappers = {"vision": tower, "text": model}
    modules: Any = {name: running.wrapped(each, wrappers[name], topology, name) for name, each in inner.items()}
    link = Boundary.open(topology, "vision", "text") if inner else None
    mine, batch = torch.zeros(()), samples[:16]
    for at in range(0, 16, 4):
        part = recipe.inputs_of(topology, batch[at : at + 4])
        if link is None:
            continue
        with micro_batch(link):
            made = modules["vision"](part.inputs["vision"]) if "vision" in modules else None
            arrived = link(link.plans([part.rows["vision", "text"]])[0], made)
            if "text" in modules:
                loss = modules["text"](part.inputs["text"], arrived)
                loss.backward()
                mine += loss.detach()
    tokens = torch.stack([sample.answers for sample in batch]).sum()
    finish_gradients(topology, modules, tokens)
    step = reference.compare(batch, total_loss(topology, "text", mine) / tokens)
    assert step.loss_apart < 1e-6
    assert step.gradients_apart < 1e-5
