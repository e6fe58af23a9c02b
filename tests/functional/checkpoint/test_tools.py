"""To and from `transformers` without ranks: the same bits as a run, one shard in memory, and clear refusals."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import MANIFEST, MARK, lock_of
from megatron_hetero.checkpoint import index as tensors_index
from megatron_hetero.checkpoint.convert import UNTRAINED, require_free
from megatron_hetero.checkpoint.index import Entry
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.checkpoint.resume import choose
from megatron_hetero.checkpoint.storage import write_entries
from megatron_hetero.cli import export
from megatron_hetero.config.sections import CheckpointConfig
from megatron_hetero.hf.model_files import INDEX, SINGLE
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.models.families.common import canonical_name
from megatron_hetero.models.weights import stored_shapes
from megatron_hetero.step.number_formats import nearest_bfloat16
from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import bytes_of, published, same
from tests.functional.checkpoint.conftest import Untouched
from tests.functional.checkpoint.runs import flags, seal
from tests.support.folders import ModelChoice, write_model, write_qwen2, write_transposed
from tests.support.folders import write_language_model as write_alone
from tests.support.locks import HOLD
from tests.support.matrix import thinned
from tests.support.pool import Pools
from tests.support.runs import build_logged
from tests.support.shapes import shapes_of_folder


def train_and_export(flags: list[str], target: Path) -> list[float]:
    """Train as the program does, with checkpoints, and export at the end. Returns the losses."""
    run, losses = build_logged(flags), []
    with run.writer:
        for step, batch, _ in run.batches():
            losses.append(run.trainer.train_step(step, batch).loss)
            run.saver.after(step)
    run.export(target)
    return losses


Capture = pytest.CaptureFixture[str]

importer = importlib.import_module("megatron_hetero.cli.import")  # a keyword, which no import statement takes


@pytest.fixture(scope="module")
def more_folders(folders: Path) -> Path:
    """Beside the models of `folders`: `detail`, `narrow` (an encoder whose rows fit no other model), and `text`, a
    language model alone.
    """
    write_model(folders / "detail", ModelChoice(vision_layers=1, text_layers=1, full_layers=(0,), seed=3))
    write_model(folders / "narrow", ModelChoice(heads=2, vision_layers=1, text_layers=1, full_layers=(0,), seed=4))
    write_qwen2(folders / "text")
    return folders


@pytest.fixture
def model(folders: Path, tmp_path: Path) -> Path:
    """A copy of a model, to be changed."""
    return shutil.copytree(folders / "plain", tmp_path / "model")


def exported(*arguments: object) -> int:
    return export.main([str(argument) for argument in arguments])


def imported(*arguments: object) -> int:
    return importer.main([str(argument) for argument in arguments])


def edit(path: Path, **values: object) -> None:
    """Change values of a file of JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {canonical_name(name): t for path in files for name, t in load_file(path).items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def beside_weights(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in bytes_of(folder).items() if "safetensors" not in name and name != MARK}


# ------------------------------------------------------------------------------------------ what a run writes

TWO = "--model.hf_path FOLDERS/text --model.hf_path_vision FOLDERS/narrow --model.freeze vision --model.dtype bfloat16"
DETAIL = (
    "--detail-hf_path FOLDERS/detail --detail-token <|video_pad|> --model.dtype bfloat16 "
    "--data.min_pixels 4096 --data.max_pixels 9000 --detail-max_pixels 8000"
)


SPLIT = "--text-layers 1 3"


@pytest.mark.parametrize("vision, text, model, more", thinned([
    ("sp:2", "tp:2", "plain", "--model.dtype bfloat16"),
    ("dp:1@0", "dp:1@1", "tied", ""),
    ("tp:2", "pp:2", "plain", TWO),
    ("dp:2", "tp:2", "plain", DETAIL),
    ("pp:2", "pp:2", "qwen3", SPLIT),
    ("sp:2", "pp:2", "qwen3-tied", f"{SPLIT} {DETAIL}"),
    ("sp:2", "dp:2,ep:2", "moe", "--text-zero 3"),
    ("dp:2", "tp:2,ep:1", "moe", "--model.dtype bfloat16"),
    ("sp:2", "pp:2", "moe-published", SPLIT),
    ("dp:2", "tp:2,ep:2", "moe-published", "--model.dtype bfloat16"),
], 3))  # fmt: skip
def test_an_export_has_the_bytes_of_the_runs_own(
    vision: str, text: str, model: str, more: str, more_folders: Path, tmp_path: Path, pools: Pools, capsys: Capture
) -> None:
    line = flags(more_folders, tmp_path, vision, text, f"{more} --train.iters 2", model)
    line = jobs.once([word.replace("FOLDERS", str(more_folders)) for word in line])
    pools(2).run(train_and_export, line, tmp_path / "own")
    assert exported(tmp_path / "checkpoints", tmp_path / "export") == 0
    assert published(tmp_path / "export") == published(tmp_path / "own")
    assert (tmp_path / "export/encoders/detail/config.json").is_file() == (DETAIL in more)
    said = capsys.readouterr()
    assert said.err == "" and said.out.count("\n") == 1
    assert f"from {tmp_path}/checkpoints/step-00000002, the newest in {tmp_path}/checkpoints" in said.out
    _require_loads_strictly(tmp_path / "export")
    if DETAIL in more:
        _require_loads_strictly(tmp_path / "export/encoders/detail")
        settings = [
            json.loads((tmp_path / "export" / name / "preprocessor_config.json").read_text())
            for name in ("", "encoders/detail")
        ]
        assert [each["size"]["longest_edge"] for each in settings] == [9000, 8000]

    # Shards hold the same, and what goes back is what was in the checkpoint, as far as the type can say.
    assert exported(tmp_path / "checkpoints/step-00000002", tmp_path / "stored", "--dtype", "stored",
                    "--shard-gb", "5e-5") == 0  # fmt: skip
    assert (tmp_path / "stored" / INDEX).is_file()
    assert imported(tmp_path / "stored", tmp_path / "again") == 0
    same(tmp_path / "again", _weights_alone(tmp_path / "checkpoints/step-00000002", tmp_path / "alone"), but="")


def _require_loads_strictly(folder: Path) -> None:
    """`transformers` finds every tensor of the model in a folder, or of the encoder in that of one, and no other."""
    kind: Any = AutoModelForImageTextToText
    _, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    left = {name for name in info["missing_keys"] if "language_model" not in name and name != "lm_head.weight"}
    assert not left
    assert not info["missing_keys"] or folder.parent.name == "encoders"


def _weights_alone(checkpoint: Path, target: Path) -> Path:
    """A checkpoint's weights in one file of their own, for `same`."""
    tensors = {key: t for key, t in jobs.tensors(checkpoint).items() if key.startswith("weights/")}
    target.mkdir()
    write_entries(target, [Entry(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in tensors.items()], None)
    return target


def test_types_of_an_export(untouched: Untouched, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = untouched.folder / "checkpoints/step-00000004"
    for dtype in ("float32", "bfloat16", "stored"):
        assert exported(checkpoint, tmp_path / dtype, "--dtype", dtype) == 0
    full, half = weights_of(tmp_path / "float32"), weights_of(tmp_path / "bfloat16")
    # Of two numbers that are as near, PyTorch takes the even one, an export the larger, as training does.
    assert same_bits({name: nearest_bfloat16(t) for name, t in full.items()}, half)
    assert same_bits(full, weights_of(tmp_path / "stored"))
    for dtype, name in (("bfloat16", "bfloat16"), ("stored", "float32")):
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == name
    assert not any((full[name] != torch.from_numpy(value)).any() for name, value in untouched.found["weights"].items())
    assert "step-00000004\n" in capsys.readouterr().out  # not said to be the newest: it was named


# --------------------------------------------------------------------------------------------- there and back


def mixed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if "k_proj" in name else tensor.bfloat16() if tensor.dim() > 1 else tensor


@pytest.mark.parametrize("which", ["plain", "tied", "bfloat16", "mixed", "shards", "qwen3", "qwen3-tied"])
def test_there_and_back_is_the_same(which: str, folders: Path, tmp_path: Path, capsys: Capture) -> None:
    source = shutil.copytree(folders / (which if (folders / which).is_dir() else "plain"), tmp_path / "source")
    tensors = load_file(source / SINGLE)
    if which in ("bfloat16", "mixed"):
        tensors = {name: mixed(name, t) if which == "mixed" else t.bfloat16() for name, t in tensors.items()}
        save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    if which == "bfloat16":
        text = (source / "config.json").read_text()
        (source / "config.json").write_text(text.replace('"float32"', '"bfloat16"'))
    limit = ("--shard-gb", "1e-4") if which == "shards" else ()
    assert imported(source, tmp_path / "checkpoint") == 0
    assert exported(tmp_path / "checkpoint", tmp_path / "back", *limit) == 0
    assert same_bits(weights_of(source), weights_of(tmp_path / "back"))
    if "qwen3" in which:
        assert load_file(tmp_path / "back" / SINGLE).keys() == tensors.keys(), "the published, nested names"
        assert all(n.startswith(("model.visual.", "model.language_model.", "lm_head.")) for n in tensors)
    assert beside_weights(source) == {n: b for n, b in beside_weights(tmp_path / "back").items() if n != INDEX}
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 3 or which != "shards"
    assert imported(tmp_path / "back", tmp_path / "again") == 0
    same(tmp_path / "checkpoint", tmp_path / "again", but="")
    assert capsys.readouterr().err == ""


def test_a_head_that_is_stored_twice_is_kept_once(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    source = shutil.copytree(folders / "tied", tmp_path / "source")
    tensors = load_file(source / SINGLE)
    original = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = tensors[original].clone()
    save_file(tensors, source / SINGLE)
    assert imported(source, tmp_path / "one") == 0 and imported(folders / "tied", tmp_path / "other") == 0
    same(tmp_path / "one", tmp_path / "other", but="")
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, source / SINGLE)
    assert imported(source, tmp_path / "two") == 1
    assert "found a lm_head.weight that differs from model.embed_tokens.weight" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["as published", "as transformers writes it", "a language model alone"])
def test_experts_keep_the_form_of_a_folder_whose_weights_are_gone(form: str, tmp_path: Path) -> None:
    choice = ModelChoice(family="qwen3_vl_moe", text_hidden=48, head_dim=16, mlp_only_layers=(0,))
    whole = write_model(tmp_path / "whole", choice)
    source, flags = whole, []
    if form == "as published":
        source = write_transposed(whole, tmp_path / "source")
    elif form != "as transformers writes it":
        source, flags = write_alone(whole, tmp_path / "source"), ["--vision", str(whole)]
    kept = shutil.copytree(source if not flags else whole, tmp_path / "kept")
    assert imported(source, tmp_path / "checkpoint", *flags) == 0
    assert RunRecord.read(tmp_path / "checkpoint").experts_transposed == (form == "as published")
    (source / SINGLE).unlink()
    assert exported(tmp_path / "checkpoint", tmp_path / "back", "--shard-gb", "1e-4") == 0
    assert same_bits(weights_of(kept), weights_of(tmp_path / "back"))
    again = tmp_path / "again"
    assert imported(tmp_path / "back", again) == 0
    same(tmp_path / "checkpoint", again, but="")


# ---------------------------------------------------------------------------------------- a run begins from it


@pytest.mark.parametrize("vision, text, more", thinned([
    ("sp:2", "tp:2", ""),
    ("dp:1@0", "tp:1@1", "--model.dtype bfloat16"),
    ("tp:2", "pp:2", f"{TWO} --train.seed 5 --optimizer.name sgd --optimizer.weight_decay 0"),
    ("pp:2", "pp:2", f"--model.hf_path FOLDERS/qwen3 {SPLIT}"),
], 2))  # fmt: skip
def test_a_run_from_an_import_is_one_from_the_folder(
    vision: str, text: str, more: str, more_folders: Path, tmp_path: Path, pools: Pools, untouched: Untouched
) -> None:
    """With bfloat16, of folders that hold float32."""
    more = more.replace("FOLDERS", str(more_folders))
    source, *rest = (f"{more_folders}/{'qwen3' if 'qwen3' in more else 'plain'}",) if "vision" not in more else (
        f"{more_folders}/text", "--vision", f"{more_folders}/narrow", "--seed", 5,
    )  # fmt: skip
    run = tmp_path / "run"
    assert imported(source, run / "checkpoints/step-00000000", *rest) == 0
    assert (run / "checkpoints/latest").read_text() == "step-00000000\n"
    found = pools(2).run(jobs.train, flags(more_folders, run, vision, text, more))[0]
    begun, whole = found["losses"], untouched.folder
    assert found["from"] == 0 and len(begun) == 4
    assert any(f"weights imported from {source}" in note for note in found["notes"])
    if more:
        whole = tmp_path / "whole"
        fresh = pools(2).run(jobs.train, flags(more_folders, whole, vision, text, more))[0]
        assert fresh["losses"] == begun
    else:
        assert untouched.found["losses"] == begun
    same(whole / "checkpoints/step-00000004", run / "checkpoints/step-00000004", but="")


def test_a_run_finds_an_import_by_its_path_too(folders: Path, tmp_path: Path, pools: Pools) -> None:
    assert imported(folders / "plain", tmp_path / "weights") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"weights"}
    record = RunRecord.read(tmp_path / "weights")
    assert (record.step, record.imported_from) == (0, str(folders / "plain"))
    line = flags(folders, tmp_path / "run", "tp:2", "tp:2", f"--checkpoint.resume {tmp_path}/weights", "tied")
    [message, _] = pools(2).run(jobs.error_of, line)
    assert "1 unexpected: weights/lm_head.weight" in message


# ------------------------------------------------------------------------------------------------ refusals


def refused(capsys: Capture, status: int, *expected: str) -> None:
    said = capsys.readouterr()
    assert status == 1 and said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert all(text in said.err for text in expected), said.err


def test_damaged_checkpoints_are_not_exported(untouched: Untouched, tmp_path: Path, capsys: Capture) -> None:
    run = shutil.copytree(untouched.folder / "checkpoints", tmp_path / "run")
    checkpoint, target = run / "step-00000004", tmp_path / "export"
    data = bytearray((checkpoint / "tensors-1-0.safetensors").read_bytes())
    data[len(data) // 3] ^= 4
    (checkpoint / "tensors-1-0.safetensors").write_bytes(data)
    refused(capsys, exported(run, target), "tensors-1-0.safetensors has a different SHA-256", f"{run}/step-00000002")
    (checkpoint / "tensors-1-0.safetensors").unlink()
    refused(capsys, exported(checkpoint, target), "tensors-1-0.safetensors is missing")
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["files"]["run.json"]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    refused(capsys, exported(checkpoint, target), "run.json")
    (checkpoint / MANIFEST).unlink()
    refused(capsys, exported(checkpoint, target), "manifest.json: missing")
    refused(capsys, exported(run / "step-9", target), "manifest.json: no such checkpoint")
    assert exported(run, target) == 0 and "step-00000002, the newest" in capsys.readouterr().out


def test_the_checkpoint_must_be_the_models(untouched: Untouched, more_folders: Path, tmp_path: Path, capsys: Capture):
    checkpoint, target = untouched.folder / "checkpoints", tmp_path / "export"
    status = exported(checkpoint, target, "--model", more_folders / "tied")
    refused(capsys, status, "4 unexpected: exp_avg/lm_head.weight, ")
    status = exported(checkpoint, target, "--model", more_folders / "detail")
    refused(capsys, status, "unexpected: exp_avg/model.layers.1.")
    status = exported(checkpoint, target, "--vision", more_folders / "detail")
    refused(capsys, status, f"the encoder comes from {more_folders}/plain too")
    status = exported(checkpoint, target, "--encoder", f"sound={more_folders}/detail")
    refused(capsys, status, "--encoder: found sound, ")
    with pytest.raises(SystemExit, match="2"):
        exported(checkpoint, target, "--encoder", "detail")
    assert not target.exists() and "found detail, expected NAME=DIR" in capsys.readouterr().err


def test_a_folder_that_has_moved(model: Path, tmp_path: Path, capsys: Capture) -> None:
    assert imported(model, tmp_path / "checkpoint") == 0
    before = weights_of(model)
    (model / SINGLE).unlink()  # weights are not needed
    moved = model.rename(tmp_path / "moved")
    capsys.readouterr()
    status = exported(tmp_path / "checkpoint", tmp_path / "export")
    refused(capsys, status, f"no {model}/config.json", "--model DIR")
    assert exported(tmp_path / "checkpoint", tmp_path / "export", "--model", moved) == 0
    assert same_bits(before, weights_of(tmp_path / "export"))
    (moved / "tokenizer.json").unlink()
    capsys.readouterr()
    status = exported(tmp_path / "checkpoint", tmp_path / "export", "--model", moved)
    refused(capsys, status, "tokenizer.json: found no such file")
    assert same_bits(before, weights_of(tmp_path / "export"))


def test_further_folders_that_have_moved(more_folders: Path, tmp_path: Path, capsys: Capture) -> None:
    text, vision, detail = (
        shutil.copytree(more_folders / name, tmp_path / name) for name in ("text", "narrow", "detail")
    )
    given = ("--vision", vision, "--encoder", f"detail={detail}")
    assert imported(text, tmp_path / "checkpoint", *given) == 0
    assert exported(tmp_path / "checkpoint", tmp_path / "before") == 0
    moved = [path.rename(path.with_name(f"{path.name}-moved")) for path in (vision, detail)]
    capsys.readouterr()
    status = exported(tmp_path / "checkpoint", tmp_path / "export")
    refused(capsys, status, f"model.hf_path_vision of {tmp_path}/checkpoint/run.json", "location with --vision DIR")
    flags_now = ["--vision", moved[0]]
    status = exported(tmp_path / "checkpoint", tmp_path / "export", *flags_now)
    refused(capsys, status, f"no {detail}/config.json", "location with --encoder detail=DIR")
    flags_now += ["--encoder", f"detail={moved[1]}"]
    assert exported(tmp_path / "checkpoint", tmp_path / "export", *flags_now) == 0
    assert published(tmp_path / "export") == published(tmp_path / "before")


def test_a_recorded_path_that_no_file_has(untouched: Untouched, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = shutil.copytree(untouched.folder / "checkpoints/step-00000004", tmp_path / "step-00000004")
    record = json.loads((checkpoint / "run.json").read_text())
    record["config"]["model"]["hf_path"] = "\ud800"
    (checkpoint / "run.json").write_text(json.dumps(record))
    seal(checkpoint)
    refused(capsys, exported(checkpoint, tmp_path / "export"), "model.hf_path: found '\\ud800' ('utf-8' codec can't")


def test_a_recorded_optimizer_is_one_of_ours(untouched: Untouched, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = shutil.copytree(untouched.folder / "checkpoints/step-00000004", tmp_path / "step-00000004")
    record = json.loads((checkpoint / "run.json").read_text())
    record["config"]["optimizer"]["name"] = "twice"
    (checkpoint / "run.json").write_text(json.dumps(record))
    seal(checkpoint)
    refused(capsys, exported(checkpoint, tmp_path / "export"), "optimizer.name cannot be 'twice'")


@pytest.mark.parametrize("name", ["step-00000099", ".step-00000001.partial", "latest"])
def test_an_export_is_not_named_as_a_checkpoint(
    name: str, untouched: Untouched, folders: Path, tmp_path: Path, capsys: Capture
) -> None:
    checkpoints = shutil.copytree(untouched.folder / "checkpoints", tmp_path / "checkpoints")
    before = bytes_of(checkpoints)
    if not (checkpoints / name).exists():
        assert exported(checkpoints, checkpoints / name) == 1
        assert f"the name {name} is reserved" in capsys.readouterr().err
    assert bytes_of(checkpoints) == before
    assert exported(checkpoints, checkpoints / "export") == 0


def test_two_imports_do_not_mix(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "imported" / UNTRAINED
    target.parent.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, lock_of(target)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert imported(folders / "plain", target) == 1
        other.kill()
    assert f"(process {other.pid} on" in capsys.readouterr().err
    assert imported(folders / "plain", target) == 0
    assert {path.name for path in target.parent.iterdir()} == {UNTRAINED, "latest"}


def test_a_seed_that_draws_nothing(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    assert imported(folders / "plain", tmp_path / "imported", "--seed", 3) == 1
    assert "--seed: found 3" in capsys.readouterr().err and not (tmp_path / "imported").exists()


def test_what_may_be_replaced(untouched: Untouched, folders: Path, tmp_path: Path, capsys: Capture) -> None:
    checkpoint, thesis = untouched.folder / "checkpoints/step-00000004", tmp_path / "precious/thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("thesis")
    before = bytes_of(folders / "plain")
    refused(capsys, exported(checkpoint, thesis.parent), "not an exported model")
    refused(capsys, exported(checkpoint, thesis), "not an exported model")
    refused(capsys, exported(checkpoint, thesis / "deep"), "cannot be written")
    refused(capsys, exported(checkpoint, folders / "tied"), "and no megatron_hetero_export.json")  # another model
    for target in (folders / "plain", folders, folders / "plain/deep"):
        refused(capsys, exported(checkpoint, target), f"overlaps model.hf_path ({folders}/plain)")
    refused(capsys, exported(checkpoint, checkpoint), "overlaps the checkpoint")
    for target in (thesis, thesis.parent, untouched.folder / "checkpoints"):
        refused(capsys, imported(folders / "plain", target), "not an empty folder")
    refused(capsys, imported(folders / "plain", thesis / "deep"), "not a directory")
    refused(capsys, imported(folders / "plain", tmp_path / "step-00000300"), "imported ones are step-00000000")
    beside = untouched.folder / "checkpoints/step-00000000"
    refused(capsys, imported(folders / "plain", beside), "step-00000004 in", "Choose step-00000000")
    assert thesis.read_text() == "thesis" and bytes_of(folders / "plain") == before
    assert [path.name for path in tmp_path.iterdir()] == ["precious"] and not beside.exists()


@pytest.mark.parametrize("name", ["", "checkpoints", "checkpoints/step-00000000", "step-00000007", "file"])
def test_an_import_goes_where_a_run_finds_it(name: str, untouched: Untouched, tmp_path: Path) -> None:
    shutil.copytree(untouched.folder / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "file").write_text("thesis")
    with pytest.raises(UserError, match="Choose step-00000000 in a new folder"):
        require_free(tmp_path / name)
    require_free(tmp_path / "new/step-00000000")


def truncated(model: Path) -> str:
    (model / SINGLE).write_bytes((model / SINGLE).read_bytes()[:-7])
    return "truncated or not safetensors"


def gone(model: Path) -> str:
    (model / SINGLE).unlink()
    (model / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    return "model-00001-of-00001.safetensors: found no such file"


def lacking(model: Path) -> str:
    tensors = load_file(model / SINGLE)
    wanted = [name for name in tensors if "k_proj" in name]
    save_file({name: t[:-1] if "o_proj" in name else t for name, t in tensors.items() if name not in wanted},
              model / SINGLE)  # fmt: skip
    return f"{len(wanted)} missing: model.layers.0.self_attn.k_proj.bias"


def quantised(model: Path) -> str:
    save_file({name: t.to(torch.float8_e4m3fn) for name, t in load_file(model / SINGLE).items()}, model / SINGLE)
    return "is F8_E4M3, model.embed_tokens.weight is F8_E4M3"


def diverged(model: Path) -> str:
    tensors = load_file(model / SINGLE)
    tensors["lm_head.weight"][3, :2] = float("nan")
    save_file(tensors, model / SINGLE)
    return "tensor lm_head.weight: found values"


def unnamed(model: Path) -> str:
    (model / "encoders/text").mkdir(parents=True)
    (model / "encoders/text/config.json").write_text("{}")
    return "found the name `text`"


@pytest.mark.parametrize("damage", [truncated, gone, lacking, quantised, diverged, unnamed])
def test_broken_folders_are_not_imported(
    damage: Callable[[Path], str], model: Path, tmp_path: Path, capsys: Capture
) -> None:
    expected = damage(model)
    refused(capsys, imported(model, tmp_path / "checkpoints/step-00000000"), expected)
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_an_import_takes_encoders_by_name(more_folders: Path, tmp_path: Path, capsys: Capture) -> None:
    detail = f"detail={more_folders}/detail"
    assert imported(more_folders / "plain", tmp_path / "checkpoint", "--encoder", detail) == 0
    assert RunRecord.read(tmp_path / "checkpoint").config["modules"].keys() == {"detail"}
    keys = jobs.tensors(tmp_path / "checkpoint").keys()
    assert "weights/detail.visual.merger.mlp.0.bias" in keys and "weights/visual.merger.mlp.0.bias" in keys
    capsys.readouterr()
    narrow = ("--encoder", f"narrow={more_folders}/narrow")
    refused(capsys, imported(more_folders / "plain", tmp_path / "b", *narrow), "rows of 24 elements")
    twice = ("--encoder", detail, "--encoder", detail)
    refused(capsys, imported(more_folders / "plain", tmp_path / "b", *twice), "expected each name once")


def test_encoders_are_folders_of_models(model: Path, tmp_path: Path, more_folders: Path) -> None:
    shutil.copytree(more_folders / "detail", model / "encoders/detail")
    shutil.copytree(more_folders / "detail", model / "encoders/.detail.partial")
    (model / "encoders/notes").mkdir()
    assert imported(model, tmp_path / "checkpoint") == 0
    assert RunRecord.read(tmp_path / "checkpoint").config["modules"].keys() == {"detail"}


def test_what_is_left_of_an_import_is_reported(model: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "checkpoints/step-00000000"
    with mock.patch("megatron_hetero.base.outputs.replacing", side_effect=OSError(28, "No space left on device")):
        refused(capsys, imported(model, target), "no space left on device")
    assert choose(CheckpointConfig(dir=target.parent))[0] == target and exported(target, tmp_path / "export") == 0
    capsys.readouterr()
    refused(capsys, imported(model, target / "run.json/deep"), "not a directory")


def test_an_export_is_of_the_same_configuration(model: Path, tmp_path: Path, capsys: Capture) -> None:
    assert imported(model, tmp_path / "checkpoint") == 0
    other = shutil.copytree(model, tmp_path / "other")
    edit(other / "config.json", dtype="bfloat16", transformers_version="9")
    assert exported(tmp_path / "checkpoint", tmp_path / "export", "--model", other) == 0
    config = json.loads((other / "config.json").read_text())
    edit(other / "config.json", text_config=config["text_config"] | {"rms_norm_eps": 1e-3})
    capsys.readouterr()
    status = exported(tmp_path / "checkpoint", tmp_path / "export", "--model", other)
    refused(capsys, status, f"model.hf_path: {other}/config.json: changed since", "trained from: --model DIR")
    edit(tmp_path / "checkpoint/run.json", model_files={})  # as earlier versions wrote it
    seal(tmp_path / "checkpoint")
    assert exported(tmp_path / "checkpoint", tmp_path / "export", "--model", other) == 0


@contextmanager
def small_files() -> Iterator[None]:
    """Nobody may write large files, which stands in for a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_nothing(untouched: Untouched, folders: Path, tmp_path: Path, capsys: Capture) -> None:
    with small_files():
        status = exported(untouched.folder / "checkpoints", tmp_path / "export")
        refused(capsys, status, f"{tmp_path}/export: ", "File too large")
        status = imported(folders / "plain", tmp_path / "checkpoint")
        refused(capsys, status, "file too large")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing(untouched: Untouched, folders: Path, tmp_path: Path, capsys: Capture) -> None:
    whole, left = StoredWeights.whole, iter(range(5))

    def interrupted(weights: StoredWeights, name: str) -> torch.Tensor:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return whole(weights, name)

    with mock.patch.object(StoredWeights, "whole", interrupted):
        assert imported(folders / "plain", tmp_path / "checkpoint") == 130
    with mock.patch("megatron_hetero.checkpoint.storage.chunk_of", side_effect=KeyboardInterrupt):
        assert exported(untouched.folder / "checkpoints", tmp_path / "export") == 130
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("interrupted; ") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_checkpoints_stands_for_its_newest(untouched: Untouched, tmp_path: Path) -> None:
    folder = untouched.folder / "checkpoints"
    assert choose(CheckpointConfig(dir=tmp_path / "new", resume=folder))[0] == folder / "step-00000004"
    with pytest.raises(UserError, match="new/manifest.json: no such checkpoint"):
        choose(CheckpointConfig(dir=tmp_path, resume=tmp_path / "new"))
    with pytest.raises(UserError, match=rf"is itself a checkpoint.*--checkpoint.resume {folder}/step-00000002"):
        choose(CheckpointConfig(dir=folder / "step-00000002"))


# ------------------------------------------------------------------------------------------------- memory


def test_tensors_are_written_one_at_a_time(tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def load(column: int) -> torch.Tensor:
        assert len(alive) <= 1, "nothing is kept until its file is closed"
        tensor = torch.arange(24.0).view(2, 12)[:, column:]  # not contiguous
        alive.add(tensor)
        return tensor

    sizes = {str(k): (2, 12 - k) for k in range(6)}
    entries = [
        Entry(key, size, (0, 0), torch.empty(size, device="meta"), partial(load, int(key)))
        for key, size in sizes.items()
    ]
    with mock.patch("megatron_hetero.checkpoint.storage.FILE_BYTES", 200):
        write_entries(tmp_path, entries, None)
    found = jobs.tensors(tmp_path)
    assert all(torch.equal(found[key], torch.arange(24.0).view(2, 12)[:, int(key) :]) for key in sizes)
    # 96 + 88, 80 + 72, 64 + 56 bytes
    files = [tmp_path / f"tensors-0-{k}.safetensors" for k in range(3)]
    assert {*tmp_path.iterdir()} == {tmp_path / tensors_index.INDEX, *files}
    alone = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert alone.keys() == {f"{key}[0:2,0:{size[1]}]" for key, size in sizes.items()}
    assert all(torch.equal(tensor, found[name.partition("[")[0]]) for name, tensor in alone.items())


MEMORY = """
import importlib, resource, sys
from megatron_hetero.cli import export
importer = importlib.import_module("megatron_hetero.cli.import")
assert "torch" not in sys.modules, "the command line is read before anything slow is imported"
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def there_and_back(model, target):
    found = []
    for work in (
        lambda: importer.main([model, target]),
        lambda: export.main([target, target + "-back", "--shard-gb", "0.02"]),
    ):
        assert work() == 0
        found.append(peak())
    return found
before = max(there_and_back(sys.argv[1], sys.argv[2] + "-small"))
assert "megatron.core" not in sys.modules
print(*(after - before for after in there_and_back(sys.argv[3], sys.argv[2] + "-large")))
"""


@pytest.mark.long
def test_memory_is_that_of_a_shard(folders: Path, tmp_path: Path) -> None:
    """A model of 200 MB takes less than 50 MB beyond what a very small one takes."""
    model = shutil.copytree(folders / "tied", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= {"intermediate_size": 16384, "num_hidden_layers": 22, "layer_types": None}
    (model / "config.json").write_text(json.dumps(config))
    shapes = stored_shapes(shapes_of_folder(model))
    tensors = {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}
    size = sum(t.nbytes for t in tensors.values())
    assert size > 200e6
    save_file(tensors, model / SINGLE)
    command = [sys.executable, "-c", MEMORY, str(folders / "tied"), str(tmp_path / "to"), str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    growth = [int(word) for word in done.stdout.splitlines()[-1].split()]
    assert max(growth) < 50e6, growth
    back = {canonical_name(n): t for path in tmp_path.glob("to-large-back/*.safetensors") for n, t in
            load_file(path).items()}  # fmt: skip
    assert same_bits(back, tensors)
