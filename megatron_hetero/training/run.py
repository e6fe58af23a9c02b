"""A training run: built from a configuration, trained step by step, exported."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch.distributed as dist

from megatron_hetero.agreement import Statement, require_agreement
from megatron_hetero.checkpoint.collective import on_first
from megatron_hetero.checkpoint.resume import resume, shared_record
from megatron_hetero.checkpoint.saver import Saver
from megatron_hetero.checkpoint.state import Resumed, TrainState
from megatron_hetero.cuda_environment import prepare_traces
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.processing import Processor
from megatron_hetero.data.two_folders import export_changes
from megatron_hetero.errors import UserError
from megatron_hetero.models.backend import backend_notices
from megatron_hetero.models.hf_folder import StoredWeights, require_writable
from megatron_hetero.models.qwen2_5_vl.fresh import open_encoders, open_modules
from megatron_hetero.models.qwen2_5_vl.shapes import Qwen25VLShapes
from megatron_hetero.models.qwen2_5_vl.weights import stored_shapes
from megatron_hetero.module_names import VISION
from megatron_hetero.platform import Platform
from megatron_hetero.schedule.watch import Watchdog
from megatron_hetero.topology import Topology
from megatron_hetero.training.config import Config, to_yaml
from megatron_hetero.training.export import export_model
from megatron_hetero.training.metrics import MetricsWriter, NullWriter, evaluations_since
from megatron_hetero.training.resolved import checked, dtype_of, folders_of
from megatron_hetero.training.share import Share
from megatron_hetero.training.sources import open_held_out, open_mixture, open_processor
from megatron_hetero.training.started_with import data_sets, files_of_model, settings_and_versions
from megatron_hetero.training.step_loader import StepBatch, StepLoader

REPORTER = 0
"""The rank that prints and writes metrics."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Run(Share):
    """Everything that lives as long as a run, on one rank. `held_out` are the data sets of `eval.datasets`."""

    loader: StepLoader
    held_out: Mapping[str, Mixture]
    writer: MetricsWriter | NullWriter
    resumed: Resumed
    saver: Saver

    @classmethod
    def build(cls, config: Config, platform: Platform, watchdog: Watchdog | None = None) -> Run:
        """Check the configuration against the model and the world, and all ranks against each other; then make groups,
        modules, optimizers and the loader. `watchdog`: one that the rank has already.

        Raises `UserError` for anything that the user can mend; nothing has been written by then.
        """
        watchdog = watchdog or Watchdog.of_world(config.schedule.timeout_s, platform)
        sources = _open_together(config, platform, watchdog)
        if platform.is_cuda:  # Before the first collective.
            prepare_traces(config.log.dir / "nccl")
        share = Share.of(config, platform, sources.weights, watchdog=watchdog)
        topology, data = share.topology, config.data
        for notice in backend_notices(config.model.backend, platform) if topology.rank == REPORTER else ():
            print(notice, flush=True)
        state = TrainState(
            share.modules, share.optimizers, topology, stored_shapes(share.shapes), working=watchdog.working
        )
        with watchdog.waiting(lambda: "the state that training goes on from, with all other ranks,"):
            record = shared_record(config, state, sources.mixture)
            resumed = _with_evaluations(resume(config, state, record), config, topology)
        with watchdog.working():
            writer = _writer(config, topology.rank, resumed)
        # In a step nobody is waited for as long as for one that still reads its weights.
        share.wait_for_all("the start of all other ranks")
        return cls(
            **{field.name: getattr(share, field.name) for field in fields(share)},
            loader=StepLoader(
                sources.mixture,
                sources.processor,
                topology,
                share.planner,
                share.batch,
                data.max_seq_length,
                data.too_long,
            ),
            held_out=sources.held_out,
            writer=writer,
            resumed=resumed,
            saver=Saver(config, state, record, watchdog.waiting),
        )

    def batches(self) -> Iterator[tuple[int, StepBatch, float]]:
        """(step, batch, seconds waited for it) of all steps that are still to be trained. None is loaded ahead over an
        evaluation.
        """
        for first, last in stretches(self.resumed.step + 1, self.config.train.iters, self.config.eval.interval):
            batches = iter(self.loader.steps(first, last, self.config.data.workers))
            for step in range(first, last + 1):
                start = time.perf_counter()
                with self.watched(f"the data of step {step}"):
                    batch = next(batches)
                yield step, batch, time.perf_counter() - start

    def export(self, target: Path) -> None:
        """Write the model to `target` in `transformers` format."""
        folders = {VISION: self.config.model.hf_path, **{n: e.hf_path for n, e in self.config.model.encoders.items()}}
        changes, watchdog = export_changes(folders_of(self.config)), self.interpreter.watchdog
        with watchdog.waiting(lambda: "the export of the model, with all other ranks,"):
            export_model(
                *(self.modules, self.shapes, self.topology, target, folders, dtype_of(self.config), changes),
                working=watchdog.working,
            )


@dataclass(frozen=True, eq=False)
class _Sources:
    """What a rank reads from: weights by module, and data. Held-out data sets too: what is wrong with them is said
    before training, not after it.
    """

    weights: Mapping[str, StoredWeights]
    processor: Processor
    mixture: Mixture
    held_out: Mapping[str, Mixture]


def _open_together(config: Config, platform: Platform, watchdog: Watchdog) -> _Sources:
    """What this rank reads from, once all ranks have opened theirs, and the same. Raises `UserError` on every rank."""
    with watchdog.working():
        facts, sources, problem = settings_and_versions(config, platform), None, None
        try:
            sources = _open(config)
            facts |= files_of_model(config, sources.weights.values())
            facts |= data_sets([sources.mixture, *sources.held_out.values()])
        except UserError as error:
            problem = str(error)
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    require_agreement(Statement(facts, problem), store, rank, ranks, watchdog.waiting)
    assert sources is not None, "ranks agree only where none has a problem"
    return sources


def _open(config: Config) -> _Sources:
    """What this rank reads from, checked. Raises `UserError`."""
    shapes, *_ = checked(config, dist.get_world_size())
    sources = _Sources(
        _open_weights(config, shapes), open_processor(config), open_mixture(config), open_held_out(config)
    )
    if dist.get_rank() == REPORTER and config.export.hf_dir is not None:
        require_writable(config.export.hf_dir)
    return sources


def stretches(first: int, last: int, interval: int) -> Iterator[tuple[int, int]]:
    """The steps from `first` to `last` in stretches that end with multiples of `interval`; in one where that is 0.

    What is evaluated after such a step reads through the same groups of hosts as the steps do, so that none of these
    may be loading meanwhile.
    """
    while first <= last:
        end = last if interval == 0 else min(last, -(-first // interval) * interval)
        yield first, end
        first = end + 1


def _with_evaluations(resumed: Resumed, config: Config, topology: Topology) -> Resumed:
    """Its history with the evaluations that were made after the checkpoint was written, so that none is made twice."""
    if resumed.step == 0:
        return resumed
    more = on_first(topology.files, lambda: evaluations_since(resumed.history, resumed.step, config.log.dir))
    return replace(resumed, history=resumed.history + more)


def _open_weights(config: Config, shapes: Qwen25VLShapes) -> dict[str, StoredWeights]:
    """The stored weights of each module, opened and checked. Raises `UserError`."""
    further = {name: encoder.hf_path for name, encoder in config.model.encoders.items()}
    return open_modules(folders_of(config), shapes, config.train.seed) | open_encoders(further, shapes)


def _writer(config: Config, rank: int, resumed: Resumed) -> MetricsWriter | NullWriter:
    if rank != REPORTER:
        return NullWriter()
    writer = MetricsWriter(
        config.log.dir,
        config.train.iters,
        done=resumed.step,
        history=resumed.history,
        tensorboard=config.log.tensorboard,
    )
    (config.log.dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return writer
