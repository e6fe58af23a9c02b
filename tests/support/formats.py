"""The same samples in each format of data sets."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

FORMATS = ("json", "jsonl", "parquet", "webdataset", "energon")
SHARD = 4
"""Samples of a file, and twice those of a row group."""


def write_as(format: str, annotations: Path, images: Path, folder: Path) -> dict[str, str]:
    """Write the records of a JSONL file into `folder` in another format. Returns settings of the data set."""
    records = [json.loads(line) for line in annotations.read_text().splitlines()]
    folder.mkdir(parents=True)
    shards = [records[k : k + SHARD] for k in range(0, len(records), SHARD)]
    if format == "json":
        (folder / "data.json").write_text(json.dumps(records, indent=1))
        return {"annotations": f"{folder}/data.json", "images": str(images)}
    if format == "jsonl":
        return {"annotations": str(annotations), "images": str(images)}
    if format == "parquet":
        for k, shard in enumerate(shards):
            write_parquet(folder / f"data-{k:02}.parquet", shard, images)
        return {"files": f"{folder}/data-*.parquet"}
    for k, shard in enumerate(shards):
        write_tar(folder / f"data-{k:02}.tar", shard, images, first=k * SHARD)
    if format == "energon":
        write_energon_index(folder, [f"data-{k:02}.tar" for k in range(len(shards))])
        return {"files": str(folder)}
    return {"files": f"{folder}/data-{{00..{len(shards) - 1:02}}}.tar"}


def names_of(record: dict[str, Any]) -> list[str]:
    image = record.get("image") or []
    return [image] if isinstance(image, str) else image


def write_parquet(path: Path, records: Sequence[dict[str, Any]], images: Path) -> None:
    """As `datasets` writes them: a list of pictures in each row, with bytes."""
    import pyarrow as pa
    from pyarrow import parquet

    turn = pa.struct([("from", pa.string()), ("value", pa.string())])
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = {
        "images": [[{"bytes": (images / n).read_bytes(), "path": n} for n in names_of(each)] for each in records],
        "conversations": [each["conversations"] for each in records],
    }
    schema = pa.schema([("images", pa.list_(picture)), ("conversations", pa.list_(turn))])
    parquet.write_table(pa.table(rows, schema=schema), path, row_group_size=SHARD // 2)


def write_members(path: Path, members: Mapping[str, bytes]) -> None:
    """A tar file of these members, in a folder that is made if necessary."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_tar(path: Path, records: Sequence[dict[str, Any]], images: Path, first: int) -> None:
    """Samples `first` and on: a JSON member, and the pictures in their order."""
    members: dict[str, bytes] = {}
    for number, record in enumerate(records, first):
        members[f"{number:06}.json"] = json.dumps({"conversations": record["conversations"]}).encode()
        for k, name in enumerate(names_of(record)):
            members[f"{number:06}.{k}{Path(name).suffix}"] = (images / name).read_bytes()
    write_members(path, members)


def write_energon_index(folder: Path, shards: Sequence[str]) -> None:
    """The folder `.nv-meta` of tars in `folder`, as `energon prepare` writes it, without its SQLite index."""
    meta = folder / ".nv-meta"
    meta.mkdir()
    counts = {}
    for shard in shards:
        with tarfile.open(folder / shard) as tar:
            counts[shard] = len({member.name.partition(".")[0] for member in tar})
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(yaml.safe_dump({"split_parts": {"train": list(shards), "val": []}, "exclude": []}))
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
