"""The record of Transformer Engine's signatures, from wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tools.te_signatures import record

MEGATRON = (
    "import transformer_engine as te\nfrom transformer_engine.pytorch import Linear, Later\nte.pytorch.ops.Fused\n"
)
ENGINE = "from transformer_engine.pytorch.linear import Linear\nfrom .ops import *\n"
LINEAR = "class Linear:\n    def __init__(self, inputs: int, outputs: int = 1{more}): ...\n"


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def test_a_name_has_what_each_version_changed(tmp_path: Path) -> None:
    """In the order of versions, not of names of files; a method with parameters, without their types."""
    (tmp_path / "linear.py").write_text('@signed("linear:Linear.__init__")\n')
    wheel(tmp_path, "megatron_core-0.19.2", {"megatron/core/te.py": MEGATRON})
    for version, more, later in (
        ("2.10.0", ", name=None", ""),
        ("2.9.0", "", ""),
        ("2.11.0", ", name=None", "Later = 1"),
    ):
        files = {"__init__.py": ENGINE + later, "linear.py": LINEAR.replace("{more}", more), "ops.py": "Fused = 1\n"}
        files = {f"transformer_engine/pytorch/{name}": text for name, text in files.items()}
        wheel(tmp_path, f"transformer_engine-{version}", files | {"transformer_engine/__init__.py": ""})
    found = record(tmp_path, tmp_path)
    first, second = "self, inputs, outputs=1", "self, inputs, outputs=1, name=None"
    assert found["transformer_engine.pytorch.linear:Linear.__init__"] == {"2.9.0": first, "2.10.0": second}
    assert found["transformer_engine.pytorch:Linear"] == {"2.9.0": ""}
    assert found["transformer_engine.pytorch:Later"] == {"2.11.0": ""}
    assert found["transformer_engine.pytorch.ops:Fused"] == {"2.9.0": ""}
