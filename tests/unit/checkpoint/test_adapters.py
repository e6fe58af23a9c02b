"""Checkpoints of adapters: which tensors they hold, and which runs may resume from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_hetero.base.errors import UserError
from megatron_hetero.checkpoint.index import matrix
from megatron_hetero.checkpoint.record import OVERRIDABLE, ModelSources, RunRecord
from megatron_hetero.checkpoint.recorded_adapters import adapters_of, fingerprints, with_recorded
from megatron_hetero.config.schema import load_config, to_yaml
from megatron_hetero.models.adapters import with_adapters
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import stored_shapes
from tests.support.adapters import write_adapter
from tests.support.folders import ModelChoice, write_model

CHECKPOINT = Path("/checkpoints/step-00000004")
EXPORT = f"python -m megatron_hetero.cli.export {CHECKPOINT} DIR"
DETAIL = "--detail-hf_path FOLDER/detail --detail-token <x>"


@dataclass(frozen=True)
class Case:
    """A run: its record, and the shapes of its model with and without adapters."""

    record: RunRecord
    shapes: ModelShapes
    plain: ModelShapes


Make = Callable[..., Case]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("model", "detail")):
        write_model(root / name, ModelChoice(vision_layers=2, text_layers=2, seed=seed))
    return root


@pytest.fixture(scope="module")
def make(folder: Path) -> Make:
    @lru_cache
    def made(more: str, model: Path | None = None, imported_from: str | None = None) -> Case:
        words = f"--data.datasets a --data.registry.a.annotations /a.json --model.hf_path {model or folder / 'model'} "
        config = load_config([*words.split(), *more.replace("FOLDER", str(folder)).split()])
        settings = json.loads(json.dumps(yaml.safe_load(to_yaml(config))))
        sources = ModelSources.recorded(settings)
        _, plain = sources.read()
        shapes = with_adapters(plain, config.modules)
        bases = fingerprints(sources.folders)
        record = RunRecord(4, 2, {}, (), settings, imported_from, adapters=adapters_of(shapes), bases=bases)
        return Case(record, shapes, plain)

    return made


RUNS = [
    "--text-lora.r 4",
    "--vision-lora.r 2 --vision-lora.alpha 3 --vision-lora.dropout 0.1 --text-lora.r 4 --text-lora.patterns.v_proj.r 2",
    "--vision-lora.r 2 --vision-lora.targets qkv *mlp.0 --text-lora.r 3 --text-lora.rslora true",
    f"{DETAIL} --detail-lora.r 2 --text-lora.r 4 --text-lora.targets q_proj --model.freeze vision",
    "--text-lora.r 4 --model.train projector model.layers.*.mlp.* visual.blocks.1.norm1.weight",
]


@pytest.mark.parametrize("flags", RUNS)
def test_a_record_names_the_adapters_of_a_run(flags: str, make: Make, tmp_path: Path) -> None:
    run = make(flags)
    (tmp_path / "run.json").write_text(run.record.to_json())
    read = RunRecord.read(tmp_path)
    assert read == run.record and read.adapters
    again, config = with_recorded(run.plain, read.adapters), read.config["model"]
    assert stored_shapes(again) == stored_shapes(run.shapes)
    frozen = Frozen.of(run.shapes, config["freeze"], config["train"]).tensors
    assert read.frozen(run.plain) == read.frozen(run.shapes) == frozen
    assert with_recorded(run.shapes, {}) == run.plain


@pytest.mark.parametrize("flags", RUNS)
def test_a_checkpoint_holds_what_trains(flags: str, make: Make) -> None:
    run = make(flags)
    trained = {
        name: matrix(s) for name, s in stored_shapes(run.shapes).items() if name not in run.record.frozen(run.plain)
    }
    assert any("lora_A" in name for name in trained) and not any(
        "layers.0.self_attn.q_proj.weight" in n for n in trained
    )
    found = {f"{kind}/{name}": s for name, s in trained.items() for kind in ("weights", "exp_avg", "exp_avg_sq")}
    found |= {f"step/{name}": (1,) for name in trained}
    run.record.require_complete(found, run.plain, CHECKPOINT)
    run.record.require_complete(found, run.shapes, CHECKPOINT)
    name = next(iter(run.record.frozen(run.plain)))
    with pytest.raises(UserError, match=f"1 unexpected: weights/{name}"):
        run.record.require_complete({**found, f"weights/{name}": (2, 2)}, run.plain, CHECKPOINT)
    name = next(name for name in trained if "lora_B" in name)
    with pytest.raises(UserError, match=f"1 missing: exp_avg/{name}"):
        run.record.require_complete({k: v for k, v in found.items() if k != f"exp_avg/{name}"}, run.plain, CHECKPOINT)


LORA = "--text-lora.r 4"
REFUSED = {
    "full into adapters": ("", LORA, (), [
        "modules.text.lora (--text-lora): found adapters, expected none",
        f"`{EXPORT}`", "--model.hf_path DIR", "checkpoint.dir"]),
    "adapters into full": (LORA, "", (), [
        "modules.text.lora (--text-lora): found no adapters, ", f"`{EXPORT} --merge`"]),
    "folders": (LORA, f"{DETAIL} --model.hf_path_vision FOLDER/detail", (), [
        "--model.hf_path DIR --detail-hf_path DIR/encoders/detail",
        "--model.hf_path_vision"]),
    "a rank": (LORA, "--text-lora.r 3", (), [
        "found r 3 at model.layers.0.self_attn.o_proj (and other values at 13 more layers), expected r 4",
        "r, targets and patterns"]),
    "a rank by pattern": (LORA, f"{LORA} --text-lora.patterns.up_proj.r 2", (), [
        "found r 2 at model.layers.0.mlp.up_proj (and other values at 1 more layer), expected r 4"]),
    "targets": (f"{LORA} --text-lora.targets q_proj k_proj", f"{LORA} --text-lora.targets k_proj q_proj v_proj", (), [
        "found r 4 at model.layers.0.self_attn.v_proj (and other values at 1 more layer), expected none"]),
    "fewer targets": (LORA, f"{LORA} --text-lora.targets q_proj", (), ["found no adapter at model.layers.0."]),
    "another module": (LORA, f"{LORA} --vision-lora.r 2", (), ["modules.vision.lora (--vision-lora): found r 2 at"]),
    "alpha": (LORA, f"{LORA} --text-lora.alpha 6", ("modules",), [
        "modules.text.lora.alpha (--text-lora.alpha): found a scale of 1.5 at", "expected a scale of 1",
        "or allow it with --checkpoint.allow_changes modules."]),
    "rslora": (LORA, f"{LORA} --text-lora.rslora true", ("modules",), ["found a scale of 2 at"]),
    "dropout": (LORA, f"{LORA} --text-lora.dropout 0.1", ("modules",), [
        "modules.text.lora.dropout (--text-lora.dropout): found 0.1, expected 0.0",
        "or allow it with --checkpoint.allow_changes modules."]),
    "frozen": (LORA, f"{LORA} --model.freeze projector", (), [
        "model.freeze (--model.freeze): freezes visual.merger.ln_q.weight, ", f"`{EXPORT} --merge` and train from"]),
    "no longer listed": (LORA, f"{LORA} --model.train projector", (), ["model.train (--model.train): freezes visual."]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_runs_that_would_not_continue(name: str, make: Make) -> None:
    old, new, allowing, expected = REFUSED[name]
    old, new = make(old), make(new)
    others = [setting for setting in OVERRIDABLE if setting not in allowing]
    with pytest.raises(UserError) as error:
        old.record.require_same_adapters(new.record, new.shapes, others, CHECKPOINT)
    assert all(text in str(error.value) for text in expected), error.value
    if allowing:
        old.record.require_same_adapters(new.record, new.shapes, allowing, CHECKPOINT)


@pytest.mark.parametrize("old, new", [
    ("", ""),
    (LORA, f"{LORA} --text-lora.alpha 4 --text-lora.lr_ratio 16"),
    ("--text-lora.r 4 --text-lora.alpha 8 --text-lora.rslora true", "--text-lora.r 4 --text-lora.alpha 16"),
    (f"{LORA} --text-lora.targets q_proj k_proj", f"{LORA} --text-lora.targets *.self_attn.[qk]_proj"),
    (f"{LORA} --model.freeze vision projector", LORA),
    (LORA, f"{LORA} --model.train vision projector text"),
])  # fmt: skip
def test_runs_that_continue(old: str, new: str, make: Make) -> None:
    before, now = make(old), make(new)
    before.record.require_same_adapters(now.record, now.shapes, (), CHECKPOINT)


def test_a_run_continues_without_the_folder_that_it_started_from(folder: Path, make: Make, tmp_path: Path) -> None:
    """As the error for a missing folder says: with r, targets and patterns of the record, and alpha = r x scale."""
    pytest.importorskip("peft")
    options = {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}, "use_rslora": True}
    start = write_adapter(folder / "model", tmp_path / "start", modules_to_save=["merger.mlp.0"], **options)
    old = make(f"--text-lora.hf_path {start} --vision-lora.hf_path {start}")
    (tmp_path / "run.json").write_text(old.record.to_json())
    read = RunRecord.read(tmp_path)
    assert read == old.record and read.adapters["vision"].adapters == () and read.adapters["vision"].replaced
    assert read.frozen(old.plain) == Frozen.of(old.shapes).tensors, "the encoder is frozen"
    with pytest.raises(UserError, match=r"to resume a run without it"):
        make(f"--text-lora.hf_path {tmp_path}/gone --vision-lora.hf_path {tmp_path}/gone")
    by_target = {each.name.rpartition(".")[2]: each for each in read.adapters["text"].adapters}
    words = ["--text-lora.targets", *by_target]
    for name, each in by_target.items():
        pattern = f"--text-lora.patterns.{name}"
        words += [f"{pattern}.r", str(each.r), f"{pattern}.alpha", str(each.r * each.scale)]
    for vision in ("--model.freeze vision", ""):
        now = make(f"--text-lora.r 4 {' '.join(words)} {vision}")
        read.require_same_adapters(now.record, now.shapes, (), CHECKPOINT)
    frozen = make(f"--text-lora.r 4 {' '.join(words)} --model.freeze vision projector")
    with pytest.raises(UserError, match=r"freezes visual\.merger\..*has other values"):
        read.require_same_adapters(frozen.record, frozen.shapes, (), CHECKPOINT)


def changed(folder: Path, target: Path, **tensors: torch.Tensor) -> Path:
    """A copy of a model, with other values of some tensors."""
    shutil.copytree(folder, target)
    save_file(load_file(target / "model.safetensors") | tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_the_base_is_known_again(folder: Path, make: Make, tmp_path: Path) -> None:
    old, moved = make(f"{DETAIL} {LORA}"), changed(folder / "model", tmp_path / "moved")
    same = make(f"{DETAIL} {LORA}", moved)
    old.record.require_same_adapters(same.record, same.shapes, (), CHECKPOINT)
    [norm] = [name for name in load_file(moved / "model.safetensors") if name.endswith("model.norm.weight")]
    model = changed(folder / "model", tmp_path / "model", **{norm: torch.full((64,), 1.0009)})
    detail = changed(folder / "detail", tmp_path / "detail", **{norm: torch.full((64,), 1.0009)})
    for new, place in (
        (make(f"{DETAIL} {LORA}", model), f"model.hf_path (--model.hf_path): {model}: other weights"),
        (
            make(f"--detail-hf_path {detail} --detail-token <x> {LORA}"),
            f"modules.detail.hf_path (--detail-hf_path): {detail}",
        ),
        (make(f"{DETAIL} {LORA} --model.hf_path_vision FOLDER/model"), "model.hf_path_vision (--model.hf_path_vision)"),
        (make(LORA), "modules.detail.hf_path (--detail-hf_path): missing"),
    ):
        with pytest.raises(UserError) as error:
            old.record.require_same_adapters(new.record, new.shapes, OVERRIDABLE, CHECKPOINT)
        assert str(error.value).startswith(place) and "no setting allows others" in str(error.value)
        if "vision" not in place:
            assert f"(then in {folder}/" in str(error.value)
    full = make(DETAIL), make(DETAIL, model)
    full[0].record.require_same_adapters(full[1].record, full[1].shapes, (), CHECKPOINT)


def test_adapters_start_from_an_import_of_the_same_weights(folder: Path, make: Make, tmp_path: Path) -> None:
    imported, run = make("", imported_from=str(folder / "model")), make(LORA)
    imported.record.require_same_adapters(run.record, run.shapes, (), CHECKPOINT)
    stored = {f"weights/{name}": matrix(shape) for name, shape in stored_shapes(run.plain).items()}
    replace(imported.record, config={**imported.record.config, "optimizer": {"name": "none"}}).require_complete(
        stored, run.shapes, CHECKPOINT
    )
    other = make(LORA, folder / "detail")
    with pytest.raises(UserError, match=f"other weights .*{CHECKPOINT} .then in {folder}"):
        imported.record.require_same_adapters(other.record, other.shapes, OVERRIDABLE, CHECKPOINT)
    without = replace(imported.record, bases={})  # as earlier versions wrote it
    with pytest.raises(UserError, match=r"`python -m megatron_hetero\.cli\.import`"):
        without.require_same_adapters(run.record, run.shapes, (), CHECKPOINT)
    without.require_same_adapters(make("").record, run.plain, (), CHECKPOINT)


def test_adapters_of_another_model(make: Make) -> None:
    run, smaller = make(f"{DETAIL} --detail-lora.r 2"), make("")
    with pytest.raises(UserError, match="adapters beside detail"):
        run.record.frozen(smaller.plain)
    adapters = run.record.adapters["detail"]
    foreign = replace(adapters, adapters=(adapters.adapters[0]._replace(name="blocks.9.attn.qkv"),))
    with pytest.raises(UserError, match=r"adapters beside blocks\.9\.attn\.qkv of vision, which"):
        with_recorded(smaller.plain, {"vision": foreign})
