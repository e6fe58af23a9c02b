"""What CUDA, the allocator and NCCL find in the environment, and when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_hetero.base.environment import group_timeout, prepare_environment, prepare_traces, write_trace

VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
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
pretrain_vlm.train_and_export = lambda *_: False
config = SimpleNamespace(schedule=SimpleNamespace(timeout_s=60.0), answers=False)
pretrain_vlm.guarded(lambda _: pretrain_vlm.train(config, None), [])
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
    }
    assert found_at_the_import_of_torch("the program", **users) == users


def test_too_late_is_said_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    environ = {"RANK": "0", "PYTORCH_ALLOC_CONF": "x:1"}
    with pytest.warns(UserWarning, match="CUDA was initialised without CUDA_DEVICE_MAX_CONNECTIONS, which") as told:
        prepare_environment(environ)
    assert "\n" not in str(told[0].message) and environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_environment(environ)  # said already
        prepare_environment({"RANK": "1"})
        prepare_environment({"RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": ""})


def test_few_hardware_queues_are_reported_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})  # There is no GPU.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for rank, queues in (("1", "1"), ("0", "8"), ("0", "32"), ("0", "many")):
            prepare_environment({"RANK": rank, "CUDA_DEVICE_MAX_CONNECTIONS": queues})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            prepare_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    [told] = [str(each.message) for each in said]
    assert told.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 makes streams wait for each other") and "\n" not in told


@pytest.mark.parametrize(
    "watchdog_s, groups_s", [(5.0, 1800.0), (1800.0, 2700.0), (7200.0, 10800.0), (0.0, 86400.0), (1e9, 24 * 86400)]
)
def test_process_groups_time_out_after_the_watchdog(watchdog_s: float, groups_s: float) -> None:
    environ: dict[str, str] = {}
    assert group_timeout(watchdog_s, environ) == timedelta(seconds=groups_s)
    assert int(environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) == groups_s
    assert int(groups_s) * 1000 < 2**31, "torch counts it in milliseconds, in 32 bits"
    environ = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "77"}
    group_timeout(watchdog_s, environ)
    assert environ == {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "77"}


def test_the_flight_record_is_written_where_the_user_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    prepare_traces(tmp_path / "run" / "nccl", environ)
    assert write_trace(3, environ) is None, "there is no NCCL"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    bindings = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(bindings, "_dump_nccl_trace", lambda: b"record", raising=False)
    path = write_trace(3, environ)
    assert path is not None and path == tmp_path / "run" / "nccl" / "rank3" and path.read_bytes() == b"record"
    users = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "mine_")}
    prepare_traces(tmp_path / "other", users)
    assert write_trace(0, users) == tmp_path / "mine_0" and not (tmp_path / "other").exists()
    assert write_trace(0, {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "missing" / "rank")}) is None
    assert write_trace(0, {}) is None
