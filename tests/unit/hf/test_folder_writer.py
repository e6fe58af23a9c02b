"""Writing `transformers` folders: all or nothing, and never in the place of anything that is not an export of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_hetero.base import lock as file_lock
from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import MARK, lock_of, mark, new_beside
from megatron_hetero.data.processor import Processor
from megatron_hetero.hf import model_files as writer_module
from megatron_hetero.hf.model_files import INDEX, SINGLE, folder_writer, plan_shards, read_companions, require_writable
from megatron_hetero.models.families.common import canonical_name
from megatron_hetero.models.weights import stored_shapes
from tests.support.folders import ModelChoice, write_model
from tests.support.locks import HOLD
from tests.support.shapes import shapes_of_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied model folder."""
    return write_model(tmp_path_factory.mktemp("untied") / "model", ModelChoice(text_layers=1, vision_layers=2))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("tied") / "model", ModelChoice(text_layers=1, vision_layers=1, tied=True)
    )


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {canonical_name(name): tensor for name, tensor in load_file(path).items()}
    return found


def write(source: Path, target: Path, dtype: torch.dtype = torch.float32, limit: int = 10**9) -> dict[str, Tensor]:
    shapes = stored_shapes(shapes_of_folder(source))
    tensors = tensors_of(source)
    with folder_writer(target, shapes, dtype, read_companions(source), limit) as writer:
        for name in reversed(shapes):
            writer.put(name, tensors[name])
    return tensors


@pytest.mark.parametrize("which", ["model", "tied"])
@pytest.mark.parametrize("limit", [10**9, 40_000], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_loads_without_a_warning(
    which: str, limit: int, dtype: torch.dtype, request: pytest.FixtureRequest, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source = request.getfixturevalue(which)
    target = tmp_path / "deep" / "export"
    tensors = write(source, target, dtype, limit)
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            target, dtype="auto", output_loading_info=True, local_files_only=True
        )
        Processor.from_folder(target)
    assert not any(info.values()), info
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert "warn" not in capfd.readouterr().err.lower()
    assert loaded.dtype == dtype and json.loads((target / "config.json").read_text())["dtype"] == str(dtype)[6:]
    state = {canonical_name(name.replace("model.visual", "visual")): t for name, t in loaded.state_dict().items()}
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor.to(dtype)), name
    files = sorted(target.glob("*.safetensors"))
    assert (len(files) > 3) == (limit < 10**9) and (target / INDEX).exists() == (len(files) > 1)
    for path in files:
        with safe_open(path, framework="pt") as handle:
            assert path.stat().st_size <= limit + 10_000 or len(list(handle.keys())) == 1
    names = {path.name for path in source.iterdir()} - {SINGLE}
    assert names <= {path.name for path in target.iterdir()}
    assert not [path for path in target.parent.iterdir() if path.name != "export"]


def test_shards_are_filled_in_order() -> None:
    assert plan_shards({"a": 40, "b": 40, "c": 400, "d": 4, "e": 12}, 80) == [["a", "b"], ["c"], ["d", "e"]]
    assert plan_shards({}, 80) == [[]]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["put", "finish"])
def test_a_failure_midway_leaves_the_old_export(model: Path, tmp_path: Path, error: BaseException, when: str) -> None:
    target = tmp_path / "export"
    write(model, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    place = {"put": "safetensors.torch.save_file", "finish": f"{writer_module.__name__}._set_dtype"}[when]
    expected = UserError if isinstance(error, OSError) else type(error)
    with mock.patch(place, side_effect=error), pytest.raises(expected) as raised:
        write(model, target, torch.bfloat16, 40_000)
    if expected is UserError:
        assert str(target) in str(raised.value) and "No space left" in str(raised.value)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_an_earlier_export_is_replaced_whole(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(model, target, limit=40_000)
    write(model, target)
    assert [path.name for path in target.glob("*.safetensors")] == [SINGLE] and not (target / INDEX).exists()


def test_two_exports_do_not_mix(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(model, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    others = new_beside(target, "partial")
    others.mkdir()
    (others / SINGLE).write_text("of the other one")
    mark(others)
    with subprocess.Popen([sys.executable, "-c", HOLD, lock_of(target)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        who = rf"export: in use .*\(process {other.pid} on .*export\.hf_dir"
        with pytest.raises(UserError, match=who):
            write(model, target, torch.bfloat16)
        other.kill()
    assert (others / SINGLE).read_text() == "of the other one"
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    write(model, target)  # What is left of one that was killed is removed.
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_a_lock_that_is_removed_is_nobodys(tmp_path: Path) -> None:
    """Two that have opened it before it was removed do not both have it."""
    path = tmp_path / "lock"
    said = "a folder: in use .*unknown process.*steps"
    removed = mock.patch.object(file_lock.fcntl, "lockf", side_effect=lambda *_: path.unlink())
    with removed, pytest.raises(UserError, match=said):
        file_lock.Lock.take(path, "a folder", "run", mixed="steps", fix="wait for it")
    file_lock.Lock.take(path, "a folder", "run", mixed="steps", fix="wait for it").release(remove=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="needs a mount point")
def test_a_mount_point_cannot_be_replaced() -> None:
    with pytest.raises(UserError, match=r"/proc: found a mount point, .* /proc/model .*export\.hf_dir"):
        require_writable(Path("/proc"))


@pytest.fixture(params=["file", "folder"])
def not_a_model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    target = tmp_path / "precious"
    if request.param == "file":
        target.write_text("thesis")
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("thesis")
    return target


def test_what_is_not_a_model_is_not_replaced(not_a_model: Path, model: Path) -> None:
    for attempt in (lambda: require_writable(not_a_model), lambda: write(model, not_a_model)):
        with pytest.raises(UserError, match=r"precious: found .*not an exported model.*hf_dir"):
            attempt()
    content = not_a_model if not_a_model.is_file() else not_a_model / "thesis.txt"
    assert content.read_text() == "thesis"


def put_file(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("thesis")


@pytest.mark.parametrize("name", [
    "src/thesis.txt", "thesis.txt", "README.md", ".git/HEAD", "notes.json", "adapter.safetensors", "config.json",
    "model.safetensors/a", "model-00001-of-00002.safetensors", "encoders/notes.txt", "encoders/detail/src/thesis.txt",
    f"encoders/detail/{MARK}",
])  # fmt: skip
def test_an_export_with_something_else_in_it_is_not_replaced(name: str, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    write(model, target)
    require_writable(target)
    if name.startswith(SINGLE):
        (target / SINGLE).unlink()
    put_file(target, name)
    for attempt in (lambda: require_writable(target), lambda: write(model, target)):
        with pytest.raises(UserError, match=r"precious: found (\S+), .*export\.hf_dir") as error:
            attempt()
        assert str(error.value).split("found ")[1].split(",")[0] == name
    assert (target / name).read_text() == "thesis"


def only_a_configuration(model: Path, target: Path) -> str:
    put_file(target, "config.json")
    return "not an exported model (config.json, and no"


def another_model(model: Path, target: Path) -> str:
    shutil.copytree(model, target)
    return f"and no {MARK}"


def an_export_without_a_mark(model: Path, target: Path) -> str:
    write(model, target)
    (target / MARK).unlink()
    return f"and no {MARK}"


def a_broken_mark(model: Path, target: Path) -> str:
    write(model, target)
    (target / MARK).write_text("{}")
    return f"a {MARK} that cannot be read"


def an_export_that_was_saved_over(model: Path, target: Path) -> str:
    write(model, target)
    save_file(load_file(target / SINGLE) | {"more": torch.zeros(3)}, target / SINGLE)
    return SINGLE


@pytest.mark.parametrize(
    "what",
    [only_a_configuration, another_model, an_export_without_a_mark, a_broken_mark, an_export_that_was_saved_over],
)
def test_what_has_no_mark_of_ours_is_not_replaced(
    what: Callable[[Path, Path], str], model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "precious"
    message = what(model, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for attempt in (lambda: require_writable(target), lambda: write(model, target)):
        with pytest.raises(UserError, match=f"precious: found .*{re.escape(message)}"):
            attempt()
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_what_takes_the_place_of_an_export_meanwhile_is_not_replaced(model: Path, tmp_path: Path) -> None:
    real = writer_module.mark

    def late(folder: Path) -> None:
        real(folder)
        put_file(tmp_path / "export", "thesis.txt")

    with mock.patch.object(writer_module, "mark", late), pytest.raises(UserError, match="thesis.txt, and no"):
        write(model, tmp_path / "export")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["export", "export/thesis.txt"]


@pytest.mark.parametrize("copy", [shutil.copytree, lambda old, new: shutil.unpack_archive(tarred(old), new)])
def test_a_copy_of_an_export_is_not_replaced(copy: Callable[[Path, Path], object], model: Path, tmp_path: Path) -> None:
    """Such as one that was published and downloaded again."""
    write(model, tmp_path / "export")
    copy(tmp_path / "export", tmp_path / "copy")
    with pytest.raises(UserError, match=f"copy: found a {MARK} of another folder"):
        write(model, tmp_path / "copy")
    (tmp_path / "export").rename(tmp_path / "moved")
    write(model, tmp_path / "moved")


def tarred(folder: Path) -> str:
    return shutil.make_archive(str(folder), "tar", folder)


def test_an_export_removes_no_folder_of_others(model: Path, tmp_path: Path) -> None:
    target, kept = tmp_path / "export", set[Path]()
    write(model, target)
    for name in (".export.partial", ".export.replaced", new_beside(target, "partial"), new_beside(target, "replaced")):
        put_file(tmp_path / name, "thesis.txt")
        shutil.copy(target / MARK, tmp_path / name)
        kept.add(tmp_path / name / "thesis.txt")
    (link := new_beside(target, "partial")).symlink_to(target)
    for _ in range(2):
        write(model, target)
    assert all(path.read_text() == "thesis" for path in kept) and link.is_symlink()
    assert {*tmp_path.iterdir()} == {target, link, *(path.parent for path in kept)}


def test_what_a_killed_export_left_is_removed(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "export"
    write(model, target)
    target.rename(new_beside(target, "replaced"))  # killed before the new one had its name
    killed = mock.patch.object(writer_module, "_set_dtype", side_effect=KeyboardInterrupt)
    with mock.patch.object(writer_module, "remove_marked"), killed, pytest.raises(KeyboardInterrupt):
        write(model, target)
    assert len(list(tmp_path.iterdir())) == 2
    write(model, target)
    assert list(tmp_path.iterdir()) == [target]
    target.rename(replaced := new_beside(target, "replaced"))
    (replaced / "notes.txt").touch()
    write(model, target)
    assert {*tmp_path.iterdir()} == {target, replaced}


def test_links_are_not_replaced(model: Path, tmp_path: Path) -> None:
    write(model, tmp_path / "export")
    (tmp_path / "link").symlink_to(tmp_path / "export")
    with pytest.raises(UserError, match=r"link: found .*\(a link\)"):
        write(model, tmp_path / "link")
    (tmp_path / "export/tokenizer.json").unlink()
    (tmp_path / "export/tokenizer.json").symlink_to(model / "tokenizer.json")
    with pytest.raises(UserError, match=r"export: found tokenizer\.json, "):
        write(model, tmp_path / "export")


def test_what_an_export_writes_can_be_replaced(model: Path, tmp_path: Path) -> None:
    """Whatever lies in the folder that the model comes from."""
    source = Path(shutil.copytree(model, tmp_path / "source"))
    for name in ("README.md", "LICENSE.txt", "notes.json", "merges.txt", "added_tokens.json", "chat_template.json"):
        (source / name).write_text("{}")
    for limit in (40_000, 10**9):
        write(source, tmp_path / "export", limit=limit)
    left_out = {"README.md", "LICENSE.txt", "notes.json"}
    names = {p.name for p in source.iterdir()} - left_out | {MARK}
    assert {path.name for path in (tmp_path / "export").iterdir()} == names


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "export", tmp_path / "file" / "deep" / "export"):
        with pytest.raises(UserError, match=r"export: found a folder .*export\.hf_dir"):
            require_writable(target)


def test_an_empty_folder_is_fine(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    require_writable(tmp_path / "export")
    assert list((tmp_path / "export").iterdir()) == []
