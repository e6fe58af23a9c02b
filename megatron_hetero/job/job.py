"""Binds a configuration to a world of ranks: shapes, layouts, batch and schedule, checked against each other. Pure:
needs neither Megatron-Core nor a process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

import torch

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.fields import unused, wrong
from megatron_hetero.config.optimizers import OPTIMIZERS, OptimizerKind
from megatron_hetero.config.schema import Config
from megatron_hetero.job.module import DTYPES, ModuleJob
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.communicators import GroupNeeds
from megatron_hetero.layout.grammar import did_you_mean
from megatron_hetero.layout.graph import Edge, Graph
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.modules import resolve
from megatron_hetero.layout.names import TEXT
from megatron_hetero.layout.pipeline import PipelineStage, even_split, stage_of
from megatron_hetero.models.adapters import with_adapters
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.layers.parts import FORWARD, Tokens
from megatron_hetero.models.shapes import ModelShapes, assumed_sample
from megatron_hetero.schedule.builders import build_schedule, last_entered
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.program import Schedule
from megatron_hetero.schedule.settings import ScheduleSettings, resolve_settings, sharing_encoders

MAX_TURNS = 1 << 15
"""Maximum number of stages times micro-batches in a step: schedules are built and checked action by action."""
SCHEDULES = 32
"""Maximum number of schedules in the cache."""


@dataclass(frozen=True)
class BatchShape:
    """The shape of a step's batch: each of `replicas` of the text module has `micro_batches` micro-batches of `samples`
    samples. `end`: the length of a finite stream of samples; its last steps may have fewer samples, or none.
    """

    replicas: int
    micro_batches: int
    samples: int
    end: int | None = None

    @property
    def step_samples(self) -> int:
        """The number of samples in one step, the global batch size."""
        return self.replicas * self.micro_batches * self.samples

    def step(self, step: int) -> range:
        """Return the numbers of all samples in `step`. Samples are numbered from 0, steps from 1."""
        return samples_of(step, self.step_samples, self.end)

    def numbers(self, step: int, replica: int, micro_batch: int) -> range:
        """Return the numbers of the samples on which a replica trains in a micro-batch of `step`."""
        first = (micro_batch * self.replicas + replica) * self.samples
        return self.step(step)[first : first + self.samples]

    def once(self, samples: int) -> Self:
        """Return the shape for reading a stream of `samples` samples once. A step has no more micro-batches than these
        samples need.
        """
        needed = max(1, -(-samples // (self.replicas * self.samples)))
        return replace(self, micro_batches=min(self.micro_batches, needed), end=samples)


def samples_of(step: int, size: int, end: int | None) -> range:
    """Return the numbers of the samples in `step` (from 1) of `size` samples. `end`: the length of a finite stream."""
    last = step * size
    return range(last - size, last) if end is None else range(end)[last - size : last]


@dataclass(frozen=True)
class Budget:
    """Limits on a text replica's micro-batch: `tokens` without padding; `patches` per encoder (None: no limit)."""

    tokens: int
    patches: int | None = None


@dataclass(frozen=True, eq=False)
class JobSpec:
    """A configuration bound to a world of ranks.

    Attributes:
        config: the configuration.
        folders: the folders of the model, without further encoders.
        shapes: the shapes of all modules.
        modules: all modules by name, encoders first.
        batch: the shape of a step's batch. With a `budget` it is the shape that section `plan` assumes; real steps have
            as many micro-batches as their samples need.
        frozen: the tensors that do not train.
    """

    config: Config
    folders: ModelFolders
    shapes: ModelShapes
    modules: Mapping[str, ModuleJob]
    batch: BatchShape
    frozen: Frozen

    @classmethod
    def of(cls, config: Config, world_size: int) -> JobSpec:
        """Return the job of a configuration, with all settings checked against the model. Raises `UserError`.

        `schedule.waves` must be resolved (`estimate.estimate.with_waves`).
        """
        model = config.model
        folders = ModelFolders.read(model.hf_path, model.hf_path_vision, model.fresh_projector)
        shapes = ModelShapes.of(folders, config.further_folders)
        _require_modules(config, shapes)
        shapes = with_adapters(shapes, config.modules, config.train.seed)
        _require_experts(config, shapes)
        _require_used_rate(config, shapes)
        frozen = Frozen.of(shapes, model.freeze, model.train)
        _require_trained_projectors(config, shapes, frozen)
        texts = {name: row.parallel for name, row in config.modules.items() if row.parallel}
        layouts = resolve(texts, shapes.module_shapes(), world_size, flags=True)
        batch = _batch_shape(config, shapes, layouts[TEXT])
        fixed = batch.micro_batches if budget_of(config) is None else None
        resolve_settings(_schedule_settings(config), layouts, batch.micro_batches, place="schedule", maximum=fixed)
        modules = {name: ModuleJob.of(name, config, shapes, layout, frozen) for name, layout in layouts.items()}
        job = cls(config, folders, shapes, modules, batch, frozen)
        job.require_turns(MAX_TURNS)
        return job

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layouts of all modules, by name."""
        return {name: module.layout for name, module in self.modules.items()}

    @cached_property
    def stages(self) -> dict[str, tuple[PipelineStage, ...]]:
        """The pipeline stages of all modules, by name."""
        return {name: module.stages for name, module in self.modules.items()}

    @property
    def text(self) -> ModuleJob:
        """The job of the text module."""
        return self.modules[TEXT]

    @property
    def budget(self) -> Budget | None:
        """The limits on a micro-batch in tokens and patches; None if it has a fixed number of samples."""
        return budget_of(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return DTYPES[self.config.model.dtype]

    @property
    def transport(self) -> torch.dtype:
        """The dtype in which rows are sent between modules."""
        return torch.bfloat16 if self.config.boundary.transport == "bfloat16" else self.dtype

    @property
    def row_bytes(self) -> int:
        """The number of bytes of a row in transit between modules."""
        return self.shapes.text.hidden * self.transport.itemsize

    @property
    def optimizer(self) -> OptimizerKind:
        """The kind of the optimizer, such as AdamW."""
        return OPTIMIZERS[self.config.optimizer.name]

    @cached_property
    def sequence_parallel(self) -> dict[str, bool]:
        """Whether activations are split along the sequence over tp, by module."""
        return {name: module.sequence_parallel for name, module in self.modules.items()}

    @cached_property
    def edges(self) -> dict[Edge, tuple[str, ...]]:
        """The edges from encoders to the text module, each with the names of the outputs that cross it. All outputs
        between the same two stages share an edge.
        """
        outputs_by_edge: dict[Edge, list[str]] = {}
        for name, shape in self.shapes.encoders.items():
            for output, layer in shape.outputs.items():
                entry = self.shapes.text.entry_layer(output)
                assert entry is not None, "outputs that the text module does not take were refused"
                stages = self.stages[name]
                target_stage = stage_of(self.stages[TEXT], entry)
                edge = Edge.of(name, stage_of(stages, layer), len(stages), TEXT, target_stage)
                outputs_by_edge.setdefault(edge, []).append(output)
        return {edge: tuple(outputs) for edge, outputs in outputs_by_edge.items()}

    @property
    def outputs(self) -> dict[str, tuple[str, ...]]:
        """The names of the outputs of each encoder."""
        return {name: tuple(shape.outputs) for name, shape in self.shapes.encoders.items()}

    @property
    def patch_limits(self) -> dict[str, int]:
        """The maximum number of patches of a rank in one call, for each encoder that has such a limit."""
        limits = {name: module.settings.patches_per_call for name, module in self.modules.items()}
        return {name: limit for name, limit in limits.items() if limit}

    def text_work(self, tokens: int) -> int:
        """Return the FLOPs of a forward pass of the text module for a sample of `tokens` tokens."""
        return self.shapes.text.architecture.operations(Tokens([tokens]), passes=FORWARD)

    @cached_property
    def schedule(self) -> Schedule:
        """The checked schedule of a step of `batch`. Raises `UserError` if settings and layouts do not fit."""
        return self.schedule_of(self.batch.micro_batches)

    @property
    def waves_text(self) -> str:
        """A text with the size of waves, to be appended to a sentence; empty if each has a single micro-batch."""
        window = max((each.window for each in self.schedule.encoders if each.style == "waves"), default=1)
        return f", encoded in waves of {window} micro-batches" if window > 1 else ""

    def schedule_of(self, micro_batches: int, *, evaluation: bool = False) -> Schedule:
        """Return the checked schedule of a training step of `micro_batches`, or of an `evaluation` without backward
        passes. Raises `UserError` if settings and layouts do not fit.
        """
        self._require_rows_enter_early()
        frozen = [name for name in self.shapes.encoders if not self.modules[name].trains]
        forward_only = self.layouts if evaluation else frozen
        layouts, settings = tuple(self.layouts.items()), _schedule_settings(self.config)
        return _checked_schedule(layouts, micro_batches, settings, tuple(forward_only), tuple(self.edges))

    def encoder_calls(self, micro_batches: int, *, evaluation: bool = False) -> dict[str, tuple[range, ...]]:
        """Return, for each encoder, the ranges of micro-batches that it may encode in one call."""
        schedule = self.schedule_of(micro_batches, evaluation=evaluation)
        return {name: schedule.in_one_call(name) for name in self.shapes.encoders}

    def _require_rows_enter_early(self) -> None:
        """Check that rows of encoders that run ahead enter only stages that schedules support. Raises `UserError` with
        a suggested split of layers.
        """
        text, stages, taking_turns = self.layouts[TEXT], self.stages[TEXT], sharing_encoders(self.layouts, TEXT)
        virtual = len(stages) // text.pp
        ahead = [edge for edge in self.edges if edge.source not in taking_turns]
        late = next((edge for edge in ahead if edge.target_coordinate(text) > last_entered(virtual)), None)
        if late is None:
            return
        entries = [self.shapes.text.entry_layer(output) or 0 for edge in self.edges for output in self.edges[edge]]
        first, rest = max(entries) + 1, len(stages) - 1
        fix = "leave schedule.virtual_stages out" if virtual > 1 else "lower pp"
        if (left := self.shapes.text.layers - first) >= rest:
            fix = f"try --{TEXT}-layers {' '.join(map(str, (first, *even_split(left, rest))))}, or {fix}"
        where = f"{TEXT} stages (--{TEXT}-layers, --schedule.virtual_stages)"
        found = f"rows of {late.source} that enter stage {late.target_stage} ({stages[late.target_stage or 0]})"
        expected, turns = f"all layers that rows enter (0-{first - 1}) on the first stage", f"those of {TEXT} in turn"
        why = f"{late.source} runs ahead on its own ranks and would wait for {turns}, while they wait for each other"
        raise UserError.at(where, found=found, expected=expected, because=why, fix=fix)

    def require_turns(self, maximum: int) -> None:
        """Check that stages times micro-batches in a step are at most `maximum`. Raises `UserError`."""
        batch, stages = self.batch, sum(map(len, self.stages.values()))
        micro_batches = max(1, maximum // stages)
        if batch.micro_batches > micro_batches:
            setting, fitting = "train.global_batch_size", batch.replicas * batch.samples * micro_batches
            found = f"{self.config.train.global_batch_size}, {batch.micro_batches} micro-batches of each replica"
            because = f"the turns of all {stages} stages in a step are planned, one by one"
            fix = f"raise {micro_batch_setting(self.config)} or dp of text, or try --{setting} {fitting}"
            raise wrong(setting, found, f"{fitting} or less, {micro_batches} micro-batches", because, fix)

    @property
    def balance(self) -> float:
        """The weight of the load-balancing loss of experts: its coefficient times experts / (sparse layers)²."""
        text = self.shapes.text
        experts, sparse = text.counts.get("experts", 0), len(text.architecture.layers_in(EXPERTS.name))
        return self.config.model.router_aux_loss_coef * experts / sparse**2 if sparse else 0.0

    @property
    def graph(self) -> Graph:
        """The graph of modules, with its edges and the width and dtypes of rows."""
        return Graph(tuple(self.edges), self.shapes.text.hidden, self.dtype, self.transport, self.edges)

    @property
    def needs(self) -> dict[str, GroupNeeds]:
        """The process groups that each module needs besides the groups along its axes."""
        return {
            name: GroupNeeds(
                tied=name == TEXT and self.shapes.text.tied,
                interleaved=name == TEXT and self.config.schedule.virtual_stages > 1,
                exchanging=any(layer.attention.exchanges_over_cp for layer in self.shapes[name].architecture.layers),
            )
            for name in self.modules
        }


@lru_cache(maxsize=SCHEDULES)
def _checked_schedule(
    layouts: tuple[tuple[str, Layout], ...],
    micro_batches: int,
    settings: ScheduleSettings,
    forward_only: tuple[str, ...],
    edges: tuple[Edge, ...],
) -> Schedule:
    """Return a checked schedule. The result is cached, because most settings that a search varies do not change it, and
    steps of a token budget repeat.
    """
    schedule = build_schedule(dict(layouts), micro_batches, settings, text=TEXT, forward_only=forward_only, edges=edges)
    check_schedule(schedule)
    return schedule


def _require_modules(config: Config, shapes: ModelShapes) -> None:
    """Check that all modules with settings exist in the model. Raises `UserError`."""
    for name, row in config.modules.items():
        if name not in shapes.modules:
            flag = "".join(f"-{setting}" for setting in row.given[:1])
            where, expected = f"modules.{name} (--{name}{flag})", f"one of {', '.join(shapes.modules)}"
            found = f"module `{name}`{did_you_mean(name, shapes.modules)}"
            because, fix = "the model has no other modules", "rename or remove it, or set hf_path of a further encoder"
            raise UserError.at(where, found=found, expected=expected, because=because, fix=fix)


def _require_trained_projectors(config: Config, shapes: ModelShapes, frozen: Frozen) -> None:
    """Check that a projector trains if `optimizer.lr_projector` is set. Raises `UserError`."""
    projectors, rate = [shapes.subsets_of(name)[-1] for name in shapes.encoders], config.optimizer.lr_projector
    if rate is not None and frozen.subsets.issuperset(projectors):
        why, fix = f"model.freeze and model.train leave {', '.join(projectors)} frozen", "remove it, or train one"
        raise unused("optimizer.lr_projector", rate, why, fix)


def _require_used_rate(config: Config, shapes: ModelShapes) -> None:
    """Check that `optimizer.lr` has an effect: on modules or projectors without another learning rate, or on the
    scaling of `optimizer.min_lr`. Raises `UserError`.
    """
    optimizer = config.optimizer
    others_set = optimizer.lr_projector is not None and all(config.module(name).lr for name in shapes.modules)
    if others_set and not optimizer.min_lr and "lr" in optimizer.given:
        why = "all modules and projectors have other learning rates"
        raise unused("optimizer.lr", optimizer.lr, why, "remove it, or one of theirs")


def _require_experts(config: Config, shapes: ModelShapes) -> None:
    """Check that the text module has experts if `model.router_aux_loss_coef` is set. Raises `UserError`."""
    coefficient = config.model.router_aux_loss_coef
    if coefficient and "experts" not in shapes.text.counts:
        raise wrong("model.router_aux_loss_coef", coefficient, "0", "the text module has no experts", "remove it")


def _schedule_settings(config: Config) -> ScheduleSettings:
    chosen = config.schedule
    assert chosen.waves != "auto", "the plan resolves `auto` before anything else reads it"
    return ScheduleSettings(chosen.kind, chosen.waves, chosen.run_ahead, chosen.virtual_stages)


def micro_batch_setting(config: Config) -> str:
    """Return the name of the setting that determines the size of a micro-batch."""
    return "train.micro_batch_size" if budget_of(config) is None else "train.tokens_per_micro_batch"


def budget_of(config: Config) -> Budget | None:
    """Return the limits of a micro-batch in tokens and patches; None if the configuration has none."""
    tokens, patches = config.train.tokens_per_micro_batch, config.train.patches_per_micro_batch
    return None if tokens is None else Budget(tokens, patches)


def _batch_shape(config: Config, shapes: ModelShapes, text: Layout) -> BatchShape:
    setting, replicas = "train.global_batch_size", text.dp
    budget, total, micro = budget_of(config), config.train.global_batch_size, config.train.micro_batch_size
    if budget is not None:
        if total < replicas:
            because, fix = f"each of {replicas} text replicas trains on some", f"try --{setting} {replicas}"
            raise wrong(setting, total, f"{replicas} or more", because, fix)
        samples = assumed_sample(config.plan, shapes).fitting(budget.tokens, budget.patches, shapes)
        return BatchShape(replicas, -(-total // (replicas * samples)), samples)
    if total % (share := replicas * micro):
        because = f"{replicas} replicas of the text module train on micro-batches of {micro}"
        fix = f"try --{setting} {-(-total // share) * share}"
        raise wrong(setting, total, f"a multiple of {share}", because, fix)
    return BatchShape(replicas, total // share, micro)
