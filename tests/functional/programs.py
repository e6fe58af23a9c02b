"""Programs that tests start in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

PROGRAM = Path(__file__).parents[2] / "pretrain_vlm.py"
LEARNING_RATE = 0.02
CONFIG = f"""\
model: {{hf_path: model, dtype: float32}}
modules: {{vision: {{parallel: "sp:2"}}, text: {{parallel: "tp:2"}}}}
data:
  registry: {{d: {{annotations: data.jsonl, images: images}}}}
  datasets: [d]
  shuffle: false
train: {{iters: 2, global_batch_size: 4, micro_batch_size: 2}}
optimizer: {{name: sgd, lr: {LEARNING_RATE}, schedule: constant, clip_grad: 0}}
log: {{dir: log, tensorboard: true}}
export: {{hf_dir: out}}
"""


@contextmanager
def killed_after(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Whatever is left of the process at the end is killed."""
    try:
        yield process
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


@contextmanager
def started(
    folder: Path,
    *flags: str,
    ranks: int = 2,
    program: Sequence[str] = (str(PROGRAM),),
    launcher: str = "torch.distributed.run",
) -> Iterator[subprocess.Popen[str]]:
    """torchrun with the folder's configuration; whatever is left of it at the end is killed."""
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", str(ranks)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *program, "--config", str(folder / "config.yaml"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    with killed_after(process):
        yield process


HEAD = """
import os, sys, threading, time
from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.launch import guarded, process_group, rank, world_size
"""


def program(body: str) -> str:
    """A program whose `main` has this body."""
    main = "".join(f"    {line}\n" for line in body.splitlines())
    return f"{HEAD}def main(argv):\n{main}if __name__ == '__main__':\n    guarded(main, sys.argv[1:])\n"
