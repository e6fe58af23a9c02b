"""What a configuration comes to: edges of a model whose rows enter at several depths, and the schedules for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.job.job import JobSpec

MODEL = Path(__file__).parents[2] / "examples" / "models" / "qwen3_vl_8b"
"""Rows of layers 8, 16 and 24 of its encoder enter after layers 0, 1 and 2 of its language model."""


def job(vision: str, text: str, world: int, *more: str, model: Path = MODEL) -> JobSpec:
    flags = f"--model.hf_path {model} --data.registry.d.annotations d.json --data.datasets d --log.dir log"
    batch = "--train.global_batch_size 8 --train.micro_batch_size 1 --train.iters 1"
    layouts = f"--vision-parallel {vision} --text-parallel {text}"
    return JobSpec.of(load_config([*flags.split(), *batch.split(), *layouts.split(), *more]), world)


def test_outputs_that_share_both_stages_cross_together() -> None:
    outputs = ("rows", "deepstack.0", "deepstack.1", "deepstack.2")
    assert {str(edge): names for edge, names in job("dp:8", "tp:8", 8).edges.items()} == {"vision>text": outputs}
    split = job("pp:3@0-2", "pp:2@3-4", 5, "--parallel_layers.text", "2", "34").edges
    assert {str(edge): names for edge, names in split.items()} == {
        "vision>text": ("rows",),
        "vision.0>text.0": ("deepstack.0",),
        "vision.1>text.0": ("deepstack.1",),
        "vision.2>text.1": ("deepstack.2",),
    }


def test_some_stage_has_as_many_layers_as_are_recomputed() -> None:
    uneven = ["--parallel_layers.text", "10", "26", "--model.recompute.text"]
    job("dp:2", "pp:2", 2, *uneven, "26")
    with pytest.raises(UserError, match=r"model.recompute.text .*first 27 layers.*at most 26.*`full`"):
        job("dp:2", "pp:2", 2, *uneven, "27")


def test_copies_of_a_head_are_not_rounded_with_other_elements() -> None:
    moments = "--precision.text.moments"
    job("dp:16", "tp:16", 16, moments, "bfloat16")
    job("dp:16", "tp:8,dp:2", 16, moments, "8bit")
    with pytest.raises(UserError, match=r"precision.text.moments .*8bit.*8 key/value heads.*a tp that divides 8"):
        job("dp:16", "tp:16", 16, moments, "8bit")
    odd = Path(MODEL).parent / "qwen2_5_vl_7b"  # 28 heads, 4 of keys and values.
    for name, value in (("moments", "bfloat16"), ("master", "none")):
        with pytest.raises(UserError, match=rf"precision.text.{name} .*4 key/value heads.*a tp that divides 4"):
            job("dp:7", "tp:7", 7, f"--precision.text.{name}", value, model=odd)
    job("dp:7", "tp:7", 7, "--precision.text.master", "split", model=odd)


def test_an_encoder_that_runs_ahead_feeds_virtual_stages_of_the_first_rank_only() -> None:
    virtual = ["--schedule.virtual_stages", "2"]
    late = job("dp:1@0", "pp:2@1-2", 3, *virtual, "--parallel_layers.text", "2", "12", "11", "11")
    with pytest.raises(UserError, match="rows of vision that enter stage 1") as error:
        _ = late.schedule
    suggested = re.search(r"try --parallel_layers\.text ([\d ]+)", str(error.value), re.IGNORECASE)
    assert suggested is not None
    fits = job("dp:1@0", "pp:2@1-2", 3, *virtual, "--parallel_layers.text", *suggested[1].split())
    assert fits.schedule.edges == tuple(fits.edges)
    colocated = job("dp:2", "pp:2", 2, *virtual, "--parallel_layers.text", "2", "12", "11", "11")
    assert len(colocated.schedule.edges) == 2


def test_a_module_that_patterns_freeze_is_frozen() -> None:
    whole = job("dp:8", "tp:8", 8, "--model.freeze", "model.visual.*", "model.language_model.layers.*.mlp.*")
    assert whole.frozen.modules(["vision", "text"]) == ["vision"] and not whole.schedule.module["vision"].backward
    assert job("dp:8", "tp:8", 8, "--model.freeze", "vision").schedule.module["vision"].backward
    for flags, found in (
        (["--model.freeze", "visual.*", "--zero.vision", "2"], "zero.vision .*vision is frozen and has no gradients"),
        (["--model.train", "text", "--model.recompute.vision", "full"], "model.recompute.vision .* no backward pass"),
        (["--model.freeze", "visual.blok*"], r"found `visual.blok\*`"),
    ):
        with pytest.raises(UserError, match=found):
            job("dp:8", "tp:8", 8, *flags)
