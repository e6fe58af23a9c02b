"""What `run.json` says: whoever wrote it, and whether the model is still the same."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_hetero.base.errors import UserError
from megatron_hetero.checkpoint.record import (
    FAILING,
    FURTHER_SETTINGS,
    LIMITS,
    MODEL,
    OVERRIDABLE,
    ModelSources,
    RunRecord,
    hashes,
)
from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.schema import load_config, to_yaml
from megatron_hetero.config.sections import DataConfig, VideoConfig
from tests.support.folders import ModelChoice, write_model
from tests.unit.checkpoint.records import RUN


def read(folder: Path, values: Any) -> RunRecord:
    (folder / "run.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return RunRecord.read(folder)


def changed(path: str, value: Any = None) -> Any:
    """A run's record with one value changed, or without it."""
    values = copy.deepcopy(RUN)
    *parents, last = path.split(".")
    inner = values
    for name in parents:
        inner = inner[name]
    inner.pop(last) if value is None else inner.update({last: value})
    return values


@pytest.mark.parametrize("path, value, message", [
    ("config", {}, "KeyError: 'model'"),
    ("config", [1], "AttributeError"),
    ("config.model.hf_path", None, "KeyError: 'hf_path'"),
    ("config.modules", {"detail": {"token": "<x>"}}, "KeyError: 'hf_path'"),
    ("config.modules", {"text": {"hf_path": "/x"}}, "found the name `text`"),
    ("config.modules", {"a/b": {"hf_path": "/x"}}, "found the name `a/b`"),
    ("config.modules", {"detail": {"hf_path": 5}}, "TypeError"),
    ("config.modules", [1], "AttributeError"),
    ("config.modules", {"detail": 5}, "TypeError"),
    ("config.modules", {"text": {"precision": 5}}, "ValidationError"),
    ("config.model.encoders", {"detail": {}}, "TypeError: model.encoders.detail is no section"),
    ("config.model.encoders", {"zoom": {"token": "<x>"}}, "KeyError: 'hf_path'"),
    ("config.model.encoders", [1], "TypeError: model.encoders is no section"),
    ("config.precision", {"text": "split"}, "TypeError: precision.text is no section"),
    ("config.parallel", "sp:2", "TypeError: parallel is no section"),
    ("model_files", 5, "AttributeError"),
    ("model_files", {"modules.detail.hf_path": 5}, "ValidationError"),
    ("datasets", None, "missing 1 required positional argument: 'datasets'"),
    ("datasets", [{"share": "a", "records": 6}], "missing 1 required positional argument: 'sha256'"),
    ("config.data.video", 5, "ValidationError"),
    ("adapters", {"text": 5}, "ValidationError"),
    ("adapters", {"text": {"adapters": [["q_proj", "4", 1.0]]}}, "ValidationError"),
    ("bases", {"model.hf_path": 5}, "ValidationError"),
    ("more", 1, "more"),
])  # fmt: skip
def test_a_foreign_record_is_one_error(path: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        read(tmp_path, changed(path, value))
    assert str(error.value).startswith(f"{tmp_path}/run.json: cannot be read")


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", '"a"', "[" * 100_000, "\ud800"])
def test_other_texts_are_no_records(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match="run.json: cannot be read"):
        RunRecord.read(tmp_path)


def test_shuffled_blocks_must_be_the_same(tmp_path: Path) -> None:
    run = changed("config.train", {"seed": 0, "global_batch_size": 4, "iters": 9})
    by_blocks = [{**RUN["datasets"][0], "blocks": name * 64} for name in "ab"]
    old, new, without = (read(tmp_path, {**run, "datasets": [each]}) for each in (*by_blocks, RUN["datasets"][0]))
    with pytest.raises(UserError, match=r"data\.datasets .*found a%50 .*in other blocks") as error:
        old.require_resumable(new, (), tmp_path)
    assert "rewritten" in str(error.value)
    assert str(error.value).endswith("--checkpoint.allow_changes data.datasets.")
    for one, other, allowed in ((old, new, ("data.datasets",)), (old, old, ()), (old, without, ()), (without, new, ())):
        one.require_resumable(other, allowed, tmp_path)


# ------------------------------------------------------------------------------------------- the same model


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("record") / "model", ModelChoice(vision_layers=2, text_layers=2))


@pytest.fixture
def sources(written: Path, tmp_path: Path) -> ModelSources:
    """A model with a further encoder, without weights."""
    no_weights = shutil.ignore_patterns("*.safetensors")
    model, detail = (shutil.copytree(written, tmp_path / n, ignore=no_weights) for n in ("model", "detail"))
    return ModelSources(model, encoders={"detail": detail})


def record_of(sources: ModelSources, imported_from: str | None = None) -> RunRecord:
    return RunRecord(4, 2, {}, (), sources.as_config(), imported_from, hashes(sources))


def edit(path: Path, section: str | None = None, **values: Any) -> None:
    content = json.loads(path.read_text())
    (content[section] if section else content).update(values)
    path.write_text(json.dumps(content, indent=1))


def rope(sources: ModelSources) -> str:
    edit(sources.model / "config.json", "text_config", rope_parameters={"rope_type": "default", "rope_theta": 2.0})
    return f"model.hf_path (--model.hf_path): {sources.model}/config.json: changed since"


def epsilon(sources: ModelSources) -> str:
    edit(sources.model / "config.json", "text_config", rms_norm_eps=0.5)
    return f"{sources.model}/config.json: changed since"


def window(sources: ModelSources) -> str:
    edit(sources.encoders["detail"] / "config.json", "vision_config", window_size=28)
    return f"{sources.encoders['detail']}/config.json: changed since"


def tokenizer(sources: ModelSources) -> str:
    edit(sources.model / "tokenizer.json", truncation={})
    return f"{sources.model}/tokenizer.json: changed since"


def processor(sources: ModelSources) -> str:
    (sources.encoders["detail"] / "preprocessor_config.json").unlink()
    return f"{sources.encoders['detail']}/preprocessor_config.json: removed since"


def template(sources: ModelSources) -> str:
    (sources.model / "chat_template.json").write_text("{}")
    return f"{sources.model}/chat_template.json: added since"


@pytest.mark.parametrize("change", [rope, epsilon, window, tokenizer, processor, template])
def test_another_model_is_reported_by_folder_and_file(
    change: Callable[[ModelSources], str], sources: ModelSources, tmp_path: Path
) -> None:
    old, imported = record_of(sources), record_of(sources, "/elsewhere")
    expected = change(sources)
    new = record_of(sources)
    with pytest.raises(UserError, match=re.escape(expected)) as error:
        old.require_same_model(new, OVERRIDABLE[:-1], tmp_path)
    assert "--checkpoint.allow_changes model.hf_path" in str(error.value)
    old.require_same_model(new, ("model.hf_path",), tmp_path)
    replace(old, model_files={}).require_same_model(new, (), tmp_path)  # as earlier versions wrote it
    if "/config.json: " in expected:
        with pytest.raises(UserError, match=re.escape(expected)):
            imported.require_same_model(new, (), tmp_path)
    else:  # tokenizer and images are the run's own
        imported.require_same_model(new, (), tmp_path)


def test_folders_may_move_and_weights_change_their_type(sources: ModelSources, tmp_path: Path) -> None:
    old = record_of(sources)
    moved = ModelSources(sources.model.rename(tmp_path / "moved"), encoders=sources.encoders)
    edit(moved.model / "config.json", dtype="bfloat16", transformers_version="9")
    edit(moved.model / "config.json", "text_config", torch_dtype="bfloat16", dtype="bfloat16")
    edit(moved.model / "generation_config.json", top_k=3)
    old.require_same_model(record_of(moved), (), tmp_path)


def test_folders_that_come_and_go(sources: ModelSources, tmp_path: Path) -> None:
    alone = ModelSources(sources.model)
    gone = rf"modules.detail.hf_path \(--detail-hf_path\): removed since .*then in {sources.encoders['detail']}"
    with pytest.raises(UserError, match=gone):
        record_of(sources).require_same_model(record_of(alone), (), tmp_path)
    with pytest.raises(UserError, match=r"detail/config.json: added since"):
        record_of(alone).require_same_model(record_of(sources), (), tmp_path)
    record_of(alone, "/elsewhere").require_same_model(record_of(sources), (), tmp_path)


# ----------------------------------------------------------------------------------------- settings that are compared

OTHERS = {
    "data.shuffle": "blocks", "data.too_long": "skip", "data.bad_records": "skip",
    "data.supervised_turns": "last", "data.min_pixels": 7, "data.max_pixels": 9000,
    "data.video.rules": "authors", "data.video.fps": 1.5, "data.video.min_frames": 2, "data.video.max_frames": 16,
    "data.video.frame_pixels": 5, "data.video.total_pixels": 6, "data.video.text_after": "transformers",
    "data.video.marks": "pairs", "train.seed": 1, "train.global_batch_size": 4, "model.router_aux_loss_coef": 1e-3,
    "modules": {"detail": {"hf_path": "/elsewhere", "token": "<x>", "max_pixels": 9000}},
}  # fmt: skip
"""Compared settings with other values than the defaults."""
FREE = {
    "registry", "index", "scan", "max_bad_share", "balance", "workers", "worker_type",
    "video.timeout_s", "video.index", "video",
}  # fmt: skip
"""Settings of `data` that change neither samples nor inputs, and the section."""


def defaults() -> RunRecord:
    """A record whose settings are the defaults, after JSON."""
    words = "--model.hf_path /m --data.datasets a --data.registry.a.annotations /a.json"
    words += " --detail-hf_path /d --detail-token <x>"
    config = json.loads(json.dumps(yaml.safe_load(to_yaml(load_config(words.split())))))
    return RunRecord(4, 2, {}, (), config)


def with_setting(record: RunRecord, name: str, *value: Any) -> RunRecord:
    """A record with another value of a setting, or without it."""
    config = copy.deepcopy(dict(record.config))
    *sections, last = name.split(".")
    inner = config
    for section in sections:
        inner = inner[section]
    inner.update({last: value[0]}) if value else inner.pop(last)
    return replace(record, config=config)


def test_each_setting_of_data_is_compared_or_without_effect() -> None:
    names = {f.name for f in fields(DataConfig)} | {f"video.{f.name}" for f in fields(VideoConfig)}
    assert {name.removeprefix("data.") for name in OVERRIDABLE if name.startswith("data.")} == names - FREE
    assert OTHERS.keys() == {*OVERRIDABLE} - {"data.datasets", MODEL, *LIMITS}


def test_each_setting_of_a_module_is_of_further_encoders_or_may_change() -> None:
    free = "parallel layers sequence_parallel zero recompute chunk patches_per_call tp_overlap precision offload lr"
    assert {f.name for f in fields(ModuleConfig)} == {*FURTHER_SETTINGS, *free.split(), "lora"}
    compared = "r alpha dropout targets rslora patterns"  # as what they make of the model: see test_adapters.py
    assert {f.name for f in fields(LoraConfig)} == {*compared.split(), "lr_ratio", "hf_path"}


@pytest.mark.parametrize("name, value", [*OTHERS.items(), *((name, 77) for name in LIMITS)])
def test_a_setting_that_changes_what_is_trained(name: str, value: Any, tmp_path: Path) -> None:
    skipping = with_setting(defaults(), "data.too_long", "skip")
    old = skipping if name in LIMITS else defaults()
    new = with_setting(old, name, value)
    if name in FAILING:  # A run may begin to skip, which would have stopped, and not end to.
        old.require_resumable(new, [], tmp_path)
        old, new = new, old
    allow = rf"--checkpoint.allow_changes {re.escape(name)}\."
    with pytest.raises(UserError, match=rf"^{re.escape(name)} \(--{re.escape(name)}\): found .*{allow}"):
        old.require_resumable(new, [other for other in OVERRIDABLE if other != name], tmp_path)
    old.require_resumable(new, [name], tmp_path)
    new.require_resumable(new, [], tmp_path)
    if name in LIMITS:  # A larger sample would have been an error.
        defaults().require_resumable(with_setting(defaults(), name, value), [], tmp_path)


@pytest.mark.parametrize("name", ["data.video", *sorted(OTHERS.keys() - {"modules", *FAILING})])
def test_a_setting_that_an_old_record_lacks_has_its_default(name: str, tmp_path: Path) -> None:
    old = with_setting(defaults(), name)
    old.require_resumable(defaults(), [], tmp_path)
    name, value = (name, OTHERS[name]) if name in OTHERS else ("data.video.fps", 3.0)
    with pytest.raises(UserError, match=rf"^{re.escape(name)} "):
        old.require_resumable(with_setting(defaults(), name, value), [], tmp_path)


@pytest.mark.parametrize("row", [
    {"hf_path": "/elsewhere", "parallel": "dp:2", "zero": 3, "lr": 2e-6, "precision": {"master": "split"}},
    {"hf_path": "/elsewhere", "max_pixels": None},
])  # fmt: skip
def test_of_a_further_encoder_only_what_it_sees_is_compared(row: dict[str, Any], tmp_path: Path) -> None:
    other = with_setting(defaults(), "modules", {"text": {"zero": 3}, "detail": {"token": "<x>", **row}})
    defaults().require_resumable(other, [], tmp_path)
    for more in ({"token": "<y>"}, {"min_pixels": 5}):
        new = with_setting(defaults(), "modules", {"detail": {"token": "<x>", **row, **more}})
        with pytest.raises(UserError, match=r"allow it with --checkpoint.allow_changes modules\."):
            defaults().require_resumable(new, [], tmp_path)


# -------------------------------------------------------------------------------------- records of earlier versions


def old_form(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it was before settings of a module were in its row."""
    old = copy.deepcopy(record)
    rows = old["config"].pop("modules")
    old["config"]["model"]["encoders"] = {"detail": rows["detail"]}
    old["config"] |= {"precision": {"text": rows["text"]["precision"]}, "parallel": {"text": "tp:2"}, "zero": {}}
    old["model_files"]["model.encoders.detail.hf_path"] = {"config.json": "2" * 64}
    return old


def test_old_records_have_todays_names(tmp_path: Path) -> None:
    files = {**RUN["model_files"], "modules.detail.hf_path": {"config.json": "2" * 64}}
    old, new = read(tmp_path, old_form(RUN)), read(tmp_path, {**RUN, "model_files": files})
    assert old.config["modules"]["text"] == {"precision": {"master": "split"}, "parallel": "tp:2"}
    assert old.model_files == new.model_files
    assert ModelSources.recorded(old.config) == ModelSources.recorded(new.config)
    assert [old.precision("text", name) for name in ("master", "moments")] == ["split", "float32"]
    assert old.precision("vision", "master") == "float32"
    assert read(tmp_path, old.to_json()) == old


def test_an_old_run_resumes(tmp_path: Path) -> None:
    run = changed("config.train", {"seed": 0, "global_batch_size": 4, "iters": 9})
    old, new = read(tmp_path, old_form(run)), read(tmp_path, run)
    old.require_resumable(new, [], tmp_path)
    rows = {"detail": {"hf_path": "/detail", "token": "<x>", "max_pixels": 9000}}
    with pytest.raises(UserError, match=r"^modules \(--modules\): found .*9000.*--checkpoint.allow_changes modules"):
        old.require_resumable(with_setting(new, "modules", rows), [], tmp_path)
    with pytest.raises(UserError, match=r"^modules .*found \{\}, expected \{'detail': \{'token': '<x>'\}\}"):
        old.require_resumable(with_setting(new, "modules", {}), [], tmp_path)


def test_records_before_further_encoders(tmp_path: Path) -> None:
    """Neither `modules` nor the sections that it took the place of."""
    run = changed("config.modules")
    run["config"]["train"]["iters"] = 9
    old = read(tmp_path, run)
    assert not ModelSources.recorded(old.config).encoders
    old.require_resumable(read(tmp_path, {**run, "config": {**run["config"], "modules": {"text": {}}}}), [], tmp_path)
