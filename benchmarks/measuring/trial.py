"""What a plan describes, built and run: one rank of a configuration with random weights, and the step that the plan
assumes, as the loader would make it, with synthetic tokens and patches. Neither weights nor data are read.

With the backend `fake` (of a `Platform` for hosts too) one process can be any rank of any world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.config.schema import Config
from megatron_hetero.data.device import encoder_input, micro_batch_inputs, text_input
from megatron_hetero.data.loader import StepBatch
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.partition import EncoderCall, StepPartitioner
from megatron_hetero.data.records import Record
from megatron_hetero.estimate.shards import AssumedBatch
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.hf.weight_map import TensorSlice
from megatron_hetero.job.job import JobSpec
from megatron_hetero.models.stages import EncoderInput
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
    job, partitioner = trainer.job, StepPartitioner.of(trainer.job, trainer.topology.rank)
    assumed = AssumedBatch.of(job)
    calls = partitioner.encoder_calls([assumed.packs] * job.batch.micro_batches)
    shard, samples = partitioner.text_shard(assumed.packs), job.batch.step_samples
    text = None if shard is None else text_input(_samples(assumed), shard, job.outputs, balance=job.balance)
    return StepBatch(
        micro_batches=micro_batch_inputs(
            [text] * job.batch.micro_batches, calls, [_chunks(call, job.dtype) for call in calls]
        ),
        supervised=assumed.sample.supervised * samples,
        tokens=assumed.sample.tokens * samples,
        sizes={encoder: sizes * samples for encoder, sizes in assumed.sample.sizes.items()},
        sample_lengths=(assumed.sample.tokens,) * samples,
        encoder_loads=tuple(call.everyone.loads for call in calls),
    )


def _samples(assumed: AssumedBatch) -> dict[int, TokenizedSample]:
    """The samples of a pack, by number."""
    number, tokens, nothing = assumed.job.batch.samples, assumed.sample.tokens, np.zeros(0, np.int64)
    ids, positions = np.arange(number * tokens).reshape(number, tokens) % TOKENS, np.tile(np.arange(tokens), (3, 1))
    supervised, record = np.arange(tokens) >= tokens - assumed.sample.supervised, Record("plan", 0, "plan", (), ())
    return {i: TokenizedSample(ids[i], supervised, (), (), positions, nothing, nothing, record) for i in range(number)}


def _chunks(call: EncoderCall, dtype: torch.dtype) -> list[EncoderInput]:
    """The input of each chunk of a call, with patches where the rank embeds them."""
    shape: Any = call.everyone.shape
    generator, chunks = torch.Generator().manual_seed(0), list[EncoderInput]()
    for shard in call.shards:
        patches = None
        if call.exchange is not None:
            patches = torch.randn(shard.local, shape.patch_elements, generator=generator).to(dtype)
        chunks.append(encoder_input(shard, patches))
    return chunks


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
