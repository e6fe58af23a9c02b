"""The index of a folder of tars, as `energon prepare` writes it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import yaml


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
