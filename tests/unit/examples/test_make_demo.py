"""The demo's folder: what is in it, that it can be read, and when it is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from examples import make_demo as command
from examples.demo.model import EXPERTS, DemoSizes, model_config, train_tokenizer
from examples.demo.records import COLOURS
from examples.make_demo import ENTRIES, FAMILIES, DemoOptions, _make, _parser, main, make_demo
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.data.processor import Processor
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.families.qwen2_5_vl.family import QWEN2_5_VL
from megatron_hetero.models.weights import stored_shapes

TINY = DemoOptions(seed=1, train_pictures=30, heldout_questions=8)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_seed_makes_the_same_bytes_and_another_seed_others(tmp_path: Path):
    for name, options in {"a": TINY, "b": TINY, "c": DemoOptions(2, 30, 8)}.items():
        make_demo(tmp_path / name, options)
    a, b, c = (digests(tmp_path / name) for name in "abc")
    assert a == b
    for name in ("model/model.safetensors", "data/train.jsonl", "data/images/heldout-00000.png"):
        assert a[name] != c[name]


def test_nothing_but_the_parts_is_left(demo: Path):
    assert {path.name for path in demo.iterdir()} == set(ENTRIES)


def test_the_configuration_is_valid_and_its_files_are_there(demo: Path):
    load_config(["--config", str(demo / "config.yaml")])
    config = yaml.safe_load((demo / "config.yaml").read_text())
    assert (demo / config["model"]["hf_path"] / "config.json").is_file()
    for dataset in config["data"]["registry"].values():
        assert (demo / dataset["annotations"]).is_file() and (demo / dataset["images"]).is_dir()
    assert config["modules"] == {"vision": {"parallel": "sp:2"}, "text": {"parallel": "tp:2"}}


def test_it_runs_as_a_module(tmp_path: Path):
    line = [sys.executable, "-m", "examples.make_demo", str(tmp_path / "demo"), "--train-pictures", "2"]
    done = subprocess.run([*line, "--heldout-questions", "2"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("wrote ")


def test_what_an_interrupted_run_left_is_no_obstacle(tmp_path: Path):
    (tmp_path / ".making-x" / "data").mkdir(parents=True)
    make_demo(tmp_path, TINY)
    assert {path.name for path in tmp_path.iterdir()} == {*ENTRIES, ".making-x"}


def test_other_content_is_refused_and_with_force_only_the_parts_are_replaced(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "old").touch()
    (tmp_path / "trained").mkdir()
    with pytest.raises(UserError, match="data, trained.*--force"):
        make_demo(tmp_path, TINY)
    make_demo(tmp_path, TINY, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {*ENTRIES, "trained"}
    assert not (tmp_path / "data" / "old").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written .file exists"):
        make_demo(tmp_path / "file", TINY)


def test_a_run_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(command, "write_model", no_space)
    with pytest.raises(UserError, match="no space left"):
        make_demo(tmp_path / "demo", TINY)
    assert list((tmp_path / "demo").iterdir()) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_demo_of_each_family_can_be_trained(family: str, tmp_path: Path):
    assert main([str(tmp_path), "--model", family, "--train-pictures", "4", "--heldout-questions", "4"]) == 0
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == family
    config = load_config(["--config", str(tmp_path / "config.yaml")])
    job = JobSpec.of(config, 2)
    experts = family in EXPERTS
    assert str(job.layouts["text"]) == ("dp:2,ep:2@0-1" if experts else "tp:2@0-1")
    assert (job.balance > 0) == experts
    more = ["--config", str(tmp_path / "config.yaml"), "--vision-parallel", "sp:4", "--text-parallel", "tp:4"]
    assert JobSpec.of(load_config(more), 4).layouts["text"].tp == 4
    assert job.shapes.text.family == family
    assert Processor.from_folder(config.model.hf_path).row_tokens.size == 2


def test_adapters_learn_other_names_of_colours(tmp_path: Path, demo: Path):
    folder, arguments = tmp_path / "lora", ["--train-pictures", "30", "--heldout-questions", "16"]
    assert main([str(folder), "--adapt", str(demo / "model"), *arguments]) == 0
    assert {path.name for path in folder.iterdir()} == {*ENTRIES} - {"model"}
    main([str(tmp_path / "plain"), *arguments])
    for split in ("train", "heldout"):
        found, before = (
            [json.loads(line)["conversations"] for line in (of / f"data/{split}.jsonl").read_text().splitlines()]
            for of in (folder, tmp_path / "plain")
        )
        answers = [(new[1]["value"], old[1]["value"]) for new, old in zip(found, before, strict=True)]
        assert [new[0] for new in found] == [old[0] for old in before]
        assert {new == old for new, old in answers if old in COLOURS} == {False}
        assert {new == old for new, old in answers if old not in COLOURS} == {True}
    config = load_config(["--config", str(folder / "config.yaml")])
    assert config.model.hf_path is not None and config.model.hf_path.samefile(demo / "model")
    job = JobSpec.of(config, 2)
    trained = set(stored_shapes(job.shapes)) - job.frozen.tensors
    assert trained and all(".lora_" in name for name in trained)


def test_adapters_learn_from_pictures_of_a_trained_model(tmp_path: Path, demo: Path):
    with pytest.raises(UserError, match=r"--adapt: found videos, expected pictures"):
        _make(_parser().parse_args([str(tmp_path / "new"), "--adapt", str(demo / "model"), "--data", "video"]))
    with pytest.raises(UserError, match=r"none: "):
        _make(_parser().parse_args([str(tmp_path / "new"), "--adapt", str(tmp_path / "none")]))
    assert not (tmp_path / "new").exists()


def test_a_family_that_is_unknown_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "demo"), "--model", "qwen3vl"])
    assert "--model: invalid choice: 'qwen3vl' (choose from" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_every_family_learns_the_same_samples(tmp_path: Path):
    found = []
    for family in FAMILIES:
        make_demo(tmp_path / family, replace(TINY, model=family))
        found.append({name: digest for name, digest in digests(tmp_path / family).items() if name.startswith("data/")})
    assert found[0] and all(other == found[0] for other in found)


@pytest.mark.parametrize("flag", ["--train-pictures 0", "--seed -1"])
def test_numbers_that_are_too_small_are_refused(tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "demo"), *flag.split()])
    assert "found" in (error := capsys.readouterr().err) and "expected ≥" in error
    assert not (tmp_path / "demo").exists()


def test_heads_divide_by_four_and_the_model_is_small():
    tokenizer = train_tokenizer(["What colour is the shape?"])
    config: Any = model_config("qwen2_5_vl", DemoSizes(), tokenizer)
    assert config.vision_config.num_heads % 4 == config.text_config.num_attention_heads % 4 == 0
    assert config.text_config.vocab_size >= len(tokenizer)
    assert config.tie_word_embeddings


def test_mrope_sections_are_those_of_the_real_model():
    assert QWEN2_5_VL.rope_settings(128) == {"mrope_section": [16, 24, 24]}
    assert sum(QWEN2_5_VL.rope_settings(24)["mrope_section"]) == 12


def test_the_tokenizer_restores_text_it_has_not_seen():
    tokenizer = train_tokenizer(["What colour is the shape?", "red"])
    for text in ("Où est le disque ?\n", "red  blue", "猫 🐈"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("<|vision_start|><|image_pad|><|vision_end|>")["input_ids"]) == 3


def test_pictures_are_plain_rgb(demo: Path):
    for file in (demo / "data" / "images").iterdir():
        with Image.open(file) as picture:
            assert picture.mode == "RGB"
