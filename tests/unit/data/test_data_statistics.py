"""Statistics of data sets: figures and messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from megatron_hetero.cli import data_statistics as statistics
from megatron_hetero.cli import inspect_data as inspect
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record

ANSWERS = ("A disc.", "", "", "It is red. " * 30)


@pytest.fixture
def config_file(model_folder: Path, tmp_path: Path) -> Path:
    """Four records: a picture, broken JSON, a missing picture, and a long text; and held-out ones: two pictures."""
    (tmp_path / "images").mkdir()
    for width, height in ((280, 56), (112, 112)):
        Image.new("RGB", (width, height)).save(tmp_path / "images" / f"{width}.png")

    def record(answer: str, *files: str) -> str:
        question = "<image>" * len(files) + "What?"
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return json.dumps({"image": list(files), "conversations": turns})

    shapes = [record(ANSWERS[0], "280.png"), '{"\x1b[31m', record("No.", "no.png"), record(ANSWERS[3])]
    (tmp_path / "shapes.jsonl").write_text("\n".join(shapes))
    (tmp_path / "held.jsonl").write_text(record("Two.", "280.png", "112.png"))
    registry = {name: {"annotations": f"{name}.jsonl", "images": "images"} for name in ("shapes", "held")}
    sections = {
        "model": {"hf_path": str(model_folder)},
        "data": {"registry": registry, "datasets": ["shapes%150", "shapes"], "max_seq_length": 100},
        "eval": {"datasets": ["held", "shapes"], "interval": 10},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def _printed(config_file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert inspect.main(["--config", str(config_file), *flags]) == 0
    return capsys.readouterr().out


@pytest.fixture
def lengths(processor: Processor, make_record: Callable[..., Record], tmp_path: Path) -> list[tuple[int, int]]:
    """Tokens and supervised tokens of the records of `shapes` that can be read."""
    records = [
        make_record("<image>What?", ANSWERS[0], images=("280.png",), folder=tmp_path / "images"),
        make_record("What?", ANSWERS[3]),
    ]
    return [(len(sample), int(sample.supervised.sum())) for sample in map(processor.tokenize, records)]


def test_lines_of_each_data_set(
    config_file: Path, lengths: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _printed(config_file, capsys, "--statistics").splitlines()
    (short, supervised), (long, more) = lengths
    assert short < 100 < long
    total = short + long
    assert lines[:5] == [
        "shapes: 4 records, 1 (25.0 %) bad",
        "  2 samples tokenized, 1 (50.0 %) longer than 100 tokens",
        f"  tokens per sample: mean {total / 2:.1f}, median {short}, 95 % {long}, maximum {long}; "
        f"{supervised + more} ({100 * (supervised + more) / total:.1f} %) supervised",
        f"  image: 0.50 per sample, 20 ({2000 / total:.1f} %) tokens",
        "  tokens per image: mean 20.0, median 20, 95 % 20, maximum 20",
    ]
    held = lines[lines.index("held: 1 records, 0 (0.0 %) bad") :]
    assert held[1] == "  1 samples tokenized, 0 (0.0 %) longer than 100 tokens"
    assert held[4] == "  tokens per image: mean 18.0, median 16, 95 % 20, maximum 20"


def test_messages(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = _printed(config_file, capsys, "--statistics")
    messages = output[output.index("1 bad record") :].splitlines()
    assert messages[0] == "1 bad record of shapes:" and "shapes.jsonl:2: found broken JSON" in messages[1]
    assert messages[2] == "1 unreadable sample of shapes:" and "shapes.jsonl:3: image" in messages[3]
    assert output.splitlines()[-1] == "8 samples per epoch from shapes%150 (3 records), shapes (3 records)"
    assert "⟦" not in output and "\x1b" not in output


def test_samples_are_evenly_spaced_good_records(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Of records 1, 3 and 4.
    output = _printed(config_file, capsys, "--statistics", "2")
    assert "  1 samples tokenized" in output and "1 unreadable sample of shapes:" in output
    assert statistics.spread(np.arange(10), 4).tolist() == [0, 2, 5, 7]
    assert statistics.spread(np.arange(3), 4).tolist() == statistics.spread(np.arange(3), 0).tolist() == [0, 1, 2]


def test_data_sets_without_good_records_or_items(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config_file.parent / "shapes.jsonl").write_text("{\n" * 5)
    (config_file.parent / "held.jsonl").write_text(
        json.dumps({"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]})
    )
    output = _printed(config_file, capsys, "--statistics")
    assert "shapes: 5 records, 5 (100.0 %) bad\n5 bad records of shapes, the first 3:\n" in output
    assert "  1 samples tokenized" in output and "image" not in output


def test_samples_are_printed_too_if_requested(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (config_file.parent / "shapes.jsonl").read_text().splitlines()
    (config_file.parent / "shapes.jsonl").write_text(lines[0])
    assert "⟦A disc." not in _printed(config_file, capsys, "--statistics")
    output = _printed(config_file, capsys, "--statistics", "-n", "1")
    assert output.count("⟦A disc.") == 1 and output.index("tokens per image") < output.index("⟦A disc.")
    sheets = _printed(config_file, capsys, "--statistics", "--sheets", str(config_file.parent / "sheets"))
    assert sheets.count("⟦A disc.") == 5
