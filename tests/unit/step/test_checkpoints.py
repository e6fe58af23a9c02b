"""Checkpoints of modules of a library user: what was saved in one layout goes on in any other."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, MultiStepLR

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import MANIFEST, prune, record_file, whole
from megatron_hetero.checkpoint import resume as shared_folder
from megatron_hetero.checkpoint.library import load_checkpoint, save_checkpoint
from megatron_hetero.groups.topology import Topology
from megatron_hetero.step.algorithms import SGD, AdamW
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.library_optimizers import build_optimizers
from tests.support.locks import HELD_ELSEWHERE
from tests.support.matrix import thinned
from tests.support.mutations import ODD, at, places
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running
from tests.unit.step.small import INPUTS, batch_of, loss_of_rows, of_pytorch, pictures, vision

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
        layers: Any = modules["text"].decoder.layers
        for layer in layers:
            layer.register_buffer("number", torch.tensor(layer.layer_number + seed))
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


@pytest.mark.parametrize("before, after, tied, options", thinned(ELSEWHERE, 5))
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
    layers = other[1]["text"].decoder.layers if other[0].has("text") else ()
    assert all(layer.number == layer.layer_number for layer in layers)
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


SCHEDULERS = {
    "exponential": partial(ExponentialLR, gamma=0.5),
    "cosine": partial(CosineAnnealingLR, T_max=5),
    "milestones": partial(MultiStepLR, milestones=[1, 3], gamma=0.3),
}


@pytest.mark.parametrize("after", ["here", "elsewhere"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@on_ranks(2, timeout_s=40)
def test_learning_rates_go_on(kind: str, after: str, tmp_path: Path) -> None:
    """As `group["lr"]`, from which schedulers compute the next, and by groups, which other ranks hold elsewhere."""

    def build(where: str, lr: float) -> tuple[Topology, dict[str, Any], JointOptimizer]:
        layouts = {"vision": "dp:2", "text": "dp:2"} if where == "here" else {"vision": "dp:1@0", "text": "dp:1@1"}
        topology = running.topology_of_world(2, **layouts)
        modules = {name: vision(seed) for seed, name in enumerate(layouts) if topology.has(name)}
        settings = AdamW(lr=lambda name: lr / (2 if name == "0.weight" else 1), weight_decay=0.1)
        return topology, modules, build_optimizers(topology, modules, settings)

    def train(topology: Topology, modules: Any, optimizer: Any, scheduler: Any, steps: range) -> list[Any]:
        for step in steps:
            optimizer.zero_grad()
            for name, module in modules.items():
                layout = topology.layouts[name]
                loss_of_rows(module, pictures(step)[layout.replica_of(topology.rank) :: layout.dp]).backward()
            optimizer.step(tokens=8)
            scheduler.step()
        return [torch.cat([p.detach().flatten() for p in module.parameters()]) for module in modules.values()]

    build_scheduler, whole_run, saved = SCHEDULERS[kind], build("here", 0.02), build("here", 0.02)
    expected = train(*whole_run, build_scheduler(whole_run[-1]), range(4))
    scheduler = build_scheduler(saved[-1])
    train(*saved, scheduler, range(2))
    state = {key: value for key, value in scheduler.state_dict().items() if key != "milestones"}
    save_checkpoint(tmp_path, saved[-1], 2, extra={"scheduler": state})
    for anew in (True, False) if after == "here" else (True,):
        resumed = build(after, 7.0)
        scheduler = None if anew else build_scheduler(resumed[-1])
        last = load_checkpoint(tmp_path, resumed[-1])
        assert last is not None
        if scheduler is None:
            scheduler = build_scheduler(resumed[-1], last_epoch=last.step - 1)
        else:
            scheduler.load_state_dict(last.extra["scheduler"])
        found = train(*resumed, scheduler, range(2, 4))
        own = expected if after == "here" else expected[dist.get_rank() :][:1]
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, own, strict=True))


class Counting(nn.Module):
    """With persistent buffers of several dtypes and dims, of which one is not contiguous, and one that is not saved."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.out = nn.BatchNorm1d(INPUTS), nn.Linear(INPUTS, 4)
        self.register_buffer("table", torch.randn(3, 2, 2).transpose(0, 2))
        self.register_buffer("seen", torch.tensor([bool(seed)]))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(rows))


@on_ranks(2, timeout_s=40)
def test_persistent_buffers_are_those_of_the_first_replica(tmp_path: Path) -> None:
    def build(seed: int, layout: str) -> tuple[Any, JointOptimizer]:
        topology = running.topology_of_world(2, vision=layout, text="dp:2")
        modules: dict[str, nn.Module] = {"text": vision()}
        if topology.has("vision"):
            modules["vision"] = Counting(seed)
        return modules.get("vision"), build_optimizers(topology, modules, AdamW(lr=0.01))

    model, optimizer = build(1, "dp:2")
    for step in range(2):
        loss_of_rows(model, pictures(step)[dist.get_rank() :: 2]).backward()
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, {k: v.clone() for k, v in model.state_dict().items() if not k.startswith("out")})
    save_checkpoint(tmp_path, optimizer, 2)
    for layout in ("dp:2", "dp:1@1", "tp:2"):
        other, optimizer = build(0, layout)
        scratch = torch.empty(0) if other is None else other.scratch.clone()
        assert load_checkpoint(tmp_path, optimizer) is not None
        if other is not None:
            assert len(of_ranks[0]) == 7 and other.norm.num_batches_tracked == 2 and torch.equal(other.scratch, scratch)
            assert all(torch.equal(other.state_dict()[name], values) for name, values in of_ranks[0].items())
            other.table = torch.zeros(1)
    with pytest.raises(UserError, match=r"1 of another shape: buffers/vision\.table is \[2, 6\], not \[1\]"):
        load_checkpoint(tmp_path, optimizer)
    model, optimizer = build(dist.get_rank(), "tp:2")
    with pytest.raises(UserError, match=r"buffer vision\.table: differs between ranks 0 and 1"):
        save_checkpoint(tmp_path, optimizer, 3)


@on_ranks(2, timeout_s=40)
def test_what_checkpoints_refuse(tmp_path: Path) -> None:
    topology, model = running.topology_of_world(2, text="dp:2"), nn.Linear(4, 4)
    optimizer = build_optimizers(topology, {"text": model}, AdamW())
    assert load_checkpoint(tmp_path / "nothing", optimizer) is None
    path = save_checkpoint(tmp_path, optimizer, 1)
    wider = build_optimizers(topology, {"text": nn.Linear(4, 5)}, AdamW())
    with pytest.raises(UserError, match=r"of another shape: .*weights/text\.weight is \[4, 4\], not \[5, 4\]"):
        load_checkpoint(tmp_path, wider)
    other = build_optimizers(topology, {"text": nn.Sequential(nn.Linear(4, 4))}, AdamW())
    with pytest.raises(UserError, match=r"2 missing: weights/text\.0\.bias"):
        load_checkpoint(tmp_path, other)
    more = build_optimizers(topology, {"text": nn.Linear(4, 4, bias=False)}, AdamW())
    with pytest.raises(UserError, match=r"\(1 unexpected: weights/text\.bias\)"):
        load_checkpoint(tmp_path, more)
    sgd = build_optimizers(topology, {"text": nn.Linear(4, 4)}, SGD())
    with pytest.raises(UserError, match="found adamw of module `text`, expected sgd"):
        load_checkpoint(tmp_path, sgd)
    of_torch = build_optimizers(topology, {"text": nn.Linear(4, 4)}, of_pytorch)
    with pytest.raises(UserError, match="`text`: found an optimizer .*AdamW, expected `AdamW` or `SGD`"):
        save_checkpoint(tmp_path, of_torch, 2)
    dist.barrier()
    if topology.rank == 0:
        next(path.glob("*.safetensors")).write_bytes(b"cut")
    dist.barrier()
    with pytest.raises(UserError, match=r"damaged file .tensors-.*--checkpoint.resume"):
        load_checkpoint(tmp_path, optimizer)


@on_ranks(1)
def test_records_with_values_of_other_kinds_are_one_error(tmp_path: Path) -> None:
    optimizer = build_optimizers(running.topology_of_world(1, text="dp:1"), {"text": nn.Linear(2, 2)}, AdamW())
    path = save_checkpoint(tmp_path, optimizer, 1, extra={"a": 1})
    good = json.loads((path / "modules.json").read_text())
    for place in list(places(good))[1:]:
        for odd in (*ODD[3::7], 10**400, "params", [0.9, float("nan")]):
            values = copy.deepcopy(good)
            at(values, place[:-1])[place[-1]] = odd
            (path / "modules.json").write_bytes(json.dumps(values).encode())
            records = {each.name: record_file(each) for each in path.iterdir() if each.name != MANIFEST}
            files = {name: {"size": of.size, "sha256": of.sha256} for name, of in records.items()}
            (path / MANIFEST).write_text(json.dumps({"files": files}))
            with contextlib.suppress(UserError):
                load_checkpoint(tmp_path, optimizer)
                for group in optimizer.sharded["text"].param_groups:
                    assert abs(group["weight_decay"]) < 1e30 and group["params"], (place, odd)


def one_module(weights: nn.Module | None = None) -> JointOptimizer:
    topology = running.topology_of_world(2, text="dp:2")
    return build_optimizers(topology, {"text": nn.Linear(4, 4) if weights is None else weights}, AdamW())


@on_ranks(2, timeout_s=40)
def test_only_newer_checkpoints_are_written_and_the_newest_are_kept(tmp_path: Path) -> None:
    optimizer = one_module()
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, optimizer, step)
    for step in (15, 30):
        with pytest.raises(UserError, match=rf"step-000000{step}: not after step-00000030"):
            save_checkpoint(tmp_path, optimizer, step, keep_last=2)
    with pytest.raises(UserError, match="keep_last: found 0, expected 1 or more"):
        save_checkpoint(tmp_path, optimizer, 40, keep_last=0)
    assert list(whole(tmp_path)) == [10, 20, 30] and not (tmp_path / ".lock").exists()
    assert save_checkpoint(tmp_path, optimizer, 40, keep_last=2).is_dir()
    dist.barrier()
    if dist.get_rank() == 0:
        prune(tmp_path, 1, tmp_path / "step-00000030")
    dist.barrier()
    assert list(whole(tmp_path)) == [30, 40]


@on_ranks(2, timeout_s=40)
def test_one_run_alone_saves_into_a_folder(tmp_path: Path) -> None:
    optimizer, other = one_module(), None
    (tmp_path / ".step-00000001.partial").mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        other = subprocess.Popen(
            [sys.executable, "-c", HELD_ELSEWHERE, str(tmp_path / ".lock")], stdout=subprocess.PIPE
        )
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
    dist.barrier()
    with (
        mock.patch.object(shared_folder, "_FREE_S", 0.1),
        pytest.raises(UserError, match="in use .*process 1 on elsewhere"),
    ):
        save_checkpoint(tmp_path, optimizer, 1)
    assert (tmp_path / ".step-00000001.partial").is_dir()
    if other is not None:
        other.kill()
        other.communicate()
    assert save_checkpoint(tmp_path, optimizer, 1).is_dir()


@on_ranks(2, timeout_s=40)
def test_a_checkpoint_that_is_named_must_be_there(tmp_path: Path) -> None:
    optimizer = one_module()
    path = save_checkpoint(tmp_path / "of run", optimizer, 3)
    for missing in (path.with_name("step-00000099"), path.with_name("step-99"), path.with_name("latest")):
        with pytest.raises(UserError, match=rf"{missing.name}/manifest\.json: .*step-00000003"):
            load_checkpoint(missing, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(path, tmp_path / "best")
        path.rename(path.with_name("step-00000004"))
    dist.barrier()
    loaded = load_checkpoint(tmp_path / "best", optimizer)
    assert loaded is not None and loaded.step == 3
    with pytest.raises(UserError, match=r"found step 4 .*expected step-00000003"):
        load_checkpoint(tmp_path / "of run", optimizer)
    assert load_checkpoint(tmp_path, optimizer) is None


@on_ranks(2, timeout_s=40)
def test_what_cannot_be_stored_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    topology, model = running.topology_of_world(2, vision="dp:1@0", text="dp:1@1"), vision()
    odd = nn.Linear(4, 4)
    odd.codes = nn.Parameter(torch.ones(4).to(torch.float8_e5m2), requires_grad=False)
    modules: dict[str, nn.Module] = {"vision": odd} if topology.has("vision") else {"text": model}
    optimizer = build_optimizers(topology, modules, AdamW())
    with pytest.raises(UserError, match=r"`vision`: found torch.float8_e5m2 \(codes\), .*float32"):
        save_checkpoint(tmp_path, optimizer, 1)
    odd = nn.Linear(4, 4)
    odd.codes = nn.Parameter(torch.arange(4, dtype=torch.float64), requires_grad=False)
    optimizer = one_module(odd)
    for extra in ({"seen": {1}}, {"milestones": {30: 1}}):
        with pytest.raises(UserError, match="save_checkpoint: extra: no JSON"):
            save_checkpoint(tmp_path, optimizer, 1, extra=extra if dist.get_rank() == 0 else None)
    optimizer.param_groups[0]["note"] = object()
    with pytest.raises(UserError, match="save_checkpoint: param_groups: no JSON"):
        save_checkpoint(tmp_path, optimizer, 1)
    del optimizer.param_groups[0]["note"]
    save_checkpoint(tmp_path, optimizer, 1)
    odd.codes.data.zero_()
    load_checkpoint(tmp_path, optimizer)
    assert odd.codes.tolist() == [0, 1, 2, 3]
