"""The index of a folder of tars, as `energon prepare` writes it."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections.abc import Sequence
from pathlib import Path

import yaml


def write_energon_index(folder: Path, shards: Sequence[str]) -> None:
    """The folder `.nv-meta` of tars in `folder`, as `energon prepare` writes it."""
    meta = folder / ".nv-meta"
    meta.mkdir()
    counts = {}
    with sqlite3.connect(meta / "index.sqlite") as database:
        database.execute("CREATE TABLE samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size)")
        database.execute(
            "CREATE TABLE sample_parts (tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)"
        )
        for file, shard in enumerate(shards):
            keys: dict[str, int] = {}
            with tarfile.open(folder / shard) as tar:
                for member in tar:
                    key, _, part = member.name.partition(".")
                    if key not in keys:
                        keys[key] = len(keys)
                        database.execute(
                            "INSERT INTO samples VALUES (?,?,?,?,?)", (file, key, keys[key], member.offset, 0)
                        )
                    row = (file, keys[key], part, member.offset_data, member.size)
                    database.execute("INSERT INTO sample_parts VALUES (?,?,?,?,?)", row)
            counts[shard] = len(keys)
        database.execute("CREATE INDEX idx_samples_by_tar_and_idx ON samples (tar_file_id, sample_index)")
        database.execute(
            "CREATE INDEX idx_sample_parts_seq ON sample_parts (tar_file_id, sample_index, content_byte_offset)"
        )
    database.close()
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(yaml.safe_dump({"split_parts": {"train": list(shards), "val": []}, "exclude": []}))
    (meta / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
