"""Memory and traffic of estimates against real steps of small models on gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Self
from unittest import mock
from weakref import WeakSet, ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from benchmarks.measuring.trial import assumed_step
from megatron_hetero.boundary.loaded import BufferPool
from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import KINDS, Estimate
from megatron_hetero.estimate.parameters import parameters_of
from megatron_hetero.groups.fsdp import fsdp_groups
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.watchdog import Stopwatch
from megatron_hetero.layout.axes import MAIN
from megatron_hetero.models.layers import offload as activations
from megatron_hetero.models.layers.dispatch import Dispatch
from megatron_hetero.schedule import gathering
from megatron_hetero.schedule.contract import InChunks
from megatron_hetero.step.buffers import BufferedGradients
from megatron_hetero.step.execution import StepExecution
from megatron_hetero.train.trainer import Trainer
from pretrain_vlm import build_run
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import long, thinned
from tests.support.ranks import on_ranks
from tests.support.sizes import received_rows, sent_rows

Folders = dict[tuple[str, bool], Path]
"""By family, and whether the head is tied."""
DEEP = ModelChoice(text_layers=4, vision_layers=4, full_layers=(1, 3), text_ffn=75, seed=4)


@dataclass(frozen=True)
class Case:
    """Layouts (`detail`: of a second encoder), further flags, whether the head is tied, and samples of a step."""

    vision: str
    text: str
    ranks: int
    more: str = ""
    tied: bool = False
    batch: int = 4
    detail: str = ""
    family: str = "qwen2_5_vl"

    def __str__(self) -> str:
        encoders = f"{self.vision}+{self.detail}" if self.detail else self.vision
        family = "" if self.family == "qwen2_5_vl" else f" {self.family}"
        return f"{encoders}|{self.text} {self.more.replace('--', '')}{' tied' if self.tied else ''}{family}"


BF16, SGD = "--model.dtype bfloat16", "--optimizer.name sgd"
WHOLE = "--vision-sequence_parallel false --text-sequence_parallel false"
RECOMPUTE = "--vision-recompute full --text-recompute full"
SELECTIVE = "--vision-recompute selective --text-recompute selective"
ZERO3 = "--vision-zero 3 --text-zero 3"
OFFLOAD = "--vision-offload.activations true --text-offload.activations true"
SPLIT = "--text-layers 1 3"
PARTS = "--vision-patches_per_call 40"
SMALL = "--{0}-precision.master {1} --{0}-precision.moments {2} --{0}-precision.gradients {3}"
EVEN, MOE = "--plan.expert_imbalance 1", "qwen3_vl_moe"
DELTA, DELTA_MOE = "qwen3_5", "qwen3_5_moe"
LONG = "--plan.tokens 1500"
"""Sequences of which delta nets save states for the backward pass."""
LORA = "--vision-lora.r 16 --text-lora.r 16"
HALVES = "--vision-precision.master split --vision-precision.gradients bfloat16"
CASES = [
    Case("dp:1", "dp:1", 1),
    Case("dp:1", "dp:1", 1, f"{BF16} {RECOMPUTE}", tied=True),
    Case("dp:1", "dp:1", 1, "--model.freeze vision --plan.images 2"),
    Case("dp:1", "dp:1", 1, f"--model.freeze text {BF16}"),
    Case("dp:1", "dp:1", 1, "--model.freeze visual.blocks.*.mlp.* model.layers.*.mlp.* model.embed_tokens.*"),
    Case("dp:2", "tp:2", 2, f"{BF16} --model.train model.layers.*.self_attn.*"),
    Case("dp:1", "dp:1", 1, "--plan.images 0"),
    Case("dp:2", "tp:2", 2, f"{BF16} --plan.videos 2 --plan.frames 5 --plan.frame_side 56"),
    Case("sp:2", "cp:2", 2, "--plan.images 0 --plan.videos 1 --plan.frames 8", family="qwen3_vl"),
    Case("sp:2", "tp:2", 2, BF16),
    Case("sp:2", "tp:2", 2, f"{BF16} {SMALL.format('text', 'split', 'bfloat16', 'bfloat16')}"),
    Case("dp:4", "pp:2,dp:2", 4, f"{BF16} {SMALL.format('text', 'none', '8bit', 'bfloat16')} {HALVES}", tied=True),
    Case("dp:3@0-2", "tp:2@2-3", 4, f"{BF16} {SMALL.format('vision', 'float32', '8bit', 'float32')}"),
    Case("dp:2", "pp:2", 2, f"{BF16} {HALVES} --text-offload.states true --text-precision.moments 8bit"),
    Case("dp:2", "cp:2", 2, "--text-precision.moments 8bit --vision-precision.moments bfloat16"),
    Case("dp:2", "dp:2", 2, f"{BF16} {SGD} --text-precision.master split --vision-precision.master none"),
    Case("tp:2", "tp:2", 2, f"{WHOLE} {SGD} {BF16}"),
    Case("cp:2", "cp:2", 2, "--train.micro_batch_size 2"),
    Case("dp:2", "cp:2", 2, "--boundary.transport bfloat16"),
    Case("dp:1@0", "dp:1@1", 2, f"{RECOMPUTE} --schedule.run_ahead 2"),
    Case("sp:2,tp:2", "tp:4", 4, f"{BF16} --model.freeze vision projector"),
    Case("sp:4", "pp:4", 4, "--schedule.waves 3", batch=6),
    Case("sp:4", "tp:2,pp:2", 4, f"{BF16} --schedule.kind recompute", tied=True),
    Case("dp:4", "pp:2,dp:2", 4, "--schedule.virtual_stages 2", tied=True, batch=8),
    Case("dp:2@0-1", "pp:2@2-3", 4, f"{BF16} --text-layers 1 3"),
    Case("pp:2,sp:2", "cp:2,tp:2", 4, "--train.micro_batch_size 2 --plan.images 2", batch=8),
    Case("dp:3@0-2", "tp:2@2-3", 4, "--plan.images 2 --model.freeze projector"),
    Case("sp:2", "tp:2", 2, detail="dp:2"),
    Case("dp:2@0-1", "pp:2@2-3", 4, f"{BF16} --model.freeze detail", detail="sp:2@2-3"),
    Case("dp:1", "dp:1", 1, family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} {RECOMPUTE}", tied=True, family="qwen3_vl"),
    Case("sp:2", "tp:2", 2, BF16, family="qwen3_vl"),
    Case("tp:2", "cp:2", 2, f"{WHOLE} --plan.images 2", tied=True, family="qwen3_vl"),
    Case("sp:4", "pp:4", 4, "--text-layers 1 1 1 1", batch=6, family="qwen3_vl"),
    Case("pp:2,dp:2", "tp:2,pp:2", 4, f"{BF16} {SPLIT} --schedule.kind recompute", family="qwen3_vl"),
    Case("pp:2@0-1", "pp:2@2-3", 4, "--schedule.run_ahead 2", tied=True, family="qwen3_vl"),
    Case("dp:2@0-1", "pp:2@2-3", 4, f"{BF16} {SPLIT} --model.freeze vision projector", family="qwen3_vl"),
    Case("pp:2", "tp:2", 2, "--model.freeze vision", family="qwen3_vl"),
    Case("pp:2", "tp:2", 2, f"{BF16} --model.freeze vision"),
    Case("dp:1", "dp:1", 1, SELECTIVE),
    Case("dp:1", "dp:1", 1, f"{BF16} {SELECTIVE}"),
    Case("dp:1", "dp:1", 1, f"{BF16} {SELECTIVE}", family="qwen3_vl"),
    Case("sp:2", "tp:2", 2, f"{BF16} {SELECTIVE}"),
    Case("tp:2", "sp:2", 2, f"{BF16} {SELECTIVE} --train.micro_batch_size 2", family="qwen3_vl"),
    Case("cp:2", "cp:2", 2, f"{BF16} {SELECTIVE} --plan.images 2", family="qwen3_vl"),
    Case("dp:2", "pp:2", 2, f"{BF16} {SELECTIVE} --model.freeze text"),
    Case("sp:2", "pp:2", 2, f"{BF16} {SELECTIVE} --text-layers 1 3"),
    Case("dp:2@0-1", "pp:2@2-3", 4, f"{BF16} {SELECTIVE}", family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} --vision-recompute 3 --text-recompute 1"),
    Case("sp:2", "tp:2,pp:2", 4, f"{BF16} --vision-recompute 1 --text-recompute 2"),
    Case("pp:2", "pp:2", 2, "--vision-recompute 1 --text-recompute 1", family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} --vision-chunk 8 --text-chunk 8"),
    Case("sp:2", "tp:2", 2, f"{BF16} {SELECTIVE} --vision-chunk 8 --text-chunk 8", family="qwen3_vl"),
    Case("tp:2", "tp:2", 2, f"{WHOLE} --vision-chunk 8 --text-chunk 8 --model.freeze text"),
    Case("cp:2", "cp:2", 2, f"{BF16} {RECOMPUTE} --vision-chunk 8 --text-chunk 5"),
    Case("cp:3", "dp:3", 3, "--vision-zero 3", family="qwen3_vl", batch=6),
    Case("dp:3", "cp:3", 3, f"{BF16} {ZERO3}", tied=True),
    Case("dp:2", "tp:2", 2, f"{BF16} --vision-zero 2 {HALVES}"),
    Case("sp:4", "pp:2,dp:2", 4, f"{ZERO3} --schedule.waves 2", tied=True, batch=8),
    Case("dp:2@0-1", "cp:3@1-3", 4, f"{BF16} {ZERO3} {SMALL.format('text', 'none', '8bit', 'bfloat16')}"),
    Case("dp:2", "dp:2", 2, f"{BF16} {ZERO3} --model.freeze vision {RECOMPUTE}"),
    Case("dp:3@0-2", "pp:2,dp:2@2-5", 6, f"{BF16} --vision-zero 3 {SGD} --text-zero 2", family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} {OFFLOAD}"),
    Case("sp:2", "tp:2", 2, f"{BF16} {OFFLOAD} --plan.images 2", family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} {OFFLOAD} {RECOMPUTE}"),
    Case("dp:2", "dp:2", 2, OFFLOAD),
    Case("sp:4", "pp:4", 4, f"{BF16} {OFFLOAD} --schedule.waves 3", batch=6),
    Case("dp:2", "tp:2", 2, f"{BF16} {OFFLOAD} {SELECTIVE}"),
    Case("cp:2", "cp:2", 2, f"{BF16} {OFFLOAD} --vision-recompute 1 --text-recompute 2"),
    Case("pp:2@0-1", "pp:2@2-3", 4, f"{BF16} {OFFLOAD} --schedule.run_ahead 2", tied=True, family="qwen3_vl"),
    Case("tp:2", "pp:2", 2, f"{BF16} --text-offload.activations true {SPLIT} --model.freeze text"),
    Case("sp:2", "tp:2", 2, f"{BF16} {OFFLOAD} --vision-chunk 8 --text-chunk 8"),
    # Several micro-batches in one call of the encoder.
    Case("sp:2", "tp:2", 2, f"{BF16} --schedule.waves 3"),
    Case("dp:2", "cp:2", 2, "--schedule.waves 3 --plan.images 2", batch=8),
    Case("sp:4", "pp:2,dp:2", 4, f"{BF16} --schedule.waves 4", batch=16),
    Case("dp:2", "tp:2", 2, "--vision-zero 3 --schedule.waves 4", batch=8),
    Case("sp:2", "pp:2", 2, f"--schedule.waves 4 {OFFLOAD}", batch=8),
    Case("sp:2", "pp:2", 2, f"{BF16} --schedule.waves 4 {SPLIT}", batch=8, family="qwen3_vl"),
    Case("sp:2", "pp:2", 2, f"{BF16} --schedule.waves 3 --model.freeze vision projector", batch=6),
    Case("sp:2", "tp:2", 2, "--schedule.waves 4 --boundary.transport bfloat16", detail="dp:2"),
    # Several calls of the encoder in one micro-batch.
    Case("dp:1", "dp:1", 1, f"{PARTS} --plan.images 3"),
    Case("sp:2", "tp:2", 2, f"{BF16} {PARTS} --plan.images 0 --plan.videos 1 --plan.frames 12", family="qwen3_vl"),
    Case("dp:2", "tp:2", 2, f"{BF16} {PARTS} --plan.images 5", batch=1, family="qwen3_vl"),
    Case("tp:2", "tp:2", 2, f"{PARTS} {RECOMPUTE} --plan.images 4"),
    Case("pp:2,dp:2", "tp:4", 4, f"{BF16} {PARTS} --plan.images 4", family="qwen3_vl"),
    Case("pp:2", "pp:2", 2, f"{PARTS} --schedule.kind recompute --plan.images 3"),
    Case("dp:2", "cp:2", 2, f"{BF16} {PARTS} {ZERO3} --plan.images 3", batch=4),
    Case("sp:2", "pp:2", 2, f"{PARTS} --schedule.waves 3 --plan.images 2", batch=6),
    Case("dp:1@0", "pp:2@1-2", 3, f"{PARTS} --plan.images 4 {OFFLOAD}"),
    Case("dp:2", "pp:2", 2, f"{PARTS} --plan.images 4 --model.freeze vision projector"),
    Case("pp:2", "dp:2", 2, f"{PARTS} --plan.images 4 --model.freeze vision"),
    # Tokens go to all experts, so that each rank gets as many.
    Case("dp:2", "dp:2,ep:2", 2, EVEN, family=MOE),
    Case("dp:2", "tp:2,ep:2", 2, f"{BF16} {EVEN}", family=MOE),
    Case("dp:2", "tp:2", 2, f"{EVEN} {WHOLE} {SELECTIVE}", family=MOE),
    Case("dp:2", "cp:2,ep:2", 2, f"{BF16} {EVEN} {RECOMPUTE}", family=MOE),
    Case("dp:4", "pp:2,dp:2,ep:2", 4, f"{BF16} {EVEN} --text-recompute 1 {OFFLOAD}", family=MOE),
    Case("dp:2", "dp:2,ep:2", 2, f"{BF16} {EVEN} {SELECTIVE} --text-chunk 16", family=MOE),
    Case("dp:4", "tp:2,dp:2,ep:2", 4, f"{BF16} {EVEN} {ZERO3}", family=MOE),
    Case("dp:2", "dp:2,ep:2", 2, f"{BF16} {EVEN} --text-recompute experts", family=MOE),
    Case("dp:4", "tp:2,dp:2,ep:2", 4, f"{EVEN} --text-recompute experts {OFFLOAD}", family=MOE),
    Case("dp:4", "tp:2,dp:2", 4, f"{EVEN} --text-zero 2", family=MOE),
    # Delta nets, whose heads are on more or on fewer ranks than tokens.
    Case("dp:1", "dp:1", 1, LONG, family=DELTA),
    Case("dp:1", "dp:1", 1, f"{BF16} {SELECTIVE} {LONG} --train.micro_batch_size 2", family=DELTA),
    Case("dp:2", "tp:2", 2, f"{BF16} {RECOMPUTE} {LONG}", tied=True, family=DELTA),
    Case("sp:2", "sp:2", 2, f"{BF16} {SELECTIVE} {LONG}", family=DELTA),
    Case("dp:3", "cp:3", 3, f"{BF16} {LONG}", batch=3, family=DELTA),
    Case("dp:3", "cp:3", 3, f"{SELECTIVE} --plan.images 2", batch=3, family=DELTA),
    Case("dp:2", "tp:2", 2, f"{WHOLE} {SELECTIVE} --text-chunk 5", family=DELTA),
    Case("dp:4", "tp:2,pp:2", 4, f"{BF16} {OFFLOAD} {LONG}", family=DELTA),
    Case("dp:4", "pp:2,dp:2", 4, f"{BF16} {ZERO3} --text-recompute 1", family=DELTA),
    Case("dp:1", "dp:1", 1, "--model.freeze text", family=DELTA),
    Case("dp:2", "dp:2,ep:2", 2, f"{BF16} {EVEN} {SELECTIVE} {LONG}", family=DELTA_MOE),
    Case("dp:4", "tp:2,cp:2,ep:2", 4, f"{BF16} {EVEN}", family=DELTA_MOE),
    Case("dp:3", "cp:3,ep:3", 3, f"{BF16} {EVEN} {RECOMPUTE}", batch=3, family=DELTA_MOE),
    # Adapters beside a frozen base.
    Case("dp:1", "dp:1", 1, LORA),
    Case("sp:2", "tp:2", 2, f"{BF16} {LORA} {SELECTIVE}", family="qwen3_vl"),
    Case("dp:2", "tp:2", 2, f"{BF16} --text-lora.r 16 --text-lora.targets *_proj --model.freeze vision projector"),
    Case("tp:2", "tp:2", 2, f"{LORA} --text-tp_overlap true"),
    Case("dp:2", "pp:2", 2, f"{BF16} {LORA} {RECOMPUTE}"),
    Case("dp:2", "dp:2", 2, f"{BF16} {LORA} {ZERO3}"),
    Case("dp:4", "tp:2,dp:2,ep:2", 4, f"{BF16} {EVEN} {LORA}", family=MOE),
    Case("dp:2", "cp:2", 2, f"{BF16} {LORA} --text-lora.patterns.*.in_proj_[ab].r 4 {LONG} {OFFLOAD}", family=DELTA),
]
COMPILED = [
    Case("dp:2", "dp:2,ep:2", 2, f"{EVEN} --model.compile layers", family=MOE),
    Case("sp:2", "tp:2", 2, f"{BF16} --model.compile layers"),
    Case("dp:2", "dp:2", 2, "--model.compile layers", family="qwen3_vl"),
    Case("sp:2", "tp:2", 2, f"--model.compile layers {SELECTIVE}", family="qwen3_vl"),
    Case("dp:2", "tp:2", 2, f"{BF16} --model.compile layers {LONG}", family=DELTA),
    Case("dp:2", "cp:2", 2, f"--model.compile layers {SELECTIVE}", family=DELTA),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models of each family with an untied and with a tied head, and data that only has to exist."""
    kinds = product(("qwen2_5_vl", "qwen3_vl", MOE, DELTA, DELTA_MOE), (False, True))
    found: Folders = {kind: tmp_path_factory.mktemp("plan") for kind in kinds}
    for (family, tied), folder in found.items():
        choice = replace(DEEP, tied=tied, family=family, deepstack=(0, 1, 2), top_k=6)
        write_model(folder / "model", replace(choice, head_dim=16) if family in (DELTA, DELTA_MOE) else choice)
        write_model(folder / "detail", replace(DEEP, vision_layers=2, vision_heads=2, vision_ffn=44, full_layers=(0,)))
        write_data(folder, 8)
    return found


def flags_of(case: Case, folder: Path) -> list[str]:
    """The command line of a case. A setting that the case gives wins."""
    common = (
        f"--model.hf_path {folder}/model --data.registry.d.annotations {folder}/data.jsonl --data.datasets d "
        f"--data.registry.d.images {folder}/images --data.workers 0 --train.iters 1 --log.dir {folder}/log "
        f"--train.global_batch_size {case.batch} --plan.image_side 84 "
        f"--vision-parallel {case.vision} --text-parallel {case.text}"
    )
    usual = "" if "dtype" in case.more else " --model.dtype float32"
    usual += "" if "plan.tokens" in case.more else " --plan.tokens 13"
    if case.detail:
        common += f" --detail-hf_path {folder}/detail --detail-token <|video_pad|>"
        common += f" --detail-parallel {case.detail}"
    return [*common.split(), *usual.split(), *case.more.split()]


BUCKET = 20_000
"""Elements of a bucket of gradients, so that a module has several."""


@pytest.mark.parametrize("case", thinned(CASES, 13) + long(COMPILED), ids=str)
@on_ranks("case.ranks")
def test_an_estimate_is_what_a_step_takes(case: Case, folders: Folders) -> None:
    rank, config = dist.get_rank(), load_config(flags_of(case, folders[case.family, case.tied]))
    with mock.patch.object(gathering, "BUCKET", BUCKET):
        run = build_run(config, Platform(CPU, "gloo"))
        estimate = Estimate.of(config, case.ranks, gpu=False)
    run.writer.close()  # Workers outlive their runs: those of another pool could not write to the same log.dir.
    trainer = run.trainer
    step, live = assumed_step(trainer), _LiveActivations(trainer)
    pools = [_count_buffers(communicator) for communicator in trainer.runner.communicators.values()]
    with live:
        trainer.train_step(1, step)
    expected = dict(zip(KINDS, estimate.memory[rank].tolist(), strict=True))
    optimizers = list(trainer.optimizer.sharded.values())
    weights = _bytes(m.weights.values(name) for m in trainer.optimizer.modules for name in m.parameters)
    assert expected["weights"] == pytest.approx(weights, rel=0.05)
    assert expected["gradients"] == pytest.approx(sum(map(_gradient_bytes, trainer.optimizer.modules)), rel=0.05)
    states, on_host = (sum(_optimizer_bytes(o, on_host=host) for o in optimizers) for host in (False, True))
    assert expected["optimizer"] == pytest.approx(states, rel=0.05)
    assert estimate.host_states[rank] == pytest.approx(on_host, rel=0.05)
    on_host = sum(_offloaded_bytes(module) for module in trainer.optimizer.modules if module.view == MAIN)
    layouts = estimate.job.layouts
    stays = [each.stays for (name, at), each in estimate.parameters.items() if rank in layouts[name].stage(at).ranks]
    assert max(stays, default=0) <= live.most_gathered <= expected["workspace"]
    # What the backward pass of one layer's experts saves again counts as workspace.
    again = expected["workspace"] * any(module.recompute.experts for module in estimate.job.modules.values())
    assert 0.95 * live.peak <= expected["activations"] + again and expected["activations"] <= 1.05 * live.peak
    assert estimate.host_activations[rank] == pytest.approx(on_host, rel=0.05)
    # A buffer for no rows takes a byte.
    assert -8 <= expected["boundary"] - sum(pool.peak for pool in pools) <= 0.03 * sum(expected.values())
    for module in trainer.optimizer.modules:
        stages = [chunk.stage for chunk in module.chunks]
        found = parameters_of(trainer.job.modules[module.name], module.holders.size(), stages, module.view.name)
        assert [p.name for p in found] == list(module.parameters)
        assert sum(p.elements for p in found) == sum(p.numel() for p in module.parameters.values())
    for boundary in estimate.boundaries:
        plans = [m.rows[boundary.edge] for m in step.micro_batches if boundary.edge in m.rows]
        of_rank = boundary.ranks.tolist().index(rank) if rank in boundary.ranks else None
        for name in boundary.directions if of_rank is not None else ():
            directions = [d for d in (getattr(plan, name) for plan in plans) if d]
            received, sent = (
                int(boundary.in_step(name, count)[of_rank])
                for count in (lambda traffic: traffic.received.sum(axis=0), lambda traffic: traffic.sent.sum(axis=0))
            )
            exchanges = boundary.in_step(name, lambda traffic: len(traffic.phases))
            assert _rows(directions) == (received, sent, exchanges), name


def _rows(directions: Sequence[Any]) -> tuple[int, int, int]:
    """Rows received and sent, and exchanges, in all micro-batches."""
    return (
        sum(received_rows(d) for d in directions),
        sum(sent_rows(d) for d in directions),
        sum(len(d.exchanges) for d in directions),
    )


# ---------------------------------------------------------------------------------------------------- measures


def _bytes(tensors: Any) -> int:
    """Bytes of the storages of tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _gradient_bytes(module: Any) -> int:
    if isinstance(module.gradients, BufferedGradients):
        return sum(gradients.nbytes for gradients in module.gradients.memory)
    return sum(gradients.nbytes for gradients in module.gradients.summed)


def _offloaded_bytes(module: Any) -> int:
    """Host memory for activations: the most in use at once."""
    offload = module.chunks[0].offload
    return 0 if offload is None else offload.pool.nbytes


def _optimizer_bytes(optimizer: Any, *, on_host: bool) -> int:
    """States, and master weights that are not the weights, on host or device."""
    if optimizer is None:
        return 0
    states = [s for shard in optimizer.shards.values() for s in (shard.master, *shard.moments.values())]
    kept = optimizer.module.weights.values
    weights = {kept(name).untyped_storage().data_ptr() for name in optimizer.module.parameters}
    tensors = [t for stored in states for t in vars(stored).values() if isinstance(t, Tensor)]
    tensors = [t for t in tensors if t.untyped_storage().data_ptr() not in weights]
    return _bytes(tensors) if optimizer.algorithm.offload == on_host else 0


class _CountedBuffers(BufferPool):
    """Buffers that record their peak."""

    def __init__(self, width: int, device: torch.device):
        super().__init__(width, device)
        self.lent, self.peak = 0, 0

    def acquire(self, size: int) -> Tensor:
        buffer = super().acquire(size)
        self.lent += buffer.nbytes
        self.peak = max(self.peak, self.lent + sum(b.nbytes for b in self._free))
        return buffer

    def release(self, buffer: Tensor) -> None:
        super().release(buffer)
        self.lent -= buffer.nbytes


def _count_buffers(communicator: Any) -> _CountedBuffers:
    communicator._buffers = _CountedBuffers(communicator.width, communicator.device)
    return communicator._buffers


class _SavedTensor:
    """A tensor that autograd saves, counted until autograd frees it."""

    def __init__(self, tensor: Tensor, counts: dict[int, list[int]]):
        self.tensor, self.counts, self.address = tensor.detach(), counts, tensor.untyped_storage().data_ptr()
        self.counts.setdefault(self.address, [0, tensor.untyped_storage().nbytes()])[0] += 1

    def __del__(self) -> None:
        self.counts[self.address][0] -= 1
        if not self.counts[self.address][0]:
            del self.counts[self.address]


class _LiveActivations:
    """Tracks the peak bytes on this rank of what autograd saves, without parameters, of where tokens go to experts, and
    of the hidden states and rows of micro-batches. Each storage counts once.
    """

    def __init__(self, trainer: Trainer):
        self.peak, self.saved, self.execution, self.most_gathered = 0, {}, None, 0
        self.copies = WeakSet[activations.SavedStorage]()
        kept = [m.weights.values(name) for m in trainer.optimizer.modules for name in m.parameters]
        self.parameters = {t.untyped_storage().data_ptr() for t in kept}
        parts = [
            part for m in trainer.optimizer.modules if m.view == MAIN for chunk in m.chunks for part in chunk.modules()
        ]
        self.shared = [each for part in parts for group in fsdp_groups(part) for each in group.fsdp_params]
        self.hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self.copying = mock.patch.object(activations, "SavedStorage", partial(_CountedCopy, self))
        self.moves = list[ref[Dispatch]]()
        self.dispatching = mock.patch.object(Dispatch, "of", partial(self._dispatch, Dispatch.of))
        trainer.runner.watch = _Sampler(trainer.topology.platform, self)
        self.executing = mock.patch("megatron_hetero.step.runner.StepExecution", self._execute)

    def __enter__(self) -> Self:
        self.hooks.__enter__()
        self.copying.start()
        self.dispatching.start()
        self.executing.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.executing.stop()
        self.dispatching.stop()
        self.copying.stop()
        self.hooks.__exit__(*error)

    def _execute(self, *args: Any) -> StepExecution:
        self.execution = StepExecution(*args)
        return self.execution

    def _dispatch(self, of: Callable[..., Dispatch], *args: Any) -> Dispatch:
        found = of(*args)
        self.moves.append(ref(found))
        return found

    def _gathered(self) -> Iterator[Tensor]:
        """Weights that ZeRO 2 and 3 have gathered."""
        return (t for each in self.shared if hasattr(each, "_unsharded_param") for t in each.all_gather_outputs)

    def _pack(self, tensor: Tensor) -> Any:
        is_weight = any(isinstance(t, torch.nn.Parameter) for t in (tensor, tensor._base))
        # Experts save views of them.
        is_weight |= tensor.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in self._gathered()}
        if is_weight or tensor.untyped_storage().data_ptr() in self.parameters or not tensor.untyped_storage().nbytes():
            return _Plain(tensor)
        kept = _SavedTensor(tensor, self.saved)
        self.sample()
        return kept

    def sample(self) -> None:
        """Record what is live now."""
        self.most_gathered = max(self.most_gathered, sum(t.untyped_storage().nbytes() for t in self._gathered()))
        offloaded = [copy.device for copy in self.copies if copy.device is not None]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*offloaded, *self._held())}
        extra = sum(size for address, size in held.items() if address not in self.saved)
        self.peak = max(self.peak, extra + sum(size for _, size in self.saved.values()))

    def _held(self) -> Iterator[Tensor]:
        dispatches = (found for each in self.moves if (found := each()) is not None)
        yield from (x for found in dispatches for x in tree_leaves(vars(found)) if isinstance(x, Tensor))
        live = [] if self.execution is None else self.execution.live.values()
        for activation in chain.from_iterable(micro_batch.stages.values() for micro_batch in live):
            yield from (t for t in (activation.hidden, activation.embedded) if t is not None)
            for named in (activation.outputs, activation.called, activation.received, activation.row_grads):
                yield from named.values()
            yield from (buffer for buffer, _ in activation.receives.values())
            given, _ = activation.in_chunks or (InChunks(()), None)
            yield from (part.patches for part in given.chunks if part.patches is not None)
        for rows in chain.from_iterable(micro_batch.rows.values() for micro_batch in live):
            yield from (t for leaf in rows.leaves.values() for t in (leaf, leaf.grad) if t is not None)
        for crossing in chain.from_iterable(micro_batch.crossings.values() for micro_batch in live):
            if crossing._wire_dtype == crossing._dtype:
                yield crossing._output
            phases: Any = crossing._phases
            frame = phases.gi_frame  # Sent rows live as long as the exchange.
            if frame is not None:
                yield frame.f_locals["rows"]


class _CountedCopy(activations.SavedStorage):
    """An offloaded tensor, while it is on the device."""

    def __init__(self, live: _LiveActivations, saved: Tensor):
        super().__init__(saved)
        self.live = live
        live.copies.add(self)
        live.sample()

    def bring(self, device: Tensor) -> None:
        super().bring(device)
        self.live.sample()


class _Plain:
    """A tensor that is not counted."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class _Sampler(Stopwatch):
    """Samples after every action."""

    def __init__(self, platform: Platform, live: _LiveActivations):
        super().__init__(platform)
        self.live = live

    @contextlib.contextmanager
    def lap(self, name: str, label: str = "") -> Iterator[None]:
        with super().lap(name, label):
            yield
        self.live.sample()
