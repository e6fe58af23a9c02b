"""The command that shows what the model is trained on."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import yaml
from PIL import Image
from rich.console import Console

from megatron_hetero.cli import inspect_data as inspect
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from tests.support.energon import prepare


@pytest.fixture
def config_file(model_folder: Path, tmp_path: Path) -> Path:
    """A configuration and its data; paths are relative to the file's folder."""
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "images").mkdir()
    Image.new("RGB", (280, 56)).save(tmp_path / "images" / "a.jpg", exif=exif)
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A [b]disc\x1b[31m."}]
    text_only = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello."}] * 2
    records = [{"image": "a.jpg", "id": 7, "conversations": turns}, {"conversations": text_only}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    registry = {"shapes": {"annotations": "train.jsonl", "images": "images"}}
    data = {"registry": registry, "datasets": ["shapes"], "shuffle": False, "max_seq_length": 60}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model": {"hf_path": str(model_folder)}, "data": data}))
    return file


def test_shows_text_supervision_and_images(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["--config", str(config_file), "-n", "3"]) == 0
    output = capsys.readouterr().out
    assert "train.jsonl:1" in output and "train.jsonl:2" in output
    assert "<|im_start|>user\n<|vision_start|><|image_pad|>×20<|vision_end|>\nWhat?<|im_end|>" in output
    assert "<|im_start|>assistant\n⟦A [b]disc\\x1b[31m.<|im_end|>⟧\n" in output
    assert output.count("⟦Hello.<|im_end|>⟧") == 2
    assert "image 0: a.jpg, 56×280 px → 56×280 px, grid (1, 20, 4) (t, h, w), 20 tokens" in output
    assert "longer than data.max_seq_length" in output
    assert "from shapes (2 records)" in output
    assert re.search(r"\ndata set shapes: .*: id \(1\)\n", output)
    assert "\x1b" not in output


def test_flags_win_over_the_file(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "-n",
        "1",
        "--config",
        str(config_file),
        "--data.max_pixels",
        str(28 * 28 * 4),
        "--data.min_pixels",
        "784",
    ]
    assert inspect.main(arguments) == 0
    assert "→ 28×112 px, grid (1, 8, 2)" in capsys.readouterr().out


CODE = "{{ cycler.__init__.__globals__.os.system('touch MARK') }}"
REACHING = ["{reference}://*::data:;base64,CODE", "{ftp}://user:pw@HOST/*", "{ftp,http}://HOST/*", "{/etc}/*", "{a}\0",
            "{tar}://*::file:///etc/passwd", "{" * 3000 + "}" * 3000]  # fmt: skip


@pytest.mark.parametrize("kind", ["split", "exclude"])
@pytest.mark.parametrize("name", REACHING, ids=range(len(REACHING)))
def test_names_of_a_folder_reach_no_host_or_file(
    config_file: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        mark = config_file.parent / "mark"
        keys = {"key": CODE.replace("MARK", str(mark)), "url": "a", "dimensions": {"i": {"stop": 1}}}
        references = json.dumps({"version": 1, "templates": {}, "gen": [keys], "refs": {}})
        name = name.replace("HOST", f"127.0.0.1:{listener.getsockname()[1]}")
        name = name.replace("CODE", base64.b64encode(references.encode()).decode())
        tars = {"split": ["tars/s0.tar"], "exclude": []}
        tars[kind].append(name)
        split = {"split_parts": {"train": tars["split"]}, "exclude": tars["exclude"]}
        registry = {"shapes": {"files": str(prepare(config_file.parent / "pages", split=split))}}
        config = yaml.safe_load(config_file.read_text())
        config_file.write_text(yaml.safe_dump(config | {"data": {"registry": registry, "datasets": ["shapes"]}}))
        assert inspect.main(["--config", str(config_file)]) == 1
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert not mark.exists()
    error = capsys.readouterr().err
    assert "split.yaml: " in error and "root:" not in error and "Traceback" not in error
    assert ("names of tars" in error) != ("a pattern in UTF-8" in error)


def test_supervised_text_is_coloured_on_a_terminal(processor: Processor, make_record: Callable[..., Record]) -> None:
    console = Console(file=StringIO(), force_terminal=True, color_system="standard", _environ={})
    inspect.show_sample(console, processor, processor.tokenize(make_record("Hi?", "Hello.")), None)
    assert "\x1b[1;32m⟦Hello.<|im_end|>⟧\x1b[0m" in console.file.getvalue()  # type: ignore[attr-defined]


def test_bad_input_is_one_message(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config_file.parent / "images" / "a.jpg").unlink()
    assert inspect.main(["--config", str(config_file)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert "train.jsonl:1: image" in captured.err and "no such file" in captured.err


def test_a_count_below_none_is_refused(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inspect.main(["--config", str(config_file), "-n", "-1"])
    assert "found -1, expected ≥ 0" in capsys.readouterr().err
