"""Settings of adapters: flags and YAML, which layers they choose, what they refuse, and rates of learning."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.lora import LoraConfig, LoraPattern
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.schema import Config, load_config, to_yaml
from megatron_hetero.hf.weight_map import Share
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.adapters import Adapter, Lora, adapters_text, with_adapters
from megatron_hetero.models.shapes import ModelShapes
from tests.support.shapes import shapes_of_folder

MODELS = Path(__file__).parents[3] / "examples/models"
SEVEN = shapes_of_folder(MODELS / "qwen2_5_vl_7b")
EIGHT = shapes_of_folder(MODELS / "qwen3_vl_8b")
EXPERTS = shapes_of_folder(MODELS / "qwen3_vl_30b_a3b")
LINEAR = shapes_of_folder(MODELS / "qwen3_5_27b")
Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load(flags)`: the configuration of a command line, for a model of 7B."""
    common = f"--model.hf_path {MODELS}/qwen2_5_vl_7b --data.registry.d.annotations {tmp_path}/d.json --data.datasets d"
    return lambda flags: load_config([*common.split(), *flags.split()])


def lora_of(shapes: ModelShapes, module: str, lora: LoraConfig) -> Lora:
    found = with_adapters(shapes, {module: ModuleConfig(lora=lora)})[module].added
    assert isinstance(found, Lora)
    return found


def names(shapes: ModelShapes, module: str, *targets: str) -> set[str]:
    found = lora_of(shapes, module, LoraConfig(r=2, targets=targets)).adapters
    return {re.sub(r"\.\d+\.", ".N.", adapter.name) for adapter in found}


# ------------------------------------------------------------------------------------------------- flags and YAML


def test_flags_and_files_say_the_same(load: Load, tmp_path: Path) -> None:
    config = load(
        "--text-lora.r 16 --text-lora.alpha 32 --text-lora.targets q_proj *.mlp.* --text-lora.patterns.v_proj.r 4 "
        "--text-lora.patterns.*.layers.[0-3].*.alpha 8 --text-lora.lr_ratio 16 --vision-lora.r 8 "
        "--vision-lora.rslora true --vision-lora.dropout 0.05"
    )
    assert config.module("text").lora == LoraConfig(
        r=16,
        alpha=32,
        targets=("q_proj", "*.mlp.*"),
        patterns={"v_proj": LoraPattern(r=4), "*.layers.[0-3].*": LoraPattern(alpha=8)},
        lr_ratio=16,
    )
    assert config.module("vision").lora == LoraConfig(r=8, rslora=True, dropout=0.05)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config(["--config", str(file)]) == config
    by_hand = "modules: {text: {lora: {r: 16, alpha: 32, targets: [q_proj, '*.mlp.*'], lr_ratio: 16, patterns: "
    file.write_text(by_hand + "{v_proj: {r: 4}, '*.layers.[0-3].*': {alpha: 8}}}}}")
    assert load(f"--config {file}").module("text") == config.module("text")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--text-lora.r -1", "modules.text.lora.r (--text-lora.r): found -1, expected ≥ 0"),
        ("--text-lora.r 1.5", "found `1.5`, expected an integer"),
        ("--text-lora.r 4 --text-lora.dropout 1", "(--text-lora.dropout): found 1.0, expected ≥ 0 and ≤ 0.99"),
        ("--text-lora.r 4 --text-lora.alpha 0", "found 0.0, expected > 0"),
        ("--text-lora.r 4 --text-lora.lr_ratio 0", "found 0.0, expected > 0"),
        ("--text-lora.r 4 --text-lora.patterns.q_proj.r 0", "found 0, expected ≥ 1"),
        ("--text-lora.alpha 4", "because there are no adapters, as modules.text.lora.r is 0. Set modules.text"),
        ("--text-lora.targets q_proj", "as modules.text.lora.r is 0"),
        ("--text-lora.r 4 --text-lora.patterns.q_proj.r none",
         "modules.text.lora.patterns.q_proj (--text-lora.patterns.q_proj): found neither r nor alpha, expected one of"),
        ("--text-lora.r 4 --text-lora.hf_path f", "the folder modules.text.lora.hf_path sets it. Remove one"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(flags: str, message: str, load: Load) -> None:
    with pytest.raises(UserError) as error:
        load(flags)
    assert message in str(error.value)


# --------------------------------------------------------------------------------------------------------- layers


def test_targets_are_names_as_in_peft_or_patterns() -> None:
    attention = {f"model.layers.N.self_attn.{name}_proj" for name in "qkvo"}
    mlp = {f"model.layers.N.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert names(SEVEN, "text") == attention | mlp
    assert names(SEVEN, "text", "q_proj") == {"model.layers.N.self_attn.q_proj"}
    assert names(SEVEN, "text", "self_attn.q_proj", "mlp.up_proj") == {*sorted(attention)[2:3], sorted(mlp)[2]}
    assert names(SEVEN, "text", "*.mlp.*") == names(SEVEN, "text", "model.language_model.layers.*.mlp.*") == mlp
    assert names(SEVEN, "vision", "attn.qkv", "merger.mlp.0") == {"blocks.N.attn.qkv", "merger.mlp.0"}
    assert names(SEVEN, "vision", "visual.blocks.3.attn.*") == {"blocks.N.attn.qkv", "blocks.N.attn.proj"}
    assert not any("merger" in name or "embed" in name for name in names(EIGHT, "vision"))
    assert "model.layers.N.linear_attn.in_proj_qkv" in names(LINEAR, "text")
    assert (
        lora_of(SEVEN, "text", LoraConfig(r=2, targets=("*.layers.1.mlp.*",)))
        .adapters[0]
        .name.startswith("model.layers.1.")
    )


def test_patterns_change_rank_and_scale() -> None:
    patterns = {"v_proj": LoraPattern(r=4, alpha=2), "*.layers.0.*": LoraPattern(alpha=64)}
    lora = lora_of(SEVEN, "text", LoraConfig(r=16, alpha=32, rslora=True, patterns=patterns))
    found = {adapter.name: (adapter.r, adapter.scale) for adapter in lora.adapters}
    assert found["model.layers.0.self_attn.v_proj"] == (4, 1) and found["model.layers.5.mlp.up_proj"] == (16, 8)
    assert found["model.layers.0.mlp.up_proj"] == (16, 16)


def test_a_target_of_the_other_tower_is_told_where_to_go() -> None:
    with pytest.raises(UserError) as error:
        names(SEVEN, "text", "attn.qkv")
    said = str(error.value)
    assert "modules.text.lora.targets" in said and "to modules.vision.lora" in said
    assert names(SEVEN, "vision", "attn.qkv") == {"blocks.N.attn.qkv"}, "the advice is accepted"
    with pytest.raises(UserError, match=r"to modules\.text\.lora"):
        names(EIGHT, "vision", "o_proj")


@pytest.mark.parametrize(
    "target, parts",
    [
        ("q_porj", ["`q_porj` (did you mean `q_proj`?)", "none of text", "model.layers.*.mlp.up_proj"]),
        ("*.layers.99.*", ["`*.layers.99.*`", "Correct or remove it"]),
        ("lm_head", ["lm_head is no linear layer"]),
    ],
)
def test_a_target_of_no_layer(target: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        names(SEVEN, "text", target)
    assert all(part in str(error.value) for part in parts), error.value


def test_a_pattern_of_layers_without_adapters_is_refused() -> None:
    with pytest.raises(UserError, match=r"modules\.text\.lora\.patterns.*`k_proj`.*matches none of text"):
        lora_of(SEVEN, "text", LoraConfig(r=2, targets=("q_proj",), patterns={"k_proj": LoraPattern(r=1)}))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["*_proj", "v_proj"], r"found `v_proj`, .*because `\*_proj` .*\. Put it before `\*_proj`"),
        (["*.layers.0.*", "*.layers.1.*", "*.layers.[01].*.q_proj"], r"Put it before `\*\.layers\.0\.\*`"),
        (["v_proj", "self_attn.v_proj"], r"found `self_attn\.v_proj`, .*because `v_proj` .*\. Remove one of them"),
    ],
)
def test_a_pattern_that_decides_for_no_layer(patterns: list[str], message: str) -> None:
    def taken(order: list[str]) -> tuple[Adapter, ...]:
        each = {name: LoraPattern(r=number + 1) for number, name in enumerate(order)}
        return lora_of(SEVEN, "text", LoraConfig(r=8, patterns=each)).adapters

    with pytest.raises(UserError, match=message):
        taken(patterns)
    accepted = [patterns[-1], *patterns[:-1]] if "Put" in message else patterns[:1]
    assert len(taken(accepted)) == 196


def test_dropout_that_no_adapter_has() -> None:
    experts = LoraConfig(r=2, dropout=0.1, targets=("experts.down_proj",))
    with pytest.raises(UserError, match=r"modules\.text\.lora\.dropout.*found 0\.1, .*experts"):
        lora_of(EXPERTS, "text", experts)
    assert lora_of(EXPERTS, "text", replace(experts, targets=("experts.down_proj", "q_proj"))).dropout == 0.1


def test_a_rank_above_a_dim_and_its_remedy(load: Load) -> None:
    with pytest.raises(UserError, match=r"found 64, expected ≤ 48, .*in_proj_b is \[48, 5120\]") as error:
        lora_of(LINEAR, "text", LoraConfig(r=64))
    advised = re.search(r"patterns\.(\w+)\.r to (\d+)", str(error.value))
    assert advised
    patterns = {advised[1]: LoraPattern(r=int(advised[2])), "in_proj_a": LoraPattern(r=48)}
    assert len(lora_of(LINEAR, "text", LoraConfig(r=64, patterns=patterns)).adapters) > 100


# ---------------------------------------------------------------------------------------------- what trains, rates


def job_of(load: Load, flags: str) -> JobSpec:
    return JobSpec.of(load(f"--vision-parallel dp:1 --text-parallel dp:1 {flags}"), 1)


def test_adapters_train_beside_a_frozen_base_and_a_projector(load: Load) -> None:
    text = job_of(load, "--text-lora.r 4").modules["text"]
    architecture = text.shape.architecture
    assert text.frozen == architecture.in_folder.keys() and text.trains and text.layers_train
    vision = job_of(load, "--vision-lora.r 4").modules["vision"]
    own = vision.shape.architecture
    assert vision.frozen == own.in_folder.keys() - own.projector.keys() and vision.passes_gradients
    for targets, frozen in (("attn.qkv", own.in_folder.keys() - own.projector.keys()), ("merger.mlp.0", own.in_folder)):
        of_targets = job_of(load, f"--vision-lora.r 4 --vision-lora.targets {targets}").modules["vision"]
        assert of_targets.frozen == frozen | {}.keys(), targets
    named = job_of(load, "--text-lora.r 4 --model.freeze text vision").frozen
    assert named.subsets == {"vision"} and named.shares == {"vision": 0, "projector": 1, "text": 0}
    of_few = job_of(load, "--text-lora.r 4 --model.train *norm* projector").modules["text"]
    assert architecture.in_folder.keys() - of_few.frozen == {name for name in architecture.in_folder if "norm" in name}


@pytest.mark.parametrize("setting", ["freeze", "train"])
@pytest.mark.parametrize("pattern", ["*lora_A*", "*lora_B*", "model.layers.*.q_proj.lora_B.weight", "*.lora_*"])
def test_a_pattern_of_adapters_alone(setting: str, pattern: str, load: Load) -> None:
    said = f"model.{setting} (--model.{setting}): found `{pattern}`, "
    with pytest.raises(UserError, match=re.escape(said)) as error:
        job_of(load, f"--text-lora.r 4 --model.{setting} {pattern}")
    assert "adapters always train" in str(error.value)
    with pytest.raises(UserError, match="matches none ") as error:
        job_of(load, f"--text-lora.r 4 --model.{setting} *nothing*")
    assert "lora_" not in str(error.value)


def test_rates(load: Load) -> None:
    job = job_of(
        load,
        "--optimizer.lr 1e-4 --optimizer.lr_projector 1e-5 --text-lr 2e-4 --text-lora.r 4 --text-lora.lr_ratio 16 "
        "--vision-lora.r 4 --vision-lora.targets attn.qkv merger.mlp.0 --vision-lora.lr_ratio 2",
    )
    rates = {name: {} for name in job.modules}
    for name, module in job.modules.items():
        for parameter in module.shape.architecture.weight_map("", Share(0, 1), module.stages[0]):
            rates[name][parameter] = module.peak_lr(job.config.optimizer, parameter)
    text, vision = rates["text"], rates["vision"]
    assert text["layers.3.mlp.linear_fc1.lora.A"] == 2e-4
    assert text["layers.3.mlp.linear_fc1.lora.B"] == 32e-4
    assert vision["layers.0.self_attention.linear_qkv.lora.A"] == 1e-4
    assert vision["layers.0.self_attention.linear_qkv.lora.B"] == 2e-4
    in_projector = job.modules["vision"].shape.architecture.in_projector
    assert {rate for name, rate in vision.items() if in_projector(name)} == {1e-5, 2e-5}


def test_what_is_printed(load: Load) -> None:
    job = job_of(load, "--text-lora.r 16 --text-lora.patterns.v_proj.r 4 --vision-lora.r 8 --vision-lora.targets qkv")
    assert list(adapters_text(job.shapes)) == [
        "Adapters of vision: r 8 beside 32 linear layers, 0.19% of its parameters.",
        "Adapters of text: r 4 to 16 beside 196 linear layers, 0.51% of its parameters.",
    ]
    assert list(adapters_text(SEVEN)) == []
