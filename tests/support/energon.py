"""Folders as `energon prepare` leaves them."""

from __future__ import annotations

import json
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
    counts = {}
    for name, members in shards.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack(members, mtime=1.5))
        counts[name] = len({member.key for member in tar_members(StoredFile(str(path)), path.stat().st_size)})
    # JSON is YAML, too.
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(json.dumps(split))
    (meta / "dataset.yaml").write_text(json.dumps(dataset))
    return folder
