"""The demo's model in plain `transformers`, and the exact-match rate."""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file

from megatron_hetero.base.errors import UserError
from megatron_hetero.cli.evaluate import main
from megatron_hetero.models.folders import read_config
from megatron_hetero.train.generate import Answer, EvaluationResult, exact_match, result_table


@pytest.fixture
def data(demo: Path) -> tuple[Path, Path]:
    return demo / "data" / "heldout.jsonl", demo / "data" / "images"


def test_the_folder_loads_with_plain_transformers_without_a_warning(demo: Path, caplog: pytest.LogCaptureFixture):
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.utils.logging import disable_propagation, enable_propagation

    enable_propagation()  # transformers' messages do not reach the root logger otherwise
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        AutoTokenizer.from_pretrained(demo / "model")
        AutoImageProcessor.from_pretrained(demo / "model", backend="pil")
        loaded: Any = AutoModelForImageTextToText.from_pretrained(demo / "model", output_loading_info=True)
    disable_propagation()
    model, info = loaded
    assert not any(info.values())
    assert [record.message for record in caplog.records] == []
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_a_sample_goes_through_processor_template_and_model(demo: Path, data: tuple[Path, Path]):
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(demo / "model")
    record = json.loads(data[0].read_text().splitlines()[0])
    with Image.open(data[1] / record["image"]) as picture:
        images = AutoImageProcessor.from_pretrained(demo / "model", backend="pil")(picture, return_tensors="pt")
    content = [{"type": "image"}, {"type": "text", "text": "\nWhere is the shape?"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>\nWhere is the shape?<|im_end|>\n"
    )
    rows = int(images["image_grid_thw"].prod()) // 4
    ids = tokenizer(text.replace("<|image_pad|>", rows * "<|image_pad|>"), return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == model.config.image_token_id).int(), **images).logits
    assert logits.shape == (1, ids.shape[1], model.config.text_config.vocab_size)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("blank", [False, True])
def test_an_untrained_model_knows_nothing(demo: Path, data: tuple[Path, Path], blank: bool):
    result = exact_match(demo / "model", *data, limit=24, blank=blank)
    assert result.questions == 24
    assert result.rate <= 0.25
    assert {answer.expected for answer in result.answers} > {"top left", "top right"}


def test_answers_do_not_depend_on_the_batch(demo: Path, data: tuple[Path, Path]):
    one = exact_match(demo / "model", *data, limit=6, batch_size=1)
    assert one == exact_match(demo / "model", *data, limit=6, batch_size=4)


def test_decoding_is_greedy_whatever_the_folder_asks_for(demo: Path, data: tuple[Path, Path], tmp_path: Path):
    plain = exact_match(demo / "model", *data, limit=4)
    shutil.copytree(demo / "model", tmp_path / "model")
    ends = json.loads((demo / "model/generation_config.json").read_text())["eos_token_id"]
    asked = {"do_sample": True, "temperature": 5.0, "top_k": 3, "repetition_penalty": 5.0, "num_beams": 10**9}
    asked |= {"eos_token_id": ends}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(asked))
    assert exact_match(tmp_path / "model", *data, limit=4) == plain


def test_an_end_of_answers_that_is_no_number_is_refused(demo: Path, data: tuple[Path, Path], tmp_path: Path):
    shutil.copytree(demo / "model", tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": ["<|im_end|>"]}')
    with pytest.raises(UserError, match="eos_token_id: found .*im_end.*, expected the number of a token"):
        exact_match(tmp_path / "model", *data, limit=4)


def test_samples_with_two_pictures_and_none_are_answered_together(demo: Path):
    train = demo / "data" / "train.jsonl"
    result = exact_match(demo / "model", train, demo / "data" / "images", limit=80, max_new_tokens=1)
    assert any("opposite" in question for question in result.by_question())
    assert any("shapes" in question for question in result.by_question())


def test_the_result_counts_and_groups():
    answers = (Answer("a?", "x", "x"), Answer("b?", "y", "x"), Answer("a?", "x", "y"), Answer("a?", "z", "z"))
    result = EvaluationResult(answers)
    assert (result.correct, result.questions, result.rate) == (2, 4, 0.5)
    assert list(result.by_question()) == ["a?", "b?"]
    assert result.by_question()["a?"].correct == 2
    assert str(result) == "50.0 % exact match (2 of 4, pictures shown)"


def test_the_table_gathers_rare_questions():
    result = EvaluationResult(tuple(Answer(f"{k}?", "x", "x") for k in range(20)))
    assert list(result_table(result).columns[0].cells)[-2:] == ["(8 other questions)", "all"]


def test_questions_do_not_steer_the_terminal():
    console = Console(file=StringIO(), width=200, color_system=None)
    console.print(result_table(EvaluationResult((Answer("\x1b[2J\x07 [b]a?", "x", "x"),))))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert r"\x1b[2J\x07 [b]a?" in shown and "\x1b" not in shown and "\x07" not in shown


def test_the_command_prints_a_table(demo: Path, data: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    arguments = ["--annotations", str(data[0]), "--images", str(data[1]), "--limit", "4", "--blank"]
    assert main([str(demo / "model"), *arguments]) == 0
    assert "pictures blanked" in capsys.readouterr().out


def test_missing_weights_are_named(demo: Path, data: tuple[Path, Path], tmp_path: Path):
    for file in (demo / "model").iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="found no safetensors weights"):
        exact_match(tmp_path, *data)


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: [tensors.pop(stored) for stored in list(tensors) if stored.endswith(name)]


def spoilt(tensors: dict[str, torch.Tensor]) -> None:
    next(t for name, t in tensors.items() if name.endswith("embed_tokens.weight"))[7, 3] = float("nan")


def rounded(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: t.to(torch.int8) for name, t in tensors.items() if name.endswith("q_proj.weight")})


BROKEN = {
    "a random norm": (without("model.norm.weight"), {}, "1 missing: model.norm.weight"),
    "a random head": (lambda _: None, {"tie_word_embeddings": False}, "1 missing: lm_head.weight"),
    "NaN": (spoilt, {}, "NaN or infinity in 1 tensors: .*embed_tokens.weight"),
    "int8": (rounded, {}, r"found 3 tensors of unsupported types: .*q_proj\.weight is I8"),
    "another family": (lambda _: None, {"model_type": "qwen2_vl"}, "found model_type 'qwen2_vl', expected"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_trained_model_has_no_rate(
    name: str, demo: Path, data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    change, config, message = BROKEN[name]
    folder = Path(shutil.copytree(demo / "model", tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    assert main([str(folder), "--annotations", str(data[0]), "--images", str(data[1])]) == 1
    told = capsys.readouterr().err
    assert re.search(f"^error: {re.escape(str(folder))}.*{message}", told, re.MULTILINE), told


def test_an_index_does_not_lead_elsewhere(demo: Path, data: tuple[Path, Path], tmp_path: Path):
    folder = Path(shutil.copytree(demo / "model", tmp_path / "model"))
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(tmp_path / "model.safetensors"), "../model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="weight_map: found .*file of this folder"):
        exact_match(folder, *data)


def test_a_missing_folder_ends_with_one_message(data: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    assert main(["/nowhere", "--annotations", str(data[0]), "--images", str(data[1])]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_pictures_take_a_folder_of_images(demo: Path, data: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    command = [str(demo / "model"), "--annotations", str(data[0])]
    assert main(command) == 1 and "--images of cli.evaluate" in capsys.readouterr().err
    assert main([*command, "--images", "nowhere"]) == 1
    assert "error: --images: nowhere is not a folder" in capsys.readouterr().err


def test_a_checkpoint_is_no_model_yet(data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002/manifest.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "step-00000002"):
        assert main([str(folder), "--annotations", str(data[0])]) == 1
        wanted = f"python -m megatron_hetero.cli.export {tmp_path}/step-00000002 DIR"
        assert wanted in capsys.readouterr().err
        with pytest.raises(UserError, match=re.escape(wanted)):
            read_config(folder, "model.hf_path")


def test_a_file_is_no_folder_of_a_model(data: tuple[Path, Path]):
    with pytest.raises(UserError, match=f"model.hf_path: found the file {data[0]}, expected a transformers folder"):
        read_config(data[0], "model.hf_path")
