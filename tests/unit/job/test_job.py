"""What a configuration comes to: edges of a model whose rows enter at several depths, and the schedules for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.job.job import JobSpec

MODEL = Path(__file__).parents[3] / "examples" / "models" / "qwen3_vl_8b"
"""Rows of layers 8, 16 and 24 of its encoder enter after layers 0, 1 and 2 of its language model."""


def job(vision: str, text: str, world: int, *more: str, model: Path = MODEL) -> JobSpec:
    flags = f"--model.hf_path {model} --data.registry.d.annotations d.json --data.datasets d --log.dir log"
    batch = "--train.global_batch_size 8 --train.micro_batch_size 1 --train.iters 1"
    layouts = f"--vision-parallel {vision} --text-parallel {text}"
    return JobSpec.of(load_config([*flags.split(), *batch.split(), *layouts.split(), *more]), world)


def test_outputs_that_share_both_stages_cross_together() -> None:
    outputs = ("rows", "deepstack.0", "deepstack.1", "deepstack.2")
    assert {str(edge): names for edge, names in job("dp:8", "tp:8", 8).edges.items()} == {"vision>text": outputs}
    split = job("pp:3@0-2", "pp:2@3-4", 5, "--text-layers", "2", "34").edges
    assert {str(edge): names for edge, names in split.items()} == {
        "vision>text": ("rows",),
        "vision.0>text.0": ("deepstack.0",),
        "vision.1>text.0": ("deepstack.1",),
        "vision.2>text.1": ("deepstack.2",),
    }


def test_some_stage_has_as_many_layers_as_are_recomputed() -> None:
    uneven = ["--text-layers", "10", "26", "--text-recompute"]
    job("dp:2", "pp:2", 2, *uneven, "26")
    with pytest.raises(UserError, match=r"modules.text.recompute .*first 27 layers.*at most 26.*`full`"):
        job("dp:2", "pp:2", 2, *uneven, "27")


def test_a_rate_that_nothing_uses_is_refused() -> None:
    rates = "--optimizer.lr 1e-3 --vision-lr 1e-4 --optimizer.lr_projector 1e-4".split()
    job("dp:1", "dp:1", 1, *rates)
    job("dp:1", "dp:1", 1, *rates, "--text-lr", "1e-4", "--optimizer.min_lr", "1e-6")
    with pytest.raises(UserError, match=r"optimizer\.lr .*: found 0\.001, expected no value"):
        job("dp:1", "dp:1", 1, *rates, "--text-lr", "1e-4")


def test_copies_of_a_head_are_not_rounded_with_other_elements() -> None:
    moments = "--text-precision.moments"
    job("dp:16", "tp:16", 16, moments, "bfloat16")
    job("dp:16", "tp:8,dp:2", 16, moments, "8bit")
    with pytest.raises(UserError, match=r"text.precision.moments .*8bit.*8 key/value heads.*a tp that divides 8"):
        job("dp:16", "tp:16", 16, moments, "8bit")
    odd = Path(MODEL).parent / "qwen2_5_vl_7b"  # 28 heads, 4 of keys and values.
    for name, value in (("moments", "bfloat16"), ("master", "none")):
        with pytest.raises(UserError, match=rf"modules.text.precision.{name} .*4 key/value heads.*a tp that divides 4"):
            job("dp:7", "tp:7", 7, f"--text-precision.{name}", value, model=odd)
    job("dp:7", "tp:7", 7, "--text-precision.master", "split", model=odd)
    delta = Path(MODEL).parent / "qwen3_5_27b"  # 4 heads of keys and values, 16 of keys in delta nets.
    job("dp:8", "tp:8", 8, "--text-precision.master", "none", model=delta)
    for name, value in (("moments", "bfloat16"), ("master", "none")):
        with pytest.raises(UserError, match=rf"precision.{name} .*16 key/value heads.*a tp that divides 16"):
            job("dp:8@0-7", "tp:12", 12, f"--text-precision.{name}", value, model=delta)


def test_an_encoder_that_runs_ahead_feeds_virtual_stages_of_the_first_rank_only() -> None:
    virtual = ["--schedule.virtual_stages", "2"]
    late = job("dp:1@0", "pp:2@1-2", 3, *virtual, "--text-layers", "2", "12", "11", "11")
    with pytest.raises(UserError, match="rows of vision that enter stage 1") as error:
        _ = late.schedule
    suggested = re.search(r"try --text-layers ([\d ]+)", str(error.value), re.IGNORECASE)
    assert suggested is not None
    fits = job("dp:1@0", "pp:2@1-2", 3, *virtual, "--text-layers", *suggested[1].split())
    assert fits.schedule.edges == tuple(fits.edges)
    colocated = job("dp:2", "pp:2", 2, *virtual, "--text-layers", "2", "12", "11", "11")
    assert len(colocated.schedule.edges) == 2


def test_a_module_that_patterns_freeze_is_frozen() -> None:
    whole = job("dp:8", "tp:8", 8, "--model.freeze", "model.visual.*", "model.language_model.layers.*.mlp.*")
    assert [name for name, module in whole.modules.items() if not module.trains] == ["vision"]
    assert not whole.schedule.module["vision"].backward
    assert job("dp:8", "tp:8", 8, "--model.freeze", "vision").schedule.module["vision"].backward
    for flags, found in (
        (["--model.freeze", "visual.*", "--vision-zero", "2"], "modules.vision.zero .*is frozen"),
        (["--model.train", "text", "--vision-recompute", "full"], "modules.vision.recompute .* no backward pass"),
        (["--model.freeze", "visual.blok*"], r"found `visual.blok\*`"),
    ):
        with pytest.raises(UserError, match=found):
            job("dp:8", "tp:8", 8, *flags)


FP32, SGD = "--model.dtype float32", "--optimizer.name sgd"
DETAIL = f"--detail-hf_path {MODEL} --detail-token <|video_pad|>"
REFUSED = [
    (f"{FP32} --text-precision.master split", "modules.text.precision.master .*are their own masters"),
    (f"{FP32} --text-precision.gradients bfloat16", "modules.text.precision.gradients .*Remove it, or set"),
    ("--model.freeze text --text-precision.moments bfloat16", "modules.text.precision.moments .*text is frozen"),
    ("--model.freeze text --text-offload.states true", "modules.text.offload.states .*text is frozen"),
    (f"{FP32} {SGD} --text-offload.states true", "modules.text.offload.states .*has no states"),
    (f"{SGD} --text-precision.moments 8bit", "modules.text.precision.moments .*sgd, which has no"),
    (
        "--model.freeze vision --vision-offload.activations true",
        r"modules.vision.offload.activations \(--vision-offload.activations\).*no backward pass.*or train vision",
    ),
    ("--vision-lr 1e-3 --model.freeze vision", r"modules.vision.lr \(--vision-lr\).*leave vision frozen"),
    (f"{DETAIL} --detail-lr 1e-3 --model.freeze detail", "modules.detail.lr .*leave detail frozen"),
    ("--text-lr 1e-3 --model.train vision", "modules.text.lr .*leave text frozen"),
    ("--optimizer.lr_projector 1e-3 --model.freeze projector", "optimizer.lr_projector .*leave projector frozen"),
    *(
        (f"--vision-recompute {how} --model.freeze vision projector", "modules.vision.recompute .*no backward pass")
        for how in ("full", "selective", "2")
    ),
    ("--visoin-recompute full", r"modules.visoin \(--visoin-recompute\): .*`visoin` \(did you mean `vision`\?\)"),
    ("--model.freeze vision text projector", "model.freeze.*leaves? nothing to train"),
    ("--model.freeze head", "model.freeze .*vision, projector, text"),
    ("--model.train txet", "model.train .*did you mean `text`"),
    (f"{DETAIL} --model.freeze detail_projecter", "did you mean `detail_projector`"),
    (f"{DETAIL} --model.freeze vision projector detail detail_projector text", "leaves? nothing to train"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_settings_of_modules_that_do_not_fit_are_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        job("dp:8", "tp:8", 8, *flags.split())


@pytest.mark.parametrize("flags", [
    "--optimizer.lr_projector 1e-3 --model.freeze vision",
    f"{DETAIL} --detail-lr 1e-3 --optimizer.lr_projector 1e-3 --model.freeze vision projector",
    "--vision-recompute full --model.freeze vision",
    "--text-recompute full --text-offload.activations true --model.freeze text",
    "--text-recompute 3 --text-chunk 0 --vision-chunk 512 --model.freeze vision projector",
    f"{SGD} --text-precision.master split --text-offload.states true",
])  # fmt: skip
def test_settings_of_modules_with_an_effect_are_not(flags: str) -> None:
    assert job("dp:8", "tp:8", 8, *flags.split()).modules["vision"].role == "encoder"
