"""What the workers of the pool run for the tests of checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import pretrain_vlm
from megatron_hetero.base import outputs as folder_module
from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import MANIFEST, record_file, whole
from megatron_hetero.checkpoint import resume as shared_folder
from megatron_hetero.checkpoint import storage
from megatron_hetero.checkpoint import storage as writing
from megatron_hetero.checkpoint.contents import Entry
from megatron_hetero.checkpoint.index import index_dtypes, index_shapes, read_index
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.checkpoint.storage import read_entries
from megatron_hetero.config.schema import load_config
from megatron_hetero.groups.platform import Platform
from megatron_hetero.step import number_formats, optimizer
from megatron_hetero.train.held_out import HeldOutEvaluation
from megatron_hetero.train.stopping import StopRequest, stop_requests
from megatron_hetero.train.trainer import Trainer
from tests.support.pool import platform
from tests.unit.train.jobs_run import build, build_logged, stored


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
            asked = step == until and run.topology.rank == run.topology.world_size - 1
            metrics = run.train_step(step, batch, stop=asked)
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


@contextmanager
def fused(*, compiled: bool) -> Iterator[None]:
    """Inside, updates are those of GPUs, which compile them; here they need not be `compiled`."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Platform, "compiles", True))
        if not compiled:
            stack.enter_context(mock.patch.object(optimizer, "compiled", lambda function: function))
        yield


def train_fused(flags: list[str], compiled: bool = False, until: int | None = None) -> dict[str, Any]:
    """As `train`."""
    with fused(compiled=compiled):
        return train(flags, None, until)


def copies_fused(flags: list[str]) -> dict[tuple[str, ...], np.ndarray]:
    """As `copies`."""
    with fused(compiled=False):
        return copies(flags)


def copies(flags: list[str]) -> dict[tuple[str, ...], np.ndarray]:
    """Train; of the text module what this rank holds of each stored tensor, by its name and rows and columns."""
    run = build(flags)
    for step, batch, _ in run.batches():
        run.train_step(step, batch)
    [module] = [module for module in run.modules if module.name == "text"]
    return {
        tuple(map(str, tensor_slice.rectangle)): module.whole_weight(name)[tensor_slice.place].float().numpy()
        for name, slices in module.own_map.items()
        for tensor_slice in slices
        if not tensor_slice.empty
    }


def in_pieces(size: int, flags: list[str], until: int | None = None) -> dict[str, Any]:
    """As `train`, with parameters updated, read and written in pieces of so many elements."""
    with mock.patch.object(optimizer, "PIECE", size), mock.patch.object(number_formats, "PIECE", size):
        return train(flags, None, until)


def asked_to_stop(flags: list[str], rank: int, at: int) -> tuple[int, bool]:
    """One rank gets a signal in the midst of step `at`. Returns the step after which this rank stopped, and whether the
    handlers are as before.
    """
    run, step, before = build_logged(flags), 0, signal.getsignal(signal.SIGUSR1)

    def signalled(in_step: int, *_: object) -> None:
        if in_step == at and run.topology.rank == rank:
            os.kill(os.getpid(), signal.SIGUSR1)

    with stop_requests() as request, run.writer, _calling(Trainer, "_refuse_faults", signalled):
        for step, batch, _ in run.batches():
            metrics = run.train_step(step, batch, stop=request)
            run.saver.after(step, metrics.stopping)
            if metrics.stopping:
                break
    return step, signal.getsignal(signal.SIGUSR1) == before


def program(flags: list[str], asked: str = "") -> tuple[bool, str]:
    """What the program does, from its start to the export: whether it was finished, and the error that ended it. The
    last rank is asked to stop in `asked`, "step 2" or "evaluation 2".
    """
    request = StopRequest()

    def in_(what: str) -> Callable[..., None]:
        return lambda step, *_: request.note(signal.SIGTERM, None) if f"{what} {step}" == asked and last else None

    last = dist.get_rank() == dist.get_world_size() - 1
    with _calling(Trainer, "_refuse_faults", in_("step")), _calling(HeldOutEvaluation, "_evaluate", in_("evaluation")):
        try:
            return pretrain_vlm.train_and_export(load_config(flags), platform(), request), ""
        except UserError as error:
            return False, str(error)


@contextmanager
def _calling(owner: type, method: str, first: Callable[..., None]) -> Iterator[None]:
    """Inside, `first` is called with the arguments of each call of a method, before it."""
    original = getattr(owner, method)

    def called(self: Any, *args: Any) -> Any:
        first(*args)
        return original(self, *args)

    with mock.patch.object(owner, method, called):
        yield


def cannot_save(flags: list[str], folder: Path) -> tuple[str, str]:
    """What a save says where one rank's disk is full (a limit on the size of its files stands in for that), and where
    the folder has vanished.
    """
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.train_step(run.resumed.step + 1, batch)
    with _full_disk(run.topology.rank == 1):
        full = _error(lambda: run.saver.after(run.resumed.step + 1, stopping=True))
    dist.barrier()
    if run.topology.rank == 0:
        folder.rename(folder.with_name("elsewhere"))
    dist.barrier()
    return full, _error(lambda: run.saver.after(run.resumed.step + 1, stopping=True))


def cannot_save_beside(flags: list[str]) -> tuple[list[str], str]:
    """What is said after each step, by a run that saves after each second one while it trains, and whose disk is full
    until the third; and the error that ends it, if one does.
    """
    run, said = build_logged(flags), []
    try:
        with run.writer, _full_disk(run.topology.rank == 1) as disk:
            for step, batch, _ in run.batches():
                run.writer.write(run.train_step(step, batch))
                said.append(" ".join(run.saver.after(step)))
                if step == 3:
                    # However slow the disk: it fails before the end of this step.
                    while not said[2]:
                        time.sleep(0.01)
                        said[2] = " ".join(run.saver.after(step))
                    disk.close()
    except UserError as error:
        return said, str(error)
    return said, ""


def ended_by_an_error(flags: list[str], folder: Path) -> tuple[list[int], list[str]]:
    """The whole checkpoints, and what is said of them, once an error has ended a run that has just begun to save beside
    training.
    """
    run = build(flags)
    for step, batch, _ in run.batches():
        run.train_step(step, batch)
        run.saver.after(step)
        if step == 2:
            break
    said = run.saver.settle()
    return list(whole(folder)), said


def error_at_once(flags: list[str], folder: Path | None = None) -> str:
    """What stops a run from being built that waits for nothing. In `folder` each rank works in one of its own."""
    own = Path.cwd() if folder is None else folder / str(dist.get_rank())
    own.mkdir(exist_ok=True)
    with (
        contextlib.chdir(own),
        mock.patch.object(folder_module, "SEEN_S", 0.3),
        mock.patch.object(shared_folder, "_FREE_S", 0.3),
    ):
        return error_of(flags)


def saves_apart(flags: list[str], folder: Path, where: str) -> str:
    """What a save says where the second rank writes elsewhere: it sees another folder, or nobody sees its file."""
    run = build(flags)
    _, batch, _ = next(iter(run.batches()))
    run.train_step(1, batch)
    if run.topology.rank == 1 and where == "the folder":
        config = replace(run.config, checkpoint=replace(run.config.checkpoint, dir=folder / "elsewhere"))
        run.saver.config = config
    lost = [] if where == "the folder" or run.topology.rank == 0 else ["tensors-1-0.safetensors"]
    real = storage.write_entries

    def write(partial: Path, *args: Any, **options: Any) -> Any:
        records = real(partial, *args, **options)
        for name in lost:
            (partial / name).unlink()
        return records

    with mock.patch.object(folder_module, "SEEN_S", 0.3), mock.patch.object(writing, "write_entries", write):
        return _error(lambda: run.saver.after(2))


def resumes_with_other_generators(flags: list[str]) -> int:
    """The step that a run resumes after which has generators of other kinds, as on a GPU."""
    real = Platform.random_states
    with mock.patch.object(
        Platform, "random_states", lambda self: real(self) | {"other": torch.zeros(3, dtype=torch.uint8)}
    ):
        return build(flags).resumed.step


def loses_the_last(flags: list[str]) -> tuple[list[str], str]:
    """What is said after each step by a run whose disk is full from the third on, and the error in the end."""
    run, said = build_logged(flags), []
    with run.writer, ExitStack() as stack:
        for step, batch, _ in run.batches():
            run.writer.write(run.train_step(step, batch))
            said.append(" ".join(run.saver.after(step)))
            if step == 3:
                stack.enter_context(_full_disk(run.topology.rank == 1))
    return said, str(run.saver.lost)


@contextmanager
def _full_disk(full: bool) -> Iterator[ExitStack]:
    """Inside, or until what is given is closed, this process can write small files only, where its disk is `full`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ExitStack() as disk:
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        disk.callback(signal.signal, signal.SIGXFSZ, handler)
        disk.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if full else soft, hard))
        yield disk


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return "no error"


def _save_copy(run: Trainer, target: Path) -> dict[str, Any]:
    config = replace(run.config, checkpoint=replace(run.config.checkpoint, dir=target))
    if run.topology.rank == 0:
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


def train_and_export(flags: list[str], target: Path) -> list[float]:
    """Train as the program does, with checkpoints, and export at the end. Returns the losses."""
    run, losses = build_logged(flags), []
    with run.writer:
        for step, batch, _ in run.batches():
            losses.append(run.train_step(step, batch).loss)
            run.saver.after(step)
    run.export(target)
    return losses
