"""Models whose encoder and language model come from two folders, and projectors that start anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.data.processor import open_processor
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.families.common import canonical_name
from tests.functional.train import checks as jobs
from tests.functional.train.checks import mean_loss
from tests.support.folders import ModelChoice, write_model, write_qwen2
from tests.support.oracle import Oracle
from tests.support.pool import Pools
from tests.support.runs import MakeFlags


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`text`, a language model alone; `fits` and `narrow`, whole models with other encoders, whose rows are as wide as
    its embedding, and less wide.
    """
    folder = tmp_path_factory.mktemp("folders")
    write_qwen2(folder / "text")
    write_model(folder / "fits", ModelChoice(vision_layers=1, vision_heads=2, full_layers=(0,), seed=9))
    write_model(folder / "narrow", ModelChoice(heads=2, vision_layers=2, text_layers=1, seed=10))
    return folder


def stored(folder: Path) -> dict[str, np.ndarray]:
    return {canonical_name(name): t.numpy() for name, t in load_file(folder / "model.safetensors").items()}


def two(folders: Path, text: str, vision: str, more: str = "") -> str:
    return f"--model.hf_path {folders}/{text} --model.hf_path_vision {folders}/{vision} {more}"


@pytest.mark.parametrize("text, vision, fresh", [
    ("text", "fits", False),
    ("fits", "narrow", True),
    ("text", "narrow", True),
])  # fmt: skip
def test_each_module_has_its_folders_weights(
    text: str, vision: str, fresh: bool, folders: Path, make_flags: MakeFlags, pools: Pools
) -> None:
    found = pools(2).run(jobs.weights, make_flags("sp:2", "tp:2", two(folders, text, vision)))[0]
    of_text = {name: t for name, t in stored(folders / text).items() if not name.startswith("visual.")}
    of_vision = {name: t for name, t in stored(folders / vision).items() if name.startswith("visual.")}
    assert found.keys() == of_text.keys() | of_vision.keys()
    for name, tensor in (of_text | of_vision).items():
        if not (fresh and ".merger." in name):
            np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_a_fresh_projector_is_the_same_in_all_layouts(folders: Path, make_flags: MakeFlags, pools: Pools) -> None:
    def projector(vision: str, text: str, ranks: int, more: str = "") -> dict[str, np.ndarray]:
        flags = make_flags(vision, text, two(folders, "text", "fits", f"--model.fresh_projector true {more}"))
        found = pools(ranks).run(jobs.weights, flags)[0]
        return {name: value for name, value in found.items() if ".merger." in name}

    first = projector("tp:2", "tp:2", 2)
    for other in (projector("sp:2", "dp:2", 2), projector("dp:1@0", "pp:2@1-2", 3)):
        assert first.keys() == other.keys()
        assert all((first[name] == other[name]).all() for name in first)
    weight = "visual.merger.mlp.0.weight"
    assert (first[weight] != stored(folders / "fits")[weight]).mean() > 0.99
    assert 0.015 < first[weight].std() < 0.025
    assert (projector("tp:2", "tp:2", 2, "--train.seed 1")[weight] != first[weight]).mean() > 0.99


@pytest.mark.parametrize("text, vision", [("text", "narrow"), ("fits", "narrow")])
def test_the_export_is_a_model_of_transformers(
    text: str, vision: str, folders: Path, make_flags: MakeFlags, pools: Pools, small_data: Path, tmp_path: Path
) -> None:
    """After a step, plain transformers computes our loss with it, and it is one folder to start from again."""
    more = "--optimizer.lr 0.1 --eval.datasets d --eval.interval 1"
    target = tmp_path / "export"
    flags = make_flags("sp:2", "tp:2", two(folders, text, vision, more))
    ours, weights = pools(2).run(jobs.trained_and_exported, flags, target)[0]
    oracle = Oracle.load(target, small_data)
    assert mean_loss(oracle)[0] == pytest.approx(ours, rel=1e-5)
    for name, tensor in stored(target).items():
        np.testing.assert_array_equal(tensor, weights[name], err_msg=name)
    again, _ = pools(2).run(jobs.evaluated, make_flags("dp:2", "tp:2", f"{more} --model.hf_path {target}"))[0]
    assert [m.loss for m in again] == pytest.approx([ours], rel=1e-5)


def test_a_tied_language_model_alone(folders: Path, make_flags: MakeFlags, pools: Pools, tmp_path: Path) -> None:
    write_qwen2(tmp_path / "tied", tied=True)
    more = f"--model.hf_path {tmp_path}/tied --model.hf_path_vision {folders}/fits"
    flags = make_flags("sp:2", "tp:2", more)
    found = pools(2).run(jobs.weights, flags)[0]
    assert "lm_head.weight" not in found
    np.testing.assert_array_equal(
        found["model.embed_tokens.weight"], stored(tmp_path / "tied")["model.embed_tokens.weight"]
    )


def test_a_language_model_alone_needs_an_encoder(folders: Path, make_flags: MakeFlags) -> None:
    with pytest.raises(UserError, match="found model_type 'qwen2', .* with --model.hf_path_vision"):
        JobSpec.of(load_config(make_flags("dp:2", "dp:2", f"--model.hf_path {folders}/text")), 2)
    with pytest.raises(UserError, match="found model_type 'qwen2', expected 'qwen2_5_vl'"):
        JobSpec.of(load_config(make_flags("dp:2", "dp:2", two(folders, "fits", "text"))), 2)
    with pytest.raises(UserError, match="model.hf_path_vision: found no "):
        JobSpec.of(load_config(make_flags("dp:2", "dp:2", two(folders, "fits", "nowhere"))), 2)
    with pytest.raises(UserError, match="separate from model.hf_path_vision"):
        load_config(make_flags("dp:2", "dp:2", two(folders, "text", "fits", f"--export.hf_dir {folders}/fits")))


def test_a_tokenizer_without_image_tokens(folders: Path, make_flags: MakeFlags, tmp_path: Path) -> None:
    shutil.copytree(folders / "text", tmp_path / "text")
    shutil.copytree(folders / "fits", tmp_path / "fits")
    config = json.loads((tmp_path / "text/config.json").read_text())
    few = AutoTokenizer.from_pretrained(tmp_path / "text").convert_tokens_to_ids("<|image_pad|>")
    (tmp_path / "text/config.json").write_text(json.dumps(config | {"vocab_size": few}))
    with pytest.raises(UserError, match=rf"with id {few}, expected .* below {few}, .*add_tokens\(.*<\|image_pad\|>"):
        open_processor(load_config(make_flags("dp:2", "dp:2", two(tmp_path, "text", "fits"))))
    text = (tmp_path / "text/tokenizer.json").read_text()
    (tmp_path / "text/tokenizer.json").write_text(text.replace("<|image_pad|>", "<|other_pad|>"))
    settings = (tmp_path / "text/tokenizer_config.json").read_text()
    (tmp_path / "text/tokenizer_config.json").write_text(settings.replace("<|image_pad|>", "<|other_pad|>"))
    with pytest.raises(UserError, match=r"found no token <\|image_pad\|> in the tokenizer"):
        open_processor(load_config(make_flags("dp:2", "dp:2", two(tmp_path, "text", "fits"))))
