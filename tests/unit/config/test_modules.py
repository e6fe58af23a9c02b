"""The record of a module: its flags and YAML, and what each field refuses."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.modules import NO_MODULES, ModuleConfig
from megatron_hetero.config.optimizers import OffloadConfig, PrecisionConfig
from megatron_hetero.config.schema import Config, flat_settings, load_config, to_yaml

MINIMAL = "--model.hf_path m --data.registry.d.annotations d.json --data.datasets d"


def loaded(flags: str, *more: str) -> Config:
    return load_config([*MINIMAL.split(), *flags.split(), *more])


def from_yaml(folder: Path, modules: str) -> Config:
    file = folder / "config.yaml"
    file.write_text(f"modules:\n{modules}\n")
    return loaded(f"--config {file}")


@pytest.mark.parametrize("spelling", ["--{}-", "--modules.{}."])
def test_a_flag_is_a_module_and_a_field(spelling: str) -> None:
    text, detail, second = (spelling.format(name) for name in ("text", "detail", "aerial_2"))
    config = loaded(
        f"{text}parallel tp:4,dp:2 {text}layers 10 18 {text}zero 3 {text}precision.master split {text}lr 2e-6 "
        f"{text}offload.states true {text}sequence_parallel false {detail}hf_path /d {detail}token <|d|> "
        f"{second}hf_path /s {second}token <|s|> {second}max_pixels 9"
    )
    assert config.module("text") == ModuleConfig(
        parallel="tp:4,dp:2",
        layers=(10, 18),
        zero=3,
        precision=PrecisionConfig(master="split"),
        offload=OffloadConfig(states=True),
        lr=2e-6,
        sequence_parallel=False,
    )
    assert config.module("vision") == ModuleConfig() and "vision" not in config.modules
    assert list(config.further) == ["detail", "aerial_2"] and config.module("aerial_2").max_pixels == 9
    assert config.further_folders == {"detail": Path("/d"), "aerial_2": Path("/s")}


def test_a_file_has_a_mapping_of_modules_and_is_read_back(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, '  vision: {parallel: sp:8, recompute: full}\n  text: {parallel: "tp:2,dp:4"}\n  x:')
    assert config.module("vision") == ModuleConfig(parallel="sp:8", recompute="full")
    assert config.module("text").parallel == "tp:2,dp:4" and config.modules["x"] == ModuleConfig()
    assert loaded("--vision-recompute 2 --vision-parallel sp:8").module("vision").recompute == 2
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(["--config", str(tmp_path / "again.yaml")]) == config
    flat = {name: value for name, value in flat_settings(config).items() if name.startswith("modules.")}
    assert flat == {
        "modules.vision.parallel": "sp:8",
        "modules.vision.recompute": "full",
        "modules.text.parallel": "tp:2,dp:4",
    }


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--text-zero 3 --modules.text.zero 2", ["modules.text.zero given twice"]),
        ("--modules.text.zero 3 --text-zero 3", ["modules.text.zero given twice"]),
        ("--text-sequence-parallel true", ["did you mean `--text-sequence_parallel`"]),
        ("--vision-parralel sp:2", ["did you mean `--vision-parallel`"]),
        ("--detail-tokn x", ["did you mean `--detail-token`"]),
        ("--text-precision split", ["a section with --text-precision.master"]),
        ("--text-precison.master split", ["did you mean `--text-precision.master`"]),
        ("--modules.text.bogus 3", ["field of modules.text", "one of parallel, layers"]),
        ("--log-dir x", ["did you mean `--log.dir`"]),
        ("--text.zero 3", ["did you mean `--text-zero`"]),
        ("--text- 3", ["unknown flag"]),
        ("--Text-zero 3", ["unknown flag", "--text-zero"]),
        ("--plan-parallel sp:2", ["unknown flag"]),
        ("--world-parallel sp:2", ["unknown flag"]),
        ("--config-zero 2", ["unknown flag"]),
        ("--help-zero 2", ["unknown flag"]),
        ("--text-zero 4", ["modules.text.zero (--text-zero)", "one of 1, 2, 3"]),
        ("--text-recompute 0", ["modules.text.recompute (--text-recompute)", "≥ 1"]),
        ("--text-chunk -1", ["modules.text.chunk", "≥ 0"]),
        ("--text-tp_overlap 2", ["modules.text.tp_overlap (--text-tp_overlap)", "true or false"]),
        ("--text-lr 0", ["modules.text.lr", "> 0"]),
        (
            "--text-patches_per_call 9",
            ["modules.text.patches_per_call", "text is not an encoder", "modules.text.chunk"],
        ),
        ("--text-precision.moments fp8", ["modules.text.precision.moments (--text-precision.moments)", "8bit"]),
        ("--detail-hf_path d", ["modules.detail.token (--detail-token)", "placeholder token"]),
        ("--optimizer-lr 3", ["did you mean `--optimizer.lr`"]),
        ("--train-iters 3", ["did you mean `--train.iters`"]),
        ("--vision.parallel sp:2", ["did you mean `--vision-parallel`"]),
        ("--detail-hf_path d --detail-token x --detail-min_pixels 9 --detail-max_pixels 4", ["no image could fit"]),
        ("--modules.plan.hf_path d --modules.plan.token x", ["the name `plan`", "unreserved"]),
        ("--text-hf_path d --text-token x", ["the name `text`", "unreserved"]),
        ("--image-hf_path d --image-token x", ["the name `image`", "unreserved"]),
        ("--a_projector-hf_path d --a_projector-token x", ["the name `a_projector`"]),
    ],
)
def test_what_flags_refuse(flags: str, said: list[str]) -> None:
    with pytest.raises(UserError) as error:
        loaded(flags)
    assert all(word in str(error.value) for word in said), error.value


def test_sections_are_no_modules() -> None:
    assert {*(f.name for f in fields(Config)), "world", "config", "help"} == NO_MODULES


def test_a_layout_is_not_empty(tmp_path: Path) -> None:
    for given in (["--text-parallel", ""], ["--text-parallel"], ["--text-parallel", "tp:2", "dp:2"]):
        with pytest.raises(UserError, match="--text-parallel"):
            loaded("", *given)
    with pytest.raises(UserError, match="Quote layouts"):
        from_yaml(tmp_path, "  text: {parallel: tp:4,dp:2}")
    with pytest.raises(UserError, match=r"expected a mapping"):
        from_yaml(tmp_path, "  text: tp:4")
