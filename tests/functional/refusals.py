"""Runs of the pool's ranks that are refused with the same message on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import CPU, Platform
from pretrain_vlm import build_run


def flags(folder: Path, *more: str) -> list[str]:
    """Flags of a run on a folder with a model and data; later ones replace earlier ones."""
    text = f"--model.hf_path {folder}/model --model.dtype float32 --data.registry.d.annotations {folder}/data.jsonl "
    text += f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false "
    text += f"--train.global_batch_size 4 --train.micro_batch_size 2 --train.iters 2 --log.dir {folder}/log "
    text += "--vision-parallel sp:2 --text-parallel tp:2"
    words = [*text.split(), *more]
    pairs = dict(zip(words[::2], words[1::2], strict=True))
    return [word for pair in pairs.items() for word in pair]


def refusal(words: Sequence[str]) -> str | None:
    """The message with which a run of these flags ends, the same on all ranks; None if it trains to its end."""
    message = None
    try:
        run = build_run(load_config(list(words)), Platform(CPU, "gloo"))
        for step, batch, _ in run.batches():
            run.trainer.train_step(step, batch)
    except UserError as error:
        message = str(error)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, message)
    assert of_ranks == [message] * len(of_ranks)
    return message


def unreadable_image(folder: Path) -> list[str]:
    path = folder / "images/4_0.png"
    path.write_bytes(path.read_bytes()[:60] + b"garbage" * 20)
    return []
