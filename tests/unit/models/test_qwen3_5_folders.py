"""Folders of Qwen3.5 and Qwen3.5-MoE: what is read, refused and written, the forms of experts, tensors that are copied,
and encoders that pass between these families and Qwen3-VL.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from examples.demo.model import DemoSizes
from examples.demo.model import write_model as write_demo
from megatron_hetero.base.errors import UserError
from megatron_hetero.checkpoint.convert import OpenCheckpoint, export_checkpoint, import_folders
from megatron_hetero.checkpoint.record import ModelSources
from megatron_hetero.data.processor import Processor
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.models.families.common import nested_name
from megatron_hetero.models.families.qwen3_5.family import QWEN3_5
from megatron_hetero.models.families.qwen3_5.shapes import TextShape
from megatron_hetero.models.families.qwen3_5_moe import shapes as moe
from megatron_hetero.models.families.qwen3_vl.shapes import VisionShape
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.delta_net import DeltaNet
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    companions_of,
    folder_shapes,
    fresh_projector,
    model_writer,
    open_encoders,
    open_modules,
    stored_shapes,
)
from tests.support.folders import CORPUS, ModelChoice, rewrite, write_model, write_published
from tests.support.oracle import one_by_one, stored_name
from tests.support.shapes import parameter_count, shapes_of_folder

DENSE = ModelChoice(family="qwen3_5", text_layers=4, vision_layers=3, head_dim=32, text_hidden=48, seed=50)
MOE = replace(DENSE, family="qwen3_5_moe", attention_every=3, text_layers=3, seed=51)
OLDER = replace(DENSE, family="qwen3_vl", text_layers=2, head_dim=16, seed=52)
NARROW = replace(OLDER, text_hidden=40, seed=53)
KINDS: dict[str, Any] = {"dense": Qwen3_5ForConditionalGeneration, "moe": Qwen3_5MoeForConditionalGeneration}
EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
AHEAD = {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.experts.gate_up_proj"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`dense` and `moe`, as transformers writes new models; `dense-published`, `moe-published`; `dense-alone`,
    `moe-alone`, their language models; `older`, a Qwen3-VL with DeepStack, `narrow`, one of another width; `text`, the
    language model of the former.
    """
    folder = tmp_path_factory.mktemp("folders")
    for name, choice in (("dense", DENSE), ("moe", MOE), ("older", OLDER), ("narrow", NARROW)):
        write_model(folder / name, choice)
    kinds: dict[str, Any] = {"dense": Qwen3_5ForCausalLM, "moe": Qwen3_5MoeForCausalLM}
    for name, kind in kinds.items():
        write_published(folder / name, folder / f"{name}-published")
        kind.from_pretrained(folder / name).save_pretrained(folder / f"{name}-alone")
        AutoTokenizer.from_pretrained(folder / name).save_pretrained(folder / f"{name}-alone")
    return folder


def opened(found: ModelFolders) -> tuple[ModelShapes, dict[str, StoredWeights]]:
    shapes = ModelShapes.of(found)
    return shapes, open_modules(found, shapes, 0)


def canonical(folder: Path, kind: Any) -> dict[str, Tensor]:
    """All weights of a model by canonical name, as transformers loads it."""
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    parts = [one_by_one(stored_name(n), t) for n, t in model.state_dict().items()]
    return {name: tensor for found in parts for name, tensor in found.items()}


def names_in(folder: Path) -> dict[str, Tensor]:
    """All tensors, as they are in the files."""
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def edited(folder: Path, to: Path, *edits: tuple[str, object]) -> Path:
    """A copy of a folder with other values in its configuration; a key with `...` is removed."""
    copy = Path(shutil.copytree(folder, to / folder.name))
    content = json.loads((copy / "config.json").read_text())
    for key, value in edits:
        inside, (*above, last) = content, key.split(".")
        for outer in above:
            inside = inside[outer]
        inside.pop(last, None)
        inside |= {} if value is ... else {last: value}
    (copy / "config.json").write_text(json.dumps(content))
    return copy


# --------------------------------------------------------------------------------------------------- reading


def test_shapes_are_those_of_the_folder(folders: Path) -> None:
    shapes = shapes_of_folder(folders / "dense")
    vision, text = shapes.encoders["vision"], shapes.text
    assert isinstance(vision, VisionShape) and isinstance(text, TextShape)
    assert (vision.patch, vision.table_side, vision.deepstack, list(vision.outputs)) == (16, 6, (), ["rows"])
    assert (text.head_dim, text.mrope_section, text.turns, text.rotary.width) == (32, (2, 1, 1), (0, 1, 2, 0), 8)
    assert (text.entry_layer("rows"), text.entry_layer("deepstack.0")) == (0, None)
    delta, full = (layer.attention for layer in text.architecture.layers[:2])
    assert delta == DeltaNet(48, 2, 4, 8, 12, 4, Norm(12, 1e-6))
    assert isinstance(full, SelfAttention) and full.gated and full.causal and not full.qkv_bias
    assert full.head_norm == Norm(32, 1e-6, offset=1)
    layers, ends = text.architecture.layers, {end.name: end.part for end in text.architecture.ends}
    assert [type(layer.attention) for layer in layers] == [DeltaNet, SelfAttention] * 2
    norms = [norm for layer in layers for norm in layer.norms]
    assert {*norms, ends["final_layernorm"]} == {Norm(48, 1e-6, offset=1)}


@pytest.mark.parametrize("name", KINDS)
def test_tensors_are_those_of_transformers(name: str, folders: Path) -> None:
    want = canonical(folders / name, KINDS[name])
    for folder in (folders / name, folders / f"{name}-published"):
        shapes, modules = opened(ModelFolders.read(folder))
        assert folder_shapes(shapes) == {name: tuple(tensor.shape) for name, tensor in want.items()}
        assert all(torch.equal(modules["text"].whole(each), tensor) for each, tensor in want.items())
        assert not modules["text"].transposed
    assert canonical(folders / f"{name}-published", KINDS[name]).keys() == want.keys()


def test_all_layers_have_experts_and_an_mlp_beside_them(folders: Path) -> None:
    shapes = shapes_of_folder(folders / "moe")
    text = shapes.text
    assert isinstance(text, moe.TextShape) and text.counts == {"experts": 6} and text.ffn == 0
    assert (text.experts, text.experts_per_token, text.expert_ffn, text.shared_ffn) == (6, 2, 20, 28)
    assert text.full == (False, False, True) and text.architecture.views == ("main", "experts")
    assert shapes_of_folder(folders / "moe-published") == shapes


def test_kinds_of_layers_come_from_a_list_or_an_interval(folders: Path, tmp_path: Path) -> None:
    def full(*edits: tuple[str, object]) -> tuple[bool, ...]:
        folder = edited(folders / "dense", tmp_path / str(len(list(tmp_path.iterdir()))), *edits)
        text: Any = shapes_of_folder(folder).text
        return text.full

    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert full(("text_config.layer_types", kinds)) == (True, False, False, True)
    assert full(("text_config.layer_types", ...)) == (False, False, False, True)
    every = ("text_config.full_attention_interval", 3)
    assert full(("text_config.layer_types", ...), every) == (False, False, True, False)
    assert full(("text_config.layer_types", kinds), every) == (True, False, False, True)


@pytest.mark.parametrize("edits", [
    [("text_config.rope_parameters.partial_rotary_factor", ...)],
    [("text_config.rope_parameters.partial_rotary_factor", ...), ("text_config.partial_rotary_factor", 0.25)],
    [("text_config.partial_rotary_factor", 0.25)],
    [("text_config.output_gate_type", "swish")],
    [("text_config.attn_output_gate", ...), ("text_config.mamba_ssm_dtype", ...)],
    [("language_model_only", False), ("pad_token_id", 3), ("hidden_size", 48)],
])  # fmt: skip
def test_what_says_the_same(edits: list[tuple[str, object]], folders: Path, tmp_path: Path) -> None:
    folder = edited(folders / "dense-published", tmp_path, *edits)
    assert shapes_of_folder(folder) == shapes_of_folder(folders / "dense")


REFUSED = {
    "text_config.partial_rotary_factor": (1, "found 1, expected 0.25"),
    "text_config.rope_parameters.partial_rotary_factor": (0.5, "found 0.5, expected 0.25"),
    "text_config.attn_output_gate": (False, "found false, expected true or null"),
    "text_config.output_gate_type": ("sigmoid", "found 'sigmoid', expected 'swish' or 'silu' or null"),
    "text_config.mamba_ssm_dtype": ("bfloat16", "found 'bfloat16', expected 'float32' or null"),
    "text_config.mlp_only_layers": ([1], "found [1], expected [] or null"),
    "text_config.attention_bias": (True, "found true, expected false or null"),
    "text_config.attention_dropout": (0.1, "found 0.1, expected 0 or null"),
    "text_config.full_attention_interval": (0, "found 0, expected a whole number"),
    "text_config.hidden_act": ("gelu", "found text_config.hidden_act = 'gelu', expected 'silu'"),
    "text_config.layer_types": (["linear_attention"] * 3, "cannot be used (StrictDataclassClassV"),
    "text_config.linear_num_value_heads": (5, "linear_num_value_heads % linear_num_key_heads = 1, expected 0"),
    "text_config.linear_num_key_heads": (0, "text_config.linear_num_key_heads = 0, expected 'a number above 0'"),
    "text_config.linear_conv_kernel_dim": (0, "text_config.linear_conv_kernel_dim = 0, expected 'a number above 0'"),
    "text_config.linear_key_head_dim": (-8, "text_config.linear_key_head_dim = -8, expected 'a number above 0'"),
    "text_config.num_key_value_heads": (3, "num_attention_heads % num_key_value_heads = 1, expected 0"),
    "text_config.head_dim": (36, "found text_config.head_dim % 8 = 4, expected 0"),
    "text_config.rope_parameters.mrope_section": ([2, 2, 1], "2 * sum of mrope_section = 10, expected 8"),
    "text_config.rope_parameters.mrope_interleaved": (False, "found false, expected true"),
    "text_config.rope_parameters.rope_type": ("yarn", "yarn"),
    "vision_config.deepstack_visual_indexes": ([1], "found [1], expected []"),
    "vision_config.hidden_act": ("silu", "found vision_config.hidden_act = 'silu', expected 'gelu_pytorch_tanh'"),
    "vision_config.num_position_embeddings": (37, "num_position_embeddings beyond a square = 1, expected 0"),
    "quantization_config": ({"quant_method": "fp8"}, "quantised"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_refused(key: str, folders: Path, tmp_path: Path) -> None:
    value, message = REFUSED[key]
    folder = edited(folders / "dense", tmp_path, (key, value))
    with pytest.raises(UserError) as error:
        shapes_of_folder(folder)
    text = str(error.value)
    assert str(folder) in text and message in text and len(text) < 700


def test_kinds_of_layers_of_other_families_are_refused(folders: Path, tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(UserError, match=r"the kinds in text_config\.layer_types = \['full_.*'sliding_attention'\]"):
        shapes_of_folder(edited(folders / "dense", tmp_path, ("text_config.layer_types", kinds)))


@pytest.mark.parametrize("key, value, message", [
    ("num_experts", 0, r"text_config\.num_experts = 0, expected 'a number above 0'"),
    ("num_experts_per_tok", 7, r"num_experts_per_tok beyond num_experts = 1, expected 0"),
    ("moe_intermediate_size", 0, r"text_config\.moe_intermediate_size = 0"),
    ("shared_expert_intermediate_size", 0, r"text_config\.shared_expert_intermediate_size = 0"),
    ("mlp_only_layers", [0], r"mlp_only_layers: found \[0\], expected \[\] or null"),
])  # fmt: skip
def test_refused_experts(key: str, value: object, message: str, folders: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        shapes_of_folder(edited(folders / "moe", tmp_path, (f"text_config.{key}", value)))


@pytest.mark.parametrize("ffn, square", [(24, "gate_up_proj"), (48, "down_proj")])
def test_square_tensors_of_experts_are_not_turned(ffn: int, square: str, tmp_path: Path) -> None:
    write_model(tmp_path / "one", replace(MOE, expert_ffn=ffn))
    published = write_published(tmp_path / "one", tmp_path / "published")
    want = canonical(tmp_path / "one", KINDS["moe"])
    shape = names_in(published)[f"model.language_model.layers.0.mlp.experts.{square}"].shape
    assert shape[1] == shape[2]
    _, modules = opened(ModelFolders.read(published))
    assert all(torch.equal(modules["text"].whole(name), tensor) for name, tensor in want.items())


# --------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("limit", [10**9, 60_000], ids=["one file", "shards"])
@pytest.mark.parametrize("name", ["dense", "moe", "dense-published", "moe-published"])
def test_what_is_written_is_what_was_read(name: str, limit: int, folders: Path, tmp_path: Path) -> None:
    source, target, kind = folders / name, tmp_path / "export", KINDS[name.partition("-")[0]]
    shapes, modules = opened(ModelFolders.read(source))
    companions = companions_of({"text": source})
    with model_writer(target, shapes, torch.float32, companions, limit, source=modules["text"]) as put:
        for each in stored_shapes(shapes):
            put(each, modules["text"].whole(each))
    # Experts one by one, as transformers writes those of a new model, become one tensor as in published folders.
    wanted = names_in(folders / "moe-published" if name == "moe" else source)
    wanted = {each: t for each, t in wanted.items() if not (name == "moe" and each in AHEAD)}
    written = names_in(target)
    assert written.keys() == wanted.keys() and (written.keys() >= AHEAD) == ("published" in name)
    assert all(torch.equal(written[each], tensor) for each, tensor in wanted.items())
    assert all(written[each].dtype == tensor.dtype for each, tensor in wanted.items())
    found, want = canonical(target, kind), canonical(source, kind)
    assert all(torch.equal(found[each], tensor) for each, tensor in want.items())
    assert shapes_of_folder(target) == shapes
    assert json.loads((target / "config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize("name", ["dense-published", "moe-published"])
def test_an_exported_checkpoint_has_what_the_model_here_has_not(name: str, folders: Path, tmp_path: Path) -> None:
    """Of a folder in bfloat16, with decays in fp32 as in published folders."""
    folder, target = Path(shutil.copytree(folders / name, tmp_path / name)), tmp_path / "export"
    rewrite(folder, lambda each, t: {each: t if each.endswith(("A_log", "linear_attn.norm.weight")) else t.bfloat16()})
    source = names_in(folder)
    decays = [each for each in source if each.endswith("A_log")]
    assert len(decays) == 2 and {source[each].dtype for each in decays} == {torch.float32}
    import_folders(ModelSources(folder), tmp_path / "checkpoints" / "step-00000000")
    checkpoint = OpenCheckpoint.open(tmp_path / "checkpoints")
    for dtype, decay in (("stored", torch.float32), ("bfloat16", torch.bfloat16)):
        done = export_checkpoint(checkpoint, target, ModelSources(folder), dtype)
        assert "mtp.fc.weight" in done.notice and "does not update" in done.notice
        written = names_in(target)
        assert written.keys() == source.keys() > AHEAD
        assert {written[each].dtype for each in decays} == {decay}
        assert all(torch.equal(written[each], tensor.to(written[each].dtype)) for each, tensor in source.items())


# --------------------------------------------------------------------------------------------- language models


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_language_model_alone_takes_an_encoder(name: str, nested: bool, folders: Path, tmp_path: Path) -> None:
    """Its tensors have names with or without `language_model`, as transformers writes both."""
    alone = Path(shutil.copytree(folders / f"{name}-alone", tmp_path / "alone"))
    rewrite(alone, lambda each, t: {f"model.{each.removeprefix('model.').removeprefix('language_model.')}"
                                    if each.startswith("model.") else each: t})  # fmt: skip
    if nested:
        rewrite(alone, lambda each, t: {nested_name(each): t})
    found = ModelFolders.read(alone, folders / name)
    assert found.text_alone and not found.fresh_projector and found.notice == ""
    shapes, modules = opened(found)
    assert shapes == shapes_of_folder(folders / name)
    want = canonical(folders / name, KINDS[name])
    for each in stored_shapes(shapes):
        module = "vision" if each.startswith("visual.") else "text"
        assert torch.equal(modules[module].whole(each), want[each])
    config, own = found.config.to_dict(), AutoConfig.from_pretrained(folders / name).to_dict()
    assert config["vision_config"] == own["vision_config"]
    assert config["text_config"] == own["text_config"] | {"dtype": "float32"}


def test_keys_for_other_programs_survive_a_join(folders: Path) -> None:
    found = ModelFolders.read(folders / "dense-published", folders / "older", fresh_projector=True)
    text = found.config.to_dict()["text_config"]
    assert text["mtp_num_hidden_layers"] == 1 and text["attn_output_gate"] is True
    assert opened(found)[1]["text"].unchanged.keys() == AHEAD


def test_sections_of_a_language_model_alone_are_the_published_ones() -> None:
    assert QWEN3_5.rope_settings(256)["mrope_section"] == [11, 11, 10]
    assert [QWEN3_5.rope_settings(8 * n)["mrope_section"] for n in (1, 2, 3)] == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


# ---------------------------------------------------------------------------------- encoders of other families


@pytest.mark.parametrize("text, vision", [
    ("dense", "moe"), ("moe", "dense"), ("dense-alone", "moe"), ("moe-alone", "dense"),
    ("older", "dense"), ("older", "moe"),
])  # fmt: skip
def test_encoders_without_deepstack_fit_all(text: str, vision: str, folders: Path) -> None:
    found = ModelFolders.read(folders / text, folders / vision)
    assert found.notice == "" and not found.fresh_projector
    shapes, modules = opened(found)
    own = shapes_of_folder(folders / text.removesuffix("-alone"))
    assert (shapes.text, list(shapes.encoders["vision"].outputs)) == (own.text, ["rows"])
    want = {name: t for name, t in canonical(folders / vision, KINDS[vision]).items() if name.startswith("visual.")}
    assert modules["vision"].shapes.keys() >= want.keys()
    assert all(torch.equal(modules["vision"].whole(name), tensor) for name, tensor in want.items())
    model: Any = AutoModelForImageTextToText.from_config(found.config)
    state = {stored_name(name) for name, _ in model.named_parameters() if ".visual." in name}
    assert state == want.keys() and model.config.model_type == shapes.text.family


def test_a_joined_model_with_an_empty_list_computes_pictures(folders: Path) -> None:
    """The configuration of a Qwen3-VL without DeepStack is one that transformers takes."""
    config = ModelFolders.read(folders / "older", folders / "dense").config
    assert config.vision_config.deepstack_visual_indexes == []
    model: Any = Qwen3VLForConditionalGeneration(config)
    ids = torch.tensor([[5, *[config.image_token_id] * 4, 6]])
    pixels, grid = torch.randn(16, 3 * 2 * 16 * 16), torch.tensor([[1, 4, 4]])
    types = (ids == config.image_token_id).int()
    logits = model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=types).logits
    assert logits.shape == (1, 6, config.text_config.vocab_size) and logits.isfinite().all()


@pytest.mark.parametrize("text", ["dense", "moe", "dense-alone"])
def test_deepstack_is_left_out_with_a_fresh_projector(text: str, folders: Path) -> None:
    with pytest.raises(UserError) as error:
        ModelFolders.read(folders / text, folders / "older")
    message = str(error.value)
    assert f"{folders}/older/config.json: found an encoder of Qwen3-VL " in message and "deepstack_merger" in message
    assert "expected a projector of Qwen3.5" in message and "--model.fresh_projector true" in message
    found = ModelFolders.read(folders / text, folders / "older", fresh_projector=True)
    assert "deepstack_merger_list.0.linear_fc1.bias" in found.notice and "and 7 more" in found.notice
    processor = Processor.from_folder(folders / text, hf_path_vision=folders / "older")
    assert processor.model_type == found.family.model_type
    assert "deepstack_visual_indexes" not in found.config.to_dict()["vision_config"]
    shapes, modules = opened(found)
    vision = shapes.encoders["vision"]
    assert isinstance(vision, VisionShape) and vision.deepstack == ()
    want, fresh = canonical(folders / "older", Qwen3VLForConditionalGeneration), fresh_projector(shapes, 0)
    for name in folder_shapes(shapes):
        if name.startswith("visual."):
            assert torch.equal(modules["vision"].whole(name), fresh.get(name, want[name])), name


def test_a_projector_of_another_width_is_fresh_anyway(folders: Path) -> None:
    found = ModelFolders.read(folders / "dense", folders / "narrow")
    assert found.fresh_projector and "are not used" in found.notice
    shapes, _ = opened(found)
    assert shapes.encoders["vision"].out_hidden == 48


def test_other_tensors_of_an_encoder_are_still_refused(folders: Path, tmp_path: Path) -> None:
    def more(name: str, tensor: Tensor) -> dict[str, Tensor]:
        other = {"model.visual.deepstack_merger_list.2.norm.bias": tensor.clone()}
        return {name: tensor} | (other if name.endswith("merger_list.1.norm.bias") else {})

    folder = rewrite(Path(shutil.copytree(folders / "older", tmp_path / "older")), more)
    with pytest.raises(UserError, match=r"1 unexpected: visual\.deepstack_merger_list\.2\.norm\.bias"):
        opened(ModelFolders.read(folders / "dense", folder, fresh_projector=True))


def test_language_models_that_take_no_such_encoder_are_named(folders: Path, tmp_path: Path) -> None:
    other = edited(folders / "dense", tmp_path, ("model_type", "qwen2_5_vl"))
    with pytest.raises(UserError) as error:
        ModelFolders.read(other, folders / "dense")
    message = str(error.value)
    assert "found model_type 'qwen2_5_vl', expected 'qwen3_vl' or 'qwen3' or" in message
    assert "'qwen3_5_moe_text'" in message and "model.hf_path_vision" in message


def test_further_encoders(folders: Path) -> None:
    for own, detail in (("dense", "moe"), ("older", "dense"), ("moe", "moe-published")):
        shapes = ModelShapes.of(ModelFolders.read(folders / own), {"detail": folders / detail})
        weights = open_encoders({"detail": folders / detail}, shapes)["detail"]
        want = canonical(folders / detail, KINDS[detail.partition("-")[0]])
        name = "visual.merger.linear_fc2.weight"
        assert torch.equal(weights.whole(f"detail.{name}"), want[name])
    match = r"older/config\.json: found an encoder \(detail\) .*deepstack\.0, deepstack\.1"
    with pytest.raises(UserError, match=match):
        ModelShapes.of(ModelFolders.read(folders / "dense"), {"detail": folders / "older"})


# ------------------------------------------------------------------------------------------- costs and counts


def test_costs_of_layers_differ_more_the_longer_sequences_are() -> None:
    text = shapes_of_folder(EXAMPLES / "qwen3_5_9b").text
    ratios = []
    for tokens in (1024, 8192, 65536):
        costs = text.layer_costs(tokens)
        assert costs is not None and len(costs) == 32
        assert len({*costs[3::4]}) == len({cost for i, cost in enumerate(costs) if i % 4 < 3}) == 1
        ratios.append(costs[3] / costs[0])
    assert ratios[0] < ratios[1] < ratios[2] and ratios[2] > 2
    assert isinstance(text, TextShape)
    assert replace(text, full=(False,) * 32).layer_costs(1024) is None


# From knowledge of the published configurations; parameters of the language model and of the encoder.
PUBLISHED = {
    "qwen3_5_9b": (8_953_803_264, 456_010_480),
    "qwen3_5_27b": (26_895_998_464, 460_730_096),
    "qwen3_5_35b_a3b": (34_660_610_688, 446_571_248),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(EXAMPLES / name))
    shapes = shapes_of_folder(EXAMPLES / name)
    vision = sum(p.numel() for p in model.model.visual.parameters())
    text = sum(p.numel() for p in model.parameters()) - vision
    assert (text, vision) == PUBLISHED[name] and parameter_count(shapes) == text + vision


# ------------------------------------------------------------------------------------------------------ demo


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_demo_is_read(family: str, tmp_path: Path) -> None:
    write_demo(tmp_path / "demo", family, CORPUS, DemoSizes(), seed=3)
    shapes, _ = opened(ModelFolders.read(tmp_path / "demo"))
    assert isinstance(shapes.text, TextShape) and shapes.text.tied and shapes.text.full == (False, True, False)
    assert Processor.from_folder(tmp_path / "demo").model_type == family
