"""A run on videos resumes with the same bits, in whose data set videos, pictures and text are mixed."""

from __future__ import annotations

from pathlib import Path

from tests.functional.checkpoint.checks import require_exact_resume
from tests.functional.checkpoint.runs import once
from tests.support.folders import ModelChoice, write_model
from tests.support.pool import Pools
from tests.support.videos import FLAGS, write_video_data


def test_the_same_layout_resumes_bit_by_bit(tmp_path: Path, pools: Pools) -> None:
    write_model(tmp_path / "model", ModelChoice(vision_layers=2, text_layers=1))
    data = write_video_data(tmp_path, 9)

    def flags_of(name: str) -> list[str]:
        run = tmp_path / name
        common = (
            f"--model.hf_path {tmp_path}/model --model.dtype float32 --data.registry.d.annotations {data} "
            f"--data.registry.d.images {tmp_path}/images --data.datasets d --data.workers 2 --train.iters 4 "
            f"--train.global_batch_size 4 --checkpoint.interval 100 --log.dir {run}/log "
            f"--checkpoint.dir {run}/checkpoints --vision-parallel dp:2 --text-parallel tp:2"
        )
        return once([*common.split(), *FLAGS])

    require_exact_resume(pools, tmp_path, flags_of)
