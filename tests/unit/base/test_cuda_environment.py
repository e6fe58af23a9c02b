"""What CUDA, the allocator and NCCL find in the environment, and when."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_hetero.base.environment import group_timeout, prepare_environment, prepare_traces, write_trace


def test_too_late_is_said_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    environ = {"RANK": "0", "PYTORCH_ALLOC_CONF": "x:1"}
    with pytest.warns(UserWarning, match="CUDA_DEVICE_MAX_CONNECTIONS") as told:
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
    assert told.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 ") and "\n" not in told


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
    assert write_trace(3, environ) == "", "there is no NCCL"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    bindings = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(bindings, "_dump_nccl_trace", lambda: b"record", raising=False)
    path = tmp_path / "run" / "nccl" / "rank3"
    assert write_trace(3, environ) == f"rank 3: wrote its last NCCL operations to {path}"
    assert path.read_bytes() == b"record"
    users = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "mine_")}
    prepare_traces(tmp_path / "other", users)
    assert write_trace(0, users).endswith(f"{tmp_path}/mine_0") and not (tmp_path / "other").exists()
    assert write_trace(0, {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "missing" / "rank")}) == ""
    assert write_trace(0, {}) == ""
