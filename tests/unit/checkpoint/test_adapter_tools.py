"""The tool that merges adapters and splits tuned models, on folders that `peft` and plain `transformers` read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hetero.checkpoint.adapter_tools import nearest
from megatron_hetero.cli.adapters import main
from megatron_hetero.hf.peft_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.parity.cases import MODELS
from tests.support.adapters import logits, write_adapter
from tests.support.folders import rewrite, write_model, write_published, write_transposed

pytest.importorskip("peft")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def tool(*arguments: object) -> int:
    return main([str(each) for each in arguments])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "base", MODELS["untied"])


@pytest.mark.parametrize("family", ["untied", "moe", "delta-moe"])
def test_merge_and_split_are_inverse(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_model(tmp_path / "base", MODELS[family])
    options = {"target_parameters": EXPERTS} if "moe" in family else {}
    targets = ["q_proj", "qkv", "in_proj_z", "down_proj"]
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=targets, **options)
    assert tool("merge", base, adapter, tmp_path / "merged") == 0
    expected = logits(base, adapter)
    assert (logits(tmp_path / "merged") - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert tool("split", base, tmp_path / "merged", tmp_path / "split", "--r", 4) == 0
    assert (logits(base, tmp_path / "split") - expected).abs().max() <= 4e-5 * expected.abs().max()
    of = {key.rpartition(".lora_")[0] for key in load_file(adapter / ADAPTER_WEIGHTS)}
    found = load_file(tmp_path / "split" / ADAPTER_WEIGHTS)
    got = {key.rpartition(".lora_")[0] for key, each in found.items() if each.any()}
    assert got == of
    assert tool("merge", base, tmp_path / "split", tmp_path / "again") == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    assert max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one) < 1e-6
    assert "relative error" in capsys.readouterr().out


def test_dtypes_of_merged_folders(base: Path, tmp_path: Path) -> None:
    """The base's by default; sums are in fp32, and rounded once."""
    half = shutil.copytree(base, tmp_path / "half")
    rewrite(half, lambda name, tensor: {name: tensor.bfloat16() if "norm" not in name else tensor})
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["merger.mlp.0"])
    assert tool("merge", half, adapter, tmp_path / "stored") == 0
    assert tool("merge", half, adapter, tmp_path / "float", "--dtype", "float32") == 0
    stored, whole, before = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "stored", tmp_path / "float", half)
    )
    assert {name: each.dtype for name, each in stored.items()} == {name: each.dtype for name, each in before.items()}
    assert all(torch.equal(each.to(stored[name].dtype), stored[name]) for name, each in whole.items())
    assert json.loads((tmp_path / "float" / "config.json").read_text())["dtype"] == "float32"
    changed = {name for name, each in whole.items() if not torch.equal(each, before[name].float())}
    assert changed == {name for name in whole if name.endswith("q_proj.weight") or "merger.mlp.0" in name}


def test_published_folders_of_experts(tmp_path: Path) -> None:
    """Tensors of experts stay transposed, and tensors that are no part of the model are copied."""
    base = write_model(tmp_path / "base", MODELS["moe"])
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=EXPERTS)
    assert tool("merge", write_transposed(base, tmp_path / "published"), adapter, tmp_path / "merged") == 0
    expected = logits(base, adapter)
    assert (logits(tmp_path / "merged") - expected).abs().max() <= 2e-5 * expected.abs().max()
    shapes = (load_file(tmp_path / name / "model.safetensors") for name in ("published", "merged"))
    before, after = ({name: each.shape for name, each in own.items()} for own in shapes)
    assert before == after
    delta = write_model(tmp_path / "delta", MODELS["delta"])
    published = write_published(delta, tmp_path / "published-delta")
    adapter = write_adapter(delta, tmp_path / "of-delta", target_modules=["q_proj"])
    assert tool("merge", published, adapter, tmp_path / "merged-delta") == 0
    copied = [name for name in load_file(published / "model.safetensors") if name.startswith("mtp.")]
    assert copied and copied[0] in load_file(tmp_path / "merged-delta" / "model.safetensors")


def test_a_split_at_a_lower_rank_is_the_nearest(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers that are not targets are left out, and named; norms that differ are saved whole."""
    torch.manual_seed(0)
    tuned = shutil.copytree(base, tmp_path / "tuned")
    rewrite(
        tuned,
        lambda name, tensor: {
            name: tensor + torch.randn(tensor.shape)
            if "layers.0.self_attn.q" in name or "layernorm" in name
            else tensor
        },
    )
    assert tool("split", base, tuned, tmp_path / "split", "--r", 3) == 0
    printed = capsys.readouterr().out
    one, other = (load_file(folder / "model.safetensors") for folder in (base, tuned))
    name = next(name for name in one if name.endswith("layers.0.self_attn.q_proj.weight"))
    values = torch.linalg.svdvals((other[name] - one[name]).double())
    wanted = float(values[3:].norm() / values.norm())
    assert f"at most {wanted:.2e} in a layer" in printed
    assert "left out: model.layers.0.self_attn.q_proj.bias" in printed
    saved = load_file(tmp_path / "split" / ADAPTER_WEIGHTS)
    norm = next(key for key in saved if "layers.1.input_layernorm" in key)
    assert torch.equal(saved[norm], other[name.replace("layers.0.self_attn.q_proj", "layers.1.input_layernorm")])


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9)])
def test_the_nearest_matrix_of_a_rank(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(*shape, dtype=torch.float64)
    for r in (1, 3, min(shape)):
        first, second = nearest(matrix, r)
        assert first.shape == (r, shape[1]) and second.shape == (shape[0], r)
        missing = float((matrix - second @ first).norm())
        assert missing == pytest.approx(float(torch.linalg.svdvals(matrix)[r:].norm()), abs=1e-8)
    exact = matrix[:, :2] @ matrix[:2]
    first, second = nearest(exact, 4)
    assert torch.isfinite(first).all() and float((exact - second @ first).norm()) < 1e-7 * float(exact.norm())


def test_further_encoders(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their adapters are in folders of their own, and their own folders are given."""
    detail = write_model(tmp_path / "detail", replace(MODELS["untied"], seed=8))
    tuned = tmp_path / "tuned"
    shutil.copytree(base, tuned)
    shutil.copytree(detail, tuned / "encoders" / "detail")
    rewrite(
        tuned / "encoders" / "detail", lambda name, tensor: {name: tensor + 1 if "attn.qkv.weight" in name else tensor}
    )
    encoder = "--encoder", f"detail={detail}"
    assert tool("split", base, tuned, tmp_path / "split", "--r", 1, *encoder) == 0
    assert not (tmp_path / "split" / ADAPTER_CONFIG).exists()
    found = json.loads((tmp_path / "split" / "encoders" / "detail" / ADAPTER_CONFIG).read_text())
    assert found["base_model_name_or_path"] == str(detail) and len(found["target_modules"]) == 3
    assert tool("merge", base, tmp_path / "split", tmp_path / "merged", *encoder) == 0
    own = Path("encoders", "detail", "model.safetensors")
    want, got = (load_file(folder / own) for folder in (tuned, tmp_path / "merged"))
    assert all(torch.allclose(each, want[name], atol=1e-6) for name, each in got.items())
    assert tool("merge", base, tmp_path / "split", tmp_path / "merged") == 1
    assert "Give it with --encoder detail=DIR" in capsys.readouterr().err


def test_an_adapter_of_another_base(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is known by its shapes."""
    other = write_model(tmp_path / "other", replace(MODELS["untied"], text_ffn=80))
    adapter = write_adapter(other, tmp_path / "adapter", target_modules=["up_proj"])
    assert tool("merge", base, adapter, tmp_path / "out") == 1
    assert "up_proj: found an adapter " in capsys.readouterr().err


def test_refusals(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])

    def refused(message: str, *arguments: object) -> None:
        assert tool(*arguments) == 1
        assert message in (printed := capsys.readouterr().err), printed

    refused("overlaps", "merge", base, adapter, base)
    refused("overlaps", "merge", base, adapter, adapter / "out")
    refused("expected a PEFT folder", "merge", base, tmp_path / "nothing", tmp_path / "out")
    refused("no linear layer", "split", base, shutil.copytree(base, tmp_path / "same"), tmp_path / "out", "--r", 2)
    refused(
        "--targets: found w_proj", "split", base, tmp_path / "same", tmp_path / "out", "--r", 2, "--targets", "w_proj"
    )
    wide = write_model(tmp_path / "wide", replace(MODELS["untied"], text_ffn=90))
    refused("a model that differs in the shapes of", "split", base, wide, tmp_path / "out", "--r", 2)
    (adapter / "encoders" / "detail").mkdir(parents=True)
    shutil.copy(adapter / ADAPTER_CONFIG, adapter / "encoders" / "detail")
    refused("Give it with --encoder detail=DIR", "merge", base, adapter, tmp_path / "out")
    weights = adapter / ADAPTER_WEIGHTS
    save_file({"strange": torch.ones(1)}, weights)
    shutil.rmtree(adapter / "encoders")
    refused("strange", "merge", base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
