"""The examples of data formats read what their comments describe."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from benchmarks.measuring.energon import write_energon_index
from megatron_hetero.config.schema import load_config
from megatron_hetero.data.mixture import Mixture
from tests.support.formats import write_members

EXAMPLES = Path(__file__).parents[3] / "examples" / "data"
TURNS = [{"from": "human", "value": "<image>Why?"}, {"from": "gpt", "value": "So."}]
RECORD = json.dumps({"conversations": TURNS}).encode()


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (56, 56)).save(file, "png")
    return file.getvalue()


def llava(folder: Path) -> None:
    (folder / "photos").mkdir()
    (folder / "photos.json").write_text(json.dumps([{"image": "a.png", "conversations": TURNS}]))


def messages(folder: Path) -> None:
    (folder / "chats/images").mkdir(parents=True)
    turns = [{"role": "user", "content": "<image>Why?"}, {"role": "assistant", "content": "So."}]
    (folder / "chats/part-0.jsonl").write_text(json.dumps({"messages": turns, "images": ["a.png"]}))


def of_parquet(folder: Path) -> None:
    cell = {"bytes": picture(), "path": "a.png"}
    (folder / "docs").mkdir()
    (folder / "vqa").mkdir()
    parquet.write_table(pa.table({"image": [cell], "conversations": [TURNS]}), folder / "docs/train-0.parquet")
    parquet.write_table(pa.table({"image": [cell], "query": ["Why?"], "label": [["So."]]}), folder / "vqa/a.parquet")


def webdataset(folder: Path) -> None:
    (folder / "captions").mkdir()
    for k in range(100):
        write_members(folder / f"captions/{k:05}.tar", {"0.jpg": picture(), "0.txt": b"So."})
    write_members(folder / "web/shard-0.tar", {"0.jpg": picture(), "0.json": RECORD})


def energon(folder: Path) -> None:
    write_members(folder / "pages/0.tar", {"0.jpg": picture(), "0.json": RECORD})
    write_members(folder / "tables/0.tar", {"0.png": picture(), "0.json": RECORD})
    for name in ("pages", "tables"):
        write_energon_index(folder / name, ["0.tar"])


WRITE: dict[str, Callable[[Path], None]] = {
    "llava": llava,
    "messages": messages,
    "parquet": of_parquet,
    "webdataset": webdataset,
    "energon": energon,
}


def test_there_is_an_example_for_each() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} == WRITE.keys()


@pytest.mark.parametrize("name", WRITE)
def test_examples_read_such_files(name: str, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / f"{name}.yaml", tmp_path)
    WRITE[name](tmp_path)
    config = load_config(["--config", f"{tmp_path}/{name}.yaml", "--model.hf_path", "none"])
    data = config.data
    mixture = Mixture.parse(data.datasets, data.registry, data.shuffle, 0)
    assert {part.name for part, _ in mixture.sampled} == data.registry.keys()
    for part, _ in mixture.sampled:
        for record in part:
            assert record.turns[0].text in ("<image>Why?", "<image>") and record.turns[1].text == "So."
            assert len(record.items) == 1
            if record.folder is None:
                with record.item(0).content.open() as file:
                    assert file.read() == picture()
