"""Model folders with something in them that cannot be carried out: refused before training, naming file and key."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from megatron_hetero.base.errors import UserError
from megatron_hetero.checkpoint.record import ModelSources
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import IMAGES
from megatron_hetero.hf.model_files import SINGLE
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.models.families.qwen2_5_vl.shapes import TextShape, VisionShape
from megatron_hetero.models.folders import ModelFolders, read_config
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import open_modules
from tests.support.folders import ModelChoice, write_model
from tests.support.items import pictures, whole
from tests.support.mutations import SMALL, mutated_json
from tests.support.shapes import shapes_of_folder

CONFIG, PICTURES, TOKENIZER = "config.json", "preprocessor_config.json", "tokenizer_config.json"
NAN = float("nan")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, and in it a picture. Tests copy it before they change it."""
    folder = write_model(tmp_path_factory.mktemp("good") / "model", ModelChoice(text_layers=1, vision_layers=2))
    Image.linear_gradient("L").convert("RGB").resize((56, 84)).save(folder / "a.png")
    return folder


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the other family."""
    choice = ModelChoice(family="qwen3_vl", text_layers=1, vision_layers=2, deepstack=(0,), head_dim=16, text_hidden=48)
    folder = write_model(tmp_path_factory.mktemp("newer") / "model", choice)
    Image.linear_gradient("L").convert("RGB").resize((56, 84)).save(folder / "a.png")
    return folder


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def open_all(folder: Path) -> dict[str, StoredWeights]:
    """What a run does with the folder before its first step, and with the first record."""
    folders, shapes = ModelSources(folder).read()
    weights = open_modules(folders, shapes, 0)
    processor = Processor.from_folder(folder)
    turns = (Turn("user", (IMAGES[0], "What?")), Turn("assistant", "A disc."))
    record = Record("d", 0, f"{folder}/train.jsonl:1", turns, pictures("a.png"), folder)
    sample = processor.tokenize(record)
    assert sample.input_ids.max() < shapes.text.vocab and len(sample.row_positions) == sample.rows.sum()
    assert np.isfinite(processor.patches(record, 0, whole(sample.sizes[0]))).all()
    return weights


def edit(folder: Path, name: str, key: str, value: object) -> None:
    """Set a key of a JSON file, with dots between the keys on the way to it."""
    content = json.loads((folder / name).read_text())
    inside, (*above, last) = content, key.split(".")
    for outer in above:
        inside = inside[outer]
    inside[last] = value
    (folder / name).write_text(json.dumps(content))


def test_the_good_folder_is_taken(model: Path) -> None:
    open_all(model)


CASES: list[tuple[str, str, Any, str]] = [
    # What is not carried out.
    (CONFIG, "text_config.attention_dropout", 0.1, "found 0.1, expected 0 or null"),
    (CONFIG, "quantization_config", {"quant_method": "awq"}, "quantised"),
    (CONFIG, "text_config.quantization_config", {"bits": 4}, "quantised"),
    (CONFIG, "transformers_weights", "other.safetensors", "Rename the file to model.safetensors"),
    (CONFIG, "text_config.hidden_act", "gelu", "found text_config.hidden_act = 'gelu', expected 'silu'"),
    (CONFIG, "vision_config.hidden_act", "gelu", "found vision_config.hidden_act = 'gelu'"),
    (CONFIG, "text_config.rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, "'yarn'"),
    (CONFIG, "text_config.layer_types", ["sliding_attention"], "found the kinds in text_config.layer_types"),
    (CONFIG, "text_config.layer_types", ["full_attention"] * 2, "layer_type"),
    (CONFIG, "text_config.head_dim", 16, "found text_config.head_dim = 16, expected 12"),
    (CONFIG, "vision_config.head_dim", 16, "found vision_config.head_dim = 16, expected 8"),
    (CONFIG, "vision_config.fullatt_block_indexes", [1, 2], "fullatt_block_indexes from depth on = [2], expected []"),
    (CONFIG, "vision_config.in_channels", 1, "found 1, expected 3, because pictures"),
    (CONFIG, "text_config.pad_token_id", 10**6, "pad_token_id below vocab_size"),
    (CONFIG, "per_layer_config", {"0": {"intermediate_size": 8}}, "expected null or {}"),
    (PICTURES, "do_resize", False, "found do_resize False, expected True"),
    (TOKENIZER, "split_special_tokens", True, "token <|image_pad|> with id "),
    # Numbers that make NaN of everything.
    (PICTURES, "image_std", [0.5, 0, 0.5], "black pixels "),
    (PICTURES, "rescale_factor", NAN, "from nan"),
    # Odd values.
    (CONFIG, "text_config.vocab_size", "many", "expected int, got str (value: 'many')"),
    (CONFIG, "vision_config.num_heads", 0, "cannot be used (ZeroDivisionError"),
    (CONFIG, "vision_config.patch_size", 0, "cannot be used (ZeroDivisionError"),
    (CONFIG, "text_config.intermediate_size", -8, "found text_config.intermediate_size = -8, expected 'a number above"),
    (CONFIG, "text_config.rms_norm_eps", NAN, "found text_config.rms_norm_eps = nan"),
    (CONFIG, "text_config.rope_parameters.rope_theta", 0, "rope_theta = 0, expected 'a number above 0'"),
    (CONFIG, "text_config.rope_parameters.mrope_section", [2, 4], "sections in mrope_section = 2"),
    (CONFIG, "tie_word_embeddings", "yes", "found 'yes', expected true or false"),
    (CONFIG, "text_config.rope_parameters.partial_rotary_factor", 0.5, "found 0.5, expected 1 or null"),
    (CONFIG, "model_type", ["qwen2_5_vl"], "found model_type ['qwen2_5_vl']"),
    (PICTURES, "image_mean", [0.5, 0.5], "(ValueError: mean must have 3"),
    (PICTURES, "image_processor_type", "CLIPImageProcessor", "an image processor that does not load"),
    (TOKENIZER, "padding_side", "up", "a tokenizer that does not load (ValueError: Padding side should be"),
    (TOKENIZER, "eos_token", {"x": "y"}, "a tokenizer that does not load (TypeError"),
]  # fmt: skip


@pytest.mark.parametrize("name, key, value, message", CASES, ids=[f"{c[1]}={str(c[2])[:20]}" for c in CASES])
def test_refused(name: str, key: str, value: object, message: str, model: Path) -> None:
    edit(model, name, key, value)
    with pytest.raises(UserError) as error:
        open_all(model)
    text = str(error.value)
    assert str(model) in text and message in text and len(text) < 700
    assert key.split(".")[-1] in text or "does not load" in text or "cannot be used" in text


TEXT_7B = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584,
    "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
VISION_7B = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip
OUTSIDE_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_start_token_id": 151652,
    "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656,
    "model_type": "qwen2_5_vl", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MROPE = {"mrope_section": [16, 24, 24]}
AS_PUBLISHED = OUTSIDE_7B | TEXT_7B | {
    "sliding_window": 32768, "rope_scaling": {"type": "mrope", **MROPE}, "vision_config": VISION_7B,
}  # fmt: skip
AS_SAVED_LATER = OUTSIDE_7B | TEXT_7B | {
    "rope_scaling": {"rope_type": "default", "type": "default", **MROPE}, "sliding_window": None,
    "text_config": TEXT_7B | {
        "model_type": "qwen2_5_vl_text", "image_token_id": None, "video_token_id": None, "torch_dtype": "float32",
        "rope_scaling": {"rope_type": "default", "type": "default", **MROPE}, "sliding_window": None,
        "layer_types": ["full_attention"] * 28,
    },
    "vision_config": VISION_7B | {"model_type": "qwen2_5_vl", "in_channels": 3, "torch_dtype": "float32"},
}  # fmt: skip


@pytest.mark.parametrize("config", [AS_PUBLISHED, AS_SAVED_LATER], ids=["published", "saved by transformers 4.5x"])
def test_the_published_configuration_is_taken(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(config))
    shapes = shapes_of_folder(tmp_path)
    text, vision = shapes.text, shapes.encoders["vision"]
    assert isinstance(text, TextShape) and isinstance(vision, VisionShape)
    assert (text.layers, text.vocab, text.rope_theta, text.mrope_section) == (28, 152064, 1e6, (16, 24, 24))
    assert (vision.layers, vision.window, vision.full_layers) == (32, 4, {7, 15, 23, 31})


# -------------------------------------------------------------------------------------------------- tokens


def test_tokens_beyond_the_embedding(model: Path) -> None:
    """They are named, and what the message says to do helps."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = json.loads((model / CONFIG).read_text())["text_config"]["vocab_size"]
    tokenizer.add_tokens([f"<|new{k}|>" for k in range(rows - len(tokenizer))])
    tokenizer.save_pretrained(model)
    open_all(model)  # All ids that there are rows for may be used.
    tokenizer.add_tokens([f"<|more{k}|>" for k in range(7)], special_tokens=True)
    tokenizer.save_pretrained(model)
    with pytest.raises(UserError) as error:
        open_all(model)
    for part in (
        f"'<|more0|>' ({rows})", f"'<|more4|>' ({rows + 4}) and 2 more", f"ids below {rows}",
        f"`model.resize_token_embeddings({rows + 7})`",
    ):  # fmt: skip
        assert part in str(error.value)
    weights = Qwen2_5_VLForConditionalGeneration.from_pretrained(model)
    weights.resize_token_embeddings(rows + 7)
    weights.save_pretrained(model)
    open_all(model)


# -------------------------------------------------------------------------------------------------- weights


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["int8", "bool", "complex64", "float8_e4m3fn", "float64", "uint8"])
def test_types_that_are_not_trained_from(kind: str, model: Path) -> None:
    dtype = getattr(torch, kind)

    def convert(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "q_proj" in name or name == "lm_head.weight"]:
            tensors[name] = tensors[name].to(dtype)

    change(model, convert)
    with pytest.raises(
        UserError, match=r"found 3 tensors of unsupported types: lm_head\.weight is \w+, .*F32, BF16, F16"
    ):
        open_all(model)


def test_values_that_are_no_numbers_are_found_by_who_reads_them(model: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][-1, :3] = torch.tensor([NAN, float("inf"), float("-inf")])
        tensors["lm_head.weight"][-5, 7] = NAN

    change(model, spoil)
    weights = open_all(model)["text"]
    rows = weights.shapes["lm_head.weight"][0]
    message = r"model\.safetensors: tensor lm_head\.weight: found values that are NaN or infinite"
    weights.read(TensorSlice("lm_head.weight", (0, rows - 5)))  # another rank's share
    weights.read(TensorSlice("lm_head.weight", (rows, rows)))
    for read in (
        lambda: weights.read(TensorSlice("lm_head.weight", (rows - 5, rows))),
        lambda: weights.read(TensorSlice("lm_head.weight", (0, rows), columns=(0, 1))),
        lambda: weights.whole("lm_head.weight"),
    ):
        with pytest.raises(UserError, match=message):
            read()


def test_sizes_are_checked_before_a_projector_is_drawn(model: Path) -> None:
    """It would be of terabytes."""
    edit(model, CONFIG, "vision_config.hidden_size", 2**20)
    folders = ModelFolders.read(model, fresh_projector=True)
    with pytest.raises(UserError, match="of another shape"):
        open_modules(folders, ModelShapes.of(folders), 0)


# ------------------------------------------------------------------------------------------------- mutations

FILES = (CONFIG, CONFIG, PICTURES, TOKENIZER, "generation_config.json")


@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(rng=st.randoms(use_true_random=False))
def test_mutated_files_end_with_a_sentence_or_not_at_all(rng: random.Random, good: Path) -> None:
    _mutate_and_open(rng, good)


@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(rng=st.randoms(use_true_random=False))
def test_mutated_files_of_the_other_family(rng: random.Random, newer: Path) -> None:
    _mutate_and_open(rng, newer)


def _mutate_and_open(rng: random.Random, good: Path) -> None:
    name = rng.choice(FILES)
    original = (good / name).read_text()
    text = mutated_json(rng, original, SMALL)
    try:
        (good / name).write_text(text, encoding="utf-8")
        open_all(good)
    except UserError as error:
        assert str(good) in str(error) and len(str(error).encode("utf-8")) < 2000
    finally:
        (good / name).write_text(original)


def test_checkpoints_and_files_are_no_models(good: Path, tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002/manifest.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "step-00000002"):
        wanted = re.escape(f"python -m megatron_hetero.cli.export {tmp_path}/step-00000002 DIR")
        with pytest.raises(UserError, match=wanted):
            read_config(folder, "model.hf_path")
        with pytest.raises(UserError, match=wanted):
            Processor.from_folder(folder)
    with pytest.raises(UserError, match=f"model.hf_path: found the file {good}/a.png, "):
        read_config(good / "a.png", "model.hf_path")
