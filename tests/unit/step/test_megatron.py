"""Megatron's `GPTModel` in the layouts of a topology as it comes, beside `parallel_state`, and in Megatron's loop."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.local_group import LocalGroup
from megatron_hetero.groups.megatron import prepare
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.layout import Layout
from megatron_hetero.step.megatron_training import megatron_schedule, prepare_megatron
from tests.support.pool import platform
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running

STREAM = "model-parallel-rng"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(4, timeout_s=40)
def test_a_gpt_model_runs_with_its_own_initialisation(sequence_parallel: bool) -> None:
    """As on a GPU, which draws each rank's weights from Megatron's stream."""
    topology = running.topology_of(text="tp:2,dp:2")
    config = gpt.configuration(topology.layouts["text"], sequence_parallel=sequence_parallel)
    model = gpt.model(config, topology.collection("text"))
    (sample,) = gpt.samples(1)
    loss = gpt.loss_of(model, sample)
    loss.backward()
    losses = [torch.empty(()) for _ in range(4)]
    dist.all_gather(losses, loss.detach())
    assert torch.stack(losses).eq(loss.detach()).all()
    weight = dict(model.named_parameters())["decoder.layers.0.mlp.linear_fc1.weight"]
    weights = [torch.empty_like(weight) for _ in range(4)]
    dist.all_gather(weights, weight.detach())
    assert torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[3])
    assert not torch.equal(weights[0], weights[1])


@on_ranks(4, timeout_s=40)
def test_seeds_decide() -> None:
    topology, drawn = running.topology_of(vision="dp:4", text="tp:2,pp:2"), {}
    tracker: Any = megatron_random.get_cuda_rng_tracker()
    for seed in (1, 2, 1):
        prepare_megatron(topology, seed)
        with tracker.fork(STREAM):
            inside = torch.rand(4)
        outside = torch.rand(4)
        found = drawn.setdefault(seed, (inside, outside))
        assert torch.equal(found[0], inside) and torch.equal(found[1], outside)
    everywhere = [torch.empty(8) for _ in range(4)]
    dist.all_gather(everywhere, torch.cat(drawn[1]))
    assert all(torch.equal(each[4:], everywhere[0][4:]) for each in everywhere)
    assert len({tuple(each[:4].tolist()) for each in everywhere}) == 4
    assert not torch.equal(drawn[1][0], drawn[2][0])


@on_ranks(8, timeout_s=60)
def test_collections_are_complete_and_communicate() -> None:
    """Along each group that Megatron may communicate in."""
    layout = Layout.parse("tp:2,cp:2,pp:2", 8)
    topology = running.Topology.build({"text": layout}, platform())
    groups, mine = topology.collection("text"), torch.ones(())
    known = {field.name for field in fields(ProcessGroupCollection)} - {"language_model_module_name"}
    assert known <= vars(groups).keys()
    unused = {"hcp", "inter_dist_opt", "pos_embd", "dp_cp_ag", "expt_dp_ag", "gtp_remat", "expt_gtp_remat"}
    for name in known - unused:
        group = getattr(groups, name)
        assert not isinstance(group, LocalGroup) or group.size() == 1, name
        total = mine.clone()
        dist.all_reduce(total, group=group)
        assert total == group.size(), name
    assert groups.tp_dp_cp.size() == groups.tp_cp.size() == 4 and groups.intra_dist_opt.size() == 8


@on_ranks(4, timeout_s=40)
def test_parallel_state_stays_as_it_was() -> None:
    """A program that has initialised it, with a layout other than the module's."""
    parallel_state.destroy_model_parallel()
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        prepare(platform())
        megatron_random.model_parallel_cuda_manual_seed(7)
        tracker: Any = megatron_random.get_cuda_rng_tracker()
        states, buffer = tracker.get_states(), parallel_state.get_global_memory_buffer()
        group: Any = parallel_state.get_tensor_model_parallel_group()
        topology = running.topology_of(text="tp:4")
        assert parallel_state.get_global_memory_buffer() is buffer
        assert all(torch.equal(tracker.get_states()[name], state) for name, state in states.items())
        config = gpt.configuration(topology.layouts["text"], sequence_parallel=True)
        model, reference = gpt.model(config, topology.collection("text")), gpt.whole(topology.rank)
        gpt.fill(model, reference)
        sample = gpt.samples(5)[-1]
        expected = gpt.loss_of(reference, sample)
        assert abs(gpt.loss_of(model, sample) - expected) < 1e-6 * expected
        assert parallel_state.get_tensor_model_parallel_group() is group and group.size() == 2
        assert str(Layout.from_mpu()) == "tp:2,dp:2@0-3"
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tensor_model_parallel_size": 2}, "tp:2,dp:4@0-7"),
        ({"expert_model_parallel_size": 4}, "dp:8,ep:4@0-7"),
        ({"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8}, "tp:4,dp:2,ep:8@0-7"),
        ({"context_parallel_size": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
         "cp:4,pp:2,ep:2@0-7"),
        # Its default would split each expert over tp.
        ({"tensor_model_parallel_size": 2}, "tp:2,dp:4,ep:1@0-7"),
    ],
)  # fmt: skip
@on_ranks(8, timeout_s=40)
def test_layouts_of_parallel_state_with_experts(sizes: dict[str, Any], expected: str) -> None:
    parallel_state.destroy_model_parallel()
    folded = "ep" in expected
    try:
        parallel_state.initialize_model_parallel(**sizes, expert_tensor_parallel_size=1 if folded else None)
        layout = Layout.from_mpu()
        assert str(layout) == expected and layout == Layout.parse(expected, views=[EXPERTS] if folded else [])
        groups: list[tuple[str, Any]] = [
            ("tp", parallel_state.get_tensor_model_parallel_group()),
            ("dp", parallel_state.get_data_parallel_group()),
        ]
        if folded:
            groups += [("ep", parallel_state.get_expert_model_parallel_group())]
            groups += [("edp", parallel_state.get_expert_data_parallel_group())]
        for axis, group in groups:
            assert tuple(dist.get_process_group_ranks(group)) == layout.group_of(dist.get_rank(), axis)
    finally:
        parallel_state.destroy_model_parallel()


@on_ranks(4, timeout_s=40)
def test_layouts_of_parallel_state_that_cannot_be_expressed() -> None:
    parallel_state.destroy_model_parallel()
    with pytest.raises(UserError, match=r"Layout\.from_mpu: found no parallel state"):
        Layout.from_mpu()
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, order="tp-cp-ep-pp-dp")
        with pytest.raises(UserError, match=r"Layout\.from_mpu: found ranks .* along dp, expected 1 between them"):
            Layout.from_mpu()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_model_parallel_size=2)
        with pytest.raises(UserError, match=r"experts .* over 2 .*expert_tensor_parallel_size=1"):
            Layout.from_mpu()
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=2, expert_tensor_parallel_size=1, order="tp-cp-dp-ep-pp"
        )
        with pytest.raises(UserError, match=r"found ranks .* along ep, expected 1 .*ep, edp and pp"):
            Layout.from_mpu()
    finally:
        parallel_state.destroy_model_parallel()


@on_ranks(2, timeout_s=40)
def test_schedules_that_do_not_fit_are_refused() -> None:
    topology = running.topology_of_world(2, text="pp:2")
    with pytest.raises(UserError, match=r"found config\.pipeline_model_parallel_size 1, expected 2, its pp"):
        megatron_schedule(topology, "text", gpt.configuration())
    config = gpt.configuration(topology.layouts["text"], calculate_per_token_loss=False)
    with pytest.raises(UserError, match=r"found config\.calculate_per_token_loss False"):
        megatron_schedule(topology, "text", config)
    config = gpt.configuration(topology.layouts["text"], num_layers=4, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(UserError, match=r"found virtual stages on pp:2 and config\.overlap_p2p_comm False"):
        megatron_schedule(topology, "text", config)
    config = gpt.configuration(topology.layouts["text"])
    config.finalize_model_grads_func = print
    with pytest.raises(UserError, match=r"config\.finalize_model_grads_func is set"):
        megatron_schedule(topology, "text", config)
