"""The table of the largest example in docs/planning.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import Estimate

ROOT = Path(__file__).parents[3]
MODEL = "qwen2_5_vl_32b"
ROW = re.compile(r"\| ([\d,]+) \| (\d+)x\d+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|")
TEXT = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
ROWS = [match.groups() for match in ROW.finditer(TEXT)]
MORE = (
    "--vision-precision.gradients bfloat16 --text-precision.gradients bfloat16 --text-recompute full "
    "--train.tokens_per_micro_batch none"
)


def gigabytes(more: str) -> float:
    flags = f"--config {ROOT}/examples/{MODEL}.yaml --model.hf_path {ROOT}/examples/models/{MODEL} {MORE} {more}"
    plan = Estimate.of(load_config(flags.split()), 8)
    assert [layout.degrees_text for layout in plan.job.layouts.values()] == ["sp:8", "tp:8"]
    return plan.totals.max() / 1e9


def test_six_resolutions() -> None:
    assert [int(patches.replace(",", "")) for patches, *_ in ROWS] == [1024, 4096, 9216, 16384, 36864, 65536]
    assert all((int(side) // 14) ** 2 == int(patches.replace(",", "")) for patches, side, *_ in ROWS)


@pytest.mark.parametrize("patches, side, none, selective, full", ROWS)
def test_32b_fits_eight_gpus(patches: str, side: str, none: str, selective: str, full: str) -> None:
    image = f"--plan.image_side {side} --plan.tokens 512 --data.max_seq_length 32768 --data.max_pixels 12845056"
    for mode, said in (("none", none), ("selective", selective), ("full", full)):
        assert f"{gigabytes(f'{image} --vision-recompute {mode}'):.1f}" == said
    assert float(full) <= 68 and float(none) <= 80, "of 80 GB, with room to spare"


def test_a_text_of_131072_tokens() -> None:
    text = "--plan.images 0 --plan.tokens 131072 --data.max_seq_length 131072"
    whole, chunked = gigabytes(text), gigabytes(f"{text} --text-chunk 16384")
    said = " ".join(TEXT.split())
    assert f"is planned at {whole:.1f} GB, and at {chunked:.1f} GB with `--text-chunk 16384`" in said
