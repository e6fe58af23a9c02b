"""`state_for_dcp` with `torch.distributed.checkpoint`: what one layout saved goes on in the same, and in others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves

from megatron_hetero.base.errors import UserError
from megatron_hetero.step.algorithms import AdamW
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.library_optimizers import build_optimizers
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running
from tests.unit.step.small import adam, batch_of, of_pytorch, whole

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1)
ADAM = partial(torch.optim.Adam, lr=0.05, weight_decay=0.1)


class Net(nn.Module):
    """With a frozen layer, one without gradients, a tied weight and a buffer that says how often it ran."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.frozen, self.unused = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4)
        self.register_buffer("runs", torch.zeros(()))
        self.norm = nn.LayerNorm(8)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        hidden = self.second(self.first(x.to(self.frozen.weight.dtype)).relu())
        return self.norm(self.frozen(hidden)).float()


def wrapped(model: Any, wrapper: str, topology: Any) -> Any:
    mesh = topology.mesh("text")
    if "tp" in wrapper:
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    if "fsdp" in wrapper:
        fully_shard(model.first, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def fresh(layout: str, wrapper: str, config: Any, seed: int, dtype: torch.dtype) -> tuple[Any, JointOptimizer]:
    topology = running.topology_of(text=layout)
    modules = {"text": wrapped(Net(seed, dtype), wrapper, topology)} if topology.has("text") else {}
    return modules.get("text"), build_optimizers(topology, modules, config, clip_grad=1.0)


def train(model: Any, optimizer: JointOptimizer, steps: range) -> list[float]:
    layout, norms = optimizer.topology.layouts["text"], list[float]()
    for step in steps:
        optimizer.zero_grad()
        if model is not None:
            inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            model(inputs[layout.replica_of(optimizer.topology.rank) :: layout.dp]).sin().sum().backward()
        norms.append(optimizer.step(tokens=8).item())
    return norms


def weights(model: Any, optimizer: JointOptimizer) -> list[Tensor]:
    """With their masters."""
    copies = (vars(each).get("masters_by_parameter", {}) for each in optimizer.optimizers.values())
    masters = (master for by_parameter in copies for master in by_parameter.values())
    return [] if model is None else [whole(p, optimizer).detach().clone() for p in (*model.parameters(), *masters)]


def save(folder: Path, optimizer: JointOptimizer) -> None:
    dcp.save({"step": 2, "train": optimizer.state_for_dcp()}, checkpoint_id=folder)


def load(folder: Path, optimizer: JointOptimizer) -> None:
    state = {"step": 0, "train": optimizer.state_for_dcp()}
    dcp.load(state, checkpoint_id=folder)
    optimizer.load_from_dcp(state["train"])
    assert state["step"] == 2


RESUMED = [
    ("fsdp", "dp:4", "fsdp", "dp:4", SGD, torch.float32),
    ("fsdp", "dp:2@0-1", "plain", "dp:4", ADAM, torch.float32),
    ("fsdp", "dp:4", "fsdp", "dp:2@1-2", adam(bf16=True), torch.bfloat16),
    ("plain", "dp:4", "fsdp", "dp:4", adam(bf16=True), torch.bfloat16),
    ("plain", "dp:4", "plain", "dp:4", AdamW(lr=0.05, zero=3), torch.bfloat16),
    ("fsdp", "dp:4", "plain", "dp:2@0-1", of_pytorch, torch.float32),
    ("tp", "tp:2,dp:2", "tp", "tp:2,dp:2", of_pytorch, torch.float32),
    ("tp fsdp", "tp:2,dp:2", "fsdp", "dp:4", of_pytorch, torch.float32),
    ("tp", "tp:2,dp:2", "tp", "tp:4", SGD, torch.float32),
    ("tp fsdp", "tp:2,dp:2", "tp fsdp", "tp:2@2-3", ADAM, torch.float32),
]


@pytest.mark.parametrize("before, layout, after, other, config, dtype", thinned(RESUMED, 2))
@on_ranks(4, timeout_s=60)
def test_a_run_goes_on_in_the_same_layout_and_in_others(
    before: str, layout: str, after: str, other: str, config: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Weights and norms are those of a run without interruption."""
    exact = (before, layout) == (after, other)
    last = 4 if exact or dtype == torch.float32 else 2  # In bfloat16, other layouts round otherwise.
    expected = fresh(layout, before, config, 0, dtype)
    norms = train(*expected, range(last))
    saved = fresh(layout, before, config, 0, dtype)
    train(*saved, range(2))
    save(tmp_path, saved[1])
    resumed = fresh(other, after, config, 7, dtype)
    load(tmp_path, resumed[1])
    if resumed[0] is not None:
        assert resumed[0].runs == 2
    assert train(*resumed, range(2, last)) == (norms[2:] if exact else pytest.approx(norms[2:], rel=1e-5))
    of_ranks: list[Any] = [None] * 4
    dist.all_gather_object(of_ranks, weights(*expected))
    right = next(each for each in of_ranks if each)
    for own, value in zip(weights(*resumed), right, strict=True) if resumed[0] is not None else ():
        torch.testing.assert_close(own, value, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5)


@pytest.mark.parametrize(
    "config, dtype", [(SGD, torch.float32), (of_pytorch, torch.float32), (adam(bf16=True), torch.bfloat16)]
)
@pytest.mark.parametrize("saved_first", [False, True])
@on_ranks(2, timeout_s=40)
def test_a_state_before_the_first_step_changes_nothing(
    config: Any, dtype: torch.dtype, saved_first: bool, tmp_path: Path
) -> None:
    """Also with gradients at hand, which remain; and a checkpoint of before the first step is one."""

    def run(*, asks: bool) -> list[Tensor]:
        topology = running.topology_of_world(2, text="dp:2")
        model = wrapped(Net(0, dtype), "fsdp", topology)
        optimizer = build_optimizers(topology, {"text": model}, config)
        if asks and saved_first:
            save(tmp_path, optimizer)
            model = wrapped(Net(1, dtype), "fsdp", topology)
            optimizer = build_optimizers(topology, {"text": model}, config)
            load(tmp_path, optimizer)
        for step in range(2):
            model(torch.ones(4, 8) * (1 + topology.rank + step)).sin().sum().backward()
            if asks:
                optimizer.state_for_dcp()
            optimizer.step(tokens=8)
            optimizer.zero_grad()
        return weights(model, optimizer)

    for own, value in zip(run(asks=True), run(asks=False), strict=True):
        assert torch.equal(own, value)


@pytest.mark.parametrize("layout", ["tp:2,dp:2", "tp:2,pp:2"])
@pytest.mark.parametrize("config", [of_pytorch, AdamW(lr=0.02, eps=1e-3)])
@on_ranks(4, timeout_s=60)
def test_parts_of_a_megatron_model_have_keys_of_their_own(config: Any, layout: str, tmp_path: Path) -> None:
    def run(steps: range, *, resumes: bool = False) -> tuple[Any, JointOptimizer, list[float]]:
        topology = running.topology_of(text=layout)
        of = topology.layouts["text"]
        model = gpt.model(gpt.configuration(of, sequence_parallel=of.tp > 1), topology.collection("text"), tied=False)
        gpt.fill(model, gpt.whole(topology.rank, tied=False), False)
        if resumes:
            for p in model.parameters():
                p.data.zero_()
        optimizer, norms = build_optimizers(topology, {"text": model}, config), []
        if resumes:
            load(tmp_path, optimizer)
        for step in steps:
            optimizer.zero_grad()
            mine = running.backward(topology, model, batch_of(step))[1]
            norms.append(optimizer.step(tokens=running.tokens_of(topology, mine)).item())
        return model, optimizer, norms

    expected = run(range(4))
    save(tmp_path, run(range(2))[1])
    model, optimizer, norms = run(range(2, 4), resumes=True)
    assert norms == expected[-1][2:]
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected[0].parameters(), strict=True))
    rank, at = dist.get_rank(), optimizer.topology.layouts["text"].coordinate(dist.get_rank())
    stage = f".pp{at.pp}" if "pp" in layout else ""
    assert list(optimizer.state_for_dcp()["models"]) == [f"text.tp{at.tp}{stage}"], rank


@on_ranks(2, timeout_s=40)
def test_the_optimizer_alone_is_a_state_of_dcp(tmp_path: Path) -> None:
    """`dcp` takes whatever has a `state_dict`, and asks it."""
    topology = running.topology_of_world(2, vision="dp:2", text="tp:2")

    def fresh() -> JointOptimizer:
        torch.manual_seed(topology.rank)
        modules: Any = {"vision": nn.Linear(4, 4), "text": nn.Linear(4, 2, bias=False)}
        modules["text"].weight.tensor_model_parallel = True
        optimizer = build_optimizers(topology, modules, {"vision": AdamW(), "text": torch.optim.AdamW})
        for module in modules.values():
            (module(torch.ones(4)) * (1 + topology.rank)).sum().backward()
        optimizer.step(tokens=1)
        return optimizer

    saved, other = fresh(), fresh()
    before = saved.state_dict()
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    for state in other.by_module["text"].state.values():
        state["exp_avg"].zero_()
    dcp.load({"optimizer": other}, checkpoint_id=tmp_path)
    found = other.state_dict()
    assert list(found) == [f"vision.dp{topology.rank}", f"text.tp{topology.rank}"]
    flat = tree_leaves([before, found])
    for own, value in zip(flat[: len(flat) // 2], flat[len(flat) // 2 :], strict=True):
        assert torch.equal(own, value) if isinstance(own, Tensor) else own == value


@on_ranks(2, timeout_s=40)
def test_what_dcp_cannot_save_is_refused_on_all_ranks() -> None:
    topology = running.topology_of_world(2, vision="dp:1@0", text="dp:1@1")
    if topology.has("text"):
        config = gpt.configuration(topology.layouts["text"])
        model = running.wrapped(gpt.model(config, topology.collection("text"), tied=False), "megatron", topology)
    else:
        model = nn.Linear(2, 2)
    own = {"text" if topology.has("text") else "vision": model}
    optimizer = build_optimizers(topology, own, adam(), clip_grad=1.0)
    with pytest.raises(UserError, match=r"state of module `text`: found Megatron's optimizer, expected one of PyTorch"):
        optimizer.state_for_dcp()
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(4, 4)
    optimizer = build_optimizers(topology, {"text": fully_shard(model, mesh=topology.mesh("text")["dp"])}, SGD)
    hidden = {"updated": True, "state": {"weight": {"pair": (model.weight,)}}, "param_groups": []}
    with (
        mock.patch.object(type(optimizer.optimizers["text"]), "state_dict", return_value=hidden),
        pytest.raises(UserError, match=r"state.optimizers.text.state.weight.pair.0: found a DTensor in a tuple"),
    ):
        optimizer.state_for_dcp()
