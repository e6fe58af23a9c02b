"""A module in a world of ranks: what its record must fit, and which settings would have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.job.job import JobSpec

MODEL = Path(__file__).parents[3] / "examples" / "models" / "qwen2_5_vl_7b"
FLAGS = f"--model.hf_path {MODEL} --data.registry.d.annotations d.json --data.datasets d --log.dir log"
FURTHER = f"--detail-hf_path {MODEL} --detail-token <|vision_pad|>"


def job(flags: str, world: int = 4) -> JobSpec:
    return JobSpec.of(load_config([*FLAGS.split(), *flags.split()]), world)


def test_encoders_of_the_model_come_first() -> None:
    found = job(f"{FURTHER} --vision-parallel sp:4 --text-parallel tp:4")
    assert list(found.modules) == ["vision", "detail", "text"] and found.shapes.own == ("vision",)
    assert [module.role for module in found.modules.values()] == ["encoder", "encoder", "text"]
    assert [found.shapes.subsets_of(name)[-1] for name in found.modules] == ["projector", "detail_projector", "text"]
    assert found.modules["detail"].prefix.startswith("detail.") and found.text is found.modules["text"]


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--visoin-parallel sp:4", ["modules.visoin (--visoin-parallel)", "did you mean `vision`"]),
        ("--audio-lr 1e-4", ["modules.audio (--audio-lr)"]),
        ("--audio-zero 2", ["module `audio`", "one of vision, text", "hf_path"]),
        (f"--vision-hf_path {MODEL} --vision-token <|x|>", ["modules.vision.hf_path", "model.hf_path_vision"]),
        (f"{FURTHER} --detai-token <|x|>", ["module `detai`", "did you mean `detail`"]),
        ("--vision-min_pixels 9", ["modules.vision.min_pixels", "Remove it, or use data.min_pixels"]),
        ("--text-token <|x|>", ["modules.text.token", "Remove it."]),
        ("--model.train vision --text-precision.master split", ["modules.text.precision.master", "text is frozen"]),
        ("--model.freeze text --text-zero 2", ["modules.text.zero", "no gradients", "use 3"]),
        ("--model.freeze text --text-lr 1e-4", ["modules.text.lr", "leave text frozen"]),
        ("--text-recompute 29", ["modules.text.recompute (--text-recompute)", "at most 28"]),
        (
            "--text-recompute experts",
            ["modules.text.recompute (--text-recompute)", "text has no experts", "`selective`"],
        ),
        ("--vision-recompute experts", ["modules.vision.recompute", "vision has no experts"]),
        ("--text-parallel tp:4 --text-zero 2", ["modules.text.zero", "dp, sp and cp are 1"]),
        ("--text-parallel dp:4 --text-tp_overlap true", ["modules.text.tp_overlap", "tp 1"]),
        (
            "--text-parallel tp:4 --text-tp_overlap true --text-sequence_parallel false",
            ["modules.text.tp_overlap", "modules.text.sequence_parallel false"],
        ),
        (
            "--text-parallel tp:4 --text-tp_overlap true --model.backend te",
            ["modules.text.tp_overlap", "model.backend te", "Transformer Engine's layers"],
        ),
        ("--text-layers 10 10 --text-parallel pp:2,dp:2", ["--text-layers", "20 layers in all"]),
    ],
)
def test_settings_that_do_not_fit(flags: str, said: list[str]) -> None:
    with pytest.raises(UserError) as error:
        job(flags)
    assert all(word in str(error.value) for word in said), error.value


@pytest.mark.parametrize(
    "flags",
    [
        "--model.freeze text --text-recompute full --text-offload.activations true --text-zero 3 --text-parallel dp:4",
        "--model.freeze vision --vision-recompute full --optimizer.lr_projector 1e-4",
        "--model.train projector --text-chunk 64 --vision-patches_per_call 64",
        "--optimizer.name sgd --text-offload.states true --text-precision.master split",
        f"{FURTHER} --detail-lr 1e-4 --model.freeze vision",
    ],
)
def test_settings_that_fit(flags: str) -> None:
    assert job(flags).schedule


def test_what_trains() -> None:
    found = job("--model.train projector").modules
    vision, text = found["vision"], found["text"]
    assert vision.trains and not vision.layers_train and not vision.passes_gradients
    assert not text.trains and not text.layers_train and text.passes_gradients
