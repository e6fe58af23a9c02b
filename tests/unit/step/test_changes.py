"""What happens to modules between `build_optimizers` and a step, and gradients that are not finite."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megatron_hetero import Graph, MicroBatchInputs, Runner, build
from megatron_hetero.base.errors import NotFiniteError, UserError
from megatron_hetero.checkpoint.library import load_checkpoint, save_checkpoint
from megatron_hetero.step.algorithms import SGD, AdamW
from megatron_hetero.step.gradients import finish_gradients
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.library_optimizers import build_optimizers
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running
from tests.unit.step.small import adam

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
BF16 = {"dtype": torch.bfloat16}


def net(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2).requires_grad_(False)).to(dtype)


def step(model: Any, optimizer: JointOptimizer, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (model(torch.ones(3, 4, dtype=next(model.parameters()).dtype)).float().sum() * scale).backward()
    optimizer.step(tokens=6)


def replace(model: Any) -> None:
    model[1].weight = nn.Parameter(torch.zeros_like(model[1].weight))


CHANGES: dict[str, Any] = {
    "0.weight was frozen": lambda model: model.requires_grad_(False),
    "1.bias was frozen": lambda model: model[1].bias.requires_grad_(False),
    "2.weight was unfrozen": lambda model: model[2].requires_grad_(True),
    "1.weight was replaced": replace,
    "1.more was added": lambda model: model[1].register_parameter("more", nn.Parameter(torch.zeros(2))),
    "3.weight was added": lambda model: model.append(nn.Linear(2, 2, bias=False)),
    "1.bias was removed": lambda model: model[1].register_parameter("bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["torch", "fsdp", "ours", "zero3"])
@on_ranks(2, timeout_s=40)
def test_a_change_is_refused_on_all_ranks(kind: str, change: str) -> None:
    """On one rank alone, too."""
    topology = running.topology_of_world(2, text="dp:2")
    config = {"ours": AdamW(), "zero3": AdamW(zero=3)}.get(kind, MOMENTUM)
    model: Any = net()
    if kind == "fsdp":
        fully_shard(model[1], mesh=topology.mesh("text")["dp"])
        fully_shard(model, mesh=topology.mesh("text")["dp"])
    optimizer = build_optimizers(topology, {"text": model}, config)
    step(model, optimizer)
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    if topology.rank == 1:
        CHANGES[change](model)
    with pytest.raises(UserError, match=rf"module `text`: {change} after `build_optimizers`"):
        optimizer.step(tokens=6)
    with pytest.raises(UserError, match=rf"module `text`: {change} after `build_optimizers`"):
        optimizer.finish_gradients(6)


@on_ranks(2, timeout_s=40)
def test_a_runner_refuses_a_change_before_it_runs() -> None:
    topology = build(Graph({"text": []}, width=4, dtype=torch.float32), text="pp:2")
    stage: Any = Stage(topology.rank)
    optimizer = build_optimizers(topology, {"text": stage}, AdamW())
    run = Runner(topology, {"text": stage}, optimizer=optimizer)
    batch = [MicroBatchInputs({"text": torch.ones(3, 4)})] * 2
    run(batch)
    optimizer.step(tokens=6)
    optimizer.zero_grad()
    if topology.rank == 1:
        stage.requires_grad_(False)
    run(batch, forward_only=True)
    with pytest.raises(UserError, match="module `text`: linear.weight was frozen"):
        run(batch)


class Stage(nn.Module):
    """One of two."""

    def __init__(self, stage: int):
        super().__init__()
        self.linear, self.first = nn.Linear(4, 4), stage == 0

    def hidden_shape(self, _: Any) -> tuple[int, int]:
        return 3, 4

    def forward(self, batch: Any, hidden: Any = None) -> Any:
        return self.linear(batch) if self.first else self.linear(hidden).square().sum()


@pytest.mark.parametrize("kind", ["plain", "fsdp", "ddp", "megatron", "zero1"])
@on_ranks(2, timeout_s=40)
def test_optimizers_are_built_again(kind: str) -> None:
    topology = running.topology_of_world(2, text="dp:2")
    config: Any = {"megatron": adam(), "zero1": adam(use_distributed_optimizer=True)}.get(kind, MOMENTUM)
    model = net()
    if kind in ("megatron", "zero1"):
        model.config = gpt.configuration(topology.layouts["text"])
    wrapped: Any = running.wrapped(model, kind, topology)
    optimizer = build_optimizers(topology, {"text": wrapped}, config)
    step(wrapped, optimizer)
    model[0].requires_grad_(False)
    model[2].requires_grad_(True)
    with pytest.raises(UserError, match=r"Call `build_optimizers` again.*moments start anew"):
        optimizer.finish_gradients(6)
    optimizer.zero_grad()
    if kind not in ("plain", "fsdp"):
        wrapped = running.wrapped(model, kind, topology)
    optimizer = build_optimizers(topology, {"text": wrapped}, config)
    before = [local(p).clone() for p in model.parameters()]
    for _ in range(2):
        step(wrapped, optimizer)
    same = [torch.equal(local(p), own) for own, p in zip(before, model.parameters(), strict=True)]
    assert same == [True] * 2 + [False] * 4


@on_ranks(2, timeout_s=40)
def test_modules_in_buffers_are_built_anew(tmp_path: Path) -> None:
    topology = running.topology_of_world(2, text="dp:2")
    model = net()
    optimizer = build_optimizers(topology, {"text": model}, AdamW(lr=0.1))
    step(model, optimizer)
    save_checkpoint(tmp_path, optimizer, 1)
    model[0].requires_grad_(False)
    with pytest.raises(UserError, match=r"Build the module anew, .* load a checkpoint"):
        step(model, optimizer)
    other = net()
    other[0].requires_grad_(False)
    optimizer = build_optimizers(topology, {"text": other}, AdamW(lr=0.1))
    assert load_checkpoint(tmp_path, optimizer)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    step(other, optimizer)
    assert torch.equal(model[0].weight, other[0].weight) and not torch.equal(model[1].weight, other[1].weight)


@on_ranks(2, timeout_s=40)
def test_weights_that_leave_the_buffers_of_an_optimizer_are_found() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), net()
    optimizer = build_optimizers(topology, {"text": model}, AdamW())
    step(model, optimizer)
    model[1].weight.data = model[1].weight.data.clone()
    with pytest.raises(UserError, match=r"1.weight was replaced"):
        step(model, optimizer)


LOADS: dict[str, Any] = {
    "data": lambda p: p.data.copy_(torch.full_like(p.data, 0.5)),
    "copy_": lambda p: p.copy_(torch.full_like(p, 0.5)),
    "scaled": lambda p: p.mul_(1.25),
}
MASTERS: dict[str, Any] = {
    "fsdp": adam(bf16=True),
    "plain": adam(bf16=True),
    "ours": AdamW(lr=0.02),
    "sgd": SGD(lr=0.02),
    "zero3": AdamW(lr=0.02, zero=3),
    "zero1": adam(bf16=True, use_distributed_optimizer=True),
    "megatron": adam(bf16=True),
}


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("kind", MASTERS)
@on_ranks(2, timeout_s=40)
def test_weights_changed_under_masters_are_found(kind: str, how: str) -> None:
    """After some steps, which do not trip it; and it goes on after `reload_model_params`."""
    topology, config = running.topology_of_world(2, text="dp:2"), MASTERS[kind]
    model: Any = net(torch.bfloat16)
    if kind in ("zero1", "megatron"):
        model = gpt.model(
            gpt.configuration(topology.layouts["text"], bf16=True), topology.collection("text"), tied=False
        )
        model = model.bfloat16()
    wrapped: Any = running.wrapped(model, kind if kind not in ("ours", "sgd", "zero3") else "plain", topology)
    optimizer = build_optimizers(topology, {"text": wrapped}, config)

    def run() -> None:
        if kind in ("zero1", "megatron"):
            optimizer.zero_grad()
            mine = running.backward(topology, wrapped, gpt.samples(4))[1]
            optimizer.step(tokens=running.tokens_of(topology, mine))
        else:
            step(wrapped, optimizer)

    for _ in range(3):
        run()
    with torch.no_grad():
        for p in wrapped.parameters():
            LOADS[how](p)
    with pytest.raises(UserError, match="module `text`: its weights have changed.*`reload_model_params"):
        run()
    optimizer.wait_for_weights()
    changed = [local(p).clone() for p in wrapped.parameters()]
    optimizer.reload_model_params()
    optimizer.step(tokens=6)  # The gradients are still to be summed.
    assert max((local(p) - own).abs().max().item() for p, own in zip(wrapped.parameters(), changed, strict=True)) < 0.1
    run()


def local(p: Any) -> Tensor:
    return (p.to_local() if hasattr(p, "to_local") else p).detach().float()


@pytest.mark.parametrize("kind", ["torch", "ddp", "fsdp", "masters", "ours", "sgd", "zero3", "megatron", "zero1"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@on_ranks(2, timeout_s=40)
def test_gradients_that_are_not_finite_are_not_applied(kind: str, value: float) -> None:
    """On one rank alone; the run skips the step, and goes on as if it had not been."""
    topology = running.topology_of_world(2, text="dp:2")
    config: Any = {
        "ours": AdamW(lr=0.1),
        "sgd": SGD(lr=0.1),
        "zero3": AdamW(lr=0.1, zero=3),
        "megatron": adam(),
        "masters": adam(bf16=True),
        "zero1": adam(use_distributed_optimizer=True),
    }.get(kind, partial(torch.optim.AdamW, lr=0.1))

    def run(*, faulty: bool) -> list[Tensor]:
        model: Any
        if kind in ("megatron", "zero1"):
            torch.manual_seed(0)
            config_of = gpt.configuration(topology.layouts["text"])
            model = Outer(gpt.model(config_of, topology.collection("text"), tied=False))
            gpt.fill(model.inner, gpt.whole(0, tied=False), False)
            model.inner = running.wrapped(model.inner, kind, topology)
        else:
            model = running.wrapped(net(torch.bfloat16 if kind == "masters" else torch.float32), kind, topology)
        optimizer = build_optimizers(topology, {"text": model}, config)
        step(model, optimizer)
        if faulty:
            before = [local(p).clone() for p in model.parameters()]
            with pytest.raises(NotFiniteError, match=r"module text, parameter .*zero_grad") as found:
                step(model, optimizer, value if topology.rank == 1 else 1.0)
            assert kind in ("ddp", "fsdp", "zero3", "megatron", "zero1") or "on rank 1" in str(found.value), found.value
            optimizer.wait_for_weights()
            assert all(torch.equal(local(p), own) for p, own in zip(model.parameters(), before, strict=True))
        step(model, optimizer)
        optimizer.wait_for_weights()
        return [local(p).clone() for p in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(run(faulty=True), run(faulty=False), strict=True))


class Outer(nn.Module):
    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        [sample] = gpt.samples(1)
        return gpt.loss_of(self.inner, sample) * x.mean()


@on_ranks(2, timeout_s=40)
def test_without_the_check_they_are_applied() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), net()
    optimizer = build_optimizers(topology, {"text": model}, MOMENTUM, error_if_nonfinite=False)
    step(model, optimizer, float("nan"))
    assert model[0].weight.isnan().all()
    with pytest.raises(
        UserError, match="build_optimizers: error_if_nonfinite: found True on rank 0 and False on rank 1"
    ):
        build_optimizers(topology, {"text": net()}, MOMENTUM, error_if_nonfinite=topology.rank == 0)


@on_ranks(2, timeout_s=40)
def test_an_optimizer_may_drop_gradients_in_its_update() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), net()
    optimizer = build_optimizers(topology, {"text": model}, MOMENTUM)
    optimizer.by_module["text"].register_step_post_hook(lambda *_: model.zero_grad())
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step(tokens=6)


@on_ranks(2, timeout_s=40)
def test_finished_gradients_are_finite() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), net()
    optimizer = build_optimizers(topology, {"text": model}, MOMENTUM)

    def backward(value: float) -> None:
        model.zero_grad()
        (model(torch.ones(3, 4)).sum() * (value if topology.rank else 1.0)).backward()

    for finish in (optimizer.finish_gradients, partial(finish_gradients, topology, {"text": model})):
        backward(float("inf"))
        with pytest.raises(NotFiniteError, match="found a gradient of module text, parameter 0.weight, .* on rank 1"):
            finish(6)
        with pytest.raises(UserError, match="they are finished already"):
            finish(6)
        backward(1.0)
        finish(6)
        optimizer.step(tokens=None)
        optimizer.zero_grad()
    backward(float("nan"))
    finish_gradients(topology, {"text": model}, 6, error_if_nonfinite=False)
    assert model[0].weight.grad is not None and model[0].weight.grad.isnan().all()
