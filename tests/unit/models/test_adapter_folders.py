"""PEFT folders that `peft` wrote and ours are the same ones; the model's modules take what is theirs, strictly."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.hf.peft_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX
from megatron_hetero.models.adapter_writers import adapter_tensors, adapter_writer, merging_writer
from megatron_hetero.models.adapters import Lora, adapters_text, with_adapters
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    added_shapes,
    companions_of,
    open_encoders,
    open_modules,
    stored_shapes,
    tensors_of,
)
from tests.parity.cases import MODELS
from tests.support.adapters import logits, write_adapter
from tests.support.folders import write_model
from tests.support.matrix import thinned

pytest.importorskip("peft")
FAMILIES = "untied", "qwen3", "moe", "delta", "delta-moe"
Bases = Callable[[str], Path]
WIDE = {"target_modules": "all-linear", "exclude_modules": r".*(mlp\.gate|shared_expert_gate|merger.*)"}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"]}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "all-linear": WIDE,
    "list": {"target_modules": ["q_proj", "v_proj", "down_proj", "in_proj_b", "in_proj_qkv", "in_proj_z", "in_proj_a"]},
    "regex": {"target_modules": r".*language_model\.layers\.\d+\.(self_attn\.[qv]_proj|linear_attn\.out_proj)", "r": 3},
    "patterns": {
        **WIDE,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 5, "qkv": 1},
        "alpha_pattern": {r".*blocks\.0\.attn\.proj": 3, "q_proj": 7},
        "use_rslora": True,
    },
    "layers": {"target_modules": ["o_proj", "out_proj", "up_proj"], "layers_to_transform": [1]},
    "projector": {
        "target_modules": ["qkv"],
        "modules_to_save": ["merger.mlp.0", "merger.norm", "ln_q", "merger_list.1", "merger.linear_fc2"],
    },
    "modules": {"target_modules": ["qkv"], "modules_to_save": ["lm_head", "embed_tokens", "model.norm", "mlp.gate"]},
}  # fmt: skip
OF_EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "both": {"target_modules": ["q_proj"], **EXPERTS, "rank_pattern": {"experts.down_proj": 2}},
    "first": {"target_modules": ["k_proj"], "target_parameters": ["experts.gate_up_proj"], "use_rslora": True},
    "second": {"target_modules": [], "target_parameters": ["experts.down_proj"], "alpha_pattern": {"down_proj": 9}},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["mlp.experts"]},
}
ROWS = [(family, variant) for variant in VARIANTS for family in FAMILIES]
ROWS += [(family, f"experts {variant}") for variant in OF_EXPERTS for family in ("moe", "delta-moe")]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    folder = tmp_path_factory.mktemp("bases")

    def get(model: str) -> Path:
        choice = MODELS[model]
        place = folder / model
        return place if place.exists() else write_model(place, replace(choice, vision_layers=3))

    return get


def of_folder(base: Path, adapter: Path, *modules: str, **further: Path) -> ModelShapes:
    row = ModuleConfig(lora=LoraConfig(hf_path=adapter))
    return with_adapters(ModelShapes.of(ModelFolders.read(base), further), dict.fromkeys(modules or ("text",), row))


def modules_of(adapter: Path) -> list[str]:
    keys = load_file(adapter / ADAPTER_WEIGHTS)
    return [m for m, found in (("vision", True), ("text", False)) if any((".visual." in key) is found for key in keys)]


def every_tensor(base: Path, shapes: ModelShapes, **further: Path) -> dict[str, Tensor]:
    weights = open_modules(ModelFolders.read(base), shapes, 0) | open_encoders(further, shapes, 0)
    names = {name: module for module in shapes.modules for name in tensors_of(module, shapes)}
    return {name: weights[module].whole(name).reshape(stored_shapes(shapes)[name]) for name, module in names.items()}


def write_ours(
    base: Path,
    shapes: ModelShapes,
    target: Path,
    trained: frozenset[str] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    **further: Path,
) -> Path:
    tensors = tensors or every_tensor(base, shapes, **further)
    trained = trained or frozenset(added_shapes(shapes))
    folders = {"text": base, **further}
    writer = adapter_writer(target, shapes, torch.float32, companions_of(folders), trained=trained, bases=folders)
    with writer as put:
        for name in tensors.keys() & adapter_tensors(shapes, trained):
            put(name, tensors[name])
    return target


@pytest.mark.parametrize(("family", "variant"), thinned(ROWS, 5))
def test_folders_of_peft_and_ours_are_the_same(family: str, variant: str, bases: Bases, tmp_path: Path) -> None:
    """All tensors have the same keys and bits, and `peft` computes the same with either; so does a merged model."""
    base = bases(family)
    options = {**VARIANTS, **{f"experts {name}": each for name, each in OF_EXPERTS.items()}}[variant]
    if variant == "projector" and family != "qwen3" and family != "moe":
        options = {**options, "modules_to_save": [n for n in options["modules_to_save"] if "list" not in n]}
    theirs = write_adapter(base, tmp_path / "theirs", **options)
    shapes = of_folder(base, theirs, *modules_of(theirs))
    ours = write_ours(base, shapes, tmp_path / "ours")
    want, got = (load_file(folder / ADAPTER_WEIGHTS) for folder in (theirs, ours))
    zero = {key for key in got.keys() - want.keys() if not got[key].any()}
    assert got.keys() - zero == want.keys() and all("in_proj_" in key for key in zero)
    assert all(torch.equal(got[key], values) for key, values in want.items())
    expected = logits(base, theirs)
    assert (logits(base, ours) - expected).abs().max() <= 1e-6 * expected.abs().max()
    again = of_folder(base, ours, *modules_of(theirs))
    for module in modules_of(theirs):
        of_theirs, of_ours = (each[module].added for each in (shapes, again))
        assert isinstance(of_theirs, Lora) and isinstance(of_ours, Lora)
        assert of_ours.adapters == of_theirs.adapters and of_ours.replaces == of_theirs.replaces
    tensors = every_tensor(base, shapes)
    with merging_writer(tmp_path / "merged", shapes, torch.float32, companions_of({"text": base})) as put:
        for name in reversed(tensors):
            put(name, tensors[name])
    merged = logits(tmp_path / "merged")
    assert (merged - expected).abs().max() <= 5e-5 * expected.abs().max()
    assert (logits(base) - expected).abs().max() > 1e-2 * expected.abs().max()


RENAMED = {
    "a language model alone": ("model.language_model.", "model."),
    "one without a head": ("model.language_model.", ""),
    "flat modules": ("model.language_model.", "model.", "model.visual.", "visual."),
    "no prefix": (PREFIX, ""),
    "a whole model without a head": ("model.language_model.", "language_model.", "model.visual.", "visual."),
}


@pytest.mark.parametrize("names", RENAMED)
def test_keys_of_other_models_and_versions(names: str, bases: Bases, tmp_path: Path) -> None:
    base, visual = bases("untied"), "visual" in " ".join(RENAMED[names])
    options = {"target_modules": ["q_proj", "qkv"] if visual else ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}}
    theirs = write_adapter(base, tmp_path / "theirs", **options)
    want = every_tensor(base, of_folder(base, theirs, *modules_of(theirs)))
    change(theirs, lambda tensors: {renamed(key, *RENAMED[names]): each for key, each in tensors.items()})
    got = every_tensor(base, of_folder(base, theirs, *(("vision", "text") if visual else ("text",))))
    assert got.keys() == want.keys() and all(torch.equal(got[name], each) for name, each in want.items())


def renamed(key: str, *pairs: str) -> str:
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        key = key.replace(old, new)
    return key


def change(folder: Path, edit: Callable[[dict[str, Tensor]], Mapping[str, Tensor] | None]) -> Path:
    """Change tensors of a PEFT folder."""
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    tensors = edit(tensors) or tensors
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / ADAPTER_WEIGHTS)
    return folder


def configure(folder: Path, **values: Any) -> Path:
    """Change the configuration of a PEFT folder."""
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def refused(base: Path, adapter: Path, message: str, *modules: str) -> None:
    with pytest.raises(UserError, match=message):
        every_tensor(base, of_folder(base, adapter, *modules))


@pytest.fixture
def adapter(bases: Bases, tmp_path: Path) -> Path:
    """An adapter of queries."""
    return write_adapter(bases("untied"), tmp_path / "adapter", target_modules=["q_proj"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type: found 'IA3', expected 'LORA'"),
        ({"peft_type": None}, r"peft_type: found null, expected 'LORA'"),
        ({"use_dora": True}, "use_dora: found true, expected null or false"),
        ({"bias": "lora_only"}, "bias: found 'lora_only'"),
        ({"lora_bias": True}, "lora_bias: found true"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: found true"),
        ({"use_qalora": True}, "use_qalora: .* quantised base"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config: .* quantised base"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: .*other weights .*path_initial_model"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: found"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: found"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens: found"),
        ({"base_model_name_or_path": "unsloth/Qwen2.5-VL-7B-Instruct-bnb-4bit"}, "found the quantised model"),
        ({"base_model_name_or_path": "/models/Qwen2.5-VL-7B-Instruct-AWQ/"}, "found the quantised model"),
        ({"r": 5}, r"q_proj: found rank 5 in adapter_config\.json beside matrices of rank 4"),
        ({"r": 5, "rank_pattern": {"q_proj": 2}}, "found rank 2 in"),
        ({"r": "4"}, r"Expected `int`, got `str` - at `\$\.r`"),
        ({"lora_alpha": None}, r"got `null` - at `\$\.lora_alpha`"),
        ({"lora_alpha": 10**400}, r"out of range - at `\$\.lora_alpha`"),
        ({"lora_alpha": 1e308}, r"Expected `float` <= .* - at `\$\.lora_alpha`"),
        ({"lora_alpha": float("nan")}, r"Expected `float` > 0\.0 - at `\$\.lora_alpha`"),
        ({"lora_alpha": 0}, r"Expected `float` > 0\.0 - at `\$\.lora_alpha`"),
        ({"lora_alpha": -8}, r"Expected `float` > 0\.0 - at `\$\.lora_alpha`"),
        ({"alpha_pattern": {"q_proj": 0.0}}, r"Expected `float` > 0\.0 - at `\$\.alpha_pattern"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern: found '\\(' .*, expected a regular expression"),
        ({"rank_pattern": {"q" * 300: 4}}, "rank_pattern: found .* \\(more than 256 characters"),
        ({"rank_pattern": {f"q{n}": 4 for n in range(5000)}}, "rank_pattern: found 5000 patterns, expected at most"),
        ({"use_rslora": "no"}, r"got `str` - at `\$\.use_rslora`"),
    ],
)  # fmt: skip
def test_configurations(bases: Bases, adapter: Path, values: dict[str, Any], message: str) -> None:
    refused(bases("untied"), configure(adapter, **values), message)


@pytest.mark.parametrize(
    "values",
    [
        {"rank_pattern": {"bias": 4, "q_proj": 4}, "alpha_pattern": {"use_dora": 3}},
    ],
)
def test_configurations_that_are_taken(bases: Bases, adapter: Path, values: dict[str, Any]) -> None:
    added = of_folder(bases("untied"), configure(adapter, **values)).text.added
    assert isinstance(added, Lora) and {(each.r, each.scale) for each in added.adapters} == {(4, 1.5)}


def test_the_base_that_an_adapter_names_is_not_opened(bases: Bases, adapter: Path, tmp_path: Path) -> None:
    base, other = bases("untied"), tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{")
    (other / "model.safetensors").write_bytes(b"\xff")
    with contextlib.chdir(tmp_path):
        for named in ("other", str(other)):
            assert every_tensor(base, of_folder(base, configure(adapter, base_model_name_or_path=named)))


KEY = f"{PREFIX}model.language_model.layers.0.self_attn.q_proj"
NESTED = f"{PREFIX}model.language_model"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{KEY}.lora_B.weight"), r"found no model\..*q_proj\.lora_B\.weight, expected A"),
        (lambda t: t.pop(f"{KEY}.lora_A.weight"), r"found no model\..*q_proj\.lora_A\.weight, expected A"),
        (lambda t: t[f"{KEY}.lora_A.weight"].fill_(torch.nan), "lora_A.weight: found values that are NaN or infinite"),
        (lambda t: t.update({f"{KEY}.lora_A.weight": torch.ones(3, 48)}), r"expected \[r, in\] and \[out, r\]"),
        (lambda t: t.update({f"{KEY}.lora_A.weight": torch.ones(4, 40)}),
         r"found an adapter .*\[48, 40\], expected .*\[48, 48\].*in text"),
        (lambda t: t.update({f"{KEY}.lora_A.weight": t[f"{KEY}.lora_A.weight"].double()}), "of type F64, expected F32"),
        (lambda t: t.update({f"{KEY}.lora_B.bias": torch.ones(48)}), "found a bias of an adapter"),
        (lambda t: t.update({f"{KEY}.lora_magnitude_vector": torch.ones(48)}), "found magnitudes of DoRA"),
        (lambda t: t.update({f"{NESTED}.embed_tokens.lora_embedding_A": torch.ones(4, 4)}), "of an embedding"),
        (lambda t: {k.replace(".lora_A.", ".lora_A.default."): v for k, v in t.items()}, "found the tensor .*default"),
        (lambda t: t.update({k.replace(".language_model.", "."): v.clone() for k, v in t.items()}), "a second adapter"),
        (lambda t: t.update({k.removeprefix(PREFIX): v.clone() for k, v in t.items()}), "found .* a second time"),
        (lambda t: {k.replace("layers.1.", "layers.9."): v for k, v in t.items()},
         r"layers\.9\.self_attn\.q_proj: found an adapter "),
        (lambda t: t.update({f"{NESTED}.layers.0.self_attn.q_proj.basis": torch.ones(2)}), "that the model does"),
        (lambda t: t.update({f"{PREFIX}lm_head.lora_{kind}.weight": torch.ones(4, 4) for kind in "AB"}), "of the head"),
        (lambda t: t.update({f"{NESTED}.embed_tokens.lora_{kind}.weight": torch.ones(4, 4) for kind in "AB"}),
         "an adapter of an embedding"),
        (lambda t: t.update({"x" * 2000: torch.ones(1)}), "found the name 'x.*x' of 2000 characters, expected at most"),
        (lambda t: t.update({f"{NESTED}.norm.weight": torch.ones(7)}), r"norm\.weight: found \[7\], expected \[48\]"),
        (lambda t: t.update({f"{PREFIX}model.visual.blocks.0.attn.qkv.lora_{kind}.weight": torch.ones(4, 4)
                             for kind in "AB"}),
         r"vision takes.*modules\.vision\.lora\.hf_path \(--vision-lora\.hf_path\)"),
        (lambda t: t.update({f"{PREFIX}model.visual.merger.mlp.0.bias": torch.ones(4)}), "vision takes"),
    ],
)  # fmt: skip
def test_tensors(bases: Bases, adapter: Path, edit: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    def edited(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = edit(tensors)
        return found if isinstance(found, dict) else tensors

    refused(bases("untied"), change(adapter, edited), message)


def test_files(bases: Bases, adapter: Path, tmp_path: Path) -> None:
    base = bases("untied")
    refused(base, tmp_path / "nothing", r"modules\.text\.lora\.hf_path: found no .*nothing")
    refused(base, adapter, "has nothing of vision", "vision", "text")
    weights = adapter / ADAPTER_WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    refused(base, adapter, "truncated or not safetensors")
    weights.unlink()
    refused(base, adapter, r"found adapter_config\.json alone, expected adapter_model\.safetensors")
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    refused(base, adapter, r"found adapter_model\.bin, expected .*pickles.*safe_serialization")
    (tmp_path / "elsewhere").write_bytes(content)
    weights.symlink_to(tmp_path / "elsewhere")
    refused(base, adapter, "found a link to")
    weights.unlink()
    weights.write_bytes(content)
    (adapter / ADAPTER_CONFIG).unlink()
    refused(base, adapter, r"found no .*adapter_config\.json")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("mlp.experts.3.gate_proj", "an adapter of a single expert"),
        ("mlp.gate", "an adapter of a router"),
        ("mlp.shared_expert_gate", "the gate of a shared expert"),
        ("linear_attn.conv1d", "a convolution"),
    ],
)
def test_layers_of_experts_and_delta_nets(bases: Bases, adapter: Path, layer: str, message: str) -> None:
    path = f"{NESTED}.layers.0.{layer}"
    edit = {f"{path}.lora_A.weight": torch.ones(4, 48), f"{path}.lora_B.weight": torch.ones(6, 4)}
    refused(bases("delta-moe"), change(adapter, lambda _: edit), message)


def test_an_adapter_of_a_patch_embedding(bases: Bases, tmp_path: Path) -> None:
    base = bases("untied")
    theirs = write_adapter(base, tmp_path / "theirs", target_modules=["patch_embed.proj"])
    refused(base, theirs, "adapters of convolutions", "vision")


def test_patterns_of_which_several_match(bases: Bases, tmp_path: Path) -> None:
    """PEFT sorts them as it writes them, and takes the first that matches: it does not load this folder again."""
    options = {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2, r"layers\.1\..*": 5}}
    theirs = write_adapter(bases("untied"), tmp_path / "theirs", **options)
    added = of_folder(bases("untied"), theirs).text.added
    assert isinstance(added, Lora) and [(each.r, each.scale) for each in added.adapters] == [(2, 3.0), (2, 3.0)]


def test_modules_to_save_of_a_tied_model(bases: Bases, tmp_path: Path) -> None:
    base = bases("tied")
    for name in ("lm_head", "embed_tokens"):
        options = {"target_modules": ["q_proj"], "modules_to_save": [name]}
        refused(base, write_adapter(base, tmp_path / name, **options), "config.json ties them .* PEFT unties")


def test_what_peft_saves_whole_replaces_the_base(bases: Bases, tmp_path: Path) -> None:
    """It trains if `model.train` names it, or its part trains."""
    base, name = bases("untied"), "visual.merger.mlp.0.weight"
    theirs = write_adapter(base, tmp_path / "theirs", target_modules=["q_proj"], modules_to_save=["merger.mlp.0"])
    shapes = of_folder(base, theirs, "vision", "text")
    found, stored = every_tensor(base, shapes)[name], load_file(theirs / ADAPTER_WEIGHTS)
    assert torch.equal(found, stored[f"{PREFIX}model.{name}"])
    assert name not in Frozen.of(shapes).tensors
    assert name in Frozen.of(shapes, freeze=["projector"]).tensors
    trained = frozenset(stored_shapes(shapes)) - Frozen.of(shapes, freeze=["projector", "vision"]).tensors
    ours = write_ours(base, shapes, tmp_path / "ours", trained)
    assert load_file(ours / ADAPTER_WEIGHTS).keys() == stored.keys()


@pytest.mark.parametrize("module", ["text", "vision"])
def test_an_export_of_one_module_with_the_projector_is_a_start(module: str, bases: Bases, tmp_path: Path) -> None:
    """As runs with default settings write it: adapters, and the projector, which trains."""
    base = bases("untied")
    row = ModuleConfig(lora=LoraConfig(r=2, targets=("q_proj",) if module == "text" else ("qkv",)))
    before = with_adapters(ModelShapes.of(ModelFolders.read(base)), {module: row})
    other = {"text": "vision", "vision": "text"}[module]
    trained = frozenset(stored_shapes(before)) - Frozen.of(before, freeze=[other]).tensors
    assert any("merger" in name for name in trained) and not any("blocks" in n for n in trained if "lora" not in n)
    want = {name: each + 0.5 if name in trained else each for name, each in every_tensor(base, before).items()}
    out = write_ours(base, before, tmp_path / "out", trained, want)
    if module == "text":
        advised = r"modules\.vision\.lora\.hf_path \(--vision-lora\.hf_path\)"
        with pytest.raises(UserError, match=advised):
            of_folder(base, out, "text")
    modules = ["vision", "text"] if module == "text" else ["vision"]
    shapes = of_folder(base, out, *modules)
    got = every_tensor(base, shapes)
    assert got.keys() == want.keys() and all(torch.equal(got[name], each) for name, each in want.items())
    after = Frozen.of(shapes, freeze=[] if module == "text" else ["text"])
    assert frozenset(stored_shapes(shapes)) - after.tensors == trained, "the encoder does not train unasked"
    lines = list(adapters_text(shapes))
    assert len(lines) == len(modules)
    assert (lines[0] == f"Adapters of vision: none; {out} has other values for 5 of its tensors.") is (module == "text")
    again = write_ours(base, shapes, tmp_path / "again", trained, got)
    assert load_file(again / ADAPTER_WEIGHTS).keys() == load_file(out / ADAPTER_WEIGHTS).keys()


@pytest.mark.parametrize("setting", [{"dropout": 0.1}, {"lr_ratio": 2.0}])
def test_settings_of_adapters_that_a_folder_lacks(setting: dict[str, float], bases: Bases, tmp_path: Path) -> None:
    base = bases("untied")
    theirs = write_adapter(base, tmp_path / "theirs", target_modules=["q_proj"], modules_to_save=["merger.mlp.0"])
    shapes, both = ModelShapes.of(ModelFolders.read(base)), LoraConfig(hf_path=theirs)
    rows = {"vision": ModuleConfig(lora=both), "text": ModuleConfig(lora=replace(both, **setting))}
    assert with_adapters(shapes, rows).text.added
    [name] = setting
    rows = {"vision": rows["text"], "text": rows["vision"]}
    with pytest.raises(UserError, match=rf"modules\.vision\.lora\.{name} .*theirs .* vision"):
        with_adapters(shapes, rows)


@pytest.mark.parametrize("family", ["untied", "qwen3", "moe", "delta"])
def test_a_whole_encoder_beside_adapters(family: str, bases: Bases, tmp_path: Path) -> None:
    """Modules of all kinds are saved whole, and `peft` finds them."""
    base = bases(family)
    row = ModuleConfig(lora=LoraConfig(r=2))
    shapes = with_adapters(ModelShapes.of(ModelFolders.read(base)), {"text": row})
    tensors = {
        name: 1.1 * each if name.startswith("visual") else each for name, each in every_tensor(base, shapes).items()
    }
    trained = frozenset(name for name in tensors if name.startswith("visual") or ".lora_" in name)
    ours = write_ours(base, shapes, tmp_path / "ours", trained, tensors)
    with merging_writer(tmp_path / "merged", shapes, torch.float32, companions_of({"text": base})) as put:
        for name, each in tensors.items():
            put(name, each)
    expected = logits(tmp_path / "merged")
    assert (logits(base, ours) - expected).abs().max() <= 5e-5 * expected.abs().max()
    assert (logits(base) - expected).abs().max() > 1e-2 * expected.abs().max()


def test_an_adapter_beside_the_weights_of_the_model(bases: Bases, adapter: Path, tmp_path: Path) -> None:
    base = bases("untied")
    both = tmp_path / "both"
    both.mkdir()
    for folder in (base, adapter):
        for file in folder.iterdir():
            (both / file.name).write_bytes(file.read_bytes())
    plain = ModelShapes.of(ModelFolders.read(both))
    with pytest.raises(UserError, match=r"an adapter .* beside .*hf_path, merge it \(python -m megatron_hetero"):
        open_modules(ModelFolders.read(both), plain, 0)
    want, got = every_tensor(base, of_folder(base, adapter)), every_tensor(both, of_folder(both, both))
    assert all(torch.equal(got[name], each) for name, each in want.items())


def test_layers_that_are_adapted_together(bases: Bases, tmp_path: Path) -> None:
    """An export has adapters of zero beside those of some inputs of a delta net, which loading leaves out."""
    base = bases("delta")
    row = ModuleConfig(lora=LoraConfig(r=2, targets=("*.0.linear_attn.in_proj_qkv",)))
    shapes = with_adapters(ModelShapes.of(ModelFolders.read(base)), {"text": row})
    ours = write_ours(base, shapes, tmp_path / "ours")
    kinds = {key.split(".")[-3] for key in load_file(ours / ADAPTER_WEIGHTS)}
    assert kinds == {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    assert len(json.loads((ours / ADAPTER_CONFIG).read_text())["target_modules"]) == 4
    added = of_folder(base, ours).text.added
    assert isinstance(added, Lora) and [each.name for each in added.adapters] == [
        "model.layers.0.linear_attn.in_proj_qkv"
    ]
    assert torch.equal(logits(base, ours), logits(base))


def test_a_further_encoder_has_a_folder_of_its_own(bases: Bases, tmp_path: Path) -> None:
    base, detail = bases("untied"), bases("untied")
    row = ModuleConfig(lora=LoraConfig(r=2, targets=("qkv",)))
    plain = ModelShapes.of(ModelFolders.read(base), {"detail": detail})
    shapes = with_adapters(plain, {"detail": row, "text": ModuleConfig(lora=LoraConfig(r=3))})
    ours = write_ours(base, shapes, tmp_path / "ours", detail=detail)
    assert all(".language_model." in key for key in load_file(ours / ADAPTER_WEIGHTS))
    own = ours / "encoders" / "detail"
    assert all(".visual.blocks." in key for key in load_file(own / ADAPTER_WEIGHTS))
    rows = {"detail": ModuleConfig(lora=LoraConfig(hf_path=own)), "text": ModuleConfig(lora=LoraConfig(hf_path=ours))}
    again = with_adapters(plain, rows)
    want, got = (every_tensor(base, each, detail=detail) for each in (shapes, again))
    assert got.keys() == want.keys() and all(torch.equal(got[name], each) for name, each in want.items())
    alone = with_adapters(plain, {"detail": row})
    ours = write_ours(base, alone, tmp_path / "alone", detail=detail)
    assert not (ours / ADAPTER_CONFIG).exists() and (ours / "encoders" / "detail" / ADAPTER_CONFIG).exists()


@pytest.mark.parametrize(
    ("family", "trained", "message"),
    [
        ("tied", ["model.embed_tokens.weight"], "PEFT .*--export.merge true"),
        ("untied", ["model.layers.0.self_attn.q_proj.weight"], "a module in full, or adapters"),
        ("untied", ["model.layers.0.self_attn.q_proj.bias"], "a module in full, or adapters"),
        ("delta", ["model.layers.0.linear_attn.A_log"], "all modules inside it"),
    ],
)
def test_what_peft_cannot_have(bases: Bases, tmp_path: Path, family: str, trained: list[str], message: str) -> None:
    base = bases(family)
    row = ModuleConfig(lora=LoraConfig(r=2, targets=("q_proj",)))
    shapes = with_adapters(ModelShapes.of(ModelFolders.read(base)), {"text": row})
    with pytest.raises(UserError, match=message):
        write_ours(base, shapes, tmp_path / "ours", frozenset(added_shapes(shapes)) | set(trained))
    assert not list(tmp_path.iterdir())


def test_a_folder_appears_when_it_is_complete(bases: Bases, adapter: Path, tmp_path: Path) -> None:
    base = bases("untied")
    shapes = of_folder(base, adapter)
    trained, files = frozenset(added_shapes(shapes)), companions_of({"text": base})
    target = tmp_path / "ours"

    def write_half() -> None:
        with adapter_writer(target, shapes, torch.float32, files, trained=trained, bases={"text": base}) as put:
            put(next(iter(trained)), torch.ones(4, 48))
            assert not target.exists()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    write_ours(base, shapes, target)
    assert not (target / "config.json").exists() and (target / "tokenizer.json").exists()
    write_ours(base, shapes, target)  # replaces its earlier export
