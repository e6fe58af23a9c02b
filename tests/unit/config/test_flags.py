"""The documentation of the flags names every field, with its default."""

from __future__ import annotations

import pytest

from megatron_hetero.config.flags import flag_rows
from megatron_hetero.config.schema import Config, load_config
from tests.support.flag_table import flag_table_markdown

FIELDS = """
model.hf_path model.hf_path_vision model.fresh_projector model.dtype
model.freeze model.train model.router_aux_loss_coef model.backend model.attention model.compile
MODULE-parallel MODULE-layers MODULE-sequence_parallel MODULE-zero MODULE-recompute MODULE-chunk MODULE-tp_overlap
MODULE-patches_per_call MODULE-precision.master MODULE-precision.moments MODULE-precision.gradients MODULE-lr
MODULE-offload.states MODULE-offload.activations MODULE-hf_path MODULE-token MODULE-min_pixels MODULE-max_pixels
MODULE-lora.r MODULE-lora.alpha MODULE-lora.dropout MODULE-lora.targets MODULE-lora.rslora MODULE-lora.lr_ratio
MODULE-lora.hf_path MODULE-lora.patterns.PATTERN.r MODULE-lora.patterns.PATTERN.alpha
data.registry.NAME.annotations data.registry.NAME.files data.registry.NAME.format data.registry.NAME.split
data.registry.NAME.fields.FIELD data.index data.scan data.registry.NAME.images
data.datasets data.shuffle data.max_seq_length data.too_long data.bad_records data.max_bad_share
data.min_pixels data.max_pixels data.balance data.workers data.worker_type boundary.transport
schedule.kind schedule.waves schedule.run_ahead schedule.virtual_stages
schedule.timeout_s
train.profile.start train.profile.steps train.iters train.global_batch_size train.micro_batch_size train.seed
train.tokens_per_micro_batch train.patches_per_micro_batch
optimizer.name optimizer.lr optimizer.min_lr optimizer.lr_projector optimizer.betas optimizer.eps
optimizer.weight_decay optimizer.clip_grad optimizer.schedule optimizer.warmup_iters log.dir log.tensorboard log.wandb
checkpoint.dir checkpoint.interval checkpoint.async checkpoint.keep_last checkpoint.resume
checkpoint.allow_changes
export.hf_dir export.merge eval.datasets eval.interval plan.images plan.image_side plan.tokens
plan.supervised plan.expert_imbalance plan.memory_gb plan.videos plan.frames plan.frame_side
data.registry.NAME.video_placeholder
data.supervised_turns
data.video.rules data.video.fps data.video.min_frames data.video.max_frames data.video.frame_pixels
data.video.total_pixels data.video.text_after data.video.marks data.video.timeout_s data.video.index
"""


def test_every_setting_has_a_flag_and_a_sentence() -> None:
    rows = flag_rows(Config)
    assert {row.flag for row in rows} == {
        *("--config", "--plan", "--world-size", "--plan-files", "--plan-svg"),
        *(f"--{name}" for name in FIELDS.split()),
    }
    assert all(row.text.endswith(".") and row.values and row.default for row in rows)


def test_the_markdown_table_has_a_row_per_flag() -> None:
    lines = flag_table_markdown().splitlines()
    assert len(lines) == 2 + len(flag_rows(Config))
    assert "| `--model.dtype` | float32\\|bfloat16 | `bfloat16` |" in flag_table_markdown()
    assert all(line.replace("\\|", "").count("|") == 5 for line in lines)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--train.iters", "3", "--help"]])
def test_help_shows_every_flag_and_exits(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load_config(argv)
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for row in flag_rows(Config):
        assert f"{row.flag}  [{row.values}]  (default: {row.default})" in shown
        assert row.text in shown
