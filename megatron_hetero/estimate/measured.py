"""Activation memory of a module's parts, measured on PyTorch's device `meta`. Pure.

A part is a layer, the merger of a layer's output, or what precedes or follows the layers. The torch module that trains
runs forward and backward once for each distinct part, setting and shard, on tensors that have shapes and lifetimes but
no memory, in groups that have sizes but exchange nothing. Autograd's hooks report saved tensors, and a dispatch mode
every allocation and its end. Added are the workspace of FlashAttention's kernel (`flash_workspace`), and that a
compiled function allocates its results alone.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_hetero.config.lora import LoraConfig
from megatron_hetero.config.optimizers import NONE, OffloadConfig, PrecisionConfig
from megatron_hetero.data.device import attention_params
from megatron_hetero.data.token_shards import SequenceShard, even_cuts
from megatron_hetero.estimate.delta_blocks import measured_rule
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
from megatron_hetero.models.layers.offload import OffloadSizes
from megatron_hetero.models.layers.overlapped import overlap_exchanges
from megatron_hetero.models.layers.parts import LayerCall
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.stages import EncoderInput, TextInput


class ModulePart(NamedTuple):
    """A part of a module. `first` and `last` precede and follow the layers; a `merger` follows a layer."""

    kind: Literal["first", "layer", "merger", "last"]
    layer: int = 0


FIRST, LAST = ModulePart("first"), ModulePart("last")


@dataclass(frozen=True)
class Measured:
    """A module as one of its ranks runs it: what measurements depend on, without settings and degrees that they do not.

    Attributes:
        module: in the smallest layout whose ranks do the same work, with default settings of optimizer and offload.
        gpu: whether it runs on a GPU.
        imbalance: tokens of this rank's experts, relative to the mean.
    """

    module: ModuleJob
    gpu: bool = True
    imbalance: float = 1.0

    @classmethod
    def of(cls, module: ModuleJob, *, gpu: bool, imbalance: float) -> Measured:
        """What is measured of a module of a job."""
        layout, settings = module.layout, module.settings
        tokens = layout.tp * layout.sp * layout.cp
        dp = math.lcm(tokens, *(math.prod(stated) for _, stated in layout.folds)) // tokens
        ranks = tuple(range(tokens * dp))
        layout = Layout(layout.tp, layout.sp, layout.cp, dp=dp, pp=1, ranks=ranks, folds=layout.folds)
        settings = replace(settings, parallel="", layers=(), zero=1, patches_per_call=0, lr=None, hf_path=None)
        settings = replace(settings, token=None, min_pixels=None, max_pixels=None, offload=OffloadConfig())
        settings = replace(settings, precision=PrecisionConfig(), lora=LoraConfig())  # The shape has adapters.
        small = replace(module, name="", prefix="", layout=layout, stages=(), settings=settings, optimizer=NONE)
        return cls(small, gpu, imbalance)

    @property
    def is_text(self) -> bool:
        """Whether it is the text module."""
        return self.module.role == TEXT

    @property
    def shape(self) -> Any:
        """Shape of the whole module."""
        return self.module.shape


def is_merged(measured: Measured, layer: int) -> bool:
    """Whether a merger follows a layer before the last."""
    return not measured.is_text and layer in (at for output, at in measured.shape.outputs.items() if output != ROWS)


@lru_cache(maxsize=256)
def _first_alike(measured: Measured) -> tuple[int, ...]:
    """For each layer, the first one with the same kind, merger, frozen and added tensors."""
    module, first = measured.module, dict[Any, int]()
    architecture = module.shape.architecture
    added = defaultdict[str, set[Any]](set)
    for name in filter(architecture.is_of_layer, architecture.tensors.keys() - architecture.in_folder.keys()):
        number, _, own = name.removeprefix(architecture.stored).partition(".")
        added[number].add((own, architecture.tensors[name]))
    found = []
    for n, layer in enumerate(architecture.layers):
        stored = f"{architecture.stored}{n}."
        frozen = frozenset(name for name in layer.tensors() if stored + name in module.frozen)
        found.append(first.setdefault((layer, is_merged(measured, n), frozen, frozenset(added[str(n)])), n))
    return tuple(found)


FP32 = 4
META = torch.device("meta")
_tensor = partial(torch.empty, device=META)


def part_of(
    measured: Measured, part: ModulePart, shard: SequenceShard, memo: dict[str, Any]
) -> tuple[Callable[[Tensor], Sequence[Tensor]], Tensor]:
    """The function that runs a part on a rank that works on `shard` and returns its outputs, and its input. `memo`:
    gets what a layer would take for a recomputation.
    """
    module, model = measured.module, _built(measured, part)
    if part == FIRST and measured.is_text:
        return partial(_embed, model), _tensor(shard.padded, dtype=torch.int64)
    if part == FIRST:
        patches = _tensor(shard.local, module.shape.patch_elements, dtype=module.dtype)
        return partial(_embed_patches, model, shard), patches
    hidden = _tensor(shard.local, 1, module.shape.hidden, dtype=module.dtype, requires_grad=module.passes_gradients)
    if part.kind == "layer":
        layer, plan = model.layers[0], _attention(shard)
        table = _tensor(2, shard.tokens, module.shape.rotary.width)
        return lambda hidden: [
            layer._once(table, plan, LayerCall(shard.tokens, ids=plan.ids, memo=memo), hidden)
        ], hidden
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
    normed = model.final_layernorm(hidden)  # Alive during the loss, as in the model's own forward pass.
    return [model.loss(batch, normed)]


@lru_cache(maxsize=256)
def _built(measured: Measured, part: ModulePart) -> Any:
    """A pipeline stage with the part alone."""
    module, shape, layout = measured.module, measured.shape, measured.module.layout
    degrees = {axis: layout.degrees[axis] for axis in ("tp", "sp", "cp")}
    degrees |= {axis: degree for view, of in layout.folds for axis, degree in zip(view.stated, of, strict=True)}

    def ranks(*axes: str) -> int:
        return math.prod(degrees.get(axis, 1) for axis in axes)

    ends = {FIRST: PipelineStage(0, 0, True, False), LAST: PipelineStage(shape.layers, shape.layers, False, True)}
    stage = ends[part] if part in ends else PipelineStage(part.layer, part.layer + 1, False, False)
    groups = module_groups(lambda *axes: SilentGroup(ranks(*axes)), None, layout.views)
    with META:
        model = module.model(module.site(groups, Platform(META, "local"), TORCH), stage)
    stored = {
        name: slices
        for view in layout.every_view
        for name, slices in module.weight_map(Share(0, ranks(*view.part_axes)), stage, view.name).items()
    }
    for name, parameter in model.named_parameters():
        if stored[stage.global_name(name)][0].name in module.frozen:
            parameter.requires_grad_(False)
        else:  # Gradients are added to those of earlier micro-batches, elsewhere.
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    # The kernel of the target device, without optional packages.
    device = "cuda" if measured.gpu else "cpu"
    for each in model.modules():
        if isinstance(each, PackedSelfAttention):
            name = choose_kernel(device, module.dtype, each.head_dim, FLASH_CAPABILITY, ())
            each.core_attention.kernel = torch_flash if name == "torch_flash" else partial(bucketed, attend=_fused)
        elif isinstance(each, DeltaNetModule):
            each.rule_for = lambda *_: measured_rule(device)
        elif isinstance(each, ExpertMLPModule):
            each.imbalance = measured.imbalance
    if module.settings.tp_overlap > 1:
        overlap_exchanges(model, module.settings.tp_overlap)
    return model


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _fused(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **_: Any) -> Tensor:
    """PyTorch's fused attention, which it does not choose on `meta`. It takes masks in the dtype of the queries."""
    mask = None if attn_mask is None else attn_mask.to(q.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(q, k, v, 0.0, is_causal, attn_mask=mask)[0]


def _attention(shard: SequenceShard) -> AttentionParams:
    """Attention inputs of a rank that works on a shard, the first of its groups."""
    if shard.lengths and (others := len(shard.cp_lengths) - 1):
        lengths = np.diff(even_cuts(sum(shard.lengths) - shard.member, others))
        shard = replace(shard, cp_lengths=(shard.member, *lengths.tolist()))
    return attention_params(shard, _ids(shard), META)


def _ids(shard: SequenceShard) -> TokenIds:
    return TokenIds(_tensor(shard.ranks, shard.local, dtype=torch.int64))


_NO_ATTENTION = AttentionParams(PackedSegments.of((), META), (), ())


@dataclass(frozen=True)
class PartBytes:
    """Device memory of a part. `saved`: what lives from its forward to its backward pass; `stays`: the tensors among it
    that are not offloaded, as they are too small or not autograd's. `passed`: its hidden output. `forward`: the most in
    its forward pass besides `saved`; `backward`: in its backward pass besides `saved` and `again`, what that
    recomputes. `memo`: what recomputation takes from the forward pass, see `LayerCall`.
    """

    saved: int
    stays: int = 0
    passed: int = 0
    forward: int = 0
    backward: int = 0
    again: int = 0
    memo: int = 0


def measure(measured: Measured, part: ModulePart, shard: SequenceShard) -> PartBytes:
    """Measure a part of a module on a rank that works on `shard`, without full recomputation."""
    part = part._replace(layer=_first_alike(measured)[part.layer])
    unused: dict[str, Any] = {"segments": AttentionSegments((), ()), "windows": (), "lengths": ()}
    if part.kind == "layer":
        attention = measured.shape.architecture.layers[part.layer].attention
        along = isinstance(attention, DeltaNet)
        unused.pop("lengths" if along else "windows" if attention.windowed else "segments")
    supervised = shard.supervised * (part == LAST)
    return _measured(_inside(measured), part, replace(shard, supervised=supervised, **unused))


@lru_cache(maxsize=256)
def _inside(measured: Measured) -> Measured:
    """Return what is measured inside of layers that are recomputed as a whole."""
    if measured.module.recompute.selective:
        return measured
    settings = replace(measured.module.settings, recompute="none")
    return replace(measured, module=replace(measured.module, settings=settings))


@lru_cache(maxsize=4096)
def _measured(measured: Measured, part: ModulePart, shard: SequenceShard) -> PartBytes:
    memory, memo = Memory(measured.gpu), dict[str, Any]()
    with without_processes(META), instead_of_compiled(memory.run_compiled):
        return memory.measure(*part_of(measured, part, shard, memo), memo)


class Memory(TorchDispatchMode):
    """Tracks the storages that tensors allocate. `gpu`: on a GPU, else on a CPU."""

    def __init__(self, gpu: bool) -> None:
        super().__init__()
        self.gpu = gpu
        self.live = self.peak = 0
        self._sizes, self._ends = dict[int, int](), dict[int, Any]()
        self._saved = WeakTensorKeyDictionary()
        self._packed: list[Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record what it allocates."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_layer_norm.default and not self.gpu:
            # A CPU saves mean and scale in the dtype of the input.
            out = (out[0], *(x.to(out[0].dtype) for x in out[1:]))
        self._hold(out, args, kwargs)
        if func is torch.ops.aten._flash_attention_backward.default:
            query, key, ends = args[1], args[2], args[6]
            work = flash_workspace(len(query), len(key), len(ends) - 1, query.shape[1], key.shape[1], query.shape[2])
            self.peak = max(self.peak, self.live + work)
        return out

    def run_compiled(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run `function(*inputs)` as compiled code, which allocates results and saved tensors only."""
        tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            function = partitioned(function, self.run_compiled)
        outer, self._packed = self._packed, []
        with _disable_current_modes():
            out = function(*inputs)
        self._hold((out, self._packed), inputs)
        self._packed = outer
        return out

    def measure(self, run: Callable[[Tensor], Sequence[Tensor]], given: Tensor, memo: dict[str, Any]) -> PartBytes:
        """Run a part forward and backward. The first output of `run` is passed on to the next part; `memo`: see
        `part_of`.
        """
        with self, saved_tensors_hooks(self._pack, lambda saved: saved):
            outs = run(given)
            kept, of_outs = {address_of(saved) for saved in self._saved}, {address_of(out) for out in outs}
            remembered = {address_of(x) for x in tree_leaves(list(map(vars, memo.values()))) if isinstance(x, Tensor)}
            of_memo = sum(self._sizes.get(address, 0) for address in remembered)
            memo.clear()
            others = sum(self._sizes.get(address, 0) for address in of_outs - kept)
            passed = outs[0].nbytes if outs[0].dim() == 3 else 0
            saved = [self._sizes[address] for address in kept if address in self._sizes]
            # What functions of our own keep without autograd, and caches, which outlive the backward pass.
            rest = self._sizes.keys() - kept - of_outs
            beside = [(self._ends[address], self._sizes[address]) for address in rest]
            outside = sum(saved) + others - passed
            forward, self.peak = self.peak - outside, self.live
            end = _Outcome.apply(*outs) if any(out.requires_grad for out in outs) else None
            del outs
            if end is not None:
                end.backward()
            backward = self.peak - outside
            # What outlives the backward pass is a cache shared by all layers and calls.
            del end
            given.grad = None
            stays = sum(size for storage, size in beside if storage() is None)
            forward, backward = forward - self.live - stays, backward - self.live - stays
        held = given.untyped_storage().nbytes()
        if address_of(given) in kept:
            saved.append(held)
        else:
            forward += held
        least = OffloadSizes.of(self.gpu).least
        small = sum(size for size in saved if size < least)
        return PartBytes(sum(saved) + stays, small + stays, passed, forward, backward, memo=of_memo)

    def _pack(self, tensor: Tensor) -> Tensor:
        saved = tensor.detach()
        self._saved[saved] = None  # until autograd frees it
        if self._packed is not None:
            self._packed.append(saved)
        return saved

    def _hold(self, out: Any, *given: Any) -> None:
        """Record the storages of outputs that are not views of inputs."""
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta and address_of(tensor) not in self._sizes:
                found = (address_of(x) for x in tree_leaves(given) if isinstance(x, Tensor))
                if address_of(tensor) not in found:
                    self._add(tensor.untyped_storage())

    def _add(self, storage: Any) -> None:
        address, size = storage._cdata, storage.nbytes()
        self._sizes[address], self._ends[address] = size, ref(storage, partial(self._end, address))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _end(self, address: int, _: Any) -> None:
        self.live -= self._sizes.pop(address)
        del self._ends[address]


class _Outcome(torch.autograd.Function):
    """Requests the gradients of all outputs, allocating each when it is needed."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.like = [(out.shape, out.dtype) for out in outs]
        return outs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)


def partitioned(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a compiler's backward pass and saved tensors; `run` executes that pass."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def call(*inputs: Any) -> Any:
        def without_functions(*others: Any) -> Any:
            rest = iter(others)
            return function(*(x if callable(x) else next(rest) for x in inputs))

        traced = aot_function(
            without_functions,
            fw_compiler=lambda gm, example_inputs: make_boxed_func(gm),
            bw_compiler=lambda gm, example_inputs: make_boxed_func(partial(run, gm)),
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        with warnings.catch_warnings(action="ignore"):  # It reads gradients of non-leaf tensors.
            out = traced(*(x for x in inputs if not callable(x)))
        return tuple(out) if isinstance(out, list) else out

    return call


def address_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata


def flash_workspace(queries: int, keys: int, segments: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Workspace of FlashAttention-2's backward pass in bytes: fp32 sums of query gradients with head dims rounded up to
    32, one number per query and head, room for 128 more queries per segment, and per-head gradients of half-precision
    keys and values where heads share them (`mha_varlen_bwd` in flash_api.cpp).
    """
    sums = FP32 * (queries + 128 * segments) * heads * (-(-head_dim // 32) * 32 + 1)
    return sums + 2 * 2 * keys * heads * head_dim * (heads != kv_heads)
