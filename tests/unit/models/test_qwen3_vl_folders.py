"""Folders of Qwen3-VL: what is read, refused, joined and written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from examples.demo.model import DemoSizes
from examples.demo.model import write_model as write_demo
from megatron_hetero.base.errors import UserError
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.data.turns import Turn
from megatron_hetero.data.validation import IMAGES
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.models.families.common import canonical_name, nested_name
from megatron_hetero.models.families.qwen3_vl.shapes import TextShape, VisionShape
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.items.pictures import ImageSize
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    companions_of,
    folder_shapes,
    model_writer,
    open_encoders,
    open_modules,
    stored_shapes,
)
from tests.support.folders import CORPUS, ModelChoice, save_random, write_model
from tests.support.items import pictures, whole
from tests.support.shapes import parameter_count, shapes_of_folder

CHOICE = ModelChoice(family="qwen3_vl", text_layers=2, vision_layers=3, text_hidden=48, head_dim=16, seed=30)
OLDER = ModelChoice(text_layers=2, vision_layers=2, seed=31)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`own`, a whole model; `tied`, another one; `older`, a Qwen2.5-VL; `text`, a Qwen3."""
    folder = tmp_path_factory.mktemp("folders")
    write_model(folder / "own", CHOICE)
    write_model(folder / "tied", replace(CHOICE, tied=True, deepstack=(1,), vision_layers=2, seed=32))
    write_model(folder / "older", OLDER)
    write_language_model(folder / "text")
    return folder


def write_language_model(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder.parent / "own")
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 3,
        hidden_size=48,
        intermediate_size=74,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    save_random(folder, Qwen3ForCausalLM, config, tokenizer, seed=33)


def copied(folders: Path, name: str, to: Path, *edits: tuple[str, object]) -> Path:
    """A copy of a folder, with other values in its configuration."""
    copy = Path(shutil.copytree(folders / name, to / name))
    content = json.loads((copy / "config.json").read_text())
    for key, value in edits:
        inside, (*above, last) = content, key.split(".")
        for outer in above:
            inside = inside[outer]
        inside[last] = value
    (copy / "config.json").write_text(json.dumps(content))
    return copy


# --------------------------------------------------------------------------------------------------- reading


def test_shapes_are_those_of_the_folder(folders: Path) -> None:
    shapes = shapes_of_folder(folders / "own")
    vision, text = shapes.encoders["vision"], shapes.text
    assert isinstance(vision, VisionShape) and isinstance(text, TextShape)
    assert (vision.patch, vision.table_side, vision.deepstack, vision.position_dims) == (16, 6, (0, 1), 4)
    assert (text.head_dim, text.hidden, text.heads, text.mrope_section) == (16, 48, 4, (4, 2, 2))
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folders / "own")
    state = {canonical_name(name): tuple(p.shape) for name, p in model.state_dict().items()}
    assert folder_shapes(shapes) == state
    opened = open_modules(ModelFolders.read(folders / "own"), shapes, 0)
    assert opened["text"].read(TensorSlice("model.norm.weight", (0, 5))).shape == (5,)


@pytest.mark.parametrize("key, value, message", [
    ("vision_config.hidden_act", "silu", "found vision_config.hidden_act = 'silu', expected 'gelu_pytorch_tanh'"),
    ("vision_config.num_position_embeddings", 37, "num_position_embeddings beyond a square = 1, expected 0"),
    ("vision_config.deepstack_visual_indexes", [0, 3], "deepstack_visual_indexes that no layer has = [3], expected []"),
    ("vision_config.deepstack_visual_indexes", [1, 0], "deepstack_visual_indexes = [1, 0], expected [0, 1]"),
    ("vision_config.deepstack_visual_indexes", [0, 1, 2], "deepstack.2 "),
    ("vision_config.out_hidden_size", 32, "found vision_config.out_hidden_size = 32, expected 48"),
    ("text_config.attention_bias", True, "found true, expected false or null"),
    ("text_config.head_dim", 18, "2 * sum of mrope_section = 16, expected 18"),
    ("text_config.head_dim", 15, "head_dim"),
    ("text_config.rope_parameters.mrope_interleaved", False, "found false, expected true"),
    ("text_config.rope_parameters.rope_type", "yarn", "yarn"),
    ("text_config.hidden_act", "gelu", "found text_config.hidden_act = 'gelu'"),
    ("text_config.attention_dropout", 0.1, "found 0.1, expected 0 or null"),
    ("text_config.num_key_value_heads", 3, "num_attention_heads % num_key_value_heads = 1"),
    ("model_type", "qwen4_vl", "found model_type 'qwen4_vl', expected 'qwen2_5_vl' or 'qwen3_vl' or 'qwen3_vl_moe'"),
])  # fmt: skip
def test_refused(key: str, value: object, message: str, folders: Path, tmp_path: Path) -> None:
    folder = copied(folders, "own", tmp_path, (key, value))
    with pytest.raises(UserError) as error:
        shapes_of_folder(folder)
    text = str(error.value)
    assert str(folder) in text and message in text and len(text) < 700


def test_outputs_that_no_language_model_takes_are_refused(folders: Path) -> None:
    further = {"detail": folders / "own"}
    with pytest.raises(UserError, match=r"own/config\.json: found an encoder \(detail\) .*deepstack\.0, deep"):
        ModelShapes.of(ModelFolders.read(folders / "older"), further)
    shapes = ModelShapes.of(ModelFolders.read(folders / "own"), {"detail": folders / "older"})
    assert list(shapes.encoders["detail"].outputs) == ["rows"]


# --------------------------------------------------------------------------------------------------- joining


def test_a_language_model_alone_takes_an_encoder(folders: Path, tmp_path: Path) -> None:
    joined = ModelFolders.read(folders / "text", folders / "own")
    assert joined.text_alone and not joined.fresh_projector
    shapes = ModelShapes.of(joined)
    own: Any = shapes_of_folder(folders / "own").text
    assert shapes.text == replace(own, rope_theta=1e4)
    opened = open_modules(joined, shapes, 0)
    assert opened["text"].shapes.keys() >= set(folder_shapes(shapes)) - set(opened["vision"].shapes)
    config = Qwen3VLConfig(**joined.config.to_dict())
    assert config.text_config.rope_parameters["mrope_interleaved"] is True  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def test_on_text_a_joined_model_is_the_language_model(folders: Path) -> None:
    alone: Any = Qwen3ForCausalLM.from_pretrained(folders / "text")
    joined: Any = Qwen3VLForConditionalGeneration(ModelFolders.read(folders / "text", folders / "own").config)
    state = {nested_name(name): tensor for name, tensor in alone.state_dict().items()}
    missing, unexpected = joined.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith("model.visual.") for name in missing)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(joined(input_ids=ids).logits, alone(input_ids=ids).logits)


def test_windows_of_a_language_model_are_refused(folders: Path, tmp_path: Path) -> None:
    text = copied(folders, "text", tmp_path, ("use_sliding_window", True), ("sliding_window", 8), ("layer_types", None))
    with pytest.raises(UserError, match="sliding_window in use = true, expected false"):
        ModelFolders.read(text, folders / "own")


# --------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("which", ["own", "tied"])
@pytest.mark.parametrize("limit", [10**9, 40_000], ids=["one file", "shards"])
def test_what_is_written_loads_strictly(which: str, limit: int, folders: Path, tmp_path: Path) -> None:
    source, target = folders / which, tmp_path / "export"
    shapes = shapes_of_folder(source)
    opened, kind = open_modules(ModelFolders.read(source), shapes, 0)["text"], Qwen3VLForConditionalGeneration
    with model_writer(target, shapes, torch.float32, companions_of({"text": source}), limit) as put:
        for name in stored_shapes(shapes):
            put(name, opened.whole(name))
    nested = "model.visual.", "model.language_model."
    assert all(name == "lm_head.weight" or name.startswith(nested) for name in names_in(target))
    loaded, info = kind.from_pretrained(target, output_loading_info=True)  # pyright: ignore[reportGeneralTypeIssues]
    before: Any = kind.from_pretrained(source)
    assert not any(info.values()), info
    state = loaded.state_dict()
    assert state.keys() == before.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.state_dict().items())
    assert shapes_of_folder(target) == shapes


def test_encoders_are_written_as_their_families_name_them(folders: Path, tmp_path: Path) -> None:
    further, target = {"detail": folders / "own", "far": folders / "older"}, tmp_path / "export"
    sources = ModelFolders.read(folders / "own")
    shapes = ModelShapes.of(sources, further)
    opened = open_modules(sources, shapes, 0) | open_encoders(further, shapes, 0)
    dtypes = {name: torch.bfloat16 if name.startswith("far.") else torch.float32 for name in stored_shapes(shapes)}
    with model_writer(target, shapes, dtypes, companions_of({"text": folders / "own"} | further)) as put:
        for name in stored_shapes(shapes):
            beginning = name.partition(".")[0]
            put(name, opened[beginning if beginning in further else "text"].whole(name))
    again = open_encoders({name: target / "encoders" / name for name in further}, shapes, 0)
    for encoder, weights in again.items():
        for name in weights.shapes:
            want = opened[encoder].whole(name).to(dtypes[name]).float()
            assert torch.equal(weights.whole(name).float(), want), name
    embedding = "patch_embed.proj.weight"
    assert f"model.visual.{embedding}" in names_in(target / "encoders" / "detail")
    assert f"visual.{embedding}" in names_in(target / "encoders" / "far")


def names_in(folder: Path) -> set[str]:
    """Of all tensors, as they stand in the files."""
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}


def test_published_names_are_read_back() -> None:
    names = ["visual.merger.norm.bias", "model.layers.0.self_attn.q_norm.weight", "model.norm.weight", "lm_head.weight"]
    assert [canonical_name(nested_name(name)) for name in names] == names
    assert nested_name("model.norm.weight") == "model.language_model.norm.weight"


# ---------------------------------------------------------------------------------------------------- counts

# From knowledge of the published configurations, not from their files.
PUBLISHED = {
    "2B": ((24, 1024, 4096, 2048, (5, 11, 17)), (28, 2048, 16, 6144, True), 2_127_532_032),
    "4B": ((24, 1024, 4096, 2560, (5, 11, 17)), (36, 2560, 32, 9728, True), 4_437_815_808),
    "8B": ((27, 1152, 4304, 4096, (8, 16, 24)), (36, 4096, 32, 12288, False), 8_767_123_696),
    "32B": ((27, 1152, 4304, 5120, (8, 16, 24)), (64, 5120, 64, 25600, False), 33_357_390_064),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_of_published_sizes(size: str) -> None:
    (depth, width, ffn, out, deepstack), (layers, hidden, heads, text_ffn, tied), expected = PUBLISHED[size]
    vision = VisionShape(depth, width, 16, ffn, 3, 16, 2, 2, out, 1e4, table_side=48, deepstack=deepstack)
    text = TextShape(layers, hidden, heads, 8, 128, text_ffn, 151936, tied, 5e6, (24, 20, 20), 1e-6)
    shapes = ModelShapes({"vision": vision}, text)
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(_config(vision, text))
    assert parameter_count(shapes) == sum(p.numel() for p in model.parameters()) == expected


def _config(v: VisionShape, t: TextShape) -> Qwen3VLConfig:
    return Qwen3VLConfig(
        vision_config={
            "depth": v.layers, "hidden_size": v.hidden, "num_heads": v.heads, "intermediate_size": v.ffn,
            "out_hidden_size": v.out_hidden, "num_position_embeddings": v.table_side**2,
            "deepstack_visual_indexes": list(v.deepstack),
        },
        text_config={
            "num_hidden_layers": t.layers, "hidden_size": t.hidden, "num_attention_heads": t.heads,
            "num_key_value_heads": t.kv_heads, "head_dim": t.head_dim, "intermediate_size": t.ffn,
            "vocab_size": t.vocab,
        },
        tie_word_embeddings=t.tied,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ demo


def test_the_demo_is_read_and_reads_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    write_demo(folder, "qwen3_vl", CORPUS, DemoSizes(), seed=3)
    shapes = shapes_of_folder(folder)
    assert (
        list(shapes.encoders["vision"].outputs) == ["rows", "deepstack.0", "deepstack.1", "deepstack.2"]
        and shapes.text.tied
    )
    open_modules(ModelFolders.read(folder), shapes, 0)
    Image.linear_gradient("L").convert("RGB").resize((96, 160)).save(tmp_path / "a.png")
    turns = (Turn("user", (IMAGES[0], "What is in it?")), Turn("assistant", "A red disc."))
    record = Record("d", 0, "x:1", turns, pictures("a.png"), tmp_path)
    processor = Processor.from_folder(folder)
    sample = processor.tokenize(record)
    assert sample.sizes == (ImageSize(1, 10, 6),) and sample.rows.tolist() == [15]
    patches = processor.patches(record, 0, whole(sample.sizes[0]))
    reference = AutoImageProcessor.from_pretrained(folder, backend="pil")
    expected = reference(images=[Image.open(tmp_path / "a.png")], return_tensors="np")
    np.testing.assert_array_equal(patches, expected["pixel_values"])
    assert (
        patches.shape == (60, shapes.encoders["vision"].patch_elements)
        and -1 <= patches.min() < -0.5 < 0.5 < patches.max() <= 1
    )


def test_the_demo_has_what_published_folders_say_of_their_processor(tmp_path: Path) -> None:
    write_demo(tmp_path, "qwen3_vl", CORPUS, DemoSizes(), seed=3)
    said = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert (said["image_processor_type"], said["processor_class"]) == ("Qwen2VLImageProcessorFast", "Qwen3VLProcessor")
    assert (said["patch_size"], said["temporal_patch_size"], said["merge_size"]) == (16, 2, 2)
    assert said["image_mean"] == said["image_std"] == [0.5, 0.5, 0.5]
    if find_spec("torchvision"):
        assert type(AutoProcessor.from_pretrained(tmp_path)).__name__ == "Qwen3VLProcessor"
    else:  # The processor of videos, which needs it, is found by its file.
        with pytest.raises(ImportError, match="Qwen3VLVideoProcessor requires the Torchvision library"):
            AutoProcessor.from_pretrained(tmp_path)
