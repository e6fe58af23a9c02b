"""Runs that start from a PEFT folder and export one, or a merged model: `peft` finds the trained model in either."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import Estimate
from megatron_hetero.estimate.report import assumptions
from megatron_hetero.hf.peft_folders import ADAPTER_WEIGHTS
from tests.parity.cases import MODELS, SPLIT, Case, flags_of, zero
from tests.support.adapters import logits, write_adapter
from tests.support.folders import write_data, write_model
from tests.support.matrix import thinned
from tests.support.pool import Pools
from tests.support.runs import build

pytest.importorskip("peft")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES = [
    Case("sp:2", "tp:2", 2, micro=2),
    Case("tp:2", "pp:2", 2, model="delta", flags=("--text-layers", "2", "2")),
    Case("dp:2", "tp:2,ep:2", 2, model="delta-moe", micro=2),
    Case("dp:2", "dp:2", 2, flags=zero(3, 3)),
    Case("tp:2", "pp:2,tp:2", 4, model="moe", flags=SPLIT),
]


def write(flags: list[str], targets: list[Path]) -> list[float]:
    """Train the configured steps, and export the model to each of these folders, the last one merged."""
    run = build(flags)
    losses = [run.trainer.train_step(step, batch).loss for step, batch, _ in run.batches()]
    run.export(targets[0])
    return losses


def refusal(flags: list[str]) -> str:
    """Return the error of a run that does not start."""
    try:
        build(flags)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", thinned(CASES, 3), ids=str)
def test_a_run_from_one_folder_to_another(case: Case, tmp_path: Path, pools: Pools) -> None:
    base = write_model(tmp_path / "model", MODELS[case.model])
    write_data(tmp_path, case.batch)
    options = {"target_parameters": EXPERTS} if "moe" in case.model else {}
    targets = ["q_proj", "o_proj", "down_proj", "qkv", "in_proj_qkv"]
    saved = ["merger.mlp.0", "merger.linear_fc1"]
    start = write_adapter(base, tmp_path / "start", target_modules=targets, modules_to_save=saved, **options)
    flags = f"--vision-lora.hf_path {start} --text-lora.hf_path {start} --train.iters 1 --optimizer.schedule constant"
    still = flags_of(case, tmp_path, *flags.split(), "--optimizer.lr", "1e-30", "--model.freeze", "projector")
    same, trained, merged = (tmp_path / name for name in ("same", "trained", "merged"))
    pools(case.ranks).run(write, [*still, "--export.hf_dir", str(same)], [same])
    want, got = (load_file(folder / ADAPTER_WEIGHTS) for folder in (start, same))
    assert want.keys() <= got.keys() and all(torch.equal(got[name], each) for name, each in want.items())
    assert not any(got[name].any() for name in got.keys() - want.keys())
    moves = flags_of(case, tmp_path, *flags.split(), "--optimizer.lr", "1e-2")
    losses = [
        pools(case.ranks).run(write, [*moves, "--export.hf_dir", str(folder), *more], [folder])[0]
        for folder, more in ((trained, ()), (merged, ("--export.merge", "true")))
    ]
    assert losses[0] == losses[1]
    after = load_file(trained / ADAPTER_WEIGHTS)
    assert all(not torch.equal(after[name], each) for name, each in want.items())
    expected = logits(base, trained)
    assert (logits(merged) - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (logits(base, start) - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("module", ["text", "vision"])
def test_a_default_export_is_a_start(module: str, tmp_path: Path, pools: Pools) -> None:
    """Of adapters of one module with the projector: the encoder stays as it is."""
    case, other = Case("sp:2", "tp:2", 2, micro=2), {"text": "vision", "vision": "text"}[module]
    write_model(tmp_path / "model", MODELS[case.model])
    write_data(tmp_path, case.batch)
    one, same, more = (tmp_path / name for name in ("one", "same", "more"))
    steps = "--train.iters 1 --optimizer.schedule constant --optimizer.lr"
    first = f"--{module}-lora.r 2 --model.freeze {other} {steps} 1e-2 --export.hf_dir {one}"
    pools(2).run(write, flags_of(case, tmp_path, *first.split()), [one])
    start = f"--{module}-lora.hf_path {one} "
    start += f"--vision-lora.hf_path {one}" if module == "text" else "--model.freeze text"
    for target, rate in ((same, "1e-30"), (more, "1e-2")):
        flags = f"{start} {steps} {rate} --export.hf_dir {target}"
        pools(2).run(write, flags_of(case, tmp_path, *flags.split()), [target])
    want, got, after = (load_file(folder / ADAPTER_WEIGHTS) for folder in (one, same, more))
    assert any("merger" in name for name in want) and not any("blocks" in name for name in want if "lora" not in name)
    assert got.keys() == want.keys() == after.keys()
    for name, each in want.items():
        assert torch.equal(got[name], each) and not torch.equal(after[name], each), name
    planned = assumptions(Estimate.of(load_config(flags_of(case, tmp_path, *start.split())), 2))
    assert f"Adapters of {module}: r 2 beside " in " ".join(planned)


def test_runs_that_do_not_start(tmp_path: Path, pools: Pools) -> None:
    """What an export could not have is refused before anything trains."""
    case = Case("dp:1", "dp:1", 1, model="tied")
    write_model(tmp_path / "model", MODELS["tied"])
    write_data(tmp_path, case.batch)
    out = f"--export.hf_dir {tmp_path}/out"
    for flags, message in (
        (
            f"{out} --export.merge true",
            "export.merge (--export.merge): found True, ",
        ),
        (f"{out} --vision-lora.r 2", "model.language_model.embed_tokens, which trains in full"),
        (f"{out} --text-lora.r 2 --model.train vision text.q", "model.train"),
    ):
        assert message in pools(1).run(refusal, flags_of(case, tmp_path, *flags.split()))[0]
    fine = f"{out} --vision-lora.r 2 --export.merge true"
    assert not pools(1).run(refusal, flags_of(case, tmp_path, *fine.split()))[0]
