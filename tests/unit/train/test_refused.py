"""Configurations that a job refuses before any process group is created."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.job.job import JobSpec
from tests.support.folders import ModelChoice, write_model
from tests.support.runs import MakeFlags


@pytest.mark.parametrize("batch, text, micro, message", [
    (6, "dp:4", 1, r"found 6, .* 4, .*4 replicas .*of 1\. Try --train\.global_batch_size 8"),
    (6, "tp:2,dp:2", 2, r"found 6, .* 4, .*2 replicas .*of 2\. Try --train\.global_batch_size 8"),
    (2, "dp:4", 2, r"Try --train\.global_batch_size 8"),
])  # fmt: skip
def test_batches_that_do_not_divide(batch: int, text: str, micro: int, message: str, make_flags: MakeFlags) -> None:
    flags = make_flags("dp:4", text, f"--train.micro_batch_size {micro}", batch=batch)
    with pytest.raises(UserError, match=message):
        JobSpec.of(load_config(flags), 4)
    job = JobSpec.of(load_config(make_flags("dp:4", text, f"--train.micro_batch_size {micro}", batch=8)), 4)
    assert job.batch.step_samples == 8 and job.batch.replicas == job.layouts["text"].dp


@pytest.mark.parametrize("flags, message", [
    ("--vision-parallel pp:4", "2 layers and pp:4"),
    ("--text-parallel tp:2@0-1 --vision-parallel dp:1@0", "ranks 2-3"),
    ("--schedule.kind ahead", "schedule.kind"),
    ("--schedule.run_ahead 2", "schedule.run_ahead"),
    ("--schedule.waves 2", "schedule.waves .*at most 1, .*Lower it to 1"),
    ("--vision-parallel dp:2@0-1 --text-parallel dp:2@2-3 --schedule.run_ahead 3", "schedule.run_ahead .*at most 2"),
    ("--schedule.virtual_stages 2", "schedule.virtual_stages"),
    ("--text-layers 1 1", r"\(--text-layers\): found 2 numbers, expected 1"),
    ("--audio-layers 1 1", "audio"),
    ("--text-parallel sp:8", "sp"),
    ("--text-parallel tp:3", "tp"),
    ("--data.balance even", "data.balance"),
    ("--boundary.transport fp8", "boundary.transport"),
    ("--audio-parallel dp:4", "audio"),
    ("--visoin-recompute full", "did you mean `vision`"),
    ("--visoin-tp_overlap true", "did you mean `vision`"),
    ("--text-tp_overlap true", "exchange no activations"),
    ("--text-parallel dp:4,ep:2", "axis ep.* no experts. Try `--text-parallel dp:4`"),
    ("--text-parallel dp:4,etp:2", "axis etp.* no experts. Try `--text-parallel dp:4`"),
    ("--vision-parallel dp:4,ep:2", "axis ep.* no experts. Try `--vision-parallel dp:4`"),
    ("--model.router_aux_loss_coef 0.1", "router_aux_loss_coef.* no experts"),
    ("--model.router_aux_loss_coef -0.1", "router_aux_loss_coef.* expected ≥ 0"),
])  # fmt: skip
def test_what_cannot_run_is_refused_before_any_group_is_made(flags: str, message: str, make_flags: MakeFlags) -> None:
    with pytest.raises(UserError, match=message):
        JobSpec.of(load_config(make_flags("dp:4", "dp:4", flags)), 4)


@pytest.mark.parametrize("choice, message", [
    (ModelChoice(heads=2), "rows of 24 elements, expected 48"),
    (None, "modules.detail.hf_path: found no"),
])  # fmt: skip
def test_encoders_that_do_not_fit(
    choice: ModelChoice | None, message: str, make_flags: MakeFlags, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "detail", choice) if choice is not None else tmp_path / "nowhere"
    more = f"--detail-hf_path {folder} --detail-token <|video_pad|>"
    with pytest.raises(UserError, match=message):
        JobSpec.of(load_config(make_flags("dp:4", "dp:4", more)), 4)
