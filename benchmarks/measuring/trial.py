"""What a plan describes, built and run: one rank of a configuration with random weights, and the step that the plan
assumes, as the loader would make it, with synthetic tokens and patches. Neither weights nor data are read.

With the backend `fake` (of a `Platform` for hosts too) one process can be any rank of any world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.config.schema import Config
from megatron_hetero.data.loader import MicroBatch, StepBatch
from megatron_hetero.data.packing import IGNORED, PackedBatch
from megatron_hetero.data.partition import MicroBatchShare, StepPartitioner
from megatron_hetero.estimate.shards import AssumedBatch
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.family import EncoderShape
from megatron_hetero.models.weights import STD, stored_shapes
from megatron_hetero.train.trainer import Trainer
from pretrain_vlm import build_trainer

FAKE = "fake"
"""PyTorch's backend whose collectives do nothing."""
TOKENS = 50
"""Token ids are below that: any model has as many."""


def drawn_trainer(config: Config, platform: Platform, *, check: bool | None = None) -> Trainer:
    """This process's rank of a run of `config`, in the default process group. Raises `UserError`.

    `check`: whether groups are checked, which takes the other ranks; None: except on `fake`.
    """
    job = JobSpec.of(config, dist.get_world_size())
    weights = DrawnWeights(stored_shapes(job.shapes), job.dtype, platform.device)
    checks = platform.backend != FAKE if check is None else check
    watchdog = Watchdog.of_world(config.schedule.timeout_s, platform, "schedule.timeout_s")
    return build_trainer(job, platform, dict.fromkeys(job.shapes.modules, weights), watchdog, check=checks)


def assumed_step(trainer: Trainer) -> StepBatch:
    """A step of `trainer`, on the host."""
    partitioner, layouts = StepPartitioner.of(trainer.job, trainer.topology.rank), trainer.topology.layouts
    assumed = AssumedBatch.of(trainer.job)
    batch = assumed.job.batch
    shares = partitioner.step_shares([assumed.packs] * batch.micro_batches)
    pack = _pack(assumed) if partitioner.rank in layouts[TEXT] else None
    samples = batch.step_samples
    return StepBatch(
        micro_batches=tuple(MicroBatch(pack, share, _patches(trainer.job.shapes.encoders, share)) for share in shares),
        supervised=assumed.sample.supervised * samples,
        tokens=assumed.sample.tokens * samples,
        sizes={encoder: sizes * samples for encoder, sizes in assumed.sample.sizes.items()},
        sample_lengths=(assumed.sample.tokens,) * samples,
        encoder_loads=tuple(loads for share in shares for loads in share.loads.values()),
    )


def _pack(assumed: AssumedBatch) -> PackedBatch:
    samples, tokens, supervised = assumed.job.batch.samples, assumed.sample.tokens, assumed.sample.supervised
    ids = np.arange(samples * tokens) % TOKENS
    labels = np.full((samples, tokens), IGNORED, np.int64)
    answers = slice(tokens - 1 - supervised, tokens - 1)
    labels[:, answers] = ids.reshape(samples, tokens)[:, answers]
    return PackedBatch(
        input_ids=ids,
        labels=labels.ravel(),
        position_ids=np.tile(np.arange(tokens), (3, samples)),
        cu_seqlens=np.arange(samples + 1) * tokens,
        supervised_tokens=supervised * samples,
    )


def _patches(encoders: Mapping[str, EncoderShape], share: MicroBatchShare) -> dict[str, list[Tensor]]:
    """The patches that the rank embeds in each part."""
    found = {}
    for name in share.patches:
        shape, generator = encoders[name], torch.Generator().manual_seed(0)
        lengths = [part.embedded + part.padding for part in share.encoders[name]]
        found[name] = [torch.randn(length, shape.patch_elements, generator=generator) for length in lengths]
    return found


@dataclass(frozen=True)
class DrawnWeights:
    """A source of weights of `shapes`: normal ones, biases of 0, norms of 1, of `dtype` on `device`.

    Slices are drawn when they are read, so that ranks which hold the same slice hold different values: good for what
    one rank computes, not for a model.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        """The values of one slice: 1-D where the tensor is, else 2-D."""
        rows, shape = tensor_slice.rows[1] - tensor_slice.rows[0], self.shapes[tensor_slice.name]
        if len(shape) == 1:
            value = 0.0 if tensor_slice.name.endswith(".bias") else 1.0
            return torch.full((rows,), value, dtype=self.dtype, device=self.device)
        whole = torch.Size(shape[1:]).numel()
        columns = whole if tensor_slice.columns is None else tensor_slice.columns[1] - tensor_slice.columns[0]
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device).normal_(std=STD)

    def require_copy(self, copy: str, original: str, slices: Iterable[TensorSlice]) -> None:
        """Nothing is stored twice here."""
