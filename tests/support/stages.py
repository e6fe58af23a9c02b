"""Pipeline stages run by hand, one after the other, on the workers of the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measuring.gradients import whole_gradient
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.optimizers import optimizer_kind
from megatron_hetero.data.device import encoder_input
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.token_shards import TokenShards
from megatron_hetero.groups.local_group import LocalGroup
from megatron_hetero.groups.megatron import module_groups, prepare, prepare_globals
from megatron_hetero.groups.platform import CPU, Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.communicators import GroupNeeds
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import ROWS, TEXT
from megatron_hetero.layout.pipeline import PipelineStage, cut_stages
from megatron_hetero.models.families.common import canonical_name
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.backend import TORCH, te_backend
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.layers.recompute import How
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.stages import TextInput, TextModel
from megatron_hetero.models.weights import prefix_of, stored_shapes
from megatron_hetero.step import family_module
from megatron_hetero.step.algorithms import SGD, AdamW, Algorithm
from megatron_hetero.step.gradients import scale_gradients
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.optimizer import build_shard_optimizer
from megatron_hetero.train.hf_export import Value, assemble, gather_parameters
from tests.support.shapes import shapes_of_folder

Arrays = dict[str, np.ndarray]
PLATFORM = Platform(CPU, "gloo")
IGNORED = -100
HOPPER = (9, 0)
OPTIMIZERS: dict[str, Algorithm] = {"adamw": AdamW(lr=1e-2, eps=1e-4, weight_decay=0.1), "sgd": SGD(lr=0.1)}


def _peer_at_stage(layout: Layout, rank: int, stage: int) -> int:
    """Return the rank of another pipeline stage with the other coordinates of `rank`."""
    return layout.rank_at(**layout.coordinate(rank)._asdict() | {"pp": stage})


def lone_site() -> Site:
    """Where a process without groups builds layers on the CPU, in fp32."""
    prepare(PLATFORM)
    groups = module_groups(lambda *_: LocalGroup((0,), 0, "test"), None)
    return Site(groups, PLATFORM, TORCH, torch.float32, sequence_parallel=True)


@dataclass(frozen=True)
class Case:
    """What is run: modules' layouts, and how the stages are cut."""

    folder: Path
    layouts: dict[str, str]
    split: tuple[int, ...] | None = None
    stages_per_rank: int = 1
    sequence_parallel: bool = True
    recompute: How | int = "none"
    chunk: int = 0
    zero: Literal[1, 2, 3] = 1
    freeze: tuple[str, ...] = ()
    optimizer: str = "sgd"
    backend: str = "torch"


class Trainee:
    """The modules of a case on this rank, with their optimizers."""

    def __init__(self, case: Case):
        prepare(PLATFORM)
        prepare_globals(0)
        world = dist.get_world_size()
        self.case = case
        self.shapes = shapes_of_folder(case.folder)
        self.layouts = {name: Layout.parse(text, world) for name, text in case.layouts.items()}
        needs = {TEXT: GroupNeeds(tied=self.shapes.text.tied)} if TEXT in self.layouts else {}
        self.topology = Topology.build(self.layouts, PLATFORM, needs=needs)
        weights = StoredWeights.open(case.folder, canonical_name)
        held = [name for name, layout in self.layouts.items() if dist.get_rank() in layout]
        self.modules = [module for name in held for module in self._build(name, weights)]
        algorithm = OPTIMIZERS[case.optimizer]
        optimizers = {m.name: build_shard_optimizer(m, algorithm) for m in self.modules if m.trained}
        self.optimizer = JointOptimizer(self.topology, self.modules, optimizers)

    def _build(self, name: str, weights: StoredWeights) -> tuple[TrainedModule, ...]:
        case, shape, prefix = self.case, self.shapes[name], prefix_of(name, self.shapes)
        frozen = Frozen.of(self.shapes, case.freeze).tensors
        module = ModuleJob(
            name=name,
            role=self.shapes.role(name),
            shape=shape,
            prefix=prefix,
            layout=self.layouts[name],
            stages=self._stages(name),
            frozen=frozenset(tensor for tensor in shape.architecture.tensors if prefix + tensor in frozen),
            settings=ModuleConfig(
                sequence_parallel=case.sequence_parallel, recompute=case.recompute, chunk=case.chunk, zero=case.zero
            ),
            dtype=torch.float32,
            optimizer=optimizer_kind(case.optimizer),
        )
        backend = TORCH if case.backend == "torch" else te_backend(HOPPER)
        with mock.patch.object(family_module, "choose_backend", return_value=backend):  # Which wants CUDA.
            return family_module.build_module(module, self.topology, weights)

    def _stages(self, name: str) -> tuple[PipelineStage, ...]:
        layers, pp = self.shapes[name].layers, self.layouts[name].pp
        return cut_stages(layers, pp, per_rank=self.case.stages_per_rank, split=self.case.split, module=name)

    @property
    def module(self) -> TrainedModule:
        """The only module of a case that has one."""
        (module,) = self.modules
        return module

    def stored(self, value: Value = TrainedModule.whole_weight) -> Arrays:
        """A value of every parameter by stored name, on rank 0."""
        parts = gather_parameters(self.modules, self.topology, value)
        return {name: tensor.numpy().copy() for name, tensor in assemble(parts, stored_shapes(self.shapes))}

    def gradients(self) -> Arrays:
        """The gradients in the buffers, zero where a parameter is frozen."""
        return self.stored(whole_gradient)

    def reduce(self, loss: Tensor, counts: bool) -> dict[str, Any]:
        """The one rule for gradients."""
        summary = self.optimizer.reduce(loss, loss_counts_here=counts).read()
        return {"loss": summary.loss_sum, "norms": summary.norms, "faults": summary.faults}


class Passes:
    """Forward and backward of one micro-batch through all stages of a module, in their order, on blocking messages.

    `enter(model)`: what the first stage takes besides the batch.
    """

    def __init__(self, module: TrainedModule, layout: Layout, batch: Any, enter: Callable[[Any], tuple[Tensor, ...]]):
        self.layout, self.batch, self.enter, self.rank = layout, batch, enter, dist.get_rank()
        self.chunks = [(chunk, chunk.stage) for chunk in module.chunks]
        self.passed: list[tuple[Tensor | None, Tensor]] = []

    def _beside(self, step: int) -> int:
        return _peer_at_stage(self.layout, self.rank, (self.layout.coordinate(self.rank).pp + step) % self.layout.pp)

    def forward(self) -> Tensor:
        """What the last of this rank's stages gave."""
        for model, stage in self.chunks:
            received = None
            if stage.is_first:
                inputs = self.enter(model)
            else:
                received = torch.empty(model.hidden_shape(self.batch))
                dist.recv(received, self._beside(-1))
                inputs = (received.requires_grad_(),)
            out = model(self.batch, *inputs)
            if not stage.is_last:
                assert out.shape == model.hidden_shape(self.batch)
                dist.send(out.detach().contiguous(), self._beside(1))
            self.passed.append((received, out))
        return self.passed[-1][1]

    def backward(self, gradient: Tensor | None = None) -> None:
        """`gradient`: of what the last stage gave, where that is no scalar."""
        for (_, stage), (received, out) in zip(reversed(self.chunks), reversed(self.passed), strict=True):
            if not stage.is_last:
                gradient = torch.empty_like(out)
                dist.recv(gradient, self._beside(1))
            if out.requires_grad:
                out.backward(gradient)
            if received is not None:
                assert received.grad is not None
                dist.send(received.grad.contiguous(), self._beside(-1))


# ---------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Packs:
    """The packs of one micro-batch, one for each replica: tokens, labels and positions of each, and all rows."""

    shapes: ModelShapes
    seeds: tuple[int, ...]

    @cached_property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of each sample of each pack."""
        return tuple((5 + seed % 4, 9, 3 + seed % 5) for seed in self.seeds)

    @cached_property
    def places(self) -> tuple[np.ndarray, ...]:
        """Where the rows of each pack go; some packs have none."""
        return tuple(np.array([1, 2, 7, 9][: 4 * (seed % 3 > 0)], np.int64) for seed in self.seeds)

    @cached_property
    def rows(self) -> Tensor:
        """All rows of all packs, [rows, hidden]."""
        parts = [self._random(s, 4).standard_normal((len(p), self.shapes.text.hidden)) for s, p in self._with_places]
        return torch.from_numpy(np.concatenate(parts)).float()

    @property
    def _with_places(self) -> Iterator[tuple[int, np.ndarray]]:
        return zip(self.seeds, self.places, strict=True)

    @staticmethod
    def _random(seed: int, what: int) -> np.random.Generator:
        return np.random.default_rng([seed, what])

    def input(self, shards: TokenShards, rank: int) -> TextInput:
        """What `rank`, of the first stage, reads."""
        share, replica = shards.shard(rank), shards.layout.replica_of(rank)
        seed, total = self.seeds[replica], sum(self.lengths[replica])
        tokens = self._random(seed, 0).integers(0, self.shapes.text.vocab, total)
        labels = self._random(seed, 1).integers(0, self.shapes.text.vocab, total)
        labels[self._random(seed, 2).random(total) < 0.5] = IGNORED
        positions = self._random(seed, 3).integers(0, 30, (3, total))
        own = labels[share.positions]
        supervised = np.flatnonzero(own != IGNORED)
        full = PackedSegments.of_segments(share.segments, CPU, share.cp_lengths)
        return TextInput(
            tokens=torch.from_numpy(np.pad(tokens[share.positions], (0, share.padded - share.tokens))),
            positions=torch.from_numpy(positions[:, share.positions].copy()),
            supervised=torch.from_numpy(supervised),
            targets=torch.from_numpy(own[supervised]),
            rows_at={ROWS: torch.from_numpy(share.rows_at["vision"])},
            attention=AttentionParams(full, share.sp_lengths, share.cp_lengths),
        )


def train_text(trainee: Trainee, seeds: Sequence[int]) -> tuple[Tensor, dict[int, np.ndarray]]:
    """Forward and backward of the packs of these seeds, in micro-batches of one for each replica. The sum of token
    losses on this rank, and the gradients of the rows that it took, by seed and number.
    """
    [module], [layout] = trainee.modules, trainee.layouts.values()
    rank, total, row_gradients = dist.get_rank(), torch.zeros(()), {}
    for start in range(0, len(seeds), layout.dp):
        packs = Packs(trainee.shapes, tuple(seeds[start : start + layout.dp]))
        sharded = trainee.case.sequence_parallel and layout.tp > 1
        shards = TokenShards(layout.stage(0), sharded, packs.lengths, {"vision": packs.places})
        first = _peer_at_stage(layout, rank, 0)
        batch, ids = packs.input(shards, first), shards.ownership("vision").held_by(first)
        rows = packs.rows[ids].requires_grad_()

        def enter(model: TextModel, batch: TextInput = batch, rows: Tensor = rows) -> tuple[Tensor, ...]:
            return model.embed(batch), rows

        passes = Passes(module, layout, batch, enter)
        out = passes.forward()
        if module.chunks[-1].stage.is_last:
            total += out.detach()
        passes.backward()
        if rows.grad is not None:
            row_gradients |= {1000 * start + int(i): g.numpy() for i, g in zip(ids, rows.grad, strict=True)}
    return total, row_gradients


def text(case: Case, seeds: Sequence[int]) -> dict[str, Any]:
    """Loss, norm and gradients of one step over the packs of these seeds."""
    trainee = Trainee(case)
    before = trainee.stored()
    loss, rows = train_text(trainee, seeds)
    counts = trainee.module.chunks[-1].stage.is_last and trainee.module.holders.rank() == 0
    summary = trainee.reduce(loss, counts)
    return summary | {"gradients": trainee.gradients(), "rows": rows, "before": before}


def steps(case: Case, seeds: Sequence[int], number: int) -> dict[str, Any]:
    """Weights after some steps, on rank 0; and this rank's tied weight, by the numbers of its coordinates."""
    trainee = Trainee(case)
    for step in range(1, number + 1):
        for module in trainee.modules:
            module.gradients.zero()
        loss, _ = train_text(trainee, [seed + 10 * step for seed in seeds])
        trainee.reduce(loss, True)
        scale_gradients(trainee.modules, 0.01)
        trainee.optimizer.update(1.0, step)
    module = trainee.module
    tied = None if module.tied is None else module.whole_weight(module.tied).numpy().copy()
    at = trainee.layouts["text"].coordinate(dist.get_rank())
    return {"weights": trainee.stored(), "tied": tied, "at": at, "copy": module.tied_copy is not None}


# -------------------------------------------------------------------------------------------------- vision

GRIDS = ((1, 4, 6), (1, 10, 8), (1, 2, 2), (1, 6, 12))


def vision(case: Case) -> dict[str, Any]:
    """Gradients of the sum of all rows, weighted at random, and the rows; the number of a row is its place."""
    trainee, rank = Trainee(case), dist.get_rank()
    shape, [layout], [module] = trainee.shapes.encoders["vision"], trainee.layouts.values(), trainee.modules
    assigned = tuple(tuple(range(replica, len(GRIDS), layout.dp)) for replica in range(layout.dp))
    sharded = case.sequence_parallel and layout.tp > 1
    shards = EncoderShards(shape, layout.stage(0), sharded, GRIDS, assigned)
    first = _peer_at_stage(layout, rank, 0)
    [share], ids = shards.shards(first), shards.ownership().held_by(first)
    units = sum(int(np.prod(grid)) for grid in GRIDS) // shape.unit
    random = torch.Generator().manual_seed(5)
    pixels = torch.randn(units, shape.unit * shape.patch_elements, generator=random)
    weights = torch.randn(units, shape.out_hidden, generator=random)
    own = torch.nn.functional.pad(pixels[ids].view(-1, shape.patch_elements), (0, 0, 0, share.padding))
    batch = encoder_input(share, own if module.chunks[0].stage.is_first else None)
    passes = Passes(module, layout, batch, lambda _: ())
    out = passes.forward()
    last = module.chunks[-1].stage.is_last
    passes.backward(weights[ids] if last else None)
    summary = trainee.reduce(torch.zeros(()), False)
    rows = {int(i): row.numpy().copy() for i, row in zip(ids, out.detach(), strict=True)} if last else {}
    return summary | {"gradients": trainee.gradients(), "rows": rows}


# ------------------------------------------------------------------------------------- loading and writing
