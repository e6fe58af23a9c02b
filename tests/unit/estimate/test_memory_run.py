"""Memory and traffic of plans against real steps of small models on gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import KINDS, Plan
from megatron_hetero.schedule import gathering
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import long, thinned
from tests.support.pool import Pool
from tests.unit.estimate import jobs_plan as jobs

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
WHOLE = "--model.sequence_parallel.vision false --model.sequence_parallel.text false"
RECOMPUTE = "--model.recompute.vision full --model.recompute.text full"
SELECTIVE = "--model.recompute.vision selective --model.recompute.text selective"
ZERO3 = "--zero.vision 3 --zero.text 3"
OFFLOAD = "--offload.vision.activations true --offload.text.activations true"
SPLIT = "--parallel_layers.text 1 3"
SMALL = "--precision.{0}.master {1} --precision.{0}.moments {2} --precision.{0}.gradients {3}"
HALVES = "--precision.vision.master split --precision.vision.gradients bfloat16"
CASES = [
    Case("dp:1", "dp:1", 1),
    Case("dp:1", "dp:1", 1, f"{BF16} {RECOMPUTE}", tied=True),
    Case("dp:1", "dp:1", 1, "--model.freeze vision --plan.images 2"),
    Case("dp:1", "dp:1", 1, f"--model.freeze text {BF16}"),
    Case("dp:1", "dp:1", 1, "--model.freeze visual.blocks.*.mlp.* model.layers.*.mlp.* model.embed_tokens.*"),
    Case("dp:2", "tp:2", 2, f"{BF16} --model.train model.layers.*.self_attn.*"),
    Case("dp:1", "dp:1", 1, "--plan.images 0"),
    Case("sp:2", "tp:2", 2, BF16),
    Case("sp:2", "tp:2", 2, f"{BF16} {SMALL.format('text', 'split', 'bfloat16', 'bfloat16')}"),
    Case("dp:4", "pp:2,dp:2", 4, f"{BF16} {SMALL.format('text', 'none', '8bit', 'bfloat16')} {HALVES}", tied=True),
    Case("dp:3@0-2", "tp:2@2-3", 4, f"{BF16} {SMALL.format('vision', 'float32', '8bit', 'float32')}"),
    Case("dp:2", "pp:2", 2, f"{BF16} {HALVES} --offload.text.states true --precision.text.moments 8bit"),
    Case("dp:2", "cp:2", 2, "--precision.text.moments 8bit --precision.vision.moments bfloat16"),
    Case("dp:2", "dp:2", 2, f"{BF16} {SGD} --precision.text.master split --precision.vision.master none"),
    Case("tp:2", "tp:2", 2, f"{WHOLE} {SGD} {BF16}"),
    Case("cp:2", "cp:2", 2, "--train.micro_batch_size 2"),
    Case("dp:2", "cp:2", 2, "--boundary.transport bfloat16"),
    Case("dp:1@0", "dp:1@1", 2, f"{RECOMPUTE} --schedule.run_ahead 2"),
    Case("sp:2,tp:2", "tp:4", 4, f"{BF16} --model.freeze vision projector"),
    Case("sp:4", "pp:4", 4, "--schedule.waves 3", batch=6),
    Case("sp:4", "tp:2,pp:2", 4, f"{BF16} --schedule.kind recompute", tied=True),
    Case("dp:4", "pp:2,dp:2", 4, "--schedule.virtual_stages 2", tied=True, batch=8),
    Case("dp:2@0-1", "pp:2@2-3", 4, f"{BF16} --parallel_layers.text 1 3"),
    Case("pp:2,sp:2", "cp:2,tp:2", 4, "--train.micro_batch_size 2 --plan.images 2", batch=8),
    Case("dp:3@0-2", "tp:2@2-3", 4, "--plan.images 2 --model.freeze projector"),
    Case("sp:2", "tp:2", 2, detail="dp:2"),
    Case("dp:2@0-1", "pp:2@2-3", 4, f"{BF16} --model.freeze detail", detail="sp:2@2-3"),
    Case("dp:1", "dp:1", 1, family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} {RECOMPUTE}", tied=True, family="qwen3_vl"),
    Case("sp:2", "tp:2", 2, BF16, family="qwen3_vl"),
    Case("tp:2", "cp:2", 2, f"{WHOLE} --plan.images 2", tied=True, family="qwen3_vl"),
    Case("sp:4", "pp:4", 4, "--parallel_layers.text 1 1 1 1", batch=6, family="qwen3_vl"),
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
    Case("sp:2", "pp:2", 2, f"{BF16} {SELECTIVE} --parallel_layers.text 1 3"),
    Case("dp:2@0-1", "pp:2@2-3", 4, f"{BF16} {SELECTIVE}", family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} --model.recompute.vision 3 --model.recompute.text 1"),
    Case("sp:2", "tp:2,pp:2", 4, f"{BF16} --model.recompute.vision 1 --model.recompute.text 2"),
    Case("pp:2", "pp:2", 2, "--model.recompute.vision 1 --model.recompute.text 1", family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} --model.chunk.vision 8 --model.chunk.text 8"),
    Case("sp:2", "tp:2", 2, f"{BF16} {SELECTIVE} --model.chunk.vision 8 --model.chunk.text 8", family="qwen3_vl"),
    Case("tp:2", "tp:2", 2, f"{WHOLE} --model.chunk.vision 8 --model.chunk.text 8 --model.freeze text"),
    Case("cp:2", "cp:2", 2, f"{BF16} {RECOMPUTE} --model.chunk.vision 8 --model.chunk.text 5"),
    Case("cp:3", "dp:3", 3, "--zero.vision 3", family="qwen3_vl", batch=6),
    Case("dp:3", "cp:3", 3, f"{BF16} {ZERO3}", tied=True),
    Case("dp:2", "tp:2", 2, f"{BF16} --zero.vision 2 {HALVES}"),
    Case("sp:4", "pp:2,dp:2", 4, f"{ZERO3} --schedule.waves 2", tied=True, batch=8),
    Case("dp:2@0-1", "cp:3@1-3", 4, f"{BF16} {ZERO3} {SMALL.format('text', 'none', '8bit', 'bfloat16')}"),
    Case("dp:2", "dp:2", 2, f"{BF16} {ZERO3} --model.freeze vision {RECOMPUTE}"),
    Case("dp:3@0-2", "pp:2,dp:2@2-5", 6, f"{BF16} --zero.vision 3 {SGD} --zero.text 2", family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} {OFFLOAD}"),
    Case("sp:2", "tp:2", 2, f"{BF16} {OFFLOAD} --plan.images 2", family="qwen3_vl"),
    Case("dp:1", "dp:1", 1, f"{BF16} {OFFLOAD} {RECOMPUTE}"),
    Case("dp:2", "dp:2", 2, OFFLOAD),
    Case("sp:4", "pp:4", 4, f"{BF16} {OFFLOAD} --schedule.waves 3", batch=6),
    Case("dp:2", "tp:2", 2, f"{BF16} {OFFLOAD} {SELECTIVE}"),
    Case("cp:2", "cp:2", 2, f"{BF16} {OFFLOAD} --model.recompute.vision 1 --model.recompute.text 2"),
    Case("pp:2@0-1", "pp:2@2-3", 4, f"{BF16} {OFFLOAD} --schedule.run_ahead 2", tied=True, family="qwen3_vl"),
    Case("tp:2", "pp:2", 2, f"{BF16} --offload.text.activations true {SPLIT} --model.freeze text"),
    Case("sp:2", "tp:2", 2, f"{BF16} {OFFLOAD} --model.chunk.vision 8 --model.chunk.text 8"),
    # Several micro-batches in one call of the encoder.
    Case("sp:2", "tp:2", 2, f"{BF16} --schedule.waves 3"),
    Case("dp:2", "cp:2", 2, "--schedule.waves 3 --plan.images 2", batch=8),
    Case("sp:4", "pp:2,dp:2", 4, f"{BF16} --schedule.waves 4", batch=16),
    Case("dp:2", "tp:2", 2, "--zero.vision 3 --schedule.waves 4", batch=8),
    Case("sp:2", "pp:2", 2, f"--schedule.waves 4 {OFFLOAD}", batch=8),
    Case("sp:2", "pp:2", 2, f"{BF16} --schedule.waves 4 {SPLIT}", batch=8, family="qwen3_vl"),
    Case("sp:2", "pp:2", 2, f"{BF16} --schedule.waves 3 --model.freeze vision projector", batch=6),
    Case("sp:2", "tp:2", 2, "--schedule.waves 4 --boundary.transport bfloat16", detail="dp:2"),
]
COMPILED = [
    Case("sp:2", "tp:2", 2, f"{BF16} --model.compile layers"),
    Case("dp:2", "dp:2", 2, "--model.compile layers", family="qwen3_vl"),
    Case("sp:2", "tp:2", 2, f"--model.compile layers {SELECTIVE}", family="qwen3_vl"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Models of each family with an untied and with a tied head, and data that only has to exist."""
    kinds = product(("qwen2_5_vl", "qwen3_vl"), (False, True))
    found: Folders = {kind: tmp_path_factory.mktemp("plan") for kind in kinds}
    for (family, tied), folder in found.items():
        write_model(folder / "model", replace(DEEP, tied=tied, family=family, deepstack=(0, 1, 2)))
        write_model(folder / "detail", replace(DEEP, vision_layers=2, vision_heads=2, vision_ffn=44, full_layers=(0,)))
        write_data(folder, 8)
    return found


def flags_of(case: Case, folder: Path) -> list[str]:
    """The command line of a case. A setting that the case gives wins."""
    common = (
        f"--model.hf_path {folder}/model --data.registry.d.annotations {folder}/data.jsonl --data.datasets d "
        f"--data.registry.d.images {folder}/images --data.workers 0 --train.iters 1 --log.dir {folder}/log "
        f"--train.global_batch_size {case.batch} --plan.image_side 84 --plan.tokens 13 "
        f"--vision-parallel {case.vision} --text-parallel {case.text}"
    )
    dtype = "" if "dtype" in case.more else " --model.dtype float32"
    if case.detail:
        common += f" --model.encoders.detail.hf_path {folder}/detail --model.encoders.detail.token <|video_pad|>"
        common += f" --detail-parallel {case.detail}"
    return [*common.split(), *dtype.split(), *case.more.split()]


@pytest.mark.parametrize("case", thinned(CASES, 4) + long(COMPILED), ids=str)
def test_plan_is_what_a_step_takes(
    case: Case,
    folders: dict[tuple[str, bool], Path],
    pools: Callable[[int], Pool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With small buckets, so that a module has several."""
    monkeypatch.setattr(gathering, "BUCKET", jobs.BUCKET)
    flags = flags_of(case, folders[case.family, case.tied])
    measured = pools(case.ranks).run(jobs.measure, flags)
    plan = Plan.of(load_config(flags), case.ranks, gpu=False)
    for rank, found in enumerate(measured):
        planned = dict(zip(KINDS, plan.memory[rank].tolist(), strict=True))
        for kind in ("weights", "gradients", "optimizer"):
            assert planned[kind] == pytest.approx(found[kind], rel=0.05), f"{kind} of rank {rank}"
        stays = [each.stays for (name, at), each in plan.gathered.items() if rank in plan.layouts[name].stage(at).ranks]
        assert max(stays, default=0) <= found["gathered"] <= planned["workspace"], f"rank {rank}"
        assert planned["activations"] == pytest.approx(found["activations"], rel=0.05), f"rank {rank}"
        # A buffer for no rows takes a byte.
        assert -8 <= planned["boundary"] - found["boundary"] <= 0.03 * sum(planned.values()), f"rank {rank}"
        assert found["planned"] == found["parameters"]
        assert plan.host_states[rank] == pytest.approx(found["host"], rel=0.05)
        assert plan.host_activations[rank] == pytest.approx(found["host activations"], rel=0.05), f"rank {rank}"
    for boundary in plan.boundaries:
        for name in boundary.directions:
            counts = (lambda traffic: traffic.received, lambda traffic: traffic.sent)
            received, sent = (boundary.of_step(name, count).tolist() for count in counts)
            exchanges = boundary.of_step(name, lambda traffic: len(traffic.stages))
            for rank, *rows in zip(boundary.ranks.tolist(), received, sent, strict=True):
                assert measured[rank][name][str(boundary.edge)] == (*rows, exchanges)
