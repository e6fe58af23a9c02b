"""`finish_gradients` against one process: a `GPTModel` in layouts and wrappers, with Megatron's own loop."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_hetero.base.errors import UserError
from megatron_hetero.step import wrapped as reduction
from megatron_hetero.step.gradients import count_tokens, finish, finish_gradients, squares_of, total_loss
from megatron_hetero.step.library_modules import trained_modules
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}
CASES = [
    ("tp:4", "plain", False, {}),
    ("tp:4", "plain", False, {"sequence_parallel": True}),
    ("tp:2,dp:2", "plain", True, {"sequence_parallel": True, "qk_layernorm": True}),
    ("tp:2,dp:2", "plain", False, {"qk_layernorm": True}),
    ("dp:4", "plain", True, {}),
    ("dp:4", "ddp", False, {}),
    ("dp:4", "fsdp", False, {}),
    ("tp:2,dp:2", "fsdp", False, {"sequence_parallel": True}),
    ("tp:2,dp:2", "ddp", False, {"sequence_parallel": True}),
    ("tp:2,dp:2", "megatron", True, {"sequence_parallel": True}),
    ("dp:4", "megatron-mean", False, {"calculate_per_token_loss": False}),
    ("pp:2,dp:2", "plain", True, {}),
    ("pp:2,dp:2", "plain", False, {}),
    ("tp:2,pp:2", "plain", True, {"sequence_parallel": True}),
    ("tp:2,pp:2", "megatron", True, {"sequence_parallel": True}),
    ("tp:2,dp:2", "plain", False, {"sequence_parallel": True, **EXPERTS}),
    ("tp:2,pp:2", "plain", False, {"sequence_parallel": True, **EXPERTS}),
    ("dp:4", "megatron", False, EXPERTS),
]


@pytest.mark.parametrize("layout, wrapper, tied, options", thinned(CASES, 4))
@on_ranks(4, timeout_s=40)
def test_gradients_and_loss_are_those_of_one_process(layout: str, wrapper: str, tied: bool, options: dict) -> None:
    topology = running.topology_of(text=layout)
    # PyTorch's wrappers want as many micro-batches on all replicas.
    batch = gpt.samples(8 if wrapper in ("ddp", "fsdp") else 6)
    own = {key: options[key] for key in options.keys() - {"sequence_parallel", "calculate_per_token_loss"}}
    reference = gpt.whole(topology.rank, tied=tied, **own)
    expected_loss, expected = gpt.gradients(reference, batch, sum(sample.supervised for sample in batch))

    config = gpt.configuration(topology.layouts["text"], **options)
    part = gpt.model(config, topology.collection("text"), tied=tied)
    gpt.fill(part, reference, tied)
    model = running.wrapped(part, wrapper, topology)
    loss, mine = running.backward(topology, model, batch)
    tokens = running.tokens_of(topology, mine)
    assert tokens.item() == sum(sample.supervised for sample in batch)
    finish_gradients(topology, {"text": model}, tokens)
    assert abs(running.total_loss(topology, loss, tokens) - expected_loss) < 1e-6 * expected_loss
    running.require_gradients(topology, model, reference, expected, tied)


INSIDE = [
    ("tp:2,dp:2", "plain", {"qk_layernorm": True}),
    ("tp:2,dp:2", "fsdp", {"qk_layernorm": True}),
    ("tp:2,dp:2", "megatron", {"sequence_parallel": True}),
    ("dp:4", "megatron-mean", {"calculate_per_token_loss": False}),
    ("dp:4", "ddp", {}),
]


@pytest.mark.parametrize("layout, wrapper, options", INSIDE)
@on_ranks(4, timeout_s=40)
def test_a_model_inside_a_module_of_the_user(layout: str, wrapper: str, options: dict) -> None:
    """Megatron's configuration and what wrappers do are found there, and norms of queries and keys summed over tp."""
    topology, batch = running.topology_of(text=layout), gpt.samples(8)
    own = {key: options[key] for key in options.keys() - {"sequence_parallel", "calculate_per_token_loss"}}
    reference = gpt.whole(topology.rank, **own)
    _, expected = gpt.gradients(reference, batch, sum(sample.supervised for sample in batch))
    part = gpt.model(gpt.configuration(topology.layouts["text"], **options), topology.collection("text"))
    gpt.fill(part, reference, False)
    model = running.wrapped(part, wrapper, topology)
    _, mine = running.backward(topology, model, batch)
    recipe = nn.ModuleDict({"deep": nn.ModuleDict({"language": model})})
    finish_gradients(topology, {"text": recipe}, running.tokens_of(topology, mine))
    running.require_gradients(topology, model, reference, expected)


@on_ranks(4, timeout_s=40)
def test_virtual_stages() -> None:
    topology, batch = running.topology_of(text="pp:4"), gpt.samples(8)
    reference = gpt.whole(topology.rank, tied=True, num_layers=8)
    expected_loss, expected = gpt.gradients(reference, batch, sum(sample.supervised for sample in batch))
    config = gpt.configuration(topology.layouts["text"], num_layers=8, virtual_pipeline_model_parallel_size=2)
    chunks = [gpt.model(config, topology.collection("text"), tied=True, virtual=virtual) for virtual in range(2)]
    for chunk in chunks:
        gpt.fill(chunk, reference, tied=True)
    loss, mine = running.backward(topology, chunks, batch)
    tokens = running.tokens_of(topology, mine)
    finish_gradients(topology, {"text": chunks}, tokens)
    assert abs(running.total_loss(topology, loss, tokens) - expected_loss) < 1e-6 * expected_loss
    for chunk in chunks:
        running.require_gradients(topology, chunk, reference, expected, tied=True)


# -------------------------------------------------------------------------------------------- plain modules


class Weight(nn.Module):
    """Eight elements whose gradient is what is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, dtype=dtype))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.weight * gradient).sum()


WRAPPERS = ["plain", "ddp", "ddp over dp", "fsdp"]
LAYOUTS = ["dp:4", "sp:2,dp:2", "cp:2,dp:2", "sp:2,cp:2", "tp:2,dp:2", "pp:2,dp:2", "sp:4"]


@pytest.mark.parametrize("wrapper, layout", thinned(product(WRAPPERS, LAYOUTS), 5))
@on_ranks(4, timeout_s=40)
def test_sums_along_the_axes_that_share_work(wrapper: str, layout: str) -> None:
    topology = running.topology_of(text=layout)
    here, model = topology.layouts["text"], Weight()
    module: Any = model
    if wrapper.startswith("ddp"):
        axes = ("dp",) if wrapper == "ddp over dp" else ("sp", "cp", "dp")
        if (group := topology.group("text", *axes)).size() == 1:
            return  # PyTorch's DDP wants a communicator.
        module = nn.parallel.DistributedDataParallel(model, process_group=group)
    elif wrapper == "fsdp":
        module = fully_shard(model, mesh=topology.mesh("text")["dp"])
    module(float(1 + topology.rank)).backward()
    finish_gradients(topology, {"text": module}, torch.tensor(5))
    expected = sum(1 + rank for rank in here.group_of(topology.rank, "sp", "cp", "dp")) / 5
    grad: Any = model.weight.grad
    found = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    assert torch.allclose(found, torch.full((8,), expected), rtol=1e-6)


@on_ranks(4, timeout_s=40)
def test_a_divisor_of_fsdp_is_undone() -> None:
    topology, model = running.topology_of(text="dp:4"), Weight()
    fully_shard(model, mesh=topology.mesh("text")["dp"], reshard_after_forward=False)
    model.set_force_sum_reduction_for_comms(True)  # pyright: ignore[reportCallIssue]
    model.set_gradient_divide_factor(8.0)  # pyright: ignore[reportCallIssue]
    model(float(1 + topology.rank)).backward()
    finish_gradients(topology, {"text": model}, 2)
    grad: Any = model.weight.grad
    assert torch.equal(grad.full_tensor(), torch.full((8,), 5.0))


@on_ranks(4, timeout_s=40)
def test_what_attributes_say_about_tp() -> None:
    topology, own = running.topology_of(text="tp:4"), {name: Weight() for name in ("a", "b", "c")}
    model, weights = nn.ModuleDict(own), {name: cast("Any", each.weight) for name, each in own.items()}
    weights["a"].sequence_parallel = True
    weights["b"].average_gradients_across_tp_domain = True
    torch.stack([each(float(topology.rank)) for each in own.values()]).sum().backward()
    finish_gradients(topology, {"text": model}, 2.0)
    values = {name: weight.grad[0].item() for name, weight in weights.items()}
    assert values == {"a": 3.0, "b": 0.75, "c": topology.rank / 2}


@on_ranks(4, timeout_s=40)
def test_missing_gradients_are_zeros_and_frozen_parameters_have_none() -> None:
    topology, model = running.topology_of(text="dp:4"), [Weight(), Weight(), Weight(torch.bfloat16)]
    model[1].requires_grad_(False)
    if topology.rank == 2:
        (model[0](3.0) + model[2](3.0)).backward()
    finish_gradients(topology, {"text": model}, 3)
    grads: list[Any] = [each.weight.grad for each in model]
    assert grads[1] is None and grads[0].eq(1).all() and grads[2].eq(1).all()


@on_ranks(2, timeout_s=40)
def test_few_all_reduces() -> None:
    """One for each bucket, not one for each parameter."""
    topology, model = running.topology_of_world(2, text="dp:2"), [Weight() for _ in range(20)]
    real: Any
    calls: list[int]
    torch.stack([each(1.0) for each in model]).sum().backward()
    calls, real, most = [], dist.all_reduce, reduction.BUCKET
    try:
        dist.all_reduce = lambda tensor, *args, **kwargs: (calls.append(tensor.numel()), real(tensor, *args, **kwargs))
        reduction.BUCKET = 50
        finish_gradients(topology, {"text": model}, 1)
    finally:
        dist.all_reduce, reduction.BUCKET = real, most
    assert calls == [64, 64, 48, 48, 48, 16], "for errors, for tokens, and the buckets"
    assert all(cast("Any", each.weight.grad).eq(2).all() for each in model)


@on_ranks(4, timeout_s=40)
def test_wrappers_that_cannot_be_known() -> None:
    topology, model = running.topology_of(vision="dp:4", text="tp:2,dp:2"), Weight()
    elsewhere = nn.parallel.DistributedDataParallel(model, process_group=topology.group("vision", "dp"))
    modules = {"vision": Weight(), "text": elsewhere}
    # All ranks along both axes of the text: sums of what tp ranks each have whole.
    with pytest.raises(UserError, match=r"parameter module\.weight of `text`: found a wrapper over ranks 0-3"):
        finish_gradients(topology, modules, 1)
    config = gpt.configuration(topology.layouts["text"], sequence_parallel=True)
    bare = fully_shard(gpt.model(config, topology.collection("text")), mesh=topology.mesh("text")["dp"])
    inside = nn.Sequential(gpt.model(config, topology.collection("text")))
    fully_shard(inside, mesh=topology.mesh("text")["dp"])
    partly = gpt.model(config, topology.collection("text"))
    for number, layer in enumerate(partly.decoder.layers):
        kept = {name: vars(p).copy() for name, p in layer.named_parameters()}
        fully_shard(layer, mesh=topology.mesh("text")["dp"])
        for name, p in layer.named_parameters() if number == 0 else ():
            vars(p).update({key: value for key, value in kept[name].items() if key not in vars(p)})
    for text in (bare, inside, partly):
        with pytest.raises(UserError, match=r"attributes that Megatron gave"):
            finish_gradients(topology, {"vision": Weight(), "text": text}, 1)
    of_experts = nn.ModuleDict({"layer": Weight()})
    of_experts["layer"].config = replace(config, **EXPERTS, expert_model_parallel_size=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"`text`: found config.expert_model_parallel_size 2, expected 1"):
        finish_gradients(topology, {"vision": Weight(), "text": of_experts}, 1)


@on_ranks(4, timeout_s=40)
def test_wrappers_that_did_not_reduce() -> None:
    topology = running.topology_of(text="dp:4")
    model = nn.parallel.DistributedDataParallel(Weight(), process_group=topology.group("text", "dp"))
    recipe = nn.ModuleDict({"deep": model})
    with model.no_sync():
        model(1.0).backward()
    with pytest.raises(UserError, match="DistributedDataParallel has not averaged them"):
        finish_gradients(topology, {"text": recipe}, 1)
    model(float(1 + topology.rank)).backward()
    finish_gradients(topology, {"text": recipe}, 2)
    grad: Any = model.module.weight.grad
    assert torch.equal(grad, torch.full((8,), (4 + 1 + 2 + 3 + 4) / 2))
    shards: Any = fully_shard(Weight(), mesh=topology.mesh("text")["dp"])
    shards.set_requires_gradient_sync(False)
    shards(1.0).backward()
    with pytest.raises(UserError, match="FSDP2 has not averaged them"):
        finish_gradients(topology, {"text": shards}, 1)
    shards.set_requires_gradient_sync(True)
    shards(float(1 + topology.rank)).backward()
    finish_gradients(topology, {"text": shards}, 2)
    assert torch.equal(shards.weight.grad.full_tensor(), grad)


@on_ranks(4, timeout_s=40)
def test_gradients_in_shards_of_replicas() -> None:
    """They are found after a forward pass alone, and refused where they are not reduced over all replicas."""
    topology = running.topology_of(text="sp:2,dp:2")
    shards: Any = fully_shard(Weight(), mesh=topology.mesh("text")["dp", "sp"])
    shards(float(1 + topology.rank)).backward()
    with torch.no_grad():
        shards(1.0)
    finish_gradients(topology, {"text": shards}, 2)
    assert torch.equal(shards.weight.grad.full_tensor(), torch.full((8,), 5.0))
    shards.zero_grad()
    shards.set_requires_all_reduce(False)
    shards(1.0).backward()
    with pytest.raises(UserError, match="FSDP2 has not averaged them"):
        finish_gradients(topology, {"text": shards}, 2)


@on_ranks(2, timeout_s=40)
def test_gradients_are_finished_once_a_step() -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), Weight()
    model(1.0).backward()
    finish_gradients(topology, {"text": model}, 2)
    model(1.0).backward()
    for same in (model, torch.nn.Sequential(model)):  # Any module around the same parameters.
        with pytest.raises(UserError, match="gradients of `text`: they are finished already"):
            finish_gradients(topology, {"text": same}, 2)
    model.zero_grad()
    model(3.0).backward()
    finish_gradients(topology, {"text": model}, 2)
    assert torch.equal(cast("Any", model.weight.grad), torch.full((8,), 3.0))
    both = running.topology_of_world(2, vision="dp:2", text="dp:2")
    with pytest.raises(UserError, match="module `text`: found weight in `vision`"):
        finish_gradients(both, {"vision": model, "text": model}, 1)


@on_ranks(2, timeout_s=40)
def test_tokens_in_a_tensor_are_those_of_the_whole_step() -> None:
    """Each rank's own would let replicas drift."""
    topology, model = running.topology_of_world(2, text="dp:2"), Weight()
    model(1.0).backward()
    with pytest.raises(UserError, match=r"gradients: tokens: found 3 on rank 0 and 4 on rank 1"):
        finish_gradients(topology, {"text": model}, torch.tensor(3 + topology.rank))
    for wrong in (torch.tensor(torch.nan), torch.tensor(-1), float("inf")):
        with pytest.raises(UserError, match="tokens: found .*1 or more"):
            finish_gradients(topology, {"text": model}, wrong)
    for wrong in (2.5, [1, 2]):
        with pytest.raises(UserError, match="count_tokens: found .*, expected one integer"):
            count_tokens(topology, "text", cast("Any", wrong))
    counted = count_tokens(topology, "text", 3 + topology.rank)
    counted += topology.rank
    with pytest.raises(UserError, match=r"gradients: tokens: found 7 on rank 0 and 8 on rank 1"):
        finish_gradients(topology, {"text": model}, counted)
    counted = count_tokens(topology, "text", 3 + topology.rank)
    finish_gradients(topology, {"text": model}, counted)
    assert torch.allclose(cast("Any", model.weight.grad), torch.full((8,), 2 / 7))


@on_ranks(4, timeout_s=40)
def test_the_norm_of_fsdp_over_tensor_parallelism_of_pytorch() -> None:
    """Shards of shards count, each of them once; what tp copies counts on its first rank."""
    topology = running.topology_of(text="tp:2,dp:2")
    mesh = topology.mesh("text")
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8))
    model = deepcopy(alone)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    inputs = torch.randn(4, 8)
    model(inputs[topology.layouts["text"].replica_of(topology.rank) :: 2]).sin().sum().backward()
    alone(inputs).sin().sum().backward()
    found = trained_modules(topology, {"text": model})
    finish(found, 1.0)
    for each, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(cast("Any", each.grad).full_tensor(), cast("Any", expected.grad), rtol=1e-5, atol=1e-6)
    squares = squares_of(found[0])
    dist.all_reduce(squares)
    whole = nn.utils.get_total_norm([cast("Tensor", p.grad) for p in alone.parameters()])
    assert squares.sqrt().item() == pytest.approx(whole.item())


@on_ranks(2, timeout_s=40)
def test_errors_of_one_rank_are_raised_on_all() -> None:
    topology = running.topology_of_world(2, vision="dp:1@0", text="dp:1@1")
    with pytest.raises(UserError, match=r"modules on rank 1: found a module `audio`, .*: text"):
        finish_gradients(topology, {"vision": Weight()} if topology.rank == 0 else {"text": None, "audio": Weight()}, 1)
    with pytest.raises(UserError, match=r"tokens: found -1, .*1 or more"):
        finish_gradients(topology, {"text" if topology.rank else "vision": Weight()}, -1)


@on_ranks(4, timeout_s=40)
def test_tokens_are_counted_once() -> None:
    topology = running.topology_of(vision="dp:1@3", text="tp:2,pp:1@0-1")
    assert count_tokens(topology, "text", 7 + 100 * (topology.rank > 0)).item() == 7
    topology = running.topology_of(text="pp:2,dp:2")
    mine = [None, None, torch.tensor(3), 4][topology.rank]
    assert count_tokens(topology, "text", 50 if mine is None else mine).item() == 7
    assert total_loss(topology, "text", 9.5 if mine is None else mine / 2).item() == 3.5
