"""Optimizer states in other numbers: `split` trains as fp32 masters do, bit by bit; all resume exactly, and one
another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_hetero.step import number_formats, optimizer
from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.checks import require_exact_resume, same
from tests.functional.checkpoint.runs import flags, fused, train
from tests.support.matrix import long, thinned
from tests.support.pool import Pools
from tests.support.runs import build


def train_fused(flags: list[str], compiled: bool = False, until: int | None = None) -> dict[str, Any]:
    """As `train`."""
    with fused(compiled=compiled):
        return train(flags, None, until)


def copies(flags: list[str]) -> dict[tuple[str, ...], np.ndarray]:
    """Train; of the text module what this rank holds of each stored tensor, by its name and rows and columns."""
    run = build(flags)
    for step, batch, _ in run.batches():
        run.trainer.train_step(step, batch)
    [module] = [module for module in run.trainer.optimizer.modules if module.name == "text"]
    return {
        tuple(map(str, tensor_slice.rectangle)): module.whole_weight(name)[tensor_slice.place].float().numpy()
        for name, slices in module.local_map.items()
        for tensor_slice in slices
        if not tensor_slice.empty
    }


def copies_fused(flags: list[str]) -> dict[tuple[str, ...], np.ndarray]:
    """As `copies`."""
    with fused(compiled=False):
        return copies(flags)


def in_pieces(size: int, flags: list[str], until: int | None = None) -> dict[str, Any]:
    """As `train`, with parameters updated, read and written in pieces of so many elements."""
    with mock.patch.object(optimizer, "PIECE", size), mock.patch.object(number_formats, "PIECE", size):
        return train(flags, None, until)


BF16 = "--model.dtype bfloat16 --data.workers 0 --train.micro_batch_size 2"


def of(master: str, moments: str = "float32", gradients: str = "float32", modules: str = "vision text") -> str:
    chosen = {"master": master, "moments": moments, "gradients": gradients}
    return " ".join(f"--{m}-precision.{name} {value}" for m in modules.split() for name, value in chosen.items())


LAYOUTS = [
    ("plain", "sp:2", "tp:2", 2),
    ("deep", "dp:2", "pp:2", 2),
    ("deep", "dp:2@0-1", "tp:2@2-3", 4),
    ("qwen3-tied", "tp:2,dp:2", "pp:2,dp:2", 4),
    ("moe", "dp:2", "dp:2,ep:2", 2),
]
SPLIT = of("split")
SETTINGS = {
    "split": SPLIT,
    "split, bf16 moments and gradients": of("split", "bfloat16", "bfloat16"),
    "8-bit moments": of("float32", "8bit"),
    "bf16 weights, 8-bit moments": of("none", "8bit", "bfloat16"),
    "text alone, offloaded": of("split", "bfloat16", modules="text") + " --text-offload.states true",
    "fp32, offloaded": "--text-offload.states true --vision-offload.states true",
}


@pytest.mark.parametrize(
    "model, vision, text, ranks, steps", [(*LAYOUTS[0], 10), *long((*layout, 100) for layout in LAYOUTS)]
)
def test_split_masters_train_as_fp32_masters(
    model: str, vision: str, text: str, ranks: int, steps: int, folders: Path, tmp_path: Path, pools: Pools
) -> None:
    """So many steps, and of those of `split` half before a resume and half after it."""
    half = steps // 2
    micro_batch = 2 if "dp:2" in text else 4  # One micro-batch a step.
    more = f"{BF16} --train.micro_batch_size {micro_batch} --train.iters {steps}"
    more += f" --checkpoint.interval {half} --checkpoint.keep_last 9"
    line = flags(folders, tmp_path / "fp32", vision, text, more, model)
    expected = pools(ranks).run(jobs.train, line)[0]
    line = flags(folders, tmp_path / "split", vision, text, f"{more} {SPLIT}", model)
    first = pools(ranks).run(jobs.train, line, None, half)[0]
    second = pools(ranks).run(jobs.train, line)[0]
    assert (first["from"], second["from"]) == (0, half) and len(expected["losses"]) == steps
    assert first["losses"] + second["losses"] == expected["losses"]
    for step in (f"step-{half:08d}", f"step-{steps:08d}"):
        same(tmp_path / "fp32/checkpoints" / step, tmp_path / "split/checkpoints" / step, but="")
    assert all(np.array_equal(second["weights"][name], value) for name, value in expected["weights"].items())


FUSED = {
    "no masters, offloaded": ("plain", "sp:2", "tp:2", f"{of('none', 'bfloat16')} --text-offload.states true"),
    "fp32": ("plain", "dp:2", "tp:2", ""),
    "split, bf16 moments and gradients": ("deep", "dp:2", "pp:2", SETTINGS["split, bf16 moments and gradients"]),
    "ZeRO": ("plain", "dp:2", "dp:2", f"--vision-zero 2 --text-zero 3 {of('split')} --optimizer.lr_projector 0.001"),
}


@pytest.mark.parametrize("name", thinned(FUSED, 5))
def test_updates_in_one_pass_train_alike(name: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    """As GPUs make them; and resume exactly."""
    model, vision, text, setting = FUSED[name]
    more = f"{BF16} --train.iters 6 --checkpoint.interval 100 {setting}"
    steps, once, cut = (flags(folders, tmp_path / run, vision, text, more, model) for run in ("steps", "once", "cut"))
    expected, found = pools(2).run(jobs.train, steps)[0], pools(2).run(train_fused, once)[0]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-3)
    for parameter, value in found["weights"].items():
        np.testing.assert_allclose(value, expected["weights"][parameter], rtol=2**-6, atol=2e-3)
    first = pools(2).run(train_fused, cut, False, 3)[0]
    assert first["losses"] + pools(2).run(train_fused, cut)[0]["losses"] == found["losses"]
    same(*(tmp_path / run / "checkpoints/step-00000006" for run in ("once", "cut")), but="")


@pytest.mark.parametrize("compiled", long([False, True]))
def test_split_masters_are_those_in_fp32_in_one_pass_too(
    compiled: bool, folders: Path, tmp_path: Path, pools: Pools
) -> None:
    found = []
    for name, setting in (("fp32", ""), ("split", SPLIT)):
        more = f"{BF16} --train.iters 20 --checkpoint.interval 100 {setting}"
        line = flags(folders, tmp_path / name, "sp:2", "tp:2", more)
        found.append(pools(2).run(train_fused, line, compiled)[0])
    assert found[0]["losses"] == found[1]["losses"]
    same(*(tmp_path / name / "checkpoints/step-00000020" for name in ("fp32", "split")), but="")


@pytest.mark.parametrize("name", thinned(SETTINGS, 7))
def test_a_resume_is_exact(name: str, folders: Path, tmp_path: Path, pools: Pools) -> None:
    more = f"{BF16} --train.iters 4 --checkpoint.interval 100 {SETTINGS[name]}"
    require_exact_resume(pools, tmp_path, lambda run: flags(folders, tmp_path / run, "sp:2", "tp:2", more))


def _require_close(key: str, value: torch.Tensor, before: torch.Tensor, setting: str) -> None:
    """As close as the numbers of `setting` allow, which only those that round change."""
    if "exp_avg" in key and "8bit" in setting:
        if "exp_avg_sq" in key:
            value, before = value.sqrt(), before.sqrt()
        # A level is off by up to 7 % of its number. Blocks of biases hold others of the layer, which may be larger.
        assert key.endswith("bias") or (value - before).norm() <= 0.05 * before.norm(), key
        return
    rounds = ("exp_avg" in key and "bfloat16" in setting) or (key.startswith("weights/") and "master none" in setting)
    torch.testing.assert_close(value, before, rtol=2**-8 if rounds else 0.0, atol=0.0)


@pytest.mark.long
def test_every_setting_resumes_every_other(folders: Path, tmp_path: Path, pools: Pools) -> None:
    """In other layouts; what is kept in as many bits has the same values, and what is rounded is said."""
    settings = ["", *SETTINGS.values(), ""]
    layouts = [("sp:2", "tp:2"), ("dp:2", "pp:2"), ("dp:1@0", "dp:1@1")]
    fp32, written = [], tmp_path
    for turn, setting in enumerate(settings):
        vision, text = layouts[turn % len(layouts)]
        resume = f"--checkpoint.resume {written}" if turn else ""
        more = f"{BF16} --train.iters {2 * turn + 2} --checkpoint.interval 100 {setting} {resume}"
        line = flags(folders, tmp_path / f"{turn}", vision, text, more, "deep")
        copy = tmp_path / f"{turn}/copy" if turn else None
        found = pools(2).run(jobs.train, line, copy)[0]
        assert found["from"] == 2 * turn and np.isfinite(found["losses"]).all()
        if turn:
            before, loaded = jobs.tensors(written), jobs.tensors(copy / f"step-{2 * turn:08d}")  # pyright: ignore[reportOptionalOperand]
            loaded = {key: value for key, value in loaded.items() if not key.startswith("random/")}
            assert loaded.keys() == {key for key in before if not key.startswith("random/")}
            for key, value in loaded.items():
                _require_close(key, value.float(), before[key].float(), setting)
        notes = " ".join(found["notes"])
        if turn:
            changed = ("8bit" in setting) != ("8bit" in settings[turn - 1])
            assert bool(re.search(r"text\.moments changed from (8bit to|\w+ to 8bit)", notes)) == changed
        fp32.append(jobs.tensors(tmp_path / f"{turn}/checkpoints/step-{2 * turn + 2:08d}"))
        written = tmp_path / f"{turn}/checkpoints/step-{2 * turn + 2:08d}"
    assert {value.dtype for key, value in fp32[-1].items() if "/" in key and key.startswith(("weights", "exp"))} == {
        torch.float32
    }


@pytest.mark.parametrize(
    "job, moments, model, vision, text",
    thinned(
        [
            (copies, "8bit", "deep", "dp:4", "tp:2,pp:2"),  # The embedding is on both stages.
            (copies, "bfloat16", "deep", "dp:4", "tp:2,pp:2"),
            (copies_fused, "bfloat16", "deep", "dp:4", "tp:2,pp:2"),
            (copies_fused, "bfloat16", "plain", "sp:4", "tp:4"),  # Each head of keys and values is on two ranks.
        ],
        3,
    ),
)
def test_copies_stay_equal(
    job: Callable[..., Any],
    moments: str,
    model: str,
    vision: str,
    text: str,
    folders: Path,
    tmp_path: Path,
    pools: Pools,
) -> None:
    """What is rounded stochastically is rounded alike on all ranks that hold it."""
    more = f"{BF16} --train.iters 3 --checkpoint.interval 100 {of('none', moments)}"
    ranks = pools(4).run(job, flags(folders, tmp_path, vision, text, more, model))
    seen: dict[tuple[str, ...], np.ndarray] = {}
    shared = set()
    for held in ranks:
        for key, value in held.items():
            if key in seen:
                shared.add(key[0])
                assert np.array_equal(seen[key], value), key
            seen[key] = value
    assert any("norm" in name for name in shared)
    assert any(("embed_tokens" if model == "deep" else "k_proj") in name for name in shared)


@pytest.mark.long
def test_pieces_make_no_difference(folders: Path, tmp_path: Path, pools: Pools) -> None:
    """Updates, checkpoints and resumes in pieces of 512 elements, of which each parameter has many."""
    found = {}
    for name, setting in {"fp32": "", "split": SPLIT, "8bit": of("split", "8bit")}.items():
        more = f"{BF16} --train.iters 4 --checkpoint.interval 100 {setting}"
        whole = flags(folders, tmp_path / name, "dp:2", "tp:2", more)
        found[name] = pools(2).run(in_pieces, 512, whole)[0]
        cut = flags(folders, tmp_path / f"{name}-cut", "dp:2", "tp:2", more)
        first = pools(2).run(in_pieces, 512, cut, 2)[0]
        second = pools(2).run(in_pieces, 512, cut)[0]
        assert first["losses"] + second["losses"] == found[name]["losses"]
        last = "checkpoints/step-00000004"
        same(tmp_path / name / last, tmp_path / f"{name}-cut" / last, but="")
        counts = {float(v) for key, v in jobs.tensors(tmp_path / name / last).items() if key.startswith("step/")}
        assert counts == {4.0}, "of a parameter in many pieces"
    same(*(tmp_path / name / "checkpoints/step-00000004" for name in ("fp32", "split")), but="")
    more = f"{BF16} --train.iters 4 --checkpoint.interval 100 {of('split', '8bit')}"
    whole = pools(2).run(jobs.train, flags(folders, tmp_path / "at-once", "dp:2", "tp:2", more))[0]
    np.testing.assert_allclose(whole["losses"], found["8bit"]["losses"], rtol=0.02)
