"""Stand-ins for libraries that run on GPUs alone: their signatures and checks, results by plain PyTorch.

Folders to be put on the path of a process that is to find the package installed.
"""

from __future__ import annotations

import json
from pathlib import Path

from packaging.version import Version

APEX = Path(__file__).with_name("apex_0_1")
_TRANSFORMER_ENGINE = Path(__file__).with_name("transformer_engine_2")


def transformer_engine(version: str, folder: Path) -> list[Path]:
    """Folders for a process that is to find this version of Transformer Engine. `folder`: an empty one."""
    metadata = folder / f"transformer_engine-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {version}\n")
    return [_TRANSFORMER_ENGINE, folder]


def transformer_engine_versions() -> list[str]:
    """Versions from which on a method that is called here has another signature, the oldest one first."""
    histories = json.loads((_TRANSFORMER_ENGINE / "transformer_engine/recorded.json").read_text())
    changes = {since for place, history in histories.items() if "." in place.partition(":")[2] for since in history}
    return sorted(changes, key=Version)
