"""The benchmark of data sets: what it writes is read, in each format and order."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import data
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources import parquet
from megatron_hetero.models.items.image_files import load_picture


def picture(k: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 8), (k, 0, 0)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("kind", data.FORMATS)
def test_written_sets_are_read(kind: str, tmp_path: Path) -> None:
    opened = Dataset("d", data.write(kind, tmp_path / "set", 9, picture, embedded=True), Reading())
    items = [record.item(0) for record in opened]
    assert [load_picture(item.content, item.where).getpixel((0, 0)) for item in items] == [(k, 0, 0) for k in range(9)]
    usual = parquet._CACHE
    assert data.ours(opened, "blocks", "threads") > 0
    assert parquet._CACHE is usual


def test_sets_without_pictures(tmp_path: Path) -> None:
    for kind in ("JSON list", "JSONL", "parquet"):
        entry = data.write(kind, tmp_path / kind, 12, picture, embedded=False)
        found = data.measured_here(entry, tmp_path / kind / "cache")
        assert found["records"] == 12 and found["seconds"] > 0
        assert not [*(tmp_path / kind).glob("*.jpg")]


def test_page() -> None:
    rows = [{"records": 1000, "format": "JSONL", "build": 1.25, "open": 0.001, "private": 5e6, "index": 8000}]
    rates = [
        {"data": "JSONL, shuffle: true", "threads": 700.0, "processes": 400.0},
        {"data": "other", "processes": 1.0},
    ]
    text = data.page(rows, rates, 9)
    assert "| 1,000 | JSONL | 1.2 | 0.001 | 5 |" in text
    assert "| JSONL, shuffle: true | 700 | 400 |" in text and "| other |  | 1 |" in text
