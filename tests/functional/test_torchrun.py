"""Whole runs of pretrain_vlm.py under torchrun: what comes out, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from tests.functional.forked import Forked, pretrain
from tests.functional.programs import CONFIG, LEARNING_RATE, PROGRAM, started
from tests.functional.refusals import unreadable_image
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.oracle import Oracle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=1))
    write_data(tmp_path, 8)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def run(folder: Path, *flags: str, ranks: int = 2, timeout_s: float = 90) -> tuple[int, str]:
    with started(folder, *flags, ranks=ranks) as process:
        output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def wait_for_step(process: subprocess.Popen[str], text: str) -> None:
    """Read what the run prints up to a line with `text`."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the run ended before it printed {text!r}")


def test_sgd_run_equals_transformers(folder: Path) -> None:
    status, output = run(folder)
    assert status == 0, output
    oracle = Oracle.load(folder / "model", folder / "data.jsonl")
    losses, gradients, before = [], dict[str, torch.Tensor](), oracle.weights()
    for step in range(2):
        loss, gradients = oracle.step(range(4 * step, 4 * step + 4))
        losses.append(loss)
        with torch.no_grad():
            for name, weight in zip(gradients, oracle.model.parameters(), strict=True):
                weight -= LEARNING_RATE * gradients[name]
    exported = load_file(folder / "out/model.safetensors")
    assert exported.keys() == gradients.keys()
    for name, weight in oracle.weights().items():
        assert (exported[name] - weight).norm() <= 1e-3 * (weight - before[name]).norm() + 1e-6 * weight.norm(), name
    records = [json.loads(line) for line in (folder / "log/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    required = {"loss", "grad_norm", "lr", "tokens", "images", "step_time_s", "tokens_per_s", "peak_memory_bytes"}
    assert required <= records[0].keys()
    assert list((folder / "log").glob("events.out.tfevents*"))
    assert output.count("step 1/2") == 1, "one rank prints"


def test_export_loads_without_a_warning(folder: Path) -> None:
    flags = "--config", str(folder / "config.yaml"), "--model.dtype", "bfloat16", "--train.iters", "1"
    with Forked(folder / "said", pretrain, [flags, flags]) as run:
        run.require_success()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, info = cast(Any, Qwen2_5_VLForConditionalGeneration).from_pretrained(
            folder / "out", output_loading_info=True
        )
    assert not any(info.values())
    assert model.dtype == torch.bfloat16


def test_an_error_is_reported_once(folder: Path) -> None:
    unreadable_image(folder)
    start = time.monotonic()
    status, output = run(folder)
    assert status != 0
    assert output.count("error: ") == 1, output
    assert "data.jsonl:5" in output and "4_0.png" in output
    assert "step 1/2" in output, "the first step is not touched by an image of the second"
    assert time.monotonic() - start < 60
    assert not (folder / "out").exists()


@pytest.mark.long  # With our launcher: `test_stopping`.
def test_ctrl_c_ends_all_ranks(folder: Path) -> None:
    with started(folder, "--train.iters", "100000") as process:
        wait_for_step(process, "step      3/100000")
        ranks = [
            c for c in psutil.Process(process.pid).children(recursive=True) if "pretrain_vlm" in " ".join(c.cmdline())
        ]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


def test_one_process_needs_no_torchrun(folder: Path) -> None:
    evaluation = "--eval.datasets d --eval.interval 1"
    flags = f"--vision-parallel dp:1 --text-parallel dp:1 --train.iters 1 {evaluation}".split()
    command = [sys.executable, str(PROGRAM), "--config", str(folder / "config.yaml"), *flags]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert finished.returncode == 0, finished.stderr
    # PyTorch for CUDA says this where it finds nvcc and no GPU.
    assert [line for line in finished.stderr.splitlines() if "No CUDA runtime is found" not in line] == []
    assert (folder / "out/config.json").is_file()
    step, measured = map(json.loads, (folder / "log/metrics.jsonl").read_text().splitlines())
    assert (step["step"], measured["step"], measured["eval_dataset"]) == (1, 1, "d")
    assert measured["eval_loss"] > 0 and measured["eval_samples"] == measured["eval_asked"] == 8
    assert 0 <= measured["eval_exact_match"] <= 1
