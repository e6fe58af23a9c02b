"""Checkpoints of modules of a library user: what was saved in one layout goes on in any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_hetero.checkpoint.modules import load_checkpoint, save_checkpoint
from megatron_hetero.distributed.topology import Topology
from megatron_hetero.errors import UserError
from megatron_hetero.step.joint import JointOptimizer, build_optimizers
from megatron_hetero.step.optimizer import AdamW
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running
from tests.unit.step.test_optimizers import batch_of, loss_of_rows, of_pytorch, pictures, vision

GATED = {"gated_linear_unit": True, "num_query_groups": 2, "num_layers": 4}


def fresh(layouts: dict[str, str], tied: bool, seed: int, **options: Any) -> tuple[Topology, dict[str, Any], Any]:
    topology = running.topology_of(**layouts)
    modules: dict[str, Any] = {}
    if topology.has("vision"):
        modules["vision"] = vision(seed)
    if topology.has("text"):
        layout = topology.layouts["text"]
        config = gpt.configuration(layout, sequence_parallel=layout.tp > 1, **GATED)
        modules["text"] = gpt.model(config, topology.collection("text"), tied=tied)
        gpt.fill(modules["text"], gpt.whole(topology.rank, tied=tied, **GATED), tied)
        if seed:
            for parameter in modules["text"].parameters():
                parameter.data.zero_()
    algorithm = AdamW(lr=0.02, eps=1e-3, weight_decay=0.1, **options)
    return topology, modules, build_optimizers(topology, modules, algorithm, clip_grad=0.05)


def train(topology: Topology, modules: dict[str, Any], optimizer: JointOptimizer, steps: range) -> list[float]:
    norms = []
    for step in steps:
        optimizer.zero_grad()
        if topology.has("vision"):
            layout = topology.layouts["vision"]
            loss_of_rows(modules["vision"], pictures(step)[layout.replica_of(topology.rank) :: layout.dp]).backward()
        mine = running.backward(topology, modules["text"], batch_of(step))[1] if topology.has("text") else 0
        norms.append(optimizer.step(tokens=running.tokens_of(topology, mine)).item())
    return norms


ELSEWHERE = [
    ({"vision": "dp:4", "text": "tp:2,dp:2"}, {"vision": "dp:2@0-1", "text": "tp:2@2-3"}, True, {}),
    ({"vision": "dp:1@0", "text": "dp:1@1"}, {"vision": "dp:4", "text": "tp:2,pp:2"}, True, {}),
    ({"vision": "dp:4", "text": "pp:2,dp:2"}, {"vision": "dp:2@0-1", "text": "tp:2,dp:2"}, True, {}),
    ({"vision": "dp:4", "text": "tp:2,dp:2"}, {"vision": "dp:4", "text": "dp:4"}, False, {"zero": 3}),
]


@pytest.mark.parametrize("before, after, tied, options", ELSEWHERE)
@on_ranks(4, timeout_s=60)
def test_a_run_goes_on_in_another_layout(
    before: dict[str, str], after: dict[str, str], tied: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = train(*fresh(before, tied, 0), range(4))
    saved = fresh(before, tied, 0)
    train(*saved, range(2))
    path = save_checkpoint(tmp_path, saved[-1], 2, extra={"seen": [1, 2]}, keep_last=1)
    assert path.name == "step-00000002"
    other = fresh(after, tied, 7, **options)
    loaded = load_checkpoint(tmp_path, other[-1])
    assert loaded is not None and loaded.step == 2 and loaded.extra == {"seen": [1, 2]}
    assert train(*other, range(2, 4)) == pytest.approx(whole[2:], rel=1e-4)


@pytest.mark.parametrize("options", [{"master": "split"}, {"moments": "8bit"}, {"offload": True}], ids=str)
@on_ranks(2, timeout_s=40)
def test_numbers_are_saved_as_they_are(options: dict[str, Any], tmp_path: Path) -> None:
    """Two steps, a checkpoint in fresh objects, two more: the bits of four."""
    topology = running.topology_of_world(2, text="dp:2")

    def trained(*, stops: bool) -> list[torch.Tensor]:
        model = vision().bfloat16()
        optimizer = build_optimizers(topology, {"text": model}, AdamW(lr=0.01, **options))
        for step in range(4):
            if stops and step == 2:
                save_checkpoint(tmp_path, optimizer, 2)
                model = vision(seed=5).bfloat16()
                optimizer = build_optimizers(topology, {"text": model}, AdamW(lr=0.01, **options))
                load_checkpoint(tmp_path, optimizer)
            loss_of_rows(model, pictures(step)[topology.rank :: 2].bfloat16()).backward()
            optimizer.step(tokens=8)
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    pairs = zip(trained(stops=False), trained(stops=True), strict=True)
    if options.get("moments") == "8bit":  # Stored as fp32, and rounded again.
        assert all(torch.allclose(a, b, atol=1e-2) for a, b in pairs)
    else:
        assert all(torch.equal(*each) for each in pairs)


@on_ranks(2, timeout_s=40)
def test_what_checkpoints_refuse(tmp_path: Path) -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(4, 4)
    optimizer = build_optimizers(topology, {"text": model}, AdamW())
    assert load_checkpoint(tmp_path / "nothing", optimizer) is None
    path = save_checkpoint(tmp_path, optimizer, 1)
    wider = build_optimizers(topology, {"text": nn.Linear(4, 5)}, AdamW())
    with pytest.raises(UserError, match=r"found text\.weight of shape \(4, 4\), expected shape \(5, 4\)"):
        load_checkpoint(tmp_path, wider)
    other = build_optimizers(topology, {"text": nn.Sequential(nn.Linear(4, 4))}, AdamW())
    with pytest.raises(UserError, match=r"found no weights of text\.0\.bias"):
        load_checkpoint(tmp_path, other)
    of_torch = build_optimizers(topology, {"text": nn.Linear(4, 4)}, of_pytorch)
    with pytest.raises(UserError, match="`text`: found an optimizer of another kind, AdamW, expected `AdamW` or `SGD`"):
        save_checkpoint(tmp_path, of_torch, 2)
    dist.barrier()
    if topology.rank == 0:
        next(path.glob("*.safetensors")).write_bytes(b"cut")
    dist.barrier()
    with pytest.raises(UserError, match="damaged file .tensors-"):
        load_checkpoint(tmp_path, optimizer)
