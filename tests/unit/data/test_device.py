"""A micro-batch moves to the device as a whole, and its inputs stay what they were."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.data.device import encoder_input, micro_batch_inputs, text_input, to_device
from megatron_hetero.data.token_ids import text_ids
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.layers.balance_loss import BalancedSamples
from megatron_hetero.schedule.contract import InChunks, MicroBatchInputs, chunks_of
from tests.unit.data.packs import partitioner, random_packs

META = torch.device("meta")


def micro_batch() -> MicroBatchInputs:
    """The first of two micro-batches of one call, whose patches come in chunks."""
    layouts = {name: Layout.parse("dp:1", 1) for name in ("vision", "text")}
    own = partitioner(layouts, dict.fromkeys(layouts, False), 0, runs=lambda count: {"vision": (range(count),)})
    packs = [tuple(random_packs("ragged", layouts["text"], seed)) for seed in range(2)]
    [call] = own.encoder_calls(packs)
    shard = own.text_shard(packs[0])
    assert shard is not None
    text = text_input({}, shard, {}) if not shard.tokens else None
    chunks = [encoder_input(each, torch.zeros(each.local, 4), text_ids(each, *[np.arange(each.tokens)] * 2))
              for each in call.shards] * 2  # fmt: skip
    first, _ = micro_batch_inputs([text, text], [call], [chunks])
    return first


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [tensor for each in fields(value) for tensor in tensors_of(getattr(value, each.name))]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for each in values for tensor in tensors_of(each)]


def test_all_tensors_move_and_one_stays_one() -> None:
    batch = micro_batch()
    moved = to_device(batch, META)
    assert isinstance(moved.inputs["vision"], InChunks) and moved.calls == {"vision": range(2)}
    assert moved.rows.keys() == batch.rows.keys() == {Edge("vision", "text")}
    before, after = tensors_of(batch.inputs), tensors_of(moved.inputs)
    assert len(before) == len(after) >= 10
    for one, other in zip(before, after, strict=True):
        assert other.device == META and (one.shape, one.dtype) == (other.shape, other.dtype)
    for chunk in chunks_of(moved.inputs["vision"]):
        full = chunk.attention.full
        assert full.cu_seqlens_q is full.cu_seqlens_kv and full.segments.queries


def test_what_is_there_is_not_copied() -> None:
    batch = micro_batch()
    moved = to_device(batch, torch.device("cpu"))
    assert [t.data_ptr() for t in tensors_of(batch.inputs)] == [t.data_ptr() for t in tensors_of(moved.inputs)]


def test_further_values_move_too() -> None:
    balanced = BalancedSamples(torch.zeros(3, dtype=torch.int64), torch.ones(2))
    moved = to_device(MicroBatchInputs({"text": balanced}), META).inputs["text"]
    assert isinstance(moved, BalancedSamples) and moved.by_token.device == moved.factors.device == META
