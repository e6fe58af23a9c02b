"""A family in one folder (tests/support/toy_family) plans, trains, saves, resumes and exports, in several layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from examples.demo.model import DemoSizes
from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import Estimate
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.registry import ENTRY_POINTS, FAMILIES, family_of
from pretrain_vlm import build_run
from tests.support.matrix import thinned
from tests.support.pool import Pools, platform
from tests.support.toy_family.family import TOY, known, write_data, write_model

ROOT = Path(__file__).parents[2]
MakeFlags = Callable[..., list[str]]
LAYOUTS = [
    ("dp:2", "tp:2,xp:2", ""),
    ("sp:2", "dp:2,xp:2", "--train.micro_batch_size 1"),
    ("dp:4", "tp:2,dp:2,xp:4", "--ear-zero 3"),
    ("cp:2,dp:2", "cp:2,pp:2,xp:2", "--train.micro_batch_size 2"),
    ("dp:2@0-1", "tp:2,xp:1@2-3", "--text-recompute full"),
    ("dp:4", "tp:2,dp:2,xp:2", "--text-zero 3 --train.micro_batch_size 1"),
    ("dp:4", "dp:4,xp:2", "--text-zero 2 --text-recompute full"),
    ("dp:2", "dp:2,xp:2", "--text-zero 3"),  # one rank to share its slots with, itself
    ("dp:2", "tp:2,xp:1", "--text-zero 3"),  # one rank to share all else with
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and records of it."""
    made = tmp_path_factory.mktemp("toy")
    (made / "model").mkdir()
    sizes = DemoSizes(vision_layers=2, vision_hidden=16, vision_heads=2, text_layers=2, text_hidden=32)
    write_model(made / "model", ["what is it red blue"] * 4, sizes, 0)
    write_data(made, 8)
    return made


def flags_of(folder: Path, log: Path, ear: str, text: str, more: str = "") -> list[str]:
    return (
        f"--model.hf_path {folder}/model --model.dtype float32 --data.registry.d.annotations {folder}/data.jsonl "
        f"--data.registry.d.images {folder}/tones --data.datasets d --data.shuffle false --data.workers 0 "
        f"--train.global_batch_size 4 --log.dir {log} --optimizer.schedule constant --optimizer.lr 1e-2 "
        f"--ear-parallel {ear} --text-parallel {text} {more}"
    ).split()


@pytest.fixture
def make_flags(folder: Path, tmp_path: Path) -> MakeFlags:
    """`make_flags(ear layout, text layout, more flags)`: a command line."""
    return partial(flags_of, folder, tmp_path / "log")


def train(flags: list[str], target: Path) -> dict[str, Any]:
    """Train from where the run resumes, save, and export: losses, norms, and the exported weights on the first rank."""
    with known():
        run, losses, norms = build_run(load_config(flags), platform()), [], []
        with run.writer:
            for step, batch, _ in run.batches():
                metrics = run.trainer.train_step(step, batch)
                run.writer.write(metrics)
                losses.append(metrics.loss)
                norms.append(metrics.grad_norm)
                run.saver.after(step, metrics.stopping)
            run.export(target)
        weights = load_file(target / "model.safetensors") if dist.get_rank() == 0 else {}
        start = run.resumed.step
    return {"from": start, "losses": losses, "norms": norms, "weights": {n: w.numpy() for n, w in weights.items()}}


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> dict[str, Any]:
    """Two steps on one rank."""
    made = tmp_path_factory.mktemp("alone")
    flags = flags_of(folder, made / "log", "dp:1", "dp:1", "--train.iters 2")
    return pools(1).run(train, flags, made / "export")[0]


@pytest.mark.parametrize("ear, text, more", thinned(LAYOUTS, 4))
def test_it_trains_saves_resumes_and_exports(
    ear: str,
    text: str,
    more: str,
    folder: Path,
    make_flags: MakeFlags,
    tmp_path: Path,
    alone: dict[str, Any],
    pools: Pools,
) -> None:
    ranks = 4 if "4" in ear + text or "pp" in text or "@" in text else 2
    saving = f"{more} --checkpoint.dir {tmp_path}/checkpoints --checkpoint.interval 1 --train.iters"
    first = pools(ranks).run(train, make_flags(ear, text, f"{saving} 1"), tmp_path / "one")[0]
    second = pools(2).run(train, make_flags("dp:2", "dp:2,xp:1", f"{saving} 2"), tmp_path / "two")[0]
    assert (first["from"], second["from"]) == (0, 1)
    for what in ("losses", "norms"):
        np.testing.assert_allclose([*first[what], *second[what]], alone[what], rtol=1e-4)
    assert second["weights"].keys() == alone["weights"].keys()
    (copied,) = {"ahead.table"} & second["weights"].keys()
    original = load_file(folder / "model" / "model.safetensors")[copied].numpy()
    assert second["weights"][copied].dtype == original.dtype == np.float16
    np.testing.assert_array_equal(second["weights"][copied], original)
    for name, weight in alone["weights"].items():
        np.testing.assert_allclose(second["weights"][name], weight, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
    "ear, text, more",
    thinned(
        [("dp:4", "tp:2,dp:2,xp:4", ""), ("dp:2@0-1", "pp:2,dp:2,xp:1", ""), ("dp:4", "dp:4,xp:2", "--text-zero 3")], 3
    ),
)
def test_its_exchanges_keep_nccls_rules(
    ear: str, text: str, more: str, make_flags: MakeFlags, tmp_path: Path, alone: dict[str, Any], rules_pools: Pools
) -> None:
    """Where the ranks of two views are the same, their sums share a communicator."""
    flags = make_flags(ear, text, f"{more} --train.iters 2")
    found = rules_pools(4).run(train, flags, tmp_path / "export")[0]
    np.testing.assert_allclose(found["norms"], alone["norms"], rtol=1e-4)


def test_plans_count_each_view(make_flags: MakeFlags) -> None:
    """Four slots of two matrices of 16 x 32 are divided over `xp`, and so are their optimizer's states."""
    with known():
        one, two, four = (
            Estimate.of(load_config(make_flags("dp:4", f"tp:2,dp:2,xp:{xp}")), 4).parameters["text", 0]
            for xp in (1, 2, 4)
        )
    elements = 4 * 2 * 16 * 32
    assert one.parameters - two.parameters == one.trained - two.trained == elements // 2
    assert two.parameters - four.parameters == elements // 4
    assert (two.gradients - four.gradients) // 4 == elements // 4
    assert one.optimizer == two.optimizer == four.optimizer


def test_plans_share_the_weights_of_each_view(make_flags: MakeFlags) -> None:
    """Of the slots each rank has one half over `xp`, and of that one half over `xdp`; of all else a quarter."""
    with known():
        plans = [Estimate.of(load_config(make_flags("dp:4", "dp:4,xp:2", f"--text-zero {zero}")), 4) for zero in (1, 3)]
    whole, shared = (plan.parameters["text", 0] for plan in plans)
    slots = 4 * 2 * 16 * 32 // 2
    everything_else = whole.parameters - slots
    assert shared.weights == pytest.approx(4 * (slots // 2 + everything_else // 4), rel=0.01)
    assert whole.running == 0 < shared.running


def test_a_package_adds_it_by_its_entry_point(make_flags: MakeFlags, tmp_path: Path) -> None:
    """In a process of its own, where the package is found."""
    assert "toy" not in FAMILIES
    metadata = tmp_path / "toy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntoy = tests.support.toy_family.family:TOY\n")
    line = [sys.executable, str(ROOT / "pretrain_vlm.py"), "--plan", "--world-size", "2"]
    line += make_flags("dp:2", "tp:2,xp:2")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(line, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0 and "samples" in done.stdout, done.stdout + done.stderr


def test_zero_without_ranks_to_share_with_in_any_view_is_refused(make_flags: MakeFlags) -> None:
    with known(), pytest.raises(UserError, match="modules.text.zero.*the same weights"):
        JobSpec.of(load_config(make_flags("dp:2", "tp:2,xp:2", "--text-zero 2")), 2)


def test_it_is_known_nowhere_else() -> None:
    with known():
        assert family_of("toy") is TOY
    with pytest.raises(KeyError):
        family_of("toy")
