"""The demo's model in plain `transformers`, and the exact-match rate of its answers."""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from argparse import Namespace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file

from examples.answer_questions import Answerer, main, rates
from megatron_hetero.data.records import Record
from megatron_hetero.data.turns import Turn
from tests.support.items import annotated


@pytest.fixture
def data(demo: Path) -> tuple[Path, Path]:
    return demo / "data" / "heldout.jsonl", demo / "data" / "images"


@pytest.fixture(scope="module")
def answerer(demo: Path) -> Answerer:
    return Answerer(demo / "model", "cpu")


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
def test_answers_do_not_depend_on_the_batch(answerer: Answerer, data: tuple[Path, Path], blank: bool):
    records = list(annotated("d", *data))[:6]
    alone = [answer for record in records for answer in answerer.answer([record], blank, 8)]
    assert answerer.answer(records, blank, 8) == alone


def test_samples_with_two_pictures_and_none_are_answered_together(answerer: Answerer, demo: Path):
    records = list(annotated("d", demo / "data/train.jsonl", demo / "data/images"))[:80]
    assert {len(record.items) for record in records} == {0, 1, 2}
    together = answerer.answer(records, False, 1)
    assert together == [answer for record in records for answer in answerer.answer([record], False, 1)]


def test_the_table_counts_by_question_and_does_not_steer_the_terminal():
    class Echo:
        def answer(self, records: list[Record], blank: bool, max_new_tokens: int) -> list[str]:
            return ["x"] * len(records)

    def record(question: str, expected: str) -> Record:
        return Record("d", 0, "d:1", (Turn("user", question), Turn("assistant", expected)))

    pairs = [("a?", "x"), ("\x1b[2J\x07 [b]?", "y"), ("a?", "x"), ("a?", "z"), *((f"{k}?", "x") for k in range(20))]
    given = Namespace(batch_size=3, blank=False, max_new_tokens=8)
    echo: Any = Echo()
    console = Console(file=(file := StringIO()), width=200, color_system=None)
    console.print(rates(echo, [record(*pair) for pair in pairs], given))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in file.getvalue().splitlines() if "│" in line]
    assert (lines[0], lines[-1], len(lines)) == (["a?", "2", "3", "66.7%"], ["all", "22", "24", "91.7%"], 13)
    assert r"\x1b[2J\x07 [b]?" in lines[1] and not {"\x1b", "\x07"} & {*file.getvalue()}


@pytest.mark.parametrize("blank", [False, True])
def test_an_untrained_model_knows_nothing(
    demo: Path, data: tuple[Path, Path], capsys: pytest.CaptureFixture[str], blank: bool
):
    arguments = ["--annotations", str(data[0]), "--images", str(data[1]), "--limit", "24"]
    assert main([str(demo / "model"), *arguments, *(["--blank"] if blank else [])]) == 0
    out = capsys.readouterr().out
    assert f"pictures {'blanked' if blank else 'shown'}" in out
    found = re.search(r"all +│ +(\d+) │ +24 │", out)
    assert found and int(found[1]) <= 6


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it.
def test_adapters_answer_as_merged_weights_do(demo: Path, data: tuple[Path, Path], tmp_path: Path):
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)  # Of the adapters' A, in whichever order tests run.
    base: Any = Answerer(demo / "model", "cpu")
    added: Any = get_peft_model(base.model, LoraConfig(r=2, target_modules=["q_proj", "down_proj", "qkv"]))
    for name, parameter in added.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    added.save_pretrained(tmp_path / "adapter")
    shutil.copytree(demo / "model", tmp_path / "merged")
    plain: Any = Answerer(demo / "model", "cpu").model
    PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")  # pyright: ignore[reportCallIssue]
    records = list(annotated("d", *data))[:16]
    found, merged, alone = (
        Answerer(folder, "cpu", adapter=adapter).answer(records, False, 4)
        for folder, adapter in (
            (demo / "model", tmp_path / "adapter"),
            (tmp_path / "merged", None),
            (demo / "model", None),
        )
    )
    assert found == merged != alone


def test_missing_weights_are_named(
    demo: Path, data: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for file in (demo / "model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    [gone] = [name for name in tensors if name.endswith("model.norm.weight")]
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    command = [str(tmp_path), "--annotations", str(data[0]), "--images", str(data[1])]
    assert main(command) == 1
    assert re.search(rf"^error: {tmp_path}: no weights for .*norm.weight", capsys.readouterr().err, re.MULTILINE)
    assert main(["/nowhere", *command[1:]]) == 1
    assert capsys.readouterr().err.startswith("error: ")
