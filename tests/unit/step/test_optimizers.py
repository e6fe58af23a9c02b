"""`build_optimizers` against one optimizer of PyTorch in one process: several steps of two modules that are clipped
together, in layouts, wrappers and kinds of optimizers.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.axes import Axis, View
from megatron_hetero.layout.communicators import GroupNeeds
from megatron_hetero.layout.layout import Layout
from megatron_hetero.step.algorithms import SGD, AdamW
from megatron_hetero.step.gradients import finish_gradients
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.library_optimizers import build_optimizers
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running
from tests.unit.step.small import (
    CLIP,
    DECAY,
    RATE,
    ROWS,
    STEPS,
    adam,
    batch_of,
    loss_of_rows,
    of_pytorch,
    pictures,
    vision,
    whole,
)


def ours(**options: Any) -> AdamW:
    return AdamW(lr=RATE, weight_decay=DECAY, eps=1e-3, **options)


def alone(rank: int, tied: bool, frozen: bool) -> tuple[list[float], nn.Module, gpt.GPTModel]:
    """Norms of each step and the trained modules, in one process."""
    images, text = vision(), gpt.whole(rank, tied=tied)
    images.requires_grad_(not frozen)
    trained = [p for module in (images, text) for p in module.parameters() if p.requires_grad]
    optimizer, norms = of_pytorch(trained), []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(step)
        losses = [gpt.loss_of(text, sample) for sample in batch]
        if not frozen:
            losses.append(loss_of_rows(images, pictures(step)))
        (torch.stack(losses).sum() / sum(sample.supervised for sample in batch)).backward()
        norms.append(nn.utils.clip_grad_norm_(trained, CLIP).item())
        optimizer.step()
    return norms, images, text


def require_weights(topology: Topology, model: Any, reference: gpt.GPTModel, tied: bool, optimizer: Any) -> None:
    part = model if isinstance(model, gpt.GPTModel) else model.module
    for name, (own, theirs) in gpt.counterparts(part, reference, tied).items():
        found = whole(own, optimizer)
        right = gpt.shard(theirs, own, part.pg_collection)
        assert gpt.apart(found, right) < 1e-5, (topology.rank, name, gpt.apart(found, right))


CASES = [
    ("dp:4", "plain", "tp:2,dp:2", "plain", adam(), True, False),
    ("dp:4", "fsdp", "tp:2,dp:2", "plain", adam(), False, False),
    ("dp:4", "plain", "tp:2,dp:2", "megatron", adam(), True, False),
    ("dp:2@0-1", "plain", "tp:2@2-3", "megatron", adam(), True, False),
    ("dp:2@0-1", "plain", "tp:2@2-3", "plain", adam(), True, True),
    ("dp:4", "ddp", "pp:2,dp:2", "plain", of_pytorch, True, False),
    ("dp:1@0", "plain", "tp:2,pp:2", "megatron", adam(), True, False),
    ("dp:4", "fsdp", "tp:2,dp:2", "zero1", adam(use_distributed_optimizer=True), True, False),
    ("dp:4", "fsdp", "pp:2,dp:2", "zero1", adam(use_distributed_optimizer=True), True, False),
    ("dp:4", "plain", "dp:4", "fsdp", of_pytorch, False, False),
    ("dp:4", "plain", "tp:2,dp:2", "plain", ours(), True, False),
    ("dp:4", "plain", "tp:2,dp:2", "plain", ours(zero=2), False, False),
    ("dp:4", "plain", "tp:2,dp:2", "plain", ours(zero=3), False, False),
    ("dp:2@0-1", "plain", "tp:2@2-3", "plain", ours(), True, True),
    ("dp:4", "plain", "pp:2,dp:2", "plain", ours(), True, False),
    ("dp:4", "plain", "pp:2,dp:2", "plain", ours(zero=3), True, False),
    ("dp:1@0", "plain", "tp:2,pp:2", "plain", ours(offload=True), True, False),
    ("dp:4", "ddp", "dp:4", "plain", {"vision": of_pytorch, "text": ours(zero=3)}, True, False),
    ("dp:2@0-1", "plain", "tp:2@2-3", "megatron", {"vision": ours(), "text": adam()}, True, False),
]


@pytest.mark.parametrize("images, image_wrapper, text, text_wrapper, config, tied, frozen", thinned(CASES, 7))
@on_ranks(4, timeout_s=40)
def test_steps_norms_and_weights_are_those_of_one_process(
    images: str, image_wrapper: str, text: str, text_wrapper: str, config: Any, tied: bool, frozen: bool
) -> None:
    train(images, image_wrapper, text, text_wrapper, config, tied, frozen)


@pytest.mark.parametrize(
    "config, placement", thinned(product([ours(), adam()], [("dp:2@0-1", "tp:2@2-3"), ("dp:4", "tp:2,pp:2")]), 3)
)
@on_ranks(4, timeout_s=60, fixture="rules_pools")
def test_the_same_under_nccls_rules(config: Any, placement: tuple[str, str]) -> None:
    images, text = placement
    train(images, "plain", text, "plain", config, True, False)


def train(images: str, image_wrapper: str, text: str, text_wrapper: str, config: Any, tied: bool, frozen: bool) -> None:
    topology = running.topology_of(vision=images, text=text)
    norms, own_images, own_text = alone(topology.rank, tied, frozen)
    modules, reference = build(topology, image_wrapper, text_wrapper, tied, frozen)
    optimizer = build_optimizers(topology, modules, config, clip_grad=CLIP)
    assert ("vision" in optimizer.by_module) == (topology.has("vision") and not frozen)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(step)
        if topology.has("vision") and not frozen:
            layout = topology.layouts["vision"]
            rows = pictures(step)[layout.replica_of(topology.rank) :: layout.dp]
            loss_of_rows(modules["vision"], rows).backward()
        mine = running.backward(topology, modules["text"], batch)[1] if topology.has("text") else 0
        norm = optimizer.step(tokens=running.tokens_of(topology, mine))
        assert gpt.apart(optimizer.norms.square().sum().sqrt(), norm) < 1e-6
        assert norm > CLIP, "the test would not see that gradients are clipped"
        assert abs(norm.item() - norms[step]) < 1e-5 * norms[step], (step, norm.item(), norms)
    if topology.has("text"):
        require_weights(topology, modules["text"], own_text, tied, optimizer)
    if topology.has("vision"):
        for own, theirs in zip(modules["vision"].parameters(), own_images.parameters(), strict=True):
            assert gpt.apart(whole(own, optimizer), theirs) < 1e-5
    assert reference is not own_text


def build(
    topology: Topology, image_wrapper: str, text_wrapper: str, tied: bool, frozen: bool
) -> tuple[dict[str, Any], gpt.GPTModel]:
    modules, reference = {}, gpt.whole(topology.rank, tied=tied)
    if topology.has("vision"):
        images = vision()
        if image_wrapper == "plain" and topology.layouts["vision"].replica_of(topology.rank):
            images = vision(seed=topology.rank)  # Replicas get the weights of the first.
        modules["vision"] = running.wrapped(images.requires_grad_(not frozen), image_wrapper, topology, "vision")
    if topology.has("text"):
        layout = topology.layouts["text"]
        part = gpt.model(
            gpt.configuration(layout, sequence_parallel=layout.tp > 1), topology.collection("text"), tied=tied
        )
        gpt.fill(part, reference, tied)
        modules["text"] = running.wrapped(part, text_wrapper, topology)
    return modules, reference


@on_ranks(2, timeout_s=40)
def test_a_learning_rate_scheduler_of_pytorch_drives_it() -> None:
    topology = running.topology_of_world(2, vision="dp:1@0", text="dp:1@1")
    weight = nn.Linear(2, 2)
    name = "vision" if topology.rank == 0 else "text"
    optimizer = build_optimizers(topology, {name: weight}, partial(torch.optim.SGD, lr=1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = weight.weight.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        weight.weight.sum().backward()
        optimizer.step(tokens=4)
        scheduler.step()
        before -= 0.25 * 0.5**step
        assert torch.allclose(weight.weight, before)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    with pytest.raises(UserError, match="found no modules, expected"):
        optimizer.load_state_dict({})


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW, adam()])
@on_ranks(2, timeout_s=40)
def test_one_cycle_by_its_defaults(kind: Any) -> None:
    """It cycles momentum, also on a rank that trains nothing."""
    topology = running.topology_of_world(2, vision="dp:1@0", text="dp:1@1")
    weight = nn.Linear(2, 2).requires_grad_(topology.rank == 0)
    optimizer = build_optimizers(topology, {"vision" if topology.rank == 0 else "text": weight}, kind)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    seen = []
    for _ in range(9):
        optimizer.zero_grad()
        seen += [group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups]
        weight.weight.sum().backward() if topology.rank == 0 else None
        optimizer.step(tokens=1)
        scheduler.step()
    assert not seen if topology.rank else (min(seen) == pytest.approx(0.85, abs=0.01) and max(seen) > 0.94)


@on_ranks(2, timeout_s=40)
def test_optimizers_with_other_settings_on_other_ranks_are_refused() -> None:
    topology = running.topology_of_world(2, text="dp:2")
    with pytest.raises(UserError, match="build_optimizers: clip_grad: found .* on rank 0 and .* on rank 1"):
        build_optimizers(topology, {"text": nn.Linear(2, 2)}, adam(), clip_grad=1 - topology.rank)
    others: tuple[dict[str, Any], ...] = ({"zero": 2}, {"lr": 0.5}, {"lr": lambda _: 0.5}, {"betas": (0.5, 0.5)})
    for own in others:
        config = AdamW(**own if topology.rank else {})
        with pytest.raises(
            UserError, match=f"build_optimizers: {next(iter(own))} of `text`: found .* on rank 0 and .*"
        ):
            build_optimizers(topology, {"text": nn.Linear(2, 2)}, config)


@pytest.mark.parametrize(
    "setting",
    [
        {"zero": 4}, {"zero": "3"}, {"master": "fp32"}, {"gradients": "float16"}, {"moments": "int8"}, {"lr": -1.0},
        {"lr": float("nan")}, {"lr": "1e-4"}, {"betas": (0.9,)}, {"betas": (0.9, 1.0)}, {"eps": -1e-8},
        {"weight_decay": float("inf")},
    ],
)  # fmt: skip
def test_settings_that_there_are_not(setting: dict[str, Any]) -> None:
    [name] = setting
    for kind in (AdamW, SGD) if name in ("zero", "master", "gradients", "lr") else (AdamW,):
        with pytest.raises(
            UserError, match=f"{kind.__name__}: {name}: found .*, expected (one of|a finite|two numbers)"
        ):
            kind(**setting)


@on_ranks(2, timeout_s=40)
def test_wrong_uses_are_errors_on_all_ranks() -> None:
    topology = running.topology_of_world(2, vision="dp:1@0", text="dp:1@1")
    name, sgd = "vision" if topology.rank == 0 else "text", partial(torch.optim.SGD, lr=1.0)
    with pytest.raises(UserError, match=r"modules on rank 1: found no module `text`, .*: text"):
        build_optimizers(topology, {name: nn.Linear(2, 2)} if topology.rank == 0 else {}, sgd)
    with pytest.raises(UserError, match="found no module|found a module `vision`"):
        build_optimizers(topology, {"vision": nn.Linear(2, 2)}, sgd)
    with pytest.raises(UserError, match="config of `text`: found .*vision, .*`text`"):
        build_optimizers(topology, {name: nn.Linear(2, 2)}, {"vision": sgd})
    with pytest.raises(UserError, match="config of `vision`: found str"):
        build_optimizers(topology, {name: nn.Linear(2, 2)}, "adam")
    configs = {"vision": OptimizerConfig(clip_grad=1.0), "text": OptimizerConfig(clip_grad=2.0)}
    with pytest.raises(UserError, match=r"clip_grad: found 1\.0 and 2\.0"):
        build_optimizers(topology, {name: nn.Linear(2, 2)}, configs)
    config = OptimizerConfig(lr=1.0, use_distributed_optimizer=True)
    with pytest.raises(UserError, match=r"`vision`: found config.use_distributed_optimizer"):
        build_optimizers(topology, {name: nn.Linear(2, 2)}, config)
    optimizer = build_optimizers(topology, {name: nn.Linear(2, 2)}, sgd)
    with pytest.raises(UserError, match="tokens: found 0"):
        optimizer.step(tokens=0)


@on_ranks(2, timeout_s=40)
def test_gradients_are_finished_once() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(2, 2, bias=False)
    optimizer = build_optimizers(topology, {"text": model}, partial(torch.optim.SGD, lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        model.weight.sum().backward()
        with pytest.raises(UserError, match="gradients of `text`: they are not finished"):
            optimizer.step(tokens=None)
        with pytest.raises(UserError, match="gradients of `text`: they are not finished"):
            optimizer.update(0.5)
        with pytest.raises(UserError, match="gradients: tokens: found 2 on rank 0 and 3 on rank 1"):
            optimizer.step(tokens=2 + topology.rank)
        finish_gradients(topology, {"text": model}, 2)
        with pytest.raises(UserError, match="gradients of `text`: they are finished already"):
            optimizer.step(tokens=2)
        with pytest.raises(UserError, match="gradients of `text`: they are finished already"):
            finish_gradients(topology, {"text": model}, 2)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = model.weight.detach().clone()
        assert optimizer.step(tokens=None) == pytest.approx(1.0)
        torch.testing.assert_close(model.weight, before - 0.5)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("wrapper", ["plain", "fsdp", "zero1"])
@on_ranks(2, timeout_s=40)
def test_gradients_are_applied_once(wrapper: str, clip: float) -> None:
    """A second step, or one whose gradients were added to those of the step before, is refused."""
    topology = running.topology_of_world(2, text="dp:2")
    part = gpt.model(gpt.configuration(topology.layouts["text"]), topology.collection("text"))
    model = running.wrapped(part, wrapper, topology)
    config = adam(use_distributed_optimizer=wrapper == "zero1") if wrapper == "zero1" else of_pytorch
    optimizer = build_optimizers(topology, {"text": model}, config, clip_grad=clip)
    for _ in range(2):
        running.backward(topology, model, batch_of(0))
        optimizer.step(tokens=7)
        with pytest.raises(UserError, match="gradients of `text`: .*the step before"):
            optimizer.step(tokens=7)
        with pytest.raises(UserError, match="gradients of `text`: .*the step before"):
            optimizer.step(tokens=None)
        running.backward(topology, model, batch_of(1))
        with pytest.raises(UserError, match=r"`zero_grad\(\)`"):
            optimizer.step(tokens=7)
        optimizer.zero_grad()


@on_ranks(2, timeout_s=40)
def test_an_evaluation_before_a_step_leaves_no_weights_behind() -> None:
    """After a forward pass alone FSDP2 keeps whole weights, which the next one would take."""
    topology, found = running.topology_of_world(2, text="dp:2"), []
    for evaluates in (False, True):
        model = running.wrapped(vision(), "fsdp", topology)
        optimizer, losses = build_optimizers(topology, {"text": model}, of_pytorch), []
        for step in range(3):
            losses.append(loss_of_rows(model, pictures(step)))
            losses[-1].backward()
            if evaluates:
                with torch.no_grad():
                    model(pictures(step))
            optimizer.step(tokens=ROWS)
            optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    assert found[0] == found[1]


@on_ranks(4, timeout_s=40)
def test_replicas_of_shards_get_the_weights_of_the_first() -> None:
    """Along axes that PyTorch's mesh does not have."""
    for layout, sharded in (("sp:2,dp:2", "dp"), ("tp:2,dp:2", "tp")):
        topology = running.topology_of(text=layout)
        torch.manual_seed(topology.rank)
        model: Any = nn.Sequential(nn.Linear(8, 8))
        mesh = topology.mesh("text")[sharded]
        if sharded == "tp":
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
        else:
            fully_shard(model, mesh=mesh)
        build_optimizers(topology, {"text": model}, of_pytorch)
        mine = [torch.cat([p.to_local().flatten() for p in model.parameters()])]
        every: list[Any] = [None] * 4
        dist.all_gather_object(every, mine[0].detach())
        assert len({tuple(each.tolist()) for each in every}) == 2, layout


@on_ranks(2, timeout_s=40)
def test_megatrons_ddp_inside_a_module_of_the_user() -> None:
    """Its weights move as if it were the whole module; what trains beside it is refused."""
    topology = running.topology_of_world(2, text="dp:2")
    trained = []
    for deep in (False, True):
        part = gpt.model(gpt.configuration(topology.layouts["text"]), topology.collection("text"))
        gpt.fill(part, gpt.whole(topology.rank))
        ddp = running.wrapped(part, "megatron", topology)
        model = nn.ModuleDict({"language": ddp}) if deep else ddp
        optimizer = build_optimizers(topology, {"text": model}, adam())
        for step in range(2):
            running.backward(topology, ddp, batch_of(step))
            optimizer.step(tokens=7)
            optimizer.zero_grad()
        trained.append([p.detach().clone() for p in part.parameters()])
    assert all(torch.equal(*each) for each in zip(*trained, strict=True))
    beside = nn.ModuleDict({"language": ddp, "projector": nn.Linear(2, 2)})
    with pytest.raises(UserError, match=r"found Megatron's .* not around projector\.weight"):
        build_optimizers(topology, {"text": beside}, adam())


@on_ranks(2, timeout_s=40)
def test_weights_in_fp64() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(4, 4, bias=False, dtype=torch.float64)
    optimizer = build_optimizers(topology, {"text": model}, partial(torch.optim.SGD, lr=1.0), clip_grad=1.0)
    before = model.weight.detach().clone()
    model.weight.sum().backward()
    assert optimizer.step(tokens=2) == 4.0
    torch.testing.assert_close(model.weight, before - 0.25, rtol=1e-5, atol=1e-6)


@on_ranks(2, timeout_s=40)
def test_weights_in_bfloat16_are_updated_in_fp32() -> None:
    """Each update is too small for them."""
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    config = OptimizerConfig(optimizer="sgd", lr=2**-10, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, bf16=True)
    optimizer = build_optimizers(topology, {"text": model}, config)
    for _ in range(4):
        optimizer.zero_grad()
        model.weight.sum().backward()
        assert optimizer.step(tokens=2) == 4.0
    assert torch.equal(model.weight, torch.full((4, 4), 1 - 2**-8, dtype=torch.bfloat16))
    nn.init.constant_(model.weight, 3.0)  # As by a checkpoint.
    optimizer.reload_model_params()
    optimizer.zero_grad()
    model.weight.sum().backward()
    optimizer.step(tokens=2)
    assert torch.equal(model.weight, torch.full((4, 4), 3.0, dtype=torch.bfloat16))
    with pytest.raises(UserError, match=r"found 16-bit parameters \(weight\) and config\.bf16 False"):
        build_optimizers(topology, {"text": model}, OptimizerConfig(lr=1.0))


@pytest.mark.parametrize("wrapper", thinned(["zero1", "plain", "megatron"], 2))
@on_ranks(4, timeout_s=40)
def test_a_model_in_bfloat16(wrapper: str) -> None:
    """Its norms are near those of fp32, and so is what it has learnt."""
    topology = running.topology_of(text="tp:2,dp:2")
    norms, _, expected = alone(topology.rank, False, True)
    start = gpt.whole(topology.rank)
    layout = topology.layouts["text"]
    narrow = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    config = gpt.configuration(layout, sequence_parallel=True, **narrow)
    part = gpt.model(config, topology.collection("text"))
    gpt.fill(part, start)
    model = running.wrapped(part, wrapper, topology)
    settings = adam(bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=wrapper == "zero1")
    optimizer = build_optimizers(topology, {"vision": None, "text": model}, settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = running.backward(topology, model, batch_of(step))[1]
        norm = optimizer.step(tokens=running.tokens_of(topology, mine))
        assert abs(norm.item() - norms[step]) < 0.02 * norms[step]
    # PyTorch's norms keep fp32 weights.
    assert {p.dtype for p in part.parameters()} == {torch.bfloat16, torch.float32}
    first, off, moved = dict(start.named_parameters()), [], []
    for name, (own, theirs) in gpt.counterparts(part, expected).items():
        off.append((own.float() - gpt.shard(theirs, own, part.pg_collection)).norm())
        moved.append(gpt.shard(theirs - first[name], own, part.pg_collection).norm())
    # Adam makes as much of small gradients as of large ones: it is all elements together that are near.
    assert torch.stack(off).norm() < 0.15 * torch.stack(moved).norm()
    for p in part.parameters():
        p.detach().add_(1.0)  # Weights of another run; the optimizer's own copies would undo it.
    optimizer.reload_model_params()
    other = {name: p.detach().clone() for name, p in part.named_parameters()}
    optimizer.zero_grad()
    running.backward(topology, model, batch_of(0))
    optimizer.step(tokens=1)
    assert all((p - other[name]).abs().max() < 0.1 for name, p in part.named_parameters())


@on_ranks(2, timeout_s=40)
def test_replicas_that_differ_are_found() -> None:
    topology, module = running.topology_of_world(2, text="dp:2"), nn.Linear(2, 2)
    module.bias.requires_grad_(topology.rank == 0)
    message = r"`text`: .*parameter 1: found `bias`, .* on rank 0 and nothing on rank 1"
    with pytest.raises(UserError, match=message):
        build_optimizers(topology, {"text": module}, partial(torch.optim.SGD, lr=1.0))
    dist.barrier()


@on_ranks(4, timeout_s=40)
def test_views_that_sum_over_other_ranks_are_refused() -> None:
    """Experts of all ranks would become those of the first."""
    blocks = View("blocks", (Axis("ep", "experts"), Axis("edp", "samples")))
    for text, fits in [("dp:4,ep:2", False), ("tp:2,dp:2", False), ("tp:2,dp:2,ep:2", True), ("dp:4", True)]:
        topology = Topology.build({"text": Layout.parse(text, 4, views=[blocks])}, running.platform(), megatron=[])
        model, sgd = nn.Linear(2, 2), partial(torch.optim.SGD, lr=1.0)
        if fits:
            build_optimizers(topology, {"text": model}, sgd)
            continue
        for refused in (
            partial(build_optimizers, topology, {"text": model}, sgd),
            partial(finish_gradients, topology, {"text": model}, 1),
        ):
            with pytest.raises(UserError, match=f"found layout {text}@0-3, .*`blocks`"):
                refused()


@on_ranks(2, timeout_s=40)
def test_ends_that_share_a_parameter_are_compared() -> None:
    """Each would wait for the other, if only one trained it or knew of it."""
    topology, sgd = running.topology_of_world(2, text="pp:2"), partial(torch.optim.SGD, lr=1.0)

    def end(*, trained: bool = True, shared: bool = True) -> nn.Module:
        module = nn.Linear(2, 2, bias=False)
        weight: Any = module.weight.requires_grad_(trained)
        weight.shared_embedding, weight.shared = shared, topology.rank == 1
        return module

    message = "parameter 0: found trained copy .* on rank 0 and {} .* on rank 1"
    with pytest.raises(UserError, match=message.format("frozen copy")):
        build_optimizers(topology, {"text": end(trained=topology.rank == 0)}, sgd)
    with pytest.raises(UserError, match=message.format("none")):
        build_optimizers(topology, {"text": end(shared=topology.rank == 0)}, sgd)
    for trained in (True, False):
        optimizer = build_optimizers(topology, {"text": end(trained=trained)}, sgd)
        assert [slices[0].name for slices in optimizer.modules[0].maps[0].values()] == ["text.stage 0: weight"]
    layouts = {"text": topology.layouts["text"]}
    without = Topology.build(layouts, topology.platform, megatron=[])
    with pytest.raises(UserError, match="no group with the other end of the pipeline. Build the topology with"):
        build_optimizers(without, {"text": end()}, sgd)
    needs = {"text": GroupNeeds(tied=True)}
    build_optimizers(Topology.build(layouts, topology.platform, megatron=[], needs=needs), {"text": end()}, sgd)


NARROW = [{}, {"master": "split"}, {"master": "none"}, {"moments": "bfloat16"}, {"moments": "8bit"}, {"offload": True}]


@pytest.mark.parametrize("options", NARROW, ids=str)
@pytest.mark.parametrize("zero", [1, 3])
@on_ranks(2, timeout_s=40)
def test_numbers_of_states(options: dict[str, Any], zero: int) -> None:
    """Split masters are fp32 masters bit by bit; a state in fewer bits is near them. A resumed run goes on alike."""
    topology = running.topology_of_world(2, text="dp:2")

    def trained(own: dict[str, Any], *, resumes: bool = False) -> Tensor:
        torch.manual_seed(0)
        model, states = vision().bfloat16(), []
        optimizer = build_optimizers(topology, {"text": model}, ours(zero=zero, **own), clip_grad=CLIP)
        for step in range(6):
            if resumes and step == 3:
                states.append(optimizer.state_dict())
                model = vision(seed=7).bfloat16()
                optimizer = build_optimizers(topology, {"text": model}, ours(zero=zero, **own), clip_grad=CLIP)
                optimizer.load_state_dict(states[0])
            loss_of_rows(model, pictures(step)[topology.rank :: 2].bfloat16()).backward()
            optimizer.step(tokens=ROWS)
            optimizer.zero_grad()
        return torch.cat([whole(p, optimizer).detach().flatten() for p in model.parameters()])

    expected, found = trained({}), trained(options)
    if options.keys() <= {"offload"} or options.get("master") == "split":
        assert torch.equal(expected, found)
    start = torch.cat([p.detach().flatten() for p in vision().bfloat16().parameters()])
    assert (found - expected).float().norm() < 0.2 * (expected - start).float().norm()
    assert torch.equal(found, trained(options, resumes=True))


@pytest.mark.parametrize(
    "options, first, fused", thinned(product(NARROW, [torch.bfloat16, torch.float32], [False, True]), 3), ids=str
)
@on_ranks(2, timeout_s=40)
def test_weights_of_two_dtypes(first: torch.dtype, options: dict[str, Any], fused: bool) -> None:
    """Those in fp32 are their own masters, whatever the others have; a resumed run goes on alike."""
    topology = running.topology_of_world(2, text="dp:2")
    second = torch.float32 if first == torch.bfloat16 else torch.bfloat16

    def fresh(seed: int) -> tuple[list[nn.Parameter], JointOptimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 20).to(first), nn.LayerNorm(20).to(second), nn.Linear(20, 8).to(first))
        own = ours(**options)
        return list(model.parameters()), build_optimizers(topology, {"text": model}, own, clip_grad=0.0)

    weights, optimizer = fresh(0)
    masters = [nn.Parameter(p.detach().float()) for p in weights]
    expected, start = of_pytorch(masters), [p.detach().clone() for p in masters]
    for step in range(4):
        if step == 2:
            state = optimizer.state_dict()
            weights, optimizer = fresh(1)
            optimizer.load_state_dict(state)
        random = torch.Generator().manual_seed(step)
        drawn = [[torch.randn(p.shape, generator=random).bfloat16() for p in weights] for _ in range(2)]
        mine = drawn[topology.rank]
        torch.stack([(p.float() * g.float()).sum() for p, g in zip(weights, mine, strict=True)]).sum().backward()
        with patch.object(Platform, "compiles", fused), torch.compiler.set_stance("force_eager"):
            optimizer.step(tokens=2)
        optimizer.zero_grad()
        for master, one, other in zip(masters, *drawn, strict=True):
            master.grad = (one.float() + other.float()) / 2
        expected.step()
    for found, master in zip(weights, masters, strict=True):
        exact = found.dtype == torch.float32 and "moments" not in options
        torch.testing.assert_close(found.float(), master, rtol=1e-6, atol=1e-6 if exact else RATE)
    assert (masters[-1] - start[-1]).abs().max() > 3 * RATE


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("older", [False, True])
@on_ranks(2, timeout_s=40)
def test_parameters_without_gradients_in_shards(zero: Any, older: bool) -> None:
    """Others on each rank, also where FSDP2 leaves them out of what it reduces, as PyTorch before 2.13 does."""
    topology, flag = running.topology_of_world(2, text="dp:2"), "set_reduce_scatter_unused_params"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[1](x).sum() + (self.parts[0](x).sum() if topology.rank == 0 else 0)

    model = Model()
    hides = older and hasattr(FSDPModule, flag)
    with patch.object(FSDPModule, flag) if hides else nullcontext():
        if hides:
            delattr(FSDPModule, flag)
        optimizer = build_optimizers(topology, {"text": model}, AdamW(lr=0.5, zero=zero, eps=1e-3))
    before = [whole(p, optimizer).detach().clone() for p in model.parameters()]
    for _ in range(2):
        model(torch.ones(1, 4)).backward()
        model(torch.ones(1, 4)).backward()
        norm = optimizer.step(tokens=2)
        assert norm.item() == pytest.approx((16 + 16 * 4) ** 0.5)
        optimizer.zero_grad()
    moved = [(own - whole(p, optimizer)).abs().amax().item() for own, p in zip(before, model.parameters(), strict=True)]
    assert moved == pytest.approx([1.0, 1.0, 0.0], abs=1e-2)


@on_ranks(2, timeout_s=40)
def test_a_rank_that_owns_nothing() -> None:
    """The first has all elements: weights are cut at multiples of 128."""
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(8, 4, bias=False)
    optimizer = build_optimizers(topology, {"text": model}, AdamW(lr=1.0))
    own, before = optimizer.sharded["text"], model.weight.detach().clone()
    assert bool(own.param_groups) == (topology.rank == 0) and "betas" in optimizer.defaults
    model.weight.sum().backward()
    with patch.object(Platform, "compiles", True), torch.compiler.set_stance("force_eager"):
        optimizer.step(tokens=2)
    torch.testing.assert_close(model.weight, before - 1.0)


@on_ranks(2, timeout_s=40)
def test_plain_sgd() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(4, 4, bias=False)
    optimizer = build_optimizers(topology, {"text": model}, SGD(lr=1.0))
    before = model.weight.detach().clone()
    model.weight.sum().backward()
    assert optimizer.step(tokens=2) == 4.0
    assert torch.equal(model.weight, before - 1.0)


@on_ranks(2, timeout_s=40)
def test_what_an_optimizer_of_shards_refuses() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(4, 4)
    wrapped = running.wrapped(nn.Linear(4, 4), "fsdp", topology)
    with pytest.raises(UserError, match=r"`text`: found a DTensor \(weight\)"):
        build_optimizers(topology, {"text": wrapped}, ours())
    wrapped = running.wrapped(nn.Linear(4, 4), "ddp", topology)
    with pytest.raises(UserError, match="found PyTorch's DistributedDataParallel"):
        build_optimizers(topology, {"text": wrapped}, ours())
    with pytest.raises(UserError, match=r"found torch\.float64 parameters \(weight\), expected float32 or bfloat16"):
        build_optimizers(topology, {"text": nn.Linear(4, 4).double()}, ours())
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    with pytest.raises(UserError, match=r"found torch\.bfloat16 and torch\.float32 parameters with zero=2"):
        build_optimizers(topology, {"text": mixed}, ours(zero=2))
    build_optimizers(topology, {"text": model}, ours())
    for again in (lambda: build_optimizers(topology, {"text": model}, ours()),
                  lambda: finish_gradients(topology, {"text": model}, 1)):  # fmt: skip
        with pytest.raises(UserError, match="weight is in the buffers"):
            again()
