"""Folders as `energon prepare` leaves them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_hetero.base.contents import StoredFile
from megatron_hetero.data.sources.tar_headers import tar_members
from tests.support.formats import pack

SHARDS = {
    f"tars/s{shard}.tar": [(f"x/k{shard}{k}.{part}", f"{part} {shard}{k}") for k in range(3) for part in ("JPG", "txt")]
    for shard in range(3)
}
CAPTIONS = {"sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
            "field_map": {"image": "JPG", "caption": "txt"}}  # fmt: skip
SPLIT = {"split_parts": {"train": ["tars/s{0..1}.tar"], "val": ["tars/s2.tar"], "test": []}, "exclude": []}


def prepare(folder: Path, shards: Mapping[str, Any] = SHARDS, dataset: Any = CAPTIONS, split: Any = SPLIT) -> Path:
    """Write a folder as `energon prepare` does."""
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    database = sqlite3.connect(meta / "index.sqlite")
    database.execute(
        "CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, "
        "sample_index INTEGER NOT NULL, byte_offset INTEGER, byte_size INTEGER)"
    )
    database.execute(
        "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, "
        "content_byte_offset INTEGER, content_byte_size INTEGER)"
    )
    counts = {}
    for number, (name, members) in enumerate(shards.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack(members, mtime=1.5))
        keys: list[bytes] = []
        for key, part, start, size in tar_members(StoredFile(str(path)), path.stat().st_size):
            if key not in keys:
                keys.append(key)
                row = (number, key.decode(), len(keys) - 1, start - 512, 0)
                database.execute("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", row)
            row = (number, len(keys) - 1, part.decode(), start, size)
            database.execute("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", row)
        counts[name] = len(keys)
    database.commit()
    database.close()
    # JSON is YAML, too.
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(json.dumps(split))
    (meta / "dataset.yaml").write_text(json.dumps(dataset))
    return folder
