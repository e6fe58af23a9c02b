"""Checkpoints of runs with adapters: small, and resumed wherever whole ones are, beside the same base."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hetero.base.outputs import MARK
from megatron_hetero.checkpoint.convert import import_folders
from megatron_hetero.checkpoint.record import ModelSources
from megatron_hetero.cli import export
from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import flip, require_exact_resume, same
from tests.functional.checkpoint.conftest import Untouched
from tests.functional.checkpoint.runs import BF16, HOST, SMALL, flags, zero
from tests.support.matrix import thinned
from tests.support.pool import Pools

LORA = "--vision-lora.r 3 --text-lora.r 4 --text-lora.alpha 8 --text-lora.patterns.v_proj.r 2 --data.workers 0"
DROPOUT = "--vision-lora.dropout 0.2 --text-lora.dropout 0.2"
DETAIL = "--detail-hf_path TOWERS/detail --detail-token <|video_pad|> --detail-lora.r 2"


@dataclass(frozen=True)
class Link:
    """A run that resumes from another."""

    vision: str
    text: str
    ranks: int = 2
    more: str = ""


CHAINS = {
    "plain": ("sp:2", "tp:2", "", [
        Link("dp:2", "dp:2", more=zero(2, 3)),
        Link("dp:1@0", "dp:1@1", more=f"--train.micro_batch_size 2 {HOST} --schedule.run_ahead 2"),
    ]),
    "qwen3-tied": ("dp:2", "pp:2", "--text-lora.targets q_proj v_proj *.mlp.*_proj --model.freeze vision", [
        Link("sp:4", "pp:2,tp:2", 4),
        Link("dp:4", "dp:2,cp:2", 4, zero(3, 3)),
    ]),
    "moe": ("dp:2", "dp:2,ep:2", "", [
        Link("sp:2", "tp:2,ep:1"),
        Link("dp:1@0", "dp:2,ep:1@1-2", 3, "--text-zero 3"),
    ]),
    "towers/plain": ("dp:2", "tp:2", f"--detail-parallel sp:2 {DETAIL}", [
        Link("dp:1@0", "tp:2@2-3", 4, "--train.micro_batch_size 2 --detail-parallel dp:1@1"),
        Link("tp:2", "dp:2", 2, f"{zero(1, 3)} --detail-parallel dp:2 --detail-zero 3"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(CHAINS, 4))
def test_other_layouts_continue(name: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    vision, text, more, links = CHAINS[name]
    root, model = (folders / "towers", "plain") if name.startswith("towers/") else (folders, name)
    common = f"{LORA} {DROPOUT} {more}".replace("TOWERS", str(root))
    whole = pools(2).run(jobs.train, flags(root, tmp_path / "whole", vision, text, common, model))[0]
    written = tmp_path / "whole/checkpoints/step-00000002"
    require_small(written, root / model)
    for number, link in enumerate(links):
        line = flags(root, tmp_path / f"{number}", link.vision, link.text, f"{common} {link.more}", model)
        found = pools(link.ranks).run(
            jobs.train, [*line, "--checkpoint.resume", str(written)], tmp_path / f"{number}/copy"
        )[0]
        assert found["from"] == 2
        same(written, tmp_path / f"{number}/copy/step-00000002", but="random/")
        np.testing.assert_allclose(found["losses"], whole["losses"][2:], rtol=0, atol=1e-5)
        for name, values in whole["weights"].items():
            np.testing.assert_allclose(found["weights"][name], values, rtol=0, atol=2e-5)


def require_small(checkpoint: Path, model: Path) -> None:
    """Check that a checkpoint has weights and AdamW's states of what trains in fp32, and little more."""
    found = jobs.tensors(checkpoint)
    trained = [key.removeprefix("weights/") for key in found if key.startswith("weights/")]
    assert {name.rpartition(".lora_")[1] != "" or "merger" in name for name in trained} == {True}
    assert sum("lora_" in name for name in trained) > len(trained) / 2
    numbers = sum(found[f"weights/{name}"].numel() for name in trained)
    files = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    entries = 3 * len(trained)
    assert 12 * numbers < sum(files.values()) < 12 * numbers + 700 * entries + 40_000
    base = sum(values.numel() for values in load_file(model / "model.safetensors").values())
    assert numbers < base / 2


@pytest.mark.parametrize("more", thinned([
    f"{zero(3, 3)} {SMALL}",
    f"--model.dtype bfloat16 {HOST} --text-precision.moments 8bit",
    f"{BF16} {zero(2, 1)} --vision-precision.master none --optimizer.name sgd --optimizer.weight_decay 0",
], 3))  # fmt: skip
def test_a_resume_is_exact(more: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    more = f"{BF16} {LORA} {DROPOUT} --train.iters 4 --checkpoint.interval 100 {more}"
    require_exact_resume(pools, tmp_path, lambda run: flags(folders, tmp_path / run, "sp:2", "dp:2", more, "qwen3"))


def test_adapters_start_from_an_import(folders: Path, tmp_path: Path, pools: Pools) -> None:
    """As from the folder itself, also in their next run, which reads the base from the folder."""
    imported = tmp_path / "imported/checkpoints"
    import_folders(ModelSources(folders / "plain"), imported / "step-00000000")

    def line(run: str, more: str = "") -> list[str]:
        return flags(folders, tmp_path / run, "sp:2", "tp:2", f"{LORA} --checkpoint.interval 100 {more}")

    expected = pools(2).run(jobs.train, line("folder"))[0]
    first = pools(2).run(jobs.train, line("imported"), None, 2)[0]
    second = pools(2).run(jobs.train, line("imported"))[0]
    assert first["losses"] + second["losses"] == expected["losses"]
    assert any("weights imported from" in note for note in first["notes"]) and second["from"] == 2
    same(tmp_path / "folder/checkpoints/step-00000004", imported / "step-00000004", but="")


def test_what_does_not_fit_is_refused_on_all_ranks(folders: Path, tmp_path: Path, pools: Pools) -> None:
    model, run = shutil.copytree(folders / "plain", tmp_path / "model"), tmp_path / "run"

    def line(more: str = LORA) -> list[str]:
        return flags(folders, run, "sp:2", "tp:2", f"--model.hf_path {model} {more}")

    def error(line: list[str]) -> str:
        [message, other] = pools(2).run(jobs.error_of, line)
        assert message == other
        return message

    pools(2).run(jobs.train, line(), None, 2)
    checkpoint = run / "checkpoints/step-00000002"
    export = f"python -m megatron_hetero.cli.export {checkpoint} DIR --merge"
    assert export in error(line("--data.workers 0"))
    assert "found r 5 at model.layers.0.self_attn" in error(line(f"{LORA} --text-lora.r 5"))
    weights = load_file(model / "model.safetensors")
    changed: dict[str, Any] = {
        name: values + 1e-3 if "blocks.1.norm2" in name else values for name, values in weights.items()
    }
    save_file(changed, model / "model.safetensors", {"format": "pt"})
    assert "other weights" in error(line(f"{LORA} --checkpoint.allow_changes model.hf_path"))
    (model / "model.safetensors").unlink()
    assert f"{model}: found no safetensors weights" in error(line())
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    moved = line(f"{LORA} --model.hf_path {model.rename(tmp_path / 'moved')}")
    assert error(moved) == "no error: it resumes after step 2"
    flip(checkpoint)
    assert "damaged" in error(moved)


def train_and_export(flags: list[str], *targets: Path) -> None:
    """Train as the program does, with checkpoints, and export a PEFT folder and a merged model at the end."""
    run = jobs.build_logged(flags)
    with run.writer:
        for step, batch, _ in run.batches():
            run.trainer.train_step(step, batch)
            run.saver.after(step)
        for target, merge in zip(targets, (False, True), strict=True):
            job = run.trainer.job
            config = replace(job.config, export=replace(job.config.export, hf_dir=target, merge=merge))
            replace(run, trainer=replace(run.trainer, job=replace(job, config=config))).export(target)


EXPORTS = {
    "plain": ("sp:2", "tp:2", "--model.dtype bfloat16"),
    "moe": ("dp:2", "pp:2", ""),
    "towers/qwen3": ("dp:2", "dp:2", f"--detail-parallel dp:2 {DETAIL} --model.freeze vision projector {zero(1, 3)}"),
}


@pytest.mark.parametrize("name", thinned(EXPORTS, 2))
def test_exports_have_the_bytes_of_the_runs_own(
    name: str, folders: Path, tmp_path: Path, pools: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    vision, text, more = EXPORTS[name]
    root, model = (folders / "towers", "qwen3") if name.startswith("towers/") else (folders, name)
    more = f"{LORA} {more}".replace("TOWERS", str(root))
    line = flags(root, tmp_path / "run", vision, text, more, model)
    own = [tmp_path / "peft", tmp_path / "merged"]
    pools(2).run(train_and_export, line, *own)
    checkpoint = str(tmp_path / "run/checkpoints")
    for target, option in zip(own, ([], ["--merge"]), strict=True):
        assert export.main([checkpoint, str(tmp_path / "export"), *option]) == 0, capsys.readouterr().err
        found, expected = contents(tmp_path / "export"), contents(target)
        weights = {name for name in found if option and name.endswith(".safetensors")}
        assert found.keys() == expected.keys() and len(weights) == (1 + name.startswith("towers/") if option else 0)
        assert [name for name in found.keys() - weights if found[name] != expected[name]] == []
        for file in weights:  # Products of the same numbers may be rounded otherwise in the last bit.
            require_near(load_file(tmp_path / "export" / file), load_file(target / file))
    assert export.main([checkpoint, str(tmp_path / "export"), "--merge", "--dtype", "float32"]) == 0
    assert contents(tmp_path / "export").keys() == contents(own[1]).keys()


def require_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in found.items():
        assert values.dtype == expected[name].dtype
        torch.testing.assert_close(
            values, expected[name], rtol=2**-7 if values.dtype == torch.bfloat16 else 1e-6, atol=1e-7
        )
        if values.dtype == torch.bfloat16:
            assert int((values != expected[name]).sum()) <= 2


def test_exports_need_the_base_only_to_merge(
    folders: Path, untouched: Untouched, tmp_path: Path, pools: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    line = flags(folders, tmp_path / "run", "sp:2", "tp:2", f"{LORA} --train.iters 1")
    pools(2).run(jobs.train, line)
    checkpoint, moved = tmp_path / "run/checkpoints", shutil.copytree(folders / "plain", tmp_path / "moved")

    def exported(*options: str, of: Path = checkpoint) -> str:
        status = export.main([str(of), str(tmp_path / "export"), *options])
        return "" if status == 0 else capsys.readouterr().err

    assert exported("--merge", "--model", str(moved)) == ""
    merged = contents(tmp_path / "export")
    assert exported("--merge") == "" and contents(tmp_path / "export") == merged
    weights = load_file(moved / "model.safetensors")
    save_file({name: values * 1.01 for name, values in weights.items()}, moved / "model.safetensors", {"format": "pt"})
    for options in ([], ["--merge"]):
        message = exported("--model", str(moved), *options)
        assert f"model.hf_path (--model DIR): {moved}: other weights" in message
    assert exported() == ""
    adapters = contents(tmp_path / "export")
    (moved / "model.safetensors").unlink()
    assert exported("--model", str(moved)) == ""
    assert contents(tmp_path / "export").items() - adapters.items() == {
        ("adapter_config.json", (tmp_path / "export/adapter_config.json").read_bytes())
    }
    assert "found no safetensors weights" in exported("--model", str(moved), "--merge")
    assert "has no adapters" in exported("--merge", of=untouched.folder / "checkpoints")


def contents(folder: Path) -> dict[str, bytes]:
    """The files of an export, besides its mark."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.long
def test_what_a_peft_folder_replaced_stays(folders: Path, tmp_path: Path, pools: Pools) -> None:
    """A projector that was trained beside adapters, and is frozen beside those of the next run: neither the model's
    folder nor an import has it.
    """
    imported = tmp_path / "imported/step-00000000"
    import_folders(ModelSources(folders / "plain"), imported)

    def line(run: str, more: str) -> list[str]:
        more = f"{more} --data.workers 0 --checkpoint.interval 100"
        return flags(folders, tmp_path / run, "sp:2", "tp:2", more)

    pools(2).run(jobs.train, line("first", LORA), None, 2)
    peft = tmp_path / "peft"
    assert export.main([str(tmp_path / "first/checkpoints"), str(peft)]) == 0
    start = f"--vision-lora.hf_path {peft} --text-lora.hf_path {peft} --model.freeze projector"
    whole = pools(2).run(jobs.train, line("whole", f"{start} --checkpoint.resume {imported}"))[0]
    first = pools(2).run(jobs.train, line("cut", start), None, 2)[0]
    again = flags(folders, tmp_path / "cut", "dp:2", "dp:2", f"{start} --data.workers 0 {zero(3, 3)}")
    second = pools(2).run(jobs.train, again)[0]
    np.testing.assert_allclose(first["losses"] + second["losses"], whole["losses"], rtol=0, atol=1e-5)
    projector = [name for name in whole["weights"] if "merger" in name]
    trained = jobs.tensors(tmp_path / "first/checkpoints/step-00000002")
    last = jobs.tensors(tmp_path / "cut/checkpoints/step-00000004")
    for name in projector:
        assert torch.equal(last[f"weights/{name}"], trained[f"weights/{name}"]) and f"exp_avg/{name}" not in last
        assert np.array_equal(
            second["weights"][name], trained[f"weights/{name}"].view(whole["weights"][name].shape).numpy()
        )
    shutil.rmtree(peft)
    assert export.main([str(tmp_path / "cut/checkpoints"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.equal(merged[name], last[f"weights/{name}"].view(merged[name].shape)) for name in projector)
    plain = line("cut", f"{LORA} --model.freeze projector")
    assert "visual.merger.ln_q.weight" in pools(2).run(jobs.error_of, plain)[0]
