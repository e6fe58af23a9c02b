"""Whole runs on the workers of the pool, and what checkpoints contain."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import pretrain_vlm
from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import MANIFEST, record_file
from megatron_hetero.checkpoint.contents import Entry
from megatron_hetero.checkpoint.index import index_dtypes, index_shapes, read_index
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.checkpoint.storage import read_entries
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import Platform
from megatron_hetero.step import optimizer
from megatron_hetero.train.held_out import HeldOutEvaluation
from megatron_hetero.train.run import Run
from megatron_hetero.train.stopping import StopRequest
from megatron_hetero.train.trainer import Trainer
from tests.support.pool import platform
from tests.support.runs import build, build_logged, stored

BF16 = "--model.dtype bfloat16 --data.workers 0"
SMALL = "--text-precision.master split --text-precision.moments bfloat16 --vision-precision.master none"
HOST = "--text-offload.states true --vision-offload.states true"


def zero(vision: int, text: int) -> str:
    """The flags of stages of ZeRO."""
    return f"--vision-zero {vision} --text-zero {text}"


def flags(folders: Path, run: Path, vision: str, text: str, more: str = "", model: str = "plain") -> list[str]:
    """A command line with everything that makes a resume hard: AdamW, two data sets with rates, shuffling, workers."""
    common = (
        f"--model.hf_path {folders / model} --data.registry.a.annotations {folders}/a/data.jsonl "
        f"--data.registry.a.images {folders}/a/images --data.registry.b.annotations {folders}/b/data.jsonl "
        f"--data.registry.b.images {folders}/b/images --data.datasets a%50 b%150 --data.workers 2 "
        f"--train.global_batch_size 4 --train.iters 4 --checkpoint.interval 2 --log.dir {run}/log "
        f"--checkpoint.dir {run}/checkpoints "
        f"--optimizer.lr 1e-3 --optimizer.weight_decay 0.1 "
        f"--vision-parallel {vision} --text-parallel {text} {more}"
    )
    return once(common.split() if "--model.dtype" in more else [*common.split(), "--model.dtype", "float32"])


def once(line: list[str]) -> list[str]:
    """A command line in which a flag that comes again wins."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in line:
        if word.startswith("--"):
            values[name := word] = []
        else:
            values[name].append(word)
    return [word for name, words in values.items() for word in (name, *words)]


def train(flags: list[str], copy: Path | None = None, until: int | None = None) -> dict[str, Any]:
    """Train as the program does, from where the run resumes: the losses, the last weights, and what was said of the
    resume. Before that, save what was loaded into `copy`, as it lies in this layout. In step `until` the last rank is
    asked to stop.
    """
    run, losses = build_logged(flags), []
    loaded = _save_copy(run, copy) if copy is not None else None
    with run.writer:
        for step, batch, _ in run.batches():
            asked = step == until and run.trainer.topology.rank == run.trainer.topology.world_size - 1
            metrics = run.trainer.train_step(step, batch, stop=asked)
            run.writer.write(metrics)
            losses.append(metrics.loss)
            run.saver.after(step, metrics.stopping)
            if metrics.stopping:
                break
    return {
        "losses": losses,
        "weights": stored(run),
        "loaded": loaded,
        "from": run.resumed.step,
        "notes": run.resumed.notes,
    }


def program(flags: list[str], asked: str = "") -> tuple[bool, str]:
    """What the program does, from its start to the export: whether it was finished, and the error that ended it. The
    last rank is asked to stop in `asked`, "step 2" or "evaluation 2".
    """
    request = StopRequest()

    def in_(what: str) -> Callable[..., None]:
        return lambda step, *_: request.note(signal.SIGTERM, None) if f"{what} {step}" == asked and last else None

    last = dist.get_rank() == dist.get_world_size() - 1
    with calling(Trainer, "issue_step", in_("step")), calling(HeldOutEvaluation, "_evaluate", in_("evaluation")):
        try:
            return pretrain_vlm.train(load_config(flags), platform(), request), ""
        except UserError as error:
            return False, str(error)


@contextmanager
def calling(owner: type, method: str, first: Callable[..., None]) -> Iterator[None]:
    """Inside, `first` is called with the arguments of each call of a method, before it."""
    original = getattr(owner, method)

    def called(self: Any, *args: Any) -> Any:
        first(*args)
        return original(self, *args)

    with mock.patch.object(owner, method, called):
        yield


@contextmanager
def full_disk(full: bool) -> Iterator[ExitStack]:
    """Inside, or until what is given is closed, this process can write small files only, where its disk is `full`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ExitStack() as disk:
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        disk.callback(signal.signal, signal.SIGXFSZ, handler)
        disk.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if full else soft, hard))
        yield disk


@contextmanager
def fused(*, compiled: bool) -> Iterator[None]:
    """Inside, updates are those of GPUs, which compile them; here they need not be `compiled`."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Platform, "compiles", True))
        if not compiled:
            stack.enter_context(mock.patch.object(optimizer, "compiled", lambda function: function))
        yield


def error_in(work: Callable[[], object]) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return "no error"


def _save_copy(run: Run, target: Path) -> dict[str, Any]:
    config = replace(run.trainer.job.config, checkpoint=replace(run.trainer.job.config.checkpoint, dir=target))
    if run.trainer.topology.rank == 0:
        target.mkdir(parents=True)
    Saver(config, run.saver.state, run.saver.record).after(run.resumed.step, stopping=True)
    return stored(run)


def error_of(flags: list[str]) -> str:
    """What stops a run from being built."""
    try:
        run = build(flags)
    except UserError as error:
        return str(error)
    return f"no error: it resumes after step {run.resumed.step}"


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, read by one process without process groups."""
    index = read_index(checkpoint)
    dtypes = index_dtypes(index)
    found = {key: torch.empty(shape, dtype=dtypes[key]) for key, shape in index_shapes(index).items()}
    entries = [Entry(key, tuple(v.shape), (0,) * v.dim(), v) for key, v in found.items()]
    read_entries(checkpoint, index, entries, None)
    return found


def seal(checkpoint: Path) -> None:
    """Write the manifest of what lies in a checkpoint, as anyone can."""
    records = {path.name: record_file(path) for path in checkpoint.iterdir() if path.name != MANIFEST}
    files = {name: {"size": record.size, "sha256": record.sha256} for name, record in records.items()}
    (checkpoint / MANIFEST).write_text(json.dumps({"files": files}))
