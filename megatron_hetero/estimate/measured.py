"""Measures the activation memory of a module's submodules by running them on PyTorch's device `meta`. Pure.

A *submodule* is a layer, the merger of a layer's output, or all torch modules before or after the layers. The torch
module of training runs forward and backward once for each distinct submodule, setting and shard, in groups that have
sizes but exchange nothing; `allocations` tracks its allocations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.optimizers import NONE, OffloadConfig, PrecisionConfig
from megatron_hetero.data.device import attention_params
from megatron_hetero.data.token_shards import SequenceShard, even_cuts
from megatron_hetero.estimate.allocations import META, Memory, SubmoduleBytes, measured_rule
from megatron_hetero.groups.local_group import SilentGroup
from megatron_hetero.groups.megatron import module_groups, without_processes
from megatron_hetero.groups.platform import Platform, instead_of_compiled
from megatron_hetero.hf.weight_map import Share
from megatron_hetero.job.module import ModuleJob
from megatron_hetero.layout.context import AttentionSegments
from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.names import ROWS, TEXT
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.layers.attention import AttentionParams, PackedSelfAttention
from megatron_hetero.models.layers.backend import TORCH
from megatron_hetero.models.layers.delta_net import DeltaNet, DeltaNetModule
from megatron_hetero.models.layers.dropout import TokenIds
from megatron_hetero.models.layers.experts import ExpertMLPModule
from megatron_hetero.models.layers.kernels import FLASH_CAPABILITY, bucketed, choose_kernel, torch_flash
from megatron_hetero.models.layers.linear import fuse_exchanges
from megatron_hetero.models.layers.parts import LayerCall
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.stages import EncoderInput, TextInput


class Submodule(NamedTuple):
    """A separately measured submodule: a layer, the merger of its output, or all modules before or after the layers."""

    kind: Literal["first", "layer", "merger", "last"]
    layer: int = 0


FIRST, LAST = Submodule("first"), Submodule("last")


@dataclass(frozen=True)
class Measured:
    """A module reduced to the settings and degrees on which measurements depend.

    Attributes:
        module: the module in the smallest layout whose ranks do the same work, with default settings of optimizer and
            offload.
        gpu: whether the module runs on a GPU.
        imbalance: the number of tokens of the local experts, relative to the mean.
    """

    module: ModuleJob
    gpu: bool = True
    imbalance: float = 1.0

    @classmethod
    def of(cls, module: ModuleJob, *, gpu: bool, imbalance: float) -> Measured:
        """Return a module of a job, reduced to the settings and degrees on which measurements depend."""
        layout, settings = module.layout, module.settings
        tokens = layout.tp * layout.sp * layout.cp
        dp = math.lcm(tokens, *(math.prod(stated) for _, stated in layout.folds)) // tokens
        ranks = tuple(range(tokens * dp))
        layout = Layout(layout.tp, layout.sp, layout.cp, dp=dp, pp=1, ranks=ranks, folds=layout.folds)
        settings = replace(settings, parallel="", layers=(), zero=1, patches_per_call=0, lr=None, hf_path=None)
        settings = replace(settings, token=None, min_pixels=None, max_pixels=None, offload=OffloadConfig())
        # `lora` can be reset, because the shape already has the adapters.
        settings = replace(settings, precision=PrecisionConfig(), lora=LoraConfig())
        small = replace(module, name="", prefix="", layout=layout, stages=(), settings=settings, optimizer=NONE)
        return cls(small, gpu, imbalance)

    @property
    def is_text(self) -> bool:
        """Whether this is the text module."""
        return self.module.role == TEXT

    @property
    def shape(self) -> Any:
        """The shape of the whole module."""
        return self.module.shape


def is_merged(measured: Measured, layer: int) -> bool:
    """Return whether a merger computes an encoder output other than `ROWS` from the output of `layer`."""
    if measured.is_text:
        return False
    return any(at == layer for output, at in measured.shape.outputs.items() if output != ROWS)


@lru_cache(maxsize=256)
def _first_equal(measured: Measured) -> tuple[int, ...]:
    """Return for each layer the number of the first layer with equal kind, merger, frozen tensors and added tensors."""
    module = measured.module
    architecture = module.shape.architecture
    added = defaultdict[str, set[Any]](set)
    for name in architecture.tensors.keys() - architecture.in_folder.keys():
        if architecture.is_of_layer(name):
            number, _, tensor = name.removeprefix(architecture.stored).partition(".")
            added[number].add((tensor, architecture.tensors[name]))
    first, result = dict[Any, int](), list[int]()
    for number, layer in enumerate(architecture.layers):
        stored = f"{architecture.stored}{number}."
        frozen = frozenset(name for name in layer.tensors() if stored + name in module.frozen)
        key = layer, is_merged(measured, number), frozen, frozenset(added[str(number)])
        result.append(first.setdefault(key, number))
    return tuple(result)


_tensor = partial(torch.empty, device=META)


def _callable_of(
    measured: Measured, submodule: Submodule, shard: SequenceShard, memo: dict[str, Any]
) -> tuple[Callable[[Tensor], Sequence[Tensor]], Tensor]:
    """Return a function that maps the input of a submodule to its outputs, and the input on a rank with `shard`. The
    function stores in `memo` the tensors that a recomputation of a layer would use.
    """
    module, model = measured.module, _built(measured, submodule)
    if submodule == FIRST and measured.is_text:
        return partial(_embed, model), _tensor(shard.padded, dtype=torch.int64)
    if submodule == FIRST:
        patches = _tensor(shard.local, module.shape.patch_elements, dtype=module.dtype)
        return partial(_embed_patches, model, shard), patches
    hidden = _tensor(shard.local, 1, module.shape.hidden, dtype=module.dtype, requires_grad=module.passes_gradients)
    if submodule.kind == "layer":
        layer, attention = model.layers[0], _attention(shard)
        table = _tensor(2, shard.tokens, module.shape.rotary.width)

        def run_layer(hidden: Tensor) -> list[Tensor]:
            return [layer._once(table, attention, LayerCall(shard.tokens, ids=attention.ids, memo=memo), hidden)]

        return run_layer, hidden
    if measured.is_text:
        return partial(_loss, model, shard), hidden
    ids = _ids(shard)
    return lambda hidden: [model.get_submodule(end.name)(hidden, ids) for end in model.outputs], hidden


def _embed(model: Any, tokens: Tensor) -> list[Tensor]:
    none = _tensor(0, dtype=torch.int64)
    batch = TextInput(tokens, none, none, none, {ROWS: none}, _NO_ATTENTION)
    embedded = model.embed(batch)
    return [model.enter(batch, embedded, embedded.new_empty(0, embedded.shape[-1]))]


def _embed_patches(model: Any, shard: SequenceShard, patches: Tensor) -> list[Tensor]:
    positions = _tensor(model.shape.position_dims, shard.tokens, dtype=torch.int64)
    return [model.enter(EncoderInput(patches, positions, _NO_ATTENTION, 0))]


def _loss(model: Any, shard: SequenceShard, hidden: Tensor) -> list[Tensor]:
    places = _tensor(shard.supervised, dtype=torch.int64)
    batch = TextInput(places, places, places, places, {}, _NO_ATTENTION)
    normed = model.final_layernorm(hidden)  # `normed` is live during the loss, as in the model's forward pass.
    return [model.loss(batch, normed)]


@lru_cache(maxsize=256)
def _built(measured: Measured, submodule: Submodule) -> Any:
    """Build a pipeline stage on `meta` that consists of only the submodule."""
    module, shape, layout = measured.module, measured.shape, measured.module.layout
    degrees = {axis: layout.degrees[axis] for axis in ("tp", "sp", "cp")}
    for view, stated in layout.folds:
        degrees |= zip(view.stated, stated, strict=True)

    def ranks(*axes: str) -> int:
        return math.prod(degrees.get(axis, 1) for axis in axes)

    ends = {FIRST: PipelineStage(0, 0, True, False), LAST: PipelineStage(shape.layers, shape.layers, False, True)}
    layer = submodule.layer
    stage = ends[submodule] if submodule in ends else PipelineStage(layer, layer + 1, False, False)
    groups = module_groups(lambda *axes: SilentGroup(ranks(*axes)), None, layout.views)
    with META:
        model = module.model(module.site(groups, Platform(META, "local"), TORCH), stage)
    stored = {
        name: slices
        for view in layout.every_view
        for name, slices in module.weight_map(Share(0, ranks(*view.shard_axes)), stage, view.name).items()
    }
    for name, parameter in model.named_parameters():
        if stored[stage.global_name(name)][0].name in module.frozen:
            parameter.requires_grad_(False)
        else:  # Drop gradients: in training they are accumulated in buffers, which `parameters` counts.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    # Choose the kernels of the target device, without optional packages.
    device = "cuda" if measured.gpu else "cpu"
    for each in model.modules():
        if isinstance(each, PackedSelfAttention):
            name = choose_kernel(device, module.dtype, each.head_dim, FLASH_CAPABILITY, ())
            each.core_attention.kernel = torch_flash if name == "torch_flash" else partial(bucketed, attend=_fused)
        elif isinstance(each, DeltaNetModule):
            each.rule_for = lambda *_: measured_rule(device)
        elif isinstance(each, ExpertMLPModule):
            each.imbalance = measured.imbalance
    if module.settings.tp_overlap:
        fuse_exchanges(model, gpu=measured.gpu)
    return model


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _fused(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **_: Any) -> Tensor:
    """Run PyTorch's fused CPU attention, which PyTorch does not choose on `meta`, and return the attention output."""
    mask = None if attn_mask is None else attn_mask.to(q.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(q, k, v, 0.0, is_causal, attn_mask=mask)[0]


def _attention(shard: SequenceShard) -> AttentionParams:
    """Return the attention inputs of the first rank of each group; the other cp ranks share the remaining tokens."""
    if shard.lengths and (others := len(shard.cp_lengths) - 1):
        lengths = np.diff(even_cuts(sum(shard.lengths) - shard.member, others))
        shard = replace(shard, cp_lengths=(shard.member, *lengths.tolist()))
    return attention_params(shard, _ids(shard), META)


def _ids(shard: SequenceShard) -> TokenIds:
    return TokenIds(_tensor(shard.ranks, shard.local, dtype=torch.int64))


_NO_ATTENTION = AttentionParams(PackedSegments.of((), META), (), ())


def measure(measured: Measured, submodule: Submodule, shard: SequenceShard) -> SubmoduleBytes:
    """Return the measured memory of a submodule on a rank with `shard`, without full recomputation."""
    submodule = submodule._replace(layer=_first_equal(measured)[submodule.layer])
    # Reset fields of the shard that the submodule does not read, so that equal measurements share a cache entry.
    unused: dict[str, Any] = {"segments": AttentionSegments((), ()), "windows": (), "lengths": ()}
    if submodule.kind == "layer":
        attention = measured.shape.architecture.layers[submodule.layer].attention
        if isinstance(attention, DeltaNet):
            unused.pop("lengths")
        else:
            unused.pop("windows" if attention.windowed else "segments")
    supervised = shard.supervised if submodule == LAST else 0
    return _measured(_without_full_recompute(measured), submodule, replace(shard, supervised=supervised, **unused))


@lru_cache(maxsize=256)
def _without_full_recompute(measured: Measured) -> Measured:
    """Return the module without full recomputation of layers."""
    if measured.module.recompute.selective:
        return measured
    settings = replace(measured.module.settings, recompute="none")
    return replace(measured, module=replace(measured.module, settings=settings))


@lru_cache(maxsize=4096)
def _measured(measured: Measured, submodule: Submodule, shard: SequenceShard) -> SubmoduleBytes:
    memory, memo = Memory(measured.gpu, measured.module.cudnn), dict[str, Any]()
    with without_processes(META), instead_of_compiled(memory.run_compiled):
        return memory.measure(*_callable_of(measured, submodule, shard, memo), memo)
