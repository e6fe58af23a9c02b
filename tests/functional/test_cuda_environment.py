"""The environment variables of CUDA that programs set before they import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_DIST_USE_NCCL2": "0",
}

RECORD = """
import atexit, json, os, sys
from types import SimpleNamespace
class Record:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not found:
            found.update({name: os.environ.get(name) for name in %r})
found = {}
sys.meta_path.insert(0, Record())
atexit.register(lambda: print(json.dumps(found)))
""" % [*VARIABLES, "PYTORCH_CUDA_ALLOC_CONF"]

PROGRAMS = {
    "the program": """
import pretrain_vlm
pretrain_vlm.train = lambda *_: True
config = SimpleNamespace(schedule=SimpleNamespace(timeout_s=60.0), checkpoint=SimpleNamespace(dir=None))
pretrain_vlm.load_command = lambda _: (config, None)
pretrain_vlm.guarded(pretrain_vlm.main, [])
""",
    "a library user's": """
from megatron_hetero.groups.launch import process_group
with process_group():
    pass
""",
    "one with groups of its own": """
from megatron_hetero.groups.launch import guarded
guarded(lambda _: __import__("torch"), [])
""",
}


def found_at_the_import_of_torch(program: str, **users: str) -> dict[str, str]:
    """The variables that a program has set when it begins to import torch."""
    clean = {k: v for k, v in os.environ.items() if k not in (*VARIABLES, "RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{RECORD}{PROGRAMS[program]}"],
        env=clean | users, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: value for name, value in json.loads(done.stdout).items() if value is not None}


@pytest.mark.parametrize("program", PROGRAMS)
def test_variables_are_set_before_torch_is_imported(program: str) -> None:
    assert found_at_the_import_of_torch(program) == VARIABLES


def test_what_a_user_has_set_stays() -> None:
    users = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",  # the older name
        "TORCH_DIST_USE_NCCL2": "1",
    }
    assert found_at_the_import_of_torch("the program", **users) == users
