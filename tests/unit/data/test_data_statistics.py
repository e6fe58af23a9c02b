"""Statistics of data sets: figures, the table and messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from megatron_hetero.cli import data_statistics as statistics
from megatron_hetero.cli import inspect_data as inspect
from megatron_hetero.config.schema import Config, load_config
from megatron_hetero.data.processor import Processor, open_processor
from megatron_hetero.data.records import Record
from tests.support.items import IMAGE

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


@pytest.fixture
def config(config_file: Path) -> Config:
    return load_config(["--config", str(config_file)])


def _printed(config_file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert inspect.main(["--config", str(config_file), *flags]) == 0
    return capsys.readouterr().out


def _rows(output: str) -> dict[str, list[str]]:
    """Cells by data set."""
    rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0] in ("shapes", "held")}


@pytest.fixture
def lengths(processor: Processor, make_record: Callable[..., Record], tmp_path: Path) -> list[tuple[int, int]]:
    """Tokens and supervised tokens of the records of `shapes` that can be read."""
    records = [
        make_record("<image>What?", ANSWERS[0], images=("280.png",), folder=tmp_path / "images"),
        make_record("What?", ANSWERS[3]),
    ]
    return [(len(sample), int(sample.supervised.sum())) for sample in map(processor.tokenize, records)]


def test_figures_of_good_bad_unreadable_and_long_records(config: Config, lengths: list[tuple[int, int]]) -> None:
    shapes, held = statistics.measured(config, open_processor(config), 0)
    assert (len(shapes.data), shapes.data.bad, shapes.unreadable) == (4, 1, 1)
    assert shapes.tokens.tolist() == [lengths[0][0], lengths[1][0]]
    assert shapes.supervised == lengths[0][1] + lengths[1][1]
    assert shapes.problem.startswith(str(config.data.registry["shapes"].annotations) + ":3: image")
    assert shapes.items[IMAGE].tokens == 20 and shapes.items[IMAGE].headers.tolist() == [[280, 56]]
    assert held.items[IMAGE].tokens == 20 + 16 and held.items[IMAGE].headers.tolist() == [[280, 56], [112, 112]]


def test_a_table_with_a_row_for_each_data_set(
    config_file: Path, lengths: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    output = _printed(config_file, capsys, "--statistics")
    (short, supervised), (long, more) = lengths
    assert short < 100 < long
    assert _rows(output)["shapes"] == [
        *("4", "1 (25.0 %)", "3", "1 (33.3 %)"),
        *(f"{(short + long) / 2:.1f}", f"{short}", f"{long}", f"{long}"),
        *(f"{100 * (supervised + more) / (short + long):.1f} %", "50.0 %"),
        *("image", "0.50", f"{2000 / (short + long):.1f} %", "280×56", "280×56"),
    ]
    held = _rows(output)["held"]
    assert held[:4] == ["1", "0", "1", "0"] and held[9:12] == ["0", "image", "2.00"]
    assert held[13:] == ["112×112", "280×56"]


def test_messages_below_the_table(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = _printed(config_file, capsys, "--statistics")
    below = output[output.index("1 bad record") :].splitlines()
    assert below[0] == "1 bad record of shapes:" and "shapes.jsonl:2: found broken JSON" in below[1]
    assert below[2] == "1 unreadable sample of shapes:" and "shapes.jsonl:3: image" in below[3]
    assert below[4:] == ["8 samples per epoch from shapes%150 (3 records), shapes (3 records)"]
    assert "⟦" not in output and "\x1b" not in output


def test_samples_are_evenly_spaced_good_records(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Of records 1, 3 and 4.
    assert _rows(_printed(config_file, capsys, "--statistics", "2"))["shapes"][2:4] == ["2", "1 (50.0 %)"]
    assert statistics.spread(np.arange(10), 4).tolist() == [0, 2, 5, 7]
    assert statistics.spread(np.arange(3), 4).tolist() == statistics.spread(np.arange(3), 0).tolist() == [0, 1, 2]


def test_data_sets_without_good_records_or_items(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config_file.parent / "shapes.jsonl").write_text("{\n" * 5)
    (config_file.parent / "held.jsonl").write_text(
        json.dumps({"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]})
    )
    output = _printed(config_file, capsys, "--statistics")
    assert _rows(output)["shapes"] == ["5", "5 (100.0 %)", "0", "0"]
    assert len(_rows(output)["held"]) == 10 and "items" not in output
    assert "5 bad records of shapes" in output


def test_samples_are_printed_too_if_asked_for(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (config_file.parent / "shapes.jsonl").read_text().splitlines()
    (config_file.parent / "shapes.jsonl").write_text(lines[0])
    assert "⟦A disc." not in _printed(config_file, capsys, "--statistics")
    output = _printed(config_file, capsys, "--statistics", "-n", "1")
    assert output.count("⟦A disc.") == 1 and output.index("largest") < output.index("⟦A disc.")
    sheets = _printed(config_file, capsys, "--statistics", "--sheets", str(config_file.parent / "sheets"))
    assert sheets.count("⟦A disc.") == 5


@pytest.mark.parametrize("width", ["40", "200"])
def test_figures_are_never_cut(
    config_file: Path, width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert len(_rows(_printed(config_file, capsys, "--statistics"))["shapes"]) == 15
