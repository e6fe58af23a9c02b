"""Folders of Qwen3-VL-MoE: the three forms in which experts are stored, read and written, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM, Qwen3VLMoeForConditionalGeneration

from examples.demo.model import DemoSizes
from examples.demo.model import write_model as write_demo
from megatron_hetero.base.errors import UserError
from megatron_hetero.data.processor import Processor
from megatron_hetero.hf.model_files import SINGLE
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.models.families.common import nested_name
from megatron_hetero.models.families.qwen3_vl_moe.shapes import TextShape
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    companions_of,
    folder_shapes,
    model_writer,
    open_modules,
    stored_shapes,
    tensors_by_subset,
)
from tests.support.folders import (
    CORPUS,
    ModelChoice,
    rewrite,
    write_language_model,
    write_model,
    write_transposed,
)
from tests.support.oracle import one_by_one, stored_name
from tests.support.shapes import parameter_count, shapes_of_folder

CHOICE = ModelChoice(
    family="qwen3_vl_moe", text_layers=3, vision_layers=3, text_hidden=48, head_dim=16, mlp_only_layers=(1,), seed=40
)
EXPERTS = "model.language_model.layers.0.mlp.experts."
FORMS = ["fused", "transposed", "alone"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`fused`, as transformers 5 writes it; `transposed`, as published; `alone`, its language model."""
    folder = tmp_path_factory.mktemp("folders")
    write_model(folder / "fused", CHOICE)
    write_transposed(folder / "fused", folder / "transposed")
    write_language_model(folder / "fused", folder / "alone")
    return folder


def sources(folders: Path, form: str) -> ModelFolders:
    return ModelFolders.read(folders / form, folders / "fused" if form == "alone" else None)


def opened(folders: Path, form: str) -> tuple[ModelShapes, dict[str, StoredWeights]]:
    found = sources(folders, form)
    shapes = ModelShapes.of(found)
    return shapes, open_modules(found, shapes, 0)


def canonical(folder: Path) -> dict[str, Tensor]:
    """All weights of a model by canonical name, as transformers loads it."""
    kind: Any = Qwen3VLMoeForConditionalGeneration
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    parts = [one_by_one(stored_name(n), t) for n, t in model.state_dict().items()]
    return {name: tensor for found in parts for name, tensor in found.items()}


def names_in(folder: Path) -> dict[str, Tensor]:
    """All tensors, as they are in the files."""
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def edited(folder: Path, to: Path, key: str, value: object) -> Path:
    """A copy of a folder with another value of `text_config`, or of a language model's configuration."""
    copy = Path(shutil.copytree(folder, to / folder.name))
    content = json.loads((copy / "config.json").read_text())
    inside = content.get("text_config", content)
    inside.pop(key, None)
    inside |= {} if value is None else {key: value}
    (copy / "config.json").write_text(json.dumps(content))
    return copy


# --------------------------------------------------------------------------------------------------- reading


def test_shapes_are_those_of_the_folder(folders: Path) -> None:
    shapes = shapes_of_folder(folders / "fused")
    text = shapes.text
    assert isinstance(text, TextShape)
    assert (text.experts, text.experts_per_token, text.expert_ffn, text.sparse) == (6, 2, 20, (True, False, True))
    assert shapes_of_folder(folders / "transposed") == shapes and text.counts == {"experts": 6}
    assert folder_shapes(shapes) == {name: tuple(t.shape) for name, t in canonical(folders / "fused").items()}
    layers = text.architecture.layers
    assert layers[0] == layers[2] != layers[1] and text.architecture.views == ("main", "experts")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_tensors(form: str, folders: Path) -> None:
    want = canonical(folders / "fused")
    shapes, modules = opened(folders, form)
    weights = modules["text"]
    assert weights.transposed == (form == "transposed")
    for name, shape in stored_shapes(shapes).items():
        if form == "alone" and name.startswith("visual."):
            continue
        tensor = want[name]
        assert weights.shapes[name] == shape == tuple(tensor.shape) and weights.dtype(name) == torch.float32
        whole = weights.whole(name)
        assert torch.equal(whole, tensor) and whole.is_contiguous(), name
        rows = (len(tensor) // 3, len(tensor) // 2)
        assert torch.equal(weights.read(TensorSlice(name, rows)), tensor.flatten(1)[slice(*rows)] if tensor.dim() > 1
                           else tensor[slice(*rows)])  # fmt: skip
        assert len(weights.read(TensorSlice(name, (1, 1)))) == 0
        if tensor.dim() == 2:
            for columns in ((0, 1), (tensor.shape[1] // 4, tensor.shape[1]), (3, 3)):
                part = weights.read(TensorSlice(name, rows, columns=columns))
                assert torch.equal(part, tensor[slice(*rows), slice(*columns)])


def test_on_text_a_joined_model_is_the_language_model(folders: Path) -> None:
    """What transformers makes of the folder of experts one by one, and of the joined configuration."""
    kind: Any = Qwen3MoeForCausalLM
    alone, info = kind.from_pretrained(folders / "alone", output_loading_info=True)
    assert not any(info.values()), info
    found = sources(folders, "alone")
    assert found.text_alone
    joined: Any = Qwen3VLMoeForConditionalGeneration(found.config)
    state = {nested_name(name): tensor for name, tensor in alone.state_dict().items()}
    missing, unexpected = joined.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith("model.visual.") for name in missing)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(joined(input_ids=ids).logits, alone(input_ids=ids).logits)
    own: Any = shapes_of_folder(folders / "fused").text
    assert ModelShapes.of(found).text == own


def test_folders_with_experts_one_by_one_are_read_in_a_whole_model_too(folders: Path, tmp_path: Path) -> None:
    folder = rewrite(Path(shutil.copytree(folders / "fused", tmp_path / "one")), one_by_one)
    _, modules = opened(tmp_path, "one")
    for name, tensor in canonical(folders / "fused").items():
        assert torch.equal(modules["text"].whole(name), tensor)
    assert f"{EXPERTS}5.down_proj.weight" in names_in(folder)


# ------------------------------------------------------------------------------------------- refused weights


def refused(folder: Path, match: str, vision: Path | None = None) -> None:
    def open_all() -> None:
        found = ModelFolders.read(folder, vision)
        open_modules(found, ModelShapes.of(found), 0)

    with pytest.raises(UserError, match=match) as error:
        open_all()
    assert str(folder) in str(error.value) and len(str(error.value)) < 900


Edit = Callable[[str, Tensor], dict[str, Tensor]]
REFUSED: dict[str, tuple[Edit, str]] = {
    "a fused tensor is missing": (
        lambda name, t: {} if name == f"{EXPERTS}down_proj" else {name: t},
        r"\(1 missing: model\.layers\.0\.mlp\.experts\.down_proj\)",
    ),
    "one expert is missing": (
        lambda name, t: {} if name == f"{EXPERTS}down_proj" else
        {n: m for n, m in one_by_one(name, t).items() if ".0.mlp.experts.4.up" not in n},
        r"\(2 missing: model\.layers\.0\.mlp\.experts\.4\.up_proj\.weight, model\.layers\.0\.mlp\.experts\.down_proj\)",
    ),
    "another number of experts": (
        lambda name, t: {name: t[:5] if name == f"{EXPERTS}gate_up_proj" else t},
        r"\(1 of another shape: model\.layers\.0\.mlp\.experts\.gate_up_proj is \(5, 40, 48\), not \(6, 40, 48\) "
        r"or \(6, 48, 40\)\)",
    ),
    "experts in a dense layer": (
        lambda name, t: {name: t, name.replace(".0.", ".1."): t.clone()} if name.startswith(EXPERTS) else {name: t},
        r"\(2 unexpected: model\.layers\.1\.mlp\.experts\.down_proj, model\.layers\.1\.mlp\.experts\.gate_up_proj\)",
    ),
    "an unsupported type": (
        lambda name, t: {name: t.double() if name.startswith(EXPERTS) else t},
        r"found 2 tensors .*: model\.layers\.0\.mlp\.experts\.down_proj is F64",
    ),
    "both forms": (
        lambda name, t: {name: t, **one_by_one(name, t.clone())} if name.startswith(EXPERTS) else {name: t},
        r"model\.safetensors: found model\.layers\.0\.mlp\.experts\.\d\.\w+\.weight a second time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["fused", "transposed"])
@pytest.mark.parametrize("edit, match", REFUSED.values(), ids=REFUSED)
def test_faults_of_weights_are_named_as_in_the_folder(
    edit: Edit, match: str, form: str, folders: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folders / form, tmp_path / form))
    if form == "transposed":
        match = match.replace(r"is \(5, 40, 48\)", r"is \(5, 48, 40\)")
        rewrite(copy, lambda name, t: {name: t.mT if ".experts." in name else t})
    rewrite(copy, edit)
    if form == "transposed":
        rewrite(copy, lambda name, t: {name: t.mT if t.dim() == 3 and ".experts." in name else t})
    refused(copy, match)


@pytest.mark.parametrize("form", ["fused", "transposed"])
def test_values_that_are_no_numbers_are_found_by_who_reads_them(form: str, folders: Path, tmp_path: Path) -> None:
    def spoil(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name == f"{EXPERTS}gate_up_proj":
            (tensor.mT if form == "transposed" else tensor)[3, 25, 7] = torch.nan  # row 5 of up
        return {name: tensor}

    rewrite(Path(shutil.copytree(folders / form, tmp_path / form)), spoil)
    weights, name = opened(tmp_path, form)[1]["text"], "model.layers.0.mlp.experts.3.up_proj.weight"
    weights.whole(name.replace("up", "gate"))
    weights.read(TensorSlice(name, (6, 20)))
    weights.read(TensorSlice(name, (0, 20), columns=(8, 48)))
    message = rf"tensor {EXPERTS}gate_up_proj: found values that are NaN".replace(".", r"\.")
    for read in (lambda: weights.whole(name), lambda: weights.read(TensorSlice(name, (5, 6), columns=(7, 8)))):
        with pytest.raises(UserError, match=message):
            read()


@pytest.mark.parametrize("ffn, square", [(24, "gate_up_proj"), (48, "down_proj")])
def test_square_tensors_are_taken_as_transformers_takes_them(ffn: int, square: str, tmp_path: Path) -> None:
    choice = replace(CHOICE, text_layers=1, mlp_only_layers=(), deepstack=(0,), expert_ffn=ffn)
    write_model(tmp_path / "square", choice)
    want = canonical(tmp_path / "square")
    weights = opened(tmp_path, "square")[1]["text"]
    assert all(torch.equal(weights.whole(name), tensor) for name, tensor in want.items())
    write_transposed(tmp_path / "square", tmp_path / "published")
    match = rf"transposed tensors beside square ones: model\.layers\.0\.mlp\.experts\.{square}"
    refused(tmp_path / "published", match)


# --------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("limit", [10**9, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_has_the_form_of_its_source(form: str, limit: int, folders: Path, tmp_path: Path) -> None:
    target, (shapes, modules) = tmp_path / "export", opened(folders, form)
    companions = companions_of({"text": folders / ("fused" if form == "alone" else form)})
    weights, transposed = modules["text"], modules["text"].transposed
    with model_writer(target, shapes, torch.float32, companions, limit, transposed) as put:
        for name in stored_shapes(shapes):
            put(name, modules["vision" if name.startswith("visual.") else "text"].whole(name))
    written, source = names_in(target), names_in(folders / ("fused" if form == "alone" else form))
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in source.items())
    found, want = canonical(target), canonical(folders / "fused")
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert shapes_of_folder(target) == shapes and weights.files
    if limit < 10**9:
        total = json.loads((target / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
        assert total > sum(t.numel() * 4 for t in source.values())  # with headers


def test_a_fused_tensor_has_a_dtype_that_loses_nothing(folders: Path, tmp_path: Path) -> None:
    target, (shapes, modules) = tmp_path / "export", opened(folders, "fused")
    dtypes = dict.fromkeys(stored_shapes(shapes), torch.bfloat16)
    dtypes["model.layers.0.mlp.experts.3.up_proj.weight"] = torch.float32
    with model_writer(target, shapes, dtypes, companions_of({"text": folders / "fused"})) as put:
        for name in reversed(stored_shapes(shapes)):
            put(name, modules["text"].whole(name))
    written = names_in(target)
    assert [name for name, tensor in written.items() if tensor.dtype == torch.float32] == [f"{EXPERTS}gate_up_proj"]


# ----------------------------------------------------------------------------------------------- refused keys


@pytest.mark.parametrize("key, value, message", [
    ("num_experts", 5, r"text_config\.num_experts: found 5 beside num_local_experts = 6"),
    ("num_local_experts", 0, r"text_config\.num_experts = 0, expected 'a number above 0'"),
    ("norm_topk_prob", False, r"text_config\.norm_topk_prob: found false, expected true"),
    ("num_experts_per_tok", 7, r"text_config\.num_experts_per_tok beyond num_experts = 1, expected 0"),
    ("num_experts_per_tok", 0, r"text_config\.num_experts_per_tok = 0, expected 'a number above 0'"),
    ("decoder_sparse_step", 0, r"text_config\.decoder_sparse_step = 0, expected 'a number above 0'"),
    ("decoder_sparse_step", 4, r"found no layer with experts .*, expected at least one"),
    ("mlp_only_layers", [0, 1, 2], r"found no layer with experts"),
    ("mlp_only_layers", [1, 3], r"mlp_only_layers that the model does not have = \[3\], expected \[\]"),
    ("moe_intermediate_size", 0, r"text_config\.moe_intermediate_size = 0, expected 'a number above 0'"),
    ("sliding_window", 8, r"sliding_window in use = true, expected false"),
    ("attention_bias", True, r"attention_bias: found true, expected false or null"),
    ("hidden_act", "gelu", r"found text_config\.hidden_act = 'gelu'"),
])  # fmt: skip
def test_refused(key: str, value: object, message: str, folders: Path, tmp_path: Path) -> None:
    refused(edited(folders / "fused", tmp_path, key, value), message)


@pytest.mark.parametrize("key, value, message", [
    ("norm_topk_prob", False, r"norm_topk_prob: found false, expected true"),
    ("norm_topk_prob", None, r"text_config\.norm_topk_prob = false, expected true"),
    ("num_experts", 5, r"num_experts: found 5 beside num_local_experts = 6"),
    ("num_experts_per_tok", 9, r"num_experts_per_tok beyond num_experts = 3"),
])  # fmt: skip
def test_refused_language_models(key: str, value: object, message: str, folders: Path, tmp_path: Path) -> None:
    refused(edited(folders / "alone", tmp_path, key, value), message, folders / "fused")


def test_windows_of_a_language_model_are_refused(folders: Path, tmp_path: Path) -> None:
    text = edited(folders / "alone", tmp_path / "a", "use_sliding_window", True)
    text = edited(text, tmp_path / "b", "sliding_window", 8)
    refused(text, "sliding_window in use = true, expected false", folders / "fused")


def test_aliases_with_the_same_number_are_fine(folders: Path, tmp_path: Path) -> None:
    folder = edited(folders / "fused", tmp_path, "num_experts", 6)
    assert shapes_of_folder(folder) == shapes_of_folder(folders / "fused")


def test_every_second_layer_may_have_experts(tmp_path: Path) -> None:
    write_model(tmp_path / "second", replace(CHOICE, sparse_step=2, mlp_only_layers=()))
    shapes, modules = opened(tmp_path, "second")
    assert isinstance(shapes.text, TextShape) and shapes.text.sparse == (False, True, False)
    assert all(torch.equal(modules["text"].whole(n), t) for n, t in canonical(tmp_path / "second").items())


# ----------------------------------------------------------------------------------------- names and counts


def test_frozen_experts(folders: Path) -> None:
    shapes = shapes_of_folder(folders / "fused")
    experts = {name for name in tensors_by_subset(shapes)["text"] if ".experts." in name}
    assert len(experts) == 2 * 6 * 3
    for pattern in ("model.layers.*.mlp.experts.*", "model.language_model.layers.*.mlp.experts.*"):
        assert Frozen.of(shapes, [pattern]).tensors == experts
    assert Frozen.of(shapes, [], ["*.mlp.gate.weight"]).trains("text")
    message = r"experts\.3\.gate_proj.* frozen without .* for all layers (.*)\."
    with pytest.raises(UserError, match=message) as error:
        Frozen.of(shapes, ["*.experts.3.*"])
    advised = str(error.value).rpartition("for all layers ")[2].removesuffix(".").split()
    assert Frozen.of(shapes, ["*.experts.3.*", *advised]).tensors == experts
    with pytest.raises(UserError, match=r"did you mean `model\.layers\.\*\.mlp\.experts\.\*\.gate_proj\.weight`"):
        Frozen.of(shapes, ["*.layers.*.mlp.experts.gate_up_proj"])


# As in the published configurations: layers, hidden size, heads, width of experts, total parameters.
PUBLISHED = {
    "30B-A3B": ((27, 1152, 4304, 2048), (48, 2048, 32, 6144, 768), 31_070_754_032),
    "235B-A22B": ((27, 1152, 4304, 4096), (94, 4096, 64, 12288, 1536), 235_670_022_896),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_of_published_sizes(size: str, folders: Path) -> None:
    (depth, width, ffn, out), (layers, hidden, heads, dense, expert_ffn), expected = PUBLISHED[size]
    of_folder = shapes_of_folder(folders / "fused")
    vision: Any = of_folder.encoders["vision"]
    vision = replace(
        vision, layers=depth, hidden=width, heads=16, ffn=ffn, out_hidden=out, table_side=48, deepstack=(8, 16, 24)
    )
    text = TextShape(
        layers, hidden, heads, 4, 128, dense, 151936, False, 5e6, (24, 20, 20), 1e-6,
        128, 8, expert_ffn, (True,) * layers,
    )  # fmt: skip
    assert parameter_count(ModelShapes({"vision": vision}, text)) == expected


# ------------------------------------------------------------------------------------------------------ demo


def test_the_demo_is_read(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo", "qwen3_vl_moe", CORPUS, DemoSizes(), seed=3)
    shapes, _ = opened(tmp_path, "demo")
    assert isinstance(shapes.text, TextShape) and all(shapes.text.sparse) and shapes.text.tied
    assert Processor.from_folder(tmp_path / "demo").model_type == "qwen3_vl_moe"


def test_a_fused_tensor_in_two_shards(folders: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folders / "fused", tmp_path / "fused"))
    tensors, first = load_file(copy / SINGLE), (copy / SINGLE).rename(copy / "first.safetensors").name
    save_file({f"{EXPERTS}down_proj": tensors[f"{EXPERTS}down_proj"]}, copy / "other.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, first) | {"x": "other.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(copy, r"found model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight a second time")
