"""Record what small runs of every kind compute, to the bit; run again after a refactoring, and compare.

    python -m tests.unchanged FILE        # before: writes FILE
    python -m tests.unchanged FILE        # after: compares with it; exit status 1 where a bit differs

Losses, gradient norms and the hash of the exported weights. Bits depend on the machine and on the versions of
libraries: a file is of use where it was recorded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.folders import ModelChoice, write_data, write_model

ROOT = Path(__file__).parents[2]
MODELS = {
    "plain": ModelChoice(vision_layers=4, text_layers=4, full_layers=(1, 3)),
    "tied": ModelChoice(vision_layers=2, text_layers=3, tied=True, seed=1),
    "tower": ModelChoice(vision_layers=1, text_layers=1, full_layers=(0,), seed=3),
}
EVERY = "--train.iters 4 --train.global_batch_size 4 --model.dtype float32 --optimizer.lr 1e-3 --data.datasets d"
RUNS: dict[str, tuple[int, str, str]] = {
    "one process": (1, "plain", ""),
    "colocated": (2, "plain", "--vision-parallel sp:2 --text-parallel tp:2"),
    "data parallel, bf16": (2, "plain", "--model.dtype bfloat16 --optimizer.clip_grad 0.1"),
    "sgd": (2, "tied", "--optimizer.name sgd --text-parallel tp:2 --model.sequence_parallel.text false"),
    "context parallel": (4, "plain", "--vision-parallel cp:2,dp:2 --text-parallel cp:2,sp:2 "
        "--train.micro_batch_size 2"),
    "pipeline in waves": (4, "plain", "--vision-parallel dp:4 --text-parallel pp:4 --schedule.waves 2"),
    "pipeline, recompute": (4, "tied", "--vision-parallel sp:2,dp:2 --text-parallel tp:2,pp:2 "
        "--schedule.kind recompute"),
    "virtual stages": (2, "plain", "--text-parallel pp:2 --schedule.virtual_stages 2 --model.recompute.text full"),
    "disjoint": (3, "plain", "--vision-parallel tp:2@0-1 --text-parallel dp:1@2"),
    "disjoint, run-ahead": (4, "plain", "--vision-parallel dp:2@0-1 --text-parallel pp:2@2-3 --schedule.run_ahead 3"),
    "encoder stages": (4, "plain", "--vision-parallel pp:2@0-1 --text-parallel tp:2@2-3 --boundary.transport bfloat16"),
    "mixed": (4, "plain", "--vision-parallel dp:2@0-1 --text-parallel tp:2,dp:2@0-3 --data.balance off"),
    "frozen": (2, "plain", "--vision-parallel dp:2 --text-parallel tp:2 --model.freeze vision"),
    "two encoders": (
        4,
        "plain",
        "--model.encoders.detail.hf_path tower --model.encoders.detail.token <|video_pad|> --data.datasets two "
        "--vision-parallel sp:2@0-1 --detail-parallel dp:2@2-3 --text-parallel tp:2,dp:2",
    ),
    "uneven stages": (2, "plain", "--text-parallel pp:2 --parallel_layers.text 1 3 --optimizer.lr_vision 1e-4"),
    "held-out loss": (2, "plain", "--vision-parallel sp:2 --text-parallel sp:2 --eval.interval 2 --eval.datasets d"),
    "resumed": (2, "plain", "--text-parallel tp:2 --checkpoint.dir checkpoints --checkpoint.interval 2"),
    "resumed elsewhere": (2, "plain", "--vision-parallel tp:2 --checkpoint.dir checkpoints --checkpoint.interval 2"),
}  # fmt: skip
SEEN = ("step", "loss", "grad_norm", "tokens", "samples", "eval_loss", "exact_match")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.unchanged", description=__doc__)
    parser.add_argument("file", type=Path, help="where the record is, or goes")
    parser.add_argument("--only", action="append", metavar="RUN", help=f"one of: {'; '.join(RUNS)}")
    options = parser.parse_args(arguments)
    before = json.loads(options.file.read_text()) if options.file.exists() else None
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, choice in MODELS.items():
            write_model(folder / model, choice)
        write_data(folder / "d", 10)
        write_data(folder / "two", 10, details=(1, 0, 2))
        for run in options.only or RUNS:
            found[run] = _trained(folder, run)
            same = "recorded" if before is None else "the same bits" if before.get(run) == found[run] else "DIFFERS"
            print(f"{run}: {same}", flush=True)
    if before is None:
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    return 0 if all(before.get(run) == each for run, each in found.items()) else 1


def _trained(folder: Path, run: str) -> dict[str, Any]:
    """What the run's metrics say, and the hash of its export."""
    ranks, model, own = RUNS[run]
    place = folder / run.replace(" ", "-")
    place.mkdir()
    flags = _flags(EVERY) | {"--model.hf_path": str(folder / model), "--log.dir": "log"} | _flags(own)
    for name in ("d", "two"):
        flags[f"--data.registry.{name}.annotations"] = str(folder / name / "data.jsonl")
        flags[f"--data.registry.{name}.images"] = str(folder / name / "images")
    if "--model.encoders.detail.hf_path" in flags:
        flags["--model.encoders.detail.hf_path"] = str(folder / "tower")
    if run.startswith("resumed"):
        other = {"--vision-parallel": "dp:2", "--text-parallel": "dp:2"} if "elsewhere" in run else {}
        _train(ranks, flags | {"--train.iters": "2"} | other, place)
    _train(ranks, flags | {"--export.hf_dir": "export"}, place)
    lines = [json.loads(line) for line in (place / "log/metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256()
    for file in sorted((place / "export").glob("*.safetensors")):
        digest.update(file.read_bytes())
    metrics = [{key: line[key] for key in SEEN if key in line} for line in lines]
    return {"metrics": metrics, "weights": digest.hexdigest()}


def _flags(text: str) -> dict[str, str]:
    """`--name value ...` by name."""
    return {name: value for name, _, value in (each.partition(" ") for each in re.split(r" (?=--)", text) if each)}


def _train(ranks: int, flags: Mapping[str, str], place: Path) -> None:
    launch = ["-m", "megatron_hetero.run", "--nproc-per-node", str(ranks), str(ROOT / "pretrain_vlm.py")]
    command = [sys.executable, *launch] + [word for name, value in flags.items() for word in (name, *value.split())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
