"""The whole program with NCCL's rules: it trains with workers that decode, evaluates, saves beside the training, stops,
resumes, evaluates again and exports. Nothing of it hangs, and the weights are those of a run over gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.checkpoint import runs as jobs
from tests.functional.checkpoint.runs import flags
from tests.support.matrix import thinned
from tests.support.pool import Pools


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a `transformers` folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "vision, text, ranks, more",
    thinned(
        [
            ("sp:2", "pp:2", 2, "--checkpoint.async true"),
            ("dp:1@0", "pp:2@1-2", 3, "--checkpoint.async true --schedule.virtual_stages 2"),
            ("sp:2@0-1", "tp:2@1-2", 3, ""),
        ],
        3,
    ),
    ids=["colocated", "disjoint", "mixed"],
)
def test_from_start_to_export(
    vision: str, text: str, ranks: int, more: str, folders: Path, tmp_path: Path, pools: Pools, rules_pools: Pools
) -> None:
    def line(run: str) -> list[str]:
        model = "deep" if "pp" in text else "plain"
        further = f"--eval.datasets a b --eval.interval 2 --export.hf_dir {tmp_path}/{run}/out {more}"
        return flags(folders, tmp_path / run, vision, text, f"--train.micro_batch_size 2 {further}", model=model)

    assert set(pools(ranks).run(jobs.program, line("gloo"))) == {(True, "")}
    assert set(rules_pools(ranks).run(jobs.program, line("rules"), "step 3")) == {(False, "")}
    assert not (tmp_path / "rules/out").exists()
    assert set(rules_pools(ranks).run(jobs.program, line("rules"))) == {(True, "")}
    want, got = exported(tmp_path / "gloo/out"), exported(tmp_path / "rules/out")
    assert want.keys() == got.keys() and want
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
