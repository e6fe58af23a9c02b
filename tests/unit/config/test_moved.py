"""Names of settings that have moved: each gets its new one, all of a file or a command line in one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.moved import new_names, refuse_moved, settings_of, translated
from megatron_hetero.config.schema import Config, load_command, load_config

OLD_RUN = Path(__file__).parents[2] / "functional/checkpoint/old_run/run.yaml"

TABLE = {
    "parallel.text": ("modules.text.parallel (--text-parallel)", "tp:2"),
    "parallel_layers.text": ("modules.text.layers (--text-layers)", ["1", "1"]),
    "zero.text": ("modules.text.zero (--text-zero)", "3"),
    "precision.vision.master": ("modules.vision.precision.master (--vision-precision.master)", "split"),
    "precision.text.moments": ("modules.text.precision.moments (--text-precision.moments)", "8bit"),
    "precision.text.gradients": ("modules.text.precision.gradients (--text-precision.gradients)", "bfloat16"),
    "offload.text.states": ("modules.text.offload.states (--text-offload.states)", "true"),
    "offload.detail.activations": ("modules.detail.offload.activations (--detail-offload.activations)", "true"),
    "model.recompute.text": ("modules.text.recompute (--text-recompute)", "full"),
    "model.chunk.text": ("modules.text.chunk (--text-chunk)", "64"),
    "model.patches_per_call.vision": ("modules.vision.patches_per_call (--vision-patches_per_call)", "640"),
    "model.tp_overlap.text": ("modules.text.tp_overlap (--text-tp_overlap)", "true"),
    "model.sequence_parallel.text": ("modules.text.sequence_parallel (--text-sequence_parallel)", "false"),
    "model.encoders.detail.hf_path": ("modules.detail.hf_path (--detail-hf_path)", "/detail"),
    "model.encoders.detail.token": ("modules.detail.token (--detail-token)", "<y>"),
    "model.encoders.detail.min_pixels": ("modules.detail.min_pixels (--detail-min_pixels)", "64"),
    "model.encoders.detail.max_pixels": ("modules.detail.max_pixels (--detail-max_pixels)", "6400"),
    "optimizer.lr_vision": ("modules.vision.lr (--vision-lr), and lr of each further encoder", "2e-6"),
}
"""Old names of settings, new ones as errors write them, and values."""
SECTIONS = {
    "parallel": "modules.MODULE.parallel (--MODULE-parallel)",
    "parallel_layers": "modules.MODULE.layers (--MODULE-layers)",
    "precision": "modules.MODULE.precision.FIELD (--MODULE-precision.FIELD)",
    "precision.text": "modules.text.precision.FIELD (--text-precision.FIELD)",
    "model.chunk": "modules.MODULE.chunk (--MODULE-chunk)",
    "model.encoders": "modules.NAME.FIELD (--NAME-FIELD)",
    "model.encoders.detail": "modules.detail.FIELD (--detail-FIELD)",
}
"""Names of sections that are empty, or no sections at all."""


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """The mapping that a YAML file with these values has."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree


def refuse(content: object) -> None:
    refuse_moved("a.yaml", (names for names, _ in settings_of(content)))


def error_of(content: object) -> str:
    with pytest.raises(UserError) as error:
        refuse(content)
    return str(error.value)


@pytest.mark.parametrize("old, new", [*((old, new) for old, (new, _) in TABLE.items()), *SECTIONS.items()])
@pytest.mark.parametrize("value", [{}, "", "5", ["5"], None])
def test_each_old_name_has_a_new_one(old: str, new: str, value: object) -> None:
    assert error_of(nested({old: value})) == (
        f"a.yaml: 1 old name, because all settings of a module are in its record in `modules`. Rename {old} -> {new}."
    )


def test_one_error_lists_all_old_names() -> None:
    content = nested({"model.hf_path": "/m", "train.iters": "3", **{old: value for old, (_, value) in TABLE.items()}})
    listed = error_of(content).partition("Rename ")[2]
    renamed = [
        f"{old} -> {TABLE[old][0]}" for old in (".".join(names) for names, _ in settings_of(content)) if old in TABLE
    ]
    assert len(renamed) == len(TABLE) and listed == ", ".join(renamed) + "."


@pytest.mark.parametrize("name", [
    "modules.text.zero", "modules.vision.lr", "model.hf_path", "model.freeze", "optimizer.lr", "optimizer.lr_projector",
    "schedule.virtual_stages", "plan.images", "model", "optimizer", "checkpoint", "checkpoint.allow_changes",
    "parallels.text", "model.encoder.detail.token",
])  # fmt: skip
def test_other_names_are_left_alone(name: str) -> None:
    assert new_names(tuple(name.split("."))) is None
    for value in ({}, "", None, "5", ["data.shuffle"]):
        refuse(nested({name: value}))


@pytest.mark.parametrize("content", ["", None, "5", [], {}, ["parallel"]])
def test_what_is_no_mapping_is_left_to_others(content: object) -> None:
    refuse(content)


# ------------------------------------------------------------------------------------- files and command lines

RUN = {"model.hf_path": "/m", "data.registry.a.annotations": "/a.json", "data.datasets": ["a"]}
DETAIL = {"modules.detail.hf_path": "/d", "modules.detail.token": "<x>"}


def loaded(values: dict[str, Any], tmp_path: Path) -> Config:
    """The configuration of a file with these values."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(nested({**RUN, **values})))
    return load_config(["--config", str(file)])


def flags(values: dict[str, Any]) -> list[str]:
    """A command line with these values."""
    lists = {name: value if isinstance(value, list) else [value] for name, value in {**RUN, **values}.items()}
    return [word for name, words in lists.items() for word in (f"--{name}", *words)]


@pytest.mark.parametrize("old", TABLE)
def test_the_new_name_is_accepted_in_its_place(old: str, tmp_path: Path) -> None:
    shown, value = TABLE[old]
    name, flag = shown.partition(",")[0].removesuffix(")").split(" (--")
    for refused in (lambda: loaded({old: value}, tmp_path), lambda: load_command(flags({old: value}))):
        with pytest.raises(UserError, match=r"^(--config .*run.yaml and flags|command line): 1 old name, ") as error:
            refused()
        assert str(error.value).endswith(f"Rename {old} -> {shown}.")
    accepted = loaded({**DETAIL, name: value}, tmp_path)
    assert accepted == load_config(flags({**DETAIL, name: value})) != loaded(DETAIL, tmp_path)
    short = {key: DETAIL[key] for key in DETAIL if key != name}
    assert accepted == load_config(flags({**short, flag: value}))


def test_an_old_file_is_one_error_and_runs_with_the_new_names(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run.yaml and flags: 11 old names, ") as error:
        load_config(["--config", str(OLD_RUN)])
    listed = str(error.value).partition("Rename ")[2]
    assert listed.count(" -> ") == 11 and "optimizer.lr_vision -> modules.vision.lr (--vision-lr)" in listed
    settings = translated(yaml.safe_load(OLD_RUN.read_text()))
    (tmp_path / "new.yaml").write_text(yaml.safe_dump(settings))
    config = load_config(["--config", str(tmp_path / "new.yaml")])
    assert [config.module(name).parallel for name in ("vision", "detail", "text")] == ["dp:2", "sp:2", "dp:2,ep:2"]
    assert [config.module(name).lr for name in ("vision", "detail", "text")] == [2e-3, 2e-3, None]


def test_a_command_line_lists_its_old_flags_and_takes_the_short_form_of_layouts(tmp_path: Path) -> None:
    old = "--parallel.text tp:2 --model.recompute.text full --zero.text 3 --model.encoders.detail.hf_path X"
    with pytest.raises(UserError) as error:
        load_config([*flags({}), "--vision-parallel", "sp:2", *old.split(), "--unknown", "5"])
    assert str(error.value).startswith("command line: 4 old names, ")
    assert str(error.value).endswith(
        " parallel.text -> modules.text.parallel (--text-parallel), "
        "model.recompute.text -> modules.text.recompute (--text-recompute), "
        "zero.text -> modules.text.zero (--text-zero), "
        "model.encoders.detail.hf_path -> modules.detail.hf_path (--detail-hf_path)."
    )
    config = load_config([*flags({}), *"--vision-parallel sp:2 --text-parallel tp:2".split()])
    assert (config.module("vision").parallel, config.module("text").parallel) == ("sp:2", "tp:2")


# ------------------------------------------------------------------------------------------------- records

OLD: dict[str, Any] = {
    "model": {
        "hf_path": "/m",
        "encoders": {"zoom": {"hf_path": "/z", "token": "<z>"}, "detail": {"hf_path": "/d", "max_pixels": None}},
        "freeze": ["vision"],
        "recompute": {"text": 20},
        "chunk": {},
    },
    "parallel": {"text": "tp:2", "vision": "sp:2"},
    "parallel_layers": {"text": [1, 3]},
    "optimizer": {"name": "adamw", "lr_vision": 2e-6, "lr_projector": None},
    "precision": {"text": {"master": "split"}},
    "offload": {"text": {"states": True}},
    "zero": None,
}
NEW: dict[str, Any] = {
    "model": {"hf_path": "/m", "freeze": ["vision"]},
    "optimizer": {"name": "adamw", "lr_projector": None},
    "modules": {
        "zoom": {"hf_path": "/z", "token": "<z>", "lr": 2e-6},
        "detail": {"hf_path": "/d", "max_pixels": None, "lr": 2e-6},
        "text": {
            "recompute": 20,
            "parallel": "tp:2",
            "layers": [1, 3],
            "precision": {"master": "split"},
            "offload": {"states": True},
        },
        "vision": {"parallel": "sp:2", "lr": 2e-6},
    },
}


def test_a_recorded_configuration_is_translated() -> None:
    assert translated(OLD) == NEW == translated(NEW)
    assert list(translated(OLD)["modules"]) == list(NEW["modules"])  # Encoders keep their order.


def test_records_may_lack_sections() -> None:
    assert translated({}) == {"modules": {}}
    assert translated({"model": {"hf_path": "/m"}}) == {"model": {"hf_path": "/m"}, "modules": {}}
    assert translated({"optimizer": {"lr_vision": None}})["modules"]["vision"] == {"lr": None}


@pytest.mark.parametrize("name, value", [
    ("parallel", 5), ("parallel", ["x"]), ("precision.text", "split"), ("model.encoders", "x"), ("modules", 5),
    ("model.encoders.detail", {}), ("model.encoders.detail", None), ("modules.text", 5),
])  # fmt: skip
def test_malformed_records_are_errors(name: str, value: object) -> None:
    with pytest.raises((TypeError, LookupError, AttributeError)):
        translated(nested({"model.hf_path": "/m", name: value}))
