"""Parts of modules on PyTorch's device `meta`, and the calls that run them as the interpreter does.

Tensors on `meta` have shapes and lifetimes, no memory and no values. Groups have sizes and exchange nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.distributed.local_group import SilentGroup
from megatron_hetero.distributed.module_groups import module_groups
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.hf.weight_map import Share
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.layout.stages import Stage
from megatron_hetero.layout.views import MAIN
from megatron_hetero.models.common.backend import TorchSpecProvider
from megatron_hetero.models.common.inputs import EncoderInput, TextInput
from megatron_hetero.models.layers.attention import AttentionPlan, TorchAttention
from megatron_hetero.models.layers.kernels import FLASH_CAPABILITY, bucketed, choose_kernel, torch_flash
from megatron_hetero.models.layers.overlapped import overlap_exchanges
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.stages.encoder import EncoderModel
from megatron_hetero.models.stages.text import TextModel
from megatron_hetero.names import ROWS
from megatron_hetero.planning.memory.parts import FIRST, LAST, MeasuredModule, Part
from megatron_hetero.planning.shards import SequenceShard, Spans

META = torch.device("meta")
_tensor = partial(torch.empty, device=META)

Run = Callable[[Tensor], Sequence[Tensor]]
"""From the input of a part to what it passes on, and the rows that it gives besides."""


def part_of(module: MeasuredModule, part: Part, shard: SequenceShard) -> tuple[Run, Tensor]:
    """What runs a part of a module on a rank that works on `shard`, and its input: hidden states, tokens or patches."""
    made, run = _built(module, part), partial
    if part == FIRST and module.is_text:
        return run(_embed, made), _tensor(shard.padded, dtype=torch.int64)
    if part == FIRST:
        patches = _tensor(shard.local, module.shape.patch_elements, dtype=module.dtype)
        return run(_embed_patches, made, shard), patches
    hidden = _tensor(shard.local, 1, module.shape.hidden, dtype=module.dtype, requires_grad=module.trains)
    if part == LAST:
        return (run(_loss, made, shard) if module.is_text else run(_merge, made)), hidden
    if part.kind == "merger":
        return run(_merge_between, made), hidden
    table = _tensor(2, shard.tokens, module.shape.rotary.head_dim)
    return run(_run_layer, made, _attention(module, shard), table), hidden


def _embed(made: Any, tokens: Tensor) -> list[Tensor]:
    none = _tensor(0, dtype=torch.int64)
    batch = TextInput(tokens, none, none, none, {ROWS: none}, _NO_ATTENTION)
    embedded = made.embed(batch)
    return [made.enter(batch, embedded, embedded.new_empty(0, embedded.shape[-1]))]


def _embed_patches(made: Any, shard: SequenceShard, patches: Tensor) -> list[Tensor]:
    positions = _tensor(made.shape.position_dims, shard.tokens, dtype=torch.int64)
    return [made.enter(EncoderInput(patches, positions, _NO_ATTENTION, 0))]


def _run_layer(made: Any, plan: AttentionPlan, table: Tensor, hidden: Tensor) -> list[Tensor]:
    return [made.layers[0](hidden, table, plan)]


def _merge_between(made: Any, hidden: Tensor) -> list[Tensor]:
    return [made.get_submodule(end.name)(hidden) for end in made.outputs]


def _loss(made: Any, shard: SequenceShard, hidden: Tensor) -> list[Tensor]:
    places = _tensor(shard.supervised, dtype=torch.int64)
    batch = TextInput(places, places, places, places, {}, _NO_ATTENTION)
    normed = made.final_layernorm(hidden)  # Held during the loss, as by the model's own forward pass.
    return [made.loss(batch, normed)]


def _merge(made: Any, hidden: Tensor) -> list[Tensor]:
    return [made.get_submodule(end.name)(hidden) for end in made.outputs]


@lru_cache(maxsize=256)
def _built(module: MeasuredModule, part: Part) -> Any:
    """The pipeline stage that has the part alone."""
    shape, architecture = module.shape, module.shape.architecture
    degrees = {"tp": module.tp, "sp": module.sp, "cp": module.cp}
    degrees |= {axis: degree for view, of in module.folds for axis, degree in zip(view.stated, of, strict=True)}
    ends = {FIRST: Stage(0, 0, True, False), LAST: Stage(shape.layers, shape.layers, False, True)}
    stage = ends[part] if part in ends else Stage(part.layer, part.layer + 1, False, False)
    site = Site(
        module_groups(
            lambda *axes: SilentGroup(math.prod(degrees.get(axis, 1) for axis in axes)),
            None,
            [fold.view for fold in module.folds],
        ),
        Platform(META, "local"),
        TorchSpecProvider(),
        module.dtype,
        module.sequence_parallel,
        module.recompute,
        module.compiled,
    )
    with META:
        made = (TextModel if module.is_text else EncoderModel)(shape, site, stage)
    stored = {
        name: slices
        for view in (MAIN, *(fold.view for fold in module.folds))
        for name, slices in architecture.weight_map(
            "", Share(0, math.prod(degrees.get(axis, 1) for axis in view.part_axes)), stage, view.name
        ).items()
    }
    for name, parameter in made.named_parameters():
        if stored[stage.global_name(name)][0].name in module.frozen:
            parameter.requires_grad_(False)
        else:  # Gradients are added to those of earlier micro-batches, elsewhere.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    for each in made.modules():
        if isinstance(each, TorchAttention):
            each.kernel = _kernel(module)
    if module.parts > 1:
        overlap_exchanges(made, module.parts)
    return made


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _kernel(module: MeasuredModule) -> Any:
    """The kernel of attention on the device that is planned for, without optional packages."""
    device = "cuda" if module.gpu else "cpu"
    name = choose_kernel(device, module.dtype, module.shape.rotary.head_dim, FLASH_CAPABILITY, ())
    return torch_flash if name == "torch_flash" else partial(bucketed, attend=_fused)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, scale: Any, **_: Any
) -> Tensor:
    """PyTorch's fused attention, which it does not choose by itself on `meta`. Boolean masks are converted to the dtype
    of the queries.
    """
    mask = None if attn_mask is None else attn_mask.to(q.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]


def _attention(module: MeasuredModule, shard: SequenceShard) -> AttentionPlan:
    """What the layers of a rank attend to. It is the first of its groups here; the second has all other tokens."""
    sp_lengths = (shard.tokens, shard.member - shard.tokens, *(0,) * module.sp)[: module.sp]
    cp_lengths = (shard.member,) * module.cp
    return AttentionPlan(_segments(shard.segments, cp_lengths), sp_lengths, cp_lengths, _segments(shard.windows))


def _segments(spans: Spans, cp_lengths: tuple[int, ...] = ()) -> PackedSegments:
    queries, keys = zip(*spans, strict=True) if spans else ((), ())
    index = np.zeros(sum(keys), np.int64) if len(cp_lengths) > 1 else None
    return PackedSegments.of_segments(AttentionSegments(queries, keys, index), META, cp_lengths)


_NO_ATTENTION = AttentionPlan(_segments(()), (), ())
